from __future__ import annotations

import albumentations as A
import cv2
import numpy as np
import pytest
import torch
from augment.opencv_versions import counts_under_boolean_masks
from augment.parity import extremes, parity, photographs
from hypothesis import given
from hypothesis import strategies as st
from misses import each
from thoroughness import max_examples

from lightning_fastdata.augment.ops import DEVICE_OPS
from lightning_fastdata.augment.ops.colors.spaces import (
    lab_bytes,
    rgb_from_lab,
    rgb_from_ycrcb,
    ycrcb_bytes,
)

TRANSFORMS = {
    "clahe": A.CLAHE(p=1),
    "clahe, other tiles": A.CLAHE((1, 9), (5, 7), p=1),
    "equalize": A.Equalize(p=1),
    "equalize, luma": A.Equalize(by_channels=False, p=1),
    "equalize, pil": A.Equalize(mode="pil", p=1),
    "equalize, pil, luma": A.Equalize(mode="pil", by_channels=False, p=1),
}
if counts_under_boolean_masks():
    TRANSFORMS |= {}


@pytest.mark.cases(25)
@each("channels", [1, 3])
@each("dtype", [np.uint8, np.float32])
@each("name", list(TRANSFORMS))
def test_histogram_operations_equal_albumentations_on_photographs(name, dtype, channels):
    # CLAHE extends the image where the tiles do not divide it: on both axes, on one, on none.
    for size in ((131, 170), (128, 170), (120, 105)):
        images = photographs(*size, channels, dtype)
        assert parity(TRANSFORMS[name], images, seeds=[1, 2]).largest == 0


@each("size", [(1, 1), (3, 1), (7, 5), (40, 33)])
@each("channels", [1, 3])
@each("name", list(TRANSFORMS))
def test_histogram_operations_equal_albumentations_on_extreme_images(name, channels, size):
    assert parity(TRANSFORMS[name], extremes(*size, channels), seeds=[0]).largest == 0


@max_examples(25)
@given(
    clip=st.floats(1, 40),
    tiles=st.tuples(st.integers(1, 9), st.integers(1, 9)),
    size=st.tuples(st.integers(1, 90), st.integers(1, 90)),
    seed=st.integers(0, 99),
)
def test_clahe_equals_albumentations_for_any_limit_and_tiles(clip, tiles, size, seed):
    transform = A.CLAHE((clip, clip), tiles, p=1)
    images = [*photographs(*size), *extremes(*size, seed=seed)]
    found = parity(transform, images, seeds=[0])
    # A blend of four tables may lie between two levels.
    assert found.largest <= 1
    assert found.exact >= 0.999


@each(
    "transform",
    [
        A.Equalize(mask=np.ones((40, 50), np.uint8), p=1),
        A.Equalize(mask=lambda image: (image[..., 0] > 9).astype(np.uint8), p=1),
    ],
)
def test_equalizing_under_a_mask_is_left_to_the_cpu(transform):
    image = photographs(40, 50)[0]
    transform(image=image)
    op = DEVICE_OPS["Equalize"]
    assert op.encode(transform, transform.params, image.shape, image.dtype) is None


@each(
    ("ours", "code"),
    [
        (lambda rgb: torch.stack(lab_bytes(rgb), -1), cv2.COLOR_RGB2LAB),
        (lambda lab: rgb_from_lab(*lab.int().unbind(-1)), cv2.COLOR_LAB2RGB),
        (lambda rgb: torch.stack(ycrcb_bytes(rgb), -1), cv2.COLOR_RGB2YCrCb),
        (lambda ycrcb: rgb_from_ycrcb(*ycrcb.int().unbind(-1)), cv2.COLOR_YCrCb2RGB),
    ],
)
def test_colour_conversions_equal_opencv_on_colours_from_the_whole_cube(ours, code):
    # Every second and third value, from an odd offset: the others were tried once, too.
    second, third = np.meshgrid(np.arange(0, 256), np.arange(1, 256, 2))
    for first in range(0, 256, 15):
        colours = np.stack([np.full_like(second, first), second, third], -1).astype(np.uint8)
        got = ours(torch.from_numpy(colours)[None])[0].numpy()
        np.testing.assert_array_equal(got, cv2.cvtColor(colours, code))
