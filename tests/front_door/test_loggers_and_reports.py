"""What loggers get of a run: few scalars, seldom enough, and the report as files."""

from __future__ import annotations

import csv
import inspect
import json
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from lightning.pytorch import Callback, LightningModule
from lightning.pytorch.loggers import CSVLogger, Logger, TensorBoardLogger
from torch.utils.data import DataLoader, Dataset
from trainers import quiet_trainer

from lightning_fastdata import DataThroughputCallback, FastDataModule, LoaderOptions
from lightning_fastdata.errors import FastDataWarning, OptionsError
from lightning_fastdata.host import clock

MOST = 20
SAMPLES = 64


class Rows(Dataset):
    def __len__(self):
        return SAMPLES

    def __getitem__(self, index):
        clock.sleep(0.001)
        return torch.full((4,), float(index))


class Model(LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(4, 1)

    def training_step(self, batch, _):
        loss = self.layer(batch).mean()
        self.log("own/loss", loss)
        return loss

    def validation_step(self, batch, _):
        self.log("own/val", self.layer(batch).mean())

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.01)


def fit(tmp_path, callback, logger, *, epochs=2, workers=2, **options):
    trainer = quiet_trainer(
        tmp_path,
        max_epochs=epochs,
        logger=logger,
        num_sanity_val_steps=0,
        callbacks=[callback, *options.pop("more", ())],
        **options,
    )
    executor = "workers" if workers else "inline"
    loading = LoaderOptions(num_workers=workers, executor=executor, probe=False)
    module = FastDataModule.from_datasets(Rows(), Rows(), batch_size=4, options=loading)
    trainer.fit(Model(), datamodule=module)
    return trainer


def events_of(logger):
    board = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    return board.EventAccumulator(str(logger.log_dir), size_guidance={"tensors": 0}).Reload()


def csv_names(logger):
    with (Path(logger.log_dir) / "metrics.csv").open() as file:
        return {name for name in csv.DictReader(file).fieldnames if name.startswith("data")}


def layout_tags(events):
    """Return all tags that the layout of custom scalars names."""
    (event,) = events.Tensors("custom_scalars__config__")
    text = event.tensor_proto.string_val[0].decode("utf-8", "replace")
    return set(re.findall(r"data[_a-z0-9]*/[_a-z0-9]+", text))


@pytest.mark.parametrize("scalars", ["main", "all"])
def test_twenty_scalars_at_most_unless_all_are_asked_for(tmp_path, scalars):
    board, table = TensorBoardLogger(tmp_path / "board"), CSVLogger(tmp_path / "table")
    options = {} if scalars == "main" else {"scalars": "all"}
    callback = DataThroughputCallback(summary=False, report=False, every_n_steps=4, **options)
    fit(tmp_path, callback, [board, table])
    events = events_of(board)
    logged = {tag for tag in events.Tags()["scalars"] if tag.startswith("data")}
    assert logged == csv_names(table)
    looked_at = {
        "data/stall_percent",
        "data/step_ms",
        "data/throughput_samples_per_s",
        "data/time_compute_ms",
        "data/time_wait_ms",
        "data/throughput_if_data_were_free_samples_per_s",
        "data_run/samples_per_s",
        "data_val/stall_percent",
    }
    assert looked_at <= logged
    assert any(tag.startswith("data_wait/read") for tag in logged)
    assert layout_tags(events) <= logged
    if scalars == "main":
        assert len(logged) <= MOST
    else:
        assert len(logged) > 40
        assert {"data_band/step_max_ms", "data_val/step_ms", "data_workers/active"} <= logged


def test_only_the_two_words_are_taken():
    with pytest.raises(OptionsError, match="scalars is 'few'; allowed are 'main', 'all'"):
        DataThroughputCallback(scalars="few")


class Timed(CSVLogger):
    """A logger that takes long, and knows which calls are not Lightning's own."""

    def __init__(self, save_dir, seconds=0.0):
        super().__init__(save_dir)
        self.seconds = seconds
        self.lightnings, self.ours = [], []

    def log_metrics(self, metrics, step=None):
        calls = self.ours if any(name.startswith("data/") for name in metrics) else self.lightnings
        calls.append(clock.monotonic())
        clock.sleep(self.seconds)
        super().log_metrics(metrics, step)


def test_a_slow_logger_that_is_called_in_each_step_is_hardly_called_for_us(tmp_path, virtual):
    logger = Timed(tmp_path, seconds=0.02)
    callback = DataThroughputCallback(summary=False, report=False, figures=False)
    often = {"log_every_n_steps": 1, "limit_val_batches": 0}
    fit(tmp_path, callback, logger, epochs=12, workers=0, **often)
    assert len(logger.lightnings) >= 12 * SAMPLES // 4
    # The first is for free; after each other one there is a rest of a hundred times its time.
    step_s = 4 * 0.001 + 0.02
    rests_s = np.diff(logger.ours)
    assert rests_s[0] <= 2 * step_s
    assert len(rests_s) == 3
    assert ((rests_s[1:] >= 101 * 0.02) & (rests_s[1:] < 101 * 0.02 + 2 * step_s)).all()


def test_who_says_how_often_gets_it(tmp_path):
    logger = Timed(tmp_path, seconds=0.002)
    callback = DataThroughputCallback(summary=False, report=False, figures=False, every_n_steps=1)
    fit(tmp_path, callback, logger, log_every_n_steps=8, limit_val_batches=0)
    assert len(logger.ours) == 2 * SAMPLES // 4


def test_what_lightning_shows_to_callbacks_is_what_it_was(tmp_path):
    seen = set()

    class Looks(Callback):
        def on_train_batch_end(self, trainer, *_):
            seen.update(trainer.callback_metrics)
            seen.update(trainer.progress_bar_metrics)

    callback = DataThroughputCallback(summary=False, report=False, every_n_steps=1)
    fit(tmp_path, callback, CSVLogger(tmp_path), more=[Looks()])
    assert seen
    assert not any(name.startswith("data") for name in seen)


class Keeps(Logger):
    """Has the method of an experiment that keeps files."""

    name, version = "keeps", 0

    def __init__(self, experiment):
        self._experiment = experiment

    def log_metrics(self, metrics, step=None):
        pass

    def log_hyperparams(self, params, *args, **kwargs):
        pass

    @property
    def experiment(self):
        return self._experiment


class Refuses:
    """As a tracking client of MLflow whose server takes no files."""

    def log_artifact(self, run_id, local_path, artifact_path=None):
        raise ConnectionError("no room for files")


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_a_logger_that_takes_no_file_is_told_once_and_the_training_is_done(tmp_path):
    logger = Keeps(Refuses())
    logger.run_id = "1"
    callback = DataThroughputCallback(summary=False)
    with pytest.warns(FastDataWarning, match="report was not attached.*no room for files") as told:
        trainer = fit(tmp_path, callback, logger)
    assert trainer.state.finished
    assert (tmp_path / "report.json").exists()
    said = [str(each.message) for each in told if "not attached" in str(each.message)]
    assert len(said) == 1


def test_mlflow_keeps_the_report_of_each_method(tmp_path, monkeypatch):
    pytest.importorskip("mlflow")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    from lightning.pytorch.loggers import MLFlowLogger
    from mlflow import MlflowClient

    store = (tmp_path / "store").as_uri()
    logger = MLFlowLogger("reports", tracking_uri=store)
    callback = DataThroughputCallback(summary=False)
    trainer = fit(tmp_path, callback, logger)
    trainer.validate(Model(), DataLoader(Rows(), 4), verbose=False)
    client = MlflowClient(store)
    kept = {each.path for each in client.list_artifacts(logger.run_id) if "report" in each.path}
    assert kept == {f"report{m}.{s}" for m in ("", "-validate") for s in ("json", "html")}
    for name, stage in (("report.json", "train"), ("report-validate.json", "val")):
        file = Path(client.download_artifacts(logger.run_id, name, str(tmp_path)))
        assert stage in json.loads(file.read_text())["stages"]


def test_mlflow_keeps_nothing_where_no_report_is_written(tmp_path, monkeypatch):
    pytest.importorskip("mlflow")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    from lightning.pytorch.loggers import MLFlowLogger
    from mlflow import MlflowClient

    store = (tmp_path / "store").as_uri()
    logger = MLFlowLogger("reports", tracking_uri=store)
    fit(tmp_path, DataThroughputCallback(summary=False, report=False), logger)
    assert not any("report" in e.path for e in MlflowClient(store).list_artifacts(logger.run_id))


def test_wandb_keeps_the_report(tmp_path, monkeypatch):
    pytest.importorskip("wandb")
    from lightning.pytorch.loggers import WandbLogger

    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    logger = WandbLogger(project="reports", save_dir=tmp_path, offline=True)
    callback = DataThroughputCallback(summary=False)
    fit(tmp_path, callback, logger)
    folder = Path(logger.experiment.dir)
    logger.experiment.finish()
    told = json.loads((folder / "report.json").read_text())
    assert told["stages"]["train"]["steps"] == 2 * SAMPLES // 4
    assert (folder / "report.html").read_text().startswith("<!doctype html>")


def test_comet_keeps_the_report(tmp_path):
    """CometLogger(online=False) keeps nothing, so Comet's own offline experiment is asked."""
    comet = pytest.importorskip("comet_ml")
    from zipfile import ZipFile

    experiment = comet.OfflineExperiment(
        api_key="x" * 25, workspace="w", project_name="p", offline_directory=str(tmp_path)
    )
    fit(tmp_path, DataThroughputCallback(summary=False), Keeps(experiment))
    experiment.end()
    (archive,) = tmp_path.glob("*.zip")
    with ZipFile(archive) as files:
        written = b"".join(files.read(name) for name in files.namelist())
    assert b'"report.json"' in written
    assert b'"report.html"' in written


def test_lightnings_own_platform_still_takes_a_path():
    loggers = pytest.importorskip("lightning.pytorch.loggers.litlogger", reason="Lightning < 2.6")
    assert "path" in inspect.signature(loggers.LitLogger.log_file).parameters
