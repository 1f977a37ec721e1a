"""Segment photographs: one Albumentations pipeline moves images and masks alike.

The mask of a crop marks its light parts, found by Otsu's threshold; cheap, but a real mask.

python examples/segmentation.py [--small]
"""

import sys

import numpy as np
import torch
from albumentations import (
    Compose,
    HorizontalFlip,
    Normalize,
    RandomResizedCrop,
    Resize,
    ToTensorV2,
)
from lightning.pytorch import LightningModule, Trainer
from skimage.color import rgb2gray
from skimage.filters import threshold_otsu
from torch import nn
from torch.utils.data import Dataset
from torchvision.datasets import ImageFolder

from demo.photos import Cut, cut_photographs
from lightning_fastdata import DataThroughputCallback, FastDataModule

SMALL = "--small" in sys.argv


class LightParts(Dataset):
    """Dicts with ``image``, uint8 [H, W, 3], and ``mask``, uint8 [H, W], 1 where it is light."""

    def __init__(self, folder):
        self.photos = ImageFolder(folder)

    def __len__(self):
        return len(self.photos)

    def __getitem__(self, index):
        image = np.asarray(self.photos[index][0])
        gray = rgb2gray(image)
        return {"image": image, "mask": (gray > threshold_otsu(gray)).astype(np.uint8)}


class Segmenter(LightningModule):
    def __init__(self):
        super().__init__()
        self.network = nn.Sequential(
            nn.Conv2d(3, 16, 5, padding=2), nn.ReLU(), nn.Conv2d(16, 1, 5, padding=2)
        )

    def loss(self, batch):
        logits = self.network(batch["image"])[:, 0]
        return nn.functional.binary_cross_entropy_with_logits(logits, batch["mask"].float())

    def training_step(self, batch):
        return self.loss(batch)

    def validation_step(self, batch):
        self.log("val_loss", self.loss(batch), prog_bar=True, batch_size=len(batch["mask"]))

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), 3e-3)


if __name__ == "__main__":
    cut = Cut(train_per_class=16, val_per_class=8) if SMALL else None
    photos = cut_photographs("demo_data/few" if SMALL else "demo_data/photos", cut)
    finish = [Normalize(), ToTensorV2()]
    data = FastDataModule.from_datasets(
        LightParts(photos / "train"),
        LightParts(photos / "val"),
        batch_size=16,
        augment={
            "train": Compose(
                [RandomResizedCrop((96, 96), scale=(0.3, 1.0)), HorizontalFlip(), *finish]
            ),
            "val": Compose([Resize(96, 96), *finish]),
        },
    )
    trainer = Trainer(max_epochs=1 if SMALL else 3, callbacks=[DataThroughputCallback()])
    trainer.fit(Segmenter(), datamodule=data)
