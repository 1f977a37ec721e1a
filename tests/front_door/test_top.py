"""Trainings are watched from other processes: how they go, and where they hang."""

from __future__ import annotations

import os
import re
import stat
import sys
import threading
from contextlib import contextmanager

import processes
import pytest
import torch
from conformance.pieces import make_trainer
from lightning.pytorch import Callback, LightningModule
from programs import refused
from torch.utils.data import DataLoader, Dataset

from lightning_fastdata import (
    DataThroughputCallback,
    FastDataModule,
    LoaderOptions,
)
from lightning_fastdata.cli import main
from lightning_fastdata.errors import FastDataWarning
from lightning_fastdata.host import clock
from lightning_fastdata.insight.live import page_text, read_all

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="nothing is told there")
linux = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="workers need Linux")
PATIENCE_S = 150
LONG_S = 31.0
"""For which a training hangs."""
SLOW = 61


def told(live):
    """Return the status of all processes, as of when the last of them was written."""
    now_s = max((each.written_s for each in read_all(live, 0.0)), default=0.0)
    return read_all(live, now_s), now_s


def until(live, holds):
    """Return the status of all processes as soon as something holds for them."""
    found = []

    def looks():
        found[:] = told(live)[0]
        return holds(found)

    processes.until(looks, PATIENCE_S)
    return found


def page(live):
    """Return the page of what is told, as a terminal shows it."""
    return page_text(*told(live))


@pytest.fixture
def own(tmp_path, monkeypatch):
    monkeypatch.setenv("LIGHTNING_FASTDATA_LIVE", str(tmp_path / "live"))
    return tmp_path / "live"


@contextmanager
def watched_by(look):
    """Look at what the block does from another thread, which is waited for."""
    found = []

    def run():
        try:
            look()
        except BaseException as error:
            found.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield
    finally:
        thread.join()
    if found:
        raise found[0]


@pytest.fixture
def server(tmp_path):
    """A named pipe: whoever opens it to read hangs until :func:`answer`."""
    os.mkfifo(tmp_path / "server")
    return tmp_path / "server"


def answer(server):
    """Let those go on that wait for a server, and those that are still to come."""
    os.open(server, os.O_RDWR | os.O_CLOEXEC)  # stays open until the program ends


class Hangs(Dataset):
    """Samples of which one waits for a server."""

    def __init__(self, server):
        self.server = server

    def __len__(self):
        return 160

    def __getitem__(self, index):
        if index == SLOW:
            self.ask_a_server()
        return torch.full((4,), float(index))

    def ask_a_server(self):
        os.close(os.open(self.server, os.O_RDONLY))


@linux
def test_a_hung_sample_is_named_with_the_line_that_it_hangs_in(tmp_path, own, patient, server):
    def look():
        def shows(*words):
            return lambda found: found and all(word in "\n".join(found[0].lines) for word in words)

        try:
            until(own, shows(f": sample {SLOW} for", f"step {SLOW // 2},"))
            patient.advance(round(LONG_S * 1e9))
            (status,) = until(own, shows("ask_a_server"))
            text = page(own)
        finally:
            answer(server)
        assert f"pid {status.pid}" in text
        assert " ! no step for 31 s: waiting for a batch\n !   at " in text
        hung = (
            rf"worker [01] \(pid \d+\): sample {SLOW} for 31 s, at \S*test_top\.py:\d+ ask_a_server"
        )
        assert re.search(hung, text)
        assert text.count("   worker ") == 2
        assert " data   Hangs: 2 workers, executor 'workers'" in text

    data = FastDataModule.from_datasets(
        Hangs(server), batch_size=2, shuffle=False,
        options=LoaderOptions(num_workers=2, executor="workers", timeout=0),
    )  # fmt: skip
    callback = DataThroughputCallback(summary=False, report=False)
    trainer = make_trainer(tmp_path / "logs-worker", callbacks=[callback])
    with watched_by(look):
        trainer.fit(Model(), data)
    assert trainer.global_step == 80


class HangsOnOneRank(LightningModule):
    """A step of the second of two ranks waits for a server."""

    def __init__(self, patient, server):
        super().__init__()
        self.layer = torch.nn.Linear(4, 1)
        self.patient, self.server = patient, server

    def training_step(self, batch, batch_idx):
        if batch_idx == 3:
            # The clock of this rank: the one waits here, the other one for its gradients.
            self.patient.advance(round(LONG_S * 1e9))
            if self.global_rank == 1:
                self.wait_for_ever()
        return self.layer(batch).mean()

    def wait_for_ever(self):
        os.close(os.open(self.server, os.O_RDONLY))

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.01)


@linux
def test_a_hung_step_is_shown_with_the_rank_and_the_line_that_it_hangs_in(
    tmp_path, own, patient, server
):
    def look():
        def seen(found):
            # The first rank is where its gradients are made by now.
            hang = all(" !   at " in "\n".join(each.lines) for each in found)
            return len(found) == 2 and hang and "backward" in page(own)

        try:
            first, last = until(own, seen)
            text = page(own)
        finally:
            answer(server)
        assert (first.rank, last.rank) == (0, 1)
        assert any(re.search(r"at \S*test_top\.py:\d+ wait_for_ever", line) for line in last.lines)
        assert {first.activity, last.activity} == {"computing a step"}
        assert "2 of 2 ranks" in text
        assert "wait_for_ever" in text
        assert "backward" in text
        assert re.search(r"rank [01] \(pid \d+\): no step for 31 s: computing a step", text)

    callback = DataThroughputCallback(summary=False, report=False)
    trainer = make_trainer(tmp_path, callbacks=[callback], strategy="ddp_fork", devices=2)
    with watched_by(look):
        trainer.fit(HangsOnOneRank(patient, server), DataLoader(torch.zeros(16, 4), 2))


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
            processes.until(self.finds_any, PATIENCE_S)
            self.mode = stat.S_IMODE(self.live.stat().st_mode)
            if self.error is not None:
                raise self.error

    def finds_any(self):
        self.found = read_all(self.live, clock.unix_s())
        return self.found


def fitted(tmp_path, *callbacks, method="fit"):
    trainer = make_trainer(
        tmp_path,
        callbacks=[DataThroughputCallback(summary=False, report=False), *callbacks],
    )
    getattr(trainer, method)(Model(), DataLoader(torch.zeros(8, 4), 2))
    return trainer


@pytest.mark.parametrize("error", [None, ZeroDivisionError("by a callback"), KeyboardInterrupt()])
def test_what_is_told_is_private_and_ends_with_the_run(tmp_path, own, error):
    looks = Looks(own, error)
    try:
        fitted(tmp_path, looks)
    except (ZeroDivisionError, SystemExit):
        assert error is not None
    (status,) = looks.found
    assert (status.pid, status.method, status.rank) == (os.getpid(), "fit", 0)
    assert looks.mode == 0o700
    assert list(own.iterdir()) == []


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
    with refused(re.escape(str(own))):
        main(["top", "--once"])


def test_without_a_training_it_says_how_to_start_one(own, capsys):
    main(["top", "--once"])
    assert "DataThroughputCallback()" in capsys.readouterr().out
    assert not own.exists()
