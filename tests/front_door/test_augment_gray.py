"""Gray batches through the explicit API and the callback, as a device carries them out."""

from __future__ import annotations

import albumentations as A
import lightning as L
import numpy as np
import pytest
import torch
from skimage import data
from torch.utils.data import DataLoader, TensorDataset
from trainers import quiet_trainer

from lightning_fastdata import BatchTransform, DataThroughputCallback

torch.set_num_threads(1)

NAMES = ("camera", "coins", "page", "text")
GRAY = torch.from_numpy(np.stack([getattr(data, name)()[60:132, 90:162] for name in NAMES]))
FORMS = {
    "[n, H, W]": GRAY,
    "[n, H, W, 1]": GRAY[..., None],
    "[n, 1, H, W]": GRAY[:, None],
    "[n, H, W] of float32": GRAY / 255,
}
OPERATIONS = {
    "Affine": A.Affine(rotate=(-30, 30), p=1),
    "AutoContrast": A.AutoContrast(p=1),
    "Blur": A.Blur(p=1),
    "CLAHE": A.CLAHE(p=1),
    "CoarseDropout": A.CoarseDropout(p=1),
    "D4": A.D4(p=1),
    "Equalize": A.Equalize(p=1),
    "GaussianBlur": A.GaussianBlur(p=1),
    "GridDistortion": A.GridDistortion(p=1),
    "GridDropout": A.GridDropout(p=1),
    "HorizontalFlip": A.HorizontalFlip(p=1),
    "HueSaturationValue": A.HueSaturationValue(p=1),
    "InvertImg": A.InvertImg(p=1),
    "MedianBlur": A.MedianBlur(p=1),
    "MotionBlur": A.MotionBlur(p=1),
    "Normalize": A.Normalize((0.5,), (0.25,), p=1),
    "Normalize by range": A.Normalize(normalization="min_max", p=1),
    "OneOf": A.OneOf([A.Perspective(p=1), A.ImageCompression(p=1), A.Sharpen(p=1)], p=0.9),
    "Pad": A.Pad(4, p=1),
    "Posterize": A.Posterize(p=1),
    "RandomBrightnessContrast": A.RandomBrightnessContrast(p=1),
    "RandomCrop": A.RandomCrop(48, 40, p=1),
    "RandomGamma": A.RandomGamma(p=1),
    "RandomGridShuffle": A.RandomGridShuffle(p=1),
    "RandomResizedCrop": A.RandomResizedCrop((64, 64), p=1),
    "Resize": A.Resize(50, 60, p=1),
    "Rotate": A.Rotate(p=1),
    "Sharpen": A.Sharpen(p=1),
    "Solarize": A.Solarize(p=1),
    "ToFloat": A.ToFloat(p=1),
    "ToRGB": A.ToRGB(p=1),
    "ToTensorV2": A.ToTensorV2(p=1),
    "UnsharpMask": A.UnsharpMask(p=1),
}


def assert_close(one: torch.Tensor, other: torch.Tensor) -> None:
    """Equal forms, and no value more than one of 255 levels apart."""
    assert one.shape == other.shape
    assert one.dtype == other.dtype
    level = 1 if one.dtype == torch.uint8 else 4.01 / 255
    assert (one.double() - other.double()).abs().max() <= level


def albumentations_does(operation: A.BasicTransform, images: torch.Tensor) -> torch.Tensor:
    torch.manual_seed(7)
    return BatchTransform.from_albumentations(operation)(images.clone())


def device_does(operation: A.BasicTransform, images: torch.Tensor) -> torch.Tensor:
    torch.manual_seed(7)
    return BatchTransform.from_albumentations(operation, on_cpu="torch")(images.clone())


@pytest.mark.parametrize("name", OPERATIONS)
def test_gray_batches_come_out_as_albumentations_makes_them(name: str) -> None:
    for images in FORMS.values():
        wanted = albumentations_does(OPERATIONS[name], images)
        assert_close(device_does(OPERATIONS[name], images), wanted)


@pytest.mark.parametrize("form", FORMS)
def test_draws_are_carried_out_on_gray_batches(form: str) -> None:
    images = FORMS[form]
    compose = A.Compose([A.HorizontalFlip(), A.RandomGamma(), A.Rotate(p=0.7), A.ToTensorV2()])
    aug = BatchTransform.from_albumentations(compose, on_cpu="torch")
    torch.manual_seed(7)
    assert_close(aug(images), albumentations_does(compose, images))


class Keeps(L.LightningModule):
    """Keeps the batches that it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(()))
        self.seen: list[torch.Tensor] = []

    def training_step(self, batch: list[torch.Tensor], _: int) -> torch.Tensor:
        self.seen.append(batch[0].clone())
        return self.weight * 0

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), 0.1)


def trained_on(augment: BatchTransform, images: torch.Tensor) -> torch.Tensor:
    L.seed_everything(3, verbose=False)
    module = Keeps()
    trainer = quiet_trainer(
        callbacks=[DataThroughputCallback(augment=augment, summary=False, report=False)]
    )
    trainer.fit(module, DataLoader(TensorDataset(images.clone()), batch_size=2))
    return torch.cat(module.seen)


@pytest.mark.parametrize("form", ["[n, H, W]", "[n, 1, H, W]"])
def test_the_callback_gives_a_training_gray_batches_in_their_form(form: str) -> None:
    pipeline = [A.D4(), A.OneOf([A.Equalize(p=1), A.ImageCompression(p=1)]), A.CoarseDropout(p=0.7)]
    results = [
        trained_on(BatchTransform.from_albumentations(A.Compose(pipeline), **options), FORMS[form])
        for options in ({}, {"on_cpu": "torch"})
    ]
    assert results[0].shape == FORMS[form].shape
    assert torch.equal(*results)


def test_a_batch_that_is_given_stays_as_it_was() -> None:
    images = GRAY.clone()
    BatchTransform.from_albumentations(A.Equalize(p=1))(images)
    assert torch.equal(images, GRAY)
