"""Measure a loop of plain PyTorch; with Fabric it looks the same.

python examples/plain_loop.py [--small]
"""

import sys

import torch
from torch import nn

from demo.photos import PHOTOGRAPHS, Cut, cut_photographs
from demo.training import AugmentedPhotos, train_augmentation, val_augmentation
from lightning_fastdata import FastDataLoader, StepTimer

SMALL = "--small" in sys.argv

if __name__ == "__main__":
    cut = Cut(train_per_class=16, val_per_class=8) if SMALL else None
    photos = cut_photographs("demo_data/few" if SMALL else "demo_data/photos", cut)
    augmented = AugmentedPhotos(photos / "train", train_augmentation())
    train = FastDataLoader(augmented, 8, shuffle=True, num_workers="auto")
    val = FastDataLoader(AugmentedPhotos(photos / "val", val_augmentation()), 8)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    linear = nn.Linear(3 * 8 * 8, len(PHOTOGRAPHS))
    model = nn.Sequential(nn.AdaptiveAvgPool2d(8), nn.Flatten(), linear).to(device)
    optimizer, timer = torch.optim.SGD(model.parameters(), lr=0.1), StepTimer(device)
    for _ in range(1 if SMALL else 3):
        for batch in timer.batches(train):
            with timer.transfer():
                images, labels = (part.to(device) for part in batch)
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(images), labels).backward()
            optimizer.step()
        with torch.no_grad():
            for images, _ in timer.batches(val, stage="val"):
                model(images.to(device))
    print(timer.report())
    timer.report().write_json("report.json")
