"""What ``explain()`` says of pipelines that datasets call themselves."""

import logging
import os

os.environ.setdefault("NO_ALBUMENTATIONS_UPDATE", "1")

import albumentations as A
import numpy as np
import pytest
from augment.trainers import quiet_trainer
from lightning.pytorch.demos.boring_classes import BoringModel
from torch.utils.data import Dataset

from lightning_fastdata import FastDataModule, FastDataWarning

IMAGES = np.random.default_rng(0).integers(0, 256, (8, 20, 18, 3), np.uint8)


def pipeline():
    return A.Compose([A.RandomCrop(8, 4), A.HorizontalFlip(), A.Normalize(), A.ToTensorV2()])


class Photos(Dataset):
    def __init__(self):
        self.transform = pipeline()

    def __len__(self):
        return len(IMAGES)

    def __getitem__(self, index):
        return self.transform(image=IMAGES[index])["image"][0, :1].reshape(-1).repeat(8)


class BuiltWhileRead(Dataset):
    def __len__(self):
        return len(IMAGES)

    def __getitem__(self, index):
        return pipeline()(image=IMAGES[index])["image"][0, :1].reshape(-1).repeat(8)


NOT_FOUND = "no Albumentations pipeline was found in the dataset"
BEFORE = {
    "gpu": 'augment_on="gpu"; the dataset is tried out when its loader is made',
    "cpu": 'all of it in the workers, by Albumentations itself: augment_on="cpu"',
}
AFTER = {
    "gpu": "works on what it returns (torch.Tensor.__getitem__)",
    "cpu": BEFORE["cpu"],
    "auto": "all of it in the workers, by Albumentations itself: there is no accelerator",
}


@pytest.mark.parametrize("where", BEFORE)
def test_a_pipeline_in_a_dataset_is_told_of_before_there_is_a_trainer(where):
    data = FastDataModule.from_datasets(Photos(), Photos(), augment_on=where)
    text = data.explain()
    assert text.count(BEFORE[where]) == 2
    assert ("HorizontalFlip" in text) == (where == "gpu")


@pytest.mark.parametrize("where", AFTER)
def test_a_pipeline_in_a_dataset_is_told_of_wherever_it_runs(where, tmp_path):
    data = FastDataModule.from_datasets(Photos(), batch_size=4, augment_on=where)
    quiet_trainer(tmp_path).fit(BoringModel(), datamodule=data)
    assert AFTER[where] in data.explain()


def test_who_asks_for_a_device_is_told_that_no_pipeline_was_found(tmp_path, caplog):
    caplog.set_level(logging.INFO, "lightning_fastdata")
    data = FastDataModule.from_datasets(BuiltWhileRead(), batch_size=4, augment_on="gpu")
    with pytest.warns(FastDataWarning, match="while a sample is read"):
        quiet_trainer(tmp_path).fit(BoringModel(), datamodule=data)
    assert NOT_FOUND in data.explain()
    assert NOT_FOUND in caplog.text
    assert NOT_FOUND not in FastDataModule.from_datasets(BuiltWhileRead()).explain()
