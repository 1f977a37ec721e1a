"""Where a warp reads each pixel of a mask, to the last bit, against Albumentations with OpenCV."""

from __future__ import annotations

import albumentations as A
import cv2
import numpy as np
import torch
from misses import each
from thoroughness import some

from lightning_fastdata.augment.ops import DEVICE_OPS
from lightning_fastdata.augment.ops.geometry import LINEAR, NEAREST

HEIGHT = 11
WIDTHS = some(range(1, 41), 3)
"""With each rest after the eight pixels that OpenCV takes at once."""
BORDERS = (cv2.BORDER_CONSTANT, cv2.BORDER_REFLECT_101, cv2.BORDER_REPLICATE)
NEAREST_DTYPES = (np.uint8, np.int32, np.float32, np.float64)
LINEAR_DTYPES = (np.uint8, np.int16, np.float32, np.float64)
"""OpenCV reads no int32 between its pixels."""


def matrix_of(rng):
    """Return a matrix whose positions are tenths of a pixel: of many, rounding decides.

    They are where two pixels meet, so that the last bit tells which of them is read.
    """
    inverse = np.eye(3)
    inverse[:2] = rng.integers(-5, 6, (2, 3)) / 10
    inverse[[0, 1], [0, 1]] = rng.integers(6, 13, 2) / 10
    inverse[:2, 2] += rng.integers(0, 9, 2) / 2
    return np.linalg.inv(inverse)


def made_by_both(mask, matrix, interpolation, border):
    """Return Albumentations' mask and ours, both warped by this matrix."""
    arguments = {"mask_interpolation": interpolation, "border_mode": border, "fill_mask": 3}
    params = {"matrix": matrix, "output_shape": mask.shape[:2]}
    transform = A.Affine(**arguments)
    op = DEVICE_OPS["Affine"]
    encoded = op.encode(transform, params, (*mask.shape[:2], 3), np.dtype(np.uint8))
    arrays = {name: torch.from_numpy(one)[None] for name, one in encoded.arrays.items()}
    got = op.mask(torch.from_numpy(mask)[None], dict(encoded.static), arrays)[0].numpy()
    return transform.apply_to_mask(mask, **params), got


@each("width", WIDTHS)
@each("dtype", NEAREST_DTYPES)
@each("border", BORDERS)
def test_a_mask_is_read_at_the_pixel_that_opencv_finds_nearest(width, dtype, border):
    rng = np.random.default_rng(width)
    mask = rng.permutation(HEIGHT * width).reshape(HEIGHT, width).astype(dtype)
    for _ in range(2):
        matrix = matrix_of(rng)
        want, got = made_by_both(mask, matrix, NEAREST, border)
        np.testing.assert_array_equal(got, want)
        assert got.dtype == dtype


@each("width", WIDTHS)
@each("dtype", LINEAR_DTYPES)
@each("border", [cv2.BORDER_REFLECT_101, cv2.BORDER_REPLICATE])
def test_a_ramp_is_read_between_the_pixels_where_opencv_reads_it(width, dtype, border):
    rng = np.random.default_rng(width)
    rows, columns = np.mgrid[:HEIGHT, :width]
    mask = np.stack([rows, columns, 0 * rows], -1).astype(dtype)
    matrix = matrix_of(rng)
    want, got = made_by_both(mask, matrix, LINEAR, border)
    np.testing.assert_array_equal(got, want)
