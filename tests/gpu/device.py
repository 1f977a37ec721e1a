"""What the GPU tests share: the mark, work that keeps the device busy, and a watch on waiting."""

from __future__ import annotations

import math
import os
from contextlib import contextmanager

os.environ.setdefault("NO_ALBUMENTATIONS_UPDATE", "1")

import numpy as np
import pytest
import torch
from augment.batches import in_worker, keys, left_to_device
from torch.utils.data import Dataset

from lightning_fastdata.augment.transform import as_batch_transform

CUDA = torch.device("cuda", 0)
needs_cuda = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@contextmanager
def no_waiting():
    """Make an error of every operation in which the host waits for the device."""
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(before)


class DeviceWork:
    """Matrix products that keep the device busy for a given time while the host goes on.

    The driver's queue holds about a thousand launches; then the host has to wait. So each product
    of the default size takes long: 10 to 100 ms. Smaller ones are for exact times.
    """

    def __init__(self, size=8192):
        self.left = torch.ones(size, size, device=CUDA)
        self.right = torch.ones_like(self.left)
        self.out = torch.empty_like(self.left)
        self._multiply(10)  # clocks go up
        began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        began.record()
        self._multiply(10)
        ended.record()
        torch.cuda.synchronize()
        self.product_ms = began.elapsed_time(ended) / 10

    def _multiply(self, times):
        for _ in range(times):
            torch.mm(self.left, self.right, out=self.out)

    def __call__(self, ms):
        """Queue about that many milliseconds of work and return the event at its end."""
        self._multiply(math.ceil(ms / self.product_ms))
        done = torch.cuda.Event()
        done.record()
        return done


def pictures(count=6, height=96, width=96, channels=3, dtype=np.uint8):
    """Smooth pictures with edges and noise, like photographs: arrays ``[H, W, C]``."""
    y, x = np.mgrid[:height, :width]
    made = []
    for number in range(count):
        rng = np.random.default_rng(number)
        waves = [
            np.sin(x / rng.uniform(5, 30) + phase) + np.cos(y / rng.uniform(5, 30))
            for phase in rng.uniform(0, 6, channels)
        ]
        picture = 127 + 55 * np.stack(waves, -1) + rng.normal(0, 6, (height, width, channels))
        picture[height // 3 : height // 2, width // 4 : width // 2] = rng.uniform(0, 255, channels)
        made.append(picture.clip(0, 255).astype(np.uint8))
    return made if dtype == np.uint8 else [(one / 255).astype(np.float32) for one in made]


def samples_of(images):
    """Samples with an image, a mask of 16 classes beside it, and a label."""
    return [
        {"image": image, "mask": (image[..., 0] // 16).astype(np.uint8), "label": number}
        for number, image in enumerate(images)
    ]


class PictureDicts(Dataset):
    """Samples ``{"image", "mask", "label"}``; here, so that worker processes can import it."""

    def __init__(self, count, height, width):
        self.samples = samples_of(pictures(count, height, width))

    def __len__(self):
        return len(self.samples)

    def __getitem__(self, index):
        return self.samples[index]


class PicturePairs(PictureDicts):
    """Samples ``(image, class)`` of four classes."""

    def __getitem__(self, index):
        return self.samples[index]["image"], index % 4


def staged(compose, samples, seed=11):
    """Return the transform, the batch as workers leave it, its draws, and the oracle's batch.

    The oracle is Albumentations itself, on each sample alone, with the same random numbers.
    """
    transform = as_batch_transform(compose)
    left, draws = left_to_device(transform, samples, keys(len(samples), seed))
    return transform, stacked(left), draws, stacked(in_worker(transform, samples, seed))


def stacked(samples):
    """Return samples as one batch of tensors."""
    return {
        name: torch.stack([torch.as_tensor(np.asarray(sample[name])) for sample in samples])
        for name in samples[0]
    }


def on(device, batch):
    """Return a copy of a batch on a device."""
    return {name: tensor.to(device) for name, tensor in batch.items()}


def largest_gap(one, other):
    """Return the largest difference of two tensors, as a number."""
    assert one.shape == other.shape
    assert one.dtype == other.dtype
    return (one.cpu().double() - other.cpu().double()).abs().max().item()
