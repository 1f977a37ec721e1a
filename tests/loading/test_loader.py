"""FastDataLoader gives torch's batches, and randomness that depends on the sample alone."""

from __future__ import annotations

import random
import warnings
from contextlib import closing
from dataclasses import dataclass

import albumentations as A
import numpy as np
import pytest
import torch
from misses import each
from torch.utils.data import (
    Dataset,
    IterableDataset,
    StackDataset,
    Subset,
    TensorDataset,
    get_worker_info,
)

from lightning_fastdata.errors import TransformError
from lightning_fastdata.loading.loader import FastDataLoader
from lightning_fastdata.tree import leaves


@dataclass
class Sample:
    x: torch.Tensor
    y: int


def test_dataclass_samples_become_a_dataclass_batch():
    class Typed(Dataset):
        def __len__(self):
            return 4

        def __getitem__(self, i):
            return {"s": Sample(torch.tensor([i]), i), "i": i}

    (batch,) = FastDataLoader(Typed(), batch_size=4)
    assert isinstance(batch["s"], Sample)
    assert torch.equal(batch["s"].x, torch.arange(4)[:, None])
    assert torch.equal(batch["s"].y, torch.arange(4))


class Drawing(Dataset):
    """Draws from the global generators, and in a pipeline of its own."""

    def __init__(self):
        self.pipeline = A.Compose([A.RandomBrightnessContrast(p=1)])

    def __len__(self):
        return 12

    def __getitem__(self, index):
        image = self.pipeline(image=np.full((2, 2, 3), 90, np.uint8))["image"]
        return index, random.random(), torch.rand(2), image


@pytest.mark.cases(3)
@each("executor", ["inline", "workers"])
@each(
    "wrap", [Drawing, lambda: Subset(Drawing(), range(12)), lambda: StackDataset(*[Drawing()] * 2)]
)
def test_draws_depend_on_the_sample_alone_also_below_a_wrapper(wrap, executor):
    def drawn(batch_size):
        how = {"num_workers": 2, "executor": executor, "seed": 5}
        with closing(FastDataLoader(wrap(), batch_size, **how)) as loader:
            columns = zip(*map(leaves, loader), strict=True)
            return [torch.cat(column).tolist() for column in columns]

    assert drawn(3) == drawn(4)


class Opened(Dataset):
    def __init__(self):
        self.transform = A.Compose([A.HorizontalFlip(p=0.5)])
        self.offset, self.file = 0, None

    def open(self):
        self.file = 100

    def __len__(self):
        return 4

    def __getitem__(self, index):
        return self.file + self.offset + index


class OpenedStream(Opened, IterableDataset):
    def __iter__(self):
        return map(self.__getitem__, range(4))


def open_file(worker_id):
    dataset = get_worker_info().dataset
    assert type(dataset) in (Opened, OpenedStream)
    dataset.open()
    dataset.offset = dataset.file + 20


@each("executor", ["torch", "workers"])
@each("dataset", [Opened(), OpenedStream()])
def test_a_worker_init_fn_reaches_the_users_dataset(dataset, executor):
    how = {"num_workers": 1, "worker_init_fn": open_file, "executor": executor}
    loader = FastDataLoader(dataset, batch_size=4, **how)
    assert next(iter(loader)).tolist() == [220, 221, 222, 223]


@each("how", [{"num_workers": 2, "executor": "inline"}, {"num_workers": "auto"}, {}])
def test_a_worker_init_fn_that_nobody_calls_is_warned_of_unless_there_shall_be_no_workers(how):
    loader = FastDataLoader(list(range(8)), 4, **how)
    loader.worker_init_fn = print
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        list(loader)
        list(loader)
    told = [each for each in said if "worker_init_fn is not called" in str(each.message)]
    assert len(told) == bool(how)


def test_shutting_down_through_lightnings_protocol_stops_the_workers():
    """Lightning calls ``loader._iterator._shutdown_workers()`` and sets the attribute to None."""
    loader = FastDataLoader(
        TensorDataset(torch.arange(8)), num_workers=2, persistent_workers=True, executor="torch"
    )
    assert loader._iterator is None
    assert sum(1 for _ in loader) == 8
    workers = list(loader._iterator._workers)
    loader._iterator._shutdown_workers()
    loader._iterator = None
    for worker in workers:
        worker.join(5)
    assert not any(worker.is_alive() for worker in workers)
    assert sum(1 for _ in loader) == 8
    loader.close()


def test_staging_without_batches_is_refused():
    with pytest.raises(TransformError, match="batch_size=None"):
        FastDataLoader(TensorDataset(torch.arange(4)), batch_size=None, staged="train")
