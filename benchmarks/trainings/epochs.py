"""Trainings whose epochs start slowly, and those of several loaders, workers or ranks."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import IterableDataset, get_worker_info

from trainings.crowds import Chores
from trainings.decoding import Rows
from trainings.parts import Accepted, Load, Made, Model, several, spin
from trainings.storage import ObjectStore


def validated(_: Path, form: Any, val_form: Any, sample_s: float, val_batches: int) -> Made:
    val = Load(dataset=ObjectStore(16 * val_batches, sample_s), form=val_form,
               options={"num_workers": 0})  # fmt: skip
    load = Load(dataset=Rows(16 * 60, 200), form=form, options={"num_workers": 1})
    return Made(load=load, val=val, model=Model(0.01), trainer={"val_check_interval": 20})


class Remaking(Model):
    """A model that builds its dataset whenever it is asked for its loader."""

    def __init__(self, load: Load, made_s: float) -> None:
        super().__init__(0.01)
        self.load, self.made_s = load, made_s

    def train_dataloader(self) -> Any:
        time.sleep(self.made_s)
        return self.load.loader()


def remade(_: Path, form: Any, made_s: float) -> Made:
    load = Load(dataset=Rows(16 * 30, 200), form=form, options={"num_workers": 2})
    trainer = {"max_epochs": 6, "reload_dataloaders_every_n_epochs": 1}
    own = Load(dataset=load.dataset, form="own", options=load.options)
    return Made(load=own, model=Remaking(load, made_s), trainer=trainer)


def short_epochs(
    _: Path, form: Any, workers: int, batches: int, epochs: int, megabytes: int = 0, **options: Any
) -> Made:
    dataset: Any = Rows(16 * batches, max(200, megabytes * 250_000))
    if megabytes:
        dataset.names = [f"images/class-{n % 1000}/file-{n}.jpg" for n in range(300_000)]
        dataset.row = torch.rand(200)
    options = {"num_workers": workers, **options}
    load = Load(dataset=dataset, form=form, options=options)
    return Made(load=load, model=Model(0.01), trainer={"max_epochs": epochs})


class Indexed(IterableDataset[torch.Tensor]):
    """A stream that reads its index whenever it begins anew."""

    def __init__(self, count: int, open_s: float, cpu: bool) -> None:
        self.count, self.open_s, self.cpu = count, open_s, cpu

    def __iter__(self) -> Iterator[torch.Tensor]:
        (spin if self.cpu else time.sleep)(self.open_s)
        info = get_worker_info()
        first, every = (0, 1) if info is None else (info.id, info.num_workers)
        for number in range(first, self.count, every):
            yield torch.full((200,), float(number))


def reopened(_: Path, form: Any, workers: int, open_s: float, cpu: bool, **options: Any) -> Made:
    options = {"num_workers": workers, **options}
    load = Load(dataset=Indexed(16 * 24, open_s, cpu), form=form, options=options)
    return Made(load=load, model=Model(0.01), trainer={"max_epochs": 8})


class Shards(IterableDataset[torch.Tensor]):
    """Shards that are dealt out to the workers; the first is the only large one."""

    def __init__(self, large: int, small: int, sample_s: float, cpu: bool) -> None:
        self.large, self.small, self.sample_s, self.cpu = large, small, sample_s, cpu

    def __iter__(self) -> Iterator[torch.Tensor]:
        info = get_worker_info()
        first = info is None or info.id == 0
        for number in range(self.large if first else self.small):
            (spin if self.cpu else time.sleep)(self.sample_s)
            yield torch.full((200,), float(number))


def uneven(_: Path, form: Any, workers: int, sample_s: float, cpu: bool, small: int = 16) -> Made:
    dataset = Shards(int(3.5 / sample_s), small, sample_s, cpu)
    load = Load(dataset=dataset, form=form, options={"num_workers": workers})
    return Made(load=load, model=Model(0.25 * 16 * sample_s))


def combined(_: Path, key: str, kind: str, form: Any, sample_s: float) -> Made:
    slow: Any = ObjectStore(16 * 60, sample_s) if kind == "store" else Chores(16 * 60, sample_s)
    loads = {
        "labelled": Load(dataset=Rows(16 * 60, 200), form=form, options={"num_workers": 1}),
        key: Load(dataset=slow, form=form, options={"num_workers": 1}),
    }
    return Made(load=loads, model=Model(0.01))


class OneSlowRank(ObjectStore):
    """The disk of one host is slow."""

    def __getitem__(self, index: int) -> torch.Tensor:
        if os.environ.get("LOCAL_RANK", "0") == "1":
            time.sleep(self.latency_s[index])
        return self.sample


def two_ranks(_: Path, form: Any, sample_s: float) -> Made:
    load = Load(dataset=OneSlowRank(2 * 16 * 80, sample_s), form=form, options={"num_workers": 1})
    # Ranks tell each other at ends of epochs.
    trainer = {"devices": 2, "strategy": "ddp", "max_epochs": 2}
    return Made(load=load, model=Model(0.01), trainer=trainer)


# A worker that is kept opens its index all the same.
PAUSED = Accepted(codes=("FD310",), kinds=("paused between epochs",), words=("dataset",))

EPOCHS = [
    *several(
        "validation without workers",
        Accepted(codes=("FD318",), kinds=("starved in validation",), words=("num_workers",)),
        validated,
        {
            "3 ms a sample": {
                "form": "fast", "val_form": "fast", "sample_s": 0.003, "val_batches": 12,
            },
            "2 ms, torch's DataLoader": {
                "form": "torch", "val_form": "torch", "sample_s": 0.002, "val_batches": 15,
            },
        },
    ),
    *several(
        "loaders made anew each epoch",
        Accepted(codes=("FD310",), kinds=("paused between epochs",), words=("reload_dataload",)),
        remade,
        {
            "0.3 s": {"form": "fast", "made_s": 0.3},
            "0.3 s, torch's DataLoader": {"form": "torch", "made_s": 0.3},
        },
    ),
    *several(
        "short epochs, workers start anew",
        Accepted(codes=("FD310",), kinds=("paused between epochs",), words=("persistent_workers",)),
        short_epochs,
        {
            "10 steps, 2 workers": {"form": "fast", "workers": 2, "batches": 10, "epochs": 20},
            "6 steps, torch's DataLoader, 4 workers": {
                "form": "torch", "workers": 4, "batches": 6, "epochs": 30,
            },
            "8 steps, FastDataModule": {
                "form": "module", "workers": 2, "batches": 8, "epochs": 25,
                "persistent_workers": False,
            },
        },
    ),
    *several(
        "spawned workers, big dataset",
        Accepted(codes=("FD310",), kinds=("paused between epochs",), words=("persistent_workers",)),
        short_epochs,
        {
            "1 worker, FastDataLoader": {
                "form": "fast", "workers": 1, "batches": 40, "epochs": 3, "megabytes": 20,
                "multiprocessing_context": "spawn",
            },
            "1 worker, torch's DataLoader": {
                "form": "torch", "workers": 1, "batches": 60, "epochs": 3, "megabytes": 20,
                "multiprocessing_context": "spawn",
            },
        },
    ),
    *several(
        "stream that opens an index", PAUSED, reopened,
        {
            "400 ms, 1 worker": {"form": "fast", "workers": 1, "open_s": 0.4, "cpu": False},
            "300 ms of a CPU, workers kept": {
                "form": "fast", "workers": 2, "open_s": 0.3, "cpu": True,
                "persistent_workers": True,
            },
            "300 ms, torch's DataLoader": {
                "form": "torch", "workers": 1, "open_s": 0.3, "cpu": False,
            },
        },
    ),
    *several(
        "one worker yields nearly everything", Accepted(codes=("FD325",)), uneven,
        {
            "4 workers, 3 ms": {"form": "fast", "workers": 4, "sample_s": 0.003, "cpu": False},
            "2 workers, 2 ms of a CPU": {
                "form": "own", "workers": 2, "sample_s": 0.002, "cpu": True,
            },
            "4 workers, the others a third": {
                "form": "fast", "workers": 4, "sample_s": 0.004, "cpu": False, "small": 80,
            },
        },
    ),
    *several(
        "one loader of two is slow", Accepted(codes=("FD303",), words=("unlabelled",)), combined,
        {
            "4 ms a sample": {
                "key": "unlabelled", "kind": "store", "form": "fast", "sample_s": 0.004,
            },
        },
    ),
    *several(
        "one loader of two computes", Accepted(codes=("FD305",), words=("replay",)), combined,
        {"2 ms a sample": {"key": "replay", "kind": "cpu", "form": "fast", "sample_s": 0.002}},
    ),
    *several(
        "one loader of two, torch's",
        Accepted(codes=("FD102", "FD303"), words=(") loader 'unlabelled':",)), combined,
        {"4 ms": {"key": "unlabelled", "kind": "store", "form": "torch", "sample_s": 0.004}},
    ),
    *several(
        "one slow rank", Accepted(codes=("FD316",), words=("rank 1",)), two_ranks,
        {
            "2 ms a sample": {"form": "fast", "sample_s": 0.002},
            "4 ms, torch's DataLoader": {"form": "torch", "sample_s": 0.004},
        },
    ),
]  # fmt: skip
