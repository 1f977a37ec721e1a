"""What loggers get of a run: the same as TensorBoard, few scalars, seldom enough, and the report.

One training has every logger at once, offline.
"""

from __future__ import annotations

import csv
import inspect
import json
import os
import re
from importlib.util import find_spec
from pathlib import Path
from zipfile import ZipFile

import numpy as np
import pytest
from front_door.timed import Model, Rows
from lightning.pytorch import Callback, loggers
from lightning.pytorch.loggers import CSVLogger, Logger, TensorBoardLogger
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch.utils.data import DataLoader
from trainers import quiet_trainer

from lightning_fastdata import (
    DataThroughputCallback,
    FastDataLoader,
    FastDataModule,
    LoaderOptions,
)
from lightning_fastdata.errors import FastDataWarning
from lightning_fastdata.host import clock

OFFLINE = {
    "WANDB_MODE": "offline",
    "WANDB_SILENT": "true",
    "WANDB_ERROR_REPORTING": "false",
    "MLFLOW_ALLOW_FILE_STORE": "true",
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "DO_NOT_TRACK": "true",
    "COMET_START_ONLINE": "false",
    "COMET_DISABLE_AUTO_LOGGING": "1",
    "COMET_LOGGING_CONSOLE": "ERROR",
}
PACKAGES = {"wandb": "wandb", "mlflow": "mlflow", "comet": "comet_ml"}
EPOCHS, BATCHES = 2, 8
SAMPLES = 64


def made(folder):
    """Return every logger whose package is there."""
    known = {
        "tensorboard": lambda: loggers.TensorBoardLogger(folder / "board"),
        "csv": lambda: loggers.CSVLogger(folder / "table"),
        "wandb": lambda: loggers.WandbLogger(project="p", save_dir=folder, offline=True),
        "mlflow": lambda: loggers.MLFlowLogger("e", tracking_uri=(folder / "mlflow").as_uri()),
        "comet": lambda: loggers.CometLogger(
            workspace="w", project="p", offline_directory=str(folder / "comet"), log_code=False,
            log_env_details=False,
        ),
    }  # fmt: skip
    return {
        name: make()
        for name, make in known.items()
        if name not in PACKAGES or find_spec(PACKAGES[name]) is not None
    }


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """Return the folder of a training and its loggers, which have closed their files."""
    folder = tmp_path_factory.mktemp("loggers")
    patch = pytest.MonkeyPatch()
    patch.chdir(folder)
    for name, value in OFFLINE.items():
        patch.setenv(name, value)
    try:
        ours = made(folder)
        callback = DataThroughputCallback(summary=False, every_n_steps=3)
        trainer = quiet_trainer(
            folder,
            max_epochs=EPOCHS,
            logger=list(ours.values()),
            num_sanity_val_steps=0,
            callbacks=[callback],
        )
        trainer.fit(Model(), FastDataLoader(Rows(), 4, num_workers=0), DataLoader(Rows(), 4))
        if "wandb" in ours:
            import wandb

            ours["wandb"].experiment.finish()
            wandb.teardown()
        if "comet" in ours:
            ours["comet"].experiment.end()
        yield folder, ours
    finally:
        patch.undo()


def logger_of(trained, name):
    if name in PACKAGES:
        pytest.importorskip(PACKAGES[name])
    return trained[1][name]


def board_of(trained):
    sizes = {"images": 0, "tensors": 0, "scalars": 0}
    return EventAccumulator(trained[1]["tensorboard"].log_dir, size_guidance=sizes).Reload()


def is_ours(name):
    return name.startswith("data")


# What a logger has kept: (name, step, value) of each scalar.


def of_tensorboard(trained):
    events = board_of(trained)
    for name in filter(is_ours, events.Tags()["scalars"]):
        yield from ((name, event.step, event.value) for event in events.Scalars(name))


def of_csv(trained):
    with (Path(logger_of(trained, "csv").log_dir) / "metrics.csv").open() as file:
        for row in csv.DictReader(file):
            for name, value in row.items():
                if is_ours(name) and value:
                    yield name, int(row["step"]), float(value)


def test_a_logger_that_knows_scalars_alone_keeps_those_of_tensorboard(trained):
    def rounded(kept):
        return sorted((tag, step, np.float32(value).item()) for tag, step, value in kept)

    board = rounded(of_tensorboard(trained))
    names = {tag for tag, *_ in board}
    assert {"data/stall_percent", "data_val/stall_percent"} <= names
    assert len(names) > 10
    assert {step for tag, step, _ in board if tag == "data/step_ms"} == {2, 5, 8, 11, 14}
    assert rounded(of_csv(trained)) == board


# What a logger shows besides: its texts, and how many pictures.


def shown_by_wandb(trained):
    (files,) = trained[0].glob("wandb/offline-run-*/files")
    tables = sorted(files.glob("media/table/data/verdict*.json"), key=os.path.getmtime)
    texts = [json.loads(table.read_text())["data"][0][0] for table in tables]
    return texts, len(list(files.glob("media/images/**/*.png")))


def shown_by_mlflow(trained):
    logger = trained[1]["mlflow"]
    folder = Path(logger.experiment.download_artifacts(logger.run_id, ""))
    texts = sorted(folder.glob("data/verdict_*.md"), key=os.path.getmtime)
    return [text.read_text() for text in texts], len(list(folder.glob("**/*.png")))


def shown_by_comet(trained):
    (archive,) = (trained[0] / "comet").glob("*.zip")
    with ZipFile(archive) as files:
        messages = map(json.loads, files.read("messages.json").splitlines())
        uploads = [each["payload"] for each in messages if each["type"] == "file_upload"]
        texts = [
            files.read(Path(each["file_path"]).name).decode()
            for each in uploads
            if each["upload_type"] == "text-sample"
        ]
    return texts, sum(each["upload_type"] == "visualization" for each in uploads)


SHOWN = {"wandb": shown_by_wandb, "mlflow": shown_by_mlflow, "comet": shown_by_comet}


@pytest.mark.parametrize("name", SHOWN)
def test_loggers_with_a_place_for_them_show_texts_and_pictures(trained, name):
    logger_of(trained, name)
    events = board_of(trained)
    told = events.Tensors("data/verdict/text_summary")
    verdicts = [(event.step, event.tensor_proto.string_val[0].decode()) for event in told]
    pictures = sum(len(events.Images(tag)) for tag in events.Tags()["images"])
    assert verdicts
    assert pictures == EPOCHS  # a figure for each
    texts, shown = SHOWN[name](trained)
    # MLflow keeps texts as files, named by their step.
    assert texts == [text for _, text in (dict(verdicts).items() if name == "mlflow" else verdicts)]
    assert shown == pictures


def test_wandb_keeps_the_report(trained):
    logger_of(trained, "wandb")
    (files,) = trained[0].glob("wandb/offline-run-*/files")
    told = json.loads((files / "report.json").read_text())
    assert told["stages"]["train"]["steps"] == EPOCHS * BATCHES
    assert (files / "report.html").read_text().startswith("<!doctype html>")


# How many scalars there are, how often they are logged, and the report as files.


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
    rows = Rows(SAMPLES, 0.001)
    module = FastDataModule.from_datasets(rows, rows, batch_size=4, options=loading)
    trainer.fit(Model(), datamodule=module)
    return trainer


def layout_tags(events):
    """Return all tags that the layout of custom scalars names."""
    (event,) = events.Tensors("custom_scalars__config__")
    text = event.tensor_proto.string_val[0].decode("utf-8", "replace")
    return set(re.findall(r"data[_a-z0-9]*/[_a-z0-9]+", text))


def test_loggers_get_twenty_scalars_at_most(tmp_path):
    board = TensorBoardLogger(tmp_path)
    fit(tmp_path, DataThroughputCallback(summary=False, report=False, every_n_steps=4), board)
    events = EventAccumulator(str(board.log_dir), size_guidance={"tensors": 0}).Reload()
    logged = set(filter(is_ours, events.Tags()["scalars"]))
    looked_at = {
        "data/stall_percent",
        "data/step_ms",
        "data/throughput_samples_per_s",
        "data/time_compute_ms",
        "data/time_wait_ms",
        "data/throughput_if_data_were_free_samples_per_s",
        "data_run/samples_per_s",
        "data_run/steps_percent",
        "data_val/stall_percent",
    }
    assert looked_at <= logged
    assert any(tag.startswith("data_wait/read") for tag in logged)
    assert layout_tags(events) <= logged
    assert len(logged) <= 20


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


def test_comet_keeps_the_report(tmp_path):
    """CometLogger(online=False) keeps nothing, so Comet's own offline experiment is asked."""
    comet = pytest.importorskip("comet_ml")
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
