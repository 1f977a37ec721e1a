"""Every operation against Albumentations, in combinations of all that it takes.

The parameters are drawn by a real ``Compose``; what it makes of an image and its mask is what the
device form has to make of them.
"""

from __future__ import annotations

from itertools import permutations

import albumentations as A
import cv2
import numpy as np
import pytest
from augment.bounds import OPENCV, Bound, bound_of
from augment.oracle_cases import CASES, USUAL
from augment.parity import both, encoded_by, photographs
from misses import each
from pairwise import pairwise
from thoroughness import LONG

from benchmarks.parity import levels_per_unit, make_example, pixel_parity
from lightning_fastdata.augment.ops import DEVICE_OPS
from lightning_fastdata.augment.ops.geometry import on_cells

MOST = 3 if LONG else 2
"""Photographs of each combination."""


def gaps(transform, wanted, got, dtype):
    """Return the differences of images, in levels of which 255 span their range."""
    unit = levels_per_unit(A.Compose([transform]), dtype)
    gap = np.abs(wanted.astype(np.float64) - got) * unit
    assert np.isfinite(wanted).all()
    if wanted.dtype.kind == "f":
        gap[gap < 1e-3] = 0  # sums of floats differ in the last bits
    return gap.ravel()


def assert_within(gap, bound: Bound, dtype):
    assert gap.max(initial=0) <= (bound.largest if dtype == np.uint8 else bound.of_floats) + 1e-9
    if dtype == np.uint8:
        # A single pixel of a tiny image is more than the share.
        assert (gap > 0).sum() <= max(1, (1 - bound.equal) * gap.size)
        assert gap.mean() <= bound.mean + 1 / gap.size


@each("case", CASES)
def test_the_device_form_equals_albumentations_within_the_bound_of_its_class(case):
    on_device = 0
    for number, row in enumerate(case.rows()):
        dtype, transform = row["dtype"], make_example(case.name, case.make(row))
        unit = 1 if dtype == np.uint8 else 255
        images = photographs(*row["size"], row["channels"], dtype)[:MOST]
        masks = [(255 - image[..., 0] * unit).astype(np.uint8) // 16 for image in images]
        if case.refused(row):
            for image, mask in zip(images, masks, strict=True):
                with pytest.raises(cv2.error):
                    both(transform, [image], [mask], seeds=[number])
            continue
        found = both(transform, images, masks, seeds=[number])
        on_device += len(found)
        assert len(found) == (0 if case.on_the_cpu(row) else len(images)), row
        for _, _, wanted, mask in found:
            assert mask.dtype == wanted.dtype
            assert np.array_equal(mask, wanted), row
        if found:
            off = [gaps(transform, wanted, got, dtype) for wanted, got, *_ in found]
            try:
                assert_within(np.concatenate(off), bound_of(transform), dtype)
            except AssertionError as error:
                raise AssertionError(f"{case.name} {case.arguments} {row}") from error
    assert on_device


def test_every_operation_has_a_case():
    assert {case.name for case in CASES} == set(DEVICE_OPS)
    assert {type(one).__name__ for one in USUAL.values()} == set(DEVICE_OPS)


def test_all_pairs_of_values_meet():
    factors = {"a": (0, 1), "b": (0, 1, 2, 3), "c": "xyzuv", "d": (True, False)}
    rows = pairwise(factors)
    assert rows == pairwise(factors)
    for one, other in permutations(factors, 2):
        met = {(row[one], row[other]) for row in rows}
        assert len(met) == len(factors[one]) * len(factors[other])
    assert len(rows) < 2 * 20


def test_positions_lie_on_a_grid_with_opencv_4_alone():
    assert on_cells() == (OPENCV < 5)


@each("width", [1, 31, 32, 33, 112, 255, 257, 300])
def test_hue_equals_albumentations_at_any_width(width):
    """OpenCV truncates where it is vectorized and rounds in what is left of a row."""
    found = pixel_parity(A.HueSaturationValue(p=1), photographs(131, width), draws=4)
    assert found.equal >= 0.999
    assert found.on_device == 1


def test_colours_that_are_not_shifted_stay_to_the_bit():
    found = pixel_parity(A.HueSaturationValue(0, 0, 0, p=1), photographs(131, 33), draws=1)
    assert found.largest == 0
    assert found.on_device == 1


@each(("length", "out"), [(6, 34), (6, 130), (148, 91), (212, 3), (97, 96)])
def test_nearest_reads_the_pixel_that_opencv_reads_where_the_last_bit_decides(length, out):
    ramp = np.arange(length, dtype=np.float32)[None, :, None].repeat(2, 0)
    transform = A.Resize(2, out, interpolation=0, p=1)
    found = pixel_parity(transform, [ramp / 256])
    assert found.largest == 0
    assert found.on_device == 1


@each(
    "transform",
    [
        A.Resize(9, 9, interpolation=4, p=1),
        A.Affine(rotate=(9, 40), interpolation=2, p=1),
        A.RandomResizedCrop((9, 9), area_for_downscale="image", p=1),
        A.CoarseDropout(fill="inpaint_telea", p=1),
        A.ToGray(method="from_lab", p=1),
        A.Rotate(crop_border=True, p=1),
    ],
)
def test_parameters_without_a_device_form_are_declined(transform):
    _, encoded, _ = encoded_by(transform, photographs(40, 50)[0])
    assert encoded is None
