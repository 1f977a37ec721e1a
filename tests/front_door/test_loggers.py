"""One training with every logger at once, offline: what each has kept is what TensorBoard has."""

from __future__ import annotations

import csv
import json
import os
import struct
from importlib.util import find_spec
from pathlib import Path
from zipfile import ZipFile

import numpy as np
import pytest
import torch
from lightning.pytorch import LightningModule, loggers
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch.utils.data import DataLoader, Dataset
from trainers import quiet_trainer

from lightning_fastdata import DataThroughputCallback, FastDataLoader

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


class Rows(Dataset):
    def __len__(self):
        return 4 * BATCHES

    def __getitem__(self, index):
        return torch.full((3, 8, 8), float(index) / 64), index


class Model(LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(192, 1)

    def training_step(self, batch, _):
        return self.layer(batch[0].flatten(1)).mean()

    def validation_step(self, batch, _):
        self.log("own/val", self.layer(batch[0].flatten(1)).mean())

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.01)


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
        callback = DataThroughputCallback(
            summary=False, scalars="all", every_n_steps=3, log_images=2
        )
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


def of_wandb(trained):
    logger_of(trained, "wandb")
    for row in wandb_history(trained[0]):
        for name, value in row.items():
            if is_ours(name) and isinstance(value, int | float):
                yield name, row["trainer/global_step"], value


def of_mlflow(trained):
    logger = logger_of(trained, "mlflow")
    client = logger.experiment
    for name in filter(is_ours, client.get_run(logger.run_id).data.metrics):
        for metric in client.get_metric_history(logger.run_id, name):
            yield name, metric.step, metric.value


def of_comet(trained):
    logger_of(trained, "comet")
    for message in comet_messages(trained[0]):
        metric = message["payload"].get("metric")
        if metric is not None and is_ours(metric["metricName"]):
            yield metric["metricName"], metric["step"], float(metric["metricValue"])


def comet_messages(folder):
    """Return what Comet would upload."""
    (archive,) = (folder / "comet").glob("*.zip")
    with ZipFile(archive) as files:
        return [json.loads(line) for line in files.read("messages.json").splitlines()]


def wandb_history(folder):
    """Yield each row of the run's history from the file that ``wandb sync`` would upload.

    W&B has nothing public that reads it. The file is a log as LevelDB writes them: blocks of 32 KiB
    with pieces of records, each behind its checksum, length and place in the record.
    """
    from wandb.proto.wandb_internal_pb2 import Record

    (file,) = folder.glob("wandb/offline-run-*/*.wandb")
    data, at, whole = file.read_bytes(), 7, b""
    assert data.startswith(b":W&B")
    while at < len(data):
        if 32768 - at % 32768 < 7:  # no piece fits what is left of the block
            at += 32768 - at % 32768
            continue
        _, length, place = struct.unpack_from("<IHB", data, at)
        assert 1 <= place <= 4
        whole += data[at + 7 : at + 7 + length]
        at += 7 + length
        if place in (1, 4):  # all of a record, or its last piece
            record, whole = Record.FromString(whole), b""
            # Parts of pictures and tables have names of several words.
            items = [each for each in record.history.item if len(each.nested_key) < 2]
            if items:
                yield {i.key or i.nested_key[0]: json.loads(i.value_json) for i in items}


KEPT = {"csv": of_csv, "wandb": of_wandb, "mlflow": of_mlflow, "comet": of_comet}


@pytest.mark.cases(2)
@pytest.mark.parametrize("name", KEPT)
def test_every_logger_keeps_the_scalars_of_tensorboard(trained, name):
    def rounded(kept):
        return sorted((tag, step, np.float32(value).item()) for tag, step, value in kept)

    board = rounded(of_tensorboard(trained))
    names = {tag for tag, *_ in board}
    assert {"data/stall_percent", "data_val/stall_percent"} <= names
    assert len(names) > 40
    assert {step for tag, step, _ in board if tag == "data/step_ms"} == {2, 5, 8, 11, 14}
    assert rounded(KEPT[name](trained)) == board


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
    uploads = [
        message["payload"]
        for message in comet_messages(trained[0])
        if message["type"] == "file_upload"
    ]
    with ZipFile(archive) as files:
        texts = [
            files.read(Path(each["file_path"]).name).decode()
            for each in uploads
            if each["upload_type"] == "text-sample"
        ]
    return texts, sum(each["upload_type"] == "visualization" for each in uploads)


def newest_of_each_step(events):
    """MLflow keeps texts as files, named by their step."""
    verdicts = events.Tensors("data/verdict/text_summary")
    return list({e.step: e.tensor_proto.string_val[0].decode() for e in verdicts}.values())


SHOWN = {"wandb": shown_by_wandb, "mlflow": shown_by_mlflow, "comet": shown_by_comet}


@pytest.mark.parametrize("name", SHOWN)
def test_loggers_with_a_place_for_them_show_texts_and_pictures(trained, name):
    logger_of(trained, name)
    events = board_of(trained)
    verdicts = [
        event.tensor_proto.string_val[0].decode()
        for event in events.Tensors("data/verdict/text_summary")
    ]
    pictures = sum(len(events.Images(tag)) for tag in events.Tags()["images"])
    assert verdicts
    assert pictures == EPOCHS + 1  # a figure for each epoch, and the first batch
    texts, shown = SHOWN[name](trained)
    assert texts == (verdicts if name != "mlflow" else newest_of_each_step(events))
    assert shown == pictures
