"""``fastdata run``: a script that knows nothing of this package, run as it is."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
from programs import run_program
from thoroughness import LONG
from torch.utils.data import DataLoader, Dataset, IterableDataset, SequentialSampler

from lightning_fastdata import FastDataLoader
from lightning_fastdata.plugin.watch.added import PlainLoaders

SCRIPT = """
import argparse, hashlib, sys
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset
import LIGHTNING as L

parser = argparse.ArgumentParser()
parser.add_argument("--epochs", type=int, default=2)
parser.add_argument("--random", action="store_true")
parser.add_argument("--persistent", action="store_true")
parser.add_argument("--own-callback", action="store_true")
parser.add_argument("--exit", type=int, default=0)
parser.add_argument("--devices", type=int, default=1)
options = parser.parse_args()


class Rows(Dataset):
    def __len__(self):
        return 50

    def __getitem__(self, index):
        row = torch.arange(4.0) + index
        return row + torch.rand(4) if options.random else row


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
    workers = dict(num_workers=1, persistent_workers=True) if options.persistent else {}
    train = DataLoader(Rows(), 8, shuffle=True, drop_last=True, **workers)
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
    done = run_program(*before, script, *arguments, cwd=script.parent, env=environ)
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
    assert report.with_suffix(".html").exists()


@pytest.mark.parametrize(
    "more",
    [
        pytest.param((), id="new workers"),
        pytest.param(("--persistent",), id="kept workers", marks=pytest.mark.slow),
    ],
)
def test_fast_loaders_take_the_place_of_plain_ones_with_the_same_batches(script, more):
    plain = start(script, *more)
    fast = start(script, *more, before=(*RUN, "--fast", "--report", "found/it.json"))
    assert lines(fast, "RESULT") == lines(plain, "RESULT")
    assert lines(fast, "LOADER FastDataLoader")
    assert fast.count("in the place of the DataLoader of Rows") == 2
    assert (script.parent / "found" / "it.json").exists()


def test_loaders_of_random_samples_stay_and_are_named(script):
    fast = start(script, "--random", "--epochs", 1, before=(*RUN, "--fast"))
    if LONG:  # the loader is torch's own, as without us
        plain = start(script, "--random", "--epochs", 1)
        assert lines(fast, "RESULT") == lines(plain, "RESULT")
    assert lines(fast, "LOADER DataLoader")
    assert "draw at random" in fast.replace("\n", " ")


def test_a_callback_of_the_script_measures_alone(script):
    fast = start(script, "--own-callback", "--epochs", 1, before=(*RUN, "--fast"))
    assert fast.count("samples/s in a step") == 1
    assert lines(fast, "LOADER FastDataLoader")


@pytest.mark.slow
def test_each_rank_of_a_script_is_measured(script):
    plain = start(script, "--devices", 2, "--epochs", 1)
    fast = start(script, "--devices", 2, "--epochs", 1, before=(*RUN, "--fast"))
    assert lines(fast, "RESULT") == lines(plain, "RESULT")
    assert len(lines(fast, "LOADER FastDataLoader")) == 2


def test_modules_and_the_other_lightning_package_are_run(script, tmp_path):
    pytest.importorskip("pytorch_lightning")
    script.write_text(SCRIPT.replace("LIGHTNING", "pytorch_lightning"))
    command = [sys.executable, *RUN, "-m", "train", "--epochs", "1"]
    done = subprocess.run(
        command, check=False, capture_output=True, text=True, timeout=280, cwd=script.parent
    )
    assert done.returncode == 0, done.stderr
    assert "samples/s in a step" in done.stdout


@pytest.mark.parametrize(
    ("command", "said"),
    [
        ((), "nothing to run"),
        (("absent.py",), "no Python file"),
        (("no-such-program", "--x"), "no program that can be found"),
    ],
)
def test_what_cannot_be_run_is_said(command, said, capsys):
    from lightning_fastdata.cli import main

    with pytest.raises(SystemExit) as raised:
        main(["run", *command])
    assert said in str(raised.value) + capsys.readouterr().err


class Numbers(Dataset):
    def __len__(self):
        return 12

    def __getitem__(self, index):
        return index


class Own(SequentialSampler):
    pass


class OwnLoader(DataLoader):
    pass


class Stream(IterableDataset):
    def __iter__(self):
        return iter(range(4))


def changed(loaders, stage="train"):
    said = []
    return PlainLoaders(said.append)(stage, loaders), said


@pytest.mark.parametrize(
    ("loader", "reason"),
    [
        (DataLoader(Numbers(), 4, sampler=Own(Numbers())), "Own may draw"),
        (DataLoader(Numbers(), batch_sampler=[[0, 1], [2]]), "list may draw"),
        (DataLoader(Numbers(), 4, worker_init_fn=print), "worker_init_fn"),
        (DataLoader(Stream(), 4), "stream"),
        (DataLoader(Numbers(), batch_size=None), "samples, not batches"),
        (OwnLoader(Numbers(), 4), "its own way"),
        ([[1, 2], [3]], None),
    ],
)
def test_loaders_whose_batches_might_change_stay(loader, reason):
    found, said = changed(loader)
    assert found is loader or found == loader
    assert reason is None or reason in said[0]


def test_loaders_that_draw_in_turn_from_one_generator_stay():
    shuffled, in_order = DataLoader(Numbers(), 4, shuffle=True), DataLoader(Numbers(), 4)
    found, said = changed({"a": shuffled, "b": in_order})
    assert found["a"] is shuffled
    assert isinstance(found["b"], FastDataLoader)
    assert "read together" in said[0]
    (alone, _), _ = changed([shuffled, in_order], stage="val")  # one after the other
    assert isinstance(alone, FastDataLoader)


def test_a_loader_is_replaced_once_and_its_dataset_tried_once():
    data, said = Numbers(), []
    change = PlainLoaders(said.append)
    first, second = DataLoader(data, 4), DataLoader(data, 3, drop_last=True)
    assert change("train", first) is change("train", first)
    assert [batch.tolist() for batch in change("train", second)] == [
        batch.tolist() for batch in second
    ]
    assert len(said) == 1
