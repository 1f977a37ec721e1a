"""Transfer hooks of a user beside a dataset's own pipeline: they get what they always got."""

import os

os.environ.setdefault("NO_ALBUMENTATIONS_UPDATE", "1")

import albumentations as A
import numpy as np
import pytest
import torch
from augment.trainers import Keeps, quiet_trainer
from torch.utils.data import Dataset

from lightning_fastdata import FastDataModule

IMAGES = np.random.default_rng(0).integers(0, 256, (8, 20, 18, 3), np.uint8)


class Photos(Dataset):
    def __init__(self):
        self.transform = A.Compose([A.RandomCrop(16, 16), A.Normalize(), A.ToTensorV2()])

    def __len__(self):
        return len(IMAGES)

    def __getitem__(self, index):
        return {"image": self.transform(image=IMAGES[index])["image"]}


def mirrored(batch):
    return {**batch, "image": batch["image"].flip(-1)}


class MirrorsBefore(Keeps):
    def on_before_batch_transfer(self, batch, dataloader_idx):
        return mirrored(batch)


class MirrorsInTransfer(Keeps):
    def transfer_batch_to_device(self, batch, device, dataloader_idx):
        return super().transfer_batch_to_device(mirrored(batch), device, dataloader_idx)


class MirrorsAfter(Keeps):
    def on_after_batch_transfer(self, batch, dataloader_idx):
        return mirrored(batch)


class DataMirrorsBefore(FastDataModule):
    def on_before_batch_transfer(self, batch, dataloader_idx):
        return mirrored(batch)


class DataMirrorsAfter(FastDataModule):
    def on_after_batch_transfer(self, batch, dataloader_idx):
        return mirrored(batch)


class Inherits(DataMirrorsAfter):
    pass


class DataMirrorsRightly(FastDataModule):
    def on_after_batch_transfer(self, batch, dataloader_idx):
        return mirrored(super().on_after_batch_transfer(batch, dataloader_idx))


HOOKS = {
    "none": (Keeps, FastDataModule, None),
    "module, before": (MirrorsBefore, FastDataModule, "MirrorsBefore.on_before_batch_transfer"),
    "module, transfer": (MirrorsInTransfer, FastDataModule, "Transfer.transfer_batch_to_device"),
    "module, after": (MirrorsAfter, FastDataModule, None),
    "data, before": (Keeps, DataMirrorsBefore, "does not call super()"),
    "data, after": (Keeps, DataMirrorsAfter, "does not call super()"),
    "data, inherited": (Keeps, Inherits, "does not call super()"),
    "data, after super": (Keeps, DataMirrorsRightly, None),
}


@pytest.mark.cases(4)
@pytest.mark.parametrize("hooks", HOOKS)
def test_a_hook_gets_what_it_always_got(hooks, tmp_path):
    module, data, why = HOOKS[hooks]
    seen = {}
    for where in ("cpu", "gpu"):
        model = module()
        photos = data.from_datasets(Photos(), batch_size=4, augment_on=where, seed=1)
        quiet_trainer(tmp_path).fit(model, datamodule=photos)
        seen[where] = torch.stack([batch["image"] for batch in model.seen])
    assert torch.equal(seen["cpu"], seen["gpu"])
    assert photos.augments_on_device("train") == (why is None)
    assert (why or "on the device: ['image']") in photos.explain()
