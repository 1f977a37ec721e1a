"""Datasets whose samples have other keys than numbers from 0, and those that none may read."""

from __future__ import annotations

from itertools import chain

import pytest
import torch
from torch.utils.data import Dataset, Sampler
from trainers import trained

from lightning_fastdata import FastDataError, FastDataLoader, FastDataModule, LoaderOptions

torch.set_num_threads(1)

KEYS = {
    "names": ["one.tif", "two.tif", "three.tif", "four.tif"],
    "tuples": [("a", 1), ("a", 2), ("b", 1), ("b", 7)],
    "boxes": [slice(0, 8), slice(8, 16), slice(16, 24), slice(24, 32)],
    "numbers from 100": [100, 101, 105, 109],
}


class Keyed(Dataset):
    """Has samples of these keys and of no others."""

    def __init__(self, keys):
        self.keys = keys
        self.asked = []

    def __len__(self):
        return len(self.keys)

    def __getitem__(self, key):
        self.asked.append(key)
        if key not in self.keys:
            raise KeyError(key)
        return torch.full((4,), float(self.keys.index(key)))


class Chooses(Sampler):
    """Gives keys of its own, as the samplers of maps and videos do; each pass is another one."""

    def __init__(self, keys, batch_size=None):
        self.keys, self.batch_size = keys, batch_size
        self.passes = 0

    def __len__(self):
        return len(self.keys) // (self.batch_size or 1)

    def __iter__(self):
        self.passes += 1
        if self.batch_size is None:
            return iter(self.keys)
        return iter([self.keys[i : i + self.batch_size] for i in range(0, 4, self.batch_size)])


class Module(FastDataModule):
    """Builds its loader with what is given."""

    def __init__(self, keys, options=None, **order):
        super().__init__(batch_size=2, options=options)
        self.data, self.order = Keyed(keys), order

    def train_dataset(self):
        return self.data

    def train_dataloader(self):
        return self.make_loader(self.data, stage="train", **self.order)


def fit(module, tmp_path):
    how = {"folder": tmp_path, "use_distributed_sampler": False}
    return sorted(chain(*trained(module, lambda batch: batch[:, 0].int().tolist(), **how)))


@pytest.mark.parametrize("keys", KEYS.values(), ids=KEYS)
@pytest.mark.parametrize("given", ["a list", "a sampler", "a batch sampler"])
def test_a_sampler_says_which_keys_there_are(tmp_path, keys, given):
    if given == "a batch sampler":
        order = {"batch_sampler": Chooses(keys, 2)}
    else:
        order = {"sampler": keys if given == "a list" else Chooses(keys)}
    module = Module(keys, LoaderOptions(num_workers=0), **order)
    assert fit(module, tmp_path) == [0, 1, 2, 3]
    for sampler in order.values():
        # What gives other keys in each pass must not have been asked before.
        assert getattr(sampler, "passes", 1) == 1


@pytest.mark.parametrize("executor", ["auto", "workers", "inline", "torch"])
def test_a_loader_alone_takes_the_keys_of_its_sampler(executor):
    keys = KEYS["names"]
    loader = FastDataLoader(Keyed(keys), 2, sampler=Chooses(keys), executor=executor, num_workers=0)
    assert [batch[:, 0].tolist() for batch in loader] == [[0, 1], [2, 3]]


def test_keys_that_no_sampler_gives_are_told_of(tmp_path):
    module = FastDataModule.from_datasets(Keyed(KEYS["names"]), batch_size=2)
    with pytest.raises(FastDataError, match=r"sample 0 .*KeyError.*make_loader.*sampler"):
        fit(module, tmp_path)


def test_a_dataset_that_may_not_be_read_before_is_not(tmp_path):
    keys = list(range(4))
    module = Module(keys, LoaderOptions(num_workers=0, probe=False))
    assert fit(module, tmp_path) == keys
    assert sorted(module.data.asked) == keys
    with pytest.raises(FastDataError, match="probe is 1"):
        LoaderOptions(probe=1)
