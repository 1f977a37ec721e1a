"""The batch-size guard as a FastDataModule uses it, on a device whose memory is counted."""

from __future__ import annotations

import warnings

import albumentations as A
import lightning.pytorch
import pytest
import pytorch_lightning
import torch
from conformance.pieces import Images, Linear, Pixels, Rows, RowsModule, make_trainer
from torch import nn
from torch.utils.data import IterableDataset

import lightning_fastdata.pytorch_lightning as twin
from lightning_fastdata import DataThroughputCallback, FastDataModule, LoaderOptions
from lightning_fastdata.augment.mixing import CutMix, mixed
from lightning_fastdata.errors import BatchSizeError, FastDataWarning
from lightning_fastdata.plugin.bindings import BatchSizeGuard

torch.set_num_threads(1)

QUIET = LoaderOptions(num_workers=0, probe=False)
MIB = 2**20
GIB = 2**30


class Counted:
    """A device of 2 GiB on which each row of a training step takes 100 MiB."""

    def __init__(self, per_row=100 * MIB):
        self.per_row = per_row
        self.peak = 0
        self.tried = []

    def take(self, rows):
        self.tried.append(rows)
        self.peak = max(self.peak, rows * self.per_row)

    def reset_peak(self):
        self.peak = 0

    def peak_bytes(self):
        return self.peak

    def free_bytes(self):
        return 2 * GIB

    def total_bytes(self):
        return 2 * GIB


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


@pytest.mark.slow
@pytest.mark.parametrize("ending", ["end", "exception"])
def test_the_asked_sizes_are_back_after_the_fit(tmp_path, ending):
    class Fails(Takes):
        def on_train_epoch_end(self):
            assert (self.trainer.datamodule.batch_size, self.trainer.accumulate_grad_batches) == (
                8,
                4,
            )
            if ending == "exception":
                raise ZeroDivisionError

    device = Counted()
    module = RowsModule(32, length=64, guard="accumulate", options=QUIET)
    trainer = make_trainer(tmp_path, callbacks=[BatchSizeGuard(reader=device)], limit_val_batches=0)
    if ending == "exception":
        with pytest.raises(ZeroDivisionError):
            trainer.fit(Fails(device), datamodule=module)
    else:
        trainer.fit(Fails(device), datamodule=module)
    assert (module.batch_size, trainer.accumulate_grad_batches) == (32, 1)


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


def test_reduce_loads_the_largest_batch_that_fits(tmp_path):
    trainer, model, _, guard = fit(tmp_path, "reduce")
    assert sizes(model.seen["train"]) == [15, 15, 15, 15, 4]
    assert trainer.accumulate_grad_batches == 1
    assert guard.decision.action == "reduce"


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


@pytest.mark.slow
def test_a_second_fit_has_one_note(tmp_path):
    device = Counted(per_row=MIB)
    _, model, module, _ = fit(tmp_path, "accumulate", device=device)
    fit(tmp_path, "accumulate", module=module, model=model, device=device)
    assert len(module.notes) == 1


class Stream(IterableDataset):
    def __iter__(self):
        return iter(Rows(16)[i] for i in range(16))


class OwnLoader(RowsModule):
    def train_dataset(self):
        return None

    def train_dataloader(self):
        return torch.utils.data.DataLoader(Rows(32), batch_size=32)


def of_first_batches(kind, guard):
    if kind == "own loader":
        return OwnLoader(32, guard=guard)
    return FastDataModule.from_datasets(Stream(), batch_size=16, guard=guard, options=QUIET)


def test_a_stream_whose_batches_fit_is_trained_on_as_without_a_guard(tmp_path):
    def weights(guard):
        torch.manual_seed(0)
        module = of_first_batches("stream", guard)
        _, model, *_ = fit(tmp_path, guard, module=module, device=Counted(per_row=MIB))
        assert sizes(model.seen["train"]) == [16]
        return model.layer.weight

    assert torch.equal(weights("accumulate"), weights("off"))


@pytest.mark.slow
def test_several_training_datasets_are_tried_together(tmp_path):
    device = Counted()

    class Two(RowsModule):
        def train_dataset(self):
            return {"a": Rows(64), "b": Rows(32)}

    class TakesBoth(Linear):
        def training_step(self, batch, batch_idx):
            device.take(sum(len(part[0]) for part in batch.values()))
            return super()._step("train", batch["a"])

    module = Two(32, guard="reduce")
    module.register_transform(lambda batch: batch)
    _, model, _, guard = fit(tmp_path, "reduce", module=module, model=TakesBoth(), device=device)
    assert guard.decision.action == "reduce"
    assert set(sizes(model.seen["train"])) <= {7, 64 % 7, 32 % 7}


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


@pytest.mark.cases(1)
@pytest.mark.parametrize("augment_on", ["gpu", "cpu"])
@pytest.mark.parametrize(
    ("policy", "loaded", "batches"), [("reduce", 5, [15] * 12 + [12]), ("accumulate", 4, [12] * 16)]
)
def test_the_repeats_of_a_sample_are_part_of_the_probe(
    tmp_path, policy, loaded, batches, augment_on
):
    class Learns(Pixels):
        def __init__(self, device):
            super().__init__()
            self.layer = nn.Linear(12 * 10 * 3, 1)
            self.device_memory = device

        def training_step(self, batch, batch_idx):
            self.device_memory.take(len(batch[0]))
            return super().training_step((batch[0].float(), batch[1]), batch_idx)

    device = Counted()
    module = FastDataModule.from_datasets(
        Images(64),
        batch_size=32,
        guard=policy,
        options=QUIET,
        augment=mixed(A.HorizontalFlip(), CutMix(), repeats=3, num_classes=64),
        augment_on=augment_on,
    )
    trainer, model, _, guard = fit(
        tmp_path, policy, module=module, model=Learns(device), device=device
    )
    # 15 rows fit at the model: five samples of the loader, or four that divide 32.
    assert guard.decision.batch_size == loaded
    assert [len(x) for x in model.seen["train"]] == batches
    assert trainer.global_step == (13 if policy == "reduce" else 2)
    assert "the model gets 3 of each (repeats=3)" in guard.decision.reason


@pytest.mark.slow
def test_a_loader_built_for_the_scheduler_is_built_again(tmp_path):
    class Schedules(Takes):
        def configure_optimizers(self):
            optimizer = torch.optim.SGD(self.parameters(), lr=1e-3)
            self.steps = self.trainer.estimated_stepping_batches
            schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=self.steps)
            return [optimizer], [{"scheduler": schedule, "interval": "step"}]

    device = Counted()
    trainer, model, *_ = fit(
        tmp_path, "accumulate", model=Schedules(device), device=device, max_epochs=2
    )
    assert sizes(model.seen["train"]) == [8] * 16
    assert trainer.global_step == model.steps == 4


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


@pytest.mark.slow
def test_the_twins_guard_works_with_the_twins_trainer(tmp_path):
    device = Counted()

    class Model(pytorch_lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(4, 1)
            self.sizes = []

        def training_step(self, batch, batch_idx):
            device.take(len(batch[0]))
            self.sizes.append(len(batch[0]))
            return self.layer(batch[0] * 1e-3).pow(2).mean()

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=1e-3)

    module = twin.FastDataModule.from_datasets(
        Rows(64), batch_size=32, guard="accumulate", options=QUIET
    )
    model = Model()
    trainer = pytorch_lightning.Trainer(
        max_epochs=1,
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=str(tmp_path),
        callbacks=[twin.BatchSizeGuard(reader=device)],
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer.fit(model, datamodule=module)
    assert model.sizes == [8] * 8
    assert trainer.global_step == 2
    assert not isinstance(trainer, lightning.pytorch.Trainer)
