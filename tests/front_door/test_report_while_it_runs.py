"""A run that never comes to its end has left its report, which says that it is not the end."""

from __future__ import annotations

import json
import signal
import sys
from pathlib import Path

import pytest
import torch
from conformance.pieces import make_trainer
from lightning.pytorch import Callback, LightningModule
from programs import run_program
from torch.utils.data import DataLoader

from lightning_fastdata import DataThroughputCallback
from lightning_fastdata.host import clock


class Model(LightningModule):
    def __init__(self, step_s):
        super().__init__()
        self.layer, self.step_s = torch.nn.Linear(4, 1), step_s

    def training_step(self, batch, _):
        clock.sleep(self.step_s)
        return self.layer(batch).mean()

    def predict_step(self, batch, _):
        return self.layer(batch)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.01)


class KilledAt(Callback):
    """Ends its process without a word at a step of the only epoch."""

    def __init__(self, step):
        self.step = step

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        if batch_idx == self.step:
            signal.raise_signal(signal.SIGKILL)

    def on_predict_batch_end(self, trainer, pl_module, outputs, batch, batch_idx, dataloader_idx=0):
        self.on_train_batch_end(trainer, pl_module, outputs, batch, batch_idx)


def run(folder, method, *callbacks, steps=80, step_s=0.0, **options):
    trainer = make_trainer(
        folder,
        callbacks=[DataThroughputCallback(**{"summary": False, **options}), *callbacks],
    )
    getattr(trainer, method)(Model(step_s), DataLoader(torch.zeros(steps, 4), 1))


@pytest.mark.skipif(sys.platform == "win32", reason="has no SIGKILL")
@pytest.mark.parametrize(("method", "name"), [("fit", "report"), ("predict", "report-predict")])
def test_a_run_that_is_killed_in_its_only_epoch_leaves_a_report(tmp_path, method, name):
    script = tmp_path / "run.py"
    script.write_text(f"""
import sys
sys.path.insert(0, {str(Path(__file__).parents[1])!r})
from front_door.test_report_while_it_runs import KilledAt, run
from virtual_time import virtual_time
with virtual_time():
    run({str(tmp_path)!r}, {method!r}, KilledAt(60))
""")
    ended = run_program(script)
    assert ended.returncode == -signal.SIGKILL, ended.stderr
    report = json.loads((tmp_path / f"{name}.json").read_text(encoding="utf-8"))
    assert report["ended"] is False
    (stage,) = report["stages"].values()
    assert stage["steps"] == 50
    assert report["verdict"]["code"]
    page = (tmp_path / f"{name}.html").read_text(encoding="utf-8")
    assert " so far" in page
    assert page.endswith("</html>\n")
    assert not list(tmp_path.glob(".fastdata-*"))


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
