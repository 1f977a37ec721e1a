"""Run one pipeline through worker and device, and through the worker alone."""

from __future__ import annotations

import os
import pickle

os.environ.setdefault("NO_ALBUMENTATIONS_UPDATE", "1")

import albumentations as A
import numpy as np
import torch
from torch.utils.data import default_collate

from lightning_fastdata.augment.fields import Fields
from lightning_fastdata.augment.transform import BatchTransform, as_batch_transform
from lightning_fastdata.randomness.seeds import reseeder
from lightning_fastdata.types import SampleKey

torch.set_num_threads(1)


def pipeline(*transforms, **options):
    return as_batch_transform(A.Compose(list(transforms), **options))


def collated(compose, batch, key, *, on_device):
    """Return a batch of another loader after a pipeline, as a device makes it, or the CPU."""
    on_cpu = "torch" if on_device else "albumentations"
    return BatchTransform(compose, Fields(), on_cpu=on_cpu).apply_unprepared(batch, key)


def keys(count, seed=0):
    return [SampleKey(seed, 0, index) for index in range(count)]


def in_worker(transform, samples, seed=0):
    """Return what Albumentations alone makes of every sample."""
    whole = transform.in_worker(on_device=False)
    return [whole(one, key)[0] for one, key in zip(samples, keys(len(samples), seed), strict=True)]


def by_albumentations(compose, samples, own_keys):
    """Return what Albumentations makes of samples, each drawn under its key."""
    made = []
    for one, key in zip(samples, own_keys, strict=True):
        reseeder(compose)(key)
        made.append(compose(**one))
    return made


def left_to_device(transform, samples, own_keys):
    """Return what a worker leaves of samples, and what they drew, as another process gets it."""
    part = transform.in_worker(on_device=True)
    left, tapes = zip(*map(part, samples, own_keys), strict=True)
    return list(left), pickle.loads(pickle.dumps(part.collate(tapes)))


def on_device(transform, samples, seed=0):
    """Return the batch of images and masks after worker and device, and each worker's rest."""
    left, draws = left_to_device(transform, samples, keys(len(samples), seed))
    pixels = [
        {name: value for name, value in one.items() if isinstance(value, torch.Tensor)}
        for one in left
    ]
    return transform.apply(default_collate(pixels), draws), left


def assert_both_ways_agree(transform, samples):
    """Worker and device make of samples what Albumentations alone makes of them."""
    batch, _ = on_device(transform, samples)
    wanted = in_worker(transform, samples)
    assert wanted[0].keys() >= batch.keys()
    for name, values in batch.items():
        for made, want in zip(values, wanted, strict=True):
            assert torch.equal(made, torch.as_tensor(want[name])), name


def alike(one, other):
    """Whether two results of a pipeline are the same: structure, types, dtypes and values."""
    if type(one) is not type(other):
        return False
    if isinstance(one, np.ndarray):
        floats = one.dtype.kind in "fc"
        return one.dtype == other.dtype and np.array_equal(one, other, equal_nan=floats)
    if isinstance(one, torch.Tensor):
        return one.dtype == other.dtype and torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(alike(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(alike, one, other))
    return bool(one == other)
