"""Loaders with one thing changed read what torch's loader would; parts make up the epoch."""

from __future__ import annotations

import pytest
import torch
from loading.planned import Stream
from torch.utils.data import BatchSampler, DataLoader, Dataset, SequentialSampler

from lightning_fastdata import FastDataLoader
from lightning_fastdata.prove.remedies import Change
from lightning_fastdata.prove.session import (
    Cut,
    Pieces,
    can_be_cut,
    is_shuffled,
    reader_of,
    remade,
    what_is_read,
)


class Numbers(Dataset):
    def __init__(self, count=23):
        self.count = count

    def __len__(self):
        return self.count

    def __getitem__(self, index):
        return torch.tensor([index, 2 * index])


def doubled(samples):
    return 2 * torch.stack(samples)


GIVEN = {
    "plain": {"batch_size": 4},
    "last dropped": {"batch_size": 4, "drop_last": True},
    "own collate_fn": {"batch_size": 5, "collate_fn": doubled},
    "batch sampler": {"batch_sampler": [[3, 1], [2], [0, 4, 5]]},
    "sampler": {"batch_size": 3, "sampler": [5, 4, 9, 1]},
    "samples as they come": {"batch_size": None},
}
CHANGES = {
    "nothing": Change(),
    "workers": Change(num_workers=2),
    "workers that stay": Change(num_workers=1, persistent_workers=True),
    "ours": Change(fast=True),
    "cache": Change(cache="ram"),
}


def rows(loader):
    return [batch.tolist() for batch in loader]


@pytest.mark.parametrize("given", GIVEN.values(), ids=GIVEN)
@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_a_changed_loader_gives_the_batches_of_torch(given, change):
    loader = DataLoader(Numbers(), **given)
    changed = remade(loader, change)
    for _ in range(2):
        assert rows(changed) == rows(loader)


def test_a_shuffled_loader_stays_shuffled():
    loader = DataLoader(Numbers(), 4, shuffle=True)
    assert is_shuffled(loader)
    for change in CHANGES.values():
        first, second = (rows(remade(loader, change)) for _ in range(2))
        seen = [row for batch in first for row in batch]
        assert sorted(seen) == sorted(rows(DataLoader(Numbers(), None)))
    assert first != second or change.fast


@pytest.mark.parametrize("workers", [0, 2])
def test_parts_of_an_epoch_make_up_the_epoch(workers):
    loader = DataLoader(Numbers(24), 4)
    pieces = Pieces(loader.batch_sampler)
    arms = [remade(loader, Change(num_workers=n), Cut(pieces, 2)) for n in (workers, 0, workers)]
    assert [batch for arm in arms for batch in rows(arm)] == rows(loader)
    assert rows(arms[0]) == rows(loader)[:2]  # the sampler begins again


def test_a_cache_reads_the_same_part_again():
    loader = DataLoader(Numbers(24), 4, shuffle=True)
    pieces = Pieces(loader.batch_sampler)
    arm = remade(loader, Change(cache="ram"), Cut(pieces, 3, again=True))
    assert rows(arm) == rows(arm)
    assert rows(remade(loader, Change(), Cut(pieces, 3))) != rows(arm)


def test_a_sampler_that_gives_nothing_ends():
    assert Pieces([]).take(3) == []


def test_who_makes_the_batches_decides_what_can_be_changed():
    class Own(DataLoader):
        def __iter__(self):
            return iter([torch.zeros(1)])

    assert reader_of(DataLoader(Numbers())) == "torch"
    assert reader_of(FastDataLoader(Numbers(), num_workers=1)) == "ours"
    assert reader_of(Own(Numbers())) == "other"
    assert reader_of([torch.zeros(1)]) == "other"
    assert can_be_cut(DataLoader(Numbers()))
    assert not can_be_cut(DataLoader(Stream()))


def test_a_sampler_of_the_user_counts_as_what_is_read():
    class Looks(SequentialSampler):
        pass

    own = BatchSampler(Looks(Numbers()), 4, drop_last=False)
    assert own in what_is_read(DataLoader(Numbers(), batch_sampler=own))
    assert len(what_is_read(DataLoader(Numbers(), 4, shuffle=True))) == 2
