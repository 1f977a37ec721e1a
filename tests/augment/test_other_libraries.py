"""Modules of torchvision and Kornia run on the batch, where Albumentations pipelines run."""

from __future__ import annotations

import albumentations as A
import numpy as np
import torch
from augment.parity import photographs
from torch.utils.data import DataLoader, Dataset
from torchvision.transforms import v2
from trainers import Keeps, quiet_trainer

from lightning_fastdata import DataThroughputCallback, FastDataModule, LoaderOptions

torch.set_num_threads(1)

PHOTOS = [*photographs(24, 32), *(255 - one for one in photographs(24, 32))]
FLOATS = torch.from_numpy(np.stack(PHOTOS)).permute(0, 3, 1, 2) / 255


class Photos(Dataset):
    """Photographs as a pipeline takes them, or as tensors ``[3, H, W]`` in [0, 1]."""

    def __init__(self, form="tuple"):
        self.form = form

    def __len__(self):
        return len(PHOTOS)

    def __getitem__(self, i):
        if self.form == "tuple":
            return PHOTOS[i], i
        if self.form == "tensor":
            return FLOATS[i], i
        return {"image": FLOATS[i], "mask": FLOATS[i, :1], "label": i}


def trained(tmp_path, *, data=None, loader=None, callbacks=()):
    """Return what the steps of one epoch saw."""
    model = Keeps()
    quiet_trainer(tmp_path, callbacks=list(callbacks)).fit(model, loader, datamodule=data)
    return model.seen


def module(dataset, augment, **arguments):
    options = LoaderOptions(num_workers=0)
    return FastDataModule.from_datasets(
        dataset, batch_size=3, augment=augment, options=options, **arguments
    )


def both_ways(tmp_path, transform, form, **where):
    """Return the batches of a data module, and those of a plain loader with the callback."""
    ours = trained(tmp_path, data=module(Photos(form), transform, **where))
    callback = DataThroughputCallback(transform, report=False, summary=False, **where)
    loader = DataLoader(Photos(form), batch_size=3)
    return ours, trained(tmp_path, loader=loader, callbacks=[callback])


def assert_flipped(image, labels):
    for one, label in zip(image, labels.tolist(), strict=True):
        forms = FLOATS[label], FLOATS[label].flip(-1)
        assert any(torch.allclose(one, form, atol=1e-6) for form in forms)


def test_torchvision_gets_the_image_field_alone(tmp_path):
    transform = v2.Compose([v2.RandomHorizontalFlip(p=1), v2.Normalize([0.5] * 3, [0.25] * 3)])
    for batches in both_ways(tmp_path, transform, "tensor", image=0):
        assert len(batches) == 2
        for image, labels in batches:
            assert torch.allclose(image, (FLOATS[labels].flip(-1) - 0.5) / 0.25, atol=1e-6)


def test_torchvision_mixes_whole_batches_behind_a_pipeline(tmp_path):
    data = module(Photos(), A.Compose([A.HorizontalFlip(p=0.5), A.ToFloat(255), A.ToTensorV2()]))
    plain = trained(tmp_path, data=data)
    for image, labels in plain:
        assert_flipped(image, labels)
    cutmix = v2.CutMix(num_classes=len(PHOTOS))
    data.register_transform(lambda batch: cutmix(*batch))
    mixed = trained(tmp_path, data=data)
    for (image, shares), (before, labels) in zip(mixed, plain, strict=True):
        assert shares.shape == (3, len(PHOTOS))
        assert torch.allclose(shares.sum(1), torch.ones(3))
        # Each pixel is that of the sample or of the one before it.
        from_own, from_other = ((image == one).all(1) for one in (before, before.roll(1, 0)))
        assert (from_own | from_other).all()
        own = shares.gather(1, labels[:, None])[:, 0]
        assert torch.allclose(own, from_own.float().mean((1, 2)), atol=0.02)
