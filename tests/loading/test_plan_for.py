"""Who reads, and how many workers there are: what follows from a dataset and a machine."""

from __future__ import annotations

import heapq
import multiprocessing
import sys
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from loading.planned import GIB, Planted, Stream, WithoutLength, cost, cpus, machine, memory, plan
from misses import each
from rig.machine import sleep
from rig.virtual_crew import on_machine
from thoroughness import max_examples
from torch.utils.data import BatchSampler, Dataset, RandomSampler, Subset, TensorDataset

from lightning_fastdata import FastDataModule
from lightning_fastdata.errors import FastDataWarning
from lightning_fastdata.executors.columns import ColumnDataset, TokenWindows
from lightning_fastdata.executors.kinds import KINDS
from lightning_fastdata.host import clock
from lightning_fastdata.loading.facts import (
    DatasetFacts,
    Questions,
    SampleCost,
    inspect_dataset,
    may_start_processes,
)
from lightning_fastdata.loading.loader import FastDataLoader
from lightning_fastdata.loading.options import LoaderOptions
from lightning_fastdata.loading.plan_for import (
    ExecutorChoice,
    LoaderSpec,
    Planner,
    alone_ms,
    look_ahead_batches,
    plan_for,
    soonest_workers,
    waits,
)


@each(
    ("measured", "answer"),
    [
        (None, False),
        (cost(wall_ms=5, cpu_ms=0.1), True),
        (cost(wall_ms=5, cpu_ms=2.4), True),
        (cost(wall_ms=5, cpu_ms=2.6), False),
        (cost(wall_ms=0.15, cpu_ms=0.0), False),
        (cost(wall_ms=0.0, cpu_ms=0.0), False),
    ],
)
def test_a_sample_waits_if_it_does_for_most_of_a_time_worth_handing_over(measured, answer):
    assert waits(measured) == answer


def planner(*, tasks=None, ranks=1, forked=True, **about_machine):
    dataset = WithoutLength() if tasks is None else range(tasks)
    spec = LoaderSpec(dataset=dataset, name="rows", options=LoaderOptions(), batch_size=1)
    how = {"cpu": cpus(2, ranks), "start_method": "fork" if forked else "spawn"}
    return Planner(spec, DatasetFacts(), machine(**how, **about_machine))


@each(
    ("computing", "measured", "about", "workers", "words"),
    [
        (2, cost(wall_ms=5.5, cpu_ms=0.4), {}, 23, "waits 5.1 of its 5.5 ms"),
        (8, cost(wall_ms=4, cpu_ms=1.9), {}, 17, "8 CPUs feed 17"),
        (8, cost(wall_ms=5.5, cpu_ms=0.4), {}, 64, "no more than 64"),
        (2, cost(wall_ms=5000, cpu_ms=0), {}, 64, "no more than 64"),
        (2, cost(wall_ms=5000, cpu_ms=0), {}, 64, "waits 5,000 of its 5,000 ms"),
        (2, cost(wall_ms=5.5, cpu_ms=0.4), {"tasks": 10}, 10, "than there are to fetch (10)"),
        (2, cost(wall_ms=5.5, cpu_ms=0.4), {"memory": memory(ram=GIB)}, 5, "bounded by RAM"),
        (2, cost(wall_ms=5.5, cpu_ms=0.4), {"memory": memory(ram=GIB), "ranks": 2}, 2, "by RAM"),
        (2, cost(wall_ms=5.5, cpu_ms=0.4), {"forked": False, "memory": memory(8 * GIB)}, 5, "RAM"),
        (2, cost(wall_ms=5.5, cpu_ms=0.4), {"memory": memory(ram=0)}, 1, "bounded by RAM"),
        (2, cost(wall_ms=5.5, cpu_ms=0.4), {"memory": memory(soft=64)}, 8, "open-file limit"),
    ],
)
def test_samples_that_wait_get_the_workers_that_fill_the_cpus(
    computing, measured, about, workers, words
):
    count, why = planner(**about).workers_that_wait(computing, measured)
    assert count == workers
    assert words in why


@each(
    ("workers", "about", "batches"),
    [
        (2, {}, 9),
        (4, {"batch_size": 1}, 12),
        (20, {}, 40),
        (64, {}, 128),
        (20, {"split": False}, 40),
        (2, {"split": False}, 8),
        (4, {"prefetch": 3}, 12),
        (2, {"prefetch": 1}, 8),
    ],
)
def test_look_ahead_keeps_every_worker_busy(workers, about, batches):
    about = {"prefetch": None, "batch_size": 32, "split": True, **about}
    assert look_ahead_batches(workers, **about) == batches


def test_many_workers_bridge_a_slow_sample_as_long_as_torchs_do():
    class Stragglers(Dataset):
        def __len__(self):
            return 8 * 200

        def __getitem__(self, index):
            sleep(1.0 if index % 320 == 312 else 0.001)
            return index

    with on_machine():
        loader = FastDataLoader(Stragglers(), 8, num_workers=16, executor="workers")
        began_s = clock.monotonic()
        for _ in loader:
            sleep(0.03)
        took_s = clock.monotonic() - began_s
        loader.close()
    # 32 batches ahead are 0.96 s, so that five stragglers cost little more than the steps, 6 s.
    assert took_s < 6.5


def planned(options=None, **changes):
    """A plan for a machine of two CPUs, whose samples wait."""
    found = {name: changes.pop(name) for name in ("cost", "split") if name in changes}
    facts = DatasetFacts(**{"cost": cost(wall_ms=5.5, cpu_ms=0.4), "split": True, **found})
    about = {"cpu": cpus(2), "accelerator": "cpu", "batch_size": 32, "dataset_length": 512}
    about["choice"] = ExecutorChoice("workers", "as planted")
    return plan(options, facts=facts, **{**about, **changes})


@each(
    ("changes", "workers"),
    [
        ({"cost": None}, 2),
        ({"cost": cost(wall_ms=5, cpu_ms=5)}, 2),
        ({"split": False}, 16),
        ({"dataset_length": 0}, 0),
        ({"choice": ExecutorChoice("torch", "no shared memory")}, 2),
        ({"choice": ExecutorChoice("inline", "cheap")}, 0),
        ({"choice": ExecutorChoice("workers", "images")}, 23),
        ({"stage": "val"}, 23),
        ({"memory": memory(soft=64)}, 8),
    ],
)
def test_only_waiting_samples_of_the_engine_get_more_workers_than_cpus(changes, workers):
    assert planned(**changes).num_workers == workers


AGAIN = RandomSampler(range(4000), replacement=True, num_samples=10**7)
PAIRS = BatchSampler(AGAIN, 16, drop_last=False)
"""Orders of more samples than the dataset has."""


def chosen(*, workers="auto", batch_size=32, on=2, shared_memory=True, **found):
    """The executor for a dataset of which this was found out, on so many CPUs."""
    of_spec = ("pipelines", "transformed", "collate_fn", "sampler", "batch_sampler")
    about = {name: found.pop(name) for name in (*of_spec, "worker_init_fn") if name in found}
    spec = LoaderSpec(
        dataset=Stream() if found.pop("stream", False) else range(4000),
        name="planted",
        options=LoaderOptions(num_workers=workers),
        batch_size=batch_size,
        **about,
    )
    facts = DatasetFacts(**{"cost": cost(wall_ms=5, cpu_ms=5), "split": True, **found})
    with_memory = machine(cpu=cpus(on), shared_memory=shared_memory)
    return Planner(spec, facts, with_memory).choose_executor()


@each(
    ("changes", "workers", "name"),
    [
        ({}, "auto", "workers"),
        ({"cost": None}, "auto", "workers"),
        ({"cost": cost(wall_ms=5, cpu_ms=0.1)}, "auto", "workers"),
        ({"cost": cost(wall_ms=0.001, cpu_ms=0.001)}, "auto", "inline"),
        ({"cost": cost(wall_ms=0.01, cpu_ms=0.01)}, "auto", "inline"),
        ({"cost": cost(wall_ms=0.2, cpu_ms=0.2)}, "auto", "workers"),
        ({"cost": cost(wall_ms=0.001, cpu_ms=0.001), "draws": True}, "auto", "inline"),
        ({"cost": cost(wall_ms=0.001, cpu_ms=0.001), "pipelines": ("one",)}, "auto", "inline"),
        ({"cost": cost(wall_ms=0.001, cpu_ms=0.001), "transformed": True}, "auto", "workers"),
        ({"cost": cost(wall_ms=0.001, cpu_ms=0.001), "sampler": AGAIN}, "auto", "workers"),
        ({"cost": cost(wall_ms=0.001, cpu_ms=0.001), "batch_sampler": PAIRS}, "auto", "workers"),
        ({"cost": cost(wall_ms=0.001, cpu_ms=0.001)}, 3, "workers"),
        ({"cost": cost(wall_ms=0.001, cpu_ms=0.001, collate_ms=1)}, "auto", "workers"),
        ({"draws": True}, "auto", "workers"),
        ({"pipelines": ("one",)}, "auto", "workers"),
        ({"stream": True}, "auto", "workers"),
        ({"rows": True}, "auto", "gather"),
        ({"shared_memory": False}, "auto", "torch"),
        ({}, 0, "torch"),
        ({"draws": True}, 0, "inline"),
        ({"pipelines": ("one",)}, 0, "inline"),
    ],
)
def test_the_executor_follows_from_the_look(changes, workers, name):
    choice = chosen(**changes, workers=workers, batch_size=16)
    assert choice.executor == name
    assert choice.why


KEPT = {"changes": True, "cost_again": cost(wall_ms=0.01, cpu_ms=0.01)}


@each(
    ("found", "name"),
    [
        (KEPT, "inline"),
        ({**KEPT, "on": 4}, "inline"),
        ({**KEPT, "on": 16}, "workers"),  # all epochs are over sooner, with nothing kept
        ({**KEPT, "workers": 2}, "workers"),
        ({**KEPT, "cost_again": cost(wall_ms=4, cpu_ms=4)}, "workers"),
        ({"changes": True}, "workers"),
    ],
)
def test_what_a_dataset_keeps_is_read_where_it_stays_kept(found, name):
    choice = chosen(**found)
    assert choice.executor == name
    assert choice.kept == (name == "inline")
    assert not choice.standby


LARGE = cost(wall_ms=0.001, cpu_ms=0.001, size_bytes=2**30)


@each(
    ("changes", "standby"),
    [
        ({}, True),
        ({"cost": cost(wall_ms=0.06, cpu_ms=0.06)}, True),
        ({"cost": cost(wall_ms=5, cpu_ms=5)}, False),
        ({"cost": cost(wall_ms=2.5, cpu_ms=0.01), "batch_size": 1}, False),
        ({"cost": cost(wall_ms=0.001, cpu_ms=0.001)}, False),
        ({"changes": True}, False),
        ({"collate_fn": list}, True),
        ({"sampler": iter(())}, False),
        ({"transformed": True}, False),
        ({"shared_memory": False}, False),
        ({"workers": 1}, False),
    ],
)
def test_the_training_process_reads_beside_workers_what_is_cheap_and_as_they_would(
    changes, standby
):
    assert chosen(**{"cost": LARGE, **changes}).standby == standby


def test_as_many_workers_stand_by_as_may_be_quicker():
    found = []
    for microseconds in range(1, 60):
        ms = microseconds / 1000
        sample = cost(wall_ms=ms, cpu_ms=ms, size_bytes=2**30)
        alone = alone_ms(sample, 32)
        _, aside = soonest_workers(sample, 32, cpus=2, most=2, batches=125, start_ms=6)
        choice = chosen(cost=sample)
        assert choice.standby
        if not alone * 0.95 < aside < alone * 1.05:
            found.append(choice.few)
            assert choice.few == (alone < aside)
    assert {True, False} == set(found)


@each(
    "found",
    [
        {"rows": True},
        {"cost": cost(wall_ms=0.001, cpu_ms=0.001)},
        {"cost": LARGE},
        {"cost": cost(wall_ms=0.06, cpu_ms=0.06)},
        KEPT,
    ],
)
def test_what_a_worker_init_fn_prepares_is_read_by_workers_alone(found):
    choice = chosen(**found, worker_init_fn=print)
    assert (choice.executor, choice.standby) == ("workers", False)
    assert chosen(**found, worker_init_fn=print, shared_memory=False).executor == "torch"
    assert chosen(**found, worker_init_fn=print, here="no process starts").executor == "inline"


def test_a_tensor_dataset_with_a_worker_init_fn_has_workers_on_any_system():
    spec = LoaderSpec(
        dataset=COLUMN, name="rows", options=LoaderOptions(), batch_size=1, worker_init_fn=print
    )
    plan = Planner(spec, DatasetFacts(rows=True), machine(shared_memory=False)).decide()
    assert (plan.executor, plan.num_workers) == ("torch", 4)


def test_one_cpu_is_shared_with_nobody_unless_samples_wait():
    for ms in (0.01, 1, 100):
        choice = chosen(cost=cost(wall_ms=ms, cpu_ms=ms), on=1)
        assert choice.executor == "inline" or choice.few
    assert chosen(cost=cost(wall_ms=50, cpu_ms=0.1), on=1).executor == "workers"


def test_cheap_samples_get_no_more_workers_than_are_enough():
    many = planned(cost=cost(wall_ms=0.02, cpu_ms=0.02), cpu=cpus(64), dataset_length=10**6)
    assert 1 <= many.num_workers < 16
    dear = planned(cost=cost(wall_ms=20, cpu_ms=20), cpu=cpus(64), dataset_length=10**6)
    assert dear.num_workers == 64


# The loader alone


def test_a_loader_says_which_of_its_options_nobody_has_given():
    def chosen(**given):
        lines = FastDataLoader(range(4), 2, **given).plan.explain().splitlines()
        return {name: by for name, _, by, *_ in map(str.split, lines)}

    by = chosen()
    assert (by["num_workers"], by["pin_memory"]) == ("torch", "torch")
    assert chosen(num_workers=0)["num_workers"] == "you"


@pytest.mark.usefixtures("virtual")
def test_a_loader_finds_by_itself_that_its_samples_wait():
    data = Planted(partial(clock.sleep, 1), length=6)
    loader = FastDataLoader(data, 2, num_workers="auto", multiprocessing_context="fork")
    assert loader.executor == "workers"
    assert loader.num_workers == 6
    assert "a sample waits" in loader.plan.explain()
    try:
        for _ in range(2):
            assert torch.cat([index for _, index in loader]).tolist() == list(range(6))
    finally:
        loader.close()


@pytest.mark.usefixtures("virtual")
@pytest.mark.cases(4)
@pytest.mark.parametrize(
    "settings",
    [
        {"prefetch_factor": 3},
        {"persistent_workers": True},
        {"multiprocessing_context": "fork"},
        {"batch_size": None},
        {"batch_sampler": [[0, 1], [2]], "batch_size": 1},
        {"collate_fn": list},
    ],
    ids=repr,
)
@pytest.mark.parametrize("waits_s", [0, 1])
def test_a_loader_chooses_around_whatever_else_is_set(settings, waits_s):
    settings = {"batch_size": 2, **settings}
    data = Planted(partial(clock.sleep, waits_s), length=3)
    loader = FastDataLoader(data, num_workers="auto", **settings)
    plain = {name: value for name, value in settings.items() if "batch" in name or "coll" in name}
    expected = [repr(batch) for batch in torch.utils.data.DataLoader(data, **plain)]
    try:
        assert [repr(batch) for batch in loader] == expected
    finally:
        loader.close()


def test_num_workers_means_what_it_means_to_torch_unless_it_is_auto():
    loader = FastDataLoader(TensorDataset(torch.arange(4)))
    assert (loader.num_workers, loader.persistent_workers, loader.executor) == (0, False, "torch")
    loader = FastDataLoader(TensorDataset(torch.arange(4)), num_workers="auto")
    assert (loader.num_workers, loader.executor) == (1, "gather")
    assert loader.plan is not None
    rows = Planted()
    four = FastDataLoader(rows, 4, num_workers=4)
    assert (four.num_workers, four.persistent_workers, four.executor) == (4, False, "workers")
    none = FastDataLoader(rows, 4, num_workers=0)
    assert (none.num_workers, KINDS[none.executor].side_processes) == (0, False)


def test_a_script_that_cannot_be_imported_again_starts_no_process_unasked(monkeypatch, tmp_path):
    script = tmp_path / "script.py"
    script.write_text("loader = ...")
    monkeypatch.setattr(sys.modules["__main__"], "__file__", str(script), raising=False)
    monkeypatch.setattr(multiprocessing, "get_start_method", lambda **_: "forkserver")
    loader = FastDataLoader(Planted(), 4, num_workers="auto")
    assert (loader.executor, loader.num_workers) == ("torch", 0)
    with pytest.warns(FastDataWarning, match="worker_init_fn is not called.*__main__"):
        FastDataLoader(Planted(), 4, num_workers="auto", worker_init_fn=print)
    script.write_text("if __name__ == '__main__': loader = ...")
    assert may_start_processes()


# Each kind of dataset has its executor


class OfGenerators(Stream):
    def __iter__(self):
        yield from super().__iter__()


class WithState(OfGenerators):
    def state_dict(self):
        return {}

    def load_state_dict(self, state):
        pass


COLUMN = TensorDataset(torch.zeros(4))
SAMPLES = [torch.zeros(3)] * 8


@each(
    ("dataset", "about", "name"),
    [
        (Stream(), {}, "workers"),
        (Stream(), {"workers": 0}, "inline"),
        (OfGenerators(), {"workers": 0}, "torch"),
        (WithState(), {"workers": 0}, "inline"),
        (COLUMN, {}, "gather"),
        (COLUMN, {"workers": 0}, "torch"),
        (COLUMN, {"collate_fn": list}, "workers"),
        (COLUMN, {"transformed": True}, "workers"),
        (Subset(ColumnDataset({"x": np.zeros((4, 2))}), [1, 2]), {}, "gather"),
        (TokenWindows(np.arange(9), 3), {}, "gather"),
        (Subset(SAMPLES, [1, 2]), {}, "workers"),
        (SAMPLES, {}, "workers"),
        (SAMPLES, {"workers": 0}, "torch"),
    ],
)
def test_each_kind_of_dataset_has_its_executor(dataset, about, name):
    about = dict(about)
    options = LoaderOptions(num_workers=about.pop("workers", "auto"), probe=False)
    spec = LoaderSpec(dataset=dataset, name="rows", options=options, batch_size=4, **about)
    facts = inspect_dataset(spec, Questions(cost=True))
    assert Planner(spec, facts, machine(cpu=cpus(2))).choose_executor().executor == name


@pytest.mark.parametrize("executor", ["torch", "auto", "inline", "gather", "workers"])
def test_the_executor_of_the_options_reaches_the_loader_and_its_plan(executor):
    data = TensorDataset(torch.arange(8.0), torch.arange(8))
    options = LoaderOptions(num_workers=1, executor=executor)
    module = FastDataModule.from_datasets(data, batch_size=4, options=options)
    loader = module.train_dataloader()
    assert loader.executor == ("workers" if executor == "auto" else executor)
    assert "executor" in module.explain()
    plain = FastDataModule.from_datasets(data, batch_size=4, options=LoaderOptions(num_workers=1))
    for one, two in zip(loader, plain.train_dataloader(), strict=True):
        assert all(map(torch.equal, one, two))


# Workers are started only as far as an epoch is over sooner for it

costs = st.builds(
    lambda cpu, wait: SampleCost(wall_ms=cpu + wait, cpu_ms=cpu, size_bytes=8, samples=9),
    st.floats(0.01, 2),
    st.floats(5, 200),
)
epochs = st.integers(1, 2000)
starts = st.floats(1, 2000)


def simulated_ms(cost: SampleCost, batches: int, workers: int, start_ms: float) -> float:
    """When an epoch is over whose workers are started one by one, each taking what is next."""
    free = [(number + 1) * start_ms for number in range(workers)]
    for _ in range(batches):
        heapq.heapreplace(free, free[0] + cost.wall_ms)
    return max(free)


@max_examples(100)
@given(cost=costs, batches=epochs, start_ms=starts)
def test_no_number_of_workers_is_sooner_by_much(cost, batches, start_ms) -> None:
    most = min(64, batches)
    chosen, _ = soonest_workers(cost, 1, cpus=10**6, most=most, batches=batches, start_ms=start_ms)
    took = simulated_ms(cost, batches, chosen, start_ms)
    best = min(simulated_ms(cost, batches, n, start_ms) for n in range(1, most + 1))
    assert took < 2 * best


@max_examples(50)
@given(cost=costs, batches=epochs, start_ms=starts, more=st.floats(1, 9))
def test_a_dearer_start_or_a_shorter_epoch_takes_no_more_workers(
    cost, batches, start_ms, more
) -> None:
    def count(batches: int, start_ms: float) -> int:
        how = {"cpus": 4, "most": 64, "batches": batches, "start_ms": start_ms}
        return soonest_workers(cost, 4, **how)[0]

    few = count(batches, start_ms)
    assert 1 <= count(batches, start_ms * more) <= few <= count(int(batches * more), start_ms) <= 64
    assert count(batches, 0) == 64  # who starts for nothing, and when the length is not known
    assert soonest_workers(cost, 4, cpus=4, most=64, batches=None, start_ms=start_ms)[0] == 64


def workers(
    samples: int, *, wait_ms: float = 10, keeps: bool = False, crowded: float = 1.0, **options: Any
) -> int:
    spec = LoaderSpec(
        dataset=range(samples),
        name="rows",
        options=LoaderOptions(**options),
        batch_size=4,
        keeps=keeps,
    )
    cost = SampleCost(wall_ms=wait_ms + 0.02, cpu_ms=0.02, size_bytes=8, samples=9, crowded=crowded)
    plan = plan_for(spec, DatasetFacts(cost=cost, split=True), accelerator="cuda")
    assert (plan.num_workers > 0) == (plan.executor == "workers")
    return plan.num_workers


def test_a_short_epoch_is_read_by_few_workers_or_none() -> None:
    assert 1 <= workers(48) <= 6
    assert workers(48) <= workers(48, keeps=True) <= workers(10**6)
    assert workers(48) < workers(10**6)
    assert workers(48) == workers(48, keeps=True, persistent_workers=False)
    assert workers(4) == 0
    assert workers(48, multiprocessing_context="spawn") == 0
    assert workers(48, num_workers=40) == 40


def test_where_others_have_the_cpus_fewer_are_started_and_some_still() -> None:
    alone, crowded = (workers(400, keeps=True, crowded=times) for times in (1.0, 15.0))
    assert 1 <= crowded < alone / 2
