"""The step without waits is measured on request, and the training does not feel it."""

from __future__ import annotations

import json
import random
import time

import numpy as np
import pytest
import torch
from conformance.pieces import Linear, Rows, make_trainer
from lightning.pytorch import callbacks, seed_everything
from lightning.pytorch.loggers import CSVLogger
from torch.utils.data import DataLoader

from lightning_fastdata import DataThroughputCallback
from lightning_fastdata.errors import OptionsError


class Stateful(Linear):
    """Has everything that a step can change: buffers, random draws, own counters, own metrics."""

    def __init__(self):
        super().__init__()
        self.norm = torch.nn.BatchNorm1d(4)
        self.drop = torch.nn.Dropout(0.5)
        self.steps = 0

    def training_step(self, batch, batch_idx):
        self.steps += 1
        x = self.drop(self.norm(batch[0])) + torch.randn(4) * random.random() * np.random.rand()
        loss = self.layer(x).pow(2).mean()
        self.log("own/loss", loss, on_step=True, on_epoch=True)
        return loss

    def configure_optimizers(self):
        optimizer = torch.optim.Adam(self.parameters())
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1)]


class Metrics(CSVLogger):
    def __init__(self, folder):
        super().__init__(folder)
        self.own = []

    def log_metrics(self, metrics, step=None):
        own = {k: v for k, v in metrics.items() if k.startswith("own")}
        if own:  # what the callback logs comes as often as it is cheap
            self.own.append(own | {"at": step})


def trained(tmp_path, headroom, **arguments):
    """Return everything that a fit leaves behind, and its report."""
    seed_everything(3, verbose=False)
    model, logger = Stateful(), Metrics(tmp_path)
    callback = DataThroughputCallback(summary=False, report=False, headroom=headroom)
    if not hasattr(callbacks, "EMAWeightAveraging"):
        pytest.skip("this Lightning has no averages of weights")
    averages = callbacks.EMAWeightAveraging(device="cpu")
    trainer = make_trainer(
        tmp_path, max_epochs=2, logger=logger, log_every_n_steps=2,
        callbacks=[callback, averages], limit_val_batches=0, **arguments,
    )  # fmt: skip
    trainer.fit(model, DataLoader(Rows(24), batch_size=4))
    left = {
        "weights": model.state_dict(),
        "gradients": [weight.grad for weight in model.parameters()],
        "optimizer": trainer.optimizers[0].state_dict(),
        "schedule": trainer.lr_scheduler_configs[0].scheduler.state_dict(),
        "averages": averages.state_dict(),
        "random": (torch.get_rng_state(), random.getstate(), np.random.get_state()),
        "counters": (model.steps, trainer.global_step, trainer.current_epoch),
        "logged": logger.own,
        "metrics": trainer.callback_metrics,
    }
    return left, callback.report


def same(a, b):
    """Whether two nestings are equal to the last bit."""
    if isinstance(a, torch.Tensor | np.ndarray):
        return a.dtype == b.dtype and np.array_equal(np.asarray(a), np.asarray(b))
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(same, a, b))
    return a == b


@pytest.mark.parametrize("every", [1, 3])
def test_a_training_ends_the_same_to_the_last_bit_with_and_without(tmp_path, every):
    arguments = {"accumulate_grad_batches": every, "gradient_clip_val": 0.5}
    without, modelled = trained(tmp_path, "modelled", **arguments)
    with_it, measured = trained(tmp_path, "measured", **arguments)
    for name, value in without.items():
        assert same(value, with_it[name]), name
    assert modelled.stages[0].headroom.basis == "modelled"
    assert measured.stages[0].headroom.basis == "measured"
    assert not any("headroom" in note for note in measured.notes)


class Sleeps(Linear):
    def training_step(self, batch, batch_idx):
        time.sleep(0.02)
        return super().training_step(batch, batch_idx)


def fit(tmp_path, model, headroom="measured", **arguments):
    callback = DataThroughputCallback(summary=False, report=False, headroom=headroom)
    trainer = make_trainer(tmp_path, callbacks=[callback], limit_val_batches=0, **arguments)
    trainer.fit(model, DataLoader(Rows(32, dict.fromkeys(range(32), 0.01)), batch_size=4))
    return callback.report


@pytest.mark.flaky(reruns=2)
def test_what_is_measured_has_no_wait_in_it_and_is_told_as_measured(tmp_path):
    report = fit(tmp_path, Sleeps())
    stage = report.stages[0]
    # A step sleeps 20 ms and waits 40; nothing less than its sleep can be measured.
    assert stage.headroom.step_ms >= 20
    assert stage.headroom.step_ms < stage.step.mean_ms - 20
    assert stage.headroom.samples_per_s == pytest.approx(4e3 / stage.headroom.step_ms)
    assert f"{stage.headroom.samples_per_s:.0f} if data were free (measured)" in report.text()
    told = json.loads(json.dumps(report.as_dict()))["stages"]["train"]["headroom"]
    assert told["basis"] == "measured"
    assert told["step_ms"] == stage.headroom.step_ms


def test_what_is_modelled_is_the_step_without_its_stall(tmp_path):
    stage = fit(tmp_path, Sleeps(), "modelled").stages[0]
    free = stage.headroom
    assert free.step_ms == pytest.approx(stage.step.mean_ms - stage.stall.mean_ms)
    assert free.samples_per_s == stage.samples_per_s_if_data_were_free


class AsksItsTrainer(Linear):
    def training_step(self, batch, batch_idx):
        assert self.trainer.training
        return super().training_step(batch, batch_idx)


class Manual(Linear):
    def __init__(self):
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch, batch_idx):
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(super().training_step(batch, batch_idx))
        optimizer.step()


class Replaced(Linear):
    def __init__(self):
        super().__init__()
        self.training_step = self.other_step

    def other_step(self, batch, batch_idx):
        return self._step("train", batch)


@pytest.mark.cases(2)
@pytest.mark.parametrize(
    ("model", "why"),
    [
        (AsksItsTrainer, "not attached to a `Trainer`."),
        (Manual, "manual optimization"),
        (Replaced, "replaced"),
    ],
)
def test_a_step_that_cannot_be_replayed_is_modelled_and_told_why(tmp_path, model, why):
    report = fit(tmp_path, model())
    assert report.stages[0].headroom.basis == "modelled"
    (note,) = [note for note in report.notes if "headroom" in note]
    assert "could not be measured" in note
    assert why in note


def test_a_closure_over_the_original_module_leaves_its_gradients_and_buffers_alone(tmp_path):
    class Reaches(Linear):
        def __init__(self):
            super().__init__()
            norm = self.norm = torch.nn.BatchNorm1d(4)

            def normed(x):
                return norm(x)

            self.normed = normed

        def training_step(self, batch, batch_idx):
            return self.layer(self.normed(batch[0])).mean()

    models = []
    for headroom in ("modelled", "measured"):
        seed_everything(3, verbose=False)
        models.append(Reaches())
        report = fit(tmp_path, models[-1], headroom)
        assert report.stages[0].headroom.basis == headroom
    for name in ("state_dict", "parameters"):
        states = [getattr(model, name)() for model in models]
        if name == "parameters":
            states = [[weight.grad for weight in weights] for weights in states]
        assert same(*states)


def test_another_word_is_refused():
    with pytest.raises(OptionsError, match="headroom is 'guess'"):
        DataThroughputCallback(headroom="guess")
