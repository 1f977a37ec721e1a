"""A dataset is tried in a process that is thrown away, and what it does there is told."""

from __future__ import annotations

import gc
import itertools
import multiprocessing
import os
import random
import signal
import socket
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from loading.planned import Planted, machine, memory
from misses import each
from open_files import open_files
from thoroughness import LONG
from torch.utils.data import (
    BatchSampler,
    ChainDataset,
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    Subset,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
    get_worker_info,
)
from torch.utils.data._utils import worker as torch_worker
from virtual_time import VirtualClock, virtual_time

from lightning_fastdata import FastDataLoader, FastDataModule, LoaderOptions
from lightning_fastdata.errors import DatasetError
from lightning_fastdata.host import clock
from lightning_fastdata.loading.facts import (
    DatasetFacts,
    Questions,
    StreamSplit,
    inspect_dataset,
    measure_samples,
    probe_indices,
    read_as_worker,
    try_apart,
)
from lightning_fastdata.loading.plan_for import LoaderSpec, Planner, plan_for, waits

EVERYTHING = Questions(sample=True, further=3, cost=True)


def from_loaders(data, **how):
    return FastDataModule.from_loaders(DataLoader(data, **how))


def inspect(dataset, questions=EVERYTHING, *, num_workers="auto", started="auto", **about):
    spec = LoaderSpec(
        dataset=dataset,
        name="Photos.train_dataset()",
        options=LoaderOptions(num_workers=num_workers, multiprocessing_context=started),
        **{"batch_size": 1, **about},
    )
    return inspect_dataset(spec, questions)


def send(value, tell):
    tell("value", value)


def send_then(act, tell):
    tell("before", 1)
    act()
    tell("after", 2)


def killed():
    os.kill(os.getpid(), signal.SIGKILL)


def leave():
    sys.exit(3)


def fail():
    raise OSError("disk on fire")


WAITS = multiprocessing.get_context("fork").Value("b", 0)


def wait_for_ever():
    WAITS.value = 1
    while True:
        signal.pause()


class StandsUntilItWaits(clock.Clock):
    """A clock that stands until the other process waits, and was looked at three times since."""

    looks = 0

    def monotonic_ns(self):
        self.looks += WAITS.value
        return 10**12 * (self.looks > 3)


# The process


@pytest.mark.cases(2)
@pytest.mark.parametrize(
    ("act", "kind", "words"),
    [
        (killed, "died", "SIGKILL"),
        (fail, "raised", "OSError: disk on fire"),
        (leave, "raised", "SystemExit"),
        (wait_for_ever, "late", "took more than 20 s"),
    ],
)
def test_what_was_found_before_a_failure_is_kept(act, kind, words):
    WAITS.value = 0
    with clock.installed(StandsUntilItWaits() if kind == "late" else clock.Clock()):
        found = try_apart(send_then, act, start_method="fork", deadline_s=20)
    assert found.values == {"before": 1}
    assert found.failure is not None
    assert found.failure.kind == kind
    assert words in found.failure.what
    if kind == "raised":
        assert "send_then" in found.failure.error.__notes__[0]


def test_what_cannot_be_pickled_is_no_finding():
    assert try_apart(send, threading.Lock(), start_method="fork").values == {}
    failure = try_apart(send, threading.Lock(), start_method="spawn").failure
    assert failure is not None
    assert failure.kind == "not started"


def test_nothing_of_it_is_left():
    before = open_files()
    for act in (int, fail, killed):
        try_apart(send_then, act, start_method="fork")
    ended = multiprocessing.active_children()
    while ended:
        ended.pop().join()  # it was killed, which takes the kernel a while
    gc.collect()
    assert not open_files() - before


@pytest.mark.parametrize("left_bytes", [2**20, 2**50])
def test_the_memory_of_a_worker_is_found_out_where_it_may_be_short(monkeypatch, left_bytes):
    read = "lightning_fastdata.loading.facts.read_host_memory"
    monkeypatch.setattr(read, lambda: memory(left_bytes))
    found = inspect(Planted(), started="fork").worker_bytes
    assert (found is None) == (left_bytes == 2**50)
    assert found is None or found > 2**20


# What is found out


def test_the_dataset_and_the_random_state_stay_as_they_were():
    dataset = Planted(lambda: (torch.rand(1), np.random.rand()))
    torch.manual_seed(0)
    expected = torch.rand(1)
    torch.manual_seed(0)
    facts = inspect(Subset(dataset, [1, 2]))
    assert facts.sample[1] == 1
    assert len(facts.further) == 2
    assert facts.draws
    assert not dataset.read
    assert torch.equal(torch.rand(1), expected)


def test_an_empty_or_a_raising_dataset_is_an_error_that_names_it():
    with pytest.raises(DatasetError, match=r"Photos.train_dataset\(\).*OSError: disk on fire") as e:
        inspect(Planted(fail))
    assert "in fail" in e.value.__cause__.__notes__[0]
    with pytest.raises(DatasetError, match=r"Photos.train_dataset\(\) .*empty"):
        FastDataModule(1).make_loader(
            TensorDataset(torch.zeros(0, 2)), stage="train", name="Photos.train_dataset()"
        )


@pytest.mark.parametrize("dataset", [lambda: Planted(killed), lambda: WithClient(Forked())])
def test_a_failure_elsewhere_means_nothing_where_the_training_process_reads(dataset):
    facts = inspect(dataset(), num_workers=0)
    assert (facts.sample, facts.warnings, facts.cost) == (None, (), None)
    assert facts.split


def test_a_dataset_that_ends_its_process_is_decided_without():
    facts = inspect(Planted(killed), started="fork")
    assert facts.cost is None
    assert facts.split
    assert "SIGKILL" in facts.warnings[0]


def test_nothing_is_read_where_nothing_is_asked():
    assert inspect(Planted(fail), Questions()) == DatasetFacts()


class Keeping(Dataset):
    """Numbers that take time of a CPU when they are read first, and are kept if asked for."""

    def __init__(self, time, *, keeps=True, takes_s=0.005):
        self.time, self.keeps, self.takes_s = time, keeps, takes_s
        self.kept, self.reads = {}, 0

    def __len__(self):
        return 400

    def __getitem__(self, index):
        if index not in self.kept:
            self.time.work(self.takes_s)
            self.reads += 1
        if self.keeps:
            self.kept[index] = index * 2
        return index * 2


class Opening(Dataset):
    """Opens something at its first sample, which takes long; the others are dear enough."""

    def __init__(self, time):
        self.time, self.is_open = time, False

    def __len__(self):
        return 400

    def __getitem__(self, index):
        self.time.work(0.005 if self.is_open else 2.0)
        self.is_open = True
        return index


def test_what_the_first_sample_opens_is_not_taken_for_its_cost_or_for_samples_that_are_kept():
    with virtual_time() as time:
        facts = inspect(Opening(time), Questions(cost=True))
    assert facts.changes
    assert facts.cost.samples > 1
    assert facts.cost.wall_ms == pytest.approx(5)
    assert facts.cost_again is None


class OnFirstUse(Dataset):
    """Is set up by its first sample, as what truncates texts is; further ones change nothing."""

    is_set_up = False

    def __len__(self):
        return 400

    def __getitem__(self, index):
        self.is_set_up = True
        return index


@pytest.mark.parametrize("checked", [True, False])
def test_what_the_first_sample_alone_changes_is_seen_also_where_that_is_checked(checked):
    assert inspect(OnFirstUse(), Questions(sample=checked, cost=True)).changes


POOL = ThreadPoolExecutor(2)
"""Threads of this module, as libraries have them (those of polars, for example)."""


class InThreads(Dataset):
    """Reads in threads of the whole process, which the first sample starts."""

    def __init__(self, waits):
        self.waits = waits

    def __len__(self):
        return 400

    def __getitem__(self, index):
        read = POOL.submit(int, index)
        return read.result() if self.waits else index


def test_a_dataset_that_needs_threads_which_a_later_fork_lacks_changes_as_it_is_read(monkeypatch):
    """Where one process is forked from another; no other start method leaves threads behind."""
    asked = Questions(sample=True, cost=True)
    assert inspect(InThreads(waits=True), Questions(cost=True)).changes
    assert inspect(InThreads(waits=True), asked).changes
    monkeypatch.setattr("lightning_fastdata.loading.facts._IN_FORK_S", 600.0)  # it ends by itself
    assert not inspect(InThreads(waits=False), asked).changes
    assert not inspect(InThreads(waits=True), asked, started="spawn").changes


@pytest.mark.parametrize(("takes_ms", "samples"), [(0.05, 399), (0.5, 256), (8.0, 14)])
def test_no_more_samples_are_tried_than_tell_what_one_costs(takes_ms, samples):
    with virtual_time() as time:
        data = Keeping(time, keeps=False, takes_s=takes_ms / 1000)
        facts = inspect(data, Questions(cost=True), batch_size=4)
    assert facts.cost.samples == pytest.approx(samples, abs=4)
    assert facts.cost.wall_ms == pytest.approx(takes_ms)


def test_a_dataset_that_keeps_what_it_reads_is_read_where_it_stays_kept():
    with virtual_time() as time:
        counting, keeping = Keeping(time, keeps=False), Keeping(time)
        cheap = Keeping(time, takes_s=5e-5)  # where what is saved may be by chance
        facts = [inspect(each, Questions(cost=True)) for each in (counting, keeping, cheap)]
        loader = FastDataLoader(keeping, 8, num_workers="auto")
        epochs = [torch.cat(list(loader)).tolist() for _ in range(2)]
    assert [each.changes for each in facts] == [True, True, True]
    assert [each.cost_again is not None for each in facts] == [False, True, False]
    assert epochs == 2 * [list(range(0, 800, 2))]
    assert keeping.reads == len(keeping)


class Closures(Dataset):
    """Gives functions that cannot be pickled, and computes so long that workers would pay."""

    def __len__(self):
        return 64

    def __getitem__(self, index):
        clock.sleep(0.05)
        return lambda: index


@pytest.mark.parametrize("batch_size", [4, None])
def test_batches_that_no_process_can_send_are_read_in_the_training_process(batch_size):
    collate_fn = list if batch_size else lambda each: each
    how = {"batch_size": batch_size, "collate_fn": collate_fn}
    with virtual_time():
        here = inspect(Closures(), Questions(cost=True), **how).here
        given = inspect(Closures(), Questions(cost=True), num_workers=2, **how).here
        loader = FastDataLoader(Closures(), num_workers="auto", **how)
        read = [each() for batch in loader for each in (batch if batch_size else [batch])]
    assert here.startswith("no side process can send its batches (")
    assert read == list(range(64))
    assert given is None


def as_it_is(sample):
    return sample


class StreamOfClosures(IterableDataset):
    """The same in a row, shared out among workers."""

    def __iter__(self):
        info = get_worker_info()
        part, workers = (info.id, info.num_workers) if info else (0, 1)
        return map(Closures().__getitem__, range(part, 64, workers))


@pytest.mark.parametrize(("batch_size", "collate_fn"), [(4, list), (None, None), (None, as_it_is)])
def test_a_stream_that_no_process_can_send_is_read_in_the_training_process(batch_size, collate_fn):
    how = {"batch_size": batch_size, "collate_fn": collate_fn}
    with virtual_time():
        loader = FastDataLoader(StreamOfClosures(), num_workers="auto", **how)
        read = [each() for batch in loader for each in (batch if batch_size else [batch])]
    assert read == list(range(64))


class Counted(Dataset):
    """Draws, and counts in memory that processes share how often it is read."""

    def __init__(self):
        self.reads = torch.zeros(1).share_memory_()

    def __len__(self):
        return 10_000

    def __getitem__(self, index):
        self.reads += 1
        return random.random()


@pytest.mark.parametrize("collate_fn", [None, list])
def test_few_samples_are_read_where_their_cost_decides_nothing(collate_fn):
    data = Counted()
    facts = inspect(data, Questions(cost=True), num_workers=0, collate_fn=collate_fn)
    assert facts.draws
    assert 0 < data.reads <= 64


class Forked:
    """A client that can be used in the process that made it, and in one that unpickles it."""

    def __init__(self):
        self.pid = os.getpid()

    def __reduce__(self):
        return Forked, ()

    def read(self):
        if os.getpid() != self.pid:
            raise RuntimeError("this client is not fork-safe")


class WithClient(Planted):
    def __init__(self, client):
        super().__init__()
        self.client = client

    def __getitem__(self, i):
        self.client.read()
        return super().__getitem__(i)


def test_what_a_client_does_not_survive_is_read_here_or_an_error_that_says_what_to_do():
    assert "not fork-safe" in inspect(WithClient(Forked())).here
    with pytest.raises(DatasetError, match=r"not fork-safe.*first use.*forkserver"):
        inspect(WithClient(Forked()), num_workers=1)
    for started in ("forkserver", "spawn") if LONG else ("forkserver",):
        assert inspect(WithClient(Forked()), started=started).sample[1] == 0


def test_what_no_forked_process_can_read_is_no_bad_sample():
    options = LoaderOptions(on_bad_sample="skip")
    spec = LoaderSpec(dataset=WithClient(Forked()), name="d", options=options, batch_size=1)
    assert "not fork-safe" in inspect_dataset(spec, EVERYTHING).here


def starts_a_pool():
    with multiprocessing.get_context("fork").Pool(1) as pool:
        pool.apply(abs, (1,))


def starts_a_process():
    child = multiprocessing.get_context("fork").Process(target=abs, args=(1,))
    child.start()
    child.join()


def starts_one_and_says_it_otherwise():
    try:
        starts_a_process()
    except AssertionError as error:
        raise ValueError("no helper") from error


TRAINING = os.getpid()


def uses_cuda():
    if os.getpid() != TRAINING:
        raise RuntimeError("Cannot re-initialize CUDA in forked subprocess. Use 'spawn'.")


class Unpicklable(Planted):
    def __init__(self):
        super().__init__(lambda: None)


@each("questions", [EVERYTHING, Questions(cost=True)])
@each(
    "dataset",
    [
        lambda: Planted(starts_a_pool),
        lambda: Planted(starts_one_and_says_it_otherwise),
        lambda: Planted(uses_cuda),
    ],
)
def test_what_a_side_process_may_not_do_is_done_by_the_training_process(dataset, questions):
    facts = inspect(dataset(), questions)
    assert facts.here
    assert not facts.warnings
    spec = LoaderSpec(dataset=dataset(), name="rows", options=LoaderOptions(), batch_size=2)
    plan = plan_for(spec, facts)
    assert (plan.executor, plan.num_workers) == ("inline", 0)
    assert facts.here in plan.explain()
    assert inspect(dataset(), questions, num_workers=0).here is None
    if questions.sample:  # where the user has workers read, they would fail, too
        with pytest.raises(DatasetError):
            inspect(dataset(), questions, num_workers=2)


class Unknown(Planted):
    """Cannot be unpickled in another process, as what is of a class of a notebook."""

    def __init__(self):
        super().__init__(int)

    def __setstate__(self, state):
        raise AttributeError("there is no such class here")


@each("make", [Unpicklable, Unknown])
def test_a_dataset_that_cannot_be_sent_to_workers_is_read_here(make):
    facts = inspect(make(), started="spawn")
    assert "could not be started" in facts.here
    assert not facts.warnings


class Locked(IterableDataset):
    def __init__(self):
        self.lock = threading.Lock()

    def __iter__(self):
        return iter(range(4))


class UnknownStream(Locked):
    def __getstate__(self):
        return {"lock": None}

    __setstate__ = Unknown.__setstate__


@each("make", [Locked, UnknownStream])
def test_a_stream_that_cannot_be_sent_to_workers_is_read_here(make):
    split = inspect(make(), started="spawn").stream
    assert split.here
    assert "could not be started" in split.why


@each("make", [FastDataModule.from_datasets, from_loaders])
def test_a_dataset_that_starts_processes_trains_as_with_torch(make):
    loader = make(Planted(starts_a_process, 8), batch_size=2, shuffle=False).train_dataloader()
    theirs = list(DataLoader(Planted(starts_a_process, 8), batch_size=2))
    for ours, own in zip(loader, theirs, strict=True):
        assert [part.tolist() for part in ours] == [part.tolist() for part in own]


class Together(Dataset):
    """Gives the samples of a batch in one call, and no single ones."""

    def __len__(self):
        return 8

    def __getitems__(self, indices):
        return [torch.tensor(index) for index in indices]


@each("make", [FastDataModule.from_datasets, from_loaders])
def test_a_dataset_that_gives_whole_batches_alone_trains_as_with_torch(make):
    loader = make(Together(), batch_size=4, shuffle=False).train_dataloader()
    theirs = DataLoader(Together(), batch_size=4)
    assert [batch.tolist() for batch in loader] == [batch.tolist() for batch in theirs]
    assert len(inspect(Together()).further) == 3


def test_the_first_look_is_after_worker_init_fn():
    class Opened(Planted):
        def __getitem__(self, i):
            return self.opened + i

    def open_it(number):
        info = get_worker_info()
        assert (info.id, number) == (0, 0)
        info.dataset.opened = 40

    assert inspect(Opened(), Questions(sample=True), worker_init_fn=open_it).sample == 40
    assert get_worker_info() is None


def gives_one_and_fails():
    yield [1]
    fail()


def test_what_raises_before_a_sample_is_read_is_named():
    fails = {"worker_init_fn": lambda _: fail()}
    for about in ({"sampler": gives_one_and_fails()}, {"batch_sampler": gives_one_and_fails()}):
        # The training process asks the sampler, and has its error when it is due.
        told = inspect(Planted(), **about).warnings[0]
        assert "OSError: disk on fire, in its sampler, so" in told
        assert "__getitem__" not in told
    told = inspect(Planted(), Questions(cost=True), **fails).warnings[0]
    assert "OSError: disk on fire, in its worker_init_fn, so" in told
    assert "__getitem__" not in told
    with pytest.raises(DatasetError, match=r"disk on fire, in its worker_init_fn\."):
        inspect(Planted(), **fails)


class OfFile(Dataset):
    """Gives what a ``worker_init_fn`` has opened."""

    def __init__(self, file=None):
        self.file = file

    def __len__(self):
        return 6

    def __getitem__(self, index):
        return self.file[index]


def open_file(worker):
    get_worker_info().dataset.file = torch.arange(10, 16)


@each("file", [None, [0] * 6])
@each("num_workers", [None, "auto"])
def test_a_worker_init_fn_is_called_where_the_number_of_workers_is_left_open(file, num_workers):
    theirs = DataLoader(OfFile(file), 2, num_workers=1, worker_init_fn=open_file)
    module = FastDataModule.from_loaders(train=theirs, num_workers=num_workers)
    alone = FastDataLoader(OfFile(file), 2, num_workers="auto", worker_init_fn=open_file)
    for loader in (module.train_dataloader(), alone):
        assert torch.cat(list(loader)).tolist() == torch.cat(list(theirs)).tolist()


@each(
    ("dataset", "here"),
    [
        (lambda: Once("queue"), False),
        (lambda: WithClient(Forked()), False),
        (lambda: Planted(starts_a_pool), True),
    ],
)
def test_only_where_no_process_can_read_a_worker_init_fn_is_left_out_with_a_warning(dataset, here):
    facts = inspect(dataset(), Questions(cost=True), worker_init_fn=lambda _: None)
    assert (facts.here is not None) is here
    assert any("without its worker_init_fn" in each for each in facts.warnings) is here


class OfWorker(Planted):
    def __getitem__(self, i):
        info = get_worker_info()
        return i, info.id, info.num_workers


@each(("workers", "told"), [(3, 3), ("auto", 1)])
def test_a_dataset_that_asks_for_the_number_of_its_worker_is_read_as_by_one(workers, told):
    facts = inspect(OfWorker(), num_workers=workers)
    assert facts.sample == (0, 0, told)
    assert (facts.cost is None) is (workers == "auto")  # else the training process may read it
    assert (facts.warnings, facts.here, get_worker_info()) == ((), None, None)
    loader = FastDataModule.from_datasets(OfWorker(), num_workers=workers).train_dataloader()
    assert loader.num_workers > 0
    assert not loader.training.standby


# What is measured


def test_how_much_longer_others_made_it_take_is_told(monkeypatch, virtual):
    # Which other tests leave out.
    monkeypatch.setattr("lightning_fastdata.loading.facts._MOST_CROWDED", 20.0)

    def kept_from_a_cpu(seconds):
        virtual.work(0.01)
        virtual.queue(seconds)

    def crowded(seconds):
        return measure_samples(Planted(partial(kept_from_a_cpu, seconds))).crowded

    assert crowded(0.0) == 1.0
    assert crowded(0.03) == pytest.approx(4.0)
    assert crowded(9.0) == 21.0, "no more than that"


def test_a_sample_that_waits_does_and_ones_that_compute_do_not(virtual):
    assert waits(measure_samples(Planted(partial(virtual.sleep, 0.01))))
    assert not waits(measure_samples(Planted(partial(virtual.work, 0.01))))
    assert not waits(measure_samples(Planted()))


def test_no_sample_is_begun_after_the_budget(virtual):
    data = Planted(partial(virtual.sleep, 0.1), length=1000)
    found = measure_samples(data, batch_size=8, budget_s=0.45)
    # The first one is left out.
    assert len(data.read) == 5
    assert (found.samples, found.wall_ms) == (4, pytest.approx(100))
    slow = Planted(partial(virtual.sleep, 9), length=1000)
    once = measure_samples(slow, batch_size=8)
    assert len(slow.read) == 1
    assert (once.samples, once.wall_ms) == (1, pytest.approx(9000))


def test_connections_that_the_first_batch_opens_are_no_reason_for_more_workers(virtual):
    class Ahead(Planted):
        opened = False

        def read_ahead(self, indices):
            if len(indices) > 1:
                virtual.sleep(0.08 if self.opened else 0.2)
                self.opened = True

    data = Ahead(partial(virtual.work, 0.001), length=10_000)
    found = measure_samples(data, batch_size=64, budget_s=0.3)
    # A worker waits 80 ms for a batch while it decodes the one before for 64 ms.
    assert found.wall_ms == pytest.approx(80 / 64)
    assert len(data.read) < 4 * 64 + 1


def test_a_few_samples_that_take_long_count_for_as_long_as_they_take(virtual):
    count = iter(range(10_000))
    data = Planted(lambda: virtual.sleep(1 if next(count) % 50 == 49 else 0.001), length=2000)
    found = measure_samples(data, batch_size=16, budget_s=5)
    assert found.wall_ms == pytest.approx(21, rel=0.5)
    assert waits(found)


def test_collation_is_measured_in_whole_batches(virtual):
    sizes = []

    def collate(samples):
        sizes.append(len(samples))
        virtual.work(0.016 + 0.001 * len(samples))

    found = measure_samples(Planted(length=500), batch_size=16, budget_s=60, collate=collate)
    assert sizes[:7] == [1, 2, 4, 8, 16, 16, 16]
    assert found.collate_ms == pytest.approx(2)
    assert found.wall_ms == pytest.approx(0, abs=1e-6)


def test_a_dataset_that_reads_whole_batches_is_asked_for_them(virtual):
    asked = []

    class Batched(Planted):
        def __getitems__(self, indices):
            asked.append(len(indices))
            virtual.work(0.032 + 0.001 * len(indices))
            return [(torch.zeros(4), i) for i in indices]

    data = Batched(length=500)
    found = measure_samples(data, batch_size=32, budget_s=60)
    assert data.read == []
    assert asked[:7] == [1, 2, 4, 8, 16, 32, 32]
    assert found.cpu_ms == pytest.approx(2)
    assert found.size_bytes == 4 * 4 + 8


NAMES = ["a", "b", "c", "d"]


@each(
    ("orders", "keys"),
    [
        ({"sampler": SequentialSampler(range(40))}, [5, 15, 25, 35]),
        ({"sampler": RandomSampler(range(40))}, [5, 15, 25, 35]),
        ({"sampler": DistributedSampler(range(40), 2, 0)}, [5, 15, 25, 35]),
        ({"sampler": NAMES}, NAMES),
        ({"sampler": SubsetRandomSampler([7, 9])}, [7, 9]),
        ({"sampler": WeightedRandomSampler([0.0, 1.0, 0.0, 2.0], 9)}, [1, 3]),
        ({"sampler": iter(NAMES)}, NAMES),
        ({"sampler": None, "batch_sampler": [["a", "b"], ["c"]]}, ["a", "c"]),
        ({"sampler": None, "batch_sampler": BatchSampler(NAMES, 2, False)}, NAMES),
        ({"sampler": None, "batch_sampler": BatchSampler(iter(NAMES), 2, False)}, NAMES),
        ({"sampler": None, "batch_sampler": iter(NAMES)}, NAMES),
    ],
)
def test_keys_to_probe_are_those_of_the_sampler(orders, keys):
    assert probe_indices(Planted(), 4, **orders) == keys


def test_what_cannot_be_read_has_no_cost():
    def fail():
        raise ValueError("broken")

    assert measure_samples(Planted(fail)) is None
    assert measure_samples(Planted(length=0)) is None


# Whether a stream shares itself out

COUNT = 9


class Stream(IterableDataset):
    inner: Any = None

    def __init__(self, inner: Any = None) -> None:
        self.inner = inner


class Asks(Stream):
    def __iter__(self) -> Iterator[Any]:
        info = get_worker_info()
        return iter(range(info.id, COUNT, info.num_workers))


class Shares(Asks):
    """Its first worker has some samples, its second one others."""

    def __iter__(self) -> Iterator[Any]:
        info = get_worker_info()
        first, second = self.inner
        parts = [range(first), range(second)] if info.num_workers > 1 else [range(first + second)]
        return iter(parts[info.id])


class Around(Stream):
    def __iter__(self) -> Iterator[Any]:
        yield from self.inner


class OneLeavesOut(Stream):
    def __iter__(self) -> Iterator[Any]:
        info = get_worker_info()
        return iter(range(info.id, COUNT - 1, info.num_workers) if info.num_workers > 1 else "ab")


@pytest.mark.usefixtures("virtual")
def test_a_trial_ends_when_it_has_taken_a_second(monkeypatch: pytest.MonkeyPatch) -> None:
    class Slow(Stream):
        def __iter__(self) -> Iterator[Any]:
            for number in itertools.count():
                clock.sleep(0.3)
                taken.append(number)
                yield number

    monkeypatch.setattr(torch_worker, "_worker_info", None)  # and back afterwards
    taken: list[int] = []
    told: dict[str, Any] = {}
    read_as_worker(spec_of(Slow()), 0, 2, told.__setitem__)
    # What its code notes elsewhere is kept by the stream, as far as that can be told.
    assert (len(taken), told) == (4, {"keeps": True})


@pytest.mark.parametrize(("wait_s", "work_s"), [(0.0, 0.01), (0.009, 0.01), (0.011, 0.01)])
def test_it_is_told_whether_a_stream_computes_for_longer_than_it_waits(
    virtual: VirtualClock, monkeypatch: pytest.MonkeyPatch, wait_s: float, work_s: float
) -> None:
    class Takes(Stream):
        def __iter__(self) -> Iterator[int]:
            for number in range(9):
                virtual.sleep(wait_s)
                virtual.queue(0.05)  # while others have the CPUs
                virtual.work(work_s)
                yield number

    monkeypatch.setattr(torch_worker, "_worker_info", None)
    told: dict[str, Any] = {}
    read_as_worker(spec_of(Takes()), 0, 2, told.__setitem__)
    assert told == {"samples": 9} | ({"computes": True} if wait_s < work_s else {})


# -- in a process of its own -----------------------------------------------------------------------


class Elsewhere(Asks):
    """May not be read in this process."""

    def __init__(self) -> None:
        self.process = os.getpid()

    def __iter__(self) -> Iterator[Any]:
        assert os.getpid() != self.process
        return super().__iter__()


def spec_of(stream: Any, start: Any = None, **options: Any) -> LoaderSpec:
    how = {"options": LoaderOptions(**options), "batch_size": 2, "worker_init_fn": start}
    return LoaderSpec(dataset=stream, name="Stream", **how)


def found(stream: Any, start: Any = None, **options: Any) -> StreamSplit | None:
    return inspect_dataset(spec_of(stream, start, **options), Questions(cost=True)).stream


def test_a_stream_is_tried_in_a_process_that_is_thrown_away() -> None:
    assert found(Elsewhere()) == StreamSplit(
        splits=True, why="Elsewhere asks get_worker_info() for its part"
    )
    assert get_worker_info() is None


class Exits(Stream):
    def __iter__(self) -> Iterator[Any]:
        os._exit(3)


def test_a_trial_that_ends_the_process_means_that_it_does_not() -> None:
    assert found(Exits()).why == "Exits, tried as one of two workers, left with exit code 3"


@pytest.mark.parametrize("parts", [(16, 15), (16, 16), (31, 31), (32, 31), (20, 70), (3, 0)])
def test_a_stream_of_any_length_that_divides_itself_is_recognised(parts: tuple[int, int]) -> None:
    assert found(Shares(parts)).splits


def test_one_alone_has_the_time_of_two(monkeypatch: pytest.MonkeyPatch) -> None:
    class Slow(Stream):
        def __iter__(self) -> Iterator[Any]:
            for number in range(6):
                now[0] += 300_000_000
                yield number

    class Planned(clock.Clock):
        def monotonic_ns(self) -> int:
            return now[0]

    monkeypatch.setattr(torch_worker, "_worker_info", None)  # and back afterwards
    now: list[int] = [0]
    told: dict[str, Any] = {}
    with clock.installed(Planned()):
        read_as_worker(spec_of(Slow()), 0, 1, told.__setitem__)
    assert told == {"samples": 6}


def configures(worker: int) -> None:
    info = get_worker_info()
    info.dataset.inner = range(worker, COUNT, info.num_workers)


class Reader(Asks):
    """Stands for one that holds a dataset of Ray, by the module of what it holds."""

    def __init__(self) -> None:
        self.rows = type("Dataset", (), {"__module__": "ray.data"})()


@pytest.mark.parametrize("start", [None, configures])
def test_a_chain_with_a_part_of_ray_is_read_in_the_training_process(start: Any) -> None:
    assert found(ChainDataset([Asks(), Reader()]), start).here
    assert found(ChainDataset([Asks(), ChainDataset((Reader(),))]), start).here
    assert not found(ChainDataset([Asks(), Asks()])).here


@pytest.mark.parametrize(
    ("stream", "why"),
    [
        (Asks([socket.socket]), "from which a trial would take samples"),
        (Asks([multiprocessing.SimpleQueue]), "from which a trial would take samples"),
        (OneLeavesOut(), "give 8 samples, and one alone 2"),
    ],
)
def test_any_doubt_means_that_it_does_not(stream: Any, why: str) -> None:
    if isinstance(stream.inner, list):
        stream.inner = [make() for make in stream.inner]
    told = found(stream)
    assert not told.splits
    assert why in told.why


def seeds(worker: int) -> None:
    get_worker_info().dataset.inner = range(COUNT - worker)


def test_a_worker_init_fn_that_configures_the_copy_of_its_worker_shares_out() -> None:
    for configure, splits in ((configures, True), (seeds, False)):
        assert found(Around(), configure).splits == splits


class Unread(Stream):
    """Notes that it was read, wherever that is."""

    def __init__(self) -> None:
        self.read = multiprocessing.get_context("fork").Value("i", 0)

    def __iter__(self) -> Iterator[Any]:
        self.read.value = 1
        return iter(())


@pytest.mark.parametrize(
    "options", [{"probe": False}, {"num_workers": 2}, {"num_workers": 0}, {"split": True}]
)
def test_it_is_not_read_where_nothing_rests_on_it_or_the_user_says_so(options) -> None:
    stream = Unread()
    assert found(stream, **options).splits == (options == {"split": True})
    assert not stream.read.value


def test_there_are_as_many_workers_as_cpus_four_at_least_and_no_more_than_shards() -> None:
    of_six = ((None, 6), (9, 6), (4, 4), (1, 1), (0, 1))
    of_two = ((None, 4), (9, 4), (3, 3), (2, 2), (0, 1))

    def planned(cpus: int, split: StreamSplit) -> tuple[int, str, list[str]]:
        spec = LoaderSpec(dataset=Asks(), name="s", options=LoaderOptions(), batch_size=1)
        return Planner(spec, DatasetFacts(stream=split), machine()).workers_of_stream(cpus, "CPUs")

    for cpus, shards, wanted in (
        *((6, *one) for one in of_six),
        *((2, *one) for one in of_two),
    ):
        split = StreamSplit(splits=True, why="it has shards", most_workers=shards)
        count, why, told = planned(cpus, split)
        assert (count, told) == (wanted, [])
        assert "it has shards" in why
    computes = StreamSplit(splits=True, why="it asks", computes=True)
    assert [planned(cpus, computes)[0] for cpus in (2, 6)] == [2, 6]
    count, _, told = planned(6, StreamSplit(splits=False, why="of its code"))
    assert count == 1
    assert "set num_workers=6, or split=True" in told[0]
    assert "of its code" in told[0]


class Once(Dataset):
    """Each sample is there for whoever asks first."""

    def __init__(self, kind):
        self.end, other = multiprocessing.Pipe()
        if kind == "queue":
            self.end = other = multiprocessing.get_context("fork").SimpleQueue()
        self.other, put = other, other.put if kind == "queue" else other.send
        self.kind = kind
        for number in range(8):
            put(number)

    def __len__(self):
        return 8

    def __getitem__(self, index):
        if self.kind == "queue":
            return -1 if self.end.empty() else self.end.get()
        return self.end.recv() if self.end.poll() else -1


@each("kind", ["queue", "connection"])
@each("workers", [0, 1, "auto"])
def test_samples_that_are_there_once_are_not_tried(kind, workers):
    loader = FastDataLoader(Once(kind), 2, num_workers=workers)
    assert sorted(torch.cat(list(loader)).tolist()) == list(range(8))
    loader.close()


def test_what_needs_no_reading_is_known_where_nothing_is_tried():
    loader = FastDataLoader(Planted(fail), 8, num_workers=2)
    assert loader.plan.reasons["prefetch_factor"].startswith("9 batches ahead")  # as the loader is
    assert loader.plan.draws is None
