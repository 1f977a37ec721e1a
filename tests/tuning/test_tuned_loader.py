"""A loader whose workers change while it is read: the batches stay, and moves follow the steps."""

from __future__ import annotations

import copy
import gc
import itertools
import multiprocessing
import pickle
import random
import sqlite3
import time

import numpy as np
import pytest
import torch
from torch.utils.data import Dataset, IterableDataset, TensorDataset

from lightning_fastdata import FastDataLoader, LoaderOptions
from lightning_fastdata.errors import OptionsError, WorkerError
from lightning_fastdata.tuning.tuner import Phase, Pressure, Tuner

# What is told of real times is wrong now and then where other programs take the CPUs meanwhile.
in_real_time = pytest.mark.flaky(reruns=2)


class Drawn(Dataset):
    """Samples that draw from all global generators."""

    def __init__(self, length=96):
        self.length = length

    def __len__(self):
        return self.length

    def __getitem__(self, index):
        drawn = torch.rand(2), torch.tensor([random.random(), np.random.rand()])
        return torch.cat([torch.full((3,), float(index)), *drawn])


class Waiting(Dataset):
    """Each sample waits, alone or for the others of all processes."""

    def __init__(self, length, wait_s, *, lock=None, later_s=None):
        self.length, self.wait_s, self.lock, self.later_s = length, wait_s, lock, later_s

    def __len__(self):
        return self.length

    def __getitem__(self, index):
        late = self.later_s is not None and index >= self.length // 2
        wait_s = self.later_s if late else self.wait_s
        if self.lock is None:
            time.sleep(wait_s)
        else:
            with self.lock:
                time.sleep(wait_s)
        return torch.tensor(index)


def tuner(**how):
    how = {"most_workers": 16, "cpus": 2.0, "pressure": Pressure, **how}
    return Tuner(**how)


def run(loader, epochs, step_s=0.002):
    seen = []
    for _ in range(epochs):
        for batch in loader:
            seen.append(batch)
            time.sleep(step_s)
    return seen


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


@in_real_time
def test_late_batches_get_more_workers_within_the_epoch():
    mine = tuner()
    loader = FastDataLoader(
        Waiting(8 * 200, 0.004), 8, executor="workers", num_workers=1, tune=mine
    )
    seen = run(loader, 1)
    loader.close()
    assert torch.cat(seen).tolist() == list(range(1600))
    first = mine.moves[0]
    assert first.before == 1
    assert 45 <= first.batch <= 60
    assert first.outcome == "kept"
    assert first.after >= 3
    assert first.step_seen_ms < 0.6 * first.step_before_ms
    assert loader.num_workers == mine.workers > 3


@in_real_time
def test_epochs_of_a_few_batches_add_up():
    mine = tuner()
    loader = FastDataLoader(
        Waiting(8 * 16, 0.006), 8,
        executor="workers", num_workers=1, persistent_workers=True, tune=mine,
    )  # fmt: skip
    run(loader, 14)
    loader.close()
    assert mine.moves
    assert mine.moves[0].outcome == "kept"
    assert loader.num_workers >= 3


@in_real_time
def test_batches_that_were_made_in_a_pause_are_no_reason_for_fewer_workers():
    mine = tuner()
    # Four workers make a batch in 8 ms, which is what a step takes: fewer would be too few.
    loader = FastDataLoader(
        Waiting(8 * 240, 0.004), 8, executor="workers", num_workers=4, tune=mine
    )
    for number, _ in enumerate(loader):
        time.sleep(0.4 if number % 30 == 29 else 0.008)
    loader.close()
    assert loader.num_workers >= 4
    assert not [move for move in mine.moves if move.after < 4 and move.outcome == "kept"]


@in_real_time
def test_samples_that_come_to_wait_later_are_noticed_within_the_epoch():
    mine = tuner()
    dataset = Waiting(8 * 700, 0.0002, later_s=0.006)
    loader = FastDataLoader(dataset, 8, executor="workers", num_workers=2, tune=mine)
    run(loader, 1, step_s=0.006)
    loader.close()
    later = [move for move in mine.moves if move.batch > 350]
    assert later
    assert later[0].after > later[0].before
    assert later[0].batch < 350 + 120
    assert loader.num_workers >= 6


@in_real_time
def test_workers_that_wait_for_each_other_are_taken_back():
    mine = tuner(most_workers=4)
    lock = multiprocessing.get_context("fork").Lock()
    loader = FastDataLoader(
        Waiting(4 * 400, 0.003, lock=lock), 4,
        executor="workers", num_workers=1, tune=mine, multiprocessing_context="fork",
    )  # fmt: skip
    run(loader, 1)
    loader.close()
    assert {move.outcome for move in mine.moves} == {"taken back"}
    tried = [move.after for move in mine.moves]
    # If steps became longer, fewer may do. Noise tells that so too; none is tried again.
    assert all(later < earlier for earlier, later in itertools.pairwise(tried))
    assert loader.num_workers == mine.workers == 1


class Large(Dataset):
    """Samples of 1 MiB that take nothing but to be copied."""

    block = torch.zeros(2**20, dtype=torch.uint8)

    def __len__(self):
        return 16 * 64

    def __getitem__(self, index):
        return self.block


@in_real_time
def test_workers_that_only_copy_are_not_taken_for_such_that_wait():
    mine = tuner()
    loader = FastDataLoader(Large(), 16, executor="workers", num_workers=2, tune=mine)
    for _ in range(4):
        for _batch in loader:
            pass
    loader.close()
    assert all(move.after <= 2 for move in mine.moves)


@in_real_time
def test_no_worker_is_forked_from_a_process_that_has_opened_what_it_must_not_share():
    told = []
    mine = tuner(tell=told.append)
    dataset = Waiting(8 * 80, 0.006)
    loader = FastDataLoader(dataset, 8, executor="workers", num_workers=1, tune=mine)
    seen = []
    for batch in loader:
        seen.append(batch)
        dataset.connection = sqlite3.connect(":memory:")
        time.sleep(0.004)
    loader.close()
    assert torch.cat(seen).tolist() == list(range(640))
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
        FastDataLoader(Drawn(), 4, tune=tuner(), executor="inline")
    twin = loader.with_workers(workers)
    assert twin.num_workers == workers
    assert len(list(twin)) == len(list(loader)) == 24
    twin.close()
    loader.close()


@in_real_time
def test_short_memory_halves_the_workers_at_once_and_for_good():
    mine = tuner(pressure=lambda: Pressure(memory=True))
    loader = FastDataLoader(
        Waiting(2 * 500, 0.015), 2, executor="workers", num_workers=8, tune=mine
    )
    run(loader, 1, step_s=0.004)
    loader.close()
    relieved = [move for move in mine.moves if move.why == "memory is short"]
    assert relieved
    assert all(move.after == move.before // 2 for move in relieved)
    assert {move.outcome for move in relieved[:-1]} <= {"kept"}  # whatever it costs
    assert mine.most_workers == relieved[-1].after
    assert loader.num_workers <= relieved[-1].after


class Refused(FastDataLoader):
    """It can have no more than two workers."""

    error: Exception

    def set_workers(self, workers):
        super().set_workers(workers)
        if workers > 2:
            raise self.error


@in_real_time
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
    mine = tuner(tell=told.append)
    loader = Refused(Waiting(8 * 80, 0.006), 8, executor="workers", num_workers=1, tune=mine)
    loader.error = error
    seen = run(loader, 1)
    loader.close()
    assert torch.cat(seen).tolist() == list(range(640))
    assert any("num_workers stays 1" in line and "no memory" in line for line in told)
    assert loader.num_workers == mine.most_workers == 1


def test_a_loader_that_takes_the_place_of_another_begins_as_that_one_ended():
    mine = tuner()
    mine.workers = 3
    loader = FastDataLoader(Drawn(), 4, executor="workers", num_workers=1, tune=mine)
    assert loader.num_workers == 3
    assert len(list(loader)) == 24
    loader.close()


def test_who_tunes_does_not_keep_a_loader_alive():
    loader = FastDataLoader(
        Drawn(), 4, executor="workers", num_workers=2, persistent_workers=True, tune=tuner()
    )
    next(iter(loader))
    processes = [child.process for child in loader._iterator.children.values()]
    del loader
    gc.collect()
    for process in processes:
        process.join(20)
    assert not any(process.is_alive() for process in processes)


def test_copies_are_not_tuned():
    loader = FastDataLoader(Drawn(), 4, executor="workers", num_workers=2, tune=tuner())
    for other in (copy.deepcopy(loader), pickle.loads(pickle.dumps(loader))):
        assert other.tune == "off"
        assert len(list(other)) == 24
        other.close()


class Stream(IterableDataset):
    def __iter__(self):
        yield from range(8)


@pytest.mark.parametrize(
    ("dataset", "how", "why"),
    [
        (Drawn(), {"tune": "off"}, "set by you"),
        (Drawn(), {"num_workers": 2}, "num_workers is set by you"),
        (Drawn(), {}, "what the training process has opened"),
        (Drawn(), {"num_workers": 0}, "num_workers is set by you"),
        (Stream(), {}, "a stream"),
        (TensorDataset(torch.arange(64.0).reshape(16, 4)), {}, "gather"),
    ],
)
def test_what_is_not_tuned_says_why(dataset, how, why):
    loader = FastDataLoader(dataset, 4, executor="auto", **how)
    assert loader.tune == "off"
    setting = next(each for each in loader.plan.choices if each.option == "tune")
    assert setting.value == "off"
    assert why in setting.why


def test_what_is_tuned_says_so():
    loader = FastDataLoader(Waiting(64, 0.004), 4, executor="auto")
    assert isinstance(loader.tune, Tuner)
    assert "tune" in loader.plan.explain()
    assert loader.tune.phase is Phase.MEASURING


@pytest.mark.parametrize("value", [True, "on", 3, None])
def test_a_wrong_value_is_refused(value):
    with pytest.raises(ValueError, match="tune"):
        LoaderOptions(tune=value)
    with pytest.raises(ValueError, match="tune"):
        FastDataLoader(Drawn(), 4, tune=value)
