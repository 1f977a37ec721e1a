"""A collate function that returns an object of the project's own."""

from dataclasses import dataclass

import lightning.pytorch as pl
import torch
from pieces import Model, fit, loader


@dataclass
class Pictures:
    images: torch.Tensor
    indices: torch.Tensor
    names: list

    def to(self, device, **_):
        return Pictures(self.images.to(device), self.indices.to(device), self.names)


def collate(samples):
    images, indices = zip(*samples, strict=True)
    names = [f"photo-{index}" for index in indices]
    return Pictures(torch.stack(images), torch.tensor(indices), names)


class OfObjects(Model):
    def training_step(self, batch, batch_idx):
        assert batch.names[0] == f"photo-{batch.indices[0]}"
        return self.step(batch.images, batch.indices)


if __name__ == "__main__":
    pl.seed_everything(1)
    fit(OfObjects(), loader(collate_fn=collate, num_workers=2))
