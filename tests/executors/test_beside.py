"""Laws of a side process beside other programs: when it wakes its thread, and what wakes it."""

from __future__ import annotations

import errno
import os
import re
import select
import socket
from contextlib import closing, suppress
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from processes import until
from thoroughness import max_examples
from torch.utils.data import IterableDataset
from virtual_time import virtual_time

from lightning_fastdata import FastDataLoader
from lightning_fastdata.executors.fetch import FetchPlan
from lightning_fastdata.executors.kinds import Resources
from lightning_fastdata.executors.pool.beside import Waker, WokenThread, poll
from lightning_fastdata.executors.pool.protocol import TaskQueue
from lightning_fastdata.executors.pool.scheduler import PoolExecutor
from lightning_fastdata.host import clock
from lightning_fastdata.host.cpu import worker_processes

MS = 1_000_000


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
            assert waker.waits == (wait_us > run_us)
            if wait_us < run_us:
                assert found == 0
            else:
                assert min(samples, 1000) // 4 <= found <= 1001
        assert counts.made == any(wait_us > run_us for run_us, wait_us in shares)


class Poller:
    """Has an event at a time, and takes as long as it is told to wait for it."""

    def __init__(self, comes_ns: int, starved_until_ns: int) -> None:
        self.comes_ns, self.starved_until_ns = comes_ns, starved_until_ns
        self.waits_ms: list[float | None] = []

    def starved(self) -> bool:
        return clock.monotonic_ns() < self.starved_until_ns

    def poll(self, ms: float | None) -> list[tuple[int, int]]:
        self.waits_ms.append(ms)
        left_ns = self.comes_ns - clock.monotonic_ns()
        waits_ns = left_ns if ms is None else min(left_ns, round(1e6 * ms))
        clock.sleep(max(0, waits_ns) / 1e9)
        return [(1, 1)] if clock.monotonic_ns() >= self.comes_ns else []


@given(
    until_us=st.none() | st.integers(-1000, 50_000),
    comes_us=st.integers(0, 60_000),
    starved_us=st.integers(0, 60_000),
)
@max_examples(100)
def test_who_waits_for_starved_processes_wakes_each_millisecond(until_us, comes_us, starved_us):
    with virtual_time():
        began_ns = clock.monotonic_ns()
        poller = Poller(began_ns + 1000 * comes_us, began_ns + 1000 * starved_us)
        until_ns = None if until_us is None else began_ns + 1000 * until_us
        events = poll(poller, until_ns, poller.starved)
        took_us = (clock.monotonic_ns() - began_ns) // 1000
    most_us = comes_us if until_us is None else max(0, until_us)
    assert bool(events) == (comes_us <= most_us)
    assert took_us == min(comes_us, most_us)
    wakes = poller.waits_ms.count(1.0)
    assert poller.waits_ms[:wakes] == [1.0] * wakes
    assert len(poller.waits_ms) <= wakes + 1
    assert wakes == pytest.approx(min(took_us, starved_us) / 1000, abs=1)


class Crowded(clock.Clock):
    """A clock of a machine on which a thread waits for a CPU so many times as long as it runs."""

    def __init__(self, times: int) -> None:
        self.times = times

    def open_schedstat(self) -> int:
        return -1

    def queued_ns(self, schedstat: int) -> int:
        return self.times * self.thread_time_ns()


@pytest.mark.parametrize("times", [0, 2])
def test_a_process_tells_whether_it_is_starved(times):
    plan = FetchPlan(dataset=list(range(8)), collate_fn=list)
    given = Resources(executor="workers", workers=1)
    with clock.installed(Crowded(times)), closing(PoolExecutor(plan, given)) as executor:
        executor.start_epoch([[0, 1], [2, 3]], 0)
        assert list(executor) == [[0, 1], [2, 3]]
        assert executor.children[0].progress.starved == (times > 1)


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
    at_the_end = {"anon_inode:[pidfd]"}  # of the training process
    assert set(woken_by) - at_the_end == {"anon_inode:[eventfd]"}


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


def test_a_woken_thread_waits_whatever_time_limit_a_program_sets_for_its_sockets():
    ends = []

    class Shown(WokenThread):
        _wait = staticmethod(ends.append)

    socket.setdefaulttimeout(0.0)
    try:
        woken = Shown()
    finally:
        socket.setdefaulttimeout(None)
    until(lambda: ends)
    woken.wake()
    assert ends[0].gettimeout() is None
