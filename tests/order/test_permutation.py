"""A computed order is a permutation like any other, and costs no more than what is read of it."""

from __future__ import annotations

import itertools
import math
import tracemalloc

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from thoroughness import max_examples
from torch.utils.data import BatchSampler, Dataset

from lightning_fastdata import FastDataLoader
from lightning_fastdata.errors import OptionsError
from lightning_fastdata.order.epoch_order import (
    DRAWN_AT_ONCE,
    EpochOrder,
    KeyedPermutation,
    epoch_permutation,
    parts_of,
)
from lightning_fastdata.order.samplers import ShuffleSampler, index_batches

HUGE = 10**12
seeds = st.integers(0, 2**63)
epochs = st.integers(0, 2**33)


def chi_square_deviations(counts):
    """How many standard deviations a chi-square statistic of equally likely cells is off."""
    counts = np.asarray(counts, float).ravel()
    expected = counts.sum() / counts.size
    degrees = counts.size - 1
    statistic = ((counts - expected) ** 2 / expected).sum()
    return (statistic - degrees) / math.sqrt(2 * degrees)


@max_examples(150)
@given(length=st.integers(0, 300) | st.sampled_from([1023, 1024, 1025, 4097, 9973]), seed=seeds)
def test_every_sample_comes_once(length, seed) -> None:
    order = KeyedPermutation(length, seed=seed, epoch=0)[:]
    assert order.dtype == np.int64
    assert np.array_equal(np.sort(order), np.arange(length))


@pytest.mark.parametrize("length", [2**20 + 1, 1_281_167])
def test_every_sample_of_a_long_order_comes_once(length) -> None:
    seen = np.zeros(length, bool)
    for part in parts_of(
        KeyedPermutation(length, seed=7, epoch=3),
        ((start, min(start + 4096, length)) for start in range(0, length, 4096)),
    ):
        seen[part] = True
    assert seen.all()


@max_examples(60)
@given(
    length=st.integers(1, 2**62),
    cuts=st.lists(st.integers(0, 400), max_size=12),
    seed=seeds,
    epoch=epochs,
    data=st.data(),
)
def test_parts_are_those_of_the_whole(length, cuts, seed, epoch, data) -> None:
    order = KeyedPermutation(length, seed=seed, epoch=epoch)
    stop = min(length, 400)
    first = data.draw(st.integers(0, length - stop))
    ends = sorted({0, stop, *(min(cut, stop) for cut in cuts)})
    bounds = [(first + a, first + b) for a, b in itertools.pairwise(ends)]
    whole = order[first : first + stop]
    assert ((whole >= 0) & (whole < length)).all()
    assert np.unique(whole).size == stop
    assert np.array_equal(np.concatenate(list(parts_of(order, bounds))), whole)


@max_examples(60)
@given(seed=seeds, epoch=epochs)
def test_seed_and_epoch_decide_and_each_of_their_bits_counts(seed, epoch) -> None:
    def head(seed, epoch):
        return KeyedPermutation(HUGE, seed=seed, epoch=epoch)[:4].tolist()

    assert head(seed, epoch) == head(seed, epoch)
    others = [head(seed ^ 1, epoch), head(seed ^ 2**40, epoch), head(seed, epoch + 1)]
    assert head(seed, epoch) not in others
    assert head(seed, epoch) != head(epoch, seed) or seed == epoch


@pytest.mark.parametrize("length", [DRAWN_AT_ONCE, 10**7 + 19, HUGE])
def test_neighbours_are_as_far_apart_as_chance_puts_them(length) -> None:
    """Pairs of following samples fill a 32 by 32 grid evenly, and so do the steps between them."""
    drawn = KeyedPermutation(length, seed=11, epoch=0)[5000 : 5000 + 2**18 + 1]
    cells = drawn * 32 // length if length < 2**50 else drawn // (length // 32)
    pairs = np.zeros((32, 32))
    np.add.at(pairs, (cells[:-1], cells[1:]), 1)
    assert abs(chi_square_deviations(pairs)) < 5
    steps = (drawn[1:] - drawn[:-1]) % length
    assert abs(chi_square_deviations(np.bincount(steps * 64 // length, minlength=64))) < 5
    parity = np.bincount((drawn[:-1] % 2) * 2 + drawn[1:] % 2, minlength=4)
    assert abs(chi_square_deviations(parity)) < 5
    later = KeyedPermutation(length, seed=11, epoch=1)[5000 : 5000 + 2**18]
    later = later * 32 // length if length < 2**50 else later // (length // 32)
    pairs = np.zeros((32, 32))
    np.add.at(pairs, (cells[:-1], later), 1)
    assert abs(chi_square_deviations(pairs)) < 5


def test_small_sets_have_torchs_permutation() -> None:
    words = np.random.SeedSequence([5, 2]).generate_state(1)
    generator = torch.Generator().manual_seed(int(words[0]))
    expected = torch.randperm(1000, generator=generator)
    assert np.array_equal(epoch_permutation(1000, 5, 2), expected.numpy())


class Endless(Dataset):
    """As long as a dataset can be; a sample is its index."""

    def __len__(self) -> int:
        return HUGE

    def __getitem__(self, index) -> int:
        return index


def test_an_epoch_of_a_million_million_samples_begins_without_an_array_of_them() -> None:
    order = KeyedPermutation(HUGE, seed=3, epoch=0)[:192].reshape(3, 64).tolist()
    sampler = ShuffleSampler(Endless(), seed=3)
    plan = EpochOrder(length=HUGE, batch_size=64, seed=3)
    tracemalloc.start()
    try:
        batches = BatchSampler(sampler, 64, drop_last=False)
        ways = {
            "sampler": iter(batches),
            "arrays": map(np.ndarray.tolist, index_batches(batches)),
            "plan": map(np.ndarray.tolist, plan.batches()),
            "loader": map(
                torch.Tensor.tolist, iter(FastDataLoader(Endless(), 64, sampler=sampler))
            ),
        }
        for name, way in ways.items():
            assert list(itertools.islice(way, 3)) == order, name
        assert len(batches) == len(plan) == HUGE // 64
        assert tracemalloc.get_traced_memory()[1] < 20 * 2**20
    finally:
        tracemalloc.stop()


@max_examples(40)
@given(position=st.integers(0, HUGE // 12 - 1), rank=st.integers(0, 2))
def test_a_long_epoch_goes_on_at_any_position(position, rank) -> None:
    how = {"length": HUGE, "batch_size": 4, "world_size": 3, "rank": rank, "seed": 1}
    resumed = EpochOrder(start=12 * position, **how)
    start = position * 12 + rank * 4
    expected = KeyedPermutation(HUGE, seed=1, epoch=0)[start : start + 4]
    assert next(resumed.batches()).tolist() == expected.tolist()
    assert len(resumed) + position == len(EpochOrder(**how))


@pytest.mark.parametrize("length", [-1, 2**62 + 1])
def test_impossible_lengths_are_refused(length) -> None:
    with pytest.raises(OptionsError, match=str(length)):
        KeyedPermutation(length, seed=0, epoch=0)
