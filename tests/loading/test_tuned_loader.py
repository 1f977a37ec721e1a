"""A loader whose workers change while it is read: the batches stay, and moves follow the steps."""

from __future__ import annotations

import copy
import functools
import gc
import itertools
import pickle
import random
import sqlite3

import numpy as np
import pytest
import torch
from loading.planned import Stream
from rig.machine import VirtualLock, sleep, work
from rig.virtual_crew import on_machine
from samples import Costly
from torch.utils.data import Dataset, TensorDataset

from lightning_fastdata import FastDataLoader
from lightning_fastdata.errors import OptionsError, WorkerError
from lightning_fastdata.loading.loader import Training
from lightning_fastdata.loading.tuner import Phase, Pressure, Tuner


class Drawn(Dataset):
    """Samples that draw from all global generators."""

    def __init__(self, length=96):
        self.length = length

    def __len__(self):
        return self.length

    def __getitem__(self, index):
        drawn = torch.rand(2), torch.tensor([random.random(), np.random.rand()])
        return torch.cat([torch.full((3,), float(index)), *drawn])


def waits(seconds):
    return lambda index: sleep(seconds)


def computes(seconds):
    return lambda index: work(seconds)


def tuner(**how):
    how = {"most_workers": 16, "cpus": 2.0, "pressure": Pressure, **how}
    return Tuner(**how)


def run(dataset, epochs=1, step_s=0.002, *, workers=1, tune=None, programs=0, batch=8, **how):
    """Train on a machine of two CPUs; return the loader, its tuner and what was read."""
    seen = []
    with on_machine() as machine:
        machine.programs(programs)
        mine = tuner() if tune is None else tune()
        loader = how.pop("kind", FastDataLoader)(
            dataset,
            batch,
            executor="workers",
            num_workers=workers,
            training=Training(tuner=mine),
            **how,
        )
        for _ in range(epochs):
            for each in loader:
                seen.append(each)
                step_s(len(seen)) if callable(step_s) else sleep(step_s)
        loader.close()
    assert torch.cat(seen).tolist() == list(range(len(dataset))) * epochs
    return loader, mine


def moves_of(mine):
    return [(move.batch, move.before, move.after, move.outcome) for move in mine.moves]


@pytest.mark.cases(2)
@pytest.mark.parametrize("seed", range(4))
def test_order_and_content_stay_however_the_number_of_workers_changes(seed):
    chance = random.Random(seed)
    kept = {"batch_size": 4, "shuffle": True, "seed": seed}
    torch.manual_seed(seed)
    kept["persistent_workers"] = bool(seed % 2)
    calm = FastDataLoader(Drawn(), executor="workers", num_workers=2, **kept)
    calm_batches = [batch for _ in range(3) for batch in calm]
    torch.manual_seed(seed)
    loader = FastDataLoader(Drawn(), executor="workers", num_workers=2, **kept)
    moved, numbers = [], set()
    for _ in range(3):
        for batch in loader:
            moved.append(batch)
            if chance.random() < 0.2:
                loader.set_workers(chance.choice((1, 2, 3, 5)))
                numbers.add(loader.num_workers)
    loader.close()
    assert len(numbers) > 2
    assert len(moved) == len(calm_batches) == 72
    for one, other in zip(moved, calm_batches, strict=True):
        assert torch.equal(one, other)


def test_a_position_is_that_of_the_batches_whoever_reads_them():
    order = torch.randperm(96).tolist()
    kept = {"batch_size": 4, "sampler": order, "seed": 3}
    loader = FastDataLoader(Drawn(), executor="workers", num_workers=1, **kept)
    batches = iter(loader)
    for number in range(9):
        next(batches)
        loader.set_workers(1 + number % 3)
    state = loader.state_dict()
    rest = list(batches)
    loader.close()
    again = FastDataLoader(Drawn(), executor="inline", **kept)
    again.load_state_dict(state)
    got = list(again)
    assert len(got) == len(rest) == 15
    assert all(torch.equal(one, other) for one, other in zip(got, rest, strict=True))


SCENARIOS = {
    "samples that come to wait later": (
        lambda index: sleep(0.0002 if index < 2800 else 0.006), {"workers": 2}
    ),
    "latency": (waits(0.006), {"workers": 2}),
    "computing": (computes(0.003), {"workers": 1}),
    "fast enough": (waits(0.0002), {"workers": 2}),
    "other programs": (computes(0.0004), {"workers": 1, "programs": 4}),
}  # fmt: skip


def again(name):
    """Train as a scenario has it; return the loader and its tuner."""
    cost, how = SCENARIOS[name]
    return run(Costly(8 * 700, cost), step_s=0.006, **how)


scenario = functools.cache(again)
"""The first run of each, which several laws look at."""


@pytest.mark.cases(3)
@pytest.mark.parametrize("name", SCENARIOS)
def test_a_training_moves_the_same_way_twice(name):
    assert scenario(name)[1].moves == again(name)[1].moves


def test_late_batches_get_more_workers_within_the_epoch():
    loader, mine = run(Costly(8 * 200, waits(0.004)))
    first = mine.moves[0]
    assert first.before == 1
    assert 45 <= first.batch <= 60
    assert first.outcome == "kept"
    assert first.after >= 3
    assert first.step_seen_ms < 0.6 * first.step_before_ms
    assert loader.num_workers == mine.workers > 3


def test_latency_gets_workers_until_no_batch_is_late():
    loader, mine = scenario("latency")
    assert {move.outcome for move in mine.moves} == {"kept"}
    assert loader.num_workers >= 8  # 48 ms of reading in steps of 6
    assert mine.moves[-1].step_seen_ms < 6.5


def test_computing_gets_no_more_workers_than_there_are_cpus():
    loader, mine = scenario("computing")
    assert moves_of(mine)[0][1:3] == (1, 2)
    assert loader.num_workers == 2
    assert mine.moves[0].step_seen_ms == pytest.approx(12.0, rel=0.1)  # of 24


def test_who_is_fast_enough_is_left_alone():
    loader, mine = run(Costly(8 * 700, waits(0.0002)), step_s=0.006, workers=1)
    assert moves_of(mine) == []
    assert loader.num_workers == 1


def test_workers_whose_cpus_other_programs_take_do_not_become_many():
    loader, mine = scenario("other programs")
    *grown, last = mine.moves
    assert {move.outcome for move in grown} == {"kept"}
    # Each worker takes a share of the CPUs, until another one brings nothing more.
    assert (last.outcome, last.after) == ("taken back", loader.num_workers + 1)
    assert loader.num_workers == 3


def test_epochs_of_a_few_batches_add_up():
    loader, mine = run(Costly(8 * 16, waits(0.006)), epochs=14, persistent_workers=True)
    assert mine.moves[0].outcome == "kept"
    assert loader.num_workers >= 3


def test_batches_that_were_made_in_a_pause_are_no_reason_for_fewer_workers():
    # Four workers make a batch in 8 ms, which is what a step takes: fewer would be too few.
    def step(number):
        sleep(0.4 if number % 12 == 0 else 0.008)

    loader, mine = run(Costly(8 * 480, waits(0.004)), step_s=step, workers=4)
    assert loader.num_workers >= 4
    assert not [move for move in mine.moves if move.after < 4 and move.outcome == "kept"]


def test_calm_batches_after_a_burst_of_slow_ones_take_no_workers_away():
    def cost(index):
        sleep(0.02 if index // 256 % 8 == 0 else 0.0005)

    loader, mine = run(Costly(8 * 600, cost), step_s=0.006, workers=14)
    assert moves_of(mine) == []  # two would be enough for seven batches of eight
    assert loader.num_workers == 14


def test_workers_that_wait_for_each_other_are_taken_back():
    lock = VirtualLock()

    def cost(index):
        with lock:
            sleep(0.003)

    loader, mine = run(Costly(4 * 400, cost), batch=4, tune=lambda: tuner(most_workers=4))
    assert {move.outcome for move in mine.moves} == {"taken back"}
    tried = [move.after for move in mine.moves]
    # If steps became longer, fewer may do. None is tried again.
    assert all(later < earlier for earlier, later in itertools.pairwise(tried))
    assert loader.num_workers == mine.workers == 1


def test_workers_that_only_copy_are_not_taken_for_such_that_wait():
    _, mine = run(Costly(16 * 256, computes(0.0003)), step_s=0.0, workers=2, batch=16)
    assert all(move.after <= 2 for move in mine.moves)


def test_no_worker_is_forked_from_a_process_that_has_opened_what_it_must_not_share():
    told = []
    dataset = Costly(8 * 80, waits(0.006))

    def step(number):
        dataset.connection = sqlite3.connect(":memory:")
        sleep(0.004)

    loader, _ = run(dataset, step_s=step, tune=lambda: tuner(tell=told.append))
    assert loader.num_workers == 1
    assert any("stays 1" in line and "an open sqlite3.Connection" in line for line in told)


@pytest.mark.parametrize(
    ("how", "workers"),
    [
        ({"executor": "workers", "num_workers": 2}, 0),
        ({"executor": "workers", "num_workers": 0}, 2),
        ({"executor": "inline"}, 2),
        ({"executor": "torch", "num_workers": 2}, 3),
    ],
)
def test_workers_that_do_not_come_and_go_are_refused(how, workers):
    loader = FastDataLoader(Drawn(), 4, **how)
    with pytest.raises(OptionsError, match="Make a new loader"):
        loader.set_workers(workers)
    with pytest.raises(OptionsError, match="Make a new loader"):
        FastDataLoader(Drawn(), 4, training=Training(tuner=tuner()), executor="inline")
    loader.close()


def test_short_memory_halves_the_workers_at_once_and_for_good():
    loader, mine = run(
        Costly(2 * 500, waits(0.015)),
        step_s=0.004,
        workers=8,
        batch=2,
        tune=lambda: tuner(pressure=lambda: Pressure(memory=True)),
    )
    relieved = [move for move in mine.moves if move.why == "memory is short"]
    assert relieved
    assert all(move.after == move.before // 2 for move in relieved)
    assert {move.outcome for move in relieved[:-1]} <= {"kept"}  # whatever it costs
    assert mine.most_workers == relieved[-1].after
    assert loader.num_workers <= relieved[-1].after


@pytest.mark.parametrize(
    "error",
    [
        WorkerError("Side process 3 cannot be started: no memory."),
        OSError("no memory"),
        TypeError("cannot pickle: no memory of how"),
    ],
)
def test_workers_that_cannot_be_had_leave_the_training_as_it_was(error):
    told = []

    class Refused(FastDataLoader):
        """It can have no more than two workers."""

        def set_workers(self, workers):
            super().set_workers(workers)
            if workers > 2:
                raise error

    loader, mine = run(
        Costly(8 * 80, waits(0.006)), kind=Refused, tune=lambda: tuner(tell=told.append)
    )
    assert all("num_workers stays 1" in line and "no memory" in line for line in told)
    assert len(told) == 1
    assert loader.num_workers == mine.most_workers == 1
    assert not mine.moves
    assert mine.phase is Phase.WATCHING


@pytest.mark.parametrize("refused", [2, 3])  # the first one is before the training
def test_the_moves_that_are_told_are_those_that_were_made(refused):
    """Also where the system refuses one, or the way back from one."""
    lock, asked, told, made = VirtualLock(), itertools.count(1), [], []

    class Fails(FastDataLoader):
        def set_workers(self, workers):
            if next(asked) == refused:
                raise OSError("no memory")
            if workers != self.num_workers:
                made.append((self.num_workers, workers))
            super().set_workers(workers)

    def cost(index):
        with lock:
            sleep(0.003)

    loader, mine = run(
        Costly(4 * 400, cost),
        batch=4,
        kind=Fails,
        tune=lambda: tuner(most_workers=4, tell=told.append),
    )
    moves = []
    for move in mine.moves:
        moves.append((move.before, move.after))
        if move.outcome == "taken back":
            moves.append((move.after, move.before))
    assert moves == made
    assert len(told) == 1 + 2 * len(mine.moves)
    assert sum("cannot be had: no memory" in line for line in told) == 1
    assert loader.num_workers == mine.workers == (made[-1][1] if made else 1)


def test_a_loader_that_takes_the_place_of_another_begins_as_that_one_ended():
    mine = tuner()
    mine.workers = 3
    loader = FastDataLoader(
        Drawn(), 4, executor="workers", num_workers=1, training=Training(tuner=mine)
    )
    assert loader.num_workers == 3
    assert len(list(loader)) == 24
    loader.close()


def test_who_tunes_does_not_keep_a_loader_alive():
    loader = FastDataLoader(
        Drawn(),
        4,
        executor="workers",
        num_workers=2,
        persistent_workers=True,
        training=Training(tuner=tuner()),
    )
    next(iter(loader))
    processes = [child.process for child in loader._iterator.children.values()]
    del loader
    gc.collect()
    for process in processes:
        process.join(20)
    assert not any(process.is_alive() for process in processes)


def test_copies_are_not_tuned():
    loader = FastDataLoader(
        Drawn(), 4, executor="workers", num_workers=2, training=Training(tuner=tuner())
    )
    for other in (copy.deepcopy(loader), pickle.loads(pickle.dumps(loader))):
        assert other.training.tuner is None
        assert len(list(other)) == 24
        other.close()


@pytest.mark.parametrize(
    ("dataset", "how", "why"),
    [
        (Drawn(), {"num_workers": 2}, "set by you"),
        (Drawn(), {"num_workers": "auto"}, "what the training process has opened"),
        (Drawn(), {"num_workers": 0}, "set by you"),
        (Stream(), {"num_workers": "auto"}, "a stream"),
        (
            TensorDataset(torch.arange(64.0).reshape(16, 4)),
            {"num_workers": "auto"},
            "gather",
        ),
    ],
)
def test_what_is_not_tuned_says_why(dataset, how, why):
    loader = FastDataLoader(dataset, 4, executor="auto", **how)
    assert loader.training.tuner is None
    (row,) = [one for one in loader.plan.explain().splitlines() if one.startswith("num_workers")]
    assert why in row
    assert "not tuned" in row or " you " in row


def test_what_is_tuned_says_so():
    with on_machine():
        loader = FastDataLoader(Costly(64, waits(0.004)), 4, num_workers="auto")
    assert isinstance(loader.training.tuner, Tuner)
    assert "; tuned as the steps show" in loader.plan.explain()
    assert loader.training.tuner.phase is Phase.MEASURING
