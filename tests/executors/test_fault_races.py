"""Side processes die, leave and start at the worst moment; the batches do not notice."""

from __future__ import annotations

import errno
import multiprocessing
import os
import resource
import select
import signal
import threading
from collections import namedtuple
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any, ClassVar

import psutil
import pytest
import torch
from open_files import open_files
from processes import hang, until
from programs import run_program
from torch.utils.data import Dataset, IterableDataset, default_collate

from lightning_fastdata.batches import memory
from lightning_fastdata.errors import WorkerError
from lightning_fastdata.executors.fetch import FetchPlan
from lightning_fastdata.executors.kinds import Resources
from lightning_fastdata.executors.pool.crew import ChildProcess
from lightning_fastdata.executors.pool.protocol import (
    DropSlot,
    TaskTaken,
    Wire,
    read_packet,
    wire_pair,
)
from lightning_fastdata.executors.pool.scheduler import PoolExecutor, StreamExecutor
from lightning_fastdata.executors.pool.watches import death

TESTS = str(Path(__file__).parents[1])


def listed(samples: list[Any]) -> Any:
    return [sample.clone() for sample in samples], "kept beside"


@pytest.fixture
def pool() -> Iterator[Any]:
    """Return what opens an executor, of which a batch that is lost is an error and no endless test.

    All are closed behind the test.
    """
    with ExitStack() as opened:

        def open_one(dataset: Any, collate: Any = listed, processes: int = 2, **how: Any) -> Any:
            default = collate is default_collate
            how = {"default_collation": default, "timeout_s": 40, **how}
            plan = FetchPlan(dataset=dataset, collate_fn=collate, **how)
            stream = isinstance(dataset, IterableDataset)
            kind = StreamExecutor if stream else PoolExecutor
            given = Resources(executor="workers", workers=processes)
            return opened.enter_context(closing(kind(plan, given)))

        yield open_one


def kill(child: ChildProcess) -> None:
    child.process.kill()
    child.process.join()


def sleeps(child: ChildProcess) -> bool:
    return psutil.Process(child.process.pid).status() == psutil.STATUS_SLEEPING


def halt(child: ChildProcess) -> None:
    os.kill(child.process.pid or 0, signal.SIGSTOP)
    until(child.is_stopped)


def firsts(batches: Iterable[Any]) -> list[int]:
    return [int(samples[0][0]) for samples, _ in batches]


class Quick(Dataset):
    def __getitem__(self, index: int) -> Any:
        return torch.full((200,), index)


def test_a_process_that_does_not_leave_by_itself_is_not_said_to_be_killed_for_memory(pool) -> None:
    executor = pool(Quick(), processes=1)
    executor.start_epoch([], 0)
    [child] = executor.children.values()
    halt(child)
    child.stop(0)
    assert death(child.exitcode) == "died"


def test_a_process_that_leaves_before_it_is_asked_has_taken_nothing(pool) -> None:
    executor = pool(Quick())
    executor.start_epoch([], 0)
    dies, leaves = executor.children.values()
    halt(dies)
    halt(leaves)
    executor.start_epoch([[index] for index in range(4)], 0)
    while read_packet(executor._crew._queue.reading) is not None:
        pass  # taken by one that dies before it can note it
    executor.resize(1)
    os.kill(leaves.process.pid, signal.SIGCONT)
    heard = select.poll()
    heard.register(leaves.wire.fileno(), select.POLLIN)
    assert heard.poll(40_000)  # it has said that it leaves
    halt(leaves)
    kill(dies)
    assert firsts(executor) == list(range(4))


def test_a_task_that_woke_a_process_about_to_leave_wakes_another(pool) -> None:
    executor = pool(Quick())
    executor.start_epoch([[0]], 0)
    assert firsts(executor) == [0]
    kill(executor.children[0])
    executor.start_epoch([[index] for index in range(50)], 0)
    assert firsts(executor) == list(range(50))
    until(lambda: executor.ready() and executor.plan.faults.deaths)
    # They wait for tasks, process 1 the longer, which is woken first.
    until(lambda: all(sleeps(child) for child in executor.children.values()))
    allowed = os.sched_getaffinity(0)
    leaves = executor.children[1].process.pid
    try:
        # On the CPU of this thread, and idle, it does not run before this thread waits.
        os.sched_setaffinity(0, {min(allowed)})
        os.sched_setaffinity(leaves, {min(allowed)})
        os.sched_setscheduler(leaves, os.SCHED_IDLE, os.sched_param(0))
        executor.start_epoch([[1]], 1)
        executor.resize(1)
        assert firsts(executor) == [1]
    finally:
        os.sched_setaffinity(0, allowed)


def dies_at_once(number: int) -> None:
    os._exit(7)


def test_workers_that_never_start_are_given_up_each_time(pool) -> None:
    executor = pool(Quick(), processes=1, worker_init_fn=dies_at_once)
    executor.start_epoch([[1]], 0)
    for times in (3, 4):
        with pytest.raises(WorkerError, match=f"exit code 7 {times} times"):
            next(executor)


def test_a_process_that_cannot_be_given_memory_leaves_no_file_open(pool, monkeypatch) -> None:
    def refuse(size_bytes: int) -> int:
        raise WorkerError("No more files")

    executor = pool(Quick())
    before = open_files()
    monkeypatch.setattr(memory, "create_shared_memory", refuse)
    with pytest.raises(WorkerError, match="No more files"):
        executor.start_epoch([], 0)
    assert not open_files() - before


class Ragged(Dataset):
    def __getitem__(self, index: int) -> Any:
        if index == 33:
            return torch.zeros(3)
        if index == 60:
            raise KeyError("no such picture")
        return torch.full((200,), index)


def test_an_error_beside_a_sample_of_another_shape_is_raised(pool) -> None:
    executor = pool(Ragged(), default_collate)
    executor.start_epoch([list(range(at, at + 32)) for at in range(0, 128, 32)], 0)
    assert next(executor)[:, 0].tolist() == list(range(32))
    with pytest.raises(KeyError, match="sample 60"):
        next(executor)
    assert [int(batch[0][0]) for batch in executor] == [64, 96]


class Growing(Dataset):
    def __getitem__(self, index: int) -> Any:
        return torch.full((25_000 if index < 30 else 150_000,), index)


def test_a_process_that_starts_is_given_no_memory_that_was_given_up(pool) -> None:
    executor = pool(Growing(), memory_limit_bytes=2**20, look_ahead=6)
    epochs = 0
    # Nobody is to know yet of some memory that was given up, which is mostly so at once.
    while not set(executor._slots.dropped) & set(executor._crew._slots):
        executor.start_epoch([[index] for index in range(36)], epochs := epochs + 1)
        assert firsts(executor) == list(range(36))
    executor.resize(3)
    while not executor.children[2].answers:
        executor.start_epoch([[index] for index in range(20)], epochs := epochs + 1)
        assert firsts(executor) == list(range(20))
    assert executor.plan.faults.deaths == 0


class Private(Dataset):
    """Returns a tuple of a class that only its process knows."""

    def __getitem__(self, index: int) -> Any:
        return namedtuple("Kind", "x")(torch.full((200,), index))


def test_a_batch_that_cannot_be_pickled_is_an_error(pool) -> None:
    executor = pool(Private(), default_collate, 1)
    executor.start_epoch([[index] for index in range(6)], 0)
    for _ in range(6):
        with pytest.raises(RuntimeError, match="pickle"):
            next(executor)
    assert not executor.plan.faults.deaths


def unknown() -> None:
    raise ImportError("no such index here")


class Foreign:
    """An index that no side process can take in."""

    def __reduce__(self) -> Any:
        return unknown, ()


@pytest.mark.parametrize("length", [1, 3000])
def test_indices_that_cannot_be_unpickled_are_an_error(pool, length: int) -> None:
    executor = pool(Quick(), processes=1)
    executor.start_epoch([[0], [Foreign()] * length, [2]], 0)
    assert firsts([next(executor)]) == [0]
    with pytest.raises(ImportError, match="no such index here"):
        next(executor)
    assert firsts(executor) == [2]
    assert not executor.plan.faults.deaths


class Told(Dataset):
    """Counts how often it is told of an epoch, as those of libraries are."""

    __module__ = "datasets"

    def __init__(self) -> None:
        self.told = torch.zeros(1, dtype=torch.int64).share_memory_()
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.told += 1
        self.epoch = epoch

    def __getitem__(self, index: int) -> Any:
        return torch.tensor([index, self.epoch])


def test_a_process_tells_its_dataset_of_an_epoch_once(pool) -> None:
    dataset = Told()
    executor = pool(dataset, processes=1)
    for epoch in range(3):
        executor.start_epoch([[index] for index in range(40)], epoch)
        samples = [samples[0].tolist() for samples, _ in executor]
        assert samples == [[index, epoch] for index in range(40)]
    assert int(dataset.told) == 2


class ForkProcess(multiprocessing.context.ForkProcess):
    """Another process is forked while this one starts, and inherits both ends of its wire."""

    bystanders: ClassVar[list[int]] = []

    def start(self) -> None:
        super().start()
        bystander = os.fork()
        if bystander == 0:
            hang()
        self.bystanders.append(bystander)


class ForkContext(multiprocessing.context.ForkContext):
    Process = ForkProcess


@pytest.fixture
def crowded() -> Iterator[ForkContext]:
    yield ForkContext()
    while ForkProcess.bystanders:
        bystander = ForkProcess.bystanders.pop()
        os.kill(bystander, signal.SIGKILL)
        os.waitpid(bystander, 0)


def test_a_death_is_seen_while_others_hold_the_wire(pool, crowded: ForkContext) -> None:
    executor = pool(Quick(), context=crowded)
    executor.start_epoch([[index] for index in range(100)], 0)
    seen = firsts([next(executor)])
    for child in list(executor.children.values()):
        kill(child)
    seen += firsts(executor)
    assert seen == list(range(100))
    assert executor.plan.faults.deaths >= 1


class Numbers(IterableDataset):
    def __iter__(self) -> Iterator[Any]:
        return (torch.full((200,), index) for index in range(50))


def test_a_death_of_a_stream_is_seen_while_others_hold_the_wire(pool, crowded: ForkContext) -> None:
    executor = pool(Numbers(), processes=1, context=crowded)
    for epoch in range(2):
        executor.start_epoch([1], epoch)
        assert firsts(executor) == list(range(50))
        kill(executor.children[0])
    executor.start_epoch([1], 2)
    kill(executor.children[0])
    with pytest.raises(WorkerError, match=r"process 0 was ended by SIGKILL .*before the end"):
        list(executor)


def test_processes_outlive_the_thread_that_started_them(pool) -> None:
    executor = pool(Quick(), processes=5)
    starter = threading.Thread(target=executor.start_epoch, args=([[0]], 0))
    starter.start()
    starter.join()
    until(lambda: all(child.began for child in executor.children.values()))
    assert firsts(executor) == [0]
    executor.start_epoch([[index] for index in range(50)], 1)
    assert firsts(executor) == list(range(50))
    assert not executor.plan.faults.deaths


def test_idle_processes_that_are_killed_are_replaced(pool) -> None:
    executor = pool(Quick(), processes=5)
    executor.start_epoch([[0]], 0)
    assert firsts(executor) == [0]
    until(lambda: all(child.began for child in executor.children.values()))
    for child in list(executor.children.values()):
        kill(child)
    executor.start_epoch([[index] for index in range(20)], 1)
    assert firsts(executor) == list(range(20))
    until(lambda: executor.ready() and executor.plan.faults.deaths == 5)


def test_a_process_that_starts_late_draws_for_the_epoch_that_is_under_way(pool) -> None:
    dataset = Told()
    executor = pool(dataset)
    dataset.set_epoch(5)
    executor.start_epoch([[index] for index in range(400)], 5)
    next(executor)
    dataset.set_epoch(1)  # for another loader of the same dataset
    kill(executor.children[0])
    executor.resize(3)
    assert [samples[0].tolist() for samples, _ in executor] == [[i, 5] for i in range(1, 400)]


CROWD = """
import ctypes, os, resource, socket, sys
import torch
sys.path.append(sys.argv[1])
from processes import until
from lightning_fastdata.executors.fetch import FetchPlan
from lightning_fastdata.executors.kinds import Resources
from lightning_fastdata.executors.pool.scheduler import PoolExecutor

class Rows(torch.utils.data.Dataset):
    def __getitem__(self, index):
        return torch.full((5000,), index)

def listed(samples):
    return [sample.clone() for sample in samples]

# Whoever may do as it likes has no such limit: effective, permitted and inheritable capabilities.
ctypes.CDLL(None).capset((ctypes.c_uint32 * 2)(0x20080522, 0), (ctypes.c_uint32 * 6)())
resource.setrlimit(resource.RLIMIT_NOFILE, (200, 200))
plan = FetchPlan(dataset=Rows(), collate_fn=listed, timeout_s=40)
executor = PoolExecutor(plan, Resources(executor="workers", workers=2))
executor.start_epoch([], 0)
until(lambda: all(child.began for child in executor.children.values()))
ours, theirs = socket.socketpair()
crowd = 0
try:
    while True:
        socket.send_fds(ours, [b"x"], [0])
        crowd += 1
except OSError as error:
    print(error.errno)
executor.start_epoch([[index] for index in range(90)], 1)
executor.resize(4)
executor.ready()
for _ in range(crowd):
    os.close(socket.recv_fds(theirs, 1, 1)[1][0])
print([int(samples[0][0]) for samples in executor] == list(range(90)), executor.plan.faults.deaths)
executor.close()
"""


def test_what_cannot_be_sent_for_now_is_sent_later() -> None:
    program = run_program("-c", CROWD, TESTS)
    assert program.stdout.splitlines() == [
        str(errno.ETOOMANYREFS),
        "True 0",
    ], program.stderr


@pytest.mark.parametrize("collate", [listed, default_collate])
def test_a_batch_without_memory_is_an_error_of_its_own(pool, collate: Any) -> None:
    executor = pool(Quick(), collate)
    executor.start_epoch([[index, index] for index in range(4)], 0)
    assert len(list(executor)) == 4
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, limits[1]))  # memory that is shared is a file
    try:
        executor._slots.close()
        executor.start_epoch([[index, index] for index in range(4)], 1)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    for _ in range(4):
        with pytest.raises(WorkerError, match=r"No memory for a batch.*limit \(ulimit -f\)"):
            next(executor)
    with pytest.raises(StopIteration):
        next(executor)
    executor.start_epoch([[index, index] for index in range(4)], 2)
    assert len(list(executor)) == 4


def late(index: int, folder: Path) -> int:
    (folder / f"{os.getpid()}-{index}").touch()
    until((folder / "go").exists)
    return index


class LateIndex:
    """An index that keeps the process that takes it busy before it can note what it took."""

    def __init__(self, index: int, folder: Path) -> None:
        self.index, self.folder = index, folder

    def __reduce__(self) -> Any:
        return late, (self.index, self.folder)


def test_a_task_that_another_has_noted_meanwhile_is_not_done_again(pool, tmp_path: Path) -> None:
    executor = pool(Quick(), listed)
    executor.start_epoch([[LateIndex(index, tmp_path)] for index in range(8)], 0)
    until(lambda: len(list(tmp_path.iterdir())) == 2)
    killed = executor.children[1].process
    killed.kill()
    killed.join()
    # What both had taken is in doubt now. The other notes it, says so, and does it and the next,
    # before anything of that is read.
    executor.ready()
    (tmp_path / "go").touch()
    until(lambda: len({file.name.partition("-")[2] for file in tmp_path.glob("*-*")}) >= 4)
    assert [int(batch[0][0][0]) for batch in executor] == list(range(8))
    assert executor.plan.faults.deaths == 1


def test_what_a_process_said_before_it_died_is_heard() -> None:
    ours, theirs = map(Wire, wire_pair())
    answers = [TaskTaken(1, 4), TaskTaken(2, 4)]
    for answer in answers:
        theirs.send(answer)
    ours.send(DropSlot(3))  # it dies without having read this, which resets the connection
    theirs.end.close()
    assert [ours.receive() for _ in range(3)] == [*((answer, []) for answer in answers), None]
    ours.close()
