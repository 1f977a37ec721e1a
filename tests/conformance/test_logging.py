"""What is logged: which numbers, where on Lightning's x axis, and what the report holds."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import pytest
from conformance.pieces import Linear, Manual, Rows, RowsModule, make_trainer, quiet
from lightning.pytorch import Trainer
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from torch.utils.data import DataLoader

from lightning_fastdata import DataThroughputCallback
from lightning_fastdata.errors import FastDataWarning, OptionsError

ALWAYS = {
    "data/stall_percent",
    "data/step_ms",
    "data/throughput_samples_per_s",
    "data/throughput_if_data_were_free_samples_per_s",
    "data/time_compute_ms",
    "data/time_wait_ms",
}
BANDS = {"data_band/stall_p95_ms"}


class Logs(Linear):
    """Logs its own values, to compare the positions with."""

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        self.log("own/step", loss, on_step=True, on_epoch=False)
        self.log("own/epoch", loss, on_step=False, on_epoch=True)
        return loss

    def validation_step(self, batch, batch_idx):
        self.log("own/val", 1.0)


class LogsByHand(Manual):
    def training_step(self, batch, batch_idx):
        super().training_step(batch, batch_idx)
        self.log("own/step", float(batch_idx), on_step=True, on_epoch=False)


def read_events(log_dir):
    """Return ``{tag: [steps]}`` of an event file, for scalars, images and texts."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(log_dir))
    events.Reload()
    tags = events.Tags()
    scalars = {tag: [e.step for e in events.Scalars(tag)] for tag in tags["scalars"]}
    images = {tag: [e.step for e in events.Images(tag)] for tag in tags["images"]}
    texts = {tag: [e.step for e in events.Tensors(tag)] for tag in tags["tensors"]}
    return scalars, images, texts


def ours(scalars, prefix="data/"):
    return {tag: steps for tag, steps in scalars.items() if tag.startswith(prefix)}


@pytest.mark.parametrize("every", [1, 3, 50])
@pytest.mark.parametrize("accumulate", [1, 3])
def test_row_26_scalars_stand_where_lightnings_own_stand(tmp_path, every, accumulate):
    """With 7 batches an epoch, the last accumulated step of an epoch is a partial one."""
    logger = TensorBoardLogger(tmp_path)
    trainer = make_trainer(
        tmp_path,
        max_epochs=2,
        logger=logger,
        callbacks=[quiet(figures=False, every_n_steps=every)],
        log_every_n_steps=every,
        accumulate_grad_batches=accumulate,
        limit_val_batches=0,
    )
    trainer.fit(Logs(), DataLoader(Rows(28), batch_size=4))
    scalars, _, _ = read_events(logger.log_dir)
    steps = 14 if accumulate == 1 else 6
    assert trainer.global_step == steps
    expected = [step for step in range(steps) if (step + 1) % every == 0]
    assert scalars.get("own/step", []) == expected
    assert set(ours(scalars)) == (ALWAYS if expected else set())
    assert set(ours(scalars, "data_band/")) == (BANDS if expected else set())
    for tag, at in (ours(scalars) | ours(scalars, "data_band/")).items():
        assert at == expected, tag


def test_row_25_with_two_optimizers_each_batch_is_one_step(tmp_path):
    logger = TensorBoardLogger(tmp_path)
    callback = quiet(every_n_steps=2)
    trainer = make_trainer(
        tmp_path, max_epochs=2, logger=logger, callbacks=[callback], log_every_n_steps=2
    )
    trainer.fit(LogsByHand(), DataLoader(Rows(28), batch_size=4))
    scalars, images, _ = read_events(logger.log_dir)
    assert trainer.global_step == 28
    assert scalars["own/step"] == [1, 3, 5, 7, 9, 11, 13]
    assert all(at == scalars["own/step"] for at in ours(scalars).values())
    assert images["data/timeline"] == [6, 13]
    assert callback.report.stages[0].steps == 14


def test_row_26_every_n_steps_of_the_callback_wins(tmp_path):
    logger = TensorBoardLogger(tmp_path)
    trainer = make_trainer(
        tmp_path, logger=logger, callbacks=[quiet(every_n_steps=2)], log_every_n_steps=50
    )
    trainer.fit(Linear(), DataLoader(Rows(5), batch_size=1))
    assert read_events(logger.log_dir)[0]["data/step_ms"] == [1, 3]
    with pytest.raises(OptionsError, match="every_n_steps=0"):
        DataThroughputCallback(every_n_steps=0)


def test_row_26_tensorboard_shows_scalars_figure_verdict_and_layout(tmp_path):
    logger = TensorBoardLogger(tmp_path)
    trainer = make_trainer(
        tmp_path,
        max_epochs=3,
        logger=logger,
        callbacks=[quiet(every_n_steps=4)],
        log_every_n_steps=4,
    )
    trainer.fit(Logs(), datamodule=RowsModule(batch_size=4, length=32))
    scalars, images, texts = read_events(logger.log_dir)
    assert scalars["data/step_ms"] == scalars["own/step"] == [3, 7, 11, 15, 19, 23]
    # What ends an epoch stands where Lightning puts it.
    assert images["data/timeline"] == scalars["own/epoch"] == [7, 15, 23]
    verdicts = texts["data/verdict/text_summary"]
    assert verdicts[0] == 7
    assert set(verdicts) <= {7, 15, 23}
    assert scalars["data_val/stall_percent"] == scalars["own/val"] == [7, 15, 23]
    assert "custom_scalars__config__" in texts


def read_csv(log_dir):
    """Return ``{name: [steps]}`` of a CSV logger's file."""
    found = {}
    with (Path(log_dir) / "metrics.csv").open() as file:
        for row in csv.DictReader(file):
            for name, value in row.items():
                if value:
                    found.setdefault(name, []).append(int(row["step"]))
    return found


@pytest.mark.parametrize("how", ["no logger", "barebones", "fast_dev_run"])
def test_row_26_without_a_logger_the_report_is_all_there_is(tmp_path, how):
    callback = quiet()
    if how == "barebones":
        trainer = Trainer(
            barebones=True, max_epochs=1, accelerator="cpu", devices=1, callbacks=[callback]
        )
    else:
        trainer = make_trainer(
            tmp_path, callbacks=[callback], fast_dev_run=7 if how == "fast_dev_run" else False
        )
    trainer.fit(Linear(), DataLoader(Rows(14), batch_size=2))
    assert callback.report.stages[0].steps == 7
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []


@pytest.mark.parametrize("augmented", [False, True])
def test_what_is_not_measured_is_not_logged(tmp_path, augmented):
    callback = quiet(augment=(lambda batch: batch) if augmented else None, every_n_steps=2)
    logger = CSVLogger(tmp_path)
    trainer = make_trainer(tmp_path, logger=logger, callbacks=[callback], num_sanity_val_steps=2)
    trainer.fit(Linear(), datamodule=RowsModule(batch_size=4, length=16))
    rows = read_csv(logger.log_dir)
    assert ("data_step/augment_ms" in rows) == augmented
    assert "data_step/transfer_ms" in rows
    assert set(ours(rows)) == ALWAYS
    # Validation is measured under its own name, and has no transform.
    assert ours(rows, "data_val/") == {"data_val/stall_percent": [3]}
    train, validation = callback.report.stages
    assert (train.augment is not None) == augmented
    assert validation.augment is None
    assert (train.steps, validation.steps) == (4, 2)


def test_validating_alone_logs_under_the_name_of_validation(tmp_path):
    logger, callback = CSVLogger(tmp_path), quiet()
    trainer = make_trainer(tmp_path, logger=logger, callbacks=[callback])
    trainer.validate(Logs(), datamodule=RowsModule(batch_size=4), verbose=False)
    rows = read_csv(logger.log_dir)
    assert rows["data_val/stall_percent"] == rows["own/val"] == [0]
    assert ours(rows) == {}


def test_a_second_fit_starts_a_new_report(tmp_path):
    callback = quiet()
    assert callback.report is None
    for batch_size, steps in ((4, 8), (8, 4)):
        trainer = make_trainer(tmp_path, callbacks=[callback])
        trainer.fit(Linear(), datamodule=RowsModule(batch_size=batch_size))
        train = callback.report.stages[0]
        assert (train.stage, train.steps, train.samples) == ("train", steps, 32)


SCHEMA = {
    "schema_version",
    "ended",
    "stages",
    "summary",
    "verdict",
    "wall",
    "device_minutes_waited",
    "ranks",
    "notes",
    "versions",
    "moves",
    "machine",
}


@pytest.mark.cases(2)
@pytest.mark.parametrize("where", ["log_dir", "no logger", "path"])
def test_the_report_is_written_as_json(tmp_path, where):
    logger = CSVLogger(tmp_path) if where == "log_dir" else False
    path = tmp_path / "deep" / "mine.json"
    callback = quiet(report=path if where == "path" else True)
    trainer = make_trainer(tmp_path, logger=logger, callbacks=[callback])
    trainer.fit(Linear(), datamodule=RowsModule(batch_size=4))
    file = {
        "path": path,
        "log_dir": Path(trainer.log_dir or "") / "report.json",
        "no logger": tmp_path / "report.json",
    }[where]
    report = json.loads(file.read_text())
    assert report == json.loads(json.dumps(callback.report.as_dict()))
    assert set(report) == SCHEMA
    assert report["schema_version"] == 12
    assert report["ended"] is True
    assert list(report["stages"]) == ["train", "val"]
    assert report["verdict"]["code"].startswith("FD")
    train = report["stages"]["train"]
    assert (train["steps"], train["samples"], train["device"]) == (8, 32, "cpu")
    assert train["augment"] is None
    shares = [train[phase]["share"] for phase in ("stall", "transfer", "compute")]
    assert sum(shares) == pytest.approx(1)
    assert {"lightning", "torch"} <= set(report["versions"])


@pytest.mark.parametrize("summary", [False, True])
def test_report_and_summary_can_be_switched_off(tmp_path, capsys, summary):
    callback = DataThroughputCallback(summary=summary, report=False)
    trainer = make_trainer(tmp_path, callbacks=[callback])
    trainer.fit(Linear(), datamodule=RowsModule(batch_size=4))
    assert list(tmp_path.rglob("report.json")) == []
    out = capsys.readouterr().out
    assert ("fastdata · train" in out) == summary
    assert callback.report.verdict.sentence


@pytest.mark.parametrize("given", [True, "memory://deep/mine.json"])
def test_a_report_is_written_to_no_url_and_no_folder_of_its_name(tmp_path, monkeypatch, given):
    monkeypatch.chdir(tmp_path)
    callback = DataThroughputCallback(summary=False, report=given)
    trainer = make_trainer("memory://runs", callbacks=[callback], limit_val_batches=0)
    with pytest.warns(FastDataWarning, match="not written: OptionsError: memory://") as told:
        trainer.fit(Linear(), datamodule=RowsModule(batch_size=4))
    assert len([one for one in told if "memory://" in str(one.message)]) == 1
    assert callback.report.stages[0].steps == 8
    assert list(tmp_path.iterdir()) == []
