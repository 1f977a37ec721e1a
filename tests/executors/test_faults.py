"""Side processes die, hang and are interrupted; the batches do not notice."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest
import torch
from open_files import open_files
from processes import runs, until
from thoroughness import LONG
from torch.utils.data import Dataset, default_collate

from lightning_fastdata.errors import FastDataWarning, WorkerError
from lightning_fastdata.executors.fetch import FetchPlan
from lightning_fastdata.executors.pool.protocol import DropSlot, TaskTaken
from lightning_fastdata.executors.pool.scheduler import PoolExecutor
from lightning_fastdata.executors.pool.wire import Wire, wire_pair


def listed(samples: list[Any]) -> Any:
    return [sample.clone() for sample in samples], "kept beside"


class Rows(Dataset):
    def __getitem__(self, index: int) -> Any:
        return torch.full((4096,), index)


class Deadly(Dataset):
    def __init__(self, how: str) -> None:
        self.how = how

    def __getitem__(self, index: int) -> Any:
        if index == 13:
            if self.how == "exit":
                os._exit(3)
            os.kill(os.getpid(), getattr(signal, self.how))
        return torch.full((3,), index)


def pool(dataset: Any, collate: Any = default_collate, processes: int = 2, **how: Any):
    default = collate is default_collate
    plan = FetchPlan(dataset=dataset, collate_fn=collate, default_collation=default, **how)
    return PoolExecutor(plan, processes=processes)


@pytest.mark.cases(1)
@pytest.mark.parametrize("collate", [default_collate, listed])
def test_no_sample_is_lost_or_doubled_while_processes_are_killed(collate) -> None:
    executor = pool(Rows(), collate, 3)
    rng = random.Random(0)
    seen: list[int] = []
    epochs = 0
    while executor.respawned < (30 if LONG else 12):
        executor.start_epoch([list(range(i, i + 4)) for i in range(0, 1200, 4)], epochs)
        epochs += 1
        for batch in executor:
            rows = batch if collate is default_collate else batch[0]
            for row in rows:
                assert row.eq(row[0]).all()
                seen.append(int(row[0]))
            # Where processes get nothing done between two kills, one sample seems to be the cause;
            # and one that was just forked is to get somewhere first.
            child = executor.children.get(rng.randrange(24))
            if child is not None and child.answers:
                child.process.kill()
    assert seen == list(range(1200)) * epochs
    executor.close()


@pytest.mark.cases(4)
@pytest.mark.parametrize("how", ["SIGSEGV", "SIGKILL", "exit"])
@pytest.mark.parametrize("collate", [default_collate, listed])
def test_a_sample_that_kills_is_named_and_the_others_come(how: str, collate: Any) -> None:
    executor = pool(Deadly(how), collate)
    executor.start_epoch([[10, 11], [12, 13], [14, 15], [16]], 0)
    next(executor)
    with pytest.raises(WorkerError, match=r"Sample 13 .*(SIG|exit code 3)"):
        next(executor)
    assert len(list(executor)) == 2
    executor.close()


@pytest.mark.slow
def test_an_only_process_that_is_stopped_is_told_of() -> None:
    executor = pool(Rows(), processes=1, timeout_s=1)
    executor.start_epoch([[i, i + 1] for i in range(0, 2000, 2)], 0)
    next(executor)
    os.kill(executor.children[0].process.pid, signal.SIGSTOP)
    late = pytest.raises(WorkerError, match=r"stopped, state T.*SIGCONT")
    with late, pytest.warns(FastDataWarning, match="for 0.5 s"):
        list(executor)
    executor.close()


def broken(number: int) -> None:
    raise ValueError(f"no licence for {number}")


def test_an_error_at_the_start_of_a_worker_is_raised() -> None:
    executor = pool(Rows(), worker_init_fn=broken)
    executor.start_epoch([[1]], 0)
    with pytest.raises(ValueError, match="no licence for"):
        next(executor)
    executor.close()


def dies_at_once(number: int) -> None:
    os._exit(7)


def test_workers_that_never_start_are_given_up() -> None:
    executor = pool(Rows(), worker_init_fn=dies_at_once)
    executor.start_epoch([[1]], 0)
    with pytest.raises(WorkerError, match="exit code 7 3 times"):
        next(executor)
    executor.close()


SCRIPT = """
import signal, sys, torch
# A shell that runs its tests in the background hands down a SIGINT that is ignored.
signal.signal(signal.SIGINT, signal.default_int_handler)
from torch.utils.data import default_collate
from lightning_fastdata.executors.fetch import FetchPlan
from lightning_fastdata.executors.pool.scheduler import PoolExecutor
class Slow(torch.utils.data.Dataset):
    def __getitem__(self, index):
        return torch.full((100000,), index)
if __name__ == "__main__":
    plan = FetchPlan(dataset=Rows(), collate_fn=default_collate, default_collation=True,
                     context=sys.argv[1])
    executor = PoolExecutor(plan, processes=2)
    executor.start_epoch([[i] for i in range(10**6)], 0)
    next(executor)
    print(*[s.process.pid for s in executor.children.values()], flush=True)
    for batch in executor:
        pass
"""


# Being killed is tried in test_kills.
@pytest.mark.slow
@pytest.mark.parametrize(
    ("context", "ending"), [("fork", signal.SIGTERM), ("spawn", signal.SIGINT)]
)
def test_nothing_is_left_of_a_program_that_ends(tmp_path: Path, context, ending) -> None:
    script = tmp_path / "script.py"
    script.write_text(textwrap.dedent(SCRIPT))
    files = set(os.listdir("/dev/shm"))
    program = subprocess.Popen(
        [sys.executable, str(script), context],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    assert program.stdout is not None
    pids = [int(pid) for pid in program.stdout.readline().split()]
    assert len(pids) == 2
    program.send_signal(ending)
    program.wait(60)
    until(lambda: not any(map(runs, pids)))  # one that was just spawned is importing still
    assert not {f for f in set(os.listdir("/dev/shm")) - files if "fastdata" in f}


class Quick(Dataset):
    def __getitem__(self, index: int) -> Any:
        return torch.full((20000,), index)


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


def test_a_task_that_another_has_noted_meanwhile_is_not_done_again(tmp_path: Path) -> None:
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
    assert executor.respawned == 1
    executor.close()


def test_what_a_process_said_before_it_died_is_heard() -> None:
    ours, theirs = map(Wire, wire_pair())
    answers = [TaskTaken(1, 4), TaskTaken(2, 4)]
    for answer in answers:
        theirs.send(answer)
    ours.send(DropSlot(3))  # it dies without having read this, which resets the connection
    theirs.end.close()
    assert [ours.receive() for _ in range(3)] == [*((answer, []) for answer in answers), None]
    ours.close()


@pytest.mark.parametrize("collate", [default_collate, listed])
def test_memory_and_open_files_stay_flat(collate: Any) -> None:
    before = open_files()
    executor = pool(Quick(), collate)
    sizes = []
    for epoch in range(4):
        executor.start_epoch([[i, i + 1] for i in range(0, 600, 2)], epoch)
        assert sum(1 for _ in executor) == 300
        sizes.append((executor._slots.size_bytes, len(open_files() - before)))
    assert sizes[1] == sizes[-1]
    opened = open_files("memfd:") - before
    assert opened
    executor.close()
    assert not opened & open_files()
