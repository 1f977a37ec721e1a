"""Stopped anywhere, in any way, a training goes on with what was left, byte for byte."""

from __future__ import annotations

import json
import signal
from functools import cache
from pathlib import Path

import pytest
from conformance.forked_ranks import launched
from lightning.pytorch.utilities.exceptions import SIGTERMException
from resilience.cells import (
    BEGINS_ANEW,
    EPOCHS,
    FEATURES,
    MOMENTS,
    STEPS,
    callbacks_of,
    cells,
    make_model,
    make_module,
)
from resilience.runs import Marks, Stop, first_difference, lines, lines_before, train
from thoroughness import LONG

pytestmark = [
    pytest.mark.filterwarnings("ignore::UserWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]

CELLS = cells(400 if LONG else 40)
KILLED = {
    "within an epoch": ("plain", "workers-2", 3),
    "at its last step": ("plain", "inline", STEPS),
    "with a deferred pipeline": ("deferred augment", "workers-1", 2),
}


@pytest.fixture(scope="module")
def straight(tmp_path_factory):
    """The record of a run that nothing disturbs; one serves all cells of its kind."""

    @cache
    def record(feature, loader):
        folder = tmp_path_factory.mktemp("straight")
        fit(feature, loader, folder, callbacks=[Marks(), *callbacks_of(feature, "first")])
        return lines(folder / "record")

    return record


def fit(feature, loader, folder, *, callbacks, resume=None, raising=None):
    model = make_model(feature, folder / "record")
    model.raising = raising
    arguments = {"max_epochs": EPOCHS, "limit_val_batches": 1, "num_sanity_val_steps": 0}
    arguments |= FEATURES[feature].get("trainer", {})
    train(
        model,
        make_module(feature, loader),
        folder,
        resume=resume,
        callbacks=callbacks,
        **arguments,
    )


def stopped(cell, folder):
    """Train until the cell's moment; return the newest checkpoint."""
    moment = MOMENTS[cell.moment]
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    callbacks = [*moment.callbacks(folder), *callbacks_of(cell.feature, "first")]
    raising = None if moment.raising is None else moment.raising()
    try:
        fit(cell.feature, cell.loader, folder, callbacks=callbacks, raising=raising)
    except (Stop, SystemExit, SIGTERMException):
        pass
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
    return max(folder.glob("*.ckpt"), key=lambda file: file.stat().st_mtime_ns)


@pytest.mark.parametrize("cell", CELLS, ids="; ".join)
def test_what_is_left_is_what_was_left(tmp_path, straight, cell):
    before, after = tmp_path / "before", tmp_path / "after"
    before.mkdir()
    after.mkdir()
    checkpoint = stopped(cell, before)
    kept = lines_before(checkpoint)
    whole = straight(cell.feature, "gather-1" if "gather" in cell.loader else "inline")
    assert len(whole) >= EPOCHS * STEPS // 2
    assert first_difference(lines(before / "record")[:kept], whole[:kept]) is None
    fit(
        cell.feature,
        cell.then,
        after,
        resume=checkpoint,
        callbacks=callbacks_of(cell.feature, "later"),
    )
    left = whole if cell.feature in BEGINS_ANEW else whole[kept:]
    rest = lines(after / "record")
    assert first_difference(rest, left) is None, f"after {kept} of {len(whole)} steps"


@pytest.fixture(scope="module")
def killed(tmp_path_factory):
    folder = tmp_path_factory.mktemp("killed")
    launched(Path(__file__).with_name("killed.py"), str(folder), json.dumps(KILLED))
    return folder


@pytest.mark.parametrize("case", KILLED)
def test_a_training_that_was_killed_goes_on_from_its_last_checkpoint(
    tmp_path, straight, killed, case
):
    feature, loader, at = KILLED[case]
    whole = straight(feature, "inline")
    # A step was taken after the checkpoint, which the resumed run takes again.
    assert first_difference(lines(killed / case / "record"), whole[: at + 1]) is None
    fit(feature, loader, tmp_path, resume=killed / case / f"step={at}.ckpt", callbacks=[])
    assert first_difference(lines(tmp_path / "record"), whole[at:]) is None
