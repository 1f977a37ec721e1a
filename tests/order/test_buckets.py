"""Batches of like length: little padding, every sample once, ranks with as much to do."""

from __future__ import annotations

import copy
import pickle
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import assume, example, given
from hypothesis import strategies as st
from misses import Misses, each
from ragged import Sequences, pad, stopped_epoch
from thoroughness import max_examples
from torch.utils.data import DataLoader, DistributedSampler, SequentialSampler
from trainers import Keeps, Learner, quiet_trainer

from benchmarks.lengths import LAWS, drawn
from lightning_fastdata import BucketBatchSampler, FastDataLoader, FastDataModule
from lightning_fastdata.errors import DatasetError, OptionsError
from lightning_fastdata.order.lengths import dealt

SIZES = {
    "lengths": st.lists(st.integers(0, 60), max_size=70),
    "seed": st.integers(0, 2**40),
    "epoch": st.integers(0, 3),
    "tokens": st.sampled_from([None, 60, 97, 400]),
    "batch_size": st.sampled_from([1, 3, 8]),
    "together": st.sampled_from([None, 1, 3]),
    "padding": st.sampled_from([0.01, 0.05, 0.4]),
}


def of_ranks(lengths, ranks, epoch=0, **how):
    """Return the batches of each rank."""
    found = []
    for rank in range(ranks):
        sampler = BucketBatchSampler(lengths, num_replicas=ranks, rank=rank, **how)
        sampler.set_epoch(epoch)
        found.append(list(sampler))
        assert len(found[-1]) == len(sampler)
    return found


def can_be_shared(lengths, ranks, start=0, epoch=0, **how):
    """Return whether batches can be cut into as many on each rank."""
    sampler = BucketBatchSampler(lengths, num_replicas=ranks, rank=0, **how)
    sampler.set_epoch(epoch)
    try:
        return len(replace(sampler.sampler.order, start=start)) >= 0
    except OptionsError:
        sizes = [len(batch) for batch in of_ranks(lengths, 1, **how)[0]]
        assert start or sum(sizes) - len(sizes) < -len(sizes) % ranks
        return False


def padded(lengths, batches):
    """Return the numbers of padded batches, with padding."""
    return sum(len(batch) * lengths[batch].max() for batch in batches)


@max_examples(100)
@given(ranks=st.integers(1, 5), **SIZES)
def test_ranks_share_every_sample_once_in_as_many_batches_within_the_budget(
    ranks, lengths, **how
) -> None:
    assume(can_be_shared(lengths, ranks, **how))
    batches = of_ranks(lengths, ranks, **how)
    assert len({len(own) for own in batches}) == 1
    seen = [index for own in batches for batch in own for index in batch]
    assert sorted(seen) == list(range(len(lengths)))
    for batch in (batch for own in batches for batch in own):
        longest = max(lengths[index] for index in batch)
        assert len(batch) <= how["batch_size"]
        assert how["tokens"] is None or len(batch) * longest <= how["tokens"]


@max_examples(100)
@given(ranks=st.integers(1, 5), then=st.integers(1, 5), stop=st.integers(0, 9), **SIZES)
@example(  # one rank goes on within a batch that two had cut
    ranks=2, then=1, stop=1, lengths=[1, 2, 60, 60], tokens=60, batch_size=8, together=None,
    padding=0.05, seed=0, epoch=0,
)  # fmt: skip
def test_a_run_goes_on_anywhere_on_any_ranks_with_every_sample_once(
    ranks, then, stop, lengths, epoch, **how
) -> None:
    assume(can_be_shared(lengths, ranks, epoch=epoch, **how))
    sampler = BucketBatchSampler(lengths, num_replicas=ranks, rank=0, **how)
    sampler.set_epoch(epoch)
    order = sampler.sampler.order
    before = order.samples_before(stop)
    how["together"] = order.together
    assume(can_be_shared(lengths, then, before, epoch, **how))

    def batches_of(ranks, start):
        plans = [replace(order, rank=r, world_size=ranks, start=start) for r in range(ranks)]
        found = [[batch.tolist() for batch in plan.batches()] for plan in plans]
        assert found == [[p.batch(number).tolist() for number in range(len(p))] for p in plans]
        return found

    whole, rest = batches_of(ranks, 0), batches_of(then, before)
    done = [own[:stop] for own in whole]
    assert len({len(own) for own in rest}) == 1
    seen = [index for own in (*done, *rest) for batch in own for index in batch]
    assert sorted(seen) == list(range(len(lengths)))
    assert then != ranks or rest == [own[stop:] for own in whole]


@max_examples(40)
@given(ranks=st.integers(1, 5), **SIZES)
def test_what_is_dropped_is_less_than_a_step(ranks, lengths, **how) -> None:
    everything = of_ranks(lengths, 1, **how)[0]
    batches = of_ranks(lengths, ranks, drop_last=True, **how)
    assert [len(own) for own in batches] == [len(everything) // ranks] * ranks


@pytest.mark.parametrize("budget", [{"tokens": 16384}, {"batch_size": 32}], ids=str)
def test_at_most_5_percent_of_a_batch_is_padding(budget) -> None:
    with Misses() as misses:
        for name in LAWS:
            lengths = drawn(name, 50_000)
            share = 1 - lengths.sum() / padded(lengths, BucketBatchSampler(lengths, **budget))
            misses.check(share <= 0.05, name, share)


def loads(lengths, ranks, cost, **how):
    """Return what eight ranks, or all, have to do in an epoch."""
    order = BucketBatchSampler(lengths, cost=cost, num_replicas=ranks, rank=0, **how).sampler.order
    power = 1 if cost == "linear" else 2
    return [
        sum(len(batch) * float(lengths[batch].max()) ** power for batch in own.batches())
        for own in (replace(order, rank=rank) for rank in range(0, ranks, -(-ranks // 8)))
    ]


@pytest.mark.parametrize(("ranks", "count"), [(2, 20_000), (4, 20_000), (64, 100_000)])
def test_the_costs_of_ranks_are_within_3_percent(ranks, count) -> None:
    with Misses() as misses:
        for name in LAWS:
            lengths = drawn(name, count)
            for cost in ("linear", "quadratic"):
                found = loads(lengths, ranks, cost, tokens=2 * int(lengths.max()))
                misses.check(max(found) <= 1.03 * min(found), name, cost, max(found) / min(found))


@pytest.mark.parametrize(("steps", "ranks"), [(0, 2), (1, 3), (7, 2), (40, 5), (50_000, 2)])
def test_ranks_differ_by_no_more_than_the_batches_of_one_step(steps, ranks) -> None:
    costs = np.random.default_rng(steps).random((steps, ranks))
    given = dealt(costs)
    assert (np.sort(given) == np.arange(ranks)).all()
    had = np.take_along_axis(costs, given, axis=1).sum(0)
    assert np.ptp(had) <= np.ptp(costs, axis=1).max(initial=0) + 1e-9


def test_no_rank_of_a_step_waits_long_for_another() -> None:
    with Misses() as misses:
        for count in (20_000, 20_020, 20_060):  # 0, 2 and 1 batches are left for the last step
            lengths = drawn("speech", count)
            steps = zip(*of_ranks(lengths, 4, tokens=16384), strict=True)
            longest = np.array([[lengths[batch].max() for batch in step] for step in steps])
            waits = (longest.max(1) / longest.mean(1) - 1).mean()
            misses.check(waits < 0.02, count, waits)


def test_1_2_and_4_ranks_have_the_same_samples_in_a_step_of_4_batches() -> None:
    lengths = drawn("chat", 2000)

    def steps(ranks):
        batches = of_ranks(lengths, ranks, tokens=8192, together=4, drop_last=True)
        each = 4 // ranks
        count = len(batches[0]) // each
        return [
            {i for own in batches for batch in own[each * n : each * (n + 1)] for i in batch}
            for n in range(count)
        ]

    assert steps(1) == steps(2) == steps(4)


def test_epochs_and_seeds_differ_in_companions_and_order_but_not_in_number() -> None:
    lengths = drawn("speech", 5000)
    sampler = BucketBatchSampler(lengths, tokens=16384)
    size = len(pickle.dumps(sampler))
    first = list(sampler)
    sampler.set_epoch(1)
    second = list(sampler)
    other = list(BucketBatchSampler(lengths, tokens=16384, seed=1))
    assert len(first) == len(second) == len(other)
    together = [{frozenset(batch) for batch in batches} for batches in (first, second, other)]
    few = len(first) // 20  # in sparse buckets there is one way to make a batch
    assert len(together[0] & together[1]) < few
    assert len(together[0] & together[2]) < few
    sampler.set_epoch(0)
    assert list(sampler) == first
    assert len(pickle.dumps(sampler)) <= size  # orders are drawn anew there
    assert list(pickle.loads(pickle.dumps(sampler))) == first
    assert list(copy.deepcopy(sampler)) == first
    order = [lengths[batch].max() for batch in first]
    assert abs(np.corrcoef(order, np.arange(len(order)))[0, 1]) < 0.1


@pytest.mark.parametrize("executor", ["torch", "inline", "workers"])
def test_a_loader_gives_torchs_batches_and_goes_on_in_the_middle(executor) -> None:
    data = Sequences(drawn("sentences", 300))

    def loader_of():
        how = {"collate_fn": pad, "num_workers": int(executor == "workers")}
        sampler = BucketBatchSampler(data.lengths, tokens=512)
        return FastDataLoader(data, batch_sampler=sampler, executor=executor, **how)

    sampler = BucketBatchSampler(data.lengths, tokens=512)
    expected = [batch.tolist() for batch in DataLoader(data, batch_sampler=sampler, collate_fn=pad)]
    assert [batch.tolist() for batch in stopped_epoch(loader_of, 3)] == expected


def test_lightning_puts_no_sampler_of_its_own_in_its_place() -> None:
    lengths = drawn("sentences", 200)
    sampler = BucketBatchSampler(lengths, tokens=512)
    loader = FastDataLoader(Sequences(lengths), batch_sampler=sampler)
    assert isinstance(loader.sampler, DistributedSampler)
    data = FastDataModule.from_datasets(Sequences(lengths), collate_fn=pad)
    data.train_dataloader = lambda: data.make_loader(
        Sequences(lengths), stage="train", batch_sampler=sampler, collate_fn=pad
    )
    trainer, module = quiet_trainer(max_epochs=2), Keeps()
    trainer.fit(module, datamodule=data)
    assert sampler.sampler.epoch == 1


@pytest.mark.filterwarnings("ignore:From epoch")
@each(("ranks", "then"), [(2, 1), (1, 2), (4, 2)])
def test_a_training_takes_every_sample_once_on_another_number_of_ranks(
    ranks, then, tmp_path
) -> None:
    """Its ranks are trained one after the other; it is stopped within its second epoch."""
    lengths = drawn("sentences", 60)
    budget, file = int(lengths.max()), tmp_path / "saved.ckpt"

    def fit(ranks, rank, steps, resume=None):
        how = {"tokens": budget, "num_replicas": ranks, "rank": rank}
        data = FastDataModule.from_datasets(Sequences(lengths), num_workers=0)
        data.train_dataloader = lambda: data.make_loader(
            Sequences(lengths),
            stage="train",
            batch_sampler=BucketBatchSampler(lengths, **how),
            collate_fn=pad,
        )
        trainer = quiet_trainer(tmp_path, max_epochs=2, max_steps=steps)
        model = Learner(lambda batch: batch[:, 0].tolist())
        trainer.fit(model, data, ckpt_path=resume)
        return trainer, model.seen

    whole = len(BucketBatchSampler(lengths, tokens=budget, num_replicas=ranks, rank=0))
    for stop in (1, whole // 2):
        first = [fit(ranks, rank, whole + stop) for rank in range(ranks)]
        first[0][0].save_checkpoint(file)
        rest = [fit(then, rank, -1, file) for rank in range(then)]
        seen = [i for _, steps in first for batch in steps[whole:] for i in batch]
        seen += [i for _, steps in rest for batch in steps for i in batch]
        assert sorted(seen) == list(range(60)), stop


@pytest.mark.parametrize(
    ("how", "error", "match"),
    [
        ({"lengths": [3, -1]}, DatasetError, r"lengths\[1\] is -1"),
        ({"lengths": [0.5]}, DatasetError, "float64"),
        ({"lengths": [[1]]}, DatasetError, r"shape \(1, 1\)"),
        ({"lengths": [3, 9, 10]}, DatasetError, "Sample 1 has the length 9, above tokens=8, and"),
        ({"tokens": 0}, OptionsError, "tokens is 0"),
        ({"tokens": None}, OptionsError, "tokens=, batch_size="),
        ({"batch_size": True}, OptionsError, "batch_size is True"),
        ({"padding": 0.0}, OptionsError, "padding is 0.0"),
        ({"cost": "cubic"}, OptionsError, "cost is 'cubic'"),
        ({"together": -1}, OptionsError, "together is -1"),
        ({"num_replicas": 2, "rank": 2}, OptionsError, "rank is 2"),
        ({"num_replicas": 2, "rank": 0.5}, OptionsError, "rank is 0.5; give a whole number"),
        ({"rank": 0}, OptionsError, "rank is 0, and there is no num_replicas"),
        ({"padding": "0.1"}, OptionsError, "padding is '0.1'"),
        ({"cost": ["linear"]}, OptionsError, "cost is .*linear"),
        ({"seed": 0.5}, OptionsError, "seed is 0.5"),
        ({"drop_last": "no"}, OptionsError, "drop_last is 'no'"),
        ({"lengths": SequentialSampler(range(3))}, OptionsError, "batch sampler of a prediction"),
    ],
)
def test_what_cannot_be_is_refused(how, error, match) -> None:
    with pytest.raises(error, match=match):
        BucketBatchSampler(**{"lengths": [3, 4], "tokens": 8, **how})


@pytest.mark.parametrize("count", [3, 5])
def test_lengths_of_another_dataset_are_refused(count) -> None:
    sampler = BucketBatchSampler([2] * 4, tokens=8)
    with pytest.raises(DatasetError, match=f"4 lengths, and the dataset has {count} samples"):
        FastDataLoader(range(count), batch_sampler=sampler)


@each(
    ("count", "ranks", "said"),
    [
        (2, 4, r"left: 1, of 2 samples.* do not divide among 4 ranks: the last step has 1 .* no 3"),
        (29, 2, r"left: 29, of 29 samples.* among 2 ranks: the last step has 1 .* no 1 more"),
    ],
)
def test_samples_that_cannot_be_shared_evenly_are_refused(count, ranks, said) -> None:
    how = {"tokens": 8} if count == 2 else {"batch_size": 1}
    sampler = BucketBatchSampler([3] * count, **how, num_replicas=ranks, rank=0)
    with pytest.raises(OptionsError, match=said):
        len(sampler)
