"""Samples that the training process reads while workers stand by: the same batches, by whomever."""

from __future__ import annotations

import itertools
import math
import os
import random
import statistics
import threading
import warnings
from collections import Counter, deque

import numpy as np
import pytest
import torch
from front_door.test_changing_world import (
    BATCH,
    KINDS,
    LONG,
    SEEN_AT_ONCE,
    STREAMS,
    _folders,
    _judge,
    by_torch_with_any_number,
    trained,
)
from misses import Misses, each
from torch.utils.data import DataLoader, Dataset
from trainers import Learner, quiet_trainer

from lightning_fastdata import FastDataLoader
from lightning_fastdata.errors import FastDataWarning
from lightning_fastdata.executors import standby
from lightning_fastdata.executors.standby import Ways
from lightning_fastdata.loading import source
from lightning_fastdata.loading.loader import Training
from lightning_fastdata.tree import leaves

LENGTH = 60
LEVEL = {"now": 0}
LOSSES: list[float] = []
CHANGES = ("step", "step 3", "step 6", "thread", "epoch end", "validation")


class Cheap(Dataset):
    """Numbers that a function makes of an index."""

    def __init__(self, make=lambda data, index: index, length=LENGTH):
        self.make, self.length, self.added, self.reads = make, length, 0, 0

    def __len__(self):
        return self.length

    def __getitem__(self, index):
        return torch.tensor(self.make(self, index) + self.added)


def standing_by(dataset, **given):
    how = {
        "batch_size": 2,
        "num_workers": 1,
        "executor": "workers",
        "persistent_workers": "unchanged",
    }
    return FastDataLoader(
        dataset, **{**how, "training": Training(chosen=True, standby=True), **given}
    )


def shuffled(data=None, **given):
    data = Cheap(**given) if data is None else data
    return standing_by(data, shuffle=True, seed=1, generator=torch.Generator().manual_seed(1))


def wait_for_workers(loader):
    """They are kept from epoch to epoch, and a trial begins once they have started."""
    for child in loader._inner._iterator._pool.children.values():
        while not child.began:
            threading.Event().wait(0.01)


def readers_of(loader, step=lambda _, batch: batch.tolist()):
    """What a step says of each batch of an epoch, and how many of them each process has read."""
    records = deque()
    loader.record_stamps(records)
    batches = [step(number, batch) for number, batch in enumerate(loader)]
    loader.record_stamps(None)
    counts = Counter()
    for stamps in records:
        counts.update({task.process for task in stamps.tasks} or {-1})
    return batches, counts


@pytest.mark.parametrize("who", CHANGES)
def test_what_a_program_changes_is_read_as_torchs_workers_read_it(who, alone, tmp_path):
    _folders.name = str(tmp_path / "torch")
    kinds = [kind for kind in KINDS if kind not in (*SEEN_AT_ONCE, *STREAMS)]
    with Misses() as misses:
        for number, kind in enumerate(kinds):
            # In a short run each kind is changed by one of them.
            if LONG or number % len(CHANGES) == CHANGES.index(who):
                with misses.case(kind.__name__):
                    folder = tmp_path / str(number)
                    folder.mkdir()
                    seen = trained(
                        who, kind, folder, lambda given: standing_by(**given, batch_size=BATCH)
                    )
                    _judge(seen, by_torch_with_any_number(who, kind))
                    assert seen.warned is None


@pytest.fixture(autouse=True)
def compared_however_long_that_takes(monkeypatch):
    monkeypatch.setattr(standby, "_WITHIN_S", math.inf)
    monkeypatch.setattr(standby, "_CHEAP_S", math.inf)


@pytest.fixture
def alone(monkeypatch):
    """Beside other threads, as those of a test runner, it compares once more, behind reading."""
    monkeypatch.setattr(threading, "active_count", lambda: 1)


@pytest.fixture
def untried(monkeypatch):
    monkeypatch.setattr(standby, "_TIMED_S", math.inf)


@pytest.fixture
def tried(monkeypatch):
    monkeypatch.setattr(standby, "_TIMED_S", 0.0)


def test_nothing_changes_so_that_the_training_process_reads(untried):
    loader = standing_by(Cheap(), shuffle=True)
    for _ in range(3):
        batches, readers = readers_of(loader)
        assert sorted(itertools.chain(*batches)) == list(range(LENGTH))
        assert readers == {-1: LENGTH // 2}


@each("change", [lambda: LEVEL.update(now=5), lambda: LOSSES.append(1.0)])
def test_behind_a_change_of_a_global_the_worker_reads_what_was_there(change, untried, alone):
    LEVEL["now"] = 0
    loader = standing_by(Cheap(lambda _, index: index + LEVEL["now"]))

    def step(number, batch):
        return number or change(), batch.tolist()

    batches, readers = readers_of(loader, step)
    assert [index for _, batch in batches for index in batch] == list(range(LENGTH))
    assert set(readers) == {-1, 0}


DRAWS = {
    "random": lambda _, index: random.random() + index,
    "numpy": lambda _, index: float(np.random.rand()) + index,
    "torch": lambda _, index: float(torch.rand(())) + index,
    "now and then": lambda _, index: random.random() if index % 7 == 3 else 0.0,
    "none": lambda _, index: float(index),
}


@pytest.mark.parametrize("name", DRAWS)
def test_draws_are_those_of_the_sample_whoever_reads_it(name):
    dataset = Cheap(DRAWS[name])
    order = {"shuffle": True, "generator": torch.Generator().manual_seed(1)}
    wanted = FastDataLoader(dataset, 2, num_workers=2, executor="workers", seed=1, **order)
    loader = shuffled(dataset)
    before = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()
    for _ in range(2):
        found = []
        for number, batch in enumerate(loader):
            found.append(batch.tolist())
            LOSSES.append(0.0) if number == 11 else None
        assert found == [batch.tolist() for batch in wanted]
    after = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()
    assert before == after


def fails_at(bad):
    def make(_, index):
        if index == bad:
            raise ValueError(f"no sample {index}")
        return index

    return make


@pytest.mark.parametrize("bad", [0, 1, 9, 33])
def test_an_error_is_raised_when_its_batch_is_due(bad):
    batches = iter(standing_by(Cheap(fails_at(bad))))
    for number in range(bad // 2):
        assert next(batches).tolist() == [2 * number, 2 * number + 1]
    with pytest.raises(ValueError, match=f"no sample {bad}"):
        next(batches)


@pytest.mark.parametrize("policy", ["replace", "skip"])
def test_bad_samples_are_dealt_with_as_by_workers(policy):
    data = Cheap(fails_at(9))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        expected = FastDataLoader(data, 2, num_workers=1, executor="workers", on_bad_sample=policy)
        wanted = [batch.tolist() for batch in expected]
        found = [batch.tolist() for batch in standing_by(data, on_bad_sample=policy)]
    assert found == wanted


@pytest.mark.cases(5)
@pytest.mark.parametrize("stop", [1, 2, 7, 20, 29])
@pytest.mark.parametrize("aside", [False, True])
def test_a_run_that_goes_on_gets_the_batches_that_are_left(stop, aside, untried):
    wanted = [batch.tolist() for batch in shuffled()]
    loader = shuffled()
    iterator = iter(loader)
    found = []
    for number in range(stop):
        found.append(next(iterator).tolist())
        if aside and number == 0:
            LOSSES.append(0.0)
    other = shuffled()
    other.load_state_dict(loader.state_dict())
    assert found + [batch.tolist() for batch in other] == wanted


def count_reads(data, index):
    data.reads += 1
    return index


def count_one_read(self, index):
    return count_reads(self, index) if index == LENGTH // 2 else index


@pytest.mark.parametrize("reads", [count_reads, count_one_read])
def test_what_reading_changes_is_read_aside_after_a_warning(reads, untried, alone, monkeypatch):
    monkeypatch.setattr(standby, "_MOST_S", math.inf)
    loader = standing_by(Cheap(reads))
    with pytest.warns(FastDataWarning, match="has changed while a batch was read"):
        assert readers_of(loader)[0] == [[2 * n, 2 * n + 1] for n in range(LENGTH // 2)]
    assert readers_of(loader)[1] == {0: LENGTH // 2}


class Collates(Learner):
    """Makes its batches itself, and so holds the Trainer that counts them."""

    def collate(self, samples):
        return torch.stack(samples)


def test_what_holds_its_trainer_is_read_aside_without_a_warning(untried, alone):
    model, records = Collates(), deque()
    loader = standing_by(Cheap(), collate_fn=model.collate)
    loader.record_stamps(records)
    quiet_trainer(max_epochs=2).fit(model, loader)
    assert torch.cat(model.seen).tolist() == 2 * list(range(LENGTH))
    assert {task.process for stamps in records for task in stamps.tasks} == {0}


class Held(Cheap):
    """Samples are memory of the dataset."""

    def __init__(self):
        super().__init__()
        self.rows = torch.zeros(LENGTH, 3)

    def __getitem__(self, index):
        return self.rows[index]


@each(
    "given",
    [
        {"collate_fn": list},
        {"collate_fn": lambda samples: {"a": (samples, 1)}},
        {"batch_size": None},
    ],
)
def test_what_the_training_does_to_a_batch_changes_no_other(given, untried, alone):
    data = Held()
    loader = standing_by(data, **given)

    def step(_, batch):
        for row in filter(torch.is_tensor, leaves(batch)):
            assert row.tolist() == [0, 0, 0]
            row.add_(1)

    for _ in range(2):
        assert set(readers_of(loader, step)[1]) == {-1}
    assert not data.rows.any()


@each("nothing", [None, False, 0, "", (), [], {}])
@each("given", [{"batch_size": None}, {"batch_size": 1, "collate_fn": lambda samples: samples[0]}])
def test_a_batch_that_is_none_or_empty_is_a_batch(nothing, given, untried):
    samples = [0, 1, nothing, 3, nothing]
    found, readers = readers_of(standing_by(samples, **given), lambda _, batch: batch)
    assert found == list(DataLoader(samples, **given))
    assert readers == {-1: 5}


def test_what_workers_could_not_hand_over_is_an_error_here_too(untried):
    with pytest.raises(TypeError, match="pickle"):
        next(iter(standing_by(Cheap(), collate_fn=iter_of)))


def iter_of(samples):
    return (sample for sample in samples)


@each(
    "given",
    [
        {"worker_init_fn": lambda _: None},
        {"timeout": 60},
        {"in_order": False},
        {"sampler": [*range(LENGTH)]},
    ],
)
def test_what_asks_for_workers_gets_them(given):
    assert set(readers_of(standing_by(Cheap(), **given))[1]) == {0}


def ways_of(here_s, batches=1):
    ways = Ways()
    for seconds in here_s:
        ways.note(seconds, batches)
    return ways


@each(
    ("here_s", "aside_s", "aside"),
    [
        ([0.1] * 9, [0.05] * 5, True),
        ([0.1] * 9, [0.1] * 5, False),
        ([0.1] * 9, [0.05] * 4, None),
        ([0.1, 9.0, 0.1, 0.1, 0.1], [0.11] * 5, False),  # a validation between two batches
        ([0.1] * 5, [0.05, 9.0, 0.05, 0.05, 0.05], True),
    ],
)
def test_the_quicker_way_is_chosen(here_s, aside_s, aside):
    ways = ways_of(here_s)
    ways.decide(aside_s)
    ways.decide(aside_s)
    assert ways.aside is aside


def test_side_processes_that_were_slow_as_they_had_just_started_are_tried_once_more():
    ways = ways_of([0.1] * 9)
    ways.decide([0.12] * 5)
    assert ways.aside is None
    assert ways.tries
    for _ in range(2):
        assert ways.aside is None
        ways.decide([0.05] * 5)
    assert ways.aside is True


def test_one_lucky_trial_of_side_processes_chooses_nothing():
    ways = ways_of([0.1] * 9)
    ways.decide([0.05] * 5)
    assert ways.aside is None
    for _ in range(2):
        assert ways.tries
        ways.decide([0.3] * 20)
    assert ways.aside is False


@pytest.mark.parametrize("quicker", ["always", "at first"])
def test_side_processes_that_were_quicker_are_timed_once_more_in_the_same_epoch(
    quicker, untried, monkeypatch
):
    monkeypatch.setattr(source, "_LEAST_BUDGET_S", 1000.0)  # the workers of the first epoch stay
    loader = standing_by(Cheap(length=1000), shuffle=True)
    tries, decide = [], Ways.decide

    def noted(ways, aside_s):
        tries.append((epoch, len(aside_s)))
        here_s = statistics.median(ways.here_s)
        lucky = quicker == "always" or len(tries) == 1
        decide(ways, [(0.5 if lucky else 2.0) * here_s] * len(aside_s))

    monkeypatch.setattr(Ways, "decide", noted)
    for epoch in range(4):
        batches, read = readers_of(loader)
        assert sorted(itertools.chain(*batches)) == list(range(1000))
        wait_for_workers(loader)
        if epoch == 0:  # they are there by now
            monkeypatch.setattr(standby, "_TIMED_S", 0.0)
    expected = [(1, standby._TIMED), (1, standby._SURE), (2, standby._TIMED)]
    expected = expected[:2] if quicker == "always" else expected
    assert [when for when, _ in tries] == [when for when, _ in expected]
    assert all(timed >= least for (_, timed), (_, least) in zip(tries, expected, strict=True))
    assert set(read) == ({0} if quicker == "always" else {-1})


@pytest.mark.parametrize("length", [8, 200, 1000])
def test_a_trial_loses_and_doubles_nothing(length, tried):
    loader = standing_by(Cheap(length=length), shuffle=True)
    readers = Counter()
    for _ in range(4):
        batches, read = readers_of(loader)
        assert sorted(itertools.chain(*batches)) == list(range(length))
        readers += read
        wait_for_workers(loader)
    assert set(readers) >= ({-1} if length == 8 else {-1, 0})


@pytest.mark.parametrize("policy", ["raise", "skip"])
def test_a_run_that_goes_on_behind_a_trial_gets_the_batches_that_are_left(policy, tried):
    data = Cheap(length=600)
    loader = standing_by(data, on_bad_sample=policy)
    for _ in range(3):
        found = []
        for number, batch in enumerate(loader):
            found += batch.tolist()
            if number % (60 if LONG else 180) == 5:
                other = standing_by(data, on_bad_sample=policy)
                other.load_state_dict(loader.state_dict())
                assert found + [i for batch in other for i in batch.tolist()] == [*range(600)]


def test_what_is_changed_while_workers_are_tried_is_read_as_it_was(tried, alone, monkeypatch):
    monkeypatch.setattr(standby, "_WORTH_IT", 0.0)  # the training process is to go on behind it
    data = Cheap(length=1000)
    loader = standing_by(data)
    for _ in range(2):  # so that the next epoch begins with the trial
        assert readers_of(loader)
        loader._inner.ways.aside = None
        wait_for_workers(loader)
    records = deque()
    loader.record_stamps(records)
    found = []
    for number, batch in enumerate(loader):
        found += batch.tolist()
        if number == 3:
            data.added = 10_000
    assert found == list(range(1000))
    assert {task.process for task in records[0].tasks} == {0}


def count_some(data, index):
    data.reads += index >= LENGTH // 2
    return data.reads


def test_a_worker_that_has_changed_its_copy_reads_no_other_epoch(untried):
    loader = standing_by(Cheap(count_some))
    for _ in range(2):
        found = []
        for number, batch in enumerate(loader):
            found += batch.tolist()
            if number == 0:
                LOSSES.append(0.0)
            if number == LENGTH // 2 - 1:
                LOSSES.pop()
        assert found == [0] * (LENGTH // 2) + list(range(1, LENGTH // 2 + 1))


def changed_by_a_thread(data, index):
    if index == LENGTH // 2 and os.getpid() == TRAINING:
        thread = threading.Thread(target=setattr, args=(data, "added", 1000))
        thread.start()
        thread.join()
    return index


TRAINING = os.getpid()


def test_what_another_thread_changes_while_it_is_read_is_read_as_workers_have_it(untried):
    stop = threading.Event()
    other = threading.Thread(target=stop.wait)
    other.start()
    try:
        batches, readers = readers_of(standing_by(Cheap(changed_by_a_thread)))
    finally:
        stop.set()
        other.join()
    assert batches == [[2 * n, 2 * n + 1] for n in range(LENGTH // 2)]
    assert set(readers) == {-1, 0}
