"""A fit that resumes from a file of ``ModelCheckpoint`` goes on with the epoch that comes next.

That it goes on within an epoch too, whoever reads and whatever else is set, is a law of
``resilience``.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import ModelCheckpoint
from samples import Samples
from torch.utils.data import DistributedSampler
from trainers import Learner, quiet_trainer

from lightning_fastdata import FastDataModule, LoaderOptions

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")

STEPS = 3
"""Batches in an epoch."""
EPOCHS = 3


DRAWN = Samples(lambda index: torch.tensor([index, np.random.randint(256)]), 4 * STEPS)


class Share(FastDataModule):
    """What one of two ranks reads."""

    def train_dataloader(self):
        sampler = DistributedSampler(DRAWN, num_replicas=2, rank=1, seed=5)
        return self.make_loader(DRAWN, stage="train", sampler=sampler, batch_size=2)


def data_of(kind=FastDataModule, **arguments):
    options = LoaderOptions(num_workers=0, executor="inline", probe=False)
    return kind.from_datasets(DRAWN, DRAWN, batch_size=4, options=options, seed=5, **arguments)


class Model(Learner):
    def __init__(self):
        super().__init__(lambda batch: (self.current_epoch, batch.tolist()))

    def validation_step(self, batch, batch_idx):
        self.log("score", float(self.global_step))


def fit(folder, model, data, *, save=None, resume=None, beside=(), **arguments):
    save = ModelCheckpoint(folder, "{step:02d}", save_top_k=-1, **(save or {}))
    how = {"max_epochs": EPOCHS, "limit_val_batches": 1, "enable_checkpointing": True, **arguments}
    trainer = quiet_trainer(folder, callbacks=[save, *beside], **how)
    trainer.fit(model, datamodule=data, ckpt_path=resume)
    return model.seen


FILES = {
    "after an epoch": {},
    "after its validation": {"save_on_train_epoch_end": False},
    "of the best score": {"monitor": "score", "mode": "max"},
    "of every second epoch, and the last": {"every_n_epochs": 2, "save_last": True},
    "at its last step": {"every_n_train_steps": STEPS},
}


@pytest.mark.parametrize(
    ("save", "kind"),
    [*((save, FastDataModule) for save in FILES.values()), ({}, Share)],
    ids=[*FILES, "on one of two ranks"],
)
def test_epochs_after_a_resume_are_those_of_a_straight_run(tmp_path, save, kind):
    straight = fit(tmp_path / "a", Model(), data_of(kind), save=save)
    assert [epoch for epoch, _ in straight] == sorted(list(range(EPOCHS)) * STEPS)
    file = min((tmp_path / "a").glob("step*.ckpt"))
    done = int(file.stem.removeprefix("step="))
    assert 0 < done < len(straight)
    rest = fit(tmp_path / "b", Model(), data_of(kind), save=save, resume=file)
    assert rest == straight[done:]


def test_a_trainer_that_fits_again_goes_on(tmp_path):
    straight = fit(tmp_path, Model(), data_of())
    model, data = Model(), data_of()
    fit(tmp_path / "a", model, data, max_epochs=2)
    trainer = model.trainer
    trainer.fit_loop.max_epochs = EPOCHS
    trainer.fit(model, datamodule=data)
    assert model.seen == straight
    trainer.fit(model, datamodule=data, ckpt_path=tmp_path / f"step={STEPS:02d}.ckpt")
    assert model.seen[len(straight) :] == straight[STEPS:]


class Stop(Exception):
    """Ends a fit as whatever fails would."""


class Stops(Callback):
    """Raises an error at a step."""

    def __init__(self, step):
        self.step = step

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        if trainer.global_step == self.step:
            self.step = -1
            raise Stop


def test_a_fit_behind_an_interrupted_one_draws_for_each_batch_and_is_resumed(tmp_path):
    def data():
        return data_of(augment=lambda batch: batch + torch.randint(256, batch.shape))

    straight = fit(tmp_path / "a", Model(), data())
    model, of_fit, done = Model(), data(), STEPS + 1
    each_step = {"every_n_train_steps": 1}
    with pytest.raises(Stop):
        fit(tmp_path / "b", model, of_fit, save=each_step, beside=[Stops(done)])
    assert model.seen == straight[:done]
    model.trainer.fit(model, datamodule=of_fit)  # which begins the epoch anew
    assert model.seen[done:] == straight[STEPS:]
    file = tmp_path / "b" / f"step={done + 2:02d}.ckpt"
    assert fit(tmp_path / "c", Model(), data(), resume=file) == straight[STEPS + 2 :]


class Evaluates(Callback):
    """Has another trainer validate another model on the data of a fit."""

    def on_train_epoch_end(self, trainer, pl_module):
        self.of_fit = trainer
        other = quiet_trainer(trainer.default_root_dir)
        other.validate(Model(), datamodule=trainer.datamodule, verbose=False)
        assert trainer.datamodule.trainer is trainer


def test_another_trainer_that_evaluates_the_same_data_changes_nothing(tmp_path):
    def data():
        return data_of(augment=lambda batch: batch + torch.randint(256, batch.shape))

    straight = fit(tmp_path, Model(), data())
    evaluates, of_fit, each_step = Evaluates(), data(), {"every_n_train_steps": 1}
    got = fit(tmp_path / "a", Model(), of_fit, save=each_step, beside=[evaluates])
    assert got == straight
    for done in (STEPS + 1, 2 * STEPS):
        file = tmp_path / "a" / f"step={done:02d}.ckpt"
        assert fit(tmp_path / "b", Model(), data(), resume=file) == straight[done:]
    quiet_trainer(tmp_path).validate(Model(), datamodule=of_fit, verbose=False)
    evaluates.of_fit.save_checkpoint(tmp_path / "end.ckpt")
    longer = {"resume": tmp_path / "end.ckpt", "max_epochs": EPOCHS + 1}
    rest = fit(tmp_path / "c", Model(), data(), **longer)
    assert rest == fit(tmp_path / "d", Model(), data(), max_epochs=EPOCHS + 1)[len(straight) :]


@pytest.mark.filterwarnings("error::lightning_fastdata.errors.FastDataWarning")
def test_a_checkpoint_that_is_evaluated_leaves_the_training_where_it_is(tmp_path):
    straight = fit(tmp_path, Model(), data_of())
    model, data = Model(), data_of()
    fit(tmp_path / "a", model, data, save={"every_n_train_steps": 1}, max_steps=STEPS + 1)
    early = tmp_path / "a" / "step=01.ckpt"
    model.trainer.validate(model, datamodule=data, ckpt_path=early, verbose=False)
    model.trainer.save_checkpoint(tmp_path / "end.ckpt")
    rest = fit(tmp_path / "b", Model(), data_of(), resume=tmp_path / "end.ckpt")
    assert rest == straight[STEPS + 1 :]


def test_a_fit_from_no_checkpoint_has_a_seed_of_its_own(tmp_path, monkeypatch):
    monkeypatch.setenv("PL_GLOBAL_SEED", "6")
    fit(tmp_path, Model(), data_of(), max_epochs=1)
    saved, data, seeded = tmp_path / f"step={STEPS:02d}.ckpt", data_of(), data_of()
    data.seed, seeded.seed = None, 6
    quiet_trainer(tmp_path).validate(Model(), datamodule=data, ckpt_path=saved, verbose=False)
    assert data.run_seed() == 6
    fit(tmp_path / "a", Model(), data, resume=saved, max_epochs=2)
    assert data.run_seed() == 5
    got, expected = (fit(tmp_path / "b", Model(), each, max_epochs=1) for each in (data, seeded))
    assert got == expected


def first_two(data):
    """The first batches of a training loader, the second from one that goes on after the first."""
    loader, other = data.train_dataloader(), data.train_dataloader()
    first = next(iter(loader)).tolist()
    other.load_state_dict(loader.state_dict())
    return [first, next(iter(other)).tolist()]


class Looks(Callback):
    """Looks into loaders beside that of the training."""

    def __init__(self):
        self.found = []

    def on_train_batch_end(self, trainer, *_):
        self.found.append(first_two(trainer.datamodule))


@pytest.mark.filterwarnings("error::lightning_fastdata.errors.FastDataWarning")
def test_a_loader_beside_that_of_the_training_tells_of_its_own_batches(tmp_path):
    straight = fit(tmp_path / "a", Model(), data_of(), save={"every_n_train_steps": 1})
    begins = [[batch for of, batch in straight if of == epoch][:2] for epoch in range(EPOCHS)]
    data, looks, saved = data_of(), Looks(), tmp_path / "a" / f"step={STEPS + 1:02d}.ckpt"
    rest = fit(tmp_path / "b", Model(), data, resume=saved, beside=[looks])
    assert rest == straight[STEPS + 1 :]
    assert looks.found == [begins[epoch] for epoch, _ in rest]
    assert first_two(data) == begins[0]
