"""A Trainer with FastDataModule: the number of workers follows what the steps show.

All of it is real but for the machine that the workers run on (:mod:`rig.machine`): what samples and
steps take is exact, and so is what the tuner makes of it.
"""

from __future__ import annotations

import json
from pathlib import Path

import lightning
import pytest
import torch
from conformance.forked_ranks import launched
from lightning.pytorch.callbacks import ModelCheckpoint
from rig.machine import sleep
from rig.virtual_crew import on_machine
from torch.utils.data import Dataset
from trainers import quiet_trainer

from lightning_fastdata import DataThroughputCallback, FastDataModule, LoaderOptions
from lightning_fastdata.tuning.tuner import Tuner

BATCH = 8
CALM = {"num_workers": 2, "probe": False}
"""A number of workers is not tuned, and what is not tried is not advised on."""


@pytest.fixture(autouse=True)
def machine():
    with on_machine() as virtual:
        yield virtual


class Waiting(Dataset):
    """The first samples come at once, and the others take their time."""

    def __init__(self, length=BATCH * 130, quick=BATCH * 20, wait_s=0.002):
        self.length, self.quick, self.wait_s = length, quick, wait_s

    def __len__(self):
        return self.length

    def __getitem__(self, index):
        sleep(0.0002 if index < self.quick else self.wait_s)
        return torch.full((4,), float(index))


class Module(lightning.LightningModule):
    """Keeps what it is given."""

    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(4, 1)
        self.seen = []

    def training_step(self, batch, _index):
        self.seen.append(batch.clone())
        sleep(0.003)
        return self.layer(batch).mean()

    def validation_step(self, batch, _index):
        self.log("x", batch.mean())

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.0)


class Data(FastDataModule):
    def __init__(self, dataset=None, *, val=False, **options):
        super().__init__(batch_size=BATCH, seed=3, options=LoaderOptions(**options))
        self.dataset, self.val = Waiting() if dataset is None else dataset, val

    def train_dataset(self):
        return self.dataset

    def val_dataset(self):
        return Waiting(BATCH * 4, wait_s=0.0) if self.val else None


def fit(tmp_path, data, *callbacks, ckpt=None, module=None, **how):
    module = Module() if module is None else module
    how = {"max_epochs": 1, **how}
    trainer = quiet_trainer(
        tmp_path,
        callbacks=list(callbacks),
        enable_checkpointing=any(isinstance(each, ModelCheckpoint) for each in callbacks),
        **{"max_epochs": None, **how},
    )
    trainer.fit(module, data, ckpt_path=ckpt)
    return trainer, module


def tuner_of(trainer):
    loader = trainer.train_dataloader
    assert isinstance(loader.tuner, Tuner)
    return loader.tuner


class Storage(Dataset):
    """Becomes slow while it is read: as soon as there is a file."""

    def __init__(self, slow, length=BATCH * 400):
        self.slow, self.length = slow, length

    def __len__(self):
        return self.length

    def __getitem__(self, index):
        sleep(0.012 if self.slow.exists() else 0.0004)
        return torch.full((4,), float(index))


class Slows(lightning.Callback):
    """Has the storage become slow."""

    def __init__(self, slow, step):
        self.slow, self.step = slow, step

    def on_train_batch_start(self, trainer, *_):
        if trainer.global_step == self.step:
            self.slow.touch()


def test_storage_that_becomes_slow_is_answered_within_the_epoch(tmp_path, capsys):
    slow = tmp_path / "slow"
    data = Data(Storage(slow), executor="workers")
    trainer, module = fit(tmp_path, data, Slows(slow, 120), DataThroughputCallback(report=False))
    grown = [move for move in tuner_of(trainer).moves if move.after > move.before]
    assert grown
    assert 120 < grown[0].batch < 240
    kept = [move for move in grown if move.outcome == "kept"]
    assert kept
    assert trainer.train_dataloader.num_workers > grown[0].before
    assert str(grown[0]) in data.explain()
    out = capsys.readouterr().out
    assert f"fastdata: Data.train_dataset(): {str(grown[0]).partition(':')[0]}" in out
    assert str(kept[-1])[:30] in out.partition("\n done ")[2]
    seen = sorted(int(batch[0]) for batches in module.seen for batch in batches)
    assert seen == list(range(BATCH * 400))


def test_it_is_done_and_told_everywhere_and_a_second_fit_goes_on_with_it(tmp_path, capsys):
    logger = lightning.pytorch.loggers.CSVLogger(tmp_path)
    report = tmp_path / "report.json"
    watch = DataThroughputCallback(report=report, every_n_steps=10)
    data = Data(Waiting(BATCH * 200, quick=0), executor="workers")
    trainer, _ = fit(tmp_path, data, watch, logger=logger, log_every_n_steps=10)
    tuner = tuner_of(trainer)
    assert tuner.moves
    told = json.loads(report.read_text())["moves"]
    assert [move["after"] for move in told] == [move.after for move in tuner.moves]
    out = capsys.readouterr().out
    for move in tuner.moves:
        assert f"num_workers {move.before} -> {move.after} at batch {move.batch}" in out
        if move.outcome == "kept":
            assert " done " in out
    assert "LoaderOptions(num_workers" not in out
    # What was expected of the moves, and what came.
    assert any(move.outcome != "tried" for move in tuner.moves)
    header = (tmp_path / "lightning_logs/version_0/metrics.csv").read_text().splitlines()[0]
    assert "data_tune/workers" in header
    second, _ = fit(tmp_path, data)
    assert tuner_of(second) is tuner
    assert second.train_dataloader.num_workers == tuner.workers


def test_order_and_content_are_those_of_a_run_that_is_not_tuned(tmp_path):
    calm = fit(tmp_path, Data(**CALM), max_epochs=2)[1]
    tuned = fit(tmp_path, Data(val=True), max_epochs=2, val_check_interval=50)[1]
    assert len(tuned.seen) == len(calm.seen) == 260
    assert all(torch.equal(*pair) for pair in zip(tuned.seen, calm.seen, strict=True))


def test_a_run_that_goes_on_has_the_same_samples_whatever_was_tuned(tmp_path):
    whole = fit(tmp_path, Data(**CALM))[1]
    saves = ModelCheckpoint(tmp_path, every_n_train_steps=60, save_top_k=-1, filename="{step}")
    fit(tmp_path, Data(), saves, max_steps=100)
    _, rest = fit(tmp_path, Data(), ckpt=tmp_path / "step=60.ckpt")
    assert len(rest.seen) == 70
    assert all(torch.equal(*pair) for pair in zip(rest.seen, whole.seen[60:], strict=True))


def test_loaders_that_are_made_anew_begin_where_the_last_one_ended(tmp_path):
    data = Data(Waiting(BATCH * 130, quick=0))
    trainer, _ = fit(tmp_path, data, max_epochs=3, reload_dataloaders_every_n_epochs=1)
    tuner = tuner_of(trainer)
    assert trainer.train_dataloader.num_workers == tuner.workers
    assert tuner._batches > 130


@pytest.mark.filterwarnings("ignore:.*num_workers=2, but")
def test_explicit_settings_stay(tmp_path):
    trainer, _ = fit(tmp_path, Data(Waiting(BATCH * 80, quick=0), num_workers=2))
    assert trainer.train_dataloader.tuner is None
    assert trainer.train_dataloader.num_workers == 2


class Two(FastDataModule):
    def __init__(self, **options):
        super().__init__(batch_size=BATCH, seed=3, options=LoaderOptions(**options))

    def train_dataset(self):
        return {"slow": Waiting(BATCH * 100, quick=0), "quick": Waiting(BATCH * 100, wait_s=0.001)}


class OfTwo(Module):
    def training_step(self, batch, _index):
        return super().training_step(batch["slow"] + batch["quick"], _index)


def test_each_of_two_loaders_is_tuned_and_their_batches_stay(tmp_path):
    calm = fit(tmp_path, Two(**CALM), module=OfTwo())[1]
    trainer, tuned = fit(tmp_path, Two(), module=OfTwo())
    tuners = [loader.tuner for loader in trainer.train_dataloader.values()]
    assert all(isinstance(each, Tuner) for each in tuners)
    assert tuners[0] is not tuners[1]
    assert len(tuned.seen) == 100
    assert all(torch.equal(*pair) for pair in zip(tuned.seen, calm.seen, strict=True))


@pytest.mark.parametrize("limits", [{"limit_train_batches": 30}, {"overfit_batches": 20}])
def test_short_passes_over_the_data_are_tuned_too(tmp_path, limits):
    options = {"executor": "workers"}
    trainer, tuned = fit(tmp_path, Data(**options), max_epochs=4, **limits)
    calm = fit(tmp_path, Data(**CALM, **options), max_epochs=4, **limits)[1]
    assert len(tuned.seen) == len(calm.seen)
    assert all(torch.equal(*pair) for pair in zip(tuned.seen, calm.seen, strict=True))
    assert tuner_of(trainer)._batches >= 4 * min(limits.values())


@pytest.mark.slow
def test_ranks_tune_each_for_itself_and_see_what_they_would_have_seen(tmp_path):
    launched(Path(__file__).with_name("tuned_on_ranks.py"), str(tmp_path))
    moves = []
    for rank in range(2):
        calm, tuned = (
            json.loads((tmp_path / f"{name}-{rank}.json").read_text()) for name in ("calm", "tuned")
        )
        assert calm["moves"] == []
        assert len(tuned["seen"]) == 100
        assert tuned["seen"] == calm["seen"]
        moves += tuned["moves"]
    assert moves
