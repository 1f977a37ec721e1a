"""Gray batches through the explicit API and the callback, as a device carries them out."""

from __future__ import annotations

import albumentations as A
import lightning as L
import numpy as np
import torch
from misses import each
from skimage import data
from torch.utils.data import DataLoader, TensorDataset
from trainers import Learner, quiet_trainer

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
BY_NAME = (
    "AutoContrast Blur CLAHE CoarseDropout D4 Equalize GaussianBlur GridDistortion GridDropout "
    "HorizontalFlip HueSaturationValue InvertImg MedianBlur MotionBlur Posterize RandomGamma "
    "RandomBrightnessContrast RandomGridShuffle Rotate Sharpen Solarize ToFloat ToRGB ToTensorV2 "
    "UnsharpMask"
)
OPERATIONS = {
    **{name: getattr(A, name)(p=1) for name in BY_NAME.split()},
    "Affine": A.Affine(rotate=(-30, 30), p=1),
    "Normalize": A.Normalize((0.5,), (0.25,), p=1),
    "Normalize by range": A.Normalize(normalization="min_max", p=1),
    "OneOf": A.OneOf([A.Perspective(p=1), A.ImageCompression(p=1), A.Sharpen(p=1)], p=0.9),
    "Pad": A.Pad(4, p=1),
    "RandomCrop": A.RandomCrop(48, 40, p=1),
    "RandomResizedCrop": A.RandomResizedCrop((64, 64), p=1),
    "Resize": A.Resize(50, 60, p=1),
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


@each("name", OPERATIONS)
def test_gray_batches_come_out_as_albumentations_makes_them(name: str) -> None:
    for images in FORMS.values():
        wanted = albumentations_does(OPERATIONS[name], images)
        assert_close(device_does(OPERATIONS[name], images), wanted)


@each("form", FORMS)
def test_draws_are_carried_out_on_gray_batches(form: str) -> None:
    images = FORMS[form]
    compose = A.Compose([A.HorizontalFlip(), A.RandomGamma(), A.Rotate(p=0.7), A.ToTensorV2()])
    aug = BatchTransform.from_albumentations(compose, on_cpu="torch")
    torch.manual_seed(7)
    assert_close(aug(images), albumentations_does(compose, images))


def trained_on(augment: BatchTransform, images: torch.Tensor) -> torch.Tensor:
    L.seed_everything(3, verbose=False)
    module = Learner(lambda batch: batch[0].clone())
    trainer = quiet_trainer(
        callbacks=[DataThroughputCallback(augment=augment, summary=False, report=False)]
    )
    trainer.fit(module, DataLoader(TensorDataset(images.clone()), batch_size=2))
    return torch.cat(module.seen)


@each("form", ["[n, H, W]", "[n, 1, H, W]"])
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
