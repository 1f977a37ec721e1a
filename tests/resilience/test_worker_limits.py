"""Workers that die again and again end the training with the reason; one that grows is replaced."""

from __future__ import annotations

import os
import signal
import warnings
from typing import Any

import pytest
import torch
from resilience.runs import warned
from torch.utils.data import Dataset, IterableDataset
from virtual_time import HurriedClock

from lightning_fastdata import FastDataLoader
from lightning_fastdata.errors import FastDataWarning, WorkerError
from lightning_fastdata.executors.pool import watches
from lightning_fastdata.executors.pool.watches import Deaths, Growth
from lightning_fastdata.host import clock

MIB = 2**20


class DiesEverywhere(Dataset):
    def __len__(self) -> int:
        return 4000

    def __getitem__(self, index: int) -> torch.Tensor:
        if index >= 32:
            os.kill(os.getpid(), signal.SIGKILL)
        return torch.tensor(index)


class DiesInAStream(IterableDataset):
    def __iter__(self):
        yield from torch.arange(8)
        os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.slow
def test_a_training_whose_workers_keep_dying_ends_and_says_what_the_kernel_says():
    loader = FastDataLoader(
        DiesEverywhere(), 8, num_workers=2, executor="workers", on_bad_sample="replace"
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FastDataWarning)
        with pytest.raises(WorkerError) as told:
            list(loader)
    loader.close()
    text = str(told.value)
    assert "31 side processes died within a minute" in text
    assert "was ended by SIGKILL" in text
    assert "The kernel has killed" in text or "The kernel does not say" in text
    assert "Memory of those that live: " in text


@pytest.mark.usefixtures("virtual")
def test_deaths_count_where_little_is_done_between_them():
    kills = [3]

    def deaths() -> Deaths:
        return Deaths(lambda: kills[0])

    slow = deaths()
    for _ in range(200):  # one in three seconds
        clock.sleep(3)
        slow.note(-9, 0, {})
    useful = deaths()
    for at in range(200):
        clock.sleep(0.1)
        useful.note(-9, 5 * at, {})
    useless = deaths()
    kills[0] = 10
    with pytest.warns(FastDataWarning, match="killed a side process"):
        useless.note(-9, 0, {})
    for _ in range(29):
        useless.note(-9, 0, {})
    with pytest.raises(WorkerError, match=r"(?s)SIGKILL.*\(31 times\).*has killed 7 processes"):
        useless.note(-9, 0, {})


def test_a_reader_of_a_stream_that_the_kernel_killed_for_memory_is_told_of(monkeypatch):
    kills = iter([3])
    monkeypatch.setattr(watches, "Deaths", lambda: Deaths(oom_kills=lambda: next(kills, 4)))
    loader = FastDataLoader(DiesInAStream(), 8, num_workers=1, executor="workers")
    with (
        pytest.warns(FastDataWarning, match=r"as memory ran out.*rest of its stream is missing"),
        pytest.raises(WorkerError, match="before the end of its stream"),
    ):
        list(loader)
    loader.close()


class Child:
    def __init__(self, number: int) -> None:
        self.number = self.pid = number


def looks(sizes: dict[int, int], left: list[int]) -> Any:
    """Return what looks at workers of these sizes, 6 s later each time, in virtual time."""
    growth = Growth(sizes.get, lambda: left[0])
    children = {number: Child(number) for number in sizes}

    def look() -> Any:
        clock.sleep(6)
        return growth.look(children)

    return look


@pytest.mark.usefixtures("virtual")
def test_growth_is_told_of_before_memory_runs_out_and_then_ended():
    sizes, left = {0: 100 * MIB, 1: 100 * MIB}, [8000 * MIB]
    with warned() as texts:
        look = looks(sizes, left)
        found = look()
        while found is None and left[0] > 0:
            sizes[1] += 100 * MIB
            left[0] -= 100 * MIB
            found = look()
    assert found is not None
    assert found.number == 1
    assert len(texts) == 2
    assert all(text.startswith("Side process 1 (pid 1) has grown from 100 to") for text in texts)
    assert "Take fewer workers" in texts[0]
    assert "It is replaced" in texts[1]


class Hoards(Dataset):
    """Keeps what it has read, as a dataset with a cache does."""

    def __init__(self) -> None:
        self.kept: list[bytearray] = []

    def __len__(self) -> int:
        return 400

    def __getitem__(self, index: int) -> torch.Tensor:
        self.kept.append(bytearray(b"x") * (8 * MIB))
        return torch.tensor([index, os.getpid()])


class HoardsAhead(Hoards):
    """Each process is sent its tasks, so that it knows what it reads next."""

    def read_ahead(self, indices: Any) -> None:
        pass


@pytest.mark.parametrize(("kind", "workers"), [(Hoards, 2), (HoardsAhead, 1)])
def test_a_worker_that_hoards_is_replaced_and_no_sample_is_lost_or_doubled(kind, workers):
    """A lone one is sent nothing while it leaves."""
    how = {"num_workers": workers, "persistent_workers": True, "timeout": 0}
    loader = FastDataLoader(kind(), 4, executor="workers", **how)
    batches = iter(loader)
    got = next(batches).tolist()
    loader._iterator._crew._growth = Growth(left_bytes=lambda: 100 * MIB)
    with clock.installed(HurriedClock()), warned() as texts:
        for batch in batches:
            got += batch.tolist()
    loader.close()
    assert any("It is replaced between two tasks" in text for text in texts)
    assert [index for index, _ in got] == list(range(400))
    assert len({pid for _, pid in got}) > workers
