"""Waits of a known length at known steps are recorded there, for that long, and nowhere else.

The trainings live on a virtual machine, where a wait is exactly as long as it was made.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from conformance.pieces import Linear, make_trainer
from conformance.test_timing import Measured
from lightning.pytorch.profilers import Profiler
from rig.virtual_crew import Costs, on_machine
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

from lightning_fastdata import FastDataLoader
from lightning_fastdata.host import clock
from lightning_fastdata.loading.loader import Training

EPOCHS = 5
STEPS = 10
INJECTED_MS = {2: 5, 5: 20, 8: 50}
"""Batch of each epoch -> how late it comes after it was asked for."""
STEP_S = 0.01
"""What a step computes: long enough for a loader to be ahead of it, where it can be."""


class Gates:
    """Holds late batches back until they have been asked for, and then for as long as injected."""

    def __init__(self):
        self.passes_ns = {}

    def open(self, batch, requested_ns):
        """Let a batch pass at its time; called by whoever asks for it."""
        if batch in INJECTED_MS:
            self.passes_ns[batch] = requested_ns + INJECTED_MS[batch] * 1_000_000

    def wait(self, batch):
        """Return once a batch may pass; called by whoever reads it."""
        if batch in INJECTED_MS:
            while batch not in self.passes_ns:
                clock.sleep(0.0005)
            clock.sleep(max(0, self.passes_ns.pop(batch) - clock.monotonic_ns()) / 1e9)


class GatedRows(Dataset):
    def __init__(self, gates):
        self.gates = gates

    def __len__(self):
        return 2 * STEPS

    def __getitem__(self, i):
        if i % 2 == 0:
            self.gates.wait(i // 2)
        return torch.full((4,), float(i)), i


class GatedStream(IterableDataset):
    def __init__(self, gates):
        self.rows = GatedRows(gates)

    def __iter__(self):
        for i in range(2 * STEPS):
            yield self.rows[i]


class WaitClock(Profiler):
    """Times each fetch that the trainer announces, and lets its batch pass at its time.

    Args:
        gates: Of the batches.
        stream: The end of an epoch is fetched, too, and the very first batch is not announced.
    """

    def __init__(self, gates, *, stream):
        super().__init__()
        self.gates, self.stream, self.waits_ms = gates, stream, []

    def start(self, action_name):
        if action_name.endswith("train_dataloader_next"):
            self.began_ns = clock.monotonic_ns()
            fetch = len(self.waits_ms) + self.stream
            self.gates.open(fetch % (STEPS + self.stream), self.began_ns)

    def stop(self, action_name):
        if action_name.endswith("train_dataloader_next"):
            self.waits_ms.append((clock.monotonic_ns() - self.began_ns) / 1e6)


class Slow(Linear):
    def training_step(self, batch, batch_idx):
        clock.sleep(STEP_S)
        return super().training_step(batch, batch_idx)


def late(gates):
    """What a FastDataLoader hands out, held back on the way: for rows that no code reads."""

    def held_back(batches):
        for number, batch in enumerate(batches):
            gates.wait(number)
            yield batch

    return held_back


def rows_loader(executor, workers, gates):
    # Workers that end with the epoch are waited for, too.
    arguments = {"batch_size": 2, "num_workers": workers, "persistent_workers": workers > 0}
    if executor == "foreign":
        return DataLoader(GatedRows(gates), **arguments)
    rows = GatedRows(gates)
    if executor == "gather":
        rows = TensorDataset(torch.zeros(2 * STEPS, 4), torch.arange(2 * STEPS))
        arguments["training"] = Training(ahead=late(gates))
    return FastDataLoader(rows, executor=executor, **arguments)


def stream_loader(executor, gates):
    if executor == "foreign":
        return DataLoader(GatedStream(gates), batch_size=2)
    return FastDataLoader(GatedStream(gates), batch_size=2, num_workers=0, executor=executor)


def measured(tmp_path, loader, gates, *, stream=False):
    """Return waits in ms: as recorded, [epochs, steps], and of each fetch that was announced."""
    outside, callback = WaitClock(gates, stream=stream), Measured()
    trainer = make_trainer(
        tmp_path,
        max_epochs=EPOCHS,
        profiler=outside,
        callbacks=[callback],
        limit_val_batches=0,
    )
    trainer.fit(Slow(), loader)
    return callback.train["wait_ms"].reshape(EPOCHS, STEPS), outside.waits_ms


def expected(injected_ms):
    """The waits of an epoch but for its first step, which may start workers."""
    return np.array([[injected_ms.get(step, 0) for step in range(1, STEPS)]] * EPOCHS)


ROWS = [("torch", 0), ("foreign", 0), ("inline", 0), ("gather", 1), ("workers", 1), ("workers", 2)]


@pytest.mark.parametrize(("executor", "workers"), ROWS)
def test_each_injected_wait_is_in_the_step_that_waited_as_long_as_it_was(
    tmp_path, executor, workers
):
    with on_machine(Costs()):
        gates = Gates()
        loader = rows_loader(executor, workers, gates)
        recorded, outside = measured(tmp_path, loader, gates)
    assert np.allclose(recorded[:, 1:], expected(INJECTED_MS), rtol=0, atol=1e-6)
    # Of a loader that knows its length exactly its batches are fetched, each in its step.
    assert np.allclose(outside, recorded.ravel(), rtol=0, atol=1e-6)


@pytest.mark.parametrize("executor", ["torch", "foreign", "inline"])
def test_a_stream_is_waited_for_one_step_ahead(tmp_path, executor):
    """Without a length Lightning asks for the next batch before a step, and for the end."""
    with on_machine(Costs()):
        gates = Gates()
        loader = stream_loader(executor, gates)
        recorded, _ = measured(tmp_path, loader, gates, stream=True)
    one_ahead = {step - 1: ms for step, ms in INJECTED_MS.items()}
    assert np.allclose(recorded[:, 1:], expected(one_ahead), rtol=0, atol=1e-6)
