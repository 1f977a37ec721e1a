"""A run that never comes to its end has left its report, which says that it is not the end."""

from __future__ import annotations

import json

import pytest
import torch
from conformance.pieces import make_trainer
from front_door.timed import Model
from lightning.pytorch import Callback
from misses import each
from torch.utils.data import DataLoader

from lightning_fastdata import DataThroughputCallback


def run(folder, method, *callbacks, steps=80, step_s=0.0, **options):
    trainer = make_trainer(
        folder,
        callbacks=[DataThroughputCallback(**{"summary": False, **options}), *callbacks],
    )
    getattr(trainer, method)(Model(step_s), DataLoader(torch.zeros(steps, 4), 1))


class Looks(Callback):
    """Looks at a step of the only epoch at what a run that is killed there would leave."""

    def __init__(self, folder, name):
        self.folder, self.name = folder, name

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        if batch_idx == 60:
            self.report = json.loads((self.folder / f"{self.name}.json").read_text("utf-8"))
            self.drafts = list(self.folder.glob(".fastdata-*"))

    def on_predict_batch_end(self, trainer, pl_module, outputs, batch, batch_idx, dataloader_idx=0):
        self.on_train_batch_end(trainer, pl_module, outputs, batch, batch_idx)


@pytest.mark.usefixtures("virtual")
@each(("method", "name"), [("fit", "report"), ("predict", "report-predict")])
def test_a_run_that_is_killed_in_its_only_epoch_leaves_a_report(tmp_path, method, name):
    looks = Looks(tmp_path, name)
    run(tmp_path, method, looks)
    assert looks.report["ended"] is False
    (stage,) = looks.report["stages"].values()
    assert stage["steps"] == 50
    assert looks.report["verdict"]["code"]
    assert " so far" in looks.report["summary"][0]
    assert not looks.drafts


class Reads(Callback):
    """Keeps how many steps the report on disk knows of, after each step."""

    def __init__(self, file):
        self.file = file
        self.seen = []

    def on_train_batch_end(self, *_):
        if self.file.exists():
            report = json.loads(self.file.read_text(encoding="utf-8"))
            assert report["ended"] is False
            self.seen.append(report["stages"]["train"]["steps"])


def test_within_an_epoch_the_report_is_written_again_every_two_minutes(tmp_path, virtual):
    reads = Reads(tmp_path / "report.json")
    run(tmp_path, "fit", reads, steps=60, step_s=30.0)
    # Ours comes first: it has written when the other one reads.
    assert reads.seen == [4 * (step // 4) for step in range(4, 50)] + [
        50 + 4 * ((step - 50) // 4) for step in range(50, 61)
    ]
    report = json.loads((tmp_path / "report.json").read_text(encoding="utf-8"))
    assert report["ended"] is True
    assert report["stages"]["train"]["steps"] == 60


def test_within_two_minutes_it_is_written_after_fifty_steps_only(tmp_path, virtual):
    reads = Reads(tmp_path / "report.json")
    run(tmp_path, "fit", reads, steps=70, step_s=1.0)
    assert set(reads.seen) == {50}


@pytest.mark.parametrize("report", [True, False])
def test_nothing_is_written_where_no_report_is_wanted(tmp_path, virtual, report):
    run(tmp_path, "fit", report=report, steps=60, step_s=30.0)
    assert any(tmp_path.iterdir()) == report
