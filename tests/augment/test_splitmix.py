from __future__ import annotations

import numpy as np
import torch
from hypothesis import strategies as st
from scipy import stats

from lightning_fastdata.augment.ops.splitmix import (
    normal,
    peek_seed,
    words,
)

ALL = (1 << 64) - 1
INT64 = st.integers(-(2**63), 2**63 - 1)


def test_without_a_second_key_the_words_are_those_of_splitmix64():
    # The sequence of seed 1234567 that implementations of SplitMix64 are checked with.
    known = [6457827717110365317, 3203168211198807973, 9817491932198370423, 4593380528125082431]
    got = words(torch.tensor([[1234567, 0]]), 4)[0]
    assert got.numpy().view(np.uint64).tolist() == known


def test_a_row_depends_on_its_own_seed_alone():
    seeds = torch.tensor([[1, 2], [1, 3], [2, 2]])
    together = normal(seeds, 7)
    for row in range(3):
        assert torch.equal(normal(seeds[row : row + 1], 7)[0], together[row])
    assert len(torch.unique(words(seeds, 50))) == 150


def test_numbers_follow_their_law():
    # Keys that differ in one bit.
    seeds = torch.tensor([[7, 1], [6, 1], [7, 0]])
    numbers = normal(seeds, 40_001).double().numpy()
    for row in numbers:
        assert stats.kstest(row, stats.norm.cdf).pvalue > 1e-3
    # Neither neighbours, nor the two halves of a word, nor samples, nor streams go together.
    other = normal(seeds, 40_001, stream=1).double().numpy()
    half = len(numbers[0]) // 2
    pairs = [
        (numbers[0, 1:], numbers[0, :-1]),
        (numbers[0, :half], numbers[0, half + 1 :]),
        (numbers[0], numbers[1]),
        (numbers[0], numbers[2]),
        (numbers[0], other[0]),
    ]
    for one, two in pairs:
        assert stats.pearsonr(one, two).pvalue > 1e-3


def test_peeking_changes_nothing_and_follows_the_state():
    generator, other = (np.random.default_rng(1) for _ in range(2))
    first = peek_seed(generator)
    assert np.array_equal(first, peek_seed(generator))
    assert generator.random() == other.random()
    assert not np.array_equal(first, peek_seed(generator))
    assert first.dtype == np.int64
