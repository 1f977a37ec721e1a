"""Train on a folder of photographs; how to load them is chosen for this machine.

python examples/quickstart.py [--small]
"""

import sys

from lightning.pytorch import Trainer
from torchvision.datasets import ImageFolder

from demo.photos import Cut, cut_photographs
from demo.training import PhotoClassifier, train_augmentation, val_augmentation
from lightning_fastdata import DataThroughputCallback, FastDataModule

SMALL = "--small" in sys.argv
FOLDER = "demo_data/few" if SMALL else "demo_data/photos"


class Photos(FastDataModule):
    def train_dataset(self):
        return ImageFolder(f"{FOLDER}/train")

    def val_dataset(self):
        return ImageFolder(f"{FOLDER}/val")


if __name__ == "__main__":
    cut_photographs(FOLDER, Cut(train_per_class=16, val_per_class=8) if SMALL else None)
    augment = {"train": train_augmentation(), "val": val_augmentation()}
    data = Photos(batch_size=16 if SMALL else 64, augment=augment)
    trainer = Trainer(max_epochs=1 if SMALL else 3, callbacks=[DataThroughputCallback()])
    trainer.fit(PhotoClassifier(), datamodule=data)
    print(data.explain())
