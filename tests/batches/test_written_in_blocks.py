"""Small samples are written in blocks: the batches are those of torch's collation all the same."""

from __future__ import annotations

from collections import namedtuple
from typing import Any

import numpy as np
import pytest
import torch
from alike import alike
from misses import each
from torch.utils.data import Dataset, default_collate

from lightning_fastdata.batches.memory import MisfitError, layout_of
from lightning_fastdata.executors.fetch import FetchPlan
from lightning_fastdata.executors.kinds import Resources
from lightning_fastdata.executors.pool.scheduler import PoolExecutor

Pair = namedtuple("Pair", ["x", "y"])
ROWS = np.random.default_rng(0).random((300, 16), np.float32)
SAMPLES: dict[str, Any] = {
    "row and label": lambda i: (ROWS[i], i % 10),
    "numbers": lambda i: (i, i / 3, i % 2 == 0, np.float32(i), np.uint16(i)),
    "dict": lambda i: {"a": i, "b": {"c": [float(i), ROWS[i, :3]]}},
    "named": lambda i: Pair(torch.from_numpy(ROWS[i]), torch.tensor(i)),
    "tensors": lambda i: (torch.tensor(float(i)), torch.full((2, 3), i), torch.ones(2, dtype=bool)),
    "strided": lambda i: (ROWS[i, ::2], torch.from_numpy(ROWS[i])[::3], ROWS[i].reshape(4, 4).T),
    "no axes": np.array,
    "no numbers": lambda i: (np.zeros((0, 3)), torch.zeros(0), i),
    "half": lambda i: torch.full((5,), i, dtype=torch.bfloat16),
    "complex": lambda i: (complex(i, 1) * np.ones(2), torch.full((1,), complex(1, i))),
    "large": lambda i: (torch.full((9000,), i), i),
}


class Made(Dataset):
    def __init__(self, make: Any) -> None:
        self.make = make

    def __getitem__(self, index: int) -> Any:
        return self.make(index)


@each("kind", SAMPLES)
@each("count", [1, 2, 256])
def test_what_is_written_at_once_is_what_torch_collates(kind: str, count: int) -> None:
    samples = [SAMPLES[kind](i) for i in range(count)]
    layout = layout_of(samples[0], default_collate)
    assert layout is not None
    memory = np.zeros(max(1, layout.offsets(count)[1]), np.uint8)
    layout.write(samples, layout.writers(memory, count), 0)
    assert alike(layout.batch(memory, count), default_collate(samples))


ODD: dict[str, Any] = {
    "type": (1, [1, 2.0]),
    "true number": (1, [1, True]),
    "huge number": (1, [1, 2**63]),
    "shape": (ROWS[0], [ROWS[0], ROWS[0, :5]]),
    "shapes that add up": (np.zeros((2, 3)), [np.zeros((1, 3)), np.zeros((3, 3))]),
    "dtype": (ROWS[0], [ROWS[0], ROWS[0].astype(np.float64)]),
    "tensor shape": (torch.ones(3), [torch.ones(4), torch.ones(4)]),
    "smaller tensors": (torch.ones(3), [torch.ones(2), torch.ones(2)]),
    "tensor dtype": (torch.ones(3), [torch.ones(3), torch.ones(3).double()]),
    "gradient": (torch.ones(3), [torch.ones(3), torch.ones(3, requires_grad=True)]),
    "keys": ({"a": 1}, [{"a": 1}, {"b": 1}]),
    "more keys": ({"a": 1}, [{"a": 1}, {"a": 1, "b": 1}]),
    "length": ((1, 2), [(1, 2), (1, 2, 3)]),
    "container": ((1, 2), [(1, 2), [1, 2]]),
    "nothing": ((1, 2), [(1, 2), None]),
}


@each("alone", [False, True])
@each("kind", ODD)
def test_a_sample_that_differs_is_found_alone_and_among_others(kind: str, alone: bool) -> None:
    first, samples = ODD[kind]
    samples = samples[-1:] if alone else samples
    layout = layout_of(first, default_collate)
    assert layout is not None
    memory = np.zeros(layout.offsets(2)[1], np.uint8)
    with pytest.raises(MisfitError):
        layout.write(samples, layout.writers(memory, 2), 0)


@pytest.mark.cases(6)
@pytest.mark.parametrize("odd", [None, 0, 7, 130])
def test_batches_of_blocks_are_those_of_torch_whichever_sample_differs(odd) -> None:
    def make(index: int) -> Any:
        return (ROWS[index], float(index)) if index == odd else (ROWS[index], index)

    order = [list(range(start, start + 100)) for start in (0, 100, 200)]
    plan = FetchPlan(dataset=Made(make), collate_fn=default_collate, default_collation=True)
    executor = PoolExecutor(plan, Resources(executor="workers", workers=2))
    executor.start_epoch(order, 0)
    assert all(
        alike(ours, default_collate([make(i) for i in indices]))
        for ours, indices in zip(executor, order, strict=True)
    )
    executor.close()


def test_an_error_within_a_block_names_its_sample() -> None:
    def make(index: int) -> Any:
        if index == 57:
            raise KeyError("no such row")
        return ROWS[index], index

    plan = FetchPlan(dataset=Made(make), collate_fn=default_collate, default_collation=True)
    executor = PoolExecutor(plan, Resources(executor="workers", workers=2))
    executor.start_epoch([list(range(100)), list(range(100, 200))], 0)
    with pytest.raises(KeyError, match="sample 57"):
        next(executor)
    assert next(executor)[1].tolist() == list(range(100, 200))
    executor.close()
