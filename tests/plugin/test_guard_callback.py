"""The batch-size guard as a FastDataModule uses it, on a device whose memory is counted."""

from __future__ import annotations

import albumentations as A
import pytest
import torch
from conformance.pieces import Images, Linear, Pixels, Rows, RowsModule, make_trainer
from plugin.counted_device import GIB, MIB, Device
from torch import nn
from torch.utils.data import IterableDataset

from lightning_fastdata import DataThroughputCallback, FastDataModule, LoaderOptions
from lightning_fastdata.errors import BatchSizeError, FastDataWarning
from lightning_fastdata.plugin.bindings import BatchSizeGuard

torch.set_num_threads(1)

QUIET = LoaderOptions(num_workers=0, probe=False)


class Counted(Device):
    """A device of 2 GiB on which each row of a training step takes 100 MiB."""

    def __init__(self, per_row=100 * MIB):
        super().__init__(2 * GIB, raises=False)
        self.per_row, self.tried = per_row, []

    def take(self, rows):
        self.tried.append(rows)
        super().take(rows * self.per_row)


class Takes(Linear):
    """Takes memory of a counted device in each training step."""

    def __init__(self, device):
        super().__init__()
        self.device_memory = device

    def training_step(self, batch, batch_idx):
        self.device_memory.take(len(batch[0]))
        return super().training_step(batch, batch_idx)


def fit(tmp_path, policy, *, module=None, model=None, device=None, callbacks=(), **trainer):
    """Fit with batches of 32 rows, of which 15 fit; return trainer, model, module, guard."""
    device = device if device is not None else Counted()
    model = model if model is not None else Takes(device)
    if module is None:
        module = RowsModule(32, length=64, guard=policy, options=QUIET)
    guard = BatchSizeGuard(reader=device)
    made = make_trainer(
        tmp_path, callbacks=[guard, *callbacks], **{"limit_val_batches": 0, **trainer}
    )
    made.fit(model, datamodule=module)
    return made, model, module, guard


def sizes(batches):
    return [len(batch[0]) for batch in batches]


def test_accumulate_loads_smaller_batches_and_keeps_the_effective_size(tmp_path, capsys):
    callback = DataThroughputCallback(report=False)
    trainer, model, _, guard = fit(tmp_path, "accumulate", callbacks=[callback])
    assert guard.decision.action == "accumulate"
    # (2 GiB - 512 MiB) / 100 MiB is 15 rows; 32 is cut evenly into 4 parts of 8
    assert sizes(model.seen["train"]) == [8] * 8
    assert guard.decision.accumulate_grad_batches == 4
    assert trainer.global_step == 2
    assert sorted(int(i) for _, ids in model.seen["train"] for i in ids) == list(range(64))
    assert callback.report.notes == (guard.decision.reason,)
    printed = " ".join(capsys.readouterr().out.split())
    assert "the loader now gives 8 rows at a time" in printed


def test_the_asked_sizes_are_back_after_an_error(tmp_path):
    class Fails(Takes):
        def on_train_epoch_end(self):
            assert (module.batch_size, self.trainer.accumulate_grad_batches) == (8, 4)
            raise ZeroDivisionError

    device = Counted()
    module = RowsModule(32, length=64, guard="accumulate", options=QUIET)
    with pytest.raises(ZeroDivisionError):
        fit(tmp_path, "accumulate", module=module, model=Fails(device), device=device)
    assert module.batch_size == 32


def test_a_resumed_run_keeps_the_sizes_of_its_guard(tmp_path):
    trainer, *_ = fit(tmp_path, "accumulate")
    path = tmp_path / "one.ckpt"
    trainer.save_checkpoint(path)
    model, device = Takes(Counted()), Counted()
    module = RowsModule(32, length=64, guard="accumulate", options=QUIET)
    resumed = make_trainer(
        tmp_path, callbacks=[BatchSizeGuard(reader=device)], limit_val_batches=0, max_epochs=2
    )
    resumed.fit(model, datamodule=module, ckpt_path=str(path))
    assert sizes(model.seen["train"]) == [8] * 8
    assert resumed.global_step == 4
    assert device.tried == []
    assert (module.batch_size, resumed.accumulate_grad_batches) == (32, 1)


def test_raise_stops_before_the_first_step(tmp_path):
    model = Takes(Counted())
    with pytest.raises(BatchSizeError, match="At most 15 rows fit"):
        fit(tmp_path, "raise", model=model, device=model.device_memory)
    assert model.seen["train"] == []


def test_warn_says_so_and_goes_on(tmp_path):
    with pytest.warns(FastDataWarning, match="At most 15 rows fit"):
        _, model, *_ = fit(tmp_path, "warn")
    assert sizes(model.seen["train"]) == [32, 32]


def test_off_looks_at_nothing(tmp_path):
    device = Counted()
    _, model, module, guard = fit(tmp_path, "off", device=device)
    assert guard.decision is None
    assert module.notes == []
    assert device.tried == [32, 32]
    assert sizes(model.seen["train"]) == [32, 32]


def test_a_batch_that_fits_is_kept_and_training_is_as_without_guard(tmp_path):
    def weights(policy):
        torch.manual_seed(0)
        _, model, *_ = fit(tmp_path, policy, device=Counted(per_row=MIB))
        return model.layer.weight

    assert torch.equal(weights("accumulate"), weights("off"))


class Stream(IterableDataset):
    def __iter__(self):
        return iter(Rows(16)[i] for i in range(16))


def test_a_stream_whose_batches_fit_is_trained_on_as_without_a_guard(tmp_path):
    def weights(guard):
        torch.manual_seed(0)
        module = FastDataModule.from_datasets(Stream(), batch_size=16, guard=guard, options=QUIET)
        _, model, *_ = fit(tmp_path, guard, module=module, device=Counted(per_row=MIB))
        assert sizes(model.seen["train"]) == [16]
        return model.layer.weight

    assert torch.equal(weights("accumulate"), weights("off"))


def test_transforms_on_the_device_are_part_of_the_probe(tmp_path):
    device = Counted(per_row=0)

    class Upscale(nn.Module):
        def forward(self, batch):
            image, label = batch
            device.peak = max(device.peak, len(image) * 100 * MIB)
            assert image.shape[1:] == (8, 8, 3)  # behind the pipeline
            return image.float(), label

    class Learns(Pixels):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(8 * 8 * 3, 1)

    class Data(FastDataModule):
        def train_dataset(self):
            return Images(64)

    module = Data(32, guard="accumulate", augment=A.RandomCrop(8, 8), augment_on="gpu")
    module.register_transform(Upscale())
    _, model, _, guard = fit(tmp_path, "accumulate", module=module, model=Learns(), device=device)
    assert guard.decision.action == "accumulate"
    assert [len(x) for x in model.seen["train"]] == [8] * 8


def test_a_trainer_without_cuda_gets_no_guard(tmp_path):
    trainer = make_trainer(tmp_path, limit_val_batches=0)
    before = list(trainer.callbacks)
    trainer.fit(Linear(), datamodule=RowsModule(guard="raise"))
    assert trainer.callbacks == before


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_trainer_on_cuda_gets_one_guard_and_it_comes_first(tmp_path):
    trainer = make_trainer(tmp_path, accelerator="cuda", limit_val_batches=0)
    for _ in range(2):
        trainer.fit_loop.epoch_progress.reset()
        trainer.fit(Linear(), datamodule=RowsModule(guard="accumulate"))
    assert [isinstance(own, BatchSizeGuard) for own in trainer.callbacks[:2]] == [True, False]
    assert trainer.callbacks[0].decision.action == "keep"
