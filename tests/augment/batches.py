"""Run one pipeline through worker and device, and through the worker alone."""

from __future__ import annotations

import os

os.environ.setdefault("NO_ALBUMENTATIONS_UPDATE", "1")

import albumentations as A
import numpy as np
import torch
from torch.utils.data import default_collate

from lightning_fastdata.augment.collated_batches import ForeignBatches
from lightning_fastdata.augment.ops import DEVICE_OPS
from lightning_fastdata.augment.pipeline.fields import Fields
from lightning_fastdata.augment.transform import as_batch_transform
from lightning_fastdata.types import SampleKey

torch.set_num_threads(1)

BOXES = {
    "bbox_params": A.BboxParams("pascal_voc", label_fields=["classes"], min_visibility=0.2),
    "keypoint_params": A.KeypointParams("xy", label_fields=["joints"]),
}


def boxed(sample, height, width):
    """Return a sample with three boxes and two keypoints."""
    return sample | {
        "bboxes": [[1, 2, 12, 13], [3, 3, width, height], [width - 4, height - 4, width, height]],
        "classes": [4, 5, 6],
        "keypoints": [(2, 3), (width // 2, height // 2)],
        "joints": ["a", "b"],
    }


def pipeline(*transforms, **options):
    return as_batch_transform(A.Compose(list(transforms), **options))


def collated(compose, batch, key, *, on_device):
    """Return a batch of another loader after a pipeline, as a device makes it, or the CPU."""
    on_cpu = "torch" if on_device else "albumentations"
    foreign = ForeignBatches(compose, DEVICE_OPS, None, on_cpu=on_cpu)
    return foreign.run(batch, Fields(), key)


def keys(count, seed=0):
    return [SampleKey(seed, 0, index) for index in range(count)]


def in_worker(transform, samples, seed=0):
    """Return what Albumentations alone makes of every sample."""
    whole = transform.in_worker(on_device=False)
    return [whole(one, key)[0] for one, key in zip(samples, keys(len(samples), seed), strict=True)]


def on_device(transform, samples, seed=0):
    """Return the batch of images and masks after worker and device, and each worker's rest."""
    part = transform.in_worker(on_device=True)
    drawn = [part(one, key) for one, key in zip(samples, keys(len(samples), seed), strict=True)]
    draws = part.collate([tape for _, tape in drawn])
    pixels = [
        {name: value for name, value in one.items() if isinstance(value, torch.Tensor)}
        for one, _ in drawn
    ]
    return transform.apply(default_collate(pixels), draws), [one for one, _ in drawn]


def flat(count, size=(48, 56), channels=3, level=128, dtype=np.uint8):
    """Return samples whose images are of one level."""
    image = np.full((*size, channels), level, dtype)
    return [{"image": image} for _ in range(count)]


def alike(one, other):
    """Whether two results of a pipeline are the same: structure, types, dtypes and values."""
    if type(one) is not type(other):
        return False
    if isinstance(one, np.ndarray):
        floats = one.dtype.kind in "fc"
        return one.dtype == other.dtype and np.array_equal(one, other, equal_nan=floats)
    if isinstance(one, torch.Tensor):
        return one.dtype == other.dtype and torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(alike(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(alike, one, other))
    return bool(one == other)
