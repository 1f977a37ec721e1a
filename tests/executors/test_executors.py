"""What every executor keeps beyond torch's own behaviour: draws, epochs and their workers."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from processes import until
from torch.utils.data import Dataset, default_collate, get_worker_info

from lightning_fastdata.executors.fetch import FetchPlan
from lightning_fastdata.executors.kinds import Resources, open_executor
from lightning_fastdata.loading.loader import FastDataLoader
from lightning_fastdata.order.samplers import ShuffleSampler


def opened(dataset: Any, name: str = "workers", workers: int = 2, **settings: Any) -> Any:
    how = {"collate_fn": default_collate, "default_collation": True, **settings}
    plan = FetchPlan(dataset=dataset, **how)
    return open_executor(plan, Resources(executor=name, workers=workers))


def fetched(name: str, batches: list[Any], epoch: int = 0, workers: int = 2) -> list[Any]:
    executor = opened(Drawing(), name, workers, seed=7)
    executor.start_epoch(batches, epoch)
    found = list(executor)
    executor.close()
    return found


class Drawing(Dataset):
    def __getitem__(self, index: int) -> Any:
        return index, random.random(), np.random.rand(3), torch.rand(2)


def test_draws_depend_on_seed_epoch_and_sample_alone() -> None:
    one = [list(range(8)), list(range(8, 16))]
    other = [[i] for i in reversed(range(16))]

    def by_sample(*how: Any) -> dict:
        found = {}
        for index, a, b, c in fetched(*how):
            for row in range(len(index)):
                found[int(index[row])] = (a[row].item(), *b[row].tolist(), *c[row].tolist())
        return found

    expected = by_sample("inline", one)
    assert expected == by_sample("workers", one, 0, 1)
    assert expected == by_sample("workers", other, 0, 3)
    assert len(set(expected.values())) == 16
    assert not set(expected.values()) & set(by_sample("inline", one, 1).values())


def test_inline_leaves_the_callers_generators_alone() -> None:
    random.seed(1), np.random.seed(1), torch.manual_seed(1)
    before = random.random(), np.random.rand(), torch.rand(1).item()
    random.seed(1), np.random.seed(1), torch.manual_seed(1)
    fetched("inline", [[1, 2]])
    assert before == (random.random(), np.random.rand(), torch.rand(1).item())


class FirstBatchFirst(Dataset):
    """Those of the second batch are there only once the first batch is."""

    def __init__(self, arrived: Path) -> None:
        self.arrived = arrived

    def __getitem__(self, i: int) -> int:
        if i > 1:
            until(self.arrived.exists, 30)
        return i


def test_the_first_batch_waits_for_no_later_one(tmp_path: Path) -> None:
    arrived = tmp_path / "arrived"
    executor = opened(FirstBatchFirst(arrived))
    executor.start_epoch([[0, 1], [2, 3], [4, 5], [6, 7]], 0)
    assert next(executor).tolist() == [0, 1]
    arrived.touch()
    assert [batch.tolist() for batch in executor] == [[2, 3], [4, 5], [6, 7]]
    executor.close()


def test_processes_come_and_go_while_running() -> None:
    executor = opened(list(range(600)), workers=1)
    executor.start_epoch([list(range(i, i + 6)) for i in range(0, 600, 6)], 0)
    seen = []
    for number, batch in enumerate(executor):
        seen += batch.tolist()
        if number % 10 == 0:
            executor.resize(1 + number // 10 % 3)
        if number == 20:  # wanted again while they leave
            executor.resize(1)
            executor.resize(3)
    assert seen == list(range(600))
    executor.resize(3)
    children = executor.children
    until(lambda: executor.ready() and not any(child.retiring for child in children.values()))
    assert sorted(children) == [0, 1, 2]
    executor.close()


class Told(Dataset):
    """Knows the epoch it was told, as those of libraries are."""

    __module__ = "datasets"
    epoch = -1

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __len__(self) -> int:
        return 40

    def __getitem__(self, index: int) -> tuple[int, int]:
        return index, self.epoch


def test_an_epoch_that_is_left_early_is_followed_by_a_whole_one() -> None:
    number, data = [0], Told()
    how = {"sampler": ShuffleSampler(data, seed=3), "num_workers": 2, "persistent_workers": True}
    loader = FastDataLoader(data, 4, executor="workers", epoch=lambda: number[0], **how)
    for number[0] in range(4):
        seen = []
        for indices, epochs in loader:
            assert set(epochs.tolist()) == {number[0]}
            seen += indices.tolist()
            if number[0] % 2 == 0 and len(seen) == 12:
                break
        assert len(set(seen)) == len(seen) == (12 if number[0] % 2 == 0 else 40)
    loader.close()


def test_an_error_in_set_epoch_is_told() -> None:
    class Grumpy(Told):
        def set_epoch(self, epoch: int) -> None:
            if epoch == 1 and get_worker_info() is not None:
                raise ValueError("not this one")

    loader = FastDataLoader(Grumpy(), 8, num_workers=1, persistent_workers=True, executor="workers")
    assert len(list(loader)) == 5
    with pytest.raises(ValueError, match=r"(?s)in set_epoch\(1\).*not this one"):
        list(loader)
    loader.close()
