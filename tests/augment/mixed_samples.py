"""Samples to mix, and the way of a batch through worker and device."""

from __future__ import annotations

import pickle

import albumentations as A
from augment.parity import photographs
from torch.utils.data import Dataset, default_collate

from lightning_fastdata.types import SampleKey

CLASSES = 4
PIPELINE = A.Compose(
    [A.RandomResizedCrop((32, 40)), A.HorizontalFlip(), A.Normalize(), A.ToTensorV2()]
)
IMAGES = [*photographs(60, 70), *photographs(52, 66)]


class Photos(Dataset):
    def __init__(self, *, form="tuple"):
        self.form = form

    def __len__(self):
        return 12

    def __getitem__(self, index):
        image, label = IMAGES[index % len(IMAGES)], index % CLASSES
        if self.form == "tuple":
            return image, label
        return {"image": image, "label": label, "index": index}


def carried_out(
    transform, samples, order=None, *, on_device=True, epoch=0, collate=default_collate
):
    """Return the batch of samples, after worker and device."""
    order = list(range(len(samples))) if order is None else order
    part = pickle.loads(pickle.dumps(transform.in_worker(on_device=on_device)))
    pairs = [part(samples[index], SampleKey(0, epoch, index)) for index in order]
    batch = collate([sample for sample, _ in pairs])
    drawn = [one for _, one in pairs]
    if on_device:
        return transform.apply(batch, part.collate(drawn))
    return part.finish(batch, drawn)
