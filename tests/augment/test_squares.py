"""Quarter turns and transpositions, which change the shape of some images: squares stay squares."""

import os

os.environ.setdefault("NO_ALBUMENTATIONS_UPDATE", "1")

import albumentations as A
import numpy as np
import pytest
from augment.test_dataset_styles import Reading, assert_left_over_and_the_same
from misses import each

from lightning_fastdata import FastDataLoader
from lightning_fastdata.augment.transform import as_batch_transform
from lightning_fastdata.planning.facts.pipeline_trial import try_recording
from lightning_fastdata.plugin.placing.stage_transforms import finish

RNG = np.random.default_rng(3)
SQUARE = RNG.integers(0, 256, (12, 24, 24, 3), np.uint8)
WIDE = RNG.integers(0, 256, (12, 16, 24, 3), np.uint8)
TURNS = {
    "quarter turns": [A.RandomRotate90(p=1)],
    "a transposition": [A.HorizontalFlip(), A.Transpose()],
    "eight symmetries": [A.D4(p=1)],
    "one of several": [A.OneOf([A.RandomRotate90(p=1), A.Transpose(p=1), A.VerticalFlip(p=1)])],
    "behind a crop": [A.RandomCrop(16, 16), A.SquareSymmetry(p=1), A.RandomRotate90()],
    "before what needs pixels": [A.RandomRotate90(), A.ImageCompression(p=0.5), A.Transpose()],
}


def of(images, turns, *, mask=False):
    def read(dataset, _, index):
        if not mask:
            return dataset.transform(image=images[index])["image"], index
        out = dataset.transform(image=images[index], mask=images[index][..., 0])
        return out["image"], out["mask"]

    ends = A.RandomBrightnessContrast(), A.Normalize(), A.ToTensorV2()
    return Reading(read, transform=A.Compose([*turns, *ends]))


@pytest.mark.cases(8)
@each("mask", [False, True])
@each("turns", TURNS)
def test_squares_are_turned_on_the_device(turns, mask):
    assert_left_over_and_the_same(of(SQUARE, TURNS[turns], mask=mask))


@each("turns", TURNS)
def test_other_images_are_right_too(turns):
    assert_left_over_and_the_same(of(WIDE, TURNS[turns]), batch_size=1)


def test_a_batch_may_have_both():
    images = [SQUARE[index] if index % 3 else WIDE[index] for index in range(12)]

    def listed(samples):
        return list(zip(*samples, strict=True))

    for turns in TURNS.values():
        assert_left_over_and_the_same(of(images, turns), collate_fn=listed)


def test_turns_of_squares_wait_for_the_device():
    dataset = of(SQUARE, [A.RandomRotate90(p=1)])
    assert "either" in try_recording(dataset, seed=0, collate_fn=None).explain()
    names = [placement.name for placement in _plan([A.Transpose()]) if placement.where == "worker"]
    assert names == []


def _plan(turns):
    return as_batch_transform(A.Compose([*turns, A.Normalize(), A.ToTensorV2()])).plan.placements


@each(("images", "left"), [(SQUARE, True), (WIDE, False)])
def test_a_pipeline_of_the_loader_leaves_over_what_keeps_the_shape(images, left):
    compose = A.Compose([A.Transpose(p=1), A.Normalize(), A.ToTensorV2()])
    transform = as_batch_transform(compose)
    samples = [{"image": image} for image in images]
    made = [
        list(FastDataLoader(samples, 4, transform=transform, on_device=on, staged="train"))
        for on in (True, False)
    ]
    assert all(
        ("Transpose" in {step.name for step in batch.draws.programs["image"].steps}) == left
        for batch in made[0]
    )
    for one, other in zip(*made, strict=True):
        done = [finish(batch, {"train": [transform]})[0]["image"] for batch in (one, other)]
        assert done[0].equal(done[1])
