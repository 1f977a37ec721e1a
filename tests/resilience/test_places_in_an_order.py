"""At which place of an epoch a sample comes is computed from the sample, and inverts the order."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from thoroughness import max_examples

from lightning_fastdata.order.epoch_order import (
    EpochOrder,
    KeyedPermutation,
    can_share_evenly,
    epoch_permutation,
    position_in,
)

seeds = st.integers(0, 2**63)
epochs = st.integers(0, 2**33)
LONG = 10**9 + 7


@max_examples(150)
@given(length=st.integers(0, 300) | st.sampled_from([1023, 1024, 1025, 9973]), seed=seeds)
def test_the_way_back_leads_to_every_position(length, seed) -> None:
    order = KeyedPermutation(length, seed=seed, epoch=0)
    assert np.array_equal(order.positions_of(order[:]), np.arange(length))


@max_examples(100)
@given(
    length=st.integers(1, LONG) | st.sampled_from([LONG, 2**62]),
    seed=seeds,
    epoch=epochs,
    shares=st.lists(st.floats(0, 1, exclude_max=True), min_size=1, max_size=20),
)
def test_positions_of_a_long_order_are_found_again(length, seed, epoch, shares) -> None:
    order = KeyedPermutation(length, seed=seed, epoch=epoch)
    positions = np.array([min(length - 1, int(share * length)) for share in shares])
    assert np.array_equal(order.positions_of(order.at(positions)), positions)
    assert np.array_equal(order.at(order.positions_of(positions)), positions)


@pytest.mark.parametrize("length", [1, 17, 1000])
def test_a_drawn_order_is_searched(length) -> None:
    order = epoch_permutation(length, seed=3, epoch=1)
    assert [position_in(order, sample) for sample in order] == list(range(length))
    assert position_in(order, length) == position_in(order, -1) == -1


def test_a_sample_that_is_none_has_no_place() -> None:
    order = KeyedPermutation(LONG, seed=0, epoch=0)
    assert position_in(order, LONG) == position_in(order, -1) == position_in(range(5), 5) == -1


@max_examples(200)
@given(
    length=st.integers(0, 60),
    batch_size=st.integers(1, 9),
    world_size=st.integers(1, 5),
    shuffle=st.booleans(),
    drop_last=st.booleans(),
    equal_counts=st.booleans(),
    epoch=st.integers(0, 3),
    start=st.integers(0, 70),
)
def test_a_sample_is_where_its_batch_is_delivered(
    length, batch_size, world_size, shuffle, drop_last, equal_counts, epoch, start
) -> None:
    left = max(0, length - start)
    equal_counts &= drop_last or can_share_evenly(left, batch_size, world_size)
    orders = [
        EpochOrder(
            length=length,
            batch_size=batch_size,
            seed=5,
            epoch=epoch,
            shuffle=shuffle,
            drop_last=drop_last,
            equal_counts=equal_counts,
            start=start,
            rank=rank,
            world_size=world_size,
        )
        for rank in range(world_size)
    ]
    delivered = {
        int(sample): (number, rank, row)
        for rank, order in enumerate(orders)
        for number, batch in enumerate(order.batches())
        for row, sample in enumerate(batch)
    }
    for sample in range(-1, length + 1):
        assert orders[0].place_of(sample) == delivered.get(sample)


def test_the_place_in_a_long_epoch_reads_back_as_the_sample() -> None:
    order = EpochOrder(length=LONG, batch_size=64, seed=9, epoch=4, world_size=3)
    for sample in (0, 17, LONG - 1):
        batch, rank, row = order.place_of(sample)
        start, stop = replace(order, rank=rank)._bounds(batch)
        found = epoch_permutation(LONG, 9, 4)[start:stop]
        assert found[row] == sample
