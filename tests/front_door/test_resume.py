"""A fit that resumes from a file of ``ModelCheckpoint`` goes on with the epoch that comes next."""

from __future__ import annotations

from pathlib import Path

import albumentations as A
import numpy as np
import pytest
import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.callbacks import LearningRateFinder, ModelCheckpoint
from torch.optim import SGD
from torch.optim.lr_scheduler import OneCycleLR
from torch.utils.data import Dataset, DistributedSampler, IterableDataset
from trainers import quiet_trainer

from lightning_fastdata import FastDataModule, LoaderOptions

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")

STEPS = 3
"""Batches in an epoch."""
EPOCHS = 3


class Drawn(Dataset):
    """Images whose first value is the index, and whose second is drawn."""

    def __len__(self):
        return 4 * STEPS

    def __getitem__(self, index):
        return np.full((1, 2, 3), (index, np.random.randint(256), 0), np.uint8)


class Told(IterableDataset):
    """A stream of a library, whose samples are the epoch it was told."""

    __module__ = "datasets"

    epoch = -1

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __iter__(self):
        yield from [torch.full((1, 2, 3), self.epoch)] * 4 * STEPS


class Module(FastDataModule):
    def __init__(self, executor="inline", *, stream=False, rank=None, **arguments):
        workers = 0 if executor == "inline" else 2
        options = LoaderOptions(num_workers=workers, executor=executor, probe=False)
        super().__init__(4, options=options, seed=5, **arguments)
        self.stream, self.rank = stream, rank

    def train_dataset(self):
        return Told() if self.stream else Drawn()

    def val_dataset(self):
        return Drawn()

    def train_dataloader(self):
        if self.rank is None:
            return super().train_dataloader()
        data = Drawn()
        sampler = DistributedSampler(data, num_replicas=2, rank=self.rank, seed=5)
        return self.make_loader(data, stage="train", sampler=sampler, batch_size=2)


class Model(LightningModule):
    """Remembers the batches it was trained on, with the epoch of each."""

    def __init__(self):
        super().__init__()
        self.lr = 0.1
        self.layer = torch.nn.Linear(1, 1)
        self.seen = []

    def training_step(self, batch, batch_idx):
        self.seen.append((self.current_epoch, batch.tolist()))
        return self.layer(torch.ones(1)).sum()

    def validation_step(self, batch, batch_idx):
        self.log("score", float(self.global_step))

    def configure_optimizers(self):
        return SGD(self.parameters(), self.lr)


class OneCycle(Model):
    """Asks for the number of steps, for which Lightning makes an iterator before the resume."""

    def configure_optimizers(self):
        steps = int(self.trainer.estimated_stepping_batches)
        optimizer = SGD(self.parameters(), 0.1)
        return [optimizer], [{"scheduler": OneCycleLR(optimizer, 0.1, steps), "interval": "step"}]


def fit(folder, model, data, *, save=None, resume=None, callbacks=(), **arguments):
    save = ModelCheckpoint(folder, "{step:02d}", save_top_k=-1, **(save or {}))
    how = {"max_epochs": EPOCHS, "limit_val_batches": 1, "enable_checkpointing": True, **arguments}
    trainer = quiet_trainer(folder, callbacks=[save, *callbacks], **how)
    trainer.fit(model, datamodule=data, ckpt_path=resume)
    return model.seen


def check(folder: Path, make_model, make_data, *, callbacks=(), **how):
    """Train straight, and on from the first file that this wrote; the later epochs are the same."""
    straight = fit(folder / "a", make_model(), make_data(), **how)
    assert [epoch for epoch, _ in straight] == sorted(list(range(EPOCHS)) * STEPS)
    file = min((folder / "a").glob("step*.ckpt"))
    done = int(file.stem.removeprefix("step="))
    assert 0 < done < len(straight)
    seen = fit(folder / "b", make_model(), make_data(), resume=file, callbacks=callbacks, **how)
    left = len(straight) - done
    assert len(seen) == left or callbacks
    assert seen[-left:] == straight[done:]


FILES = {
    "after an epoch": {},
    "after its validation": {"save_on_train_epoch_end": False},
    "of the best score": {"monitor": "score", "mode": "max"},
    "of every second epoch, and the last": {"every_n_epochs": 2, "save_last": True},
    "at its last step": {"every_n_train_steps": STEPS},
}


@pytest.mark.parametrize("save", FILES.values(), ids=FILES)
def test_epochs_after_a_resume_are_those_of_a_straight_run(tmp_path, save):
    check(tmp_path, Model, Module, save=save)


@pytest.mark.parametrize("save", [{}, {"every_n_train_steps": STEPS}])
def test_a_run_that_is_limited_by_steps_resumes_likewise(tmp_path, save):
    check(tmp_path, Model, Module, save=save, max_epochs=-1, max_steps=STEPS * EPOCHS)


@pytest.mark.cases(1)
@pytest.mark.parametrize("executor", ["workers", "torch"])
def test_workers_that_are_ahead_do_not_bring_back_the_old_epoch(tmp_path, executor):
    augment = A.Compose([A.ColorJitter(p=1), A.HorizontalFlip()])

    def make_data():
        # torch's own workers key what Albumentations draws, and nothing else.
        data = Module(executor, augment=augment, augment_on="cpu")
        data.train_dataset = Drawn if executor == "workers" else Still
        return data

    check(tmp_path, Model, make_data, save={"every_n_train_steps": STEPS})


class Still(Drawn):
    def __getitem__(self, index):
        return np.full((1, 2, 3), index * 20, np.uint8)


def test_a_rank_goes_on_with_its_share_of_the_next_epoch(tmp_path):
    check(tmp_path, Model, lambda: Module(rank=1))


def test_the_number_of_steps_may_be_asked_for_before_the_resume(tmp_path):
    check(tmp_path, OneCycle, Module)


def test_a_tuner_may_train_before_the_resume(tmp_path):
    check(tmp_path, Model, Module, callbacks=[LearningRateFinder(num_training_steps=2)])


@pytest.mark.parametrize("how", [{"limit_train_batches": 2}, {"val_check_interval": 2}])
def test_a_resume_within_an_epoch_keeps_its_number(tmp_path, how):
    straight = fit(tmp_path / "a", Model(), Module(), save={"every_n_train_steps": 1}, **how)
    batches = {epoch: [batch for at, batch in straight if at == epoch] for epoch in range(EPOCHS)}
    files = sorted((tmp_path / "a").glob("*.ckpt"))
    assert len(files) == len(straight)
    for file in files[1::3]:
        for epoch, batch in fit(tmp_path / "b", Model(), Module(), resume=file, **how):
            assert batch in batches[epoch]


def test_loaders_that_are_made_anew_begin_with_their_epoch(tmp_path):
    check(tmp_path, Model, Module, reload_dataloaders_every_n_epochs=1)


def test_a_stream_is_told_the_epoch_that_comes_next(tmp_path):
    check(tmp_path, Model, lambda: Module(stream=True))


def test_a_trainer_that_fits_again_goes_on(tmp_path):
    straight = fit(tmp_path, Model(), Module())
    model, data = Model(), Module()
    fit(tmp_path / "a", model, data, max_epochs=2)
    trainer = model.trainer
    trainer.fit_loop.max_epochs = EPOCHS
    trainer.fit(model, datamodule=data)
    assert model.seen == straight
    trainer.fit(model, datamodule=data, ckpt_path=tmp_path / f"step={STEPS:02d}.ckpt")
    assert model.seen[len(straight) :] == straight[STEPS:]
