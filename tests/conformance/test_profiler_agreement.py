"""What is recorded of a run is what a profiler of Lightning's sees of the same run."""

from __future__ import annotations

from collections import defaultdict

import pytest
from conformance.pieces import Linear, Rows, make_trainer
from conformance.test_timing import Measured
from lightning.pytorch.profilers import Profiler
from torch.utils.data import DataLoader

from lightning_fastdata import FastDataLoader
from lightning_fastdata.host import clock

STEPS = 16
ACTIONS = {
    "wait_ms": ("[_TrainingEpochLoop].train_dataloader_next", 10),
    "transfer_ms": ("[Strategy]SingleDeviceStrategy.batch_to_device", 8),
    "compute_ms": ("run_training_batch", 20),
}
"""Phase -> the action that Lightning tells its profiler of, and what it takes in milliseconds."""


class Watch(Profiler):
    """Times each action that Lightning announces."""

    def __init__(self):
        super().__init__()
        self.began_ns, self.took_ms = {}, defaultdict(list)

    def start(self, action_name):
        self.began_ns[action_name] = clock.monotonic_ns()

    def stop(self, action_name):
        took_ns = clock.monotonic_ns() - self.began_ns.pop(action_name)
        self.took_ms[action_name].append(took_ns / 1e6)

    def summary(self):
        return ""


class SlowEverywhere(Linear):
    def transfer_batch_to_device(self, batch, device, dataloader_idx):
        clock.sleep(0.008)
        return super().transfer_batch_to_device(batch, device, dataloader_idx)

    def training_step(self, batch, batch_idx):
        clock.sleep(0.02)
        return super().training_step(batch, batch_idx)


@pytest.mark.parametrize("executor", ["foreign", "torch", "inline"])
def test_each_phase_takes_as_long_as_its_action(tmp_path, virtual, executor):
    rows = Rows(STEPS, dict.fromkeys(range(STEPS), 0.01))
    loader = DataLoader(rows, 1)
    if executor != "foreign":
        loader = FastDataLoader(rows, 1, executor=executor, num_workers=0)
    watch, callback = Watch(), Measured()
    trainer = make_trainer(tmp_path, callbacks=[callback], profiler=watch, limit_val_batches=0)
    trainer.fit(SlowEverywhere(), loader)
    assert callback.report.stages[0].steps == STEPS
    for phase, (action, ms) in ACTIONS.items():
        assert callback.train[phase].tolist() == watch.took_ms[action] == [ms] * STEPS
    assert callback.train["step_ms"].tolist() == [10 + 8 + 20] * STEPS
