"""Pipelines whose draws cannot be keyed by sample are told of when the training starts."""

import warnings

import albumentations as A
import numpy as np
import pytest
import torch
from torch.utils.data import Dataset
from trainers import Learner, quiet_trainer

from lightning_fastdata import FastDataLoader, FastDataModule, FastDataWarning, LoaderOptions

IMAGE = np.zeros((8, 8, 3), np.uint8)
FLIP = A.Compose([A.HorizontalFlip(p=0.5), A.ToTensorV2()])
RESIZE = A.Compose([A.Resize(8, 8), A.Normalize(), A.ToTensorV2()])


class Arrays(Dataset):
    def __len__(self):
        return 4

    def __getitem__(self, index):
        return IMAGE


def flipping(samples, pipeline=FLIP):
    return torch.stack([pipeline(image=image)["image"].float() for image in samples])


def resizing(samples, pipeline=RESIZE):
    return torch.stack([pipeline(image=image)["image"] for image in samples])


class Collating:
    def __init__(self, transform):
        self.transform = transform

    def __call__(self, samples):
        return torch.stack([self.transform(image=image)["image"] for image in samples])


def told_by_a_training(dataset, folder, **options):
    data = FastDataModule.from_datasets(
        dataset, dataset, batch_size=2, options=LoaderOptions(num_workers=0), **options
    )
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        quiet_trainer(folder, max_epochs=2, reload_dataloaders_every_n_epochs=1).fit(
            Learner(), datamodule=data
        )
    return [str(one.message) for one in caught if issubclass(one.category, FastDataWarning)]


def told(dataset, collate_fn=None):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        FastDataLoader(dataset, 2, collate_fn=collate_fn)
    return [str(one.message) for one in caught if issubclass(one.category, FastDataWarning)]


def test_a_collation_that_draws_is_told_of_once(tmp_path):
    (message,) = told_by_a_training(Arrays(), tmp_path, collate_fn=flipping)
    assert "The collate_fn flipping calls an Albumentations pipeline" in message
    assert "augment=" in message


def test_an_object_that_collates_is_looked_into():
    assert told(Arrays(), Collating(FLIP))


class OwnPipeline(Arrays):
    def __init__(self):
        self.transform = A.Compose([A.HorizontalFlip(), A.ToTensorV2()])

    def __getitem__(self, index):
        if isinstance(self.transform, A.Compose):
            return self.transform(image=IMAGE)["image"]
        return IMAGE

    def collate(self, samples):
        return torch.stack(samples)


@pytest.mark.parametrize(
    ("dataset", "collate_fn"),
    [
        (Arrays(), None),
        (Arrays(), resizing),
        (Arrays(), Collating(RESIZE)),
        (OwnPipeline(), None),
        (OwnPipeline(), OwnPipeline().collate),
    ],
)
def test_nothing_is_said_of_what_draws_nothing_or_is_keyed(dataset, collate_fn):
    if collate_fn is not None and isinstance(dataset, OwnPipeline):
        collate_fn = dataset.collate
    assert told(dataset, collate_fn) == []
