"""Samplers of other libraries, rebuilt in a few lines: an epoch is as they give it, resumed or not.

Each keeps a habit that torch's own samplers do not have: lhotse's are their own iterators, take out
of a state what they load, and stay at the end of an epoch until they are told of another one;
torchdata's says how far it came in the epoch before.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice

import pytest
import torch
from torch.utils.data import Dataset, DistributedSampler, Sampler

from lightning_fastdata import FastDataLoader
from lightning_fastdata.order.samplers import SharedSampler

LENGTH, EPOCHS = 23, 3


class Cuts(Sequence):
    """A batch of lhotse's, which is no list."""

    def __init__(self, indices):
        self.indices = indices

    def __len__(self):
        return len(self.indices)

    def __getitem__(self, place):
        return self.indices[place]


class LikeLhotse(Sampler):
    """Batches of three cuts by the epoch; the last one has two."""

    world_size, rank = 1, 0

    def __init__(self):
        self.epoch, self.taken, self.restored = 0, 0, False

    def set_epoch(self, epoch):
        if epoch != self.epoch:
            self.taken, self.restored = 0, False
        self.epoch = epoch

    def state_dict(self):
        return {"epoch": self.epoch, "taken": self.taken}

    def load_state_dict(self, state):
        self.epoch, self.taken, self.restored = state.pop("epoch"), state.pop("taken"), True

    def __iter__(self):
        self.taken = self.taken if self.restored else 0
        return self

    def __next__(self):
        self.restored = False
        order = torch.randperm(LENGTH, generator=torch.Generator().manual_seed(self.epoch)).tolist()
        batch = order[3 * self.taken : 3 * self.taken + 3]
        if not batch:
            raise StopIteration
        self.taken += 1
        return Cuts(batch)


class LikeTorchdata(DistributedSampler):
    """Goes on behind as many samples as its state says."""

    def __init__(self):
        super().__init__(range(LENGTH), 1, 0)
        self.yielded, self.skipped = 0, None

    def state_dict(self):
        return {"yielded": self.yielded}

    def load_state_dict(self, state):
        self.skipped = state["yielded"]

    def __iter__(self):
        self.yielded, self.skipped = self.skipped or 0, None
        for index in islice(super().__iter__(), self.yielded, None):
            self.yielded += 1
            yield index


class OfCuts(Dataset):
    """Has no length, as its sampler says all."""

    def __getitem__(self, cuts):
        return list(cuts)


def shared_by_three():
    return SharedSampler(LikeLhotse(), batch_size=None, num_replicas=3, rank=2)


MAKERS = {
    "lhotse": lambda: (OfCuts(), None, LikeLhotse()),
    # Of eight batches the last rank takes the first one again: the last step has two.
    "lhotse, shared": lambda: (OfCuts(), None, shared_by_three()),
    "torchdata": lambda: (range(LENGTH), 3, LikeTorchdata()),
}


def loader_of(name, state=None):
    dataset, batch_size, sampler = MAKERS[name]()
    loader = FastDataLoader(dataset, batch_size, sampler=sampler, collate_fn=list)
    if state is not None:
        loader.load_state_dict(state)
    return loader


def epoch_of(loader, epoch, batches=None):
    loader.sampler.set_epoch(epoch)
    return list(islice(loader, batches))


@pytest.mark.filterwarnings("error", "ignore:The last 2 of an epoch:UserWarning")
@pytest.mark.parametrize("name", MAKERS)
def test_an_epoch_goes_on_from_any_batch_any_number_of_times(name):
    straight = loader_of(name)
    whole = [epoch_of(straight, epoch) for epoch in range(EPOCHS)]
    assert whole[0] != whole[1]
    for stop in (0, 1, 2):
        loader = loader_of(name)
        for epoch in range(EPOCHS):
            found = epoch_of(loader, epoch, stop) if stop else []
            for batches in (1, None):
                loader = loader_of(name, loader.state_dict())
                found += epoch_of(loader, epoch, batches)
            assert found == whole[epoch], (stop, epoch)
