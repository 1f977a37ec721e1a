"""Scalars written in one event are those that the logger itself would have written."""

from __future__ import annotations

import pytest
import pytorch_lightning
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.backend.event_processing.event_file_loader import EventFileLoader

from lightning_fastdata.plugin.loggers.boards import log_to, write_scalars

SCALARS = {"data/step_ms": 78.25, "data/stall_percent": float("nan"), "data_wait/idle_ms": 0.0}


def shown(logger):
    logger.finalize("success")
    events = EventAccumulator(logger.log_dir).Reload()
    return {
        tag: [(event.step, repr(event.value)) for event in events.Scalars(tag)]
        for tag in events.Tags()["scalars"]
    }


@pytest.mark.parametrize("kind", [TensorBoardLogger, pytorch_lightning.loggers.TensorBoardLogger])
def test_a_board_shows_the_same_and_gets_one_event_for_a_step(tmp_path, kind):
    ours = kind(tmp_path, name="ours", version=0)
    theirs = kind(tmp_path, name="theirs", version=0)
    for step in (49, 99):
        assert write_scalars(ours, SCALARS, step)
        theirs.log_metrics(SCALARS, step=step)
    assert shown(ours) == shown(theirs)
    (file,) = (tmp_path / "ours/version_0").glob("events*")
    steps = [event.step for event in EventFileLoader(str(file)).Load() if event.summary.value]
    assert steps == [49, 99]


def test_a_prefix_stays(tmp_path):
    logger = TensorBoardLogger(tmp_path, prefix="mine")
    log_to([logger], SCALARS, 1)
    assert set(shown(logger)) == {f"mine-{tag}" for tag in SCALARS}


def test_a_log_metrics_that_somebody_wrote_is_asked(tmp_path):
    class Noting(TensorBoardLogger):
        def log_metrics(self, metrics, step=None):
            self.noted = metrics, step

    logger = Noting(tmp_path)
    log_to([logger], SCALARS, 3)
    assert logger.noted == (SCALARS, 3)


def test_other_loggers_are_asked(tmp_path):
    assert not write_scalars(CSVLogger(tmp_path), SCALARS, 3)
