"""Stopped anywhere, in any way, a training goes on with what was left, byte for byte."""

from __future__ import annotations

import signal
from functools import cache

import pytest
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.utilities.exceptions import SIGTERMException
from resilience.cells import (
    BEGINS_ANEW,
    EPOCHS,
    FEATURES,
    LOADERS,
    MOMENTS,
    SAMPLES,
    STEPS,
    Cell,
    Module,
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

CELLS = cells(2000 if LONG else 10)


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


@pytest.mark.cases(3)
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


@pytest.mark.cases(1)
@pytest.mark.parametrize("feature", ["plain", "deferred augment", "sampler with state"])
@pytest.mark.parametrize("loaders", [["inline"], ["inline", "workers-1", "torch-0"]])
def test_a_training_that_is_stopped_after_each_step_is_the_straight_one(
    tmp_path, straight, feature, loaders
):
    whole = straight(feature, "inline")
    file = None
    for steps in range(1, len(whole) + 1):
        save = ModelCheckpoint(tmp_path, "{step}", every_n_train_steps=steps, save_top_k=-1)
        how = {"max_steps": steps, "limit_val_batches": 1, "num_sanity_val_steps": 0}
        model = make_model(feature, tmp_path / "record")
        data = make_module(feature, loaders[steps % len(loaders)])
        train(model, data, tmp_path, resume=file, callbacks=[save], **how)
        file = tmp_path / f"step={steps}.ckpt"
    assert first_difference(lines(tmp_path / "record"), whole) is None


class Renamed(Module):
    """Lightning finds no state of it in the checkpoint of another class."""


@pytest.mark.parametrize("at", [1, 3, STEPS, STEPS + 2])
def test_a_checkpoint_without_our_state_is_gone_on_from_where_lightning_counted(
    tmp_path, straight, at
):
    whole = straight("plain", "inline")
    (tmp_path / "a").mkdir()
    file = stopped(Cell("plain", f"step {at}", "inline", None), tmp_path / "a")
    train(
        make_model("plain", tmp_path / "record"), Renamed(LOADERS["inline"]), tmp_path, resume=file
    )
    assert first_difference(lines(tmp_path / "record"), whole[at:]) is None


@pytest.mark.parametrize(("at", "size"), [(3, 2), (2, 8), (4, 8), (5, 8), (1, 3)])
def test_another_batch_size_leaves_out_no_sample_of_the_epoch(tmp_path, at, size):
    """Lightning counts batches, but what was read is a number of samples."""
    save = ModelCheckpoint(tmp_path, "{step}", every_n_train_steps=at, save_top_k=-1)
    train(
        make_model("plain", tmp_path / "before"),
        Module(LOADERS["inline"]),
        tmp_path,
        callbacks=[save],
        max_steps=at,
    )
    train(
        make_model("plain", tmp_path / "after"),
        Module(LOADERS["inline"], batch_size=size),
        tmp_path,
        resume=tmp_path / f"step={at}.ckpt",
        max_epochs=1,
    )
    record = lines(tmp_path / "before") + lines(tmp_path / "after")
    read = [int(i) for line in record for i in line.split(" ")[3].split(",")]
    assert sorted(read) == list(range(SAMPLES))
