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
TURNS = {
    "quarter turns": [A.RandomRotate90(p=1)],
    "a transposition": [A.HorizontalFlip(), A.Transpose()],
    "eight symmetries": [A.D4(p=1)],
    "one of several": [A.OneOf([A.RandomRotate90(p=1), A.Transpose(p=1), A.VerticalFlip(p=1)])],
    "behind a crop": [A.RandomCrop(16, 16), A.D4(p=1), A.RandomRotate90()],
    "before what needs pixels": [A.RandomRotate90(), A.ImageCompression(p=0.5), A.Transpose()],
}


def pipeline(*turns):
    last = [A.RandomBrightnessContrast(), A.Normalize(), A.ToTensorV2()]
    return A.Compose([A.CenterCrop(24, 24), *turns, *last])


def batches(samples, compose, *, on_device):
    transform = as_batch_transform(compose)
    options = {"transform": transform, "on_device": on_device, "staged": "train", "seed": 5}
    staged = list(FastDataLoader(samples, 4, **options))
    return staged, [finish(batch, {"train": [transform]})[0] for batch in staged]


def assert_the_same_on_the_device(samples, compose):
    """Hold the device's batches to those of the workers; return the names of its operations."""
    _, whole = batches(samples, compose, on_device=False)
    staged, done = batches(samples, compose, on_device=True)
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


def test_images_of_another_or_an_unknown_shape_are_turned_by_the_workers():
    for first in ([], [A.Resize(24, 32)]):
        told = as_batch_transform(A.Compose([*first, A.RandomRotate90(p=1)])).explain()
        row = next(line for line in told.splitlines() if line.startswith("RandomRotate90"))
        assert "worker" in row
        assert "its output size differs between samples" in row
