"""A worker that gets nowhere is found, shown and replaced; what it had to do is done once."""

from __future__ import annotations

import os
import signal
import subprocess
import threading
import warnings
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from processes import hang, until
from torch.utils.data import Dataset
from virtual_time import HurriedClock, VirtualClock, virtual_time

from lightning_fastdata import FastDataLoader
from lightning_fastdata.errors import FastDataWarning, WorkerError
from lightning_fastdata.executors.pool.protocol import ProgressMemory
from lightning_fastdata.executors.pool.watches import StallWatch
from lightning_fastdata.host import clock

LOCK = threading.Lock()
SAMPLES = 160
BAD = 37


def stop_oneself() -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def wait_for_a_lock() -> None:
    LOCK.acquire()


def wait_for_a_program() -> None:
    subprocess.run(["sleep", "600"], check=True)


class Stuck(Dataset):
    """Hangs with one sample: the first time that it is read, or each time."""

    def __init__(self, hang: Any, once: Path | None) -> None:
        self.hang, self.once = hang, once

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> torch.Tensor:
        if index == BAD and (self.once is None or not self.once.exists()):
            if self.once is not None:
                self.once.touch()
            self.hang()
        return torch.tensor([index, torch.randint(2**40, ()).item()])


def loader_of(dataset: Dataset, executor: str, **how: Any) -> FastDataLoader:
    seed = torch.Generator().manual_seed(0)
    how = {"num_workers": 2, "timeout": 1, "generator": seed, **how}
    return FastDataLoader(dataset, 8, executor=executor, **how)


def batches_of(loader: FastDataLoader) -> list[Any]:
    batches = [batch.tolist() for batch in loader]
    loader.close()
    return batches


@pytest.mark.parametrize("how", [hang, stop_oneself, wait_for_a_program])
@pytest.mark.cases(1)
def test_what_hangs_once_is_delivered_as_if_it_had_not(tmp_path, how):
    calm = batches_of(loader_of(Stuck(how, Path("/")), "workers"))
    with pytest.warns(FastDataWarning, match=rf"got nowhere for 1 s[\s\S]*reading sample.* {BAD}"):
        got = batches_of(loader_of(Stuck(how, tmp_path / "hung"), "workers"))
    assert got == calm


def test_what_hangs_is_replaced_where_the_warning_of_it_is_an_error(tmp_path):
    loader = loader_of(Stuck(hang, tmp_path / "hung"), "workers")
    batches, got = iter(loader), []
    with warnings.catch_warnings():
        warnings.simplefilter("error", FastDataWarning)
        with pytest.raises(FastDataWarning, match="is replaced"):
            got.extend(batches)
        got += batches
    loader.close()
    assert [row[0] for batch in got for row in batch.tolist()] == list(range(SAMPLES))


def test_what_hangs_twice_is_an_error_that_names_the_sample_and_shows_the_stack():
    match = rf"Sample {BAD} of the dataset was read twice[\s\S]*in wait_for_a_lock"
    with (
        LOCK,
        pytest.warns(FastDataWarning, match="is replaced"),
        pytest.raises(WorkerError, match=match),
    ):
        batches_of(loader_of(Stuck(wait_for_a_lock, None), "workers"))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::lightning_fastdata.errors.FastDataWarning")
def test_what_hangs_twice_goes_the_way_of_bad_samples():
    loader = loader_of(Stuck(hang, None), "workers", on_bad_sample="replace")
    got = [row[0] for batch in batches_of(loader) for row in batch]
    assert [at for at in range(SAMPLES) if got[at] != at] == [BAD]


@pytest.mark.slow
def test_while_others_go_on_it_is_found_too():
    """Order does not matter, so that the training gets batches all the time."""
    loader = loader_of(Stuck(hang, None), "workers", in_order=False, num_workers=3)
    with pytest.warns(FastDataWarning), pytest.raises(WorkerError, match=f"Sample {BAD} "):
        batches_of(loader)


def test_no_time_is_a_hang_if_it_is_turned_off(tmp_path):
    go_on = tmp_path / "go on"
    loader = loader_of(Stuck(partial(until, go_on.exists), None), "workers", timeout=0)
    batches = iter(loader)
    got = [next(batches) for _ in range(BAD // 8)]
    threading.Timer(0.1, go_on.touch).start()
    with clock.installed(HurriedClock()):
        got += batches
    loader.close()
    assert sum(map(len, got)) == SAMPLES


# What counts as time


class Times(VirtualClock):
    """One process, if any, computes all the time."""

    computing: int | None = None

    def cpu_s_of(self, pid: int, *, with_children: bool) -> float:
        return self.monotonic_ns() / 1e9 if pid == self.computing else 0.0


@pytest.fixture
def times() -> Iterator[Times]:
    with virtual_time(Times) as virtual:
        yield virtual


class Child:
    """What is asked of a side process."""

    is_starting = False

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.progress = ProgressMemory.create()
        self.progress.state = 0


def passes(watch: StallWatch, seconds: float, children: Any) -> float | None:
    """Look for so long; return after how much of it a process was found stuck, or None."""
    began_s = clock.monotonic()
    while clock.monotonic() < began_s + seconds:
        clock.sleep(0.5)
        if watch.look(children, list, children):
            return clock.monotonic() - began_s
    return None


@pytest.mark.usefixtures("times")
def test_by_default_a_minute_is_a_hang_or_twenty_times_the_99th_percentile():
    watch = StallWatch(None)
    assert watch.limit_s == 60
    for _ in range(99):
        watch.note_task(10**9)
    watch.note_task(200 * 10**9)
    assert watch.limit_s == 60
    watch.note_task(10 * 10**9)
    assert 200 <= watch.limit_s <= 250
    stuck = Child(0)
    stuck.progress.read(1, 5)
    assert 60 <= passes(StallWatch(None), 100, [stuck]) <= 61.5


@pytest.mark.usefixtures("times")
def test_time_in_which_the_whole_program_was_stopped_is_none():
    watch, stuck = StallWatch(60), Child(0)
    stuck.progress.read(1, 5)
    assert passes(watch, 30, [stuck]) is None
    clock.sleep(3600)
    assert passes(watch, 20, [stuck]) is None
    assert passes(watch, 20, [stuck]) is not None


def test_who_computes_may_go_on_for_ten_times_as_long_and_so_may_those_who_wait_for_it(times):
    computes, waits = Child(0), Child(1)
    for each in (computes, waits):
        each.progress.read(1, 5)

    times.computing = computes.pid
    assert 80 <= passes(StallWatch(10), 200, [computes, waits]) <= 105
    assert passes(StallWatch(10), 20, [waits]) <= 11.5
