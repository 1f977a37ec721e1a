"""Several loaders that are read in the same steps count as one, which waits as the step does."""

from __future__ import annotations

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


def loader(batch_ms=QUICK_MS, batches=STEPS, workers=0):
    return FastDataLoader(Rows(batch_ms, batches), BATCH, num_workers=workers)


def slow():
    return loader(SLOW_MS)


class Model(LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(4, 1)

    def training_step(self, batch, _):
        clock.sleep(0.002)
        leaves, _ = torch.utils._pytree.tree_flatten(batch)
        return sum(self.layer(each).mean() for each in leaves if each is not None)

    def validation_step(self, batch, _, dataloader_idx=0):
        self.log("val", self.layer(batch).mean())

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.01)


def fit(folder, train, val=None):
    callback = DataThroughputCallback(summary=False)
    trainer = quiet_trainer(folder, max_epochs=1, callbacks=[callback], num_sanity_val_steps=0)
    trainer.fit(Model(), train, val)
    return callback.report


@pytest.mark.parametrize("mode", ["max_size_cycle", "min_size", "max_size"])
def test_a_step_waits_for_all_of_them_and_the_cause_is_that_of_their_batches(tmp_path, mode):
    report = fit(tmp_path, CombinedLoader({"text": loader(), "images": slow()}, mode))
    (stage,) = report.stages
    assert stage.wait.mean_ms == pytest.approx(QUICK_MS + SLOW_MS)
    assert stage.causes.batches == 2 * (STEPS - 1)
    assert stage.causes.wait.read_blocked_ms == pytest.approx((QUICK_MS + SLOW_MS) / 2)
    assert report.verdict.code == "FD303"


def test_what_the_slow_one_says_of_itself_counts_and_not_what_the_first_one_does(tmp_path):
    report = fit(tmp_path, {"quick": loader(workers=2), "slow": slow()})
    assert any(each.startswith("0 workers,") for each in report.verdict.evidence)


def test_two_that_are_as_slow_gain_little_if_one_of_them_is_changed(tmp_path):
    report = fit(tmp_path, {"a": slow(), "b": slow()})
    told = [each for each in report.verdict.findings if "num_workers" in each.remedy]
    assert told
    for found in told:
        # The other one reads for as long as before.
        assert found.gain.after_ms >= SLOW_MS


@pytest.mark.parametrize("plain_ms", [QUICK_MS, SLOW_MS])
def test_beside_one_that_takes_no_stamps_no_cause_is_guessed(tmp_path, plain_ms):
    plain = DataLoader(Rows(plain_ms), BATCH, num_workers=0)
    report = fit(tmp_path, {"ours": slow(), "plain": plain})
    assert report.stages[0].causes is None
    assert any("a DataLoader does not tell" in note for note in report.notes)


def test_validation_loaders_are_waited_for_one_after_the_other(tmp_path):
    report = fit(tmp_path, loader(), [loader(), slow()])
    steps = 2 * STEPS - 1  # without the first one
    waited_ms = (STEPS - 1) * QUICK_MS + STEPS * SLOW_MS
    assert report.stages[1].wait.mean_ms == pytest.approx(waited_ms / steps)
