"""A mixture holds each part in proportion, wherever one looks, and goes on from anywhere."""

from __future__ import annotations

import pickle

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from misses import each
from ragged import stopped_epoch
from thoroughness import max_examples
from torch.utils.data import Dataset, DistributedSampler, IterableDataset, SequentialSampler

from lightning_fastdata import FastDataLoader, Mixture, pack
from lightning_fastdata.errors import DatasetError, FastDataWarning, OptionsError
from lightning_fastdata.order.mixture import Interleaving
from lightning_fastdata.order.samplers import RankBatchSampler, SharedSampler

# The sum of the reciprocals of the Fibonacci numbers.
OFF_BY = 3.36

WEIGHTS = {
    "even": [1, 1],
    "one in ten": [9, 1],
    "thirds and more": [1 / 3, 0.21, 0.459],
    "rare": [0.999, 0.0005, 0.0005],
    "one of many": [50, *[1] * 50],
    "powers": [2.0**-i for i in range(12)],
    "fibonacci": [1, 1, 2, 3, 5, 8, 13, 21, 34, 55],
    "none of one": [3, 0, 1],
}


def worst(parts, weights, run):
    """How far a part is off in any run of so many, at most."""
    share = np.array(weights) / sum(weights)
    taken = np.cumsum(parts[:, None] == np.arange(len(weights)), axis=0)
    taken = np.vstack([np.zeros(len(weights)), taken])
    return float(np.abs(taken[run:] - taken[:-run] - run * share).max())


@each("name", WEIGHTS)
def test_in_any_run_each_part_is_off_by_less_than_the_bound(name):
    weights = WEIGHTS[name]
    sequence = Interleaving(weights)
    parts, before = sequence.at(np.arange(20_000))
    for run in (1, 7, 100, 1000, 5000):
        assert worst(parts, weights, run) < OFF_BY + run * 1e-6 * len(weights)
    for part in range(len(weights)):
        own = before[parts == part]
        assert own.tolist() == list(range(len(own)))
        assert sequence.counts(12_345)[part] == int((parts[:12_345] == part).sum())


@max_examples(60)
@given(
    weights=st.lists(st.floats(1e-3, 1), min_size=1, max_size=40),
    start=st.integers(0, 2**40),
)
def test_any_weights_keep_the_bound_anywhere(weights, start):
    sequence = Interleaving(weights)
    parts, before = sequence.at(np.arange(start, start + 3000))
    assert worst(parts, weights, 1000) < OFF_BY + 0.1
    counts = sequence.counts(start)
    for part in set(parts.tolist()):
        assert before[parts == part][0] == counts[part]


class Named(Dataset):
    """Gives its name and the index."""

    def __init__(self, name, length):
        self.name, self.length = name, length

    def __len__(self):
        return self.length

    def __getitem__(self, index):
        assert 0 <= index < self.length
        return self.name, index


def mixture(weights=None, **how):
    parts = {"a": Named("a", 700), "b": Named("b", 90), "c": Named("c", 31)}
    return Mixture(parts, weights or {"a": 0.6, "b": 0.3, "c": 0.1}, **{"seed": 1, **how})


def read(mixed, epochs):
    found = []
    for epoch in range(epochs):
        mixed.set_epoch(epoch)
        found += [mixed[i] for i in range(len(mixed))]
    return found


@each("kind", [np.uint8, np.int16, torch.tensor])
def test_an_index_may_be_an_integer_of_any_kind(kind):
    mixed = mixture(length=1000)
    assert mixed[kind(150)] == mixed[150]
    assert mixed.place(kind(150)) == mixed.place(150)


def test_parts_are_read_in_whole_passes_each_in_another_order_and_counted():
    mixed = mixture(length=1000)
    samples = read(mixed, 3)
    for name, length in (("a", 700), ("b", 90), ("c", 31)):
        rows = [row for part, row in samples if part == name]
        assert len(rows) == mixed.counts(3)[name] == pytest.approx(mixed.epochs(3)[name] * length)
        passes = [rows[at : at + length] for at in range(0, len(rows) - length + 1, length)]
        assert all(sorted(one) == list(range(length)) for one in passes)
        assert len({tuple(one) for one in passes}) == len(passes)
    assert mixed.counts(1, 500) == {
        name: sum(part == name for part, _ in samples[:1500]) for name in "abc"
    }
    numbers = np.array(["abc".index(part) for part, _ in samples])
    assert worst(numbers, [6, 3, 1], 1000) < 10


def test_the_order_follows_from_the_seed_in_any_process():
    again = pickle.loads(pickle.dumps(mixture()))
    assert read(again, 2) == read(mixture(), 2)
    assert read(mixture(seed=2), 1) != read(mixture(), 1)
    rows = [row for part, row in read(mixture(shuffle=False), 1) if part == "b"]
    assert rows == [row % 90 for row in range(len(rows))]


def test_weights_change_at_a_step_and_runs_across_it_are_in_proportion():
    schedule = {0: {"a": 1, "b": 1, "c": 0}, 100: {"a": 0, "b": 1, "c": 3}}
    mixed = mixture(schedule, length=2000, samples_a_step=10)
    samples = read(mixed, 1)
    assert {part for part, _ in samples[:1000]} == {"a", "b"}
    assert {part for part, _ in samples[1000:]} == {"b", "c"}
    assert [part for part, _ in samples[500:1500]].count("b") == pytest.approx(375, abs=10)
    assert mixed.weights_at(0, 999)["a"] == 0.5
    assert mixed.weights_at(0, 1000) == {"a": 0, "b": 0.25, "c": 0.75}


def test_a_part_that_each_epoch_draws_anew_is_read_in_whole_passes():
    def mixed():
        packs = pack([[i] * 3 for i in range(40)], 6, split=False)
        inner = Mixture({"x": range(30), "y": range(30, 40)}, {"x": 3, "y": 1}, seed=2)
        parts = {"packs": packs, "inner": inner, "rest": [0] * 5}
        return Mixture(parts, {"packs": 5, "inner": 3, "rest": 2}, length=17)

    whole, documents, inner = mixed(), [], []
    loader = FastDataLoader(mixed(), batch_size=None, executor="inline")
    for epoch in range(14):
        whole.set_epoch(epoch)
        for i, sample in enumerate(loader):
            name, _ = whole.place(i)
            if name == "packs":
                assert sample["input_ids"].tolist() == whole[i]["input_ids"].tolist()
                documents += sample["input_ids"][::3].tolist()
            elif name == "inner":
                inner.append(sample)
    passes = [documents[at : at + 40] for at in range(0, len(documents) - 39, 40)]
    assert len(passes) > 1
    assert all(sorted(one) == list(range(40)) for one in passes)
    pairs = [{frozenset(one[at : at + 2]) for at in range(0, 40, 2)} for one in passes]
    assert pairs[0] != pairs[1]
    alone = Mixture({"x": range(30), "y": range(30, 40)}, {"x": 3, "y": 1}, seed=2)
    assert sorted(inner[:40]) == sorted(read(alone, 1))


# -- on ranks, and going on ------------------------------------------------------------------------


class Numbered(Dataset):
    def __init__(self, first, length):
        self.first, self.length = first, length

    def __len__(self):
        return self.length

    def __getitem__(self, index):
        return self.first + index


def numbered(weights=None):
    parts = {"a": Numbered(0, 70), "b": Numbered(1000, 9)}
    return Mixture(parts, weights or {"a": 0.6, "b": 0.4}, length=44, seed=1)


def loaders(ranks, weights=None):
    for rank in range(ranks):
        data = numbered(weights)
        share = SharedSampler(
            SequentialSampler(data), batch_size=8 // ranks, num_replicas=ranks, rank=rank
        )
        batches = RankBatchSampler(share, 8 // ranks, drop_last=False)
        yield FastDataLoader(data, batch_sampler=batches, executor="inline")


def joined(parts):
    return [item for part in parts for item in part]


def steps(ranks, state=None, weights=None, epochs=2):
    per_rank = []
    for loader in loaders(ranks, weights):
        if state is not None:
            loader.load_state_dict(state)
        per_rank.append([batch.tolist() for _ in range(epochs) for batch in loader])
    return [joined(step) for step in zip(*per_rank, strict=True)]


def state_after(ranks, batches, weights=None):
    loader = next(loaders(ranks, weights))
    given = (batch for _ in range(2) for batch in loader)
    for _ in range(batches):
        next(given)
    return loader.state_dict()


@pytest.mark.parametrize("before", [1, 2, 4])
def test_ranks_share_a_mixture_and_go_on_from_any_step_on_any_number(before):
    whole = steps(1)
    assert joined(whole) == [numbered_sample(e, i) for e in range(2) for i in range(44)]
    for at in (2, 6, 8):
        state = state_after(before, at)
        for ranks in (1, 2, 4):
            assert steps(ranks, state, epochs=2 - at // 6) == whole[at:], (at, ranks)


def numbered_sample(epoch, index):
    mixed = numbered()
    mixed.set_epoch(epoch)
    return mixed[index]


def test_other_weights_after_a_checkpoint_hold_from_there_on():
    state = state_after(2, 3)
    anew = steps(2, state, weights={"a": 0, "b": 1})
    assert min(joined(anew)) >= 1000
    # Each sample of b once before it comes again, those before the checkpoint included.
    before = [i for i in joined(steps(2)[:3]) if i >= 1000]
    rest = joined(anew)[: 9 - len(before) % 9]
    assert sorted({*before[len(before) // 9 * 9 :], *rest}) == list(range(1000, 1009))
    # What was saved behind it knows both, and goes on with either.
    loader = next(loaders(2, {"a": 0, "b": 1}))
    loader.load_state_dict(state)
    next(iter(loader))
    again = loader.state_dict()
    assert len(again["dataset_state"]["weights"]) == 2
    assert steps(2, again, weights={"a": 0, "b": 1}) == anew[1:]


@each("shuffle", [False, True])
def test_other_weights_of_a_mixture_within_one_leave_alone_what_was_read(shuffle):
    def nested(weights):
        parts = {"p": Numbered(0, 30), "q": Numbered(100, 30)}
        inner = Mixture(parts, weights, length=10, shuffle=False)
        both = {"inner": inner, "x": Numbered(1000, 40)}
        return Mixture(both, {"inner": 3, "x": 1}, length=20, shuffle=shuffle)

    before, after = nested({"p": 1, "q": 0}), nested({"p": 1, "q": 1})
    after.load_state_dict(before.state_dict())
    after.go_on_at(2, 7)  # 35 of the inner one, whose fourth pass is half over
    places = [divmod(place, 20) for place in range(120)]
    old, new = ([each.of_epoch(at, epoch) for epoch, at in places] for each in (before, after))
    assert new[:47] == old[:47]
    mixed = [sample for sample in new if sample < 1000]
    assert sorted(mixed[:30]) == list(range(30))
    second = [sample for sample in mixed[30:80] if sample < 100]
    assert sorted(second) == list(range(len(second)))
    assert len(second) < 35


def test_of_two_states_that_are_loaded_the_second_alone_counts():
    """Also one of an earlier place, to which a training goes back."""
    early, late = state_after(1, 1), state_after(1, 4)
    new = {"a": 0, "b": 1}
    for states in ((late, early), (early, late)):
        loader = next(loaders(1, new))
        for state in states:
            loader.load_state_dict(state)
            rest = [batch.tolist() for batch in loader]
        assert rest == steps(1, states[-1], weights=new, epochs=1)


def test_a_part_may_come_but_not_go_at_a_checkpoint_and_another_length_is_told():
    state = numbered().state_dict()
    more = Mixture(
        {**numbered().datasets, "c": range(2000, 2005)}, {"a": 1, "b": 1, "c": 1}, seed=1
    )
    more.load_state_dict(state)
    more.go_on_at(0, 30)
    assert [more[i] for i in range(30)] == [numbered_sample(0, i) for i in range(30)]
    assert max(more[i] for i in range(30, 60)) >= 2000
    with pytest.raises(OptionsError, match=r"'b'.*weight 0"):
        Mixture({"a": Numbered(0, 70)}).load_state_dict(state)
    with pytest.warns(FastDataWarning, match="had 9 for 'b'.* is 10 now"):
        Mixture({"a": Numbered(0, 70), "b": Numbered(0, 10)}, seed=1).load_state_dict(state)


@each("ranks", [2, 4])
@pytest.mark.filterwarnings("ignore:.*DistributedSampler decides itself:UserWarning")
def test_a_sampler_that_splits_itself_tells_what_all_ranks_had_of_a_mixture(ranks):
    """As the one that Lightning puts in where there is no data module; on any number of ranks."""

    def loader_of(ranks, weights=None):
        data = numbered(weights)
        sampler = DistributedSampler(data, num_replicas=ranks, rank=1, shuffle=False)
        return FastDataLoader(data, 4, sampler=sampler, executor="inline")

    loader = loader_of(2)
    given = iter(loader)
    for batches in range(1, 4):
        next(given)
        assert loader.progress() == (0, 8 * batches)
    again = loader_of(ranks, {"a": 0, "b": 1})
    again.load_state_dict(loader.state_dict())
    assert again.progress() == (0, 24)
    next(iter(again), None)
    read = again.dataset.counts(0, 24)
    assert read == loader.dataset.counts(0, 24)
    assert again.dataset.counts(0, 32) == {"a": read["a"], "b": read["b"] + 8}


# -- streams ---------------------------------------------------------------------------------------


class Letters(IterableDataset):
    """Splits itself among workers, unless it is asked for all of it."""

    passes = 0

    def set_epoch(self, epoch):
        self.passes = epoch

    def __iter__(self):
        info = torch.utils.data.get_worker_info()
        assert info is None
        yield from range(100 * self.passes, 100 * self.passes + 10)


def streamed(length=40):
    return Mixture({"a": range(-50, 0), "s": Letters()}, {"a": 1, "s": 1}, length=length)


@pytest.mark.parametrize("workers", [0, 2])
def test_a_stream_is_read_in_its_order_by_whoever_reads(workers):
    how = {"executor": "workers" if workers else "inline", "num_workers": workers}

    def loader_of():
        return FastDataLoader(streamed(), 4, **how)

    whole = torch.cat(list(loader_of())).tolist()
    assert [i for i in whole if i >= 0] == [*range(10), *range(100, 110)]
    assert torch.cat(stopped_epoch(loader_of, 3)).tolist() == whole


class Counted(Letters):
    begun = 0

    def __iter__(self):
        self.begun += 1
        return super().__iter__()


def test_a_stream_is_not_read_again_for_the_sample_that_it_gave_last():
    stream = Counted()
    mixed = Mixture({"s": stream}, {"s": 1}, length=9)
    assert [mixed[i] for i in (0, 1, 1, 3)] == [0, 1, 1, 3]
    assert stream.begun == 1


class Once(IterableDataset):
    def __init__(self):
        self.left = iter(range(3))

    def __iter__(self):
        return self.left


def test_a_stream_that_does_not_begin_anew_is_named():
    mixed = Mixture({"once": Once()}, {"once": 1}, length=9)
    with pytest.raises(DatasetError, match=r"'once'.*no sample in pass 1"):
        [mixed[i] for i in range(9)]


# -- what is impossible ----------------------------------------------------------------------------

TWO = {"a": range(3), "b": range(4)}


@each(
    ("arguments", "names"),
    [
        (({},), "at least one part"),
        (([range(3)],), "parts of a Mixture are a list. Give them by name"),
        (({"a": []},), "'a'.*empty"),
        (({"a": 3},), "'a'.*int"),
        ((TWO, {"a": 0, "b": 0}), "sum up"),
        ((TWO, {"a": -1, "b": 2}), "numbers from 0"),
        ((TWO, {"a": float("nan"), "b": 2}), "numbers from 0"),
        ((TWO, {"a": 1}), r"\{'a': 1\}; give one for each part by its name, as \{'a': 1, 'b': 1\}"),
        ((TWO, {5: {"a": 1, "b": 1}}), "first of them 0"),
        ((TWO, {0: {"a": 1, "b": 1}, "x": 3}), "numbers of the steps"),
        (({"s": Letters()},), "length="),
        ((TWO, [0.1, 0.9]), r"\[0.1, 0.9\]; give one for each part by its name"),
        ((TWO, {0: [0.1, 0.9], 5: {"a": 1, "b": 1}}), "numbers of the steps"),
        ((TWO, {"a": "1", "b": 2}), "numbers from 0"),
    ],
)
def test_what_makes_no_mixture_is_refused(arguments, names):
    with pytest.raises((DatasetError, OptionsError), match=names):
        Mixture(*arguments)


def test_a_length_and_a_shuffle_that_do_not_fit_are_refused():
    with pytest.raises(OptionsError, match="length is 0"):
        Mixture(TWO, length=0)
    with pytest.raises(OptionsError, match=r"seed is 0\.5"):
        Mixture(TWO, seed=0.5)
    with pytest.raises(OptionsError, match="shuffle is 'blocks'"):
        Mixture(TWO, shuffle="blocks")
    with pytest.raises(OptionsError, match="samples_a_step is None"):
        Mixture(TWO, samples_a_step=None)
    with pytest.raises(OptionsError, match="order of its own"):
        FastDataLoader(Mixture(TWO), 2, shuffle=True)
    with pytest.raises(IndexError, match="no sample 7"):
        Mixture(TWO)[7]


def test_numbers_of_numpy_and_very_large_ones_are_taken():
    half = {"a": np.float32(0.5), "b": np.int64(1)}
    mixed = Mixture(TWO, {np.int64(0): half}, length=np.int64(9), samples_a_step=np.int64(3))
    assert mixed.weights_at(0) == {"a": 1 / 3, "b": 2 / 3}
    assert len(mixed) == 9
    plain = mixed.state_dict()["weights"]
    assert {type(start) for start, _ in plain} == {int}
    assert {type(weight) for _, each in plain for weight in each.values()} == {float}
    large = Mixture({**TWO, "c": range(5)}, dict.fromkeys("abc", 1e308))
    assert large.weights_at(0) == dict.fromkeys("abc", 1 / 3)


def test_a_share_of_a_mixture_may_be_drawn_by_any_sampler():
    share = SharedSampler(range(44), batch_size=4, num_replicas=2, rank=1)
    loader = FastDataLoader(numbered(), batch_sampler=RankBatchSampler(share, 4, False))
    assert next(iter(loader)).tolist() == [numbered_sample(0, i) for i in range(4, 8)]
