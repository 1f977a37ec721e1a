"""Of several loaders, the verdict names the one to change, by the key that the user gave it."""

from __future__ import annotations

import json

import pytest
import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.utilities import CombinedLoader
from torch.utils.data import DataLoader, Dataset
from trainers import quiet_trainer

from lightning_fastdata import DataThroughputCallback, FastDataLoader
from lightning_fastdata.host import clock

STEPS, BATCH = 24, 4
SLOW_MS, QUICK_MS = 24.0, 1.0
"""To read a batch."""

pytestmark = pytest.mark.usefixtures("virtual")


class Rows(Dataset):
    def __init__(self, batch_ms=QUICK_MS, batches=STEPS):
        self.read_s, self.count = batch_ms / 1e3 / BATCH, batches * BATCH

    def __len__(self):
        return self.count

    def __getitem__(self, index):
        clock.sleep(self.read_s)
        return torch.full((4,), float(index))


def loader(batch_ms=QUICK_MS, batches=STEPS, workers=0, **options):
    return FastDataLoader(Rows(batch_ms, batches), BATCH, num_workers=workers, **options)


def slow(**options):
    return loader(SLOW_MS, **options)


class Model(LightningModule):
    def __init__(self, train=None):
        super().__init__()
        self.layer = torch.nn.Linear(4, 1)
        if train is not None:
            self.train_dataloader = lambda: train

    def training_step(self, batch, _):
        clock.sleep(0.002)
        leaves, _ = torch.utils._pytree.tree_flatten(batch)
        return sum(self.layer(each).mean() for each in leaves if each is not None)

    def validation_step(self, batch, _, dataloader_idx=0):
        self.log("val", self.layer(batch).mean())

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.01)


def fit(folder, train, val=None, *, own=False, epochs=1):
    callback = DataThroughputCallback(summary=False)
    trainer = quiet_trainer(folder, max_epochs=epochs, callbacks=[callback], num_sanity_val_steps=0)
    trainer.fit(Model(train if own else None), None if own else train, val)
    return callback.report


def named(report):
    """Return the loaders that causes are told of."""
    causes = [each.cause for each in report.verdict.findings]
    return {cause.partition(": ")[0] for cause in causes if cause.startswith("loader")}


def waits_of(report, stage=0):
    return {each.name: each.wait_ms for each in report.stages[stage].loaders}


def flat(report):
    return " ".join(report.text().split())


@pytest.mark.parametrize("mode", ["max_size_cycle", "min_size", "max_size"])
def test_the_slow_one_of_several_loaders_is_named_by_its_key(tmp_path, mode):
    train = CombinedLoader({"text": loader(), "images": slow()}, mode)
    report = fit(tmp_path, train)
    assert list(waits_of(report)) == ["text", "images"]
    assert waits_of(report) == pytest.approx({"text": QUICK_MS, "images": SLOW_MS})
    assert named(report) == {"loader 'images'"}
    first = report.verdict.findings[0]
    assert first.remedy.startswith("loader 'images': FastDataLoader(num_workers=")
    assert first.gain.factor > 1


@pytest.mark.cases(3)
@pytest.mark.parametrize("own", [True, False])
@pytest.mark.parametrize(
    ("train", "label", "names"),
    [
        (lambda: {"a": slow(), "b": loader()}, "loader 'a'", ["a", "b"]),
        (lambda: [loader(), slow()], "loader 1", ["0", "1"]),
        (
            lambda: {"pair": [loader(), slow()], "c": loader()},
            "loader 'pair'[1]",
            ["pair[0]", "pair[1]", "c"],
        ),
    ],
)
def test_loaders_are_called_as_they_were_written(tmp_path, train, label, names, own):
    report = fit(tmp_path, train(), own=own)
    assert list(waits_of(report)) == names
    assert named(report) == {label}


def test_the_waits_of_all_loaders_add_up_to_that_of_the_step(tmp_path):
    report = fit(tmp_path, {"a": loader(9.0), "b": slow(), "c": loader()}, epochs=2)
    (stage,) = report.stages
    waits = waits_of(report)
    assert waits == pytest.approx({"a": 9.0, "b": SLOW_MS, "c": QUICK_MS})
    assert sum(waits.values()) == pytest.approx(stage.wait.mean_ms)
    for each in stage.loaders:
        assert each.causes.wait.total_ms == pytest.approx(each.wait_ms)
        assert each.batches == 2 * (STEPS - 1)
    # What is told of the stage is told of the loader that is waited for most.
    costliest = max(stage.loaders, key=lambda each: each.wait_ms)
    assert stage.causes == costliest.causes


def test_the_report_and_the_summary_list_each_wait(tmp_path):
    report = fit(tmp_path, {"images": slow(), "text": loader()})
    waits = waits_of(report)
    line = f"waits: images {waits['images']:.1f} ms, text {waits['text']:.1f} ms"
    assert line in flat(report)
    saved = json.loads((tmp_path / "report.json").read_text())
    assert saved["schema_version"] >= 5
    listed = saved["stages"]["train"]["loaders"]
    assert [each["name"] for each in listed] == ["images", "text"]
    assert listed[0]["wait_ms"] == pytest.approx(waits["images"])
    assert listed[0]["causes"]["wait"]["read_blocked_ms"] == pytest.approx(SLOW_MS)


def test_a_single_loader_is_told_without_a_name(tmp_path):
    for train in (slow(), {"only": slow()}, CombinedLoader([slow()])):
        report = fit(tmp_path, train)
        assert report.stages[0].loaders == ()
        assert "waits:" not in report.text()
        assert not named(report)


def test_what_the_costly_loader_says_of_itself_counts_and_not_what_the_first_one_does(tmp_path):
    report = fit(tmp_path, {"quick": loader(workers=2), "slow": slow()})
    assert any(each.startswith("loader 'slow': 0 workers,") for each in report.verdict.evidence)


def test_a_loader_without_stamps_is_waited_for_for_the_rest(tmp_path):
    plain = DataLoader(Rows(SLOW_MS), BATCH, num_workers=0)
    report = fit(tmp_path, {"ours": loader(), "plain": plain})
    waits = waits_of(report)
    assert waits == pytest.approx({"ours": QUICK_MS, "plain": SLOW_MS})
    assert report.stages[0].loaders[1].causes is None
    found = report.verdict.findings[0]
    assert found.code == "FD101"
    assert found.remedy.startswith("loader 'plain': num_workers")
    assert any("batches of loader 'plain' were late is not known" in n for n in report.notes)


def test_of_several_loaders_without_stamps_all_may_be_meant(tmp_path):
    loaders = {key: DataLoader(Rows(SLOW_MS), BATCH, num_workers=0) for key in ("a", "b")}
    found = fit(tmp_path, loaders).verdict.findings[0]
    assert found.remedy.startswith("loader 'a' or loader 'b': num_workers")


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
    waits = waits_of(report, stage=1)
    # A mean over the steps of both.
    steps = 2 * STEPS - 1  # without the first one
    assert waits == pytest.approx(
        {"0": (STEPS - 1) * QUICK_MS / steps, "1": STEPS * SLOW_MS / steps}
    )
    assert sum(waits.values()) == pytest.approx(report.stages[1].wait.mean_ms)
    found = {each.code: each for each in report.verdict.findings}["FD318"]
    assert "validation's loader 1" in found.remedy
    assert f"waits: 0 {waits['0']:.1f} ms, 1 {waits['1']:.1f} ms" in flat(report)


def test_loaders_that_are_made_anew_each_epoch_go_on_under_their_keys(tmp_path):
    class Anew(Model):
        def train_dataloader(self):
            return {"a": loader(batches=6), "b": loader(SLOW_MS, 6)}

    callback = DataThroughputCallback(summary=False)
    trainer = quiet_trainer(
        tmp_path, max_epochs=3, callbacks=[callback], reload_dataloaders_every_n_epochs=1
    )
    trainer.fit(Anew())
    stage = callback.report.stages[0]
    assert [(each.name, each.batches) for each in stage.loaders] == [("a", 15), ("b", 15)]
