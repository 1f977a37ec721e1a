"""The plan of an epoch is arithmetic."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from misses import each
from ragged import stopped_epoch
from thoroughness import max_examples
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, RandomSampler

from lightning_fastdata import BucketBatchSampler, FastDataLoader, Mixture, pack
from lightning_fastdata.errors import OptionsError
from lightning_fastdata.order.epoch_order import EpochOrder, can_share_evenly
from lightning_fastdata.order.samplers import (
    BlockShuffleSampler,
    RankBatchSampler,
    SharedSampler,
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


@max_examples(200)
@given(**SIZES)
def test_ranks_share_every_sample_once_in_as_many_batches(world_size, **how) -> None:
    length, size = how["length"], how["batch_size"]
    if not can_share_evenly(length, size, world_size):
        assert length < world_size or size == 1
        with pytest.raises(OptionsError, match="cannot make equally many"):
            EpochOrder(world_size=world_size, **how)
        return
    ranks = [EpochOrder(rank=r, world_size=world_size, **how) for r in range(world_size)]
    batches = [list(order.batches()) for order in ranks]
    steps = -(-length // (size * world_size))
    assert [len(b) for b in batches] == [len(order) for order in ranks] == [steps] * world_size
    assert sorted(int(i) for rank in batches for b in rank for i in b) == list(range(length))
    for number, together in enumerate(zip(*batches, strict=True)):
        sizes = [len(batch) for batch in together]
        assert 1 <= min(sizes) <= max(sizes) <= size
        assert max(sizes) - min(sizes) <= 1
        # A rest of fewer samples than ranks takes some of the step before.
        few = 0 < length % (size * world_size) < world_size
        if number < steps - 1 - few:
            assert min(sizes) == size


@max_examples(60)
@given(position=st.integers(0, 70), drop_last=st.booleans(), **SIZES)
def test_a_position_skips_so_many_batches(position, drop_last, **how) -> None:
    if not can_share_evenly(how["length"], how["batch_size"], how["world_size"]):
        drop_last = True
    whole = EpochOrder(drop_last=drop_last, **how)
    rest = replace(whole, start=whole.samples_before(position))
    expected = [b.tolist() for b in whole.batches()][position:]
    assert [b.tolist() for b in rest.batches()] == expected


def test_order_is_that_of_the_shuffle_sampler_and_changes_with_the_epoch() -> None:
    sampler = ShuffleSampler(range(50), seed=3)
    sampler.set_epoch(2)
    order = EpochOrder(length=50, batch_size=50, seed=3, epoch=2)
    assert list(sampler) == next(order.batches()).tolist()
    other = EpochOrder(length=50, batch_size=50, seed=3, epoch=1)
    assert list(sampler) != next(other.batches()).tolist()


@each("bad", [
    {"batch_size": 0}, {"rank": 2}, {"start": -1}, {"length": -1}, {"epoch": -1},
    {"length": 5.0}, {"batch_size": "2"}, {"batch_size": True}, {"rank": 0.5}, {"seed": 0.5},
])  # fmt: skip
def test_impossible_plans_are_refused(bad) -> None:
    [(name, value)] = bad.items()
    with pytest.raises(OptionsError, match=f"{name} is {value!r}"):
        EpochOrder(**{"length": 5, "batch_size": 2, "world_size": 2, **bad})


@each("kind", [np.int8, np.uint8, np.int64])
def test_whole_numbers_of_numpy_make_the_order_of_pythons(kind) -> None:
    def order(seed, whole, share) -> list[Any]:
        how = EpochOrder(length=whole(9), batch_size=whole(9), seed=seed, epoch=whole(2))
        blocks = BlockShuffleSampler(range(9), whole(2), blocks_at_once=whole(2), seed=seed)
        mixture = Mixture({"a": range(9)}, seed=seed)
        part = SharedSampler(range(9), batch_size=whole(3), num_replicas=whole(2), rank=whole(1))
        buckets = BucketBatchSampler([1] * 9, tokens=whole(3), padding=share(0.1), seed=seed)
        packs = pack([[row] for row in range(9)], tokens=whole(9), seed=seed)
        return [
            *how.batch(0).tolist(), *blocks, *part, *(mixture[at] for at in range(9)), *buckets,
            packs[0]["input_ids"].tolist(),
        ]  # fmt: skip

    assert order(kind(3), np.int64, np.float32) == order(3, int, float)


@pytest.mark.parametrize("length", [9, 10])
@pytest.mark.parametrize("drop_last", [False, True])
def test_a_generator_of_the_user_is_with_each_batch_as_torch_has_it(length, drop_last) -> None:
    states = []
    for read in (index_batches, iter):
        generator = torch.Generator().manual_seed(1)
        sampler = BatchSampler(RandomSampler(range(length), generator=generator), 3, drop_last)
        next(read(sampler))  # an epoch that is abandoned
        seen = [generator.get_state().tolist() for _ in read(sampler)]
        states.append([*seen, generator.get_state().tolist()])
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
    order = ShuffleSampler(Huge(), seed=3)
    share = SharedSampler(order, batch_size=256, num_replicas=2**20, rank=7)
    batches = RankBatchSampler(share, 256, drop_last=False)
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


ROWS = torch.arange(20)
OWN = {
    "shuffle": lambda: {"batch_size": 3, "sampler": ShuffleSampler(ROWS, 1)},
    "blocks": lambda: {"batch_size": 3, "sampler": BlockShuffleSampler(ROWS, seed=1)},
    "shuffle=": lambda: {"batch_size": 3, "shuffle": "blocks"},
    "buckets": lambda: {"batch_sampler": BucketBatchSampler(range(1, 21), tokens=30)},
    "shared": lambda: {
        "batch_size": 3,
        "sampler": SharedSampler(RandomSampler(ROWS), batch_size=3, num_replicas=2, rank=1),
    },
}


def tell(loader, epoch):
    """Set the epoch by hand, where Lightning does."""
    getattr(loader.batch_sampler, "set_epoch", loader.sampler.set_epoch)(epoch)


@each("name", OWN)
def test_a_plain_loop_has_another_order_in_each_epoch_and_goes_on_in_any(name) -> None:
    loader, by_hand = (FastDataLoader(ROWS, **OWN[name]()) for _ in range(2))
    epochs = []
    for epoch in range(3):
        tell(by_hand, epoch)
        epochs.append([batch.tolist() for batch in loader])
        assert [batch.tolist() for batch in by_hand] == epochs[-1]
        rest = stopped_epoch(lambda: FastDataLoader(ROWS, **OWN[name]()), 2, epoch)
        assert [batch.tolist() for batch in rest] == epochs[-1]
    assert epochs[0] != epochs[1] != epochs[2] != epochs[0]


@each("name", [name for name in OWN if name != "shared"])  # it is keyed by the pass
def test_an_epoch_that_is_set_by_hand_stays_until_another_is_and_its_position_is_known(
    name,
) -> None:
    loader, again = (FastDataLoader(ROWS, **OWN[name]()) for _ in range(2))
    tell(loader, 4)
    tell(again, 4)
    first, second = ([batch.tolist() for batch in loader] for _ in range(2))
    assert first == second
    begun = iter(loader)
    taken = [next(begun).tolist() for _ in range(2)]
    tell(loader, 5)  # holds from the next epoch on
    state = loader.state_dict()
    assert state["samples"] == sum(map(len, taken))
    again.load_state_dict(state)
    assert taken + [batch.tolist() for batch in again] == first


def test_a_sampler_that_counts_epochs_does_so_for_each_loader() -> None:
    sampler = ShuffleSampler(ROWS, 1)
    first, other = (FastDataLoader(ROWS, 3, sampler=sampler) for _ in range(2))
    epochs = [[batch.tolist() for batch in first] for _ in range(2)]
    assert [[batch.tolist() for batch in other] for _ in range(2)] == epochs


def test_torchs_sampler_of_a_rank_is_told_no_epoch_as_by_torch() -> None:
    sampler = DistributedSampler(ROWS, 2, 1)
    loader = FastDataLoader(ROWS, 3, sampler=sampler)
    assert [[batch.tolist() for batch in loader] for _ in range(2)] == [
        [batch.tolist() for batch in DataLoader(ROWS, 3, sampler=sampler)]
    ] * 2
