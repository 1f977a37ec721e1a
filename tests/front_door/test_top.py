"""Trainings are watched from other processes: how they go, and where they hang."""

from __future__ import annotations

import gc
import os
import re
import signal
import stat
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from conformance.pieces import make_trainer
from lightning.pytorch import Callback, LightningModule
from programs import run_program
from torch.utils.data import DataLoader

from lightning_fastdata import DataThroughputCallback, FastDataLoader, StepTimer
from lightning_fastdata.errors import FastDataWarning
from lightning_fastdata.insight.live.status import read_all

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="nothing is told there")
PROGRAM = Path(__file__).with_name("watched_training.py")
PATIENCE_S = 150


def shown(live, *arguments):
    """Return what ``fastdata top --once`` prints in a process of its own."""
    done = run_program(
        *("-m", "lightning_fastdata", "top", "--once", *arguments),
        env={**os.environ, "LIGHTNING_FASTDATA_LIVE": str(live)},
        timeout_s=PATIENCE_S,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def live(tmp_path_factory):
    """Two trainings that run until the last test has seen them; where they tell of themselves."""
    folder = tmp_path_factory.mktemp("watched")
    live = folder / "live"
    environ = {
        **os.environ,
        "LIGHTNING_FASTDATA_LIVE": str(live),
        "LIGHTNING_FASTDATA_CACHE": str(folder / "cache"),
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join([str(PROGRAM.parents[1]), *sys.path]),
    }
    with (folder / "output.txt").open("w") as log:
        program = subprocess.Popen(
            [sys.executable, str(PROGRAM), str(folder)],
            env=environ,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
    yield live
    os.killpg(program.pid, signal.SIGKILL)
    program.wait()


def until(live, holds):
    """Return the status of all processes as soon as something holds for them."""
    end_s = time.monotonic() + PATIENCE_S
    while time.monotonic() < end_s:
        found = read_all(live, time.time())
        if holds(found):
            return found
        time.sleep(0.2)
    text = (live.parent / "output.txt").read_text()
    raise AssertionError(f"in vain: {read_all(live, time.time())}\n{text}")


def of(found, where):
    return [each for each in found if f"logs-{where}" in each.log_dir]


def test_trainings_are_listed_with_all_their_ranks(live):
    def all_step(found):
        return len(found) == 3 and all(each.step > 0 for each in found)

    found = until(live, all_step)
    assert [each.rank for each in of(found, "step")] == [0, 1]
    page = shown(live)
    assert "2 trainings" in page
    assert "2 of 2" in page
    assert all(str(of(found, where)[0].pid) in page for where in ("worker", "step"))


def test_one_training_is_shown_by_its_process_or_log_folder(live):
    found = until(live, lambda found: of(found, "worker") and of(found, "worker")[0].steps_per_s)
    status = of(found, "worker")[0]
    assert status.readers == ("Slow: 2 workers, executor 'workers'",)
    page = shown(live, "logs-worker")
    assert f"pid {status.pid}" in page
    assert "steps/s" in page
    assert "logs-step" not in page
    assert {worker.worker for worker in status.workers} == {0, 1}
    assert shown(live, "no such run").count("watched_training.py") == 2


def test_a_hung_sample_is_named_with_the_line_that_it_hangs_in(live):
    def seen(found):
        return any(worker.lines for each in of(found, "worker") for worker in each.workers)

    status = of(until(live, seen), "worker")[0]
    assert status.hangs
    hung = next(worker for worker in status.workers if worker.lines)
    assert (hung.state, hung.index) == ("reading", "61")
    assert hung.for_s >= 10
    assert re.fullmatch(r".*watched_training\.py:\d+ ask_a_server", hung.lines[0])
    page = shown(live, str(status.pid))
    assert re.search(r"no step for \d+ s: waiting for a batch", page)
    assert "sample 61" in page
    assert "ask_a_server" in page


def test_a_hung_step_is_shown_with_the_rank_and_the_line_that_it_hangs_in(live):
    def seen(found):
        return len(of(found, "step")) == 2 and all(each.stack for each in of(found, "step"))

    first, last = of(until(live, seen), "step")
    assert re.fullmatch(r".*watched_training\.py:\d+ wait_for_ever", last.stack[0])
    # Each waits within its step: one for itself, the other for its gradients.
    assert {first.activity, last.activity} == {"computing a step"}
    page = shown(live, str(last.pid))
    assert "2 of 2 ranks" in page
    assert "wait_for_ever" in page
    assert "backward" in page
    assert re.search(r"rank [01]: no step for \d+ s: computing a step", page)


def test_a_stopped_process_is_said_to_be_silent(live):
    (status,) = of(until(live, lambda found: of(found, "worker")), "worker")
    os.kill(status.pid, signal.SIGSTOP)
    try:
        until(live, lambda found: any(each.silent_s(time.time()) for each in found))
        assert re.search(r"nothing heard for \d\S* s, last it was", shown(live, str(status.pid)))
    finally:
        os.kill(status.pid, signal.SIGCONT)


class Model(LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(4, 1)

    def training_step(self, batch, _):
        return self.layer(batch).mean()

    validation_step = test_step = training_step

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.01)


class Looks(Callback):
    """Keeps what is told of this training in the middle of it; may end it with an error."""

    def __init__(self, live, error=None):
        self.live, self.error, self.found = live, error, []

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        if batch_idx == 2:
            end_s = time.monotonic() + PATIENCE_S
            while not self.found and time.monotonic() < end_s:
                self.found = read_all(self.live, time.time())
                time.sleep(0.01)
            self.files = [path for path in self.live.iterdir() if path.suffix == ".json"]
            self.modes = [stat.S_IMODE(path.stat().st_mode) for path in (self.live, *self.files)]
            if self.error is not None:
                raise self.error


def fitted(tmp_path, *callbacks, method="fit"):
    trainer = make_trainer(
        tmp_path,
        callbacks=[DataThroughputCallback(summary=False, report=False), *callbacks],
    )
    getattr(trainer, method)(Model(), DataLoader(torch.zeros(8, 4), 2))
    return trainer


@pytest.fixture
def own(tmp_path, monkeypatch):
    monkeypatch.setenv("LIGHTNING_FASTDATA_LIVE", str(tmp_path / "live"))
    return tmp_path / "live"


@pytest.mark.parametrize("error", [None, ZeroDivisionError("by a callback"), KeyboardInterrupt()])
def test_what_is_told_is_private_and_ends_with_the_run(tmp_path, own, error):
    looks = Looks(own, error)
    try:
        fitted(tmp_path, looks)
    except (ZeroDivisionError, SystemExit):
        assert error is not None
    (status,) = looks.found
    assert (status.pid, status.method, status.rank) == (os.getpid(), "fit", 0)
    assert looks.modes == [0o700, 0o600]
    assert list(own.iterdir()) == []


def looked(live, holds):
    """Return what is told of this process as soon as it holds for that."""
    end_s = time.monotonic() + PATIENCE_S
    while time.monotonic() < end_s:
        found = read_all(live, time.time())
        if holds(found):
            return found
        time.sleep(0.05)
    raise AssertionError(f"in vain: {found}")


def test_a_loop_without_a_trainer_is_shown_while_it_reads(own):
    loader = FastDataLoader(list(range(64)), 4, num_workers=1, executor="workers")
    timer = StepTimer("cpu")
    for number, _ in enumerate(timer.batches(loader)):
        if number == 3:
            (status,) = looked(own, lambda found: found and found[0].step == 3)
    assert (status.pid, status.method, status.rank, status.world_size) == (
        os.getpid(),
        "train",
        0,
        1,
    )
    assert (status.epoch, status.activity) == (0, "computing a step")
    assert status.readers == ("list: 1 worker, executor 'workers'",)
    assert len(status.workers) == 1
    assert looked(own, lambda found: not found) == []
    for _ in timer.batches(iter([1]), "val"):
        (status,) = looked(own, len)
    assert status.method == "val"
    del timer
    gc.collect()
    assert list(own.iterdir()) == []


def test_a_loop_that_cannot_be_shown_is_warned_of_once_and_goes_on(own):
    own.write_text("")
    timer = StepTimer("cpu")
    with pytest.warns(FastDataWarning, match="does not show this loop") as told:
        batches = [batch for _ in range(2) for batch in timer.batches([1, 2])]
    assert batches == [1, 2, 1, 2]
    assert len(told) == 1
    assert timer.report().stages[0].steps == 4


@pytest.mark.parametrize("place", ["a link", "a file", "another user's"])
def test_a_place_that_is_not_this_users_is_refused_and_the_training_goes_on(tmp_path, own, place):
    other = tmp_path / "other"
    if place == "a link":
        other.mkdir()
        own.symlink_to(other)
    elif place == "a file":
        own.write_text("")
    elif os.getuid() != 0:
        pytest.skip("only root makes a folder of another user")
    else:
        own.mkdir()
        os.chown(own, 12345, 12345)
    with pytest.warns(FastDataWarning, match="does not show this run"):
        trainer = fitted(tmp_path)
    assert trainer.global_step == 4
    assert not other.is_dir() or list(other.iterdir()) == []
    done = run_program("-m", "lightning_fastdata", "top", "--once", timeout_s=PATIENCE_S)
    assert done.returncode == 1
    assert str(own) in done.stderr
    assert "Traceback" not in done.stderr


def test_without_a_training_it_says_how_to_start_one(own):
    assert "DataThroughputCallback()" in shown(own)
    assert not own.exists()
