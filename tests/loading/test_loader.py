"""FastDataLoader gives torch's batches, and randomness that depends on the sample alone."""

from __future__ import annotations

from dataclasses import dataclass

import albumentations as A
import numpy as np
import pytest
import torch
from torch.utils.data import (
    Dataset,
    IterableDataset,
    Subset,
    TensorDataset,
    get_worker_info,
)

from lightning_fastdata.errors import TransformError
from lightning_fastdata.loading.loader import FastDataLoader


@dataclass
class Sample:
    x: torch.Tensor
    y: int


class Augmented(Dataset):
    """A dataset with an Albumentations pipeline of its own, as people write it."""

    def __init__(self, length=16, batched=False):
        self.transform = A.Compose([A.Rotate((-90, 90), p=1)], save_applied_params=True)
        self.length = length

    def __len__(self):
        return self.length

    def __getitem__(self, i):
        result = self.transform(image=np.zeros((8, 8, 3), np.uint8))
        matrix = result["applied_transforms"][0][1]["matrix"]
        return float(np.degrees(np.arctan2(matrix[1, 0], matrix[0, 0])))


class Stream(IterableDataset):
    def __init__(self, length=10):
        self.transform = A.Compose([A.HorizontalFlip(p=0.5)])
        self.length = length

    def __iter__(self):
        info = get_worker_info()
        start, step = (info.id, info.num_workers) if info else (0, 1)
        yield from range(start, self.length, step)


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


def draws(epoch=0, **arguments):
    values = []
    for batch in FastDataLoader(Augmented(), epoch=lambda: epoch, seed=7, **arguments):
        values += batch.tolist()
    return values


def test_draws_depend_on_the_sample_and_not_on_workers_or_batch_size():
    expected = draws(num_workers=0, batch_size=4)
    assert len(set(expected)) == 16
    assert draws(num_workers=2, batch_size=4) == expected
    assert draws(num_workers=1, batch_size=3, persistent_workers=True) == expected
    order = [9, 2, 15]
    assert draws(num_workers=0, batch_size=2, sampler=order) == [expected[i] for i in order]


def test_epochs_draw_differently_and_repeat_exactly():
    assert draws(epoch=1) != draws(epoch=0)
    assert draws(epoch=1, num_workers=2) == draws(epoch=1)


def test_persistent_workers_see_the_epoch_change():
    loader = FastDataLoader(
        Augmented(), num_workers=1, persistent_workers=True, batch_size=16, seed=7
    )
    first, second = next(iter(loader)), next(iter(loader))
    assert not torch.equal(first, second)
    assert second.tolist() == draws(epoch=1)


def test_a_subset_draws_by_its_own_indices_one_sample_at_a_time():
    loader = FastDataLoader(Subset(Augmented(), [3, 4, 5]), batch_size=3)
    assert len(set(next(iter(loader)).tolist())) == 3


def set_length(worker_id):
    get_worker_info().dataset.length = 4


def test_a_worker_init_fn_reaches_the_users_iterable_dataset():
    import albumentations  # noqa: F401 - the pipeline inside makes us wrap the dataset

    loader = FastDataLoader(Stream(), batch_size=2, num_workers=1, worker_init_fn=set_length)
    assert sorted(int(x) for batch in loader for x in batch) == [0, 1, 2, 3]


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


def open_file(worker_id):
    dataset = get_worker_info().dataset
    dataset.open()
    dataset.offset = dataset.file + 20


@pytest.mark.parametrize("executor", ["torch", "workers"])
def test_a_worker_init_fn_reaches_the_users_dataset(executor):
    loader = FastDataLoader(
        Opened(), batch_size=4, num_workers=1, worker_init_fn=open_file, executor=executor
    )
    assert next(iter(loader)).tolist() == [220, 221, 222, 223]


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
