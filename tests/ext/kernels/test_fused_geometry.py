"""A run reads warped and turned samples as their operations do, beside plain ones.

Without a GPU the kernels run in Triton's interpreter, which `conftest.py` turns on.
"""

from __future__ import annotations

import warnings

import albumentations as A
import cv2
import numpy as np
import pytest
from ext.kernels.test_fused import assert_fused, check, noted, photographs, stacked
from misses import each
from thoroughness import LONG

pytest.importorskip("triton")

pytestmark = pytest.mark.slow
"""The kernel runs in an interpreter here, which takes half a minute."""
SIZES = [(1, 1), (1, 9), (13, 1), (21, 20)]
BORDERS = {
    "constant": cv2.BORDER_CONSTANT,
    "replicate": cv2.BORDER_REPLICATE,
    "reflect": cv2.BORDER_REFLECT,
    "wrap": cv2.BORDER_WRAP,
    "reflect 101": cv2.BORDER_REFLECT_101,
}
WILD = {"scale": (0.2, 3), "rotate": (-180, 180), "translate_percent": (-0.6, 0.6)}
with warnings.catch_warnings():
    # ShiftScaleRotate warns that it is a special case of Affine, and people use it all the same.
    warnings.simplefilter("ignore")
    SSR = A.ShiftScaleRotate(p=0.6)
WARPS = {
    **{
        f"{way}, {border}": A.Affine(
            **WILD,
            shear=(-30, 30),
            interpolation=kind,
            border_mode=mode,
            fill=(9, 200.5, 31),
            p=0.7,
        )
        for way, kind in (("linear", cv2.INTER_LINEAR), ("nearest", cv2.INTER_NEAREST))
        for border, mode in BORDERS.items()
    },
    "rotate": A.Rotate(p=0.6),
    "shift, scale, rotate": SSR,
    "one of two": A.OneOf([A.Affine(**WILD), A.Rotate()], p=0.8),
}


# The narrowest images meet each border once; what differs between the warps is their matrix.
@pytest.mark.cases(4)
@each(
    ("name", "size"),
    [
        (name, size)
        for name in WARPS
        for size in SIZES
        if LONG or size == SIZES[-1] or name.startswith("linear")
    ],
)
def test_a_warp_is_read_as_the_operation_does(name, size):
    height, width = size
    program = check([WARPS[name]], height=height, width=width)
    assert [run.reading.geometry for run in program.runs] == ["warp"]


@pytest.mark.cases(4)
@each("element", ["e", "r90", "r180", "r270", "t", "h", "hvt", "v"])
def test_symmetries_of_the_square_compose_in_any_order(element):
    shape = (9, 9, 3)
    before = [
        (A.D4(), {"group_element": element}, shape),
        (A.CoarseDropout(fill=7), {"holes": [(1, 2, 4, 9)], "seed": 0}, shape),
    ]
    flip = A.HorizontalFlip(), {}, shape
    others = ["r90", "h", "t", "hvt"]
    draws = noted(*([*before, (A.D4(), {"group_element": other}, shape), flip] for other in others))
    assert [(run.first, run.last) for run in draws.programs["image"].runs] == [(0, 3)]
    assert_fused(draws, stacked(photographs(len(others), 9, 9)))


def test_what_is_not_square_is_turned_by_torch():
    draws = noted(*[[(A.Transpose(), {}, (5, 8, 3))]] * 2)
    batch = stacked(photographs(2, 5, 8))
    assert not draws.programs["image"].runs[0].takes(batch)
    assert assert_fused(draws, batch).shape == (2, 8, 5, 3)


def test_a_warp_of_another_size_takes_all_samples_or_none():
    params = {"matrix": np.diag([1.5, 1.5, 1.0]), "output_shape": (30, 36)}
    warped = [(A.Affine(scale=(1.5, 1.5), fit_output=True), params, (20, 24, 3))]
    batch, draws = stacked(photographs(2, 20, 24)), noted(warped, warped)
    assert draws.programs["image"].runs[0].takes(batch)
    assert assert_fused(draws, batch).shape == (2, 30, 36, 3)
    assert not noted(warped, []).programs["image"].runs[0].takes(batch)


def test_a_warp_sees_what_came_before_it():
    program = check(
        [A.RandomGamma(p=1), A.Rotate(p=0.5), A.HueSaturationValue(p=0.7)],
        height=15,
        width=13,
    )
    assert [run.reading.geometry for run in program.runs] == ["none", "warp"]


@pytest.mark.cases(2)
@each("mode", BORDERS.values())
def test_padding_is_read_by_the_run(mode):
    pad = A.PadIfNeeded(26, 39, border_mode=mode, fill=(1, 2, 300), p=1)
    program = check([A.Resize(20, 30), pad, A.ToGray()], count=3)
    assert [run.reading.geometry for run in program.runs] == ["window"]
