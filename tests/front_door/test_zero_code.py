"""``fastdata run``: a script that knows nothing of this package, run as it is."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
from programs import refused, run_program
from torch.utils.data import DataLoader
from trainers import trained
from warm_python import warm_python

from lightning_fastdata import DataThroughputCallback
from lightning_fastdata.errors import FastDataWarning
from lightning_fastdata.plugin.bindings import AddedCallback
from lightning_fastdata.prove import PROVE_VARIABLE
from lightning_fastdata.zero_code import RUN_VARIABLE

PROVE = {"script": "train.py", "file": "trial.json", "budget_s": 20.0}
SCRIPT = """
import argparse, hashlib, sys
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset
import LIGHTNING as L

parser = argparse.ArgumentParser()
parser.add_argument("--epochs", type=int, default=2)
parser.add_argument("--own-callback", action="store_true")
parser.add_argument("--exit", type=int, default=0)
parser.add_argument("--devices", type=int, default=1)
options = parser.parse_args()


class Rows(Dataset):
    def __len__(self):
        return 50

    def __getitem__(self, index):
        return torch.arange(4.0) + index + torch.rand(4)


class Module(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 1)
        self.seen = hashlib.sha256()

    def training_step(self, batch, batch_idx):
        self.seen.update(batch.numpy().tobytes())
        return self.layer(batch).pow(2).mean()

    def validation_step(self, batch, batch_idx, dataloader_idx=0):
        self.seen.update(batch.numpy().tobytes())
        self.log("loss", self.layer(batch).pow(2).mean())

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 1e-5)


if __name__ == "__main__":
    L.seed_everything(3)
    train = DataLoader(Rows(), 8, shuffle=True, drop_last=True)
    val = [DataLoader(Rows(), 16), DataLoader(Rows(), 5)]
    callbacks = []
    if options.own_callback:
        from lightning_fastdata import DataThroughputCallback
        callbacks = [DataThroughputCallback()]
    trainer = L.Trainer(
        max_epochs=options.epochs, callbacks=callbacks, accelerator="cpu", devices=options.devices,
        strategy="ddp" if options.devices > 1 else "auto",
        enable_progress_bar=False, enable_model_summary=False, log_every_n_steps=1,
    )
    module = Module()
    trainer.fit(module, train, val)
    weights = hashlib.sha256(module.layer.weight.detach().numpy().tobytes()).hexdigest()
    loader = trainer.train_dataloader
    print("RESULT", trainer.global_rank, trainer.global_step, module.seen.hexdigest(), weights)
    print("LOADER", type(loader).__name__, [type(c).__name__ for c in trainer.callbacks])
    sys.exit(options.exit)
"""


@pytest.fixture
def script(tmp_path):
    path = tmp_path / "train.py"
    path.write_text(SCRIPT.replace("LIGHTNING", "lightning.pytorch"))
    return path


def start(script, *arguments, before=(), code=0):
    """Run the script, under ``fastdata run`` if anything stands before it; return its output."""
    environ = {k: v for k, v in os.environ.items() if k != "LIGHTNING_FASTDATA_RUN"}
    python = warm_python(script.parent)
    done = run_program(*before, script, *arguments, cwd=script.parent, env=environ, python=python)
    assert done.returncode == code, done.stdout + done.stderr
    return done.stdout


def lines(output, word):
    return sorted(line for line in output.splitlines() if line.startswith(word))


RUN = ("-m", "lightning_fastdata", "run")


def test_a_script_is_measured_and_otherwise_stays_as_it_is(script):
    plain = start(script, "--epochs", 1, "--exit", 7, code=7)
    assert "fastdata" not in plain
    assert not list(script.parent.rglob("report.json"))
    measured = start(script, "--epochs", 1, "--exit", 7, before=RUN, code=7)
    assert lines(measured, "RESULT") == lines(plain, "RESULT")
    assert lines(measured, "LOADER DataLoader")
    assert measured.count("steps in") >= 1
    (report,) = script.parent.rglob("report.json")
    assert json.loads(report.read_text())


@pytest.mark.slow
def test_a_callback_of_the_script_measures_alone(script):
    measured = start(script, "--own-callback", "--epochs", 1, before=RUN)
    assert measured.count("samples/s in a step") == 1


def test_a_report_that_the_callback_of_a_script_does_not_write_is_told(tmp_path):
    ours = [AddedCallback(report=str(tmp_path / "r.json")), AddedCallback()]
    theirs = DataThroughputCallback(report=False, summary=False)
    with pytest.warns(FastDataWarning, match=r"--report .*r\.json is not used") as told:
        trained(DataLoader(range(3)), folder=tmp_path, callbacks=[*ours, theirs])
    assert sum("is not used" in str(each.message) for each in told) == 1
    assert not (tmp_path / "r.json").exists()


@pytest.mark.slow
def test_each_rank_of_a_script_is_measured(script):
    plain = start(script, "--devices", 2, "--epochs", 1)
    measured = start(script, "--devices", 2, "--epochs", 1, before=RUN)
    assert lines(measured, "RESULT") == lines(plain, "RESULT")
    assert measured.count("AddedCallback") == 2  # each rank lists its callbacks


@pytest.mark.slow
def test_modules_and_the_other_lightning_package_are_run(script):
    pytest.importorskip("pytorch_lightning")
    script.write_text(SCRIPT.replace("LIGHTNING", "pytorch_lightning"))
    where = ("--report", "found/it.json")
    command = [sys.executable, *RUN, *where, "-m", "train", "--epochs", "1"]
    done = subprocess.run(
        command, check=False, capture_output=True, text=True, timeout=280, cwd=script.parent
    )
    assert done.returncode == 0, done.stderr
    assert "samples/s in a step" in done.stdout
    assert (script.parent / "found" / "it.json").exists()


@pytest.mark.parametrize(
    ("command", "said"),
    [
        ((), "nothing to run"),
        (("absent.py",), "no Python file"),
        (("--", "absent.py", "--", "x"), "'absent.py' is no Python file"),
        (("no-such-program", "--x"), "no program that can be found"),
        (("--fast", "train.py"), "unrecognized arguments: --fast"),
        (("--report", "", "absent.py"), "The path of a report is ''"),
    ],
)
def test_what_cannot_be_run_is_said(command, said, capsys):
    from lightning_fastdata.cli import main

    with pytest.raises(SystemExit) as raised:
        main(["run", *command])
    assert said in str(raised.value) + capsys.readouterr().err


def test_a_script_of_a_shell_without_its_first_line_is_told_as_such(tmp_path):
    from lightning_fastdata.cli import main

    script = tmp_path / "train.sh"
    script.write_text("python train.py")
    script.chmod(0o755)
    for command in ("run", "prove"):
        with refused(f"{script} cannot be started.*#!/bin/sh"):
            main([command, str(script)])


@pytest.mark.parametrize("method", ["spawn", "forkserver"])
@pytest.mark.parametrize(
    ("variable", "settings", "first", "again", "code"),
    [
        (RUN_VARIABLE, {}, "AddedCallback", "asked []", 0),
        (PROVE_VARIABLE, PROVE, "ProvingCallback", "would train, too", 1),
    ],
)
def test_a_worker_that_runs_the_whole_script_begins_nothing_of_ours(
    tmp_path, method, variable, settings, first, again, code
):
    script = tmp_path / "train.py"
    script.write_text(f"""
import multiprocessing
from lightning_fastdata.zero_code import lightning_callbacks

print("asked", [type(each).__name__ for each in lightning_callbacks()], flush=True)
if __name__ == "__main__":
    worker = multiprocessing.get_context("{method}").Process(target=print)
    worker.start()
    worker.join()
    print("code", worker.exitcode)
""")
    done = run_program(script, cwd=tmp_path, env={**os.environ, variable: json.dumps(settings)})
    assert done.stdout.startswith(f"asked ['{first}']")
    assert again in done.stdout + done.stderr
    assert f"code {code}" in done.stdout
