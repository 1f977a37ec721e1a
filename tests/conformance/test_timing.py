"""What is measured: every wait in the step that waited, and nothing that is not one."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from conformance.pieces import Linear, Rows, RowsModule, make_trainer
from lightning.pytorch import Callback, LightningModule
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.utils.data import DataLoader, Dataset

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

    callback = Measured()
    saves = SlowSaves(dirpath=tmp_path / "saved", every_n_train_steps=4, save_top_k=-1)
    trainer = make_trainer(
        tmp_path,
        max_epochs=2,
        callbacks=[saves, callback],
        enable_checkpointing=True,
        num_sanity_val_steps=1,
        **when,
    )
    model = SlowlyValidated()
    val = DataLoader(Rows(2, {1: SLEEP_S}), batch_size=1)
    trainer.fit(model, DataLoader(Rows(8), batch_size=1), val)
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


def test_row_12_a_step_that_fetches_for_itself_is_measured(tmp_path):
    class Fetches(Linear):
        def training_step(self, dataloader_iter):
            batch, _, _ = next(dataloader_iter)
            return self._step("train", batch)

    callback = Measured()
    trainer = make_trainer(tmp_path, callbacks=[callback], limit_val_batches=0)
    model = Fetches()
    trainer.fit(model, DataLoader(Rows(6, {3: SLEEP_S}), batch_size=1))
    assert len(model.seen["train"]) == 6
    assert callback.spent() == {3: SLEEP_MS}
    assert callback.report.stages[0].wait is not None
    assert callback.report.stages[0].transfer is None


@pytest.mark.parametrize("source", ["ours", "callback on ours", "callback on loaders"])
def test_row_12_a_transform_that_such_a_step_would_skip_is_an_error(tmp_path, source):
    class Fetches(LightningModule):
        def __init__(self):
            super().__init__()
            self.layer = torch.nn.Linear(4, 1)

        def training_step(self, dataloader_iter):
            batch, _, _ = next(dataloader_iter)
            return self.layer(batch[0]).mean()

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=1e-3)

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
    class Slow(Dataset):
        def __len__(self):
            return 4

        def __getitem__(self, i):
            return torch.ones(4)

    def sleeps(batch):
        clock.sleep(SLEEP_S / 4)
        return batch

    class SlowTransfer(Linear):
        def on_before_batch_transfer(self, batch, dataloader_idx):
            clock.sleep(SLEEP_S / 4)  # before the transfer: neither of the two
            return batch

        def transfer_batch_to_device(self, batch, device, dataloader_idx):
            clock.sleep(SLEEP_S / 2)
            return super().transfer_batch_to_device(batch, device, dataloader_idx)

    callback = Measured(augment=sleeps)
    trainer = make_trainer(tmp_path, callbacks=[callback], limit_val_batches=0)
    trainer.fit(SlowTransfer(), DataLoader(Slow(), batch_size=1))
    transfer, augment = callback.train["transfer_ms"], callback.train["augment_ms"]
    assert transfer.tolist() == [SLEEP_MS / 2] * 4
    assert augment.tolist() == [SLEEP_MS / 4] * 4
    assert callback.train["step_ms"].tolist() == [SLEEP_MS * 3 / 4] * 4
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
