"""Of several loaders, the verdict names the one to change, by the key that the user gave it."""

from __future__ import annotations

import pytest
import torch
from front_door.timed import Model, Rows
from lightning.pytorch.utilities import CombinedLoader
from misses import each
from torch.utils.data import DataLoader
from trainers import quiet_trainer

from lightning_fastdata import DataThroughputCallback, FastDataLoader
from lightning_fastdata.host import clock

STEPS, BATCH = 24, 4
SLOW_MS, QUICK_MS = 24.0, 1.0
"""To read a batch."""

pytestmark = pytest.mark.usefixtures("virtual")


def rows(batch_ms, batches=STEPS):
    return Rows(batches * BATCH, batch_ms / 1e3 / BATCH)


def loader(batch_ms=QUICK_MS, batches=STEPS, workers=0, **options):
    return FastDataLoader(rows(batch_ms, batches), BATCH, num_workers=workers, **options)


def slow(**options):
    return loader(SLOW_MS, **options)


def fit(folder, train, val=None, **options):
    """Return the report of a training; a function is the model's own ``train_dataloader``."""
    callback, model = DataThroughputCallback(summary=False), Model(0.002)
    if callable(train):
        model.train_dataloader, train = train, None
    trainer = quiet_trainer(folder, callbacks=[callback], num_sanity_val_steps=0, **options)
    trainer.fit(model, train, val)
    return callback.report


def named(report):
    """Return the loaders that causes are told of."""
    causes = [each.cause for each in report.verdict.findings]
    return {cause.partition(": ")[0] for cause in causes if cause.startswith("loader")}


@pytest.mark.parametrize("mode", ["max_size_cycle", "min_size", "max_size"])
def test_the_slow_one_of_several_loaders_is_named_by_its_key(tmp_path, mode):
    train = CombinedLoader({"text": loader(), "images": slow()}, mode)
    report = fit(tmp_path, train)
    assert named(report) == {"loader 'images'"}
    first = report.verdict.findings[0]
    assert first.remedy.startswith("loader 'images': FastDataLoader(num_workers=")
    assert first.gain.factor > 1


@pytest.mark.cases(3)
@pytest.mark.parametrize("own", [True, False])
@pytest.mark.parametrize(
    ("train", "label"),
    [
        (lambda: {"a": slow(), "b": loader()}, "loader 'a'"),
        (lambda: [loader(), slow()], "loader 1"),
        (lambda: {"pair": [loader(), slow()], "c": loader()}, "loader 'pair'[1]"),
    ],
)
def test_loaders_are_called_as_they_were_written(tmp_path, train, label, own):
    assert named(fit(tmp_path, train if own else train())) == {label}


def test_a_single_loader_is_told_without_a_name(tmp_path):
    for train in (slow(), {"only": slow()}, CombinedLoader([slow()])):
        assert not named(fit(tmp_path, train))


def test_what_the_costly_loader_says_of_itself_counts_and_not_what_the_first_one_does(tmp_path):
    report = fit(tmp_path, {"quick": loader(workers=2), "slow": slow()})
    assert any(each.startswith("loader 'slow': 0 workers,") for each in report.verdict.evidence)


@each("ours", [True, False])
def test_where_one_of_several_takes_no_stamps_nobody_knows_which_is_late(tmp_path, ours):
    plain = DataLoader(rows(SLOW_MS), BATCH, num_workers=0)
    other = loader() if ours else DataLoader(rows(SLOW_MS), BATCH, num_workers=0)
    report = fit(tmp_path, {"other": other, "plain": plain})
    assert report.stages[0].causes is None
    found = report.verdict.findings[0]
    assert found.code == "FD101"
    assert found.remedy.startswith("loader 'other' or loader 'plain': num_workers")
    assert any("late is not known for train: a DataLoader does not tell" in n for n in report.notes)


def test_two_loaders_that_are_as_slow_gain_little_if_one_of_them_is_changed(tmp_path):
    report = fit(tmp_path, {"a": slow(), "b": slow()})
    (slowest,) = named(report)
    told = [each for each in report.verdict.findings if each.remedy.startswith(slowest)]
    assert told
    for found in told:
        # The other one reads for as long as before.
        assert found.gain is None or found.gain.after_ms >= SLOW_MS


def test_of_several_validation_loaders_the_costly_one_is_named(tmp_path):
    report = fit(tmp_path, loader(workers=0), [loader(workers=0), slow(workers=0)])
    found = {each.code: each for each in report.verdict.findings}["FD318"]
    assert "validation's loader 1" in found.remedy


def test_loaders_that_are_made_anew_each_epoch_go_on_under_their_keys(tmp_path):
    def train():
        return {"a": loader(batches=6), "b": loader(SLOW_MS, 6)}

    report = fit(tmp_path, train, max_epochs=3, reload_dataloaders_every_n_epochs=1)
    assert report.stages[0].causes.batches == 2 * 3 * 5
    assert "loader 'b'" in named(report)
    assert "loader 'a'" not in report.text()


class Collates:
    """Puts a batch together in some time."""

    def __init__(self, batch_ms):
        self.batch_ms = batch_ms

    def __call__(self, samples):
        clock.sleep(self.batch_ms / 1e3)
        return torch.stack(samples)


def test_no_loader_is_told_of_what_another_one_does(tmp_path):
    train = {
        "text": loader(collate_fn=Collates(20.0)),
        "images": loader(14.0, collate_fn=Collates(10.0)),
    }
    report = fit(tmp_path, train)
    # Of all that is waited for, two thirds is collating, but not of the waits for images.
    assert report.stages[0].causes.wait.collate_ms > 0.6 * report.stages[0].causes.wait.total_ms
    # On a busy machine other programs are told as well.
    found = [each for each in report.verdict.findings if each.code != "FD315"]
    (cause,) = [each.cause for each in found if each.cause.startswith("loader 'images'")]
    assert "collating" not in cause
    # And to read them costs half of a step, as the other half is spent on the text.
    step, own_ms = report.stages[0].step.mean_ms, 24.0
    assert f"costs {own_ms / step:.0%} of each step" in cause
