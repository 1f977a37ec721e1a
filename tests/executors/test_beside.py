"""Laws of a side process beside other programs: when it wakes its thread, and what wakes it."""

from __future__ import annotations

import errno
import os
import re
import select
from contextlib import suppress
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from thoroughness import max_examples
from torch.utils.data import IterableDataset

from lightning_fastdata import FastDataLoader
from lightning_fastdata.executors.pool.beside import Waker, WokenThread
from lightning_fastdata.executors.pool.protocol import TaskQueue
from lightning_fastdata.host import clock
from lightning_fastdata.host.cpu import worker_processes

MS = 1_000_000
LOOK_MS = 50


class Scheduled(clock.Clock):
    """A clock of a thread that runs and waits as it is told."""

    def __init__(self) -> None:
        self.ran_ns = self.waited_ns = 0

    def open_schedstat(self) -> int:
        return -1

    def monotonic_ns(self) -> int:
        return self.ran_ns + self.waited_ns

    def thread_time_ns(self) -> int:
        return self.ran_ns

    def queued_ns(self, schedstat: int) -> int:
        assert schedstat == -1
        return self.waited_ns


class Counts:
    def __init__(self) -> None:
        self.made = self.wakes = 0

    def __call__(self) -> Counts:
        self.made += 1
        return self

    def wake(self) -> None:
        self.wakes += 1


def wakes_in(machine: Scheduled, waker: Waker, counts: Counts, *, run_us: int, wait_us: int) -> int:
    """Read samples for a second of this machine; return how often the thread was woken."""
    before, until_ns = counts.wakes, machine.monotonic_ns() + 1000 * MS
    while machine.monotonic_ns() < until_ns:
        machine.ran_ns += 1000 * run_us
        machine.waited_ns += 1000 * wait_us
        if machine.monotonic_ns() >= waker.due_ns:
            waker.mark()
    return counts.wakes - before


@given(
    shares=st.lists(
        st.tuples(st.integers(1, 5000), st.integers(0, 5000)).filter(lambda one: one[0] != one[1]),
        min_size=1,
        max_size=6,
    )
)
@max_examples(50)
def test_a_process_wakes_its_thread_while_it_waits_for_longer_than_it_runs(shares):
    with clock.installed(machine := Scheduled()):
        counts = Counts()
        waker = Waker(counts)
        for run_us, wait_us in shares:
            # A look is at what was since the last one.
            wakes_in(machine, waker, counts, run_us=run_us, wait_us=wait_us)
            found = wakes_in(machine, waker, counts, run_us=run_us, wait_us=wait_us)
            samples = 1_000_000 // (run_us + wait_us)
            if wait_us < run_us:
                assert found == 0
            else:
                assert min(samples, 1000) // 4 <= found <= 1001
        assert counts.made == any(wait_us > run_us for run_us, wait_us in shares)


class Tens(IterableDataset):
    def __iter__(self):
        return iter(range(0, 1000, 10))


def test_a_queue_that_cannot_be_made_leaves_nothing_open(monkeypatch):
    def refuses(_flags):
        raise OSError(errno.EMFILE, "too many")

    monkeypatch.setattr(os, "pipe2", refuses)
    closed = []
    monkeypatch.setattr(os, "eventfd", lambda *_: -7)
    monkeypatch.setattr(os, "close", closed.append)
    with pytest.raises(OSError, match="too many"):
        TaskQueue()
    assert closed == [-7]


def epolls_of(process):
    """Return the descriptors by which a process waits for others."""
    found = set()
    for each in Path(f"/proc/{process}/fd").iterdir():
        with suppress(FileNotFoundError):  # the one that lists them is closed by now
            if str(each.readlink()) == "anon_inode:[eventpoll]":
                found.add(each.name)
    return found


@pytest.mark.parametrize("dataset", [range(200), Tens()])
def test_a_process_is_woken_by_bells_alone_as_a_pipe_would_wake_it_on_the_cpu_of_the_training(
    dataset,
):
    others, inherited = set(worker_processes()), epolls_of("self")
    batches = iter(FastDataLoader(dataset, 4, num_workers=1, executor="workers"))
    next(batches)
    (process,) = set(worker_processes()) - others
    woken_by, table = [], Path(f"/proc/{process}")
    for epoll in epolls_of(process) - inherited:  # of other libraries, which a fork copies
        told = (table / "fdinfo" / epoll).read_text()
        for end, events in re.findall(r"tfd: +(\d+) events: +([0-9a-f]+)", told):
            if int(events, 16) & select.EPOLLIN:
                woken_by.append(str((table / "fd" / end).readlink()))
    del batches
    assert woken_by
    assert set(woken_by) == {"anon_inode:[eventfd]"}


@pytest.mark.parametrize("gone", [False, True])
def test_to_wake_a_thread_never_waits_for_it(gone):
    ends = []

    class Deaf(WokenThread):
        """A thread that takes no wake."""

        @staticmethod
        def _wait(there):
            ends.append(there)
            if gone:
                there.close()

    woken = Deaf()
    for _ in range(10_000):
        woken.wake()  # it would hang, or raise
