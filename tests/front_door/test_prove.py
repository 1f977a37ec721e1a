"""``fastdata prove``: a script's training tried as a user has it tried, in a time of its own."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import textwrap
from collections import UserDict
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import ClassVar

import lightning.pytorch as lightning
import pytest
import pytorch_lightning
import torch
from jsonargparse import Namespace
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from lightning.pytorch.cli import LightningArgumentParser, SaveConfigCallback
from lightning.pytorch.loggers import CSVLogger
from programs import refused, run_program
from torch.utils.data import DataLoader, Dataset
from virtual_time import PatientClock, virtual_time
from warm_python import warm_python

from lightning_fastdata import StepTimer, cli
from lightning_fastdata.cli import main
from lightning_fastdata.host import clock
from lightning_fastdata.prove import PROVE_VARIABLE, ProveSettings
from lightning_fastdata.prove.trials import AS_IS, FREE, conclude, of_dict

CLOCK = []
"""The one of the test; not in the datasets, which could not be compared then."""
READ_S, STEP_S = 0.05, 0.2
BATCHES, ROWS = 8, 4


class Slow(Dataset):
    """Takes time on the clock of the test where this process reads, and none elsewhere."""

    def __init__(self, count=BATCHES * ROWS):
        self.count, self.main, self.seen = count, os.getpid(), 0.0

    def __len__(self):
        return self.count

    def __getitem__(self, index):
        if os.getpid() == self.main:
            CLOCK[0].advance(round(READ_S * 1e9))
        return torch.full((4,), index + self.seen)


def module_of(package, the_clock, each_step=lambda: None, each_epoch=lambda: None):
    class Module(package.LightningModule):
        def __init__(self):
            super().__init__()
            self.layer = torch.nn.Linear(4, 1)

        def training_step(self, batch, _):
            the_clock.advance(round(STEP_S * 1e9))
            each_step()
            loss = self.layer(batch).pow(2).mean()
            self.log("loss", loss)
            return loss

        def on_train_epoch_start(self):
            each_epoch()

        def validation_step(self, batch, _):
            self.log("val_loss", self.layer(batch).mean())

        def configure_optimizers(self):
            optimizer = torch.optim.SGD(self.parameters(), 1e-6)
            steps = self.trainer.estimated_stepping_batches
            schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 1e-5, total_steps=steps)
            return [optimizer], [{"scheduler": schedule, "interval": "step"}]

    return Module()


@pytest.fixture
def tried(tmp_path, monkeypatch):
    """Return what runs a function in a trial, and what is known behind it."""
    file = tmp_path / "trial" / "trial.json"
    settings = ProveSettings(script="train.py", file=str(file), budget_s=75.0)
    monkeypatch.setenv(PROVE_VARIABLE, settings.as_text())
    monkeypatch.chdir(tmp_path)

    def run(function):
        with virtual_time(PatientClock) as the_clock:
            CLOCK[:] = [the_clock]
            with pytest.raises(SystemExit):
                function(the_clock)
        return conclude(of_dict(json.loads(file.read_text())))

    return run


def quiet(package, **more):
    how = {"max_epochs": 3, "enable_progress_bar": False, "enable_model_summary": False}
    return package.Trainer(accelerator="cpu", **how, **more)


def training(data, package=lightning, *, workers=0, callbacks=(), **hooks):
    """Return a script that trains on a dataset; hooks are called in each step or epoch."""

    def script(the_clock):
        trainer = quiet(package, logger=False, callbacks=list(callbacks))
        loader = DataLoader(data, ROWS, num_workers=workers)
        trainer.fit(module_of(package, the_clock, **hooks), loader)

    return script


def changes(data):
    """Return what changes a dataset."""
    return lambda: setattr(data, "seen", data.seen + 1.0)


@pytest.mark.parametrize("package", [lightning, pytorch_lightning], ids=lambda p: p.__name__)
def test_a_script_finds_a_folder_for_its_own_files_and_may_overfit(tried, tmp_path, package):
    loggers = import_module(f"{package.__name__}.loggers")

    def script(the_clock):
        def writes_and_ends():
            for folder in (trainer.log_dir, trainer.logger.log_dir, trainer.logger.save_dir):
                Path(folder, "own.txt").write_text("kept out of the way", "utf-8")
            assert trainer.num_training_batches == 2
            raise SystemExit("far enough")

        trainer = quiet(package, logger=loggers.CSVLogger("logs"), overfit_batches=2)
        loader = DataLoader(Slow(), ROWS, shuffle=True)
        trainer.fit(module_of(package, the_clock, writes_and_ends), loader)

    assert "far enough" in tried(script).trial.stopped
    assert {path.name for path in tmp_path.iterdir()} == {"trial"}


def test_a_ctrl_c_of_the_scripts_own_is_told_as_what_ended_it(tried):
    def interrupts():
        raise KeyboardInterrupt

    handler = signal.getsignal(signal.SIGINT)
    try:
        found = tried(training(Slow(), each_step=interrupts))
    finally:
        signal.signal(signal.SIGINT, handler)  # Lightning turns it off
    assert found.trial.stopped == "the script ended by KeyboardInterrupt"


def test_reading_that_takes_the_time_gets_the_remedy_that_takes_it_away(tried, tmp_path):
    (tmp_path / "ckpt").mkdir()
    (tmp_path / "ckpt" / "best.ckpt").write_text("mine")

    def script(the_clock):
        callbacks = [
            ModelCheckpoint("ckpt", filename="best", save_last=True, enable_version_counter=False),
            EarlyStopping("val_loss", patience=1),
        ]
        trainer = quiet(lightning, callbacks=callbacks, logger=CSVLogger("logs"))
        train, val = DataLoader(Slow(), ROWS, shuffle=True), DataLoader(Slow(2 * ROWS), ROWS)
        trainer.fit(module_of(lightning, the_clock), train, val)

    found = tried(script)
    assert found.outcome == "change"
    step_s = BATCHES * STEP_S
    read_s = (BATCHES + 2) * ROWS * READ_S
    assert found.gain.factor == pytest.approx((step_s + read_s) / step_s, rel=1e-6)
    epochs_s = {block.arm: block.epoch_s for block in found.trial.blocks}
    assert epochs_s[AS_IS] == pytest.approx(step_s + read_s)
    assert epochs_s[FREE] == pytest.approx(step_s)
    assert {path.name for path in tmp_path.iterdir()} == {"ckpt", "trial"}
    assert [path.read_text() for path in (tmp_path / "ckpt").iterdir()] == ["mine"]
    assert "ModelCheckpoint" in found.text()
    assert any("loader" in line for line in found.code)


@pytest.mark.parametrize("package", [lightning, pytorch_lightning], ids=lambda p: p.__name__)
def test_a_training_whose_steps_change_what_is_read_keeps_its_workers(tried, package):
    data = Slow()
    found = tried(training(data, package, each_step=changes(data)))
    assert {block.arm for block in found.trial.blocks} == {AS_IS, FREE}
    refused = found.trial.refused
    assert set(refused) >= {"num_workers=2", "a cache in memory"}
    assert all("steps change what is read" in why for why in refused.values())
    assert found.outcome == "not known"
    assert "no change to try" in found.verdict
    own = import_module(found.trial.facts["home"]).FastDataModule
    assert issubclass(own, package.LightningDataModule)


LAST_STEP = [0.0]


def test_globals_that_steps_change_are_told_as_such(tried):
    def change():
        LAST_STEP[0] += 1.0

    refused = tried(training(Slow(), each_step=change)).trial.refused
    assert set(refused) >= {"num_workers=2", "a cache in memory"}
    assert all("globals count" in why for why in refused.values())


def test_what_changes_with_the_epoch_is_not_kept_from_the_first(tried, tmp_path):
    (tmp_path / "config.yaml").write_text("of another run")
    os.utime(tmp_path / "config.yaml", (0, 0))

    # What the command line writes of this run is not left for the next one.
    config = SaveConfigCallback(LightningArgumentParser(), Namespace(), "mine.yaml")
    data = Slow()
    found = tried(training(data, workers=1, callbacks=[config], each_epoch=changes(data)))
    assert found.trial.facts.get("changes", "epochs") == "epochs"
    assert {path.name for path in tmp_path.iterdir()} == {"config.yaml", "trial"}


def test_a_loop_of_its_own_is_tried_through_step_timer(tried):
    def script(the_clock):
        timer = StepTimer("cpu")
        for _ in range(2):
            for _batch in timer.batches(DataLoader(Slow(), ROWS)):
                the_clock.advance(round(STEP_S * 1e9))

    found = tried(script)
    assert found.outcome == "change"
    assert found.gain.factor == pytest.approx((STEP_S + ROWS * READ_S) / STEP_S, rel=1e-6)


class Graph:
    """Batches of libraries of graphs are objects."""

    def __init__(self, rows):
        self.x = torch.stack(rows)


def takes_a_key(batch):
    batch.pop("x")


def sets_an_attribute(batch):
    assert batch.x.ndim == 2
    batch.x = batch.x.sum()


def empties_a_list(batch):
    batch.pop().clear()


@pytest.mark.parametrize(
    ("collate_fn", "takes_apart"),
    [
        (lambda rows: {"x": torch.stack(rows), "n": 1}, takes_a_key),
        (lambda rows: UserDict(x=torch.stack(rows)), takes_a_key),
        (lambda rows: [1, ["text"]], empties_a_list),
        (Graph, sets_an_attribute),
    ],
    ids=["dict", "UserDict", "list", "object"],
)
def test_steps_may_take_their_batches_apart(tried, collate_fn, takes_apart):
    def script(the_clock):
        for batch in StepTimer("cpu").batches(DataLoader(Slow(), ROWS, collate_fn=collate_fn)):
            takes_apart(batch)
            the_clock.advance(round(STEP_S * 1e9))

    assert tried(script).outcome == "change"


def test_a_run_of_fast_dev_run_is_no_trial(tried):
    def script(the_clock):
        quiet(lightning, fast_dev_run=True).fit(module_of(lightning, the_clock), DataLoader(Slow()))
        training(Slow())(the_clock)

    found = tried(script)
    assert found.outcome == "change"
    assert found.trial.facts["batches"] == BATCHES


def test_a_trial_is_not_begun_anew_where_a_script_goes_on_after_it(tried, tmp_path):
    folds = []

    def script(the_clock):
        for fold in range(2):
            trainer = quiet(lightning, logger=False)
            module = module_of(lightning, the_clock, partial(folds.append, fold))
            try:
                trainer.fit(module, DataLoader(Slow(), ROWS))
            except SystemExit:
                trainer.save_checkpoint("mine.ckpt")
        raise SystemExit

    assert tried(script).outcome == "change"
    assert set(folds) == {0}
    assert {path.name for path in tmp_path.iterdir()} == {"trial"}


def test_schedules_that_steps_call_by_hand_stand_still(tried):
    def script(the_clock):
        module = module_of(lightning, the_clock, lambda: module.lr_schedulers().step())
        module.automatic_optimization = False
        quiet(lightning, logger=False).fit(module, DataLoader(Slow(), ROWS))

    assert tried(script).outcome == "change"


@pytest.mark.skipif(lightning.__version__ < "2.6", reason="2.5 validates by its batches alone")
def test_validations_by_the_clock_are_told_and_are_in_no_figure(tried):
    def script(the_clock):
        trainer = quiet(lightning, logger=False, val_check_interval="00:00:00:01")
        train, val = DataLoader(Slow(), ROWS), DataLoader(Slow(2 * ROWS), ROWS)
        trainer.fit(module_of(lightning, the_clock), train, val)

    found = tried(script)
    assert found.outcome == "change"
    assert "by the clock" in found.text()
    epochs_s = {block.arm: block.epoch_s for block in found.trial.blocks}
    assert epochs_s[AS_IS] == pytest.approx(BATCHES * (STEP_S + ROWS * READ_S))


def test_a_training_that_its_steps_end_within_an_epoch_has_no_use_for_a_cache(tried):
    def script(the_clock):
        trainer = quiet(lightning, logger=False, max_steps=BATCHES // 2)
        trainer.fit(module_of(lightning, the_clock), DataLoader(Slow(), ROWS))

    trial = tried(script).trial
    assert trial.facts["epochs"] == 0.5
    assert "one epoch" in trial.refused["a cache in memory"]


def test_a_config_that_each_run_overwrites_is_not_removed(tried, tmp_path):
    (tmp_path / "mine.yaml").write_text("of the run before")
    config = SaveConfigCallback(LightningArgumentParser(), Namespace(), "mine.yaml", overwrite=True)
    tried(training(Slow(), callbacks=[config]))
    assert (tmp_path / "mine.yaml").exists()


class Together(DataLoader):
    """Its workers take four seconds for a batch each, on the clock of the test."""

    read: ClassVar[list[int]] = []
    """Batches of each time that it was iterated."""

    def __iter__(self):
        began_s = clock.monotonic()
        self.read.append(0)
        for number in range(len(self)):
            self.read[-1] += 1
            ready_s = began_s + 4.0 * (1 + number // self.num_workers)
            CLOCK[0].advance_to(round(ready_s * 1e9))
            yield torch.zeros(ROWS, 4)


def test_a_part_whose_batches_are_all_read_ahead_is_no_faster_than_its_workers(tried):
    workers, batches = 8, 96
    Together.read.clear()

    def script(the_clock):
        loader = Together(Slow(batches * ROWS), ROWS, num_workers=workers)
        trainer = quiet(lightning, logger=False)
        trainer.fit(module_of(lightning, the_clock), loader)

    as_is = [each for each in tried(script).trial.blocks if each.arm == AS_IS]
    assert as_is
    assert all(each.epoch_s >= batches / workers * 4.0 for each in as_is)
    assert set(Together.read) == {8}, "a batch takes half a second, and a first part two seconds"


def prove(folder, *arguments, code):
    environ = {k: v for k, v in os.environ.items() if k != PROVE_VARIABLE}
    command = ("-m", "lightning_fastdata", "prove", *arguments)
    commands = folder.with_name(f"{folder.name}-commands")
    commands.mkdir()
    done = run_program(*command, cwd=folder, env=environ, python=warm_python(commands))
    assert done.returncode == code, done.stdout + done.stderr
    return done


LOOP = """
from lightning_fastdata import StepTimer
for batch in StepTimer().batches([1, 2, 3]):
"""


@pytest.mark.parametrize(
    ("script", "why", "shown"),
    [
        ("print('hello')", "no Lightning Trainer that fits", "hello"),
        ("raise ValueError('wrong config')", "code 1 before a training began", "wrong config"),
        (f"{LOOP}    break\nprint('left')", "code 0 before the trial did", "left"),
        (f"{LOOP}    raise KeyError('far')", "before the trial did", "far"),
        ("print(10**6 * 'x', 'in one line')", "no Lightning Trainer that fits", "in one line"),
    ],
)
def test_how_a_script_ends_before_anything_is_known_is_told_with_what_it_printed(
    tmp_path, script, why, shown
):
    (tmp_path / "train.py").write_text(script)
    done = prove(tmp_path, "--budget", "20", "--json", "found.json", "train.py", code=2)
    assert why in done.stdout
    assert shown in done.stderr
    assert len(done.stderr) < 10_000
    assert "ends at most 20 s after its training" in done.stderr
    assert why in json.loads((tmp_path / "found.json").read_text())["stopped"]


@pytest.mark.cases(1)
@pytest.mark.parametrize("how", ["SIGINT", "SIGTERM"])
def test_who_ends_it_gets_what_is_known_and_what_another_training_writes_stays(
    tmp_path, how, monkeypatch
):
    script = """
    import os, signal
    from pathlib import Path
    from lightning.pytorch import Trainer
    from lightning.pytorch.demos.boring_classes import BoringModel
    from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger

    class Model(BoringModel):
        def training_step(self, *batch):
            if not Path("written").exists():
                Path("written").touch()
                Path("logs/mine/v1").mkdir(parents=True, exist_ok=True)
                Path("logs/mine/v1/metrics.csv").write_text("of another training")
                os.kill(int(os.environ["STARTED_BY"]), signal.HOW)
            return super().training_step(*batch)

    loggers = [CSVLogger("logs", name="mine", version="v1"), TensorBoardLogger("tb")]
    Trainer(logger=loggers, accelerator="cpu").fit(Model())
    """.replace("HOW", how)
    (tmp_path / "train.py").write_text(textwrap.dedent(script))
    (tmp_path / "temporary").mkdir()
    monkeypatch.setenv("TMPDIR", str(tmp_path / "temporary"))
    done = prove(tmp_path, "--json", "found.json", "train.py", code=130)
    assert "interrupted" in done.stdout
    found = json.loads((tmp_path / "found.json").read_text())
    assert found["stopped"] == "it was interrupted"
    assert (tmp_path / "logs/mine/v1/metrics.csv").read_text() == "of another training"
    assert not list((tmp_path / "temporary").glob("fastdata-prove-*"))
    left = {"train.py", "written", "logs", "found.json", "temporary"}
    assert {path.name for path in tmp_path.iterdir()} == left


@pytest.mark.parametrize("budget", ["soon", "5s", "-1m", ""])
def test_a_budget_that_is_none_is_refused(tmp_path, budget, capfd):
    (tmp_path / "train.py").write_text("print('it runs')")
    with refused("budget is"):
        main(["prove", f"--budget={budget}", str(tmp_path / "train.py")])
    assert capfd.readouterr() == ("", "")


def test_a_file_that_cannot_be_written_is_refused_before_the_trial(tmp_path):
    (tmp_path / "train.py").write_text("open('ran', 'w')")
    file = tmp_path / "missing" / "found.json"
    with refused(f"{file} cannot be written"):
        main(["prove", "--json", str(file), str(tmp_path / "train.py")])
    with refused("fastdata prove train.py"):
        main(["prove"])
    assert [path.name for path in tmp_path.iterdir()] == ["train.py"]


def test_a_read_only_file_is_refused_before_the_trial_and_keeps_what_is_in_it(
    tmp_path, monkeypatch
):
    (tmp_path / "train.py").write_text("print('it runs')")
    file = tmp_path / "found.json"
    file.write_text("kept")
    opened = Path.open

    def refuses(path, mode="r", *args, **options):
        if path == file and mode.strip("bt") != "r":  # as it does, but not to root
            raise PermissionError(13, "Permission denied", str(path))
        return opened(path, mode, *args, **options)

    monkeypatch.setattr(Path, "open", refuses)
    with refused(f"{file} cannot be written: Permission denied"):
        main(["prove", "--json", str(file), str(tmp_path / "train.py")])
    monkeypatch.undo()
    assert file.read_text() == "kept"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["found.json", "train.py"]


class ProcessOfWindows:
    """A script's process that can be ended, and cannot be sent any other signal."""

    ended = False

    def send_signal(self, number):
        raise ValueError(f"Unsupported signal: {number}")

    def terminate(self):
        self.ended = True

    kill = terminate

    def wait(self, timeout=None):
        if not self.ended:
            raise subprocess.TimeoutExpired("train.py", timeout)


def test_a_script_is_ended_where_processes_take_no_ctrl_c(monkeypatch):
    process = ProcessOfWindows()
    with monkeypatch.context() as windows:
        windows.setattr(os, "name", "nt")
        windows.delattr(signal, "SIGKILL")
        cli._stop(process)
    assert process.ended
