"""Arrays and numbers that are stacked in one call become what torch makes of them one by one."""

from __future__ import annotations

import enum
import tempfile
import warnings
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from alike import alike, written
from misses import each
from torch.utils.data import DataLoader, default_collate
from torch.utils.data._utils.collate import default_collate_fn_map

from lightning_fastdata import FastDataLoader
from lightning_fastdata.batches.collate import collate_samples, for_writing
from lightning_fastdata.errors import BatchError

same = partial(alike, strides=True)


class Level(enum.IntEnum):
    LOW = 1
    HIGH = 2


class Half(float):
    pass


def mapped_rows() -> list[Any]:
    with tempfile.TemporaryFile() as file:
        rows = np.memmap(file, np.float32, "w+", shape=(3, 5))
        rows[:] = np.arange(15).reshape(3, 5)
        return list(rows)


def read_only(array: np.ndarray) -> np.ndarray:
    array.flags.writeable = False
    return array


def rows(*shape: int, dtype: Any = np.float32) -> list[np.ndarray]:
    size = int(np.prod(shape))
    return [(np.arange(size) + n).astype(dtype).reshape(shape) for n in range(3)]


COLUMNS: dict[str, list[Any]] = {
    "float32": rows(7),
    **{name: rows(4, dtype=name) for name in ("?", "i1", "u1", "i2", "u2", "i8", "u8")},
    **{name: rows(4, dtype=name) for name in ("f2", "f8", "g", "c8", "c16", ">f4", "M8[s]")},
    "one axis of one": rows(1),
    "images": rows(4, 5, 3, dtype=np.uint8),
    "channels turned": [each.transpose(2, 0, 1) for each in rows(4, 5, 3)],
    "frames turned": [each.transpose(0, 3, 1, 2) for each in rows(2, 4, 5, 3)],
    "columns first": [np.asfortranarray(each) for each in rows(3, 4)],
    "every second": [each[:, ::2] for each in rows(3, 4)],
    "backwards": [each[::-1] for each in rows(4)],
    "the last backwards": [*rows(4)[:2], rows(4)[2][::-1]],
    "the last turned": [*rows(3, 3)[:2], rows(3, 3)[2].T],
    "broadcast": [np.broadcast_to(np.float32(n), (3,)) for n in range(3)],
    "read-only": [read_only(each) for each in rows(4)],
    "no rows": rows(0),
    "no columns": rows(2, 0),
    "no axes": [np.array(n, np.float32) for n in range(3)],
    "mapped": mapped_rows(),
    "masked": [np.ma.masked_array(each, each > 2) for each in rows(4)],
    "other types": [*rows(4), *rows(4, dtype=np.float64)],
    "other shapes": [*rows(4), *rows(5)],
    "objects": rows(2, dtype=object),
    "texts": [np.array(["a", "b"])] * 2,
    "a tensor among them": [*rows(4), torch.zeros(4)],
    "integers": [3, -1, 2**63 - 1],
    "too large": [1, 2**63],
    "truth": [True, False],
    "truth first": [True, 2],
    "truth last": [2, True],
    "integers, then a fraction": [1, 2.5],
    "fractions, then an integer": [0.1, 3, -0.0],
    "not numbers": [float("nan"), float("inf"), -0.0, 5e-324],
    "levels": [Level.LOW, Level.HIGH],
    "halves": [Half(0.5), Half(1.5)],
    **{
        f"scalars {name}": [np.dtype(name).type(n) for n in (0, 1, 3)]
        for name in ("?", "i1", "u1", "i2", "u2", "i4", "u4", "i8", "u8", "f2", "f4", "f8", "c8")
    },
    "scalars and a fraction": [np.float32(0.1), 0.1],
    "a fraction and scalars": [0.1, np.float32(0.1)],
    "double and a fraction": [np.float64(0.1), 0.1],
    "dates": [np.datetime64("2020-01-01")] * 2,
}


def outcome(collate: Any, samples: list[Any]) -> Any:
    try:
        return collate(samples)
    except BatchError as error:
        return f"{error.__cause__!r}"
    except Exception as error:
        return f"{error!r}"


@each("name", COLUMNS)
def test_a_column_becomes_what_torch_makes_of_it(name: str) -> None:
    column = COLUMNS[name]
    for samples in (column, column[:1], [{"a": value, "b": (value, 1)} for value in column]):
        expected = outcome(default_collate, samples)
        assert same(outcome(collate_samples, samples), expected)
        assert same(outcome(lambda x: written(for_writing(collate_samples)(x)), samples), expected)


def test_another_default_device_gets_the_batches_that_torch_puts_there() -> None:
    samples = [(array, number) for number, array in enumerate(rows(4))]
    with torch.device("meta"):
        batch, expected = collate_samples(samples), default_collate(samples)
    for ours, theirs in zip(batch, expected, strict=True):
        assert (ours.device, ours.shape, ours.dtype) == (theirs.device, theirs.shape, theirs.dtype)
        assert ours.is_meta


def test_memory_of_a_batch_is_its_own() -> None:
    arrays, numbers = rows(4), [1, 2, 3]
    batch = collate_samples(list(zip(arrays, numbers, strict=True)))
    for tensor in batch:
        tensor.resize_(64).zero_()
    assert [array[1] for array in arrays] == [1, 2, 3]


def test_torch_warns_of_read_only_rows_as_it_does() -> None:
    torch._C._set_warnAlways(True)
    try:
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            collate_samples([read_only(each) for each in rows(4)])
    finally:
        torch._C._set_warnAlways(False)
    assert any("not writable" in str(each.message) for each in told)


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("kind", [np.ndarray, torch.Tensor, int, dict])
def test_what_a_program_puts_into_torchs_table_is_asked(
    kind: type, workers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def mine(values: Any, **_: Any) -> torch.Tensor:
        assert type(values[0]) is kind
        return torch.full((len(values),), 7)

    monkeypatch.setitem(default_collate_fn_map, kind, mine)
    samples: Any = [{"a": array, "b": torch.ones(2), "c": 1} for array in rows(4)]
    forks: Any = {"multiprocessing_context": "fork"} if workers else {}  # which have the table
    loader = FastDataLoader(samples, 2, num_workers=workers, **forks)
    for batch, expected in zip(loader, DataLoader(samples, 2), strict=True):
        assert same(batch, expected)
    loader.close()


class Rows(torch.utils.data.Dataset):
    """Arrays and numbers that are read with one call for a batch."""

    def __init__(self) -> None:
        self.table = np.arange(60, dtype=np.float32).reshape(20, 3)

    def __len__(self) -> int:
        return len(self.table)

    def __getitem__(self, index: int) -> Any:
        return self.table[index], index

    def __getitems__(self, indices: list[int]) -> list[Any]:
        return [self[index] for index in indices]


@pytest.mark.parametrize(
    ("executor", "workers"), [("torch", 0), ("inline", 0), ("workers", 1), ("torch", 1)]
)
def test_loaders_give_the_batches_of_torch(executor: Any, workers: int) -> None:
    ours = FastDataLoader(Rows(), 6, num_workers=workers, executor=executor)
    for batch, expected in zip(ours, DataLoader(Rows(), 6, num_workers=workers), strict=True):
        assert same(batch, expected)
    ours.close()
