"""Measure a training that keeps its own DataLoaders: only the callback is added.

python examples/plain_loaders.py [--small]
"""

import sys

from lightning.pytorch import Trainer
from torch.utils.data import DataLoader

from demo.photos import Cut, cut_photographs
from demo.training import (
    AugmentedPhotos,
    PhotoClassifier,
    train_augmentation,
    val_augmentation,
)
from lightning_fastdata import DataThroughputCallback

SMALL = "--small" in sys.argv

if __name__ == "__main__":
    cut = Cut(train_per_class=16, val_per_class=8) if SMALL else None
    photos = cut_photographs("demo_data/few" if SMALL else "demo_data/photos", cut)
    train = DataLoader(
        AugmentedPhotos(photos / "train", train_augmentation()), batch_size=16, shuffle=True
    )
    val = DataLoader(AugmentedPhotos(photos / "val", val_augmentation()), batch_size=16)
    trainer = Trainer(max_epochs=1 if SMALL else 3, callbacks=[DataThroughputCallback()])
    trainer.fit(PhotoClassifier(), train, val)
