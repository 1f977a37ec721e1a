"""What a sample costs, and how many workers follow from it."""

from __future__ import annotations

import multiprocessing
import sys
from functools import partial

import pytest
import torch
from misses import each
from planning.planned import GIB, Planted, Stream, WithoutLength, cost, cpus, machine, memory, plan
from torch.utils.data import (
    BatchSampler,
    DistributedSampler,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
)

from lightning_fastdata.executors.kinds import KINDS
from lightning_fastdata.host import clock
from lightning_fastdata.loading.loader import FastDataLoader
from lightning_fastdata.planning.facts import (
    DatasetFacts,
    may_start_processes,
    measure_samples,
    probe_indices,
)
from lightning_fastdata.planning.options import LoaderOptions
from lightning_fastdata.planning.plan_for import (
    ExecutorChoice,
    LoaderSpec,
    Planner,
    look_ahead_batches,
    waits,
)

# What is measured


def test_how_much_longer_others_made_it_take_is_told(monkeypatch, virtual):
    # Which other tests leave out.
    monkeypatch.setattr("lightning_fastdata.planning.facts._MOST_CROWDED", 20.0)

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


# What follows from it


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
        (20, {}, 9),
        (64, {}, 10),
        (64, {"batch_size": 1}, 72),
        (20, {"split": False}, 40),
        (2, {"split": False}, 8),
        (4, {"prefetch": 3}, 12),
        (2, {"prefetch": 1}, 8),
    ],
)
def test_look_ahead_keeps_every_worker_busy(workers, about, batches):
    about = {"prefetch": None, "batch_size": 32, "split": True, **about}
    assert look_ahead_batches(workers, **about) == batches


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


def chosen(*, workers="auto", batch_size=32, on=2, shared_memory=True, **found):
    """The executor for a dataset of which this was found out, on so many CPUs."""
    of_spec = ("pipelines", "transformed", "collate_fn", "sampler")
    about = {name: found.pop(name) for name in of_spec if name in found}
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
    script.write_text("if __name__ == '__main__': loader = ...")
    assert may_start_processes()
