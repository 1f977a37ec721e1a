"""A program of several ranks that train, save and go on.

Arguments: folder, and phases as JSON: numbers of ranks, each with a list of settings for
:func:`run`.
"""

from __future__ import annotations

import json
import os
import random
import sys
import warnings
from functools import partial
from pathlib import Path

import numpy as np
import torch
from conformance.forked_ranks import on_ranks
from lightning.pytorch.callbacks import ModelCheckpoint
from resilience.cells import LOADERS, Images, Module
from resilience.runs import Recorder, train
from torch.utils.data import DistributedSampler, IterableDataset, Sampler, WeightedRandomSampler
from trainers import quiet_trainer, trained

from lightning_fastdata import BucketBatchSampler, FastDataLoader, FastDataModule
from lightning_fastdata.errors import OptionsError
from lightning_fastdata.order.epoch_order import rank_now


class InGroups(Images):
    """Stored in groups of four samples, as those of a table are."""

    def block_starts(self):
        return range(0, len(self), 4)


class Own(Sampler):
    """An order of the user's own, which draws from global generators as it goes."""

    def __init__(self, length):
        self.length = length

    def __len__(self):
        return self.length

    def __iter__(self):
        for place in np.random.permutation(self.length).tolist():
            yield (place + random.randrange(3)) % self.length


class OfLikeLength(Module):
    """Reads batches of a budget, by lengths that it makes up."""

    def train_dataloader(self):
        lengths = [5 + index % 7 for index in range(self.length)]
        batches = BucketBatchSampler(lengths, tokens=40)
        return self.make_loader(self.train_dataset(), stage="train", batch_sampler=batches)


SAMPLERS = {"own": Own, "weighted": lambda n: WeightedRandomSampler(range(1, n + 1), n + 6)}


class Uneven(DistributedSampler):
    """Gives its first rank a batch more, as MONAI's do with ``even_divisible=False``."""

    def __init__(self, length):
        super().__init__(range(length))
        self.num_samples += 0 if self.rank else 4


class Seeded(DistributedSampler):
    """Holds a generator that each rank has seeded in its own way."""

    def __init__(self, length):
        super().__init__(range(length))
        self.generator = torch.Generator().manual_seed(self.rank)


class WithMethod(DistributedSampler):
    """Has a method of the name of a seed, which is another object on each rank."""

    def __init__(self, length):
        super().__init__(range(length))
        self.seed = self.reseed

    def reseed(self, seed):
        pass

    def __iter__(self):
        return iter(range(self.rank, self.total_size, self.num_replicas))


ODD = {"uneven": Uneven, "seeded": Seeded, "shuffled": None, "method": WithMethod}


def told(folder, ranks, sampler):
    """Write what is said of a sampler, or a shuffle, whose ranks do not fit together."""
    data = Module(LOADERS["inline"], batch_size=4, length=16, sampler=ODD[sampler])
    data.seed = int(os.environ["LOCAL_RANK"]) if sampler == "shuffled" else data.seed
    file = folder / f"{sampler}-{os.environ['LOCAL_RANK']}"
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        try:
            trainer = quiet_trainer(folder, strategy="ddp", devices=ranks)
            trainer.fit(Recorder(folder / "odd"), data)
        except OptionsError as error:
            file.write_text(f"refused: {error}")
            return
    file.write_text(" ".join(str(warning.message) for warning in warned))


class Numbers(IterableDataset):
    """A stream whose state is what is left of its rank's part."""

    left = None

    def __iter__(self):
        if self.left is None:
            rank, ranks = rank_now()
            self.left = list(range(rank, 16, ranks))
        while self.left:
            yield self.left.pop(0)
        self.left = None

    def state_dict(self):
        return {"left": self.left and list(self.left)}

    def load_state_dict(self, state):
        self.left = state["left"] and list(state["left"])


STREAMS = {
    "module": lambda: FastDataModule.from_datasets(Numbers(), batch_size=2, num_workers=0),
    "loader": lambda: FastDataLoader(Numbers(), 2),
}


def streamed(folder, ranks):
    """Write which numbers this rank took, before a checkpoint and after it, or what was said."""
    how = {"folder": folder, "strategy": "ddp" if ranks > 1 else "auto", "devices": ranks}
    for name, make in STREAMS.items():
        saved, taken = folder / f"stream-{name}.ckpt", []
        if ranks > 1:
            save = ModelCheckpoint(folder, saved.stem, every_n_train_steps=2)
            own = {"callbacks": [save], "enable_checkpointing": True, "max_steps": 2}
            taken = trained(make(), torch.Tensor.tolist, **how, **own)
        if saved.exists():
            try:
                taken += trained(make(), torch.Tensor.tolist, resume=saved, **how)
            except OptionsError as error:
                taken = str(error)
        rank = os.environ.get("LOCAL_RANK", "0")
        (folder / f"stream-{name}-{ranks}-{rank}").write_text(json.dumps(taken))


def run(folder, ranks, *, name, loader, batch_size, steps, resume=None, length, **about):
    """Train for so many steps in all; save at the last one, and record what each rank took."""
    rank = int(os.environ.get("LOCAL_RANK", "0"))
    dataset = InGroups if about.get("shuffle") == "blocks" else Images
    about["sampler"] = SAMPLERS.get(about.get("sampler"))
    kind = OfLikeLength if about.pop("by_length", False) else Module
    data = kind(LOADERS[loader], dataset=dataset, batch_size=batch_size, length=length, **about)
    save = ModelCheckpoint(folder, name, every_n_train_steps=steps, enable_version_counter=False)
    model = Recorder(folder / f"{name}-{rank}")
    train(
        model,
        data,
        folder,
        resume=None if resume is None else folder / f"{resume}.ckpt",
        callbacks=[save],
        strategy="ddp" if ranks > 1 else "auto",
        devices=ranks,
        max_epochs=-1,
        max_steps=steps,
    )


def main(ranks, folder, runs):
    torch.set_num_threads(1)
    for settings in runs:
        run(folder, ranks, **settings)
    for sampler in ODD if ranks > 1 else ():
        told(folder, ranks, sampler)
    streamed(folder, ranks)


if __name__ == "__main__":
    for ranks, runs in json.loads(sys.argv[2]):
        on_ranks(ranks, partial(main, ranks, Path(sys.argv[1]), runs))
