"""Warps at 1/32 pixels against what OpenCV 4.10 makes, whichever OpenCV is installed."""

from __future__ import annotations

import numpy as np
import torch
from misses import each

from lightning_fastdata.augment.ops.geometry import (
    LINEAR,
    NEAREST,
    REFLECT_101,
    cells_of_matrix,
    invert,
    sample_cells,
)

HEIGHT, WIDTH = 7, 9
AFFINE = np.array([[0.83, -0.31, 1.7], [0.27, 1.12, -2.4], [0, 0, 1]])
BY_OPENCV_4 = {
    0: """
         19 216  19 152 169 183  15 157  64
        127  57 127 152 128 227 144 157 211
         17  17 172 233  13 123 144 135 200
        207  43 172 145 192  57  51 129  53
        200  43 209 193 127 252   9  96   9
        207  47 219  32 127  77 101 199   9
         43 209 193 251 175 136 171 199  77
    """,
    1: """
         68 186  38 173 151 124  98 108  91
         98  79  80 124 115 184 154 150 210
        100  94  89 177  41 152 100 134 181
        169  54 185 152 142 110  80  91 101
        188  77 207 212 165 144  79  85  33
        144 133 220 130 149  93  95 152  75
         86 171 199 148 156 144 127 124 100
    """,
}
"""Interpolation -> the picture, warped with BORDER_REFLECT_101."""


def picture(dtype=np.uint8):
    y, x = np.mgrid[:HEIGHT, :WIDTH]
    return ((37 * x * x + 59 * y * y * y + 11 * x * y) % 256).astype(dtype)


def warped(image, interpolation):
    inverse = torch.from_numpy(invert(AFFINE))[None]
    places = cells_of_matrix(inverse, image.shape, nearest=interpolation == NEAREST)
    batch = torch.from_numpy(image)[None, :, :, None]
    fill = torch.full((1, 1), 50).to(batch.dtype)
    return sample_cells(batch, *places, interpolation, REFLECT_101, fill)[0, :, :, 0].numpy()


def expected(interpolation):
    return np.array(BY_OPENCV_4[interpolation].split(), int).reshape(HEIGHT, WIDTH)


@each("interpolation", [NEAREST, LINEAR])
def test_warps_of_bytes_are_those_of_opencv_4(interpolation):
    np.testing.assert_array_equal(warped(picture(), interpolation), expected(interpolation))


@each("dtype", [np.float32, np.int16])
@each("interpolation", [NEAREST, LINEAR])
def test_warps_of_other_dtypes_are_the_same_but_for_rounding(interpolation, dtype):
    got = warped(picture(dtype), interpolation)
    assert got.dtype == dtype
    assert np.abs(got.astype(float) - expected(interpolation)).max() <= 1
