"""Images, operations and two ways of carrying them out, for tests of joined geometry."""

from __future__ import annotations

import os
import pickle

import numpy as np
import torch

os.environ.setdefault("NO_ALBUMENTATIONS_UPDATE", "1")
import albumentations as A
import cv2

from lightning_fastdata.augment.foreign import ForeignBatches
from lightning_fastdata.augment.geometry import join_tapes
from lightning_fastdata.augment.ops import DEVICE_OPS, REPLAYED_OPS
from lightning_fastdata.augment.program import compile_tapes
from lightning_fastdata.augment.replay_torch import replay
from lightning_fastdata.augment.seeds import reseed
from lightning_fastdata.types import SampleKey

torch.set_num_threads(1)

SIZE = 48
OBLONG = (44, 56)
FORMS = [(np.uint8, 3), (np.uint8, 1), (np.uint8, 4), (np.float32, 3), (np.float32, 1)]


def wave(x, y, channels):
    """A smooth function of the position, in levels."""
    each = np.arange(channels)
    x, y = x[..., None], y[..., None]
    return 127 + 50 * np.sin(0.11 * x + each) + 45 * np.cos(0.13 * y - 0.04 * x * each)


def in_form(levels, dtype):
    return levels.round().astype(dtype) if dtype == np.uint8 else (levels / 255).astype(dtype)


def in_levels(images):
    return images.astype(np.float64) * (1 if images.dtype == np.uint8 else 255)


def smooth(dtype=np.uint8, channels=3, size=(SIZE, SIZE)):
    y, x = np.mgrid[: size[0], : size[1]].astype(np.float64)
    return in_form(wave(x, y, channels), dtype)


def noise(dtype=np.uint8, channels=3, size=(SIZE, SIZE)):
    return in_form(np.random.default_rng(3).uniform(0, 255, (*size, channels)), dtype)


def record(transforms, image, mask=None, count=6, seed=0):
    """Return what is left to the device when the size of the images is known."""
    compose = A.Compose(transforms)
    recorder = ForeignBatches(compose, DEVICE_OPS, None).recorder(image.shape[:2])
    data = {"image": image} | ({} if mask is None else {"mask": mask})
    tapes = []
    for index in range(count):
        reseed((recorder.compose,), SampleKey(seed, 0, index))
        tapes.append(recorder(data)[1])
    return tapes


def carry_out(tapes, value, field="image"):
    draws = pickle.loads(pickle.dumps(compile_tapes(tapes, DEVICE_OPS)))
    batch = torch.from_numpy(np.stack([value] * len(tapes)))
    return replay(draws.programs[field], draws.blob, batch, REPLAYED_OPS).numpy()


def both(transforms, image, **options):
    """Return what exact and fused geometry make of an image."""
    tapes = record(transforms, image, **options)
    return carry_out(tapes, image), carry_out(join_tapes(tapes), image)


def names(tape, field="image"):
    return [op.name for op in tape[field].ops] if field in tape else []


def launches(tapes):
    return sum(len(step.parts) for step in compile_tapes(tapes).programs["image"].steps)


def affine(**options):
    options = {"scale": (0.8, 1.3), "rotate": (-40, 40), "shear": (-8, 8), "p": 1} | options
    return A.Affine(**options)


WARPS = [
    affine(),
    A.Rotate((-60, 60), p=1),
    A.SafeRotate((-60, 60), p=1),
    A.ShiftScaleRotate(p=1),
    A.Perspective((0.05, 0.12), p=1),
]
WHOLE_PIXELS = [
    A.HorizontalFlip(p=1),
    A.VerticalFlip(p=1),
    A.Transpose(p=1),
    A.D4(p=1),
    A.RandomRotate90(p=1),
    A.RandomCrop(32, 40, p=1),
    A.CenterCrop(32, 40, p=1),
    A.Pad(5, p=1),
    A.PadIfNeeded(60, 64, border_mode=cv2.BORDER_REFLECT, p=1),
]
RESIZES = [A.Resize(37, 41, p=1), A.Resize(70, 64, p=1), A.RandomResizedCrop((40, 40), p=1)]
PAIRS = {
    "two affine maps": [affine(), affine()],
    "rotated and seen from the side": [A.Rotate(60, p=1), A.Perspective((0.05, 0.12), p=1)],
    "three with a flip": [affine(), A.HorizontalFlip(p=1), A.SafeRotate(p=1), A.Perspective(p=1)],
    "cropped between": [affine(), A.RandomCrop(34, 34, p=1), A.D4(p=1), affine()],
    "enlarged between": [affine(), A.Resize(70, 60, p=1), A.Rotate(p=1)],
    "a box of it, rotated": [A.RandomResizedCrop((40, 44), p=1), A.Rotate(p=1)],
    "cropped, turned, reflected": [
        A.RandomCrop(40, 40, p=1),
        A.D4(p=1),
        affine(border_mode=cv2.BORDER_REFLECT_101),
        A.Rotate(border_mode=cv2.BORDER_REFLECT_101, p=1),
    ],
}


def carried(tapes):
    draws = compile_tapes(tapes, REPLAYED_OPS)
    return draws.programs["image"], draws.blob


def assert_alike(tapes, joined, size):
    """Check that two ways fill the same parts, and show the same elsewhere."""
    covers, images = (
        [carry_out(each, value).astype(np.float64) for each in (tapes, joined)]
        for value in (np.full((*size, 3), 255, np.uint8), smooth(size=size))
    )
    assert images[0].shape == images[1].shape
    # A colour that begins within two pixels may begin in another part of a pixel.
    calm = [np.stack([_span(one) <= 2 for one in each[..., 0]]) for each in covers]
    both_calm = calm[0] & calm[1]
    assert both_calm.sum() >= 0.8 * calm[0].sum()
    assert np.abs(covers[0] - covers[1])[both_calm].max(initial=0) <= 2
    gap = np.abs(images[0] - images[1])[both_calm]
    if gap.size:
        assert np.quantile(gap, 0.95) <= 3
        assert gap.max() <= 16


def _span(image):
    """Return the largest difference of two pixels within two pixels of each."""
    return cv2.morphologyEx(image, cv2.MORPH_GRADIENT, np.ones((5, 5)))
