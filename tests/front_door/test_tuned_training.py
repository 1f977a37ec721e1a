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
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.data import Dataset
from trainers import Learner, quiet_trainer

from lightning_fastdata import DataThroughputCallback, FastDataModule, LoaderOptions
from lightning_fastdata.loading.tuner import Tuner

pytestmark = pytest.mark.usefixtures("machine")

BATCH = 8
CALM = {"num_workers": 2, "probe": False}
"""A number of workers is not tuned, and what is not tried is not advised on."""


class Waiting(Dataset):
    """The first samples come at once, and the others take their time."""

    def __init__(self, length=BATCH * 130, quick=BATCH * 20, wait_s=0.002):
        self.length, self.quick, self.wait_s = length, quick, wait_s

    def __len__(self):
        return self.length

    def __getitem__(self, index):
        sleep(0.0002 if index < self.quick else self.wait_s)
        return torch.full((4,), float(index))


class Module(Learner):
    """Keeps what it is given."""

    def __init__(self):
        super().__init__(self.kept)

    def kept(self, batch):
        sleep(0.003)
        return tree_map(torch.clone, batch)

    def validation_step(self, batch, _index):
        pass


def data_of(dataset=None, val=None, **options):
    data = Waiting() if dataset is None else dataset
    how = {"batch_size": BATCH, "seed": 3, "options": LoaderOptions(**options)}
    return FastDataModule.from_datasets(data, val, **how)


def fit(tmp_path, data, *callbacks, ckpt=None, **how):
    module = Module()
    saves = any(isinstance(each, ModelCheckpoint) for each in callbacks)
    trainer = quiet_trainer(tmp_path, callbacks=list(callbacks), enable_checkpointing=saves, **how)
    trainer.fit(module, data, ckpt_path=ckpt)
    return trainer, module


def assert_same(ours, theirs, count):
    assert len(ours) == len(theirs) == count
    for one, other in zip(ours, theirs, strict=True):
        assert tree_leaves(one)
        assert all(map(torch.equal, tree_leaves(one), tree_leaves(other)))


def tuner_of(trainer):
    loader = trainer.train_dataloader
    assert isinstance(loader.training.tuner, Tuner)
    return loader.training.tuner


class Storage(Waiting):
    """Becomes slow while it is read: as soon as there is a file."""

    def __init__(self, slow):
        super().__init__(BATCH * 500)
        self.slow = slow

    def __getitem__(self, index):
        sleep(0.012 if self.slow.exists() else 0.0004)
        return torch.full((4,), float(index))


class Slows(lightning.Callback):
    """Has the storage become slow."""

    def __init__(self, slow):
        self.slow = slow

    def on_train_batch_start(self, trainer, *_):
        if trainer.global_step == 220:
            self.slow.touch()


def test_storage_that_becomes_slow_is_answered_within_the_epoch(tmp_path, capsys):
    slow = tmp_path / "slow"
    data = data_of(Storage(slow), executor="workers")
    trainer, module = fit(tmp_path, data, Slows(slow), DataThroughputCallback(report=False))
    grown = [move for move in tuner_of(trainer).moves if move.after > move.before]
    assert grown
    assert 220 < grown[0].batch < 340
    kept = [move for move in grown if move.outcome == "kept"]
    assert kept
    assert trainer.train_dataloader.num_workers > grown[0].before
    assert str(grown[0]) in data.explain()
    out = capsys.readouterr().out
    assert f"fastdata: FastDataModule.train_dataset(): {str(grown[0]).partition(':')[0]}" in out
    assert str(kept[-1])[:30] in out.partition("\n done ")[2]
    seen = sorted(int(batch[0]) for batches in module.seen for batch in batches)
    assert seen == list(range(BATCH * 500))


def test_it_is_done_and_told_everywhere_and_a_second_fit_goes_on_with_it(tmp_path, capsys):
    logger = lightning.pytorch.loggers.CSVLogger(tmp_path)
    report = tmp_path / "report.json"
    watch = DataThroughputCallback(report=report, every_n_steps=10)
    data = data_of(Waiting(BATCH * 400, quick=0), executor="workers")
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
    calm = fit(tmp_path, data_of(**CALM), max_epochs=2)[1]
    tuned = fit(
        tmp_path, data_of(val=Waiting(BATCH * 4, wait_s=0.0)), max_epochs=2, val_check_interval=50
    )[1]
    assert_same(tuned.seen, calm.seen, 260)


def test_a_run_that_goes_on_has_the_same_samples_whatever_was_tuned(tmp_path):
    whole = fit(tmp_path, data_of(**CALM))[1]
    saves = ModelCheckpoint(tmp_path, every_n_train_steps=60, save_top_k=-1, filename="{step}")
    fit(tmp_path, data_of(), saves, max_steps=100)
    _, rest = fit(tmp_path, data_of(), ckpt=tmp_path / "step=60.ckpt")
    assert_same(rest.seen, whole.seen[60:], 70)


def test_loaders_that_are_made_anew_begin_where_the_last_one_ended(tmp_path):
    data = data_of(Waiting(BATCH * 130, quick=0))
    trainer, _ = fit(tmp_path, data, max_epochs=3, reload_dataloaders_every_n_epochs=1)
    tuner = tuner_of(trainer)
    assert trainer.train_dataloader.num_workers == tuner.workers
    assert tuner._batches > 130


@pytest.mark.filterwarnings("ignore:.*num_workers=2, but")
def test_explicit_settings_stay(tmp_path):
    trainer, _ = fit(tmp_path, data_of(Waiting(BATCH * 80, quick=0), num_workers=2))
    assert trainer.train_dataloader.training.tuner is None
    assert trainer.train_dataloader.num_workers == 2


def test_each_of_two_loaders_is_tuned_and_their_batches_stay(tmp_path):
    two = {"slow": Waiting(BATCH * 100, quick=0), "quick": Waiting(BATCH * 100, wait_s=0.001)}
    calm = fit(tmp_path, data_of(two, **CALM))[1]
    trainer, tuned = fit(tmp_path, data_of(two))
    tuners = [loader.training.tuner for loader in trainer.train_dataloader.values()]
    assert all(isinstance(each, Tuner) for each in tuners)
    assert tuners[0] is not tuners[1]
    assert_same(tuned.seen, calm.seen, 100)


@pytest.mark.parametrize("limits", [{"limit_train_batches": 30}, {"overfit_batches": 20}])
def test_short_passes_over_the_data_are_tuned_too(tmp_path, limits):
    options = {"executor": "workers"}
    trainer, tuned = fit(tmp_path, data_of(**options), max_epochs=4, **limits)
    calm = fit(tmp_path, data_of(**CALM, **options), max_epochs=4, **limits)[1]
    assert_same(tuned.seen, calm.seen, 4 * min(limits.values()))
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
