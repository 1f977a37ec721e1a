"""The plan of an epoch is arithmetic."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import (
    BatchSampler,
    DistributedSampler,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from lightning_fastdata.errors import OptionsError
from lightning_fastdata.loading.order import EpochOrder, ShuffleSampler, index_batches

SIZES = {
    "length": st.integers(0, 60),
    "batch_size": st.integers(1, 9),
    "world_size": st.integers(1, 4),
    "seed": st.integers(0, 2**40),
    "epoch": st.integers(0, 5),
    "shuffle": st.booleans(),
}


@settings(max_examples=60, deadline=None)
@given(**SIZES)
def test_ranks_share_every_sample_once(world_size, **how) -> None:
    ranks = [EpochOrder(rank=r, world_size=world_size, **how) for r in range(world_size)]
    batches = [list(order.batches()) for order in ranks]
    assert [len(b) for b in batches] == [len(order) for order in ranks]
    seen = sorted(int(i) for rank in batches for batch in rank for i in batch)
    assert seen == list(range(how["length"]))
    assert all(len(batch) for rank in batches for batch in rank)


@settings(max_examples=60, deadline=None)
@given(position=st.integers(0, 70), drop_last=st.booleans(), **SIZES)
def test_a_position_skips_so_many_batches(position, **how) -> None:
    whole = list(EpochOrder(**how).batches())
    rest = list(EpochOrder(position=position, **how).batches())
    assert [b.tolist() for b in rest] == [b.tolist() for b in whole[position:]]


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 2**40), ranks=st.sampled_from([1, 2, 4]))
def test_a_kept_global_batch_holds_the_same_samples_for_any_world_size(seed, ranks) -> None:
    def step(world_size: int, number: int) -> set[int]:
        orders = [
            EpochOrder(
                length=64, batch_size=8 // world_size, seed=seed, rank=r, world_size=world_size
            )
            for r in range(world_size)
        ]
        return {int(i) for order in orders for i in list(order.batches())[number]}

    assert step(ranks, 3) == step(1, 3)


def test_order_is_that_of_the_shuffle_sampler_and_changes_with_the_epoch() -> None:
    sampler = ShuffleSampler(range(50), seed=3)
    sampler.set_epoch(2)
    order = EpochOrder(length=50, batch_size=50, seed=3, epoch=2)
    assert list(sampler) == next(order.batches()).tolist()
    other = EpochOrder(length=50, batch_size=50, seed=3, epoch=1)
    assert list(sampler) != next(other.batches()).tolist()


@pytest.mark.parametrize("bad", [{"batch_size": 0}, {"rank": 2}, {"position": -1}, {"length": -1}])
def test_impossible_plans_are_refused(bad) -> None:
    with pytest.raises(OptionsError, match=next(iter(bad))):
        EpochOrder(**{"length": 5, "batch_size": 2, "world_size": 2, **bad})


@settings(max_examples=40, deadline=None)
@given(
    length=st.integers(1, 50),
    batch_size=st.integers(1, 9),
    drop_last=st.booleans(),
    kind=st.sampled_from(
        [
            *("sequential", "random", "generator", "with", "shuffle", "weighted", "without"),
            *("subset", "part", "ranks", "ranks in order", "ranks cut"),
        ]
    ),
    rank=st.integers(0, 4),
)
def test_index_arrays_are_the_samplers_own_indices(
    length, batch_size, drop_last, kind, rank
) -> None:
    data = range(length)
    ranks = {"num_replicas": 5, "rank": rank, "seed": length}
    made = {
        "sequential": lambda: SequentialSampler(data),
        "random": lambda: RandomSampler(data),
        "generator": lambda: RandomSampler(data, generator=torch.Generator().manual_seed(1)),
        "shuffle": lambda: ShuffleSampler(data, seed=1),
        "weighted": lambda: WeightedRandomSampler([1.0] * length, length),
        "with": lambda: RandomSampler(data, replacement=True),
        "without": lambda: WeightedRandomSampler([1.0, 2.0] * length, length, replacement=False),
        "subset": lambda: SubsetRandomSampler(range(5, 5 + length)),
        "part": lambda: SubsetRandomSampler([3 * i - 4 for i in data], torch.Generator()),
        "ranks": lambda: DistributedSampler(data, **ranks),
        "ranks in order": lambda: DistributedSampler(data, shuffle=False, **ranks),
        "ranks cut": lambda: DistributedSampler(data, drop_last=True, **ranks),
    }[kind]

    def epochs(read) -> list:
        torch.manual_seed(5)
        sampler = BatchSampler(made(), batch_size, drop_last)
        found = [[np.asarray(b).tolist() for b in read(sampler)] for _ in range(2)]
        return [*found, torch.rand(1).item()]  # what is drawn next

    assert epochs(index_batches) == epochs(iter)


def test_a_generator_of_the_user_is_left_as_by_torch_also_by_an_epoch_that_is_abandoned() -> None:
    states = []
    for read in (index_batches, iter):
        generator = torch.Generator().manual_seed(1)
        sampler = BatchSampler(RandomSampler(range(10), generator=generator), 3, True)
        next(read(sampler))
        abandoned = generator.get_state()
        list(read(sampler))
        states.append((abandoned.tolist(), generator.get_state().tolist()))
    assert states[0] == states[1]


@pytest.mark.parametrize("length", [0, 1, 2, 1000, 70_000, 300_000])
def test_the_order_of_a_large_dataset_is_torchs_own_permutation(length) -> None:
    ours, theirs = (torch.Generator().manual_seed(length) for _ in range(2))
    sampler = BatchSampler(RandomSampler(range(max(1, length)), generator=ours), 1024, False)
    order = torch.randperm(max(1, length), generator=theirs)
    torch.randperm(max(1, length), generator=theirs)
    assert np.concatenate(list(index_batches(sampler))).tolist() == order.tolist()
    assert torch.equal(ours.get_state(), theirs.get_state())
