"""What is measured: every wait in the step that waited, and nothing that is not one.

Steps are of every kind: parts of an update, of several loaders, cold ones, and what lies between.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from conformance.pieces import Linear, Manual, Rows, RowsModule, make_trainer
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.utilities import CombinedLoader
from misses import each
from torch.utils.data import DataLoader

from lightning_fastdata import DataThroughputCallback
from lightning_fastdata.errors import FastDataError, TransformError
from lightning_fastdata.host import clock

pytestmark = pytest.mark.usefixtures("virtual")

SLEEP_S, SLEEP_MS = 0.25, 250.0


class Measured(DataThroughputCallback):
    """Keeps the single steps of the last fit."""

    def __init__(self, **arguments):
        super().__init__(**{"summary": False, "report": False, **arguments})
        self.train = self.val = None

    def on_train_end(self, trainer, pl_module):
        self.train = self._run.recording.main.timeline.history.newest()
        self.val = self._run.recording.evaluated.timeline.history.newest()

    def spent(self, column="wait_ms"):
        """Return each step in which a phase took any time, with its milliseconds."""
        return spent(self.train[column])


def spent(column):
    """Return the places of a column of milliseconds where there are any, with them."""
    return {step: float(column[step]) for step in np.flatnonzero(np.nan_to_num(column))}


BATCHES = 8


def loader(length=BATCHES, sleep_s=None):
    return DataLoader(Rows(length, sleep_s), batch_size=1)


def fit(tmp_path, model, train, *, callbacks=(), val=None, **arguments):
    """Return the callback that has measured a fit, in which ours comes last."""
    callback = Measured()
    if val is None:
        arguments["limit_val_batches"] = 0
    trainer = make_trainer(tmp_path, callbacks=[*callbacks, callback], **arguments)
    trainer.fit(model, train, val)
    return callback


class SlowSaves(ModelCheckpoint):
    def _save_checkpoint(self, trainer, filepath):
        clock.sleep(SLEEP_S)
        super()._save_checkpoint(trainer, filepath)


@pytest.mark.parametrize(
    ("when", "gaps"),
    [
        ({"val_check_interval": 0.25}, []),
        ({"val_check_interval": 3}, [4, 8, 12]),
        ({"val_check_interval": 5, "check_val_every_n_epoch": None}, [4, 8, 12]),
    ],
    ids=["fraction", "batches", "batches over epochs"],
)
def test_row_24_validation_and_checkpoints_are_no_part_of_a_step(tmp_path, when, gaps):
    class SlowlyValidated(Linear):
        def on_validation_epoch_start(self):
            clock.sleep(SLEEP_S)

        def on_validation_epoch_end(self):
            self.log("val", 1.0)

    callback = fit(
        tmp_path,
        model := SlowlyValidated(),
        loader(),
        val=loader(2, {1: SLEEP_S}),
        callbacks=[SlowSaves(tmp_path / "saved", every_n_train_steps=4, save_top_k=-1)],
        max_epochs=2,
        enable_checkpointing=True,
        num_sanity_val_steps=1,
        **when,
    )
    assert len(model.seen["val"]) > 3
    assert len(list((tmp_path / "saved").iterdir())) == 4
    for column in ("wait_ms", "stall_ms", "transfer_ms", "compute_ms", "step_ms"):
        assert callback.spent(column) == {}, column
    # Validation has its own timeline: the second batch of each run sleeps, the first does not.
    runs = len(callback.val["wait_ms"]) // 2
    assert callback.val["wait_ms"].tolist() == [0, SLEEP_MS] * runs
    # A checkpoint is a gap; a validation, and what is saved beside one, is not.
    assert callback.spent("gap_ms") == dict.fromkeys(gaps, SLEEP_MS)
    assert callback.val["cold"].tolist() == [1, 0] * runs
    assert callback.train["cold"].tolist() == [1, *[0] * 7] * 2
    train = callback.report.stages[0]
    assert (train.steps, train.cold_steps) == (16, 2)


def test_a_sanity_check_is_not_measured(tmp_path):
    seen = []

    class Looks(Callback):
        def on_train_start(self, trainer, pl_module):
            recording = callback._run.recording
            seen.extend(m.timeline.history.steps for m in (recording.main, recording.evaluated))

    callback = Measured()
    trainer = make_trainer(tmp_path, callbacks=[Looks(), callback], num_sanity_val_steps=-1)
    model = Linear()
    trainer.fit(model, datamodule=RowsModule(batch_size=4))
    assert seen == [0, 0]
    assert len(model.seen["val"]) == 8
    assert len(callback.val["step"]) == 4
    assert callback.report.stages[1].steps == 4
    # Of the stamps of a run the first batch is left out.
    assert callback.report.stages[1].causes.batches == 3


class Fetches(Linear):
    def training_step(self, dataloader_iter):
        batch, _, _ = next(dataloader_iter)
        return self._step("train", batch)


def test_row_12_a_step_that_fetches_for_itself_is_measured(tmp_path):
    callback = fit(tmp_path, model := Fetches(), loader(6, {3: SLEEP_S}))
    assert len(model.seen["train"]) == 6
    assert callback.spent() == {3: SLEEP_MS}
    assert callback.report.stages[0].wait is not None
    assert callback.report.stages[0].transfer is None


@pytest.mark.parametrize("source", ["ours", "callback on ours", "callback on loaders"])
def test_row_12_a_transform_that_such_a_step_would_skip_is_an_error(tmp_path, source):
    def double(batch):
        return [batch[0] * 2, batch[1]]

    callback = Measured(augment=double if source.startswith("callback") else None)
    data = {"train_dataloaders": DataLoader(Rows(6), batch_size=2)}
    if source != "callback on loaders":
        data = {"datamodule": RowsModule(batch_size=2)}
    if source == "ours":
        data["datamodule"].register_transform(double)
    trainer = make_trainer(tmp_path, callbacks=[callback], limit_val_batches=0)
    error = FastDataError if source == "ours" else TransformError
    with pytest.raises(error, match="on_after_batch_transfer"):
        trainer.fit(Fetches(), **data)


def test_transfer_and_augmentation_are_told_apart(tmp_path):
    def sleeps(batch):
        clock.sleep(SLEEP_S / 4)
        return batch

    class SlowTransfer(Linear):
        def on_before_batch_transfer(self, batch, dataloader_idx):
            clock.sleep(SLEEP_S)
            return batch

        def transfer_batch_to_device(self, batch, device, dataloader_idx):
            clock.sleep(SLEEP_S / 2)
            return super().transfer_batch_to_device(batch, device, dataloader_idx)

    callback = Measured(augment=sleeps)
    trainer = make_trainer(tmp_path, callbacks=[callback], limit_val_batches=0)
    trainer.fit(SlowTransfer(), loader(4))
    transfer, augment = callback.train["transfer_ms"], callback.train["augment_ms"]
    assert transfer.tolist() == [SLEEP_MS * 3 / 2] * 4
    assert augment.tolist() == [SLEEP_MS / 4] * 4
    assert callback.train["step_ms"].tolist() == [SLEEP_MS * 7 / 4] * 4
    total = sum(
        np.nan_to_num(callback.train[f"{name}_ms"])
        for name in ("stall", "transfer", "augment", "compute")
    )
    assert np.allclose(total, callback.train["step_ms"])


def test_the_duration_of_a_stage_leaves_out_the_other_stage(tmp_path):
    class SlowValidation(Linear):
        def validation_step(self, batch, batch_idx):
            clock.sleep(0.4)

    callback = DataThroughputCallback(summary=False, report=False)
    trainer = make_trainer(
        tmp_path, max_epochs=3, num_sanity_val_steps=0, limit_val_batches=1, callbacks=[callback]
    )
    trainer.fit(SlowValidation(), datamodule=RowsModule(batch_size=16))
    train, val = callback.report.stages
    assert (train.duration_s, val.duration_s) == (0, pytest.approx(3 * 0.4))


class SlowUpdates(Linear):
    def optimizer_step(self, *args, **kwargs):
        super().optimizer_step(*args, **kwargs)
        clock.sleep(SLEEP_S)


def test_each_part_of_an_accumulated_update_is_a_step_and_the_last_one_pays_for_it(tmp_path):
    model = SlowUpdates()
    callback = fit(tmp_path, model, loader(9, {5: SLEEP_S}), accumulate_grad_batches=4)
    assert callback.spent() == {5: SLEEP_MS}
    # The ninth batch ends the epoch, and so an update.
    assert callback.spent("compute_ms") == dict.fromkeys([3, 7, 8], SLEEP_MS)
    (stage,) = callback.report.stages
    assert (stage.steps, stage.samples) == (9, 9)


class SlowByHand(Manual):
    def update(self):
        super().update()
        clock.sleep(SLEEP_S)


def test_manual_optimization_is_compute_of_the_batch_that_did_it(tmp_path):
    callback = fit(tmp_path, SlowByHand(every=2), loader(sleep_s={4: SLEEP_S}))
    assert callback.spent() == {4: SLEEP_MS}
    assert callback.spent("compute_ms") == dict.fromkeys([1, 3, 5, 7], SLEEP_MS)
    (stage,) = callback.report.stages
    assert stage.steps == BATCHES


class Several(Linear):
    def training_step(self, batch, batch_idx, dataloader_idx=0):
        parts = batch.values() if isinstance(batch, dict) else [batch]
        return sum(self._step("train", part) for part in parts if part is not None)


@pytest.mark.cases(2)
@pytest.mark.parametrize(
    ("mode", "slow", "samples"),
    [
        ("min_size", [3], 4 + 4),
        ("max_size_cycle", [3, 7], 8 + 8),
        ("max_size", [3], 8 + 4),
    ],
)
def test_a_wait_for_one_of_several_loaders_is_a_wait_of_the_step(tmp_path, mode, slow, samples):
    loaders = {"a": loader(8), "b": loader(4, {3: SLEEP_S})}
    callback = fit(tmp_path, Several(), CombinedLoader(loaders, mode))
    assert callback.spent() == dict.fromkeys(slow, SLEEP_MS)
    (stage,) = callback.report.stages
    assert stage.steps == (4 if mode == "min_size" else 8)
    assert stage.samples == samples


class SeveralEvaluated(Several):
    def validation_step(self, batch, batch_idx, dataloader_idx=0):
        return None

    test_step = validation_step


@each(
    ("mode", "samples"),
    [
        ("min_size", 2 * 4 + 3 * 4),
        ("max_size_cycle", 2 * 8 + 3 * 8),
        ("max_size", 2 * 8 + 3 * 4),
        ("sequential", 2 * 8 + 3 * 4),
    ],
)
def test_samples_of_all_loaders_count_in_each_stage(tmp_path, mode, samples):
    def loaders():
        parts = {"a": DataLoader(Rows(16), 2), "b": DataLoader(Rows(12), 3)}
        return CombinedLoader(parts, mode)

    train = DataLoader(Rows(samples), 2) if mode == "sequential" else loaders()
    callback = Measured()
    trainer = make_trainer(tmp_path, callbacks=[callback], num_sanity_val_steps=0)
    trainer.fit(SeveralEvaluated(), train, loaders())
    assert [stage.samples for stage in callback.report.stages] == [samples, samples]
    for method in ("validate", "test"):
        getattr(trainer, method)(SeveralEvaluated(), loaders())
        assert callback.report.stages[0].samples == samples


def test_validation_loaders_come_one_after_the_other(tmp_path):
    callback = fit(tmp_path, Linear(), loader(), val=[loader(2), loader(3, {1: SLEEP_S})])
    assert callback.spent() == {}
    assert spent(callback.val["wait_ms"]) == {3: SLEEP_MS}
    assert callback.report.stages[1].samples == 5


class SlowEnds(Callback):
    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        clock.sleep(SLEEP_S if batch_idx == 4 else 0)


class SlowBesideValidation(Callback):
    def on_validation_batch_start(self, trainer, pl_module, batch, batch_idx):
        clock.sleep(SLEEP_S if batch_idx == 2 else 0)

    def on_validation_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        clock.sleep(SLEEP_S if batch_idx == 4 else 0)


class SlowLogger(CSVLogger):
    def log_metrics(self, metrics, step=None):
        clock.sleep(SLEEP_S)
        super().log_metrics(metrics, step)


class Logs(Linear):
    def on_train_batch_end(self, outputs, batch, batch_idx):
        clock.sleep(SLEEP_S if batch_idx == 4 else 0)


@pytest.mark.parametrize("what", ["a callback called before", "the module", "a logger"])
def test_what_runs_between_two_steps_is_gap_and_no_compute(tmp_path, what):
    arguments = {
        "a callback called before": {"callbacks": [SlowEnds()]},
        "the module": {},
        # Ours logs at the same step, so that there is something to log.
        "a logger": {"logger": SlowLogger(tmp_path), "log_every_n_steps": 5},
    }[what]
    model = Logs() if what == "the module" else Linear()
    callback = fit(tmp_path, model, loader(), **arguments)
    for phase in ("wait_ms", "transfer_ms", "compute_ms", "step_ms"):
        assert callback.spent(phase) == {}, phase
    assert callback.spent("gap_ms") == {5: SLEEP_MS}


def test_what_runs_between_two_steps_of_validation_is_gap_and_no_compute(tmp_path):
    slow = SlowBesideValidation()
    callback = fit(tmp_path, Linear(), loader(), val=loader(), callbacks=[slow])
    assert spent(callback.val["step_ms"]) == {}
    assert spent(callback.val["gap_ms"]) == {2: SLEEP_MS, 5: SLEEP_MS}


def test_the_call_that_compiles_is_in_the_cold_first_step(tmp_path):
    def compiler(graph, inputs):
        clock.sleep(SLEEP_S)
        return graph.forward

    class Compiled(Linear):
        def on_fit_start(self):
            self.net = torch.compile(self.layer, backend=compiler)

        def training_step(self, batch, batch_idx):
            return self.net(batch[0]).mean()

    callback = fit(tmp_path, Compiled(), loader())
    assert callback.spent("compute_ms") == {0: SLEEP_MS}
    assert callback.train["cold"].tolist() == [1] + [0] * 7
    assert callback.report.stages[0].compute.mean_ms == 0
