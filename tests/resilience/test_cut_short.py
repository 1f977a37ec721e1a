"""A training that was ended within an epoch goes on within it, from whichever file was written."""

from __future__ import annotations

from collections import Counter
from functools import cache

import pytest
import torch
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from misses import each
from resilience.cells import (
    BATCH,
    EPOCHS,
    LOADERS,
    SAMPLES,
    STEPS,
    Module,
    arguments_of,
    make_model,
    make_module,
)
from resilience.runs import (
    Images,
    Recorder,
    first_difference,
    lines,
    lines_before,
    train,
    warned,
)
from resilience.test_resumed_again import NEVER, StreamModule, lives
from torch.utils.data import DataLoader, SubsetRandomSampler
from trainers import trained

from lightning_fastdata import FastDataModule

pytestmark = [
    pytest.mark.filterwarnings("ignore::UserWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]

CUTS = ("max_steps", "should_stop")
SAVES = ("at the end of the epoch", "the last", "afterwards")
KINDS = (
    "plain", "accumulate", "validate twice", "number of steps asked", "reload", "max_size",
    "weighted sampler", "stream", "stream with a state",
)  # fmt: skip


class Asks(Callback):
    """Asks the trainer to stop when so many steps were recorded, as a timer does."""

    def __init__(self, at):
        self.at = at

    def on_train_batch_end(self, trainer, pl_module, *_):
        trainer.should_stop = trainer.should_stop or pl_module.lines >= self.at


def new(kind, file, loader="inline"):
    if kind.startswith("stream"):
        return Recorder(file), StreamModule(LOADERS[loader], stateful=kind != "stream")
    return make_model(kind, file), make_module(kind, loader)


@pytest.fixture(scope="module")
def straight(tmp_path_factory):
    @cache
    def record(kind):
        folder = tmp_path_factory.mktemp("straight")
        train(*new(kind, folder / "record"), folder, **arguments_of(kind))
        return lines(folder / "record")

    return record


def in_pieces(folder, kind, cut, save, batches, loaders):
    """The record of a training in pieces of so many batches, each gone on with from a file."""
    record, resume, arguments = [], None, arguments_of(kind)
    steps = 2 if "accumulate_grad_batches" in arguments else 1
    for piece in range(EPOCHS * STEPS + 1):
        own = folder / str(piece)
        own.mkdir(parents=True)
        model, data = new(kind, own / "record", loaders[piece % len(loaders)])
        callbacks, until = [], (piece + 1) * batches
        about = dict(arguments)
        if cut == "max_steps":
            about["max_steps"] = until // steps
        else:
            callbacks.append(Asks(until))
        if save != "afterwards":
            saves = {"save_last": True} if save == "the last" else {}
            callbacks.append(ModelCheckpoint(own, "saved", **saves))
        trainer = train(model, data, own, resume=resume, callbacks=callbacks, **about)
        got = lines(own / "record")
        record += got
        if len(got) < batches:
            return record
        resume = own / ("last.ckpt" if save == "the last" else "saved.ckpt")
        if save == "afterwards":
            trainer.save_checkpoint(resume)
        record = record[: lines_before(resume)]
    return record


CASES = [("plain", save, CUTS[at % 2], 8, ["inline"]) for at, save in enumerate(SAVES)]
CASES += [
    (kind, SAVES[at % 3], CUTS[(at + 1) % 2], 10, ["inline"]) for at, kind in enumerate(KINDS[1:])
]
CASES += [("stream with a state", "afterwards", "max_steps", 10, ["inline"])]
CASES += [
    (kind, "at the end of the epoch", "should_stop", 10, ["workers-1"])
    for kind in ("stream with a state", "plain")
]
CASES += [
    (kind, "the last", "max_steps", 1, ["inline", "workers-1", "torch-0"])
    for kind in ("plain", "deferred augment", "sampler with state")
]


@pytest.mark.cases(9)
@each(("kind", "save", "cut", "batches", "loaders"), CASES)
def test_pieces_that_any_loaders_read_are_the_whole(
    tmp_path, straight, kind, save, cut, batches, loaders
):
    got = in_pieces(tmp_path, kind, cut, save, batches, loaders)
    assert first_difference(got, straight(kind)) is None


def test_an_epoch_that_a_hook_ends_is_over(tmp_path):
    class Skips(Recorder):
        def on_train_batch_start(self, batch, batch_idx):
            return -1 if self.current_epoch == 0 and batch_idx == 2 else None

    def run(folder, resume=None, **about):
        folder.mkdir()
        data = Module(LOADERS["inline"], dataset=Images)
        saves = ModelCheckpoint(folder, "saved")
        train(Skips(folder / "record"), data, folder, resume=resume, callbacks=[saves], **about)
        return lines(folder / "record")

    whole = run(tmp_path / "straight", max_epochs=2)
    first = run(tmp_path / "first", max_epochs=2, max_steps=2)
    rest = run(tmp_path / "rest", tmp_path / "first" / "saved.ckpt", max_epochs=2)
    assert len(first) == 2
    assert first_difference(first + rest, whole) is None


def shuffled_by_a_generator():
    generator = torch.Generator().manual_seed(4)
    given = DataLoader(Images(SAMPLES), BATCH, shuffle=True, generator=generator)
    return FastDataModule.from_loaders(given)


def test_loaders_that_are_made_anew_behind_a_resume_draw_as_without_a_break(tmp_path):
    """Torch draws a seed from the generator with each iterator, of the later epochs, too."""
    about = {"max_epochs": EPOCHS, "reload_dataloaders_every_n_epochs": 1}
    train(Recorder(tmp_path / "whole"), shuffled_by_a_generator(), tmp_path, **about)
    save = ModelCheckpoint(tmp_path, "saved", every_n_train_steps=3)
    first = {**about, "callbacks": [save], "max_steps": 3}
    train(Recorder(tmp_path / "first"), shuffled_by_a_generator(), tmp_path, **first)
    rest = {**about, "resume": tmp_path / "saved.ckpt"}
    train(Recorder(tmp_path / "rest"), shuffled_by_a_generator(), tmp_path, **rest)
    got = lines(tmp_path / "first") + lines(tmp_path / "rest")
    assert first_difference(got, lines(tmp_path / "whole")) is None


class Renamed(Module):
    """Lightning finds no state of it in the checkpoint of another class."""


def cut_and_resumed(folder, at, data, first="plain", model=Recorder, **about):
    """The records of a run that is saved and ended at a step, and of one that goes on."""
    folder.mkdir()
    save = ModelCheckpoint(folder, "saved", every_n_train_steps=at)
    begun = model(folder / "first"), make_module(first, "inline")
    train(*begun, folder, callbacks=[save], max_steps=at)
    resume = folder / "saved.ckpt"
    train(model(folder / "rest"), data, folder, resume=resume, **about)
    return lines(folder / "first"), lines(folder / "rest")


@each("at", [1, 3, STEPS, STEPS + 2])
def test_a_checkpoint_without_our_state_is_gone_on_from_where_lightning_counted(
    tmp_path, straight, at
):
    first, rest = cut_and_resumed(tmp_path / "a", at, Renamed(LOADERS["inline"]))
    assert first_difference(first + rest, straight("plain")) is None


class AsksForSteps(Recorder):
    """Has Lightning make the loaders before it has restored its own counts."""

    def configure_optimizers(self):
        assert self.trainer.estimated_stepping_batches
        return super().configure_optimizers()


@pytest.mark.parametrize("model", [Recorder, AsksForSteps])
@each(("at", "size"), [(3, 2), (1, 8), (2, 8), (4, 8), (5, 8), (1, 3)])
def test_another_batch_size_leaves_out_no_sample_of_the_epoch(tmp_path, at, size, model):
    """Lightning counts batches, but what was read is a number of samples."""
    data = Module(LOADERS["inline"], batch_size=size)
    first, rest = cut_and_resumed(tmp_path / "a", at, data, model=model, max_epochs=1)
    read = [int(i) for line in first + rest for i in line.split(" ")[3].split(",")]
    assert sorted(read) == list(range(SAMPLES))


@pytest.mark.parametrize("mode", ["max_size", "max_size_cycle", "min_size"])
@each(("at", "size"), [(1, 8), (2, 8), (2, 2), (4, 8), (5, 8), (5, 3)])
def test_another_batch_size_ends_the_epoch_of_several_loaders_where_they_end(
    tmp_path, at, size, mode
):
    """The long one gives each of its samples once, or the short one, where the epoch ends by it."""
    data = Module(LOADERS["inline"], batch_size=size, mode=mode)
    first, rest = cut_and_resumed(tmp_path / "a", at, data, first=mode, max_epochs=1)
    times = Counter(int(i) for line in first + rest for i in line.split(" ")[3].split(","))
    if mode == "min_size" and at * BATCH < SAMPLES // 2:
        assert times.total() >= SAMPLES // 2 * 2
        assert all(n <= 1 + (i < SAMPLES // 2) for i, n in times.items())
    if mode != "min_size":
        assert [times[i] for i in range(SAMPLES // 2, SAMPLES)] == [1] * (SAMPLES // 2)


def drawn(length):
    return SubsetRandomSampler(range(length), generator=torch.Generator().manual_seed(4))


@pytest.mark.parametrize("sampler", [None, drawn])
@each(
    ("sizes", "steps"),
    [((4, 8, 8), (1, 0)), ((4, 8, 4), (1, 0)), ((4, 8, 8), (1, 1)), ((4, 22, 3), (2, 0)),
     ((4, 5, 2, 11), (2, 1, 1)), ((4, 8, 8, 8), (3, 1, 0))],
)  # fmt: skip
def test_batch_sizes_that_change_at_each_resume_leave_out_no_sample(
    tmp_path, sizes, steps, sampler
):
    """Also where the batches that are left are as many as those of a whole epoch."""
    planned = [("inline", "raised", after) for after in (*steps, NEVER)]
    left = list(sizes)

    def make(loader, file):
        data = Module(LOADERS[loader], batch_size=left.pop(0), sampler=sampler)
        return Recorder(file), data

    got, told = lives(tmp_path, make, planned, max_epochs=1)
    read = [int(i) for line in got for i in line.split(" ")[3].split(",")]
    assert sorted(read) == list(range(SAMPLES)), told


@pytest.mark.parametrize(
    ("first", "then"),
    [({"batch_size": 8}, {}), ({}, {"batch_size": 8}), ({}, {"length": SAMPLES + 9})],
)
def test_an_epoch_saved_in_its_validation_is_over_however_many_batches_it_has_now(
    tmp_path, first, then
):
    """Lightning knows that end from the number of batches, and would train on to the new one."""
    planned = [("inline", "on_validation_end", 1), ("inline", "raised", NEVER)]
    left = [first, then]

    def make(loader, file):
        return Recorder(file), Module(LOADERS[loader], **left.pop(0))

    got, _ = lives(tmp_path, make, planned, max_epochs=2, limit_val_batches=1)
    numbers = {"0": [], "1": []}
    for line in got:
        epoch, _, _, indices = line.split(" ")
        numbers[epoch] += map(int, indices.split(","))
    assert sorted(numbers["0"]) == list(range(SAMPLES))
    assert sorted(numbers["1"]) == list(range(then.get("length", SAMPLES)))


@each(("limit", "told"), [(2, True), (3, True), (5, False)])
def test_an_epoch_that_begins_anew_as_it_has_fewer_batches_now_is_told(tmp_path, limit, told):
    save = ModelCheckpoint(tmp_path, "saved", every_n_train_steps=3)
    begun = {"max_steps": 3, "enable_checkpointing": True, "callbacks": [save]}
    trained(Module(LOADERS["inline"]), folder=tmp_path, **begun)
    about = {"resume": tmp_path / "saved.ckpt", "limit_train_batches": limit}
    with warned() as texts:
        rest = trained(Module(LOADERS["inline"]), folder=tmp_path, **about)
    assert len(rest) == (limit if told else limit - 3)
    assert any("begins it anew" in text for text in texts) == told
