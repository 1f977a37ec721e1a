"""Steps of every kind: parts of an update, of several loaders, cold ones, and what lies between."""

from __future__ import annotations

import pytest
import torch
from conformance.pieces import Linear, Rows, make_trainer
from conformance.test_timing import SLEEP_MS, SLEEP_S, Measured, spent
from lightning.pytorch import Callback
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.utilities import CombinedLoader
from torch.utils.data import DataLoader

from lightning_fastdata.host import clock
from lightning_fastdata.insight.measure.metrics import Cold

pytestmark = pytest.mark.usefixtures("virtual")

BATCHES = 8


def loader(length=BATCHES, sleep_s=None):
    return DataLoader(Rows(length, sleep_s), batch_size=1)


def fit(tmp_path, model, train, *, callbacks=(), val=None, **arguments):
    """Return the callback that has measured a fit, in which ours comes last."""
    callback = Measured()
    if val is None:
        arguments["limit_val_batches"] = 0
    trainer = make_trainer(tmp_path, callbacks=[*callbacks, callback], **arguments)
    trainer.fit(model, train, val)
    return callback


class SlowUpdates(Linear):
    def optimizer_step(self, *args, **kwargs):
        super().optimizer_step(*args, **kwargs)
        clock.sleep(SLEEP_S)


def test_each_part_of_an_accumulated_update_is_a_step_and_the_last_one_pays_for_it(tmp_path):
    model = SlowUpdates()
    callback = fit(tmp_path, model, loader(9, {5: SLEEP_S}), accumulate_grad_batches=4)
    assert callback.spent() == {5: SLEEP_MS}
    # The ninth batch ends the epoch, and so an update.
    assert callback.spent("compute_ms") == dict.fromkeys([3, 7, 8], SLEEP_MS)
    (stage,) = callback.report.stages
    assert (stage.steps, stage.samples) == (9, 9)


class Manual(Linear):
    """Two optimizers, each stepped after every second batch; the first one is slow."""

    def __init__(self):
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        self.manual_backward(loss)
        if batch_idx % 2:
            for optimizer in self.optimizers():
                optimizer.step()
                optimizer.zero_grad()
            clock.sleep(SLEEP_S)

    def configure_optimizers(self):
        return [torch.optim.SGD([weight], lr=1e-3) for weight in self.layer.parameters()]


def test_manual_optimization_is_compute_of_the_batch_that_did_it(tmp_path):
    callback = fit(tmp_path, Manual(), loader(sleep_s={4: SLEEP_S}))
    assert callback.spent() == {4: SLEEP_MS}
    assert callback.spent("compute_ms") == dict.fromkeys([1, 3, 5, 7], SLEEP_MS)
    (stage,) = callback.report.stages
    assert stage.steps == BATCHES


class Several(Linear):
    def training_step(self, batch, batch_idx, dataloader_idx=0):
        parts = batch.values() if isinstance(batch, dict) else [batch]
        return sum(self._step("train", part) for part in parts if part is not None)


@pytest.mark.cases(2)
@pytest.mark.parametrize(
    ("mode", "slow", "samples"),
    [
        ("min_size", [3], 4),
        ("max_size_cycle", [3, 7], 8),
        # Where the first loader is exhausted, the second one's rows are counted.
        ("max_size", [3], 8),
    ],
)
def test_a_wait_for_one_of_several_loaders_is_a_wait_of_the_step(tmp_path, mode, slow, samples):
    loaders = {"a": loader(8), "b": loader(4, {3: SLEEP_S})}
    callback = fit(tmp_path, Several(), CombinedLoader(loaders, mode))
    assert callback.spent() == dict.fromkeys(slow, SLEEP_MS)
    (stage,) = callback.report.stages
    assert stage.steps == stage.samples == samples


def test_validation_loaders_come_one_after_the_other(tmp_path):
    callback = fit(tmp_path, Linear(), loader(), val=[loader(2), loader(3, {1: SLEEP_S})])
    assert callback.spent() == {}
    assert spent(callback.val["wait_ms"]) == {3: SLEEP_MS}
    assert callback.report.stages[1].samples == 5


def test_the_gap_in_front_of_a_step_is_without_the_validation_there(tmp_path):
    class SlowlyValidated(Linear):
        def on_validation_epoch_start(self):
            clock.sleep(SLEEP_S)

    callback = fit(
        tmp_path, SlowlyValidated(), loader(), val=loader(1), max_epochs=2, val_check_interval=0.25
    )
    assert callback.train["cold"].tolist() == [1, *[0] * 7] * 2
    stage = callback.report.stages[0]
    assert (stage.steps, stage.cold_steps) == (16, 2)
    assert callback.spent("gap_ms") == {}
    assert stage.gap.max_ms == 0


class SlowEnds(Callback):
    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        clock.sleep(SLEEP_S if batch_idx == 4 else 0)


class SlowLogger(CSVLogger):
    def log_metrics(self, metrics, step=None):
        clock.sleep(SLEEP_S)
        super().log_metrics(metrics, step)


class Logs(Linear):
    def on_train_batch_end(self, outputs, batch, batch_idx):
        clock.sleep(SLEEP_S if batch_idx == 4 else 0)


@pytest.mark.parametrize("what", ["a callback called before", "the module", "a logger"])
def test_what_runs_between_two_steps_is_gap_and_no_compute(tmp_path, what):
    arguments = {
        "a callback called before": {"callbacks": [SlowEnds()]},
        "the module": {},
        # Ours logs at the same step, so that there is something to log.
        "a logger": {"logger": SlowLogger(tmp_path), "log_every_n_steps": 5},
    }[what]
    model = Logs() if what == "the module" else Linear()
    callback = fit(tmp_path, model, loader(), **arguments)
    for phase in ("wait_ms", "transfer_ms", "compute_ms", "step_ms"):
        assert callback.spent(phase) == {}, phase
    assert callback.spent("gap_ms") == {5: SLEEP_MS}


def test_the_call_that_compiles_is_in_the_cold_first_step(tmp_path):
    def compiler(graph, inputs):
        clock.sleep(SLEEP_S)
        return graph.forward

    class Compiled(Linear):
        def on_fit_start(self):
            self.net = torch.compile(self.layer, backend=compiler)

        def training_step(self, batch, batch_idx):
            return self.net(batch[0]).mean()

    callback = fit(tmp_path, Compiled(), loader())
    assert callback.spent("compute_ms") == {0: SLEEP_MS}
    assert callback.train["cold"].tolist() == [Cold.EPOCH] + [Cold.NO] * 7
    assert callback.report.stages[0].compute.max_ms == 0
