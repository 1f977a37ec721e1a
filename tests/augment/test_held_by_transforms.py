"""What a transform holds itself, generators and a state, is keyed and compared as in a dataset."""

from __future__ import annotations

from contextlib import closing

import albumentations as A
import numpy as np
import pytest
import torch
from augment.loaders import Pictures, batches, loader_of
from misses import each
from torchvision.transforms import v2

from lightning_fastdata import FastDataLoader, as_batch_transform
from lightning_fastdata.errors import TransformError

COUNT = 12


def flat(index):
    return {"image": np.full((4, 4, 3), 100, np.uint8), "index": index}


class OwnNumbers(A.ImageOnlyTransform):
    def __init__(self):
        super().__init__(p=1)
        self.numbers = np.random.default_rng(7)

    def apply(self, img, **_):
        return np.full_like(img, self.numbers.integers(0, 255))


class OwnPipeline(A.ImageOnlyTransform):
    def __init__(self):
        super().__init__(p=1)
        self.pipeline = A.Compose([A.RandomBrightnessContrast(brightness_limit=0.5, p=1)])

    def apply(self, img, **_):
        return self.pipeline(image=img)["image"]


class OwnNumbersOfV2(v2.Transform):
    def __init__(self):
        super().__init__()
        self.numbers = np.random.default_rng(7)

    def transform(self, inpt, params):
        return torch.full_like(inpt, int(self.numbers.integers(0, 255)))


class Counts(v2.Transform):
    def __init__(self):
        super().__init__()
        self.count = 0

    def transform(self, inpt, params):
        self.count += 1
        return torch.full_like(inpt, self.count)


class CountsOfAlbumentations(A.ImageOnlyTransform):
    def __init__(self):
        super().__init__(p=1)
        self.count = 0

    def apply(self, img, **_):
        self.count += 1
        return np.full_like(img, self.count)


class CountingContainer(A.Sequential):
    def __init__(self):
        super().__init__([A.InvertImg(p=0)], p=1)
        self.count = 0

    def __call__(self, *args, **data):
        self.count += 1
        return super().__call__(*args, **data) | {"image": np.full_like(data["image"], self.count)}


PIPELINES = {
    "a generator": lambda: A.Compose([OwnNumbers()]),
    "a pipeline": lambda: A.Compose([OwnPipeline()]),
    "a generator, torchvision": lambda: v2.Compose([v2.ToImage(), OwnNumbersOfV2()]),
}


def read(dataset, transform, workers, epochs=2, **options):
    """Return the first number of each image, by epochs."""
    how = {"place": "workers", "workers": workers, "size": 2, **options}
    with closing(loader_of(transform, dataset, **how)) as loader:
        return [
            [int(image.flatten()[0]) for batch in loader for image in batch["image"]]
            for _ in range(epochs)
        ]


@each("held", list(PIPELINES))
def test_draws_do_not_depend_on_the_number_of_workers(held):
    made = [read(Pictures(flat, COUNT), PIPELINES[held](), workers) for workers in (0, 1, 2)]
    assert made[0] == made[1] == made[2]
    first, second = made[0]
    assert len(set(first)) > COUNT // 2
    assert first != second


@each("held", ["a generator", "a pipeline"])
def test_nor_where_the_dataset_calls_the_pipeline(held):
    def dataset():
        pipeline = PIPELINES[held]()
        return Pictures(lambda index: pipeline(**flat(index)) | {"index": index}, COUNT)

    made = [read(dataset(), None, workers) for workers in (0, 1, 2)]
    assert made[0] == made[1] == made[2]
    assert len(set(made[0][0])) > COUNT // 2


@each(
    "pipeline",
    [
        v2.Compose([v2.ToImage(), Counts()]),
        A.Compose([A.InvertImg(p=0), CountsOfAlbumentations()]),
        A.Compose([CountingContainer()]),
    ],
)
def test_a_pipeline_that_keeps_a_state_is_read_as_by_new_workers(pipeline):
    kept = {"executor": "workers", "persistent_workers": "unchanged"}
    made = read(Pictures(flat, 4), pipeline, 1, epochs=3, **kept)
    assert made == [[1, 2, 3, 4]] * 3


@each("place", ["workers", "device"])
def test_a_sample_is_read_once_wherever_its_pixels_are_made(place):
    pipeline = A.Compose([CountsOfAlbumentations(), A.HorizontalFlip(p=1)])
    [batch] = batches(pipeline, Pictures(flat, 4), place=place)
    assert batch["image"][:, 0, 0, 0].tolist() == [1, 2, 3, 4]


@each(
    "how",
    [
        {"transform": as_batch_transform(A.HorizontalFlip()), "on_device": True},
        {"transform": as_batch_transform(lambda batch: batch)},
    ],
)
def test_a_transform_that_nobody_would_run_is_refused(how):
    with pytest.raises(TransformError, match=r"FastDataModule\(augment="):
        FastDataLoader(Pictures(), 4, **how)
