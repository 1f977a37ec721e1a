"""A dataset is tried in a process that is thrown away, and what it does there is told."""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import threading

import numpy as np
import pytest
import torch
from misses import each
from open_files import open_files
from planning.planned import Planted
from thoroughness import LONG
from torch.utils.data import (
    DataLoader,
    Dataset,
    Subset,
    TensorDataset,
    get_worker_info,
)
from virtual_time import virtual_time

from lightning_fastdata import FastDataLoader, FastDataModule
from lightning_fastdata.errors import DatasetError
from lightning_fastdata.host import clock
from lightning_fastdata.planning.facts import (
    DatasetFacts,
    Questions,
    inspect_dataset,
    try_apart,
)
from lightning_fastdata.planning.options import LoaderOptions
from lightning_fastdata.planning.plan_for import LoaderSpec, plan_for

EVERYTHING = Questions(sample=True, further=3, cost=True)


def from_loaders(data, **how):
    return FastDataModule.from_loaders(DataLoader(data, **how))


def inspect(dataset, questions=EVERYTHING, *, num_workers="auto", started="auto", **about):
    spec = LoaderSpec(
        dataset=dataset,
        name="Photos.train_dataset()",
        options=LoaderOptions(num_workers=num_workers, multiprocessing_context=started),
        batch_size=1,
        **about,
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
    assert not open_files() - before


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


def test_a_dataset_that_cannot_be_sent_to_workers_is_read_here():
    assert "could not be started" in inspect(Unpicklable(), started="spawn").here


@each("make", [FastDataModule.from_datasets, from_loaders])
def test_a_dataset_that_starts_processes_trains_as_with_torch(make):
    loader = make(Planted(starts_a_process, 8), batch_size=2, shuffle=False).train_dataloader()
    theirs = list(DataLoader(Planted(starts_a_process, 8), batch_size=2))
    for ours, own in zip(loader, theirs, strict=True):
        assert [part.tolist() for part in ours] == [part.tolist() for part in own]


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
