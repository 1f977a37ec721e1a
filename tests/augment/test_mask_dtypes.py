"""Masks of every dtype that Albumentations takes, through every operation that moves pixels."""

from __future__ import annotations

import albumentations as A
import cv2
import numpy as np
import pytest
from augment.batches import by_albumentations, collated, in_worker, keys, on_device
from augment.oracle_cases import CASES
from augment.parity import both, photographs
from misses import each
from torch.utils.data import default_collate

from benchmarks.parity import make_example
from lightning_fastdata.augment.ops import DEVICE_OPS
from lightning_fastdata.augment.transform import as_batch_transform

SIZE = (53, 74)
IGNORED = 255
MOVES = [case for case in CASES if DEVICE_OPS[case.name].mask is not None]
DTYPES = (
    *(np.uint8, np.int8, np.uint16, np.int16, np.int32, np.int64, np.bool_),
    *(np.float32, np.float64),
)
LAYOUTS = ((), (1,), (2,), (3,), (5,), (6,))


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
        fill = {np.bool_: 1.0, np.int8: -100.0}.get(dtype, 200.0)
        arguments = {"fill_mask": fill} | arguments
    transform = make_example(case.name, case.arguments | arguments)
    mask = mask_of(dtype, layout)
    try:
        [(_, _, want, got)] = both(transform, photographs(*SIZE)[:1], [mask], seeds=[3])
    except cv2.error:
        assert dtype == np.bool_
        return None
    assert got.shape == want.shape
    # OpenCV makes int32 of int64. Here a mask keeps its dtype, so that a batch has one.
    assert got.dtype == mask.dtype
    assert want.dtype == mask.dtype or (want.dtype, mask.dtype) == (np.int32, np.int64)
    return want, got


@pytest.mark.cases(79)
@each("dtype", DTYPES)
@each("case", MOVES)
def test_masks_of_any_dtype_and_number_of_channels_equal_albumentations(case, dtype):
    compared = 0
    for layout in LAYOUTS:
        found = made_by_both(case, dtype, layout)
        if found is not None:
            want, got = found
            assert np.array_equal(got, want), layout
            compared += 1
    assert compared == len(LAYOUTS) or not compared
    assert compared or dtype == np.bool_


@each("fill", [-1e5, 1e5])
@each("dtype", [np.uint8, np.int8, np.int16])
@each("case", [case for case in MOVES if "border_mode" in case.axes])
def test_a_fill_that_a_mask_has_no_number_for_is_the_nearest_one(case, dtype, fill):
    want, got = made_by_both(case, dtype, (), border_mode=0, fill_mask=fill)
    assert np.array_equal(got, want)


ALL_DTYPES = (*DTYPES, np.uint32, np.uint64, np.float16)
SAMPLES = 12


def moved_here_and_there(*first):
    """Return a pipeline of which some samples need the CPU, and some of those a part of it."""
    sometimes = A.OneOf([A.ImageCompression(), A.GaussianBlur()], p=0.6)
    turns = [A.HorizontalFlip(), sometimes, A.RandomRotate90(), A.CoarseDropout(fill_mask=1)]
    return A.Compose([*first, *turns, A.Normalize(), A.ToTensorV2()])


def masked(dtype):
    image = np.random.default_rng(0).integers(0, 256, (40, 40, 3), np.uint8)
    mask = np.arange(1600).reshape(40, 40) % 101 * (649 if dtype == np.uint16 else 1)
    return [{"image": image, "mask": mask.astype(dtype)} for _ in range(SAMPLES)]


def albumentations_masks(compose, samples):
    made = by_albumentations(compose, samples, keys(len(samples)))
    return [np.asarray(one["mask"]) for one in made]


def assert_masks(got, want, dtype):
    assert len(got) == len(want) == SAMPLES
    for one, other in zip(got, want, strict=True):
        assert str(one.dtype).removeprefix("torch.") == np.dtype(dtype).name
        assert np.array_equal(np.asarray(one), other)


@pytest.mark.cases(13)
@each("dtype", ALL_DTYPES)
@each("crop", [(), (A.RandomResizedCrop((24, 24)),)])
def test_a_mask_keeps_its_dtype_and_albumentations_values_wherever_it_is_computed(dtype, crop):
    compose, samples = moved_here_and_there(*crop), masked(dtype)
    want = albumentations_masks(compose, samples)
    transform = as_batch_transform(compose)
    assert_masks([one["mask"] for one in in_worker(transform, samples)], want, dtype)
    assert_masks(on_device(transform.for_samples(samples), samples)[0]["mask"], want, dtype)
    assert_masks(on_device(transform, samples)[0]["mask"], want, dtype)


@each("dtype", ALL_DTYPES)
@each("everywhere", [False, True])
def test_a_mask_of_another_loaders_batch_does_so_too(dtype, everywhere):
    compose, samples = moved_here_and_there(), masked(dtype)
    if everywhere:
        compose = A.Compose([A.HorizontalFlip(p=1), A.ImageCompression(p=1), A.VerticalFlip(p=1)])
    want = albumentations_masks(compose, samples)
    tensors = default_collate(samples)
    for there in (False, True):
        made = collated(compose, tensors, keys(1)[0], on_device=there)
        assert_masks(made["mask"], want, dtype)


@each("place", [in_worker, lambda *args: on_device(*args)[1]])
def test_lists_and_volumes_of_masks_keep_their_dtype(place):
    compose, samples = moved_here_and_there(), masked(np.int64)
    samples = [one | {"masks": [one["mask"], one["mask"] + 1]} for one in samples]
    want = albumentations_masks(compose, samples)
    for sample, mask in zip(place(as_batch_transform(compose), samples), want, strict=True):
        first, second = map(np.asarray, sample["masks"])
        assert first.dtype == second.dtype == np.int64
        assert np.array_equal(first, mask)


def test_a_mask_that_a_pipeline_gives_another_dtype_on_purpose_has_that():
    def halves(mask, **_):
        return mask.astype(np.float32) / 2

    compose = A.Compose([A.HorizontalFlip(p=1), A.Lambda(mask=halves, p=1)])
    samples = masked(np.int64)
    want = albumentations_masks(compose, samples)
    got = [one["mask"] for one in in_worker(as_batch_transform(compose), samples)]
    assert_masks(got, want, np.float32)


@each("dtype", [np.uint16, np.uint32])
def test_a_mask_that_a_pipeline_gives_a_dtype_without_forms_is_moved_in_the_worker(dtype):
    def cast(mask, **_):
        return mask.astype(dtype)

    compose = A.Compose([A.Lambda(mask=cast, p=1), A.HorizontalFlip(), A.CoarseDropout()])
    samples = masked(np.uint8)
    want = albumentations_masks(compose, samples)
    transform = as_batch_transform(compose).for_samples(samples)
    assert_masks(on_device(transform, samples)[0]["mask"], want, dtype)


@pytest.mark.cases(31)
@each("dtype", [np.uint8, np.uint16, np.int16, np.float32])
@each(
    "case",
    [case for case in MOVES if case.name in {"Affine", "Resize", "RandomResizedCrop"}],
)
def test_masks_read_between_pixels_are_a_level_off_at_most(case, dtype):
    for layout in LAYOUTS:
        arguments = {"mask_interpolation": 1}
        if "border_mode" in case.axes:
            arguments |= {"border_mode": 0, "fill_mask": 200.0}
        want, got = made_by_both(case, dtype, layout, **arguments)
        gap = np.abs(want.astype(np.float64) - got)
        assert gap.max() <= (1 if dtype != np.float32 else 0.01)
        assert (gap > 0.01).mean() <= 0.01
