"""Training that normalises its images while another stage does not is said once."""

from __future__ import annotations

import warnings

import albumentations as A
import numpy as np
import pytest
import torch
from misses import each
from PIL import Image
from torch.utils.data import Dataset
from torchvision.transforms import v2
from trainers import Learner, quiet_trainer

from lightning_fastdata import FastDataModule, FastDataWarning, as_batch_transform
from lightning_fastdata.augment.mixing import CutMix, mixed

torch.set_num_threads(1)

BYTES = np.random.default_rng(0).integers(0, 256, (16, 20, 3), np.uint8)
UNIT = (BYTES / 255).astype(np.float32)


class Images(Dataset):
    def __init__(self, image, label=0):
        self.image, self.label = image, label

    def __len__(self):
        return 4

    def __getitem__(self, index):
        return self.image, self.label


class Model(Learner):
    def validation_step(self, batch):
        pass

    test_step = validation_step


FINISH = [A.Normalize(), A.ToTensorV2()]


def normalise():
    return A.Compose([A.HorizontalFlip(), *FINISH])


def as_tensor(image):
    return torch.from_numpy(image.copy()).permute(2, 0, 1)


def said(folder, train, val, augment, methods=("fit",)):
    data = FastDataModule.from_datasets(
        Images(train), Images(val), Images(val), batch_size=2, num_workers=0, augment=augment
    )
    trainer = quiet_trainer(folder, max_epochs=2)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always", FastDataWarning)
        for method in methods:
            getattr(trainer, method)(Model(), datamodule=data)
    return [str(one.message) for one in told if one.category is FastDataWarning]


def flip():
    return A.Compose([A.HorizontalFlip(), A.ToTensorV2()])


def scaled_and_normalised():
    return v2.Compose([v2.ToDtype(torch.float32, scale=True), v2.Normalize([0.5] * 3, [0.5] * 3)])


LEFT_OUT = {
    "no pipeline": (BYTES, BYTES, normalise),
    "tensors": (BYTES, as_tensor(BYTES), normalise),
    "floats": (UNIT, UNIT, lambda: A.Compose([A.Normalize(max_pixel_value=1.0)])),
    "ToFloat": (BYTES, BYTES, lambda: A.Compose([A.ToFloat(255)])),
    "a pipeline that does not": (BYTES, BYTES, lambda: {"train": normalise(), "val": flip()}),
    "behind options": (BYTES, BYTES, lambda: as_batch_transform(normalise())),
    "mixed": (BYTES, BYTES, lambda: mixed(normalise(), CutMix(), num_classes=3)),
    "torchvision": (as_tensor(BYTES), as_tensor(BYTES), scaled_and_normalised),
}


@each("name", LEFT_OUT)
def test_what_training_does_and_validation_does_not_is_said_once(name, tmp_path):
    train, val, augment = LEFT_OUT[name]
    (text,) = said(tmp_path, train, val, augment(), ("fit", "validate", "test"))
    assert "ToFloat" in text if name == "ToFloat" else "Normalize" in text
    assert "augment={'train': compose, 'val':" in text


ALIKE = {
    "both": (BYTES, BYTES, lambda: {"train": normalise(), "val": A.Compose(FINISH)}),
    "neither": (BYTES, BYTES, flip),
    "the dataset does": (BYTES, (as_tensor(UNIT) - 0.5) / 0.25, normalise),
    "the dataset makes floats": (BYTES, UNIT, lambda: A.Compose([A.ToFloat(255)])),
    "a callable may": (BYTES, BYTES, lambda: {"train": normalise(), "val": lambda batch: batch}),
    "no augment": (BYTES, BYTES, lambda: None),
}


@each("name", ALIKE)
def test_what_is_alike_or_not_known_is_not_said(name, tmp_path):
    train, val, augment = ALIKE[name]
    assert said(tmp_path, train, val, augment()) == []


def test_pictures_of_pil_are_no_floats(tmp_path):
    data = FastDataModule.from_datasets(
        Images(BYTES), Images(Image.fromarray(BYTES)), augment=normalise(), num_workers=0,
        collate_fn=lambda samples: samples,
    )  # fmt: skip
    with pytest.warns(FastDataWarning, match="Normalize"):
        quiet_trainer(tmp_path).validate(Model(), datamodule=data, verbose=False)
