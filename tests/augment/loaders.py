"""Photographs by their number, through loaders and trainings with a transform of batches."""

from __future__ import annotations

from itertools import islice

import numpy as np
import torch
from augment.parity import photographs
from torch.utils.data import DataLoader, Dataset
from trainers import Keeps, quiet_trainer

from lightning_fastdata import (
    DataThroughputCallback,
    FastDataLoader,
    FastDataModule,
    as_batch_transform,
    prefetch,
)

PHOTOS = [*photographs(24, 32), *(255 - one for one in photographs(24, 32))]
IMAGES = torch.from_numpy(np.stack([*PHOTOS, *PHOTOS])).permute(0, 3, 1, 2) / 255
COUNT, SIZE, SEED = len(IMAGES), 4, 5
WAYS = {
    "in the workers": {"place": "workers", "workers": 2},
    "drawn in the workers": {"workers": 2},
    "torch's workers": {"workers": 1, "executor": "torch"},
    "here": {"place": "workers", "executor": "inline"},
}
"""How batches are made, beside ``{}``: here, and what may be left to the device there."""


class Pictures(Dataset):
    """Images ``[3, H, W]`` in [0, 1] and their numbers, or what a function makes of a number."""

    def __init__(self, make=None, count=COUNT):
        self.make, self.count = make, count

    def __len__(self):
        return self.count

    def __getitem__(self, index):
        return (IMAGES[index], index) if self.make is None else self.make(index)


def loader_of(transform, data=None, *, size=SIZE, place="device", workers=0, seed=SEED, **options):
    deferred = place == "device" and transform is not None
    return FastDataLoader(
        data or Pictures(),
        size,
        num_workers=workers,
        seed=seed,
        transform=None if transform is None else as_batch_transform(transform),
        on_device=deferred,
        staged="train" if deferred else None,
        **options,
    )


def batches(*given, epoch=0, **options):
    """Return the batches of an epoch, behind worker and device."""
    loader = loader_of(*given, **options)
    made = loader if options.get("place") == "workers" else prefetch(loader, "cpu", seed=SEED)
    return [list(made) for _ in range(epoch + 1)][-1]


def rest_of_epoch(transform, stop):
    """Return what comes behind so many batches, from a loader that goes on where one stopped."""
    loader, again = loader_of(transform), loader_of(transform)
    list(islice(iter(prefetch(loader, "cpu", seed=SEED)), stop))
    again.load_state_dict(loader.state_dict())
    return list(prefetch(again, "cpu", seed=SEED))


def module_of(transform, place="auto", data=None, val=None, **how):
    how = {"batch_size": SIZE, "num_workers": 0, "shuffle": False, "seed": SEED, **how}
    return FastDataModule.from_datasets(
        data or Pictures(), val, augment=transform, augment_on=place, **how
    )


def trained(tmp_path, module, model=None):
    """Return the batches of a training with a data module."""
    model = model or Keeps()
    quiet_trainer(tmp_path).fit(model, datamodule=module)
    return model.seen


def trained_by_callback(tmp_path, transform, data=None, model=None):
    """Return the batches of a training with a loader of torch."""
    model = model or Keeps()
    callback = DataThroughputCallback(transform, report=False, summary=False)
    loader = DataLoader(data or Pictures(), batch_size=SIZE)
    quiet_trainer(tmp_path, callbacks=[callback]).fit(model, loader)
    return model.seen


def same(some, others, *, gap=0.0):
    """Whether batches are equal, but for so much in each value."""
    pairs = [pair for both in zip(some, others, strict=True) for pair in zip(*both, strict=True)]
    return all(torch.allclose(one, other, rtol=0, atol=gap) for one, other in pairs)
