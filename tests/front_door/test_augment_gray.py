"""Gray batches through the explicit API and the callback, as a device carries them out."""

from __future__ import annotations

from typing import Any

import albumentations as A
import lightning as L
import numpy as np
import pytest
import torch
from augment.batches import collated
from misses import each
from skimage import data
from torch.utils.data import DataLoader, TensorDataset
from trainers import Learner, quiet_trainer, trained

from lightning_fastdata import DataThroughputCallback, SampleKey
from lightning_fastdata.errors import BatchError
from lightning_fastdata.randomness.seeds import derived_seed

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
    "what draws": A.Compose([A.HorizontalFlip(), A.RandomGamma(), A.Rotate(p=0.7), A.ToTensorV2()]),
}


def assert_close(one: torch.Tensor, other: torch.Tensor) -> None:
    """Equal forms, and no value more than one of 255 levels apart."""
    assert one.shape == other.shape
    assert one.dtype == other.dtype
    level = 1 if one.dtype == torch.uint8 else 4.01 / 255
    assert (one.double() - other.double()).abs().max() <= level


def made(pipeline: Any, images: torch.Tensor, on_device: bool, seed: int = 7) -> torch.Tensor:
    pipeline = pipeline if isinstance(pipeline, A.Compose) else A.Compose([pipeline])
    batch, key = {"image": images.clone()}, SampleKey(seed, 0, 0)
    images_made = collated(pipeline, batch, key, on_device=on_device)["image"]
    assert torch.equal(batch["image"], images)  # what is given stays as it was
    return images_made


@each("name", OPERATIONS)
def test_gray_batches_come_out_as_albumentations_makes_them(name: str) -> None:
    for images in FORMS.values():
        assert_close(*(made(OPERATIONS[name], images, there) for there in (True, False)))


@each("form", ["[n, H, W]", "[n, 1, H, W]"])
def test_the_callback_gives_a_training_gray_batches_in_their_form(form: str) -> None:
    images = FORMS[form]
    either = A.OneOf([A.Equalize(p=1), A.ImageCompression(p=1)])
    pipeline = A.Compose([A.D4(), either, A.CoarseDropout(p=0.7)])
    L.seed_everything(7, verbose=False)
    module = Learner(lambda batch: batch[0].clone())
    callback = DataThroughputCallback(augment=pipeline, summary=False, report=False)
    loader = DataLoader(TensorDataset(images.clone()), batch_size=2)
    quiet_trainer(callbacks=[callback]).fit(module, loader)
    for number, (seen, given) in enumerate(zip(module.seen, images.split(2), strict=True)):
        seed = derived_seed(7, "callback", 0, 0, number)  # of its first callback, on rank 0
        for there in (False, True):
            assert torch.equal(seen, made(pipeline, given, there, seed))


def test_floats_that_a_precision_made_halves_are_told_to_be_bytes():
    loader = DataLoader(TensorDataset(GRAY[:, None] / 255), batch_size=2)
    callback = DataThroughputCallback(augment=A.Compose([A.D4()]), summary=False, report=False)
    with pytest.raises(BatchError, match=r"bf16-true.*makes bfloat16 of floats; uint8 stays"):
        trained(loader, callbacks=[callback], precision="bf16-true")
