"""A shuffle in blocks has every sample once, neighbours close, by seed and epoch alone."""

from __future__ import annotations

from itertools import cycle

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from misses import each
from thoroughness import max_examples
from torch.utils.data import ConcatDataset, DataLoader, Subset

from lightning_fastdata import FastDataLoader, sources
from lightning_fastdata.data import BlockShuffleSampler
from lightning_fastdata.errors import DatasetError, OptionsError
from lightning_fastdata.order.epoch_order import BlockOrder


@max_examples(150)
@given(
    length=st.integers(0, 200),
    block=st.integers(1, 30),
    at_once=st.integers(1, 12),
    seed=st.integers(-5, 2**70),
    epoch=st.integers(0, 2**33),
)
def test_every_sample_comes_once_and_blocks_stay_together(length, block, at_once, seed, epoch):
    sampler = BlockShuffleSampler(range(length), block, blocks_at_once=at_once, seed=seed)
    sampler.set_epoch(epoch)
    order = list(sampler)
    assert sorted(order) == list(range(length))
    assert len(sampler) == length
    assert list(sampler) == order
    places = np.empty(length, np.int64)
    places[order] = np.arange(length)
    for start in range(0, length, block):
        own = places[start : start + block]
        assert own.max() - own.min() < block * at_once


def test_a_dataset_that_grows_or_shrinks_is_cut_anew():
    data = list(range(10))
    loader = FastDataLoader(data, 4, shuffle="blocks")
    for length in (10, 35, 3):
        data[:] = range(length)
        assert sorted(torch.cat(list(loader)).tolist()) == data
        assert sorted(loader.sampler) == data


def test_epochs_and_seeds_have_other_orders():
    orders = []
    for seed, epoch in ((0, 0), (0, 1), (1, 0), (1, 1), (2**63, 0), (2**63 + 1, 0)):
        sampler = BlockShuffleSampler(range(500), 10, seed=seed)
        sampler.set_epoch(epoch)
        orders.append(tuple(sampler))
    assert len(set(orders)) == 6


def test_blocks_and_samples_are_spread_evenly():
    first, inside = np.zeros(20), np.zeros(10)
    for epoch in range(2000):
        sampler = BlockShuffleSampler(range(200), 10, blocks_at_once=2, seed=3)
        sampler.set_epoch(epoch)
        index = next(iter(sampler))
        first[index // 10] += 1
        inside[index % 10] += 1
    assert abs(first - 100).max() < 45  # 4.6 standard deviations
    assert abs(inside - 200).max() < 65


@pytest.mark.parametrize(("block", "at_once"), [(1, 1), (1, 1000), (1000, 1)])
def test_the_ends_are_a_full_shuffle(block, at_once):
    order = list(BlockShuffleSampler(range(300), block, blocks_at_once=at_once))
    assert sorted(order) == list(range(300))
    assert order != list(range(300))
    # Of a full shuffle, neighbours are a third of the length apart on the mean.
    assert 70 < np.abs(np.diff(order)).mean() < 130


@pytest.mark.parametrize("name", ["block", "blocks_at_once"])
def test_less_than_one_is_refused(name):
    with pytest.raises(OptionsError, match=f"{name} is 0"):
        BlockShuffleSampler(range(5), **{"block": 2, name: 0})


def test_groups_of_a_table_are_read_few_times(tmp_path, monkeypatch):
    import pyarrow as pa
    import pyarrow.parquet

    table = pa.table({"x": list(range(1000))})
    pyarrow.parquet.write_table(table, tmp_path / "x.parquet", row_group_size=50)
    source = sources.ParquetSource(tmp_path / "x.parquet")
    dataset = sources.SourceDataset(source, lambda row, _: row["x"])
    reads = []
    kept = pyarrow.parquet.ParquetFile.read_row_group

    def read(self, group, **more):
        reads.append(group)
        return kept(self, group, **more)

    monkeypatch.setattr(pyarrow.parquet.ParquetFile, "read_row_group", read)
    sampler = BlockShuffleSampler(dataset, 50, blocks_at_once=8)
    rows = torch.cat(list(DataLoader(dataset, 32, sampler=sampler))).tolist()
    assert sorted(rows) == list(range(1000))
    assert sorted(reads) == list(range(20))


class Stored(torch.utils.data.Dataset):
    """Numbers that are stored in groups of these sizes."""

    def __init__(self, sizes, first=0):
        self.starts = np.cumsum([0, *sizes])[:-1].tolist()
        self.length, self.first = sum(sizes), first

    def __len__(self):
        return self.length

    def __getitem__(self, index):
        return self.first + index

    def samples(self):
        return range(self.first, self.first + self.length)

    def block_starts(self):
        return self.starts

    def group_of(self, sample):
        return int(np.searchsorted(self.starts, sample - self.first, side="right")) - 1


class Standing(torch.utils.data.Dataset):
    """Stands for another dataset, sample by sample."""

    def __init__(self, dataset):
        self.dataset = dataset

    def __len__(self):
        return len(self.dataset)

    def __getitem__(self, index):
        return self.dataset[index]


SIZES = st.lists(st.integers(1, 9), max_size=12)


@max_examples(150)
@given(sizes=st.lists(SIZES, min_size=1, max_size=3), data=st.data())
def test_groups_are_found_through_what_stands_before_the_dataset(sizes, data):
    """So many groups at once: any part of the order that ends a run of them has whole groups."""
    firsts = np.cumsum([0, *map(sum, sizes)])[:-1].tolist()
    parts = [Stored(*pair) for pair in zip(sizes, firsts, strict=True)]
    whole = parts[0] if len(parts) == 1 else ConcatDataset(parts)
    groups = [(n, part.group_of(s)) for n, part in enumerate(parts) for s in part.samples()]
    samples = list(range(len(groups)))
    if data.draw(st.booleans()):
        samples = data.draw(st.permutations(samples).map(lambda them: them[: len(them) // 2]))
        ends = data.draw(st.lists(st.sampled_from([0, len(groups)]), min_size=1))
        given = zip(samples, cycle(ends), strict=False)
        whole = Subset(whole, [index - end for index, end in given])  # from either end
    if data.draw(st.booleans()):
        whole = Standing(whole)
    at_once = data.draw(st.integers(1, 5))
    sampler = BlockShuffleSampler(whole, blocks_at_once=at_once, seed=data.draw(st.integers(0, 9)))
    order = list(sampler)
    assert sorted(order) == list(range(len(whole)))
    met = [groups[samples[position]] for position in order]
    runs = [[]]
    for group in met:
        if group not in runs[-1] and len(runs[-1]) == at_once:
            runs.append([])
        if group not in runs[-1]:
            runs[-1].append(group)
    seen = [group for run in runs for group in run]
    assert len(seen) == len(set(seen))  # no group is come back to


@max_examples(100)
@given(sizes=SIZES, at_once=st.integers(1, 5), epoch=st.integers(0, 5), data=st.data())
def test_a_part_of_the_order_is_that_of_the_whole(sizes, at_once, epoch, data):
    dataset = Stored(sizes)
    if data.draw(st.booleans()):
        dataset = Subset(dataset, list(range(len(dataset)))[::-2])
    blocks = BlockShuffleSampler(dataset, blocks_at_once=at_once).blocks
    order = BlockOrder(blocks, 3, epoch)
    whole = order[:].tolist()
    start = data.draw(st.integers(0, len(whole)))
    stop = data.draw(st.integers(start, len(whole)))
    assert order[start:stop].tolist() == whole[start:stop]


@each("starts", [[], [1, 2], [0, 0], [0, 2, 1], [0, 5], [0.0, 2.0], [[0, 1]], "texts"])
def test_blocks_that_cannot_be_are_refused(starts):
    data = Stored([2, 3])
    data.starts = starts
    with pytest.raises(DatasetError, match=r"block_starts\(\) of Stored returned"):
        BlockShuffleSampler(data)


def test_data_that_does_not_say_how_it_is_stored_is_shuffled_8000_together():
    order = np.array(list(BlockShuffleSampler(range(20_000))))
    for start in range(0, 20_000, 8000):
        blocks = np.unique(order[start : start + 8000] // 100)
        assert len(blocks) == min(80, (20_000 - start) // 100)
