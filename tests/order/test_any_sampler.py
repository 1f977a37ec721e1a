"""Ranks take the same steps of any sampler's order, equally many of them, wherever they stopped.

What torch's samplers give by themselves says what the samples have to be.
"""

from __future__ import annotations

import copy
import random
import warnings
from functools import partial

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from misses import each
from thoroughness import max_examples
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from lightning_fastdata import FastDataLoader
from lightning_fastdata.errors import FastDataWarning, OptionsError
from lightning_fastdata.order.epoch_order import EpochOrder, can_share_evenly
from lightning_fastdata.order.indices import EpochIndices
from lightning_fastdata.order.samplers import (
    RankBatchSampler,
    SharedSampler,
    ShuffleSampler,
    split_of,
)
from lightning_fastdata.randomness.seeds import seed_global_generators

LENGTH = 53
STEP = 8
"""Samples of all ranks in a step."""


def seeded():
    return torch.Generator().manual_seed(4)


class Drawing:
    """A sampler of the user's own, which draws from each global generator as it goes."""

    def __init__(self, length=LENGTH):
        self.length = length

    def __iter__(self):
        numpys = iter(np.random.permutation(self.length).tolist())  # before the first index
        return ((next(numpys) + random.randrange(3) + int(torch.randint(3, ()))) % self.length
                for _ in range(self.length))  # fmt: skip

    def __len__(self):
        return self.length


class Unsized:
    """One that does not know its length."""

    def __iter__(self):
        return iter(Drawing())


class InPairs:
    """A batch sampler that knows nothing of torch's: pairs of neighbours, in the epoch's order."""

    epoch = 0

    def __init__(self, size=2, length=LENGTH - 1):
        self.size, self.length = size, length

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __iter__(self):
        for start in range(0, self.length, self.size):
            stop = min(start + self.size, self.length)
            yield [(i + 7 * self.epoch) % self.length for i in range(start, stop)]

    def __len__(self):
        return (self.length + self.size - 1) // self.size


SAMPLERS = {
    "sequential": lambda: SequentialSampler(range(LENGTH)),
    "shuffle": lambda: RandomSampler(range(LENGTH)),
    "shuffle with a generator": lambda: RandomSampler(range(LENGTH), generator=seeded()),
    "with replacement": lambda: RandomSampler(range(LENGTH), replacement=True, num_samples=70),
    "weighted": lambda: WeightedRandomSampler(range(1, LENGTH + 1), 90),
    "weighted with a generator": lambda: WeightedRandomSampler(
        range(1, LENGTH + 1), 40, generator=seeded()
    ),
    "subset": lambda: SubsetRandomSampler(range(3, 40)),
    "own": Drawing,
    "without a length": Unsized,
    "a list": lambda: [5, 1, 1, 4, *range(20, 45)],
    "the package's own": lambda: ShuffleSampler(range(LENGTH), seed=3),
}


def batches_of(make, ranks, rank, *, size, drop_last=False, epoch=0):
    share = SharedSampler(
        make(), batch_size=size, num_replicas=ranks, rank=rank, drop_last=drop_last, seed=3
    )
    share.set_epoch(epoch)
    return RankBatchSampler(share, size or 1, bool(drop_last))


def steps_of(make, ranks, **how):
    """What all ranks take in each step, in the order of the ranks."""
    per_rank = [list(batches_of(make, ranks, rank, **how)) for rank in range(ranks)]
    assert len({len(batches) for batches in per_rank}) == 1
    return [list(step) for step in zip(*per_rank, strict=True)]


def joined(step):
    return [index for batch in step for index in batch]


def alone(make, epoch=0):
    """What a sampler gives that is iterated by itself, under the key of the epoch."""
    seed_global_generators(3, epoch, "order")
    return list(make())


@pytest.fixture(autouse=True)
def another_world():
    """Nothing rests on what the global generators happen to be."""
    for anew in (torch.seed, np.random.seed, random.seed):
        anew()


@pytest.mark.parametrize("drop_last", [False, True])
@each("name", SAMPLERS)
def test_the_steps_of_any_number_of_ranks_are_those_of_one_and_the_samplers_own(name, drop_last):
    order = alone(SAMPLERS[name])
    cut = [order[at : at + STEP] for at in range(0, len(order), STEP)]
    if drop_last and len(cut[-1]) < STEP:
        cut.pop()
    for ranks in (1, 2, 4):
        steps = steps_of(SAMPLERS[name], ranks, size=STEP // ranks, drop_last=drop_last)
        found = [joined(step) for step in steps]
        # A rest of fewer samples than ranks takes some of the step before.
        sure = len(cut) - 2 * (len(cut[-1]) < ranks)
        assert (found[:sure], joined(found)) == (cut[:sure], joined(cut))
        sizes = [sorted(map(len, step)) for step in steps]
        assert all(each[0] >= 1 and each[-1] - each[0] <= 1 for each in sizes)
        if SAMPLERS[name] is not Unsized:
            loader = batches_of(SAMPLERS[name], ranks, 0, size=STEP // ranks, drop_last=drop_last)
            assert len(loader) == len(steps)


@max_examples(100)
@given(
    length=st.integers(1, 80),
    size=st.integers(1, 5),
    ranks=st.integers(1, 6),
    drop_last=st.booleans(),
    sized=st.booleans(),
)
@example(length=26, size=2, ranks=4, drop_last=False, sized=True)
@example(length=26, size=2, ranks=4, drop_last=False, sized=False)
def test_what_does_not_divide_is_shared_as_by_the_packages_own_order(
    length, size, ranks, drop_last, sized
):
    if not drop_last and not can_share_evenly(length, size, ranks):
        return
    for rank in range(ranks):
        plan = EpochOrder(
            length=length, batch_size=size, rank=rank, world_size=ranks, shuffle=False,
            drop_last=drop_last,
        )  # fmt: skip
        make = (lambda: range(length)) if sized else (lambda: iter(range(length)))
        found = list(batches_of(make, ranks, rank, size=size, drop_last=drop_last))
        assert found == [batch.tolist() for batch in plan.batches()]


@max_examples(100)
@given(
    length=st.integers(0, 60),
    size=st.integers(1, 5),
    ranks=st.integers(1, 6),
    drop_last=st.booleans(),
    sized=st.booleans(),
)
@example(length=0, size=2, ranks=2, drop_last=False, sized=True)
@example(length=1, size=2, ranks=2, drop_last=True, sized=True)
@example(length=57, size=2, ranks=4, drop_last=False, sized=True)
@example(length=57, size=2, ranks=4, drop_last=False, sized=False)
@example(length=101, size=2, ranks=4, drop_last=True, sized=True)
@pytest.mark.filterwarnings("ignore:The last .* of an epoch")
def test_all_ranks_have_the_batches_that_they_say_in_any_loader(
    length, size, ranks, drop_last, sized
):
    class Own:
        def __iter__(self):
            return iter(range(length))

    if sized:
        Own.__len__ = lambda _: length
    counts, taken = set(), {kind: [] for kind in ("ours", "ours by hand", "torch")}
    for rank in range(ranks):
        how = {"num_replicas": ranks, "rank": rank, "drop_last": drop_last}
        share = SharedSampler(Own(), batch_size=size, **how)
        loaders = {
            "ours": FastDataLoader(
                range(99), batch_sampler=RankBatchSampler(share, size, drop_last), executor="inline"
            ),
            "ours by hand": FastDataLoader(
                range(99), size, sampler=share, drop_last=drop_last, executor="inline"
            ),
            "torch": DataLoader(range(99), size, sampler=share, drop_last=drop_last),
        }
        if sized:
            assert len(share) == len(list(share))
        for kind, loader in loaders.items():
            batches = read(loader)
            assert not sized or len(loader) == len(batches)
            counts.add(len(batches))
            taken[kind] += joined(batches)
    (steps,) = counts
    assert steps == (length // (size * ranks) if drop_last else -(-length // (size * ranks)))
    for indices in taken.values():
        assert set(indices) == set(range(steps * size * ranks if drop_last else length))
    assert taken["ours"] == taken["ours by hand"]


@pytest.mark.parametrize(("length", "size"), [(3, 2), (9, 1), (65, 1)])
def test_too_few_for_the_ranks_are_filled_up_and_that_is_said_or_left_out(length, size):
    ranks = 64 if length > 64 else 4
    with pytest.warns(FastDataWarning, match=rf"fewer than the {ranks} ranks.*taken again"):
        steps = steps_of(lambda: range(length), ranks, size=size)
    assert all(len(batch) for step in steps for batch in step)
    assert joined(joined(steps)) == [*range(length), *range(-length % ranks)]
    assert steps_of(lambda: range(length), ranks, size=size, drop_last=True) == [
        [[i] for i in range(start, start + ranks)]
        for start in range(0, length - ranks + 1, ranks)
        if size == 1
    ]


@pytest.mark.parametrize("ranks", [1, 2, 4, 64])
def test_of_a_batch_sampler_each_rank_takes_whole_batches(ranks):
    every = list(InPairs())
    steps = steps_of(InPairs, ranks, size=None, drop_last=True)
    assert steps == [every[at : at + ranks] for at in range(0, len(every) - ranks + 1, ranks)]
    if ranks < 64:
        # The rest is shared, and so are the samples of one epoch each once.
        steps = steps_of(InPairs, ranks, size=None, epoch=2)
        later = InPairs()
        later.set_epoch(2)
        assert joined(joined(steps)) == joined(later)
        assert len(steps) == -(-len(every) // ranks)


def test_a_batch_sampler_is_told_the_epoch_on_one_device_too():
    loader = FastDataLoader(range(200), batch_sampler=InPairs(), epoch=lambda: 3, executor="inline")
    later = InPairs()
    later.set_epoch(3)
    assert read(loader) == list(later)


@pytest.mark.parametrize("ranks", [2, 4])
def test_a_kept_global_batch_gives_the_same_steps_of_a_batch_sampler(ranks):
    one = [sorted(joined(s)) for s in steps_of(lambda: InPairs(STEP), 1, size=None)]
    several = steps_of(lambda: InPairs(STEP // ranks), ranks, size=None)
    assert [sorted(joined(step)) for step in several] == one


def test_ready_batches_that_cannot_be_cut_come_again_for_the_last_step():
    items = ["a", "b", "c", "d", "e"]
    shares = [SharedSampler(items, batch_size=None, num_replicas=2, rank=r) for r in range(2)]
    with pytest.warns(FastDataWarning, match="taken again"):
        assert [list(share) for share in shares] == [["a", "c", "e"], ["b", "d", "a"]]
    assert [len(share) for share in shares] == [3, 3]


# -- draws -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["shuffle", "with replacement", "weighted", "subset", "own"])
def test_draws_are_keyed_by_the_epoch_and_leave_the_global_generators_alone(name):
    def states():
        return random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()

    before, found = states(), []
    for epoch in (0, 0, 1):
        batches = iter(batches_of(SAMPLERS[name], 2, 1, size=4, epoch=epoch))
        first = next(batches)
        assert states() == before
        torch.rand(1)  # a step draws, too
        found.append([first, *batches])
        before = states()
    assert found[0] == found[1]
    assert found[0] != found[2]


def test_what_a_sampler_draws_when_it_is_iterated_is_keyed_on_one_rank_too():
    assert list(EpochIndices(Drawing(), seed=3)) == alone(Drawing)
    batches = BatchSampler(Drawing(), STEP, drop_last=False)
    assert joined(EpochIndices(batches, arrays=True, seed=3)) == alone(Drawing)


# -- who splits already ----------------------------------------------------------------------------


class Repeated(DistributedSampler):
    """As the repeated augmentation of timm."""


class Lhotse:
    """As the samplers of lhotse."""

    rank, world_size = 1, 2

    def __iter__(self):
        return iter([[1], [3]])


@each(
    "sampler",
    [
        DistributedSampler(range(8), 2, 1),
        Repeated(range(8), 2, 0),
        Lhotse(),
        BatchSampler(DistributedSampler(range(8), 2, 1), 2, False),
        RankBatchSampler(SharedSampler(range(8), batch_size=2, num_replicas=2, rank=0), 2, False),
    ],
)
def test_what_splits_itself_is_known_and_not_split_again(sampler):
    assert split_of(sampler) is not None
    with pytest.raises(OptionsError, match="shared out again"):
        SharedSampler(sampler, batch_size=2, num_replicas=2, rank=0)


class InTurn:
    rank, world_size = 1, 2

    def __init__(self):
        self.weights = [1]

    def __iter__(self):
        return iter([1, 3])

    def update(self, weights):
        self.weights[:] = weights


def test_what_splits_itself_has_its_own_methods_in_a_loader():
    sampler = InTurn()
    shown = FastDataLoader(range(4), sampler=sampler).sampler
    shown.update([5])
    assert sampler.weights == copy.deepcopy(shown).weights == [5]
    with pytest.raises(AttributeError, match="other"):
        shown.other()


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_share_may_be_given_to_a_loader_as_its_sampler_or_its_batch_sampler(ranks):
    whole = alone(SAMPLERS["own"])
    found, batches = [], []
    for rank in range(ranks):
        ranks_are = {"num_replicas": ranks, "rank": rank, "seed": 3}
        share = SharedSampler(Drawing(), batch_size=STEP // ranks, **ranks_are)
        loader = FastDataLoader(range(200), STEP // ranks, sampler=share, executor="inline")
        found.append(read(loader))
        assert len(loader) == len(found[0])
        share = SharedSampler(InPairs(), batch_size=None, **ranks_are)
        loader = FastDataLoader(range(200), batch_sampler=share, executor="inline")
        assert loader.sampler is share
        batches.append(read(loader))
        assert len(loader) == len(batches[0])
    assert joined(joined(step) for step in zip(*found, strict=True)) == whole
    assert joined(joined(step) for step in zip(*batches, strict=True)) == joined(InPairs())


def test_a_share_that_is_set_to_an_epoch_has_its_order_until_another_is_set():
    """Also one that a loader of this package reads, which counts epochs."""
    share = SharedSampler(SAMPLERS["shuffle"](), batch_size=4, num_replicas=2, rank=1)
    loader = FastDataLoader(range(LENGTH), 4, sampler=share, executor="inline")
    found = {}
    for epoch in (2, None, 1, None, 2):
        if epoch is not None:
            share.set_epoch(epoch)
        found[share.epoch] = read(loader)
        assert found[share.epoch] == read(DataLoader(range(LENGTH), 4, sampler=share))
    assert found[1] != found[2]


def test_impossible_shares_are_refused():
    share = SharedSampler([1], batch_size=4)
    with pytest.raises(OptionsError, match=r"batch_size=3.*Give both the same"):
        FastDataLoader(range(9), 3, sampler=share)
    sizes = [({"batch_size": size}, "batch_size is .*whole number") for size in (0, 2.5, "4")]
    others = [({name: bad}, f"{name} is {bad!r}") for name, bad in (
        ("rank", 2), ("rank", 0.5), ("num_replicas", 0), ("num_replicas", "2"), ("seed", 0.5),
        ("source", 5),
    )]  # fmt: skip
    for bad, name in (*others, *sizes):
        given = {"source": [1], "batch_size": 1, "num_replicas": 2, "rank": 0, **bad}
        with pytest.raises(OptionsError, match=name):
            SharedSampler(**given)


# -- going on --------------------------------------------------------------------------------------


def loader_of(make, ranks, rank, *, step=STEP, whole=False, drop_last=False, data=None):
    size = None if whole else step // ranks
    batches = batches_of(make, ranks, rank, size=size, drop_last=drop_last)
    return FastDataLoader(data or range(200), batch_sampler=batches, executor="inline", seed=3)


def read(loader):
    return [batch.tolist() for batch in loader]


def after(state, make, ranks, **how):
    """The steps of all ranks that go on from a state, and their loaders."""
    loaders = [loader_of(make, ranks, rank, **how) for rank in range(ranks)]
    for loader in loaders:
        if state is not None:
            loader.load_state_dict(state)
    per_rank = [read(loader) for loader in loaders]
    assert len({len(batches) for batches in per_rank}) == 1
    return [joined(step) for step in zip(*per_rank, strict=True)]


def stopped(make, ranks, at, *, state=None, rank=0, **how):
    loader = loader_of(make, ranks, rank, **how)
    if state is not None:
        loader.load_state_dict(state)
    given = iter(loader)
    for _ in range(at):
        next(given)
    return loader.state_dict()


@pytest.mark.parametrize("before", [1, 2, 4])
@each("name", SAMPLERS)
def test_ranks_go_on_from_any_step_with_what_is_left_on_any_number_of_them(name, before):
    make = SAMPLERS[name]
    whole = after(None, make, 1)
    for at in (1, 3, len(whole) - 1 - (len(whole[-1]) < before)):
        state = stopped(make, before, at)
        assert state["samples"] == sum(map(len, whole[:at]))
        for ranks in (1, 2, 4):
            if len(whole[-1]) >= ranks:  # else the last two steps are cut in another way
                assert after(state, make, ranks) == whole[at:], (at, ranks)


@pytest.mark.parametrize("size", [2, 5])
def test_batch_samplers_go_on_on_another_number_of_ranks(size):
    order = joined(InPairs(size))

    def make():
        return InPairs(size)

    for before, at, ranks in ((1, 4, 2), (2, 3, 1), (2, 2, 4), (4, 1, 2), (2, 3, 2)):
        state = stopped(make, before, at, whole=True)
        assert state["samples"] == at * before * size
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="From epoch")
            left = after(state, make, ranks, whole=True)
        assert joined(left) == order[at * before * size :], (before, at, ranks)


@pytest.mark.parametrize(
    "name", ["shuffle", "weighted with a generator", "own", "the package's own"]
)
def test_steps_of_another_size_take_what_is_left_any_number_of_times(name):
    order = alone(SAMPLERS[name])
    state = stopped(SAMPLERS[name], 2, 2)
    for ranks, step, samples in ((4, 12, 28), (1, 5, 33)):
        with pytest.warns(FastDataWarning, match="no sample comes twice or is left out"):
            state = stopped(SAMPLERS[name], ranks, 1, state=state, step=step)
        assert state["samples"] == samples
    assert joined(after(state, SAMPLERS[name], 1, step=5)) == order[33:]


@each("name", ["shuffle", "own", "without a length", "the package's own"])
def test_steps_of_another_size_give_up_what_a_rest_of_fewer_samples_than_ranks_is_lacking(name):
    order, state = alone(SAMPLERS[name]), stopped(SAMPLERS[name], 2, 2)
    with pytest.warns(FastDataWarning, match="no sample comes twice or is left out") as told:
        left = after(state, SAMPLERS[name], 4, step=12)
    assert not [each for each in told if "taken again" in str(each.message)]
    assert [len(step) for step in left] == [12, 12, 9, 4]
    assert joined(left) == order[16:]


def test_a_rest_of_fewer_samples_than_ranks_is_filled_up_behind_a_resume():
    def make():
        return ShuffleSampler(range(18), seed=3)

    order, data = list(make()), range(18)
    state = stopped(make, 2, 2, data=data)
    with pytest.warns(FastDataWarning, match="taken again"):
        left = after(state, make, 4, data=data)
    assert left == [[*order[16:], *order[:2]]]


@pytest.mark.filterwarnings("ignore:The last . of an epoch", "ignore:From epoch")
@each("name", ["shuffle", "own", "the package's own"])
def test_a_rest_is_filled_up_behind_a_resume_with_the_samples_that_it_would_have_got(name):
    """One of each step of four ranks, which has none to give up, and one more."""
    whole = after(None, SAMPLERS[name], 4, step=4)
    assert len(whole[-1]) == 4
    assert [*whole[-1][1:]] == whole[0][:3]
    for at in (1, 5, len(whole) - 1):
        state = stopped(SAMPLERS[name], 4, at, step=4)
        assert after(state, SAMPLERS[name], 4, step=4) == whole[at:], at
    left = after(stopped(SAMPLERS[name], 2, 1, step=6), SAMPLERS[name], 4, step=4)
    assert joined(left) == [*joined(whole)[6:LENGTH], whole[0][0]]


def test_an_order_that_is_another_one_is_noticed_on_any_rank():
    state = stopped(Drawing, 2, 3)
    again = loader_of(lambda: range(LENGTH - 1, -1, -1), 2, 1)
    again.load_state_dict({**state, "order": "range"})
    with pytest.warns(FastDataWarning, match="range gives another order now"):
        next(iter(again))
    # So it is where the rest is cut into steps of another size, none of which ends there.
    anew = loader_of(lambda: range(LENGTH - 1, -1, -1), 1, 0, step=5)
    anew.load_state_dict({**state, "order": "range"})
    with (
        pytest.warns(FastDataWarning, match="From epoch 0 after 24 samples on"),
        pytest.warns(FastDataWarning, match="range gives another order now"),
    ):
        next(iter(anew))
    # The order that goes on is the one that the next resume is to find.
    once_more = loader_of(lambda: range(LENGTH - 1, -1, -1), 2, 1)
    once_more.load_state_dict(again.state_dict())
    next(iter(once_more))


def of_weights(data):
    generator = torch.Generator().manual_seed(1)
    return WeightedRandomSampler(torch.ones(len(data)), len(data), generator=generator)


@each(
    ("make", "why"),
    [
        (partial(ShuffleSampler, seed=3), "dataset had another length as the epoch began"),
        (of_weights, "What it draws from was another as the epoch began .its weights"),
    ],
)
def test_of_an_order_that_a_step_has_changed_it_is_said_what_may_have_changed(make, why):
    data = list(range(24))
    loader = FastDataLoader(data, 4, sampler=make(data))
    batches = iter(loader)
    next(batches)
    data.extend(range(24, 30))
    if hasattr(loader.sampler, "weights"):
        loader.sampler.weights[:20] = 0
    next(batches)
    again = FastDataLoader(data, 4, sampler=make(data))
    if hasattr(loader.sampler, "weights"):
        again.sampler.weights[:20] = 0
    again.load_state_dict(loader.state_dict())
    with pytest.warns(FastDataWarning, match=f"gives another order now.*{why}"):
        next(iter(again))
