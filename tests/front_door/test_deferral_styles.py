"""The ways in which people hand images out of a dataset, with the pixels left to the device."""

import os

os.environ.setdefault("NO_ALBUMENTATIONS_UPDATE", "1")

import albumentations as A
import lightning as L
import numpy as np
import pytest
import torch
from torch.utils.data import Dataset
from torchvision.transforms import functional as vision

from lightning_fastdata import FastDataModule, LoaderOptions

COUNT = 8
RNG = np.random.default_rng(0)
IMAGES = RNG.integers(0, 256, (COUNT, 32, 40, 3), np.uint8)
MEAN = torch.tensor([0.4, 0.5, 0.6]).view(3, 1, 1)


class Scenes(Dataset):
    """Detection: an image, and boxes of which there are more or fewer."""

    def __init__(self, change, *, several_sizes=False):
        self.change = change
        self.several_sizes = several_sizes
        self.transform = A.Compose(
            [A.HorizontalFlip(), A.RandomBrightnessContrast(p=0.7), A.ToTensorV2()],
            bbox_params=A.BboxParams("pascal_voc", label_fields=["labels"]),
        )

    def __len__(self):
        return COUNT

    def __getitem__(self, index):
        image = IMAGES[index][: 24 + index % 3] if self.several_sizes else IMAGES[index]
        boxes = [[2, 3, 20, 20]] * (1 + index % 3)
        out = self.transform(image=image, bboxes=boxes, labels=list(range(len(boxes))))
        target = {
            "boxes": torch.as_tensor(np.array(out["bboxes"]), dtype=torch.float32),
            "labels": torch.as_tensor(np.array(out["labels"]), dtype=torch.int64),
        }
        return self.change(out["image"]), target


class Keeps(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.scale = torch.nn.Parameter(torch.ones(()))
        self.seen = []

    def training_step(self, batch, _):
        self.seen.append(batch)
        images, _ = batch
        return self.scale * torch.stack([image.float().mean() for image in images]).mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.0)


def train(dataset, augment_on, folder, collate_fn, workers=0):
    data = FastDataModule.from_datasets(
        dataset,
        batch_size=4,
        augment_on=augment_on,
        seed=1,
        collate_fn=collate_fn,
        options=LoaderOptions(num_workers=workers),
    )
    module = Keeps()
    L.Trainer(
        max_epochs=1,
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=folder,
    ).fit(module, datamodule=data)
    return module.seen, data.explain()


def same(one, other):
    if isinstance(one, torch.Tensor):
        return one.dtype == other.dtype and torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    return type(one) is type(other) and len(one) == len(other) and all(map(same, one, other))


def by_columns(batch):
    return tuple(zip(*batch, strict=True))


def listed(batch):
    images, targets = zip(*batch, strict=True)
    return list(images), list(targets)


def stacked(batch):
    images, targets = zip(*batch, strict=True)
    return torch.stack(images).float() / 255, targets


STYLES = {
    "float and a division": lambda image: image.float() / 255,
    "to and div": lambda image: image.to(torch.float32).div(255),
    "in place": lambda image: image.float().div_(255.0),
    "torchvision": lambda image: vision.convert_image_dtype(image, torch.float32),
    "means": lambda image: (image / 255.0 - MEAN) / MEAN,
    "channels last": lambda image: image.permute(1, 2, 0).contiguous().float() / 255,
}


@pytest.mark.parametrize("style", STYLES)
def test_images_in_a_list_are_computed_on_the_device(style, tmp_path):
    dataset = Scenes(STYLES[style])
    wanted, _ = train(dataset, "cpu", tmp_path, by_columns)
    seen, told = train(dataset, "gpu", tmp_path, by_columns)
    assert "on the device: [0][*]" in told
    assert same(wanted, seen)


@pytest.mark.parametrize("collate", [by_columns, listed])
def test_so_are_images_of_several_sizes_from_workers(collate, tmp_path):
    dataset = Scenes(STYLES["float and a division"], several_sizes=True)
    wanted, _ = train(dataset, "cpu", tmp_path, collate, workers=1)
    seen, told = train(dataset, "gpu", tmp_path, collate, workers=1)
    assert "on the device: [0][*]" in told
    assert same(wanted, seen)


def test_and_what_a_collation_does_behind_the_stack(tmp_path):
    dataset = Scenes(lambda image: image)
    wanted, _ = train(dataset, "cpu", tmp_path, stacked)
    seen, told = train(dataset, "gpu", tmp_path, stacked)
    assert "on the device: [0]" in told
    assert same(wanted, seen)


def test_what_needs_the_values_is_named(tmp_path):
    dataset = Scenes(lambda image: image.float().clamp(0, 200) / 255)
    wanted, _ = train(dataset, "cpu", tmp_path, by_columns)
    seen, told = train(dataset, "gpu", tmp_path, by_columns)
    assert "works on what it returns (torch.Tensor.clamp)" in told
    assert same(wanted, seen)


class Squares(Dataset):
    def __init__(self, *turns):
        self.transform = A.Compose([*turns, A.Normalize(), A.ToTensorV2()])

    def __len__(self):
        return COUNT

    def __getitem__(self, index):
        return self.transform(image=IMAGES[index][:, :32])["image"], index


@pytest.mark.parametrize("turn", [A.RandomRotate90, A.Transpose, A.D4])
def test_squares_are_turned_on_the_device(turn, tmp_path):
    wanted, _ = train(Squares(turn(p=0.8)), "cpu", tmp_path, None)
    seen, told = train(Squares(turn(p=0.8)), "gpu", tmp_path, None)
    (row,) = [line for line in told.splitlines() if line.startswith(turn.__name__)]
    assert "either" in row
    assert "where it leaves the shape as it is" in row
    assert same(wanted, seen)
