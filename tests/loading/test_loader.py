"""FastDataLoader gives torch's batches, and randomness that depends on the sample alone."""

from __future__ import annotations

from collections import namedtuple
from dataclasses import dataclass

import albumentations as A
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from thoroughness import max_examples
from torch.utils.data import (
    DataLoader,
    Dataset,
    IterableDataset,
    Subset,
    TensorDataset,
    get_worker_info,
)

from lightning_fastdata.errors import TransformError
from lightning_fastdata.loading.loader import FastDataLoader
from lightning_fastdata.order.samplers import ShuffleSampler

Pair = namedtuple("Pair", ["x", "y"])


@dataclass
class Sample:
    x: torch.Tensor
    y: int


class Structured(Dataset):
    """Samples of a chosen structure, whose content is their index."""

    def __init__(self, kind, length=17):
        self.kind, self.length = kind, length

    def __len__(self):
        return self.length

    def __getitem__(self, i):
        x = torch.full((3,), i)
        return {
            "tensor": x,
            "tuple": (x, i),
            "list": [x, {"deep": (float(i), x)}],
            "dict": {"x": x, "name": f"s{i}"},
            "namedtuple": Pair(x, i),
            "numpy": np.full((2, 2), i, np.uint8),
            "number": i,
        }[self.kind]


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


def equal(a, b):
    if isinstance(a, torch.Tensor):
        return type(b) is type(a) and torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(equal(a[k], b[k]) for k in a)
    if isinstance(a, list | tuple):
        return type(a) is type(b) and all(map(equal, a, b))
    return a == b


@max_examples(25)
@given(
    kind=st.sampled_from(["tensor", "tuple", "list", "dict", "namedtuple", "numpy", "number"]),
    length=st.integers(1, 20),
    batch_size=st.one_of(st.none(), st.integers(1, 7)),
    drop_last=st.booleans(),
)
def test_batches_equal_those_of_torch(kind, length, batch_size, drop_last):
    dataset = Structured(kind, length)
    arguments = {"batch_size": batch_size, "drop_last": drop_last and batch_size is not None}
    ours, torchs = FastDataLoader(dataset, **arguments), DataLoader(dataset, **arguments)
    assert len(ours) == len(torchs)
    assert all(equal(a, b) for a, b in zip(torchs, ours, strict=True))


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


def test_without_us_two_workers_draw_the_same_albumentations_stream():
    """The defect of Albumentations 2.0.8 that keyed seeding repairs."""
    values = [float(b) for b in DataLoader(Augmented(), batch_size=None, num_workers=2)]
    assert values[0::2] == values[1::2]


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


def test_the_dataset_attribute_is_the_users_own():
    dataset = Augmented()
    assert FastDataLoader(dataset).dataset is dataset


def test_the_order_depends_on_seed_and_epoch_alone():
    data = range(50)
    sampler, again, other = (
        ShuffleSampler(data, 1),
        ShuffleSampler(data, 1),
        ShuffleSampler(data, 2),
    )
    torch.manual_seed(0)
    first = list(sampler)
    torch.manual_seed(99)
    assert first == list(again) != list(other)
    sampler.set_epoch(1)
    second = list(sampler)
    assert sorted(first) == sorted(second) == list(data)
    assert first != second


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
