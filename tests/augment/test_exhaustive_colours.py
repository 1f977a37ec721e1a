"""All 16.7 million colours through each operation of colours, against Albumentations."""

from __future__ import annotations

import albumentations as A
import numpy as np
import pytest
import torch
from misses import each

from lightning_fastdata.augment.ops import DEVICE_OPS

WIDTH, HEIGHT = 4096, 512
"""Of the images that the colours are cut into; no row has a rest after OpenCV's vectors."""


def colours():
    """Yield all triples, as images uint8 ``[H, W, 3]``."""
    per_image = WIDTH * HEIGHT
    for start in range(0, 256 << 16, per_image):
        number = np.arange(start, start + per_image, dtype=np.uint32)
        planes = [(number >> shift & 255).astype(np.uint8) for shift in (16, 8, 0)]
        yield np.stack(planes, -1).reshape(-1, WIDTH, 3)


def compare(ours, theirs):
    """Return the largest difference and the share of values that are not equal."""
    largest, unequal, values = 0, 0, 0
    for image in colours():
        want = theirs(image)
        got = ours(torch.from_numpy(image)[None])[0].numpy()
        assert got.shape == want.shape
        gap = np.maximum(got, want) - np.minimum(got, want)
        largest = max(largest, int(gap.max()))
        unequal += int((gap > 0).sum())
        values += gap.size
    return largest, unequal / values


def drawn(transform):
    """Return what the device form and Albumentations make of any image with the same draws."""
    transform.set_random_seed(5)
    transform(image=next(colours()))
    op, params = DEVICE_OPS[type(transform).__name__], transform.params

    def ours(batch):
        encoded = op.encode(transform, params, tuple(batch.shape[1:]), np.dtype(np.uint8))
        arrays = {name: torch.from_numpy(array[None]) for name, array in encoded.arrays.items()}
        return op.image(batch, dict(encoded.static), arrays)

    return ours, lambda image: transform.apply(image, **params)


OPERATIONS = {
    "brightness and contrast": (A.RandomBrightnessContrast(p=1), 0, 0),
    "gray": (A.ToGray(p=1), 0, 0),
    "hue": (A.HueSaturationValue((37, 37), (0, 0), (0, 0), p=1), 1, 2e-4),
    "saturation": (A.HueSaturationValue((0, 0), (25, 25), (0, 0), p=1), 1, 2e-4),
    "value": (A.HueSaturationValue((0, 0), (0, 0), (-13, -13), p=1), 1, 2e-4),
    "jitter of saturation": (A.ColorJitter((1, 1), (1, 1), (1.4, 1.4), (0, 0), p=1), 0, 0),
}
"""The transform, the largest difference in levels, and the share that may be off."""


@pytest.mark.cases(2)
@each("name", OPERATIONS)
def test_an_operation_is_as_close_as_it_is_said_to_be_for_every_colour(name):
    transform, most, share = OPERATIONS[name]
    largest, unequal = compare(*drawn(transform))
    assert largest <= most
    assert unequal <= share
