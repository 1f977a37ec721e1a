"""Executors deliver what torch's DataLoader delivers."""

from __future__ import annotations

import dataclasses
import random
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from processes import until
from thoroughness import max_examples
from torch.utils.data import DataLoader, Dataset, TensorDataset, default_collate, get_worker_info

from lightning_fastdata.executors.fetch import FetchPlan
from lightning_fastdata.executors.kinds import Resources, open_executor

ALL = ("inline", "workers")


class Point(NamedTuple):
    x: Any
    y: Any


@dataclasses.dataclass
class Sample:
    image: torch.Tensor
    name: str


SAMPLES = {
    "tensor": lambda i: torch.full((3, 4), i, dtype=torch.float32),
    "scalar tensor": torch.tensor,
    "empty": lambda i: torch.empty(0, 3),
    "bfloat16": lambda i: torch.full((5,), i, dtype=torch.bfloat16),
    "bool": lambda i: i % 2 == 0,
    "numbers": lambda i: (i, i / 3, np.float32(i), np.int16(i)),
    "array": lambda i: np.full((2, 2), i, np.uint8),
    "dict": lambda i: {"a": torch.arange(4) + i, "b": [i, {"c": float(i)}]},
    "named": lambda i: Point(torch.full((2,), i), i),
    "strings": lambda i: (torch.full((2,), i), f"file {i}"),
    "strided": lambda i: torch.arange(12).reshape(3, 4).T + i,
    "expanded": lambda i: torch.tensor([i]).expand(7),
    "mixed numbers": lambda i: i if i % 2 else i / 2,
    "mixed types": lambda i: torch.full((2,), i) if i % 3 else torch.full((2,), i).double(),
    "big": lambda i: torch.full((3, 64, 64), i, dtype=torch.uint8),
    "list": lambda i: [torch.ones(2) * i, [i, i + 1]],
}


class Made(Dataset):
    def __init__(self, length: int, kind: str) -> None:
        self.length, self.kind = length, kind

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> Any:
        return SAMPLES[self.kind](index)


def fetched(name: str, plan: FetchPlan, batches: list[Any], epoch: int = 0, **how: Any) -> list:
    executor = open_executor(plan, Resources(executor=name, **{"workers": 2, **how}))
    try:
        executor.start_epoch(batches, epoch)
        return list(executor)
    finally:
        executor.close()


def plan_of(dataset: Any, collate: Any = default_collate, **settings: Any) -> FetchPlan:
    default = collate is default_collate
    return FetchPlan(dataset=dataset, collate_fn=collate, default_collation=default, **settings)


def assert_same(ours: Any, theirs: Any) -> None:
    assert type(ours) is type(theirs)
    if isinstance(ours, torch.Tensor):
        assert ours.dtype == theirs.dtype
        assert ours.shape == theirs.shape
        assert torch.equal(ours, theirs)
    elif isinstance(ours, dict):
        assert list(ours) == list(theirs)
        for key in ours:
            assert_same(ours[key], theirs[key])
    elif isinstance(ours, list | tuple):
        assert len(ours) == len(theirs)
        for one, other in zip(ours, theirs, strict=True):
            assert_same(one, other)
    elif dataclasses.is_dataclass(ours):
        assert_same(vars(ours), vars(theirs))
    elif isinstance(ours, np.ndarray):
        np.testing.assert_array_equal(ours, theirs)
    else:
        assert ours == theirs


@max_examples(15)
@given(
    length=st.integers(1, 40),
    batch_size=st.integers(1, 12),
    drop_last=st.booleans(),
    shuffle=st.booleans(),
    kind=st.sampled_from(sorted(SAMPLES)),
    name=st.sampled_from(ALL),
    workers=st.integers(1, 3),
)
def test_any_order_is_kept(length, batch_size, drop_last, shuffle, kind, name, workers) -> None:
    dataset = Made(length, kind)
    torch.manual_seed(0)
    loader = DataLoader(dataset, batch_size, shuffle, drop_last=drop_last)
    batches = list(loader.batch_sampler)
    theirs = list(DataLoader(dataset, batch_sampler=batches))
    assert_same(fetched(name, plan_of(dataset), batches, workers=workers), theirs)


def ragged(samples: list[Any]) -> Any:
    return Sample(torch.cat([s.flatten() for s in samples]), "x"), [s.numpy() for s in samples]


@pytest.mark.parametrize("name", ALL)
def test_a_collate_function_may_return_anything(name: str) -> None:
    dataset = Made(17, "big")
    batches = [list(range(i, min(17, i + 4))) for i in range(0, 17, 4)]
    theirs = [ragged([dataset[i] for i in batch]) for batch in batches]
    assert_same(fetched(name, plan_of(dataset, ragged), batches), theirs)


class Drawing(Dataset):
    def __getitem__(self, index: int) -> Any:
        return index, random.random(), np.random.rand(3), torch.rand(2)


def test_draws_depend_on_seed_epoch_and_sample_alone() -> None:
    plan = plan_of(Drawing(), seed=7)
    one = [list(range(8)), list(range(8, 16))]
    other = [[i] for i in reversed(range(16))]

    def by_sample(name: str, batches: Any, workers: int, epoch: int = 0) -> dict:
        found = {}
        for index, a, b, c in fetched(name, plan, batches, epoch, workers=workers):
            for row in range(len(index)):
                found[int(index[row])] = (a[row].item(), *b[row].tolist(), *c[row].tolist())
        return found

    expected = by_sample("inline", one, 0)
    assert expected == by_sample("workers", one, 1)
    assert expected == by_sample("workers", other, 3)
    assert len(set(expected.values())) == 16
    assert not set(expected.values()) & set(by_sample("inline", one, 0, epoch=1).values())


def test_inline_leaves_the_callers_generators_alone() -> None:
    random.seed(1), np.random.seed(1), torch.manual_seed(1)
    before = random.random(), np.random.rand(), torch.rand(1).item()
    random.seed(1), np.random.seed(1), torch.manual_seed(1)
    fetched("inline", plan_of(Drawing(), seed=7), [[1, 2]])
    assert before == (random.random(), np.random.rand(), torch.rand(1).item())


@pytest.mark.parametrize("collate", [default_collate, ragged])
def test_batches_that_are_kept_are_never_overwritten(collate: Any) -> None:
    dataset = Made(240, "big")
    batches = [list(range(i, i + 8)) for i in range(0, 240, 8)]
    kept = fetched("workers", plan_of(dataset, collate, memory_limit_bytes=2**20), batches)
    for batch, indices in zip(kept, batches, strict=True):
        assert_same(batch, collate([dataset[i] for i in indices]))


class Sick(Made):
    def __getitem__(self, index: int) -> Any:
        if index == 11:
            raise KeyError("no such picture")
        return super().__getitem__(index)


@pytest.mark.parametrize("kind", ["tensor", "strings"])
def test_an_error_names_its_sample_and_the_rest_of_the_epoch_follows(kind) -> None:
    executor = open_executor(plan_of(Sick(20, kind)), Resources(executor="workers", workers=2))
    executor.start_epoch([list(range(i, i + 5)) for i in range(0, 20, 5)], 0)
    good = [next(executor), next(executor)]
    with pytest.raises(KeyError, match=r"(?s)sample 11 .*no such picture"):
        next(executor)
    assert len([*good, *executor]) == 3
    executor.close()


class Asking(Dataset):
    def __getitem__(self, index: int) -> Any:
        info = get_worker_info()
        return info.id, info.num_workers, info.dataset is self, INITIALISED[0]


INITIALISED = [-1]


def remember(number: int) -> None:
    INITIALISED[0] = number


def test_workers_know_who_they_are() -> None:
    plan = plan_of(Asking(), worker_init_fn=remember)
    for numbers, count, same, initialised in fetched("workers", plan, [[0, 1]] * 9):
        assert set(numbers.tolist()) <= {0, 1}
        assert count.tolist() == [2, 2]
        assert same.all()
        assert initialised.tolist() == numbers.tolist()


def test_an_abandoned_epoch_leaves_nothing_in_the_next() -> None:
    executor = open_executor(plan_of(Made(100, "big")), Resources(executor="workers", workers=2))
    for epoch in range(6):
        executor.start_epoch([[i, i + 1] for i in range(epoch * 10, 99, 2)], epoch)
        assert next(executor)[:, 0, 0, 0].tolist() == [epoch * 10, epoch * 10 + 1]
    assert len(list(executor)) == 24
    executor.close()


class FirstBatchFirst(Dataset):
    """Four rows; those of the second batch are there only once the first batch is."""

    def __init__(self, arrived: Path) -> None:
        self.arrived = arrived

    def __getitem__(self, i: int) -> int:
        if i > 1:
            until(self.arrived.exists, 30)
        return i

    def __len__(self) -> int:
        return 8


def test_the_first_batch_waits_for_no_later_one(tmp_path: Path) -> None:
    arrived = tmp_path / "arrived"
    plan = plan_of(FirstBatchFirst(arrived))
    executor = open_executor(plan, Resources(executor="workers", workers=2))
    try:
        executor.start_epoch([[0, 1], [2, 3], [4, 5], [6, 7]], 0)
        assert next(executor).tolist() == [0, 1]
        arrived.touch()
        assert [batch.tolist() for batch in executor] == [[2, 3], [4, 5], [6, 7]]
    finally:
        executor.close()


def test_processes_come_and_go_while_running() -> None:
    executor = open_executor(
        plan_of(Made(200, "numbers")), Resources(executor="workers", workers=1)
    )
    executor.start_epoch([[i, i + 1] for i in range(0, 200, 2)], 0)
    seen = []
    for number, batch in enumerate(executor):
        seen += batch[0].tolist()
        if number % 10 == 0:
            executor.resize(1 + number // 10 % 3)
    assert seen == list(range(200))
    executor.close()


def test_a_process_that_is_wanted_again_while_it_leaves_is_replaced() -> None:
    executor = open_executor(plan_of(Numbers()), Resources(executor="workers", workers=3))
    executor.start_epoch([list(range(i, i + 6)) for i in range(0, 600, 6)], 0)
    seen = []
    for number, indices in enumerate(executor):
        seen += indices.tolist()
        if number == 20:
            executor.resize(1)
            executor.resize(3)
    assert seen == list(range(600))
    until(
        lambda: executor.ready() and not any(child.retiring for child in executor.children.values())
    )
    assert sorted(executor.children) == [0, 1, 2]
    assert not any(child.retiring for child in executor.children.values())
    executor.close()


class Numbers(Dataset):
    def __getitem__(self, index: int) -> int:
        return index


@pytest.mark.parametrize("kind", ["tensors", "tensor", "array"])
@pytest.mark.parametrize("rows", [10, 5000])
def test_gather_gives_the_rows(kind: str, rows: int) -> None:
    table = torch.randn(rows, 300)
    dataset: Any = {
        "tensors": TensorDataset(table, torch.arange(rows)),
        "tensor": table,
        "array": table.numpy(),
    }[kind]
    loader = DataLoader(dataset, batch_size=rows // 4, shuffle=True)
    batches = list(loader.batch_sampler)
    theirs = list(DataLoader(dataset, batch_sampler=batches))
    assert_same(fetched("gather", plan_of(dataset), batches * 3), theirs * 3)
