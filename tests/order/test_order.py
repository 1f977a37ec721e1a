"""The plan of an epoch is arithmetic."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from thoroughness import max_examples
from torch.utils.data import (
    BatchSampler,
    DistributedSampler,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from lightning_fastdata import FastDataLoader
from lightning_fastdata.errors import FastDataWarning, OptionsError
from lightning_fastdata.order.epoch_order import EpochOrder, can_share_evenly
from lightning_fastdata.order.samplers import (
    EvaluationBatchSampler,
    RankBatchSampler,
    RankSampler,
    ShuffleSampler,
    index_batches,
)

SIZES = {
    "length": st.integers(0, 60),
    "batch_size": st.integers(1, 9),
    "world_size": st.integers(1, 4),
    "seed": st.integers(0, 2**40),
    "epoch": st.integers(0, 5),
    "shuffle": st.booleans(),
}


@max_examples(60)
@given(**SIZES)
def test_ranks_share_every_sample_once(world_size, **how) -> None:
    ranks = [EpochOrder(rank=r, world_size=world_size, **how) for r in range(world_size)]
    batches = [list(order.batches()) for order in ranks]
    assert [len(b) for b in batches] == [len(order) for order in ranks]
    seen = sorted(int(i) for rank in batches for batch in rank for i in batch)
    assert seen == list(range(how["length"]))
    assert all(len(batch) for rank in batches for batch in rank)


@max_examples(150)
@given(**SIZES)
def test_with_equal_counts_ranks_share_every_sample_once_in_as_many_batches(
    world_size, **how
) -> None:
    length, size = how["length"], how["batch_size"]
    if not can_share_evenly(length, size, world_size):
        assert length < world_size or size == 1
        with pytest.raises(OptionsError, match="equal_counts"):
            EpochOrder(world_size=world_size, equal_counts=True, **how)
        return
    ranks = [
        EpochOrder(rank=r, world_size=world_size, equal_counts=True, **how)
        for r in range(world_size)
    ]
    batches = [list(order.batches()) for order in ranks]
    steps = -(-length // (size * world_size))
    assert [len(b) for b in batches] == [len(order) for order in ranks] == [steps] * world_size
    assert sorted(int(i) for rank in batches for b in rank for i in b) == list(range(length))
    for number, together in enumerate(zip(*batches, strict=True)):
        sizes = [len(batch) for batch in together]
        assert 1 <= min(sizes) <= max(sizes) <= size
        assert max(sizes) - min(sizes) <= 1
        if number < steps - 2:
            assert min(sizes) == size


@max_examples(60)
@given(**SIZES)
def test_equal_counts_change_an_epoch_only_where_a_rank_would_get_nothing(
    world_size, **how
) -> None:
    rest = how["length"] % (how["batch_size"] * world_size)
    if not can_share_evenly(how["length"], how["batch_size"], world_size):
        return
    for rank in range(world_size):
        plain = EpochOrder(rank=rank, world_size=world_size, **how)
        equal = EpochOrder(rank=rank, world_size=world_size, equal_counts=True, **how)
        same = [b.tolist() for b in plain.batches()] == [b.tolist() for b in equal.batches()]
        assert same or 0 < rest < world_size


@max_examples(60)
@given(position=st.integers(0, 70), drop_last=st.booleans(), equal_counts=st.booleans(), **SIZES)
def test_a_position_skips_so_many_batches(position, equal_counts, **how) -> None:
    can = can_share_evenly(how["length"], how["batch_size"], how["world_size"])
    how["equal_counts"] = equal_counts and can
    whole = list(EpochOrder(**how).batches())
    start = EpochOrder(**how).samples_before(position)
    rest = list(EpochOrder(start=start, **how).batches())
    assert [b.tolist() for b in rest] == [b.tolist() for b in whole[position:]]


@max_examples(40)
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


@pytest.mark.parametrize("bad", [{"batch_size": 0}, {"rank": 2}, {"start": -1}, {"length": -1}])
def test_impossible_plans_are_refused(bad) -> None:
    with pytest.raises(OptionsError, match=next(iter(bad))):
        EpochOrder(**{"length": 5, "batch_size": 2, "world_size": 2, **bad})


@max_examples(40)
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


@max_examples(80)
@given(
    length=st.integers(1, 50),
    batch_size=st.integers(1, 9),
    ranks=st.integers(1, 4),
    drop_last=st.booleans(),
)
def test_evaluation_batches_are_the_plan_of_whoever_shares_them(
    length, batch_size, ranks, drop_last
) -> None:
    if not drop_last and not can_share_evenly(length, batch_size, ranks):
        return
    for rank in range(ranks):
        share = DistributedSampler(range(length), ranks, rank, shuffle=False)
        sampler = EvaluationBatchSampler(share, batch_size, drop_last)
        plan = EpochOrder(
            length=length,
            batch_size=batch_size,
            shuffle=False,
            drop_last=drop_last,
            rank=rank,
            world_size=ranks,
            equal_counts=True,
        )
        expected = [batch.tolist() for batch in plan.batches()]
        assert list(sampler) == [b.tolist() for b in index_batches(sampler)] == expected
        assert len(sampler) == len(expected)


@pytest.mark.parametrize("drop_last", [False, True])
def test_evaluation_batches_of_one_process_are_torchs(drop_last) -> None:
    for sampler in (SequentialSampler(range(7)), [3, 1, 2]):
        ours = EvaluationBatchSampler(sampler, 2, drop_last)
        theirs = BatchSampler(sampler, 2, drop_last)
        assert list(ours) == list(theirs) == list(index_batches(ours))
        assert len(ours) == len(theirs)


@pytest.mark.parametrize(("length", "batch_size"), [(2, 4), (4, 1)])
def test_what_cannot_be_shared_evenly_is_padded_and_that_is_said_once(length, batch_size) -> None:
    found = []
    for rank in range(3):
        share = DistributedSampler(range(length), 3, rank, shuffle=False)
        if rank == 0:
            with pytest.warns(FastDataWarning, match=f"{length} samples .* more than once"):
                sampler = EvaluationBatchSampler(share, batch_size)
        else:
            sampler = EvaluationBatchSampler(share, batch_size)
        assert list(sampler) == list(BatchSampler(share, batch_size, False))
        found += [i for batch in sampler for i in batch]
    assert set(found) == set(range(length))


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


class Huge(torch.utils.data.Dataset):
    def __len__(self) -> int:
        return 10**12

    def __getitem__(self, index: int) -> int:
        return index


def of_many_ranks() -> FastDataLoader:
    """One rank's loader of a million ranks, whose batches pass 2**28 samples a step."""
    sampler = RankSampler(Huge(), batch_size=256, num_replicas=2**20, rank=7, seed=3)
    batches = RankBatchSampler(sampler, 256, drop_last=False)
    return FastDataLoader(Huge(), batch_sampler=batches, num_workers=0, executor="inline")


def test_a_position_behind_more_samples_than_are_checked_goes_on_without_a_digest() -> None:
    whole = iter(of_many_ranks())
    expected = [next(whole).tolist() for _ in range(3)]
    stopped = of_many_ranks()
    assert next(iter(stopped)).tolist() == expected[0]
    state = stopped.state_dict()
    assert (state["samples"], state["digest"]) == (2**28, None)
    again = of_many_ranks()
    again.load_state_dict(state)
    rest = iter(again)
    assert [next(rest).tolist() for _ in range(2)] == expected[1:]
