"""Masks of every dtype that Albumentations takes, through every operation that moves pixels."""

from __future__ import annotations

import cv2
import numpy as np
import pytest
from augment.oracle_cases import CASES
from augment.parity import both, photographs

from lightning_fastdata.augment.ops import DEVICE_OPS
from lightning_fastdata.augment.parity import make_example

SIZE = (53, 74)
IGNORED = 255
MOVES = [
    case
    for case in CASES
    # Albumentations computes the field of PiecewiseAffine in a Python loop over the pixels.
    if DEVICE_OPS[case.name].mask is not None and case.name != "PiecewiseAffine"
]
DTYPES = (np.uint8, np.uint16, np.int16, np.int32, np.int64, np.bool_, np.float32)
LAYOUTS = ((), (1,), (3,), (5,), (6,))


def mask_of(dtype, layout):
    """Return classes 0 to 299, and pixels to be ignored."""
    classes = np.arange(SIZE[0] * SIZE[1]).reshape(SIZE) % 300
    classes = np.where(classes % 7 == 3, IGNORED, classes).astype(dtype)
    if not layout:
        return classes
    return np.stack([np.roll(classes, 9 * channel, 1) for channel in range(*layout)], -1)


def made_by_both(case, dtype, layout, **arguments):
    """Return Albumentations' mask and ours, or None where OpenCV takes no such masks."""
    if "fill_mask" in case.axes:
        arguments = {"fill_mask": 200.0 if dtype != np.bool_ else 1.0} | arguments
    transform = make_example(case.name, case.arguments | arguments)
    mask = mask_of(dtype, layout)
    try:
        [(_, _, want, got)] = both(transform, photographs(*SIZE)[:1], [mask], seeds=[3])
    except cv2.error:
        assert dtype == np.bool_ or case.name == "Morphological"
        return None
    assert got.shape == want.shape
    # OpenCV makes int32 of int64. Here a mask keeps its dtype, so that a batch has one.
    assert got.dtype == mask.dtype
    assert want.dtype == mask.dtype or (want.dtype, mask.dtype) == (np.int32, np.int64)
    return want, got


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: dtype.__name__)
@pytest.mark.parametrize("case", MOVES, ids=lambda one: f"{one.name} {one.arguments or ''}".strip())
def test_masks_of_any_dtype_and_number_of_channels_equal_albumentations(case, dtype):
    compared = 0
    for layout in LAYOUTS:
        found = made_by_both(case, dtype, layout)
        if found is not None:
            want, got = found
            assert (got != want).sum() <= (1 - case.masks) * want.size, layout
            compared += 1
    assert compared == len(LAYOUTS) or not compared
    assert compared or dtype == np.bool_ or case.name == "Morphological"


@pytest.mark.parametrize("fill", [7.0, 7, (7, 8, 9), (7.0,)])
@pytest.mark.parametrize(
    "case", [one for one in MOVES if "fill_mask" in one.axes and "border_mode" in one.axes],
    ids=lambda one: f"{one.name} {one.arguments or ''}".strip(),
)  # fmt: skip
def test_the_border_of_masks_has_the_value_that_it_has_in_albumentations(case, fill):
    for layout in ((), (3,)):
        want, got = made_by_both(case, np.uint8, layout, fill_mask=fill, border_mode=0)
        assert (got != want).sum() <= (1 - case.masks) * want.size
