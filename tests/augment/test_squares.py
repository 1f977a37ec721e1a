"""Quarter turns and transpositions, which change the shape of some images: squares stay squares."""

import albumentations as A
import numpy as np
import pytest
from misses import each

from lightning_fastdata import FastDataLoader
from lightning_fastdata.augment.transform import as_batch_transform
from lightning_fastdata.plugin.placing.stage_transforms import finish

RNG = np.random.default_rng(3)
SQUARE = RNG.integers(0, 256, (12, 24, 24, 3), np.uint8)
WIDE = RNG.integers(0, 256, (12, 16, 24, 3), np.uint8)
TURNS = {
    "quarter turns": [A.RandomRotate90(p=1)],
    "a transposition": [A.HorizontalFlip(), A.Transpose()],
    "eight symmetries": [A.D4(p=1)],
    "one of several": [A.OneOf([A.RandomRotate90(p=1), A.Transpose(p=1), A.VerticalFlip(p=1)])],
    "behind a crop": [A.RandomCrop(16, 16), A.D4(p=1), A.RandomRotate90()],
    "before what needs pixels": [A.RandomRotate90(), A.ImageCompression(p=0.5), A.Transpose()],
}


def pipeline(*turns):
    return A.Compose([*turns, A.RandomBrightnessContrast(), A.Normalize(), A.ToTensorV2()])


def batches(samples, compose, *, on_device, batch_size):
    transform = as_batch_transform(compose)
    options = {"transform": transform, "on_device": on_device, "staged": "train", "seed": 5}
    staged = list(FastDataLoader(samples, batch_size, **options))
    return staged, [finish(batch, {"train": [transform]})[0] for batch in staged]


def assert_the_same_on_the_device(samples, compose, batch_size=4):
    """Hold the device's batches to those of the workers; return the names of its operations."""
    _, whole = batches(samples, compose, on_device=False, batch_size=batch_size)
    staged, done = batches(samples, compose, on_device=True, batch_size=batch_size)
    for one, other in zip(whole, done, strict=True):
        assert one.keys() == other.keys()
        assert all(one[name].equal(other[name]) for name in one)
    return {step.name for batch in staged for step in batch.draws.programs["image"].steps}


@pytest.mark.cases(4)
@each("mask", [False, True])
@each("turns", TURNS)
def test_squares_are_turned_on_the_device(turns, mask):
    samples = [{"image": one, **({"mask": one[..., 0]} if mask else {})} for one in SQUARE]
    names = assert_the_same_on_the_device(samples, pipeline(*TURNS[turns]))
    assert names & {"RandomRotate90", "Transpose", "D4"}


@each("turns", TURNS)
def test_other_images_are_right_too(turns):
    samples = [{"image": image} for image in WIDE]
    assert_the_same_on_the_device(samples, pipeline(*TURNS[turns]), batch_size=1)


@each(("images", "left"), [(SQUARE, True), (WIDE, False)])
def test_what_keeps_the_shape_is_left_over(images, left):
    compose = A.Compose([A.Transpose(p=1), A.Normalize(), A.ToTensorV2()])
    samples = [{"image": image} for image in images]
    assert ("Transpose" in assert_the_same_on_the_device(samples, compose)) == left


def test_turns_are_planned_for_either_place():
    told = as_batch_transform(pipeline(A.RandomRotate90(p=1), A.Transpose())).explain()
    rows = [line for line in told.splitlines() if line.startswith(("RandomRotate90", "Transpose"))]
    assert len(rows) == 2
    assert all("either" in row and "where it leaves the shape as it is" in row for row in rows)
