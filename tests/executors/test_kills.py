"""Real signals to side processes and to the program itself: nothing is lost, nothing is left."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from alike import alike
from processes import runs, until
from thoroughness import LONG
from torch.utils.data import Dataset

from lightning_fastdata.errors import FastDataWarning, WorkerError
from lightning_fastdata.loading.loader import FastDataLoader

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")

KILLS = 200 if LONG else 12
LENGTH = 240
ROW = 22_000
"""Numbers of 8 bytes in a sample: six samples are 1 MiB, which takes time to write."""


class Rows(Dataset):
    """Of a size that takes long to write, so that a kill finds something under way."""

    def __len__(self) -> int:
        return LENGTH

    def __getitem__(self, index: int) -> Any:
        return torch.full((ROW,), index), torch.rand(3), f"row {index}"


def only_tensors(samples: list[Any]) -> Any:
    return [torch.stack(column) for column in list(zip(*samples, strict=True))[:2]]


def loader_of(executor: str, collate: Any, **how: Any) -> FastDataLoader:
    how = {"batch_size": 6, "num_workers": 3, "persistent_workers": True, **how}
    return FastDataLoader(Rows(), executor=executor, collate_fn=collate, **how)


class Killer:
    """Kills random side processes of an executor while its batches are taken.

    Where processes get nothing done between two kills, one sample seems to be the cause. So two
    batches come through at least after each kill.
    """

    def __init__(self, executor: Any, seed: int) -> None:
        self.executor = executor
        self.rng = random.Random(seed)
        self.next_kill = 2

    def watched(self, batches: Iterable[Any]) -> Iterator[Any]:
        for batch in batches:
            self.next_kill -= 1
            yield batch
            if self.next_kill <= 0:
                child = self.rng.choice(list(self.executor.children.values()))
                if child.answers:  # one that was just made is to get somewhere first
                    child.process.kill()
                    self.next_kill = self.rng.randint(2, 6)


@pytest.mark.cases(1)
@pytest.mark.parametrize(("collate", "kills"), [(None, KILLS), (only_tensors, 12)])
def test_batches_are_those_of_an_undisturbed_run_while_processes_are_killed(collate, kills) -> None:
    calm = loader_of("workers", collate)
    expected = [[(x, r) for x, r, *_ in calm] for _ in range(4)]
    calm.close()
    loader = loader_of("workers", collate, epoch=lambda: epoch % 4)
    epoch = 0
    next(iter(loader))
    killer = Killer(loader._iterator, 7)
    # Deaths that were seen and made good are counted, not signals that were sent.
    while loader.faults.deaths < kills:
        seen = [(x, r) for x, r, *_ in killer.watched(loader)]
        assert alike(seen, expected[epoch % 4])
        epoch += 1
    assert len([*loader]) == LENGTH // 6
    loader.close()


def test_out_of_order_nothing_is_lost_or_doubled_while_processes_are_killed() -> None:
    loader = loader_of("workers", None, in_order=False)
    next(iter(loader))
    killer = Killer(loader._iterator, 8)
    while loader.faults.deaths < 8:
        seen = sorted(x[:, 0].tolist() for x, *_ in killer.watched(loader))
        assert seen == [list(range(i, i + 6)) for i in range(0, LENGTH, 6)]
    loader.close()


SCRIPT = """
import signal, sys, threading, torch
# A shell that runs its tests in the background hands down a SIGINT that is ignored.
signal.signal(signal.SIGINT, signal.default_int_handler)
from torch.utils.data import Dataset, IterableDataset
from lightning_fastdata import FastDataLoader

class Rows(Dataset):
    def __len__(self):
        return 10**6
    def __getitem__(self, index):
        return torch.full((100000,), index)

class Stream(IterableDataset):
    def __iter__(self):
        for index in range(10**6):
            yield torch.full((100000,), index)

def start():
    for loader in loaders:
        next(iter(loader))

if __name__ == "__main__":
    kind, context = sys.argv[1:]
    data, by_a_thread = Stream() if kind == "stream" else Rows(), kind == "rows of a thread"
    loaders = [FastDataLoader(data, batch_size=2, num_workers=2, executor="workers",
                              persistent_workers=True, multiprocessing_context=context)
               for _ in range(1 + by_a_thread)]
    if by_a_thread:
        thread = threading.Thread(target=start)
        thread.start()
        thread.join()
    else:
        start()
    print(*[child.process.pid for loader in loaders
            for child in loader._iterator.children.values()], flush=True)
    for batch in loaders[0]._iterator:
        pass
"""


@pytest.mark.cases(1)
@pytest.mark.parametrize(
    ("kind", "ending", "context"),
    [
        ("rows", signal.SIGKILL, "fork"),
        ("rows", signal.SIGTERM, "fork"),
        ("rows", signal.SIGINT, "fork"),
        ("stream", signal.SIGINT, "fork"),
        ("stream", signal.SIGKILL, "spawn"),
        ("rows of a thread", signal.SIGKILL, "fork"),
    ],
)
def test_a_program_that_ends_leaves_no_process_and_no_file(
    tmp_path: Path, kind, ending, context
) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    program = subprocess.Popen(
        [sys.executable, str(script), kind, context],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert program.stdout is not None
    assert program.stderr is not None
    pids = [int(pid) for pid in program.stdout.readline().split()]
    assert pids
    assert not [name for pid in pids for name in shared_files_of(pid)]
    program.send_signal(ending)
    program.wait(60)
    said = program.stderr.read()
    assert ("KeyboardInterrupt" in said) == (ending == signal.SIGINT)
    assert said.count("Traceback") <= 1  # side processes add none of their own
    until(lambda: not any(map(runs, pids)))  # one that was just spawned is importing still


OF_A_THREAD = """
import os, signal, threading, torch
from lightning_fastdata import FastDataLoader

if __name__ == "__main__":
    loader = FastDataLoader(torch.arange(10**6), batch_size=2, num_workers=2, executor="workers",
                            persistent_workers=True)
    thread = threading.Thread(target=lambda: next(iter(loader)))
    thread.start()
    thread.join()
    pids = [child.process.pid for child in loader._iterator.children.values()]
    fork = os.fork()
    if not fork:
        signal.pause()
    print(fork, *pids, flush=True)
    signal.pause()
"""


@pytest.mark.cases(1)
def test_workers_of_a_killed_program_end_though_a_fork_of_it_lives_on(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(OF_A_THREAD)
    program = subprocess.Popen([sys.executable, str(script)], stdout=subprocess.PIPE, text=True)
    assert program.stdout is not None
    fork, *pids = map(int, program.stdout.readline().split())
    program.kill()
    program.wait(60)
    try:
        assert len(pids) == 2
        until(lambda: not any(map(runs, pids)))
        assert runs(fork)
    finally:
        os.kill(fork, signal.SIGKILL)
        program.stdout.close()


CONVERTS = """
import signal, subprocess
signal.signal(signal.SIGINT, signal.default_int_handler)
from torch.utils.data import Dataset
from lightning_fastdata import FastDataLoader

class Converted(Dataset):
    def __len__(self):
        return 8
    def __getitem__(self, index):
        program = subprocess.Popen(["sleep", "600"])
        print(program.pid, flush=True)
        return program.wait()

if __name__ == "__main__":
    list(FastDataLoader(Converted(), 2, num_workers=1, executor="workers"))
"""


@pytest.mark.cases(1)
def test_ctrl_c_ends_the_programs_that_samples_are_made_by(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(CONVERTS)
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
    command = [sys.executable, str(script)]
    program = subprocess.Popen(command, text=True, start_new_session=True, **pipes)
    assert program.stdout is not None
    converter = int(program.stdout.readline())
    try:
        os.killpg(program.pid, signal.SIGINT)  # as a terminal does
        program.wait(60)
        until(lambda: not runs(converter))
    finally:
        program.stdout.close()
        if runs(converter):
            os.kill(converter, signal.SIGKILL)


class Interrupted(Dataset):
    """Interrupts the process that reads it, as Ctrl-C does with all of them."""

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> int:
        signal.raise_signal(signal.SIGINT)
        return index


def test_an_event_loop_is_told_of_no_interrupt_of_a_worker() -> None:
    reading, writing = os.pipe2(os.O_NONBLOCK)
    before = signal.set_wakeup_fd(writing)  # as an event loop that handles signals does
    try:
        list(FastDataLoader(Interrupted(), 2, num_workers=1, executor="workers"))
        with pytest.raises(BlockingIOError):
            os.read(reading, 1)
    finally:
        signal.set_wakeup_fd(before)
        os.close(reading)
        os.close(writing)


def shared_files_of(pid: int) -> list[str]:
    """Return the files with a name in /dev/shm that a process maps: those could be left over."""
    maps = Path(f"/proc/{pid}/maps").read_text(encoding="utf-8").splitlines()
    return [line for line in maps if "/dev/shm" in line and not line.endswith("(deleted)")]


@pytest.mark.cases(1)
@pytest.mark.slow
def test_a_stopped_process_ends_in_a_timeout_that_says_so() -> None:
    loader = loader_of("workers", None, num_workers=1, timeout=4)
    running = iter(loader)
    next(running)
    executor = loader._iterator
    # It has done all that it was given, so that it owes nothing that others could do.
    until(lambda: executor.ready() and not executor._crew.under_way)
    os.kill(executor.children[0].process.pid, signal.SIGSTOP)
    with (
        pytest.warns(FastDataWarning, match="At 4 s it is an error"),
        pytest.raises(WorkerError, match=r"(?s)for 4 s while.*stopped, state T.*SIGCONT"),
    ):
        list(running)
    loader.close()
