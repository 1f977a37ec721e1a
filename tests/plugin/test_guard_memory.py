"""What the guard's tries take: device memory as the training does, one copy in host memory."""

from __future__ import annotations

import weakref

import pytest
import torch
from device.host_streams import HostStreams
from plugin.counted_device import Device
from rig.late_cuda import late_cuda
from torch import nn
from torch.utils.data import TensorDataset
from trainers import Keeps, quiet_trainer

from lightning_fastdata import FastDataModule, LoaderOptions
from lightning_fastdata.plugin.bindings import BatchSizeGuard
from lightning_fastdata.plugin.guard import snapshots, steps
from lightning_fastdata.plugin.guard.snapshots import snapshot_random_states

torch.set_num_threads(1)
SIZES = [4, 8, 16, 32, 64]


class Data(FastDataModule):
    def device_streams(self, device):
        return HostStreams()


class Model(Keeps):
    """Gives what a step finds to a function, as its own attributes are put back."""

    def __init__(self, note=lambda *_: None, optimizer=torch.optim.SGD):
        super().__init__()
        torch.manual_seed(0)
        self.layer, self.note, self.optimizer = nn.Linear(4, 64), note, optimizer
        self.begun = False

    def on_train_start(self):
        self.begun = True

    def on_after_batch_transfer(self, batch, dataloader_idx):
        x = batch[0].clone()  # as a device has it
        self.note("arrived", x)
        return [x]

    def training_step(self, batch, batch_idx):
        self.note("trained" if self.begun else "tried", self.layer.weight.detach().clone())
        return self.layer(batch[0]).pow(2).mean() + self.scale

    def configure_optimizers(self):
        return self.optimizer(self.parameters(), 0.1)


def fit(model, way="off"):
    data = Data.from_datasets(
        TensorDataset(torch.randn(256, 4)),
        batch_size=SIZES[-1],
        prefetch=way,
        options=LoaderOptions(num_workers=0),
        guard="warn",
    )
    guard = BatchSizeGuard(Device())  # on which everything fits
    quiet_trainer(callbacks=[guard], max_epochs=1).fit(model, data)
    return guard.decision


@pytest.mark.parametrize("way", ["off", "stream", "lookahead"])
def test_steps_are_tried_with_the_batches_on_the_device_that_the_training_has(way):
    arrived, alive = [], {"tried": [], "trained": []}

    def note(what, value):
        if what == "arrived":
            arrived.append(weakref.ref(value))
        else:
            alive[what].append(sum(batch() is not None for batch in arrived))

    fit(Model(note), way)
    assert alive["tried"] == [1 if way == "off" else 2] * 2 * len(SIZES)
    assert len(alive["trained"]) == 4
    assert max(alive["trained"]) <= max(alive["tried"])


@pytest.mark.parametrize("optimizer", [torch.optim.SGD, torch.optim.AdamW])
def test_the_model_is_copied_to_host_memory_once_and_put_back_once(monkeypatch, optimizer):
    copied, put_back = [], []
    real = snapshots._snapshot_tensor

    def counted(tensor):
        copied.append(tensor.nbytes)
        undo = real(tensor)

        def back():
            put_back.append(tensor.nbytes)
            undo()

        return back

    monkeypatch.setattr(snapshots, "_snapshot_tensor", counted)
    weights = {"tried": [], "trained": [], "arrived": []}
    model = Model(lambda what, value: weights[what].append(value), optimizer)
    size = sum(p.nbytes for p in model.parameters())
    decision = fit(model)
    assert [probe.rows for probe in decision.probes] == SIZES
    assert sum(copied) == size
    assert sum(put_back) == size
    # Until then nothing moves: a model that goes astray might raise errors of its own.
    first, *others = weights["tried"]
    assert len(others) == 2 * len(SIZES) - 1
    assert all(torch.equal(first, each) for each in (*others, weights["trained"][0]))
    assert not torch.equal(first, weights["trained"][-1])


def test_the_random_states_of_the_device_come_back():
    with late_cuda() as cuda:
        before = [generator.get_state() for generator in cuda.generators]
        undo = snapshot_random_states()
        torch.cuda.manual_seed_all(7)
        undo()
        assert all(map(torch.equal, before, torch.cuda.get_rng_state_all()))


def test_without_room_for_a_copy_nothing_is_tried(monkeypatch):
    monkeypatch.setattr(steps, "_COPY_SHARE", 2**62)
    steps_of = []
    decision = fit(Model(lambda what, _: steps_of.append(what)))
    assert decision.action == "skipped"
    assert "a copy of the model takes 0 MiB of host memory" in decision.reason
    assert steps_of == ["arrived", "trained"] * 4
