"""What workers keep beyond torch's own behaviour: the first batch first, and epochs."""

from __future__ import annotations

import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from processes import until
from torch.utils.data import Dataset, default_collate, get_worker_info

from lightning_fastdata.executors.fetch import FetchPlan
from lightning_fastdata.executors.inline import InlineExecutor
from lightning_fastdata.executors.kinds import Resources, open_executor
from lightning_fastdata.loading.loader import FastDataLoader
from lightning_fastdata.order.samplers import ShuffleSampler


def opened(dataset: Any, workers: int = 2) -> Any:
    plan = FetchPlan(dataset=dataset, collate_fn=default_collate, default_collation=True)
    return open_executor(plan, Resources(executor="workers", workers=workers))


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


class Mixes(Dataset):
    """Goes on with what it has read, as soon as it is told to mix."""

    def __init__(self) -> None:
        self.mixes, self.reads = False, 0

    def __getitem__(self, index: int) -> int:
        self.reads += self.mixes
        return index + self.reads


def test_an_epoch_whose_reading_changes_the_dataset_is_told_of_at_once(virtual) -> None:
    data, told = Mixes(), []
    plan = FetchPlan(dataset=data, collate_fn=default_collate, default_collation=True)
    executor = InlineExecutor(replace(plan, at_start=True, compared=(data,)))
    for epoch in range(7):
        data.mixes = epoch >= 4
        executor.start_epoch([[0, 1], [2, 3]], epoch)
        with warnings.catch_warnings(record=True) as given:
            warnings.simplefilter("always")
            assert len(list(executor)) == 2
        told += [epoch] * len(given)
    assert told == [4]


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
