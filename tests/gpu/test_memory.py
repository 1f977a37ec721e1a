from __future__ import annotations

import gc

import pytest
import torch
from gpu.device import CUDA, needs_cuda
from lightning.pytorch import LightningModule
from torch import nn
from torch.utils.data import Dataset
from trainers import quiet_trainer

from lightning_fastdata import FastDataModule, LoaderOptions
from lightning_fastdata.device import MemoryReader, is_out_of_memory
from lightning_fastdata.host.memory import reserve_bytes
from lightning_fastdata.plugin.bindings import BatchSizeGuard

pytestmark = [
    *needs_cuda,
    pytest.mark.filterwarnings("ignore::UserWarning:lightning"),
]
MIB = 2**20
PIXELS = 128
ASKED = 8192


@pytest.fixture(autouse=True)
def _empty_device():
    gc.collect()
    torch.cuda.empty_cache()
    yield
    torch.cuda.set_per_process_memory_fraction(1.0, CUDA)
    gc.collect()
    torch.cuda.empty_cache()


@pytest.mark.parametrize("device", ["cuda", CUDA, CUDA.index])
def test_the_readers_free_memory_counts_what_we_hold_ourselves(device):
    reader = MemoryReader(device)
    torch.zeros(1, device=CUDA)
    free = reader.free_bytes()
    held = torch.empty(1024 * MIB, dtype=torch.uint8, device=CUDA)
    assert abs(reader.free_bytes() - free) < 64 * MIB
    del held
    assert abs(reader.free_bytes() - free) < 64 * MIB


def test_the_readers_peak_is_of_live_tensors_since_the_last_reset():
    reader = MemoryReader(CUDA)
    kept = torch.empty(100 * MIB, dtype=torch.uint8, device=CUDA)
    reader.reset_peak()
    base = reader.peak_bytes()
    assert base >= kept.numel()
    torch.empty(300 * MIB, dtype=torch.uint8, device=CUDA)
    assert reader.peak_bytes() - base >= 300 * MIB
    reader.reset_peak()
    assert reader.peak_bytes() == base


def test_a_limit_on_this_process_limits_what_the_reader_calls_free():
    reader = MemoryReader(CUDA)
    total = torch.cuda.get_device_properties(CUDA).total_memory
    torch.cuda.set_per_process_memory_fraction(0.05, CUDA)
    assert reader.free_bytes() <= 0.05 * total
    with pytest.raises(torch.OutOfMemoryError) as caught:
        torch.empty(int(0.06 * total), dtype=torch.uint8, device=CUDA)
    assert is_out_of_memory(caught.value)


class Same(Dataset):
    def __init__(self):
        self.image = torch.randn(3, PIXELS, PIXELS)

    def __len__(self):
        return 4 * ASKED

    def __getitem__(self, index):
        return self.image, index % 10


class Convolutions(LightningModule):
    """Takes some 30 MiB per row in training, and little beside that."""

    def __init__(self):
        super().__init__()
        layers = [nn.Conv2d(3, 48, 3, padding=1)]
        for _ in range(4):
            layers += [nn.ReLU(), nn.Conv2d(48, 48, 3, padding=1)]
        self.network = nn.Sequential(
            *layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(48, 10)
        )

    def training_step(self, batch, batch_idx):
        images, labels = batch
        return nn.functional.cross_entropy(self.network(images), labels)

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters())


def fit(tmp_path, *, batch_size, guard, precision, steps=20):
    datamodule = FastDataModule.from_datasets(
        Same(), batch_size=batch_size, guard=guard, options=LoaderOptions(num_workers=0)
    )
    device = {"accelerator": "gpu", "devices": [CUDA.index], "precision": precision}
    trainer = quiet_trainer(tmp_path, max_steps=steps, max_epochs=None, **device)
    trainer.fit(Convolutions(), datamodule=datamodule)
    guards = [each for each in trainer.callbacks if isinstance(each, BatchSizeGuard)]
    return trainer, guards[0].decision if guards else None


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed", "16-mixed"])
@pytest.mark.parametrize("fraction", [0.02, 0.05, 0.1])
def test_the_batch_that_the_guard_chooses_trains_and_twice_as_much_did_not_fit(
    tmp_path, fraction, precision
):
    total = torch.cuda.get_device_properties(CUDA).total_memory
    limit = int(fraction * total)
    if limit < 2 * reserve_bytes(limit):
        pytest.skip(f"{fraction} of this device is too little beside the guard's reserve")
    torch.cuda.set_per_process_memory_fraction(fraction, CUDA)
    trainer, decision = fit(
        tmp_path, batch_size=ASKED, guard="accumulate", precision=precision, steps=2
    )
    assert trainer.global_step == 2
    assert 1 < decision.batch_size < ASKED
    assert torch.cuda.max_memory_allocated(CUDA) <= limit
    *_, larger, last = decision.probes
    assert (last.rows, larger.rows) == (decision.batch_size, 2 * decision.batch_size)
    assert not larger.fits
    assert torch.cuda.max_memory_allocated(CUDA) <= 1.02 * last.peak_bytes


def test_accumulated_batches_keep_the_rows_of_an_optimizer_step(tmp_path):
    torch.cuda.set_per_process_memory_fraction(0.1, CUDA)
    _, decision = fit(
        tmp_path, batch_size=ASKED, guard="accumulate", precision="bf16-mixed", steps=2
    )
    assert decision.accumulate_grad_batches > 1
    assert decision.batch_size * decision.accumulate_grad_batches == ASKED


def test_a_chosen_batch_trains_nearly_as_many_rows_a_second_as_any(tmp_path):
    trainer, decision = fit(tmp_path, batch_size="auto", guard="warn", precision="bf16-mixed")
    assert trainer.global_step == 20
    assert decision.action == "chosen"
    rates = {each.rows: each.rows / each.step_s for each in decision.probes if each.fits}
    assert rates[decision.batch_size] >= 0.95 * max(rates.values())
