"""Ways to load, to train, to stop and to go on, and some of their combinations."""

from __future__ import annotations

import os
import random
import signal
from collections import namedtuple
from datetime import timedelta

import albumentations as A
import numpy as np
import torch
from device.host_streams import HostStreams
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import (
    BatchSizeFinder,
    LearningRateFinder,
    ModelCheckpoint,
    OnExceptionCheckpoint,
)
from lightning.pytorch.utilities import CombinedLoader
from resilience.runs import Images, Marks, Recorder, Stop, rows
from torch.utils.data import Sampler, WeightedRandomSampler

from lightning_fastdata import FastDataModule, LoaderOptions
from lightning_fastdata.augment.mixing import MixUp, mixed

SAMPLES, BATCH = 22, 4
"""Six steps an epoch, of which the last has two samples."""
STEPS, EPOCHS = 6, 3

Loader = namedtuple("Loader", "executor workers")
LOADERS = {
    "inline": Loader("inline", 0),
    **{f"workers-{n}": Loader("workers", n) for n in (1, 2, 4)},
    **{f"gather-{n}": Loader("gather", n) for n in (1, 2)},
    **{f"torch-{n}": Loader("torch", n) for n in (0, 2)},
}


# -- what is trained on ----------------------------------------------------------------------------


class Draws(Images):
    """Draws from the three global generators."""

    def __getitem__(self, index):
        drawn = random.random(), float(np.random.rand()), float(torch.rand(()))
        return {**super().__getitem__(index), "drawn": np.array(drawn)}


class Augmented(Images):
    """Calls a pipeline of its own."""

    def __init__(self, length):
        super().__init__(length)
        self.transform = pipeline()

    def __getitem__(self, index):
        sample = super().__getitem__(index)
        return {**sample, "image": self.transform(image=sample["image"])["image"]}


class Reversing(Sampler):
    """An order of the user's own, which tells where it is and can be set back there."""

    def __init__(self, length):
        self.length, self.epoch, self.at = length, 0, 0

    def __len__(self):
        return self.length

    def __iter__(self):
        while self.at < self.length:
            self.at += 1
            yield (self.epoch * 5 - self.at) % self.length
        self.epoch, self.at = self.epoch + 1, 0

    def state_dict(self):
        return {"epoch": self.epoch, "at": self.at}

    def load_state_dict(self, state):
        self.epoch, self.at = state["epoch"], state["at"]


def pipeline():
    return A.Compose([A.HorizontalFlip(), A.ColorJitter(p=1), A.RandomCrop(6, 6)])


def brighter(batch):
    """A transform of batches that draws from torch's global generator."""
    return {**batch, "image": batch["image"].float() + torch.rand(len(batch["image"]), 1, 1, 1)}


class Module(FastDataModule):
    """Trains on one dataset or several; a device without streams has some like a GPU's."""

    def __init__(self, loader, *, dataset=Images, length=SAMPLES, mode=None, sampler=None, **about):
        how = {"num_workers": loader.workers, "executor": loader.executor}
        # Nothing is left to be found out by a process of its own, which takes longer than a run.
        options = LoaderOptions(**how, timeout=120, probe=False)
        super().__init__(**{"batch_size": BATCH, **about}, options=options, seed=3, guard="off")
        self.dataset, self.length, self.mode, self.sampler = dataset, length, mode, sampler

    def device_streams(self, device):
        return HostStreams()

    def train_dataset(self):
        if self.mode is None:
            return self.dataset(self.length)
        return {"a": self.dataset(self.length), "b": self.dataset(self.length // 2)}

    def val_dataset(self):
        return self.dataset(BATCH)

    def train_dataloader(self):
        if self.sampler is not None:
            data = self.train_dataset()
            return self.make_loader(data, stage="train", sampler=self.sampler(len(data)))
        loaders = super().train_dataloader()
        return loaders if self.mode is None else CombinedLoader(loaders, self.mode)


def weighted(length):
    generator = torch.Generator().manual_seed(4)
    weights = torch.arange(1, length + 1).float()
    return WeightedRandomSampler(weights, length, generator=generator)


def finder():
    """One that tries a single size and takes it."""
    return BatchSizeFinder(init_val=2, max_trials=1)


BEGINS_ANEW = ("lr finder after", "batch finder after")
"""A tuner in a run that resumes sets Lightning's own counts back: the whole training follows."""

FEATURES = {
    "plain": {},
    "number of steps asked": {"model": {"one_cycle": True}},
    "reload": {"trainer": {"reload_dataloaders_every_n_epochs": 1}},
    "limit 4": {"trainer": {"limit_train_batches": 4}},
    "limit 0.5": {"trainer": {"limit_train_batches": 0.5}},
    "overfit 3": {"trainer": {"overfit_batches": 3}},
    "accumulate": {"trainer": {"accumulate_grad_batches": 2}},
    "validate twice": {"trainer": {"val_check_interval": 0.5, "limit_val_batches": 1}},
    "min_size": {"module": {"mode": "min_size"}},
    "max_size": {"module": {"mode": "max_size"}},
    "max_size_cycle": {"module": {"mode": "max_size_cycle"}},
    "lr finder before": {"first": lambda: LearningRateFinder(num_training_steps=3)},
    "lr finder after": {"later": lambda: LearningRateFinder(num_training_steps=3)},
    "batch finder before": {"module": {"batch_size": 2}, "first": finder},
    "batch finder after": {"module": {"batch_size": 2}, "later": finder},
    "deferred augment": {"module": {"augment": pipeline, "augment_on": "gpu"}},
    "augment": {"module": {"augment": pipeline, "augment_on": "cpu"}},
    "own pipeline": {"module": {"dataset": Augmented}},
    "random callable": {"module": {"augment": lambda: brighter}},
    "draws": {"module": {"dataset": Draws}},
    "mixup": {"module": {"augment": lambda: mixed(pipeline(), MixUp())}},
    "drop_last": {"module": {"drop_last": True}},
    "weighted sampler": {"module": {"sampler": weighted}},
    "sampler with state": {"module": {"sampler": Reversing}},
    "lookahead": {
        "module": {"augment": pipeline, "augment_on": "gpu", "prefetch": "lookahead"},
    },
    "stream of transfers": {"module": {"prefetch": "stream"}},
}


def make_module(feature, loader):
    about = dict(FEATURES[feature].get("module", {}))
    if LOADERS[loader].executor == "gather":
        about["dataset"] = rows
    if "augment" in about:
        about["augment"] = about["augment"]()
    return Module(LOADERS[loader], **about)


def make_model(feature, file):
    return Recorder(file, **FEATURES[feature].get("model", {}))


def callbacks_of(feature, when):
    """New callbacks of a run: ``"first"``, or ``"later"`` one that goes on."""
    make = FEATURES[feature].get(when)
    return [] if make is None else [make()]


# -- when it stops ---------------------------------------------------------------------------------


class Ends(Marks):
    """Ends the run before the first step that follows a checkpoint."""

    def __init__(self, folder):
        self.folder = folder

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        if any(self.folder.glob("*.ckpt")):
            raise Stop


class SavesIn(Callback):
    """Saves once, in a hook, when so many steps were recorded."""

    def __init__(self, hook, at, folder):
        self.at, self.file = at, folder / "saved.ckpt"
        setattr(self, hook, self.save)

    def save(self, trainer, pl_module, *_):
        fitting = trainer.state.fn == "fit" and not trainer.sanity_checking
        if fitting and pl_module.lines >= self.at and not self.file.exists():
            trainer.save_checkpoint(self.file)


class Raises:
    """Raises once, before the step that follows so many; torch's pickle never sees it."""

    def __init__(self, act, at):
        self.act, self.at, self.done = act, at, False

    def __call__(self, model):
        if model.lines >= self.at and not self.done:
            self.done = True
            self.act()


def stop():
    raise Stop


def interrupt():
    raise KeyboardInterrupt


def terminate():
    os.kill(os.getpid(), signal.SIGTERM)


Moment = namedtuple("Moment", "callbacks raising", defaults=(None,))


def saving(at, **how):
    return Moment(lambda f: [ModelCheckpoint(f, "{step}", save_top_k=-1, **how), Ends(f)])


def hook(name, at):
    return Moment(lambda f: [SavesIn(name, at, f), Ends(f)])


def raised(act, at):
    return Moment(lambda f: [OnExceptionCheckpoint(f)], lambda: Raises(act, at))


MOMENTS = {
    **{f"step {n}": saving(n, every_n_train_steps=n) for n in (1, 3, STEPS, STEPS + 2)},
    "epoch": saving(STEPS, every_n_epochs=1, save_on_train_epoch_end=True),
    "epoch validated": saving(STEPS, every_n_epochs=1, save_on_train_epoch_end=False),
    "time": saving(1, train_time_interval=timedelta(microseconds=1)),
    **{f"exception {n}": raised(stop, n) for n in (0, 1, 3, STEPS - 1, STEPS)},
    **{f"batch start {n}": hook("on_train_batch_start", n) for n in (0, 3, STEPS - 1, STEPS)},
    **{f"batch end {n}": hook("on_train_batch_end", n) for n in (1, 3, STEPS, STEPS + 1)},
    "validation end": hook("on_validation_end", 1),
    "epoch end": hook("on_train_epoch_end", 1),
    # In a later epoch Lightning keeps the counts of the one before, and by itself skips the epoch.
    **{f"epoch start {n}": hook("on_train_epoch_start", n) for n in (0, 1, STEPS + 1)},
    "train start": hook("on_train_start", 0),
    "ctrl-c": raised(interrupt, 3),
    "sigterm": raised(terminate, 3),
    "sigterm at the last": raised(terminate, STEPS - 1),
}


# -- which of them meet ----------------------------------------------------------------------------

Cell = namedtuple("Cell", "feature moment loader then")


def makes_sense(cell):
    """Whether a package of this kind promises anything about a cell."""
    ways = {LOADERS[cell.loader].executor, LOADERS[cell.then].executor}
    module = FEATURES[cell.feature].get("module", {})
    if "gather" in ways:  # rows of tensors, which nothing is drawn for
        return ways <= {"gather"} and not {"augment", "dataset"} & set(module)
    if cell.feature in ("overfit 3", "limit 0.5") and cell.moment == f"epoch start {STEPS + 1}":
        return False  # its last epoch starts after six steps
    if cell.feature in ("draws", "own pipeline"):  # torch's workers draw as they are seeded
        return ways <= {"inline", "workers"}
    return True


def cells(most):
    """So many cells by chance, a third of which go on with the loader that they began with."""
    chance, chosen = random.Random(7), []
    while len(chosen) < most:
        cell = Cell(*(chance.choice(list(each)) for each in (FEATURES, MOMENTS, LOADERS, LOADERS)))
        if len(chosen) % 3 == 0:
            cell = cell._replace(then=cell.loader)
        if makes_sense(cell):
            chosen.append(cell)
    return chosen
