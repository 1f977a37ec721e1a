"""Samples and workers draw other random numbers in each epoch, and with each seed."""

from __future__ import annotations

import os
import random
import signal
from itertools import chain

import numpy as np
import pytest
import torch
from lightning import seed_everything
from samples import Samples, Stream
from torch.utils.data import Dataset
from trainers import trained

from lightning_fastdata import FastDataLoader, FastDataModule, LoaderOptions

SAMPLES, EPOCHS = 16, 2
SOURCES = {
    "random": lambda: random.getrandbits(31),
    "numpy": lambda: int(np.random.randint(2**31)),
    "torch": lambda: int(torch.randint(2**31, ())),
}


@pytest.fixture(autouse=True)
def _global_seed(monkeypatch):
    monkeypatch.setenv("PL_GLOBAL_SEED", "0")  # to be put back: seed_everything changes it


class Seeded(Dataset):
    """Shows what its worker was seeded with, by the recipe of torch's documentation."""

    def __len__(self):
        return SAMPLES

    def __getitem__(self, index):
        return self.seed


class Fatal(Seeded):
    """Kills its process once, at the last sample."""

    def __init__(self, marker):
        self.marker = marker

    def __getitem__(self, index):
        if index == SAMPLES - 1 and not self.marker.exists():
            self.marker.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return super().__getitem__(index)


def keep_seed(_worker):
    info = torch.utils.data.get_worker_info()
    info.dataset.seed = torch.initial_seed()


def fit(source, seed, *, persistent, own=None):
    seed_everything(seed)
    how = {"num_workers": 2, "executor": "workers", "persistent_workers": persistent}
    options = LoaderOptions(**how, probe=False)
    drawn = Samples(lambda _: SOURCES[source](), SAMPLES)
    data = FastDataModule.from_datasets(drawn, batch_size=4, options=options, seed=own)
    return list(chain(*trained(data, torch.Tensor.tolist, max_epochs=EPOCHS)))


@pytest.mark.parametrize(
    ("source", "persistent"),
    [("random", False), ("torch", False), ("numpy", False), ("numpy", True)],
)
def test_epochs_and_seeds_draw_other_numbers(source, persistent):
    seeds = [(1, None), (2, None), (2, 7)] if source == "numpy" else [(1, None)]
    runs = [fit(source, seed, persistent=persistent, own=own) for seed, own in seeds]
    drawn = {number for run in runs for number in run}
    assert len(drawn) == len(runs) * SAMPLES * EPOCHS


@pytest.mark.parametrize(
    ("executor", "persistent"), [("workers", False), ("workers", True), ("inline", False)]
)
def test_a_stream_draws_other_numbers_in_each_epoch(executor, persistent):
    workers = 0 if executor == "inline" else 2
    stream = Stream(lambda: (SOURCES["torch"]() for _ in range(SAMPLES // 2)))
    drawn = []
    for seed in (1, 2):
        torch.manual_seed(seed)
        how = {"executor": executor, "persistent_workers": persistent}
        loader = FastDataLoader(stream, 4, num_workers=workers, **how)
        drawn += [int(x) for _ in range(EPOCHS) for batch in loader for x in batch]
        loader.close()
    assert len(set(drawn)) == len(drawn) == 2 * EPOCHS * SAMPLES // 2 * max(1, workers)


def test_a_process_in_the_place_of_a_dead_one_is_seeded_with_another_number(tmp_path):
    loader = FastDataLoader(
        Fatal(tmp_path / "died"), 1, num_workers=1, executor="workers", worker_init_fn=keep_seed
    )
    *before, after = (int(batch) for batch in loader)
    assert (tmp_path / "died").exists()
    assert len(set(before)) == 1
    assert after not in before


@pytest.mark.parametrize("executor", ["workers", "torch"])
def test_what_a_worker_is_seeded_with_differs_between_epochs_and_seeds(executor):
    seeds = []
    for seed in (1, 2):
        torch.manual_seed(seed)
        loader = FastDataLoader(
            Seeded(), 4, num_workers=2, executor=executor, worker_init_fn=keep_seed
        )
        seeds += [{int(x) for batch in loader for x in batch} for _ in range(2)]
        loader.close()
    assert not any(a & b for n, a in enumerate(seeds) for b in seeds[:n])
