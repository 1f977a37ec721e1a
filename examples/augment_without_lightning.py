"""Augment batches on the device in a loop of plain PyTorch, without a loader or module of ours.

A student learns to see a photograph as a teacher does, who gets it without the changes of colour:
both views are cut alike. The pipeline has an operation of our own, which runs on the device too.

python examples/augment_without_lightning.py [--small]
"""

import sys

import torch
from albumentations import (
    Compose,
    HorizontalFlip,
    ImageOnlyTransform,
    Normalize,
    RandomCrop,
    ToTensorV2,
)
from torch import nn
from torch.utils.data import DataLoader
from torchvision.datasets import ImageFolder
from torchvision.transforms.v2 import Compose as Steps
from torchvision.transforms.v2 import PILToTensor, Resize

from demo.photos import Cut, cut_photographs
from lightning_fastdata import BatchTransform, SampleKey, StepTimer
from lightning_fastdata.augment import register

SMALL = "--small" in sys.argv


class Faded(ImageOnlyTransform):
    """Moves every value towards white, by a share that each image draws."""

    def get_params(self):
        return {"share": self.py_random.uniform(0, 0.6)}

    def apply(self, img, share, **_):
        return (img + (255 - img) * share).astype(img.dtype)


register(Faded, table=True)

if __name__ == "__main__":
    cut = Cut(train_per_class=16, val_per_class=8) if SMALL else None
    folder = cut_photographs("demo_data/few" if SMALL else "demo_data/photos", cut) / "train"
    photos = ImageFolder(folder, transform=Steps([Resize((112, 112)), PILToTensor()]))
    loader = DataLoader(photos, 16, shuffle=True, drop_last=True)  # uint8 [16, 3, 112, 112]
    device = "cuda" if torch.cuda.is_available() else "cpu"

    cuts = [RandomCrop(96, 96), HorizontalFlip()]
    finish = [Normalize(), ToTensorV2()]
    changed = BatchTransform.from_albumentations(Compose([*cuts, Faded(p=0.8), *finish]))
    plain = BatchTransform.from_albumentations(Compose([*cuts, *finish]))
    print(changed.explain(size=(112, 112)))

    student = nn.Sequential(nn.Conv2d(3, 16, 5, stride=2), nn.ReLU(), nn.AdaptiveAvgPool2d(4))
    student = student.to(device)
    teacher = nn.Sequential(nn.Conv2d(3, 16, 5, stride=2), nn.ReLU(), nn.AdaptiveAvgPool2d(4))
    teacher = teacher.to(device)
    optimizer, timer = torch.optim.Adam(student.parameters(), 1e-3), StepTimer(device)
    for epoch in range(1 if SMALL else 3):
        for step, (pixels, _) in enumerate(timer.batches(loader)):
            with timer.transfer():
                images = pixels.to(device)
            # What comes first in both pipelines draws the same with the same key.
            key = SampleKey(seed=0, epoch=epoch, index=step * len(images))
            with torch.no_grad():
                seen = teacher(plain(images, key=key))
            optimizer.zero_grad()
            nn.functional.mse_loss(student(changed(images, key=key)), seen).backward()
            optimizer.step()

    # What lies beside the images is cut as they are: masks, depth, ...
    light = images.float().mean(1)  # [16, 112, 112]; could be depth
    views, lights = changed(images, light, key=key)
    print(f"{tuple(views.shape)} {views.dtype}, and light {tuple(lights.shape)} cut alike")
    print(timer.report())
    timer.report().write_json("report.json")
