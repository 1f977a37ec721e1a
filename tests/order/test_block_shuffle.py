"""A shuffle in blocks has every sample once, neighbours close, by seed and epoch alone."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pyarrow.parquet
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader

import lightning_fastdata as ld
from lightning_fastdata import BlockShuffleSampler, sources
from lightning_fastdata.errors import OptionsError


@settings(max_examples=150, deadline=None)
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


def test_epochs_and_seeds_have_other_orders():
    orders = []
    for seed, epoch in ((0, 0), (0, 1), (1, 0), (1, 1)):
        sampler = BlockShuffleSampler(range(500), 10, seed=seed)
        sampler.set_epoch(epoch)
        orders.append(tuple(sampler))
    assert len(set(orders)) == 4


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


@pytest.mark.parametrize("executor", ["inline", "workers"])
def test_a_loader_goes_on_within_an_epoch(executor):
    data = torch.arange(90)

    class Plain(torch.utils.data.Dataset):
        def __len__(self):
            return 90

        def __getitem__(self, index):
            return data[index]

    def loader():
        sampler = BlockShuffleSampler(data, 7, blocks_at_once=3, seed=2)
        workers = 0 if executor == "inline" else 2
        return ld.FastDataLoader(
            Plain(), 8, sampler=sampler, num_workers=workers, executor=executor
        )

    whole = loader()
    epochs = [torch.cat(list(whole)).tolist() for _ in range(2)]
    assert sorted(epochs[0]) == list(range(90))
    first = loader()
    batches = iter(first)
    taken = [next(batches) for _ in range(5)]
    state = first.state_dict()
    again = loader()
    again.load_state_dict(state)
    rest = torch.cat(list(again)).tolist()
    assert torch.cat(taken).tolist() + rest == epochs[0]


def test_groups_of_a_table_are_read_few_times(tmp_path, monkeypatch):
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
