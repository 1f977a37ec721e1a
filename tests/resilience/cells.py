"""Ways to load, to train, and to end a run."""

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
    "mixup": {"module": {"augment": lambda: mixed(pipeline(), MixUp(), stays="index")}},
    "drop_last": {"module": {"drop_last": True}},
    "weighted sampler": {"module": {"sampler": weighted}},
    "sampler with state": {"module": {"sampler": Reversing}},
    "prefetch": {
        "module": {"augment": pipeline, "augment_on": "gpu", "prefetch": "auto"},
    },
}


def make_module(feature, loader):
    about = dict(FEATURES[feature].get("module", {}))
    if LOADERS[loader].executor == "gather":
        about["dataset"] = rows
    if "augment" in about:
        about["augment"] = about["augment"]()
    return Module(LOADERS[loader], **about)


LENGTHS = {
    "epochs": {"max_epochs": EPOCHS},
    "steps": {"max_epochs": -1, "max_steps": EPOCHS * STEPS},
}


def arguments_of(feature, length="epochs"):
    """What a trainer is given for a feature; what is no feature asks for nothing of its own."""
    about = {**LENGTHS[length], "limit_val_batches": 1, "num_sanity_val_steps": 0}
    return about | FEATURES.get(feature, {}).get("trainer", {})


def make_model(feature, file):
    return Recorder(file, **FEATURES[feature].get("model", {}))


def tuners_of(feature, when):
    """New callbacks of a run: ``"first"``, or ``"later"`` one that goes on."""
    make = FEATURES[feature].get(when)
    return [] if make is None else [make()]


def families_of(feature):
    """Loaders that may take each other's place; some read rows of tensors, and draw nothing."""
    found = [["inline", "workers-1", "workers-2", "workers-4"]]
    if feature not in ("draws", "own pipeline"):  # torch's workers draw as they are seeded
        found[0] += ["torch-0", "torch-2"]
    if not {"augment", "dataset"} & set(FEATURES[feature].get("module", {})):
        found.append(["gather-1", "gather-2"])
    return found


# -- how a run ends --------------------------------------------------------------------------------


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


HOOKS = (
    "on_train_epoch_start",
    "on_train_batch_start",
    "on_train_batch_end",
    "on_validation_end",
    "on_train_epoch_end",
)


def saving(**how):
    """Saved so, and ended before the next step."""
    return lambda folder, at: ([ModelCheckpoint(folder, save_top_k=-1, **how), Ends(folder)], None)


def hook(name):
    return lambda folder, at: ([SavesIn(name, at, folder), Ends(folder)], None)


def raised(act):
    return lambda folder, at: ([OnExceptionCheckpoint(folder)], Raises(act, at))


def killed(folder, at):
    """Nothing is saved at its end, but behind each step."""
    save = ModelCheckpoint(folder, "{step}", save_top_k=-1, every_n_train_steps=1)
    return [save], Raises(stop, at)


ENDINGS = {
    "raised": raised(stop),
    "ctrl-c": raised(interrupt),
    "sigterm": raised(terminate),
    "killed": killed,
    "epoch": saving(every_n_epochs=1, save_on_train_epoch_end=True),
    "epoch validated": saving(every_n_epochs=1, save_on_train_epoch_end=False),
    "time": saving(train_time_interval=timedelta(microseconds=1)),
    **{name: hook(name) for name in HOOKS},
    "train start": lambda folder, at: hook("on_train_start")(folder, 0),
}
"""Name -> what gives callbacks and what a step raises, of a run that ends behind so many steps."""
