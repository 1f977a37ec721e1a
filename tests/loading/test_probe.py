"""What a sample costs, and how many workers follow from it."""

from __future__ import annotations

import hashlib
import random
import time

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import (
    BatchSampler,
    Dataset,
    DistributedSampler,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
)

from lightning_fastdata.host.cpu import CpuLimit, cpu_limit
from lightning_fastdata.host.memory import HostMemory
from lightning_fastdata.loading.draws import DrawWatch
from lightning_fastdata.loading.executors.suited import DatasetLook, look_at, suited_executor
from lightning_fastdata.loading.loader import FastDataLoader
from lightning_fastdata.loading.loader_plan import plan_loader
from lightning_fastdata.loading.options import LoaderOptions
from lightning_fastdata.loading.probe import (
    SampleCost,
    further_samples,
    measure_samples,
    probe_indices,
    queued_s,
    spread_indices,
    thread_speedup,
)
from lightning_fastdata.loading.worker_count import (
    look_ahead_batches,
    waits,
    workers_for,
    workers_that_wait,
)

BLOCK = bytes(400_000)
GIB = 2**30


class Planted(Dataset):
    """Samples of a known kind of work."""

    def __init__(self, work, length=40):
        self.work, self.length = work, length
        self.read = []

    def __len__(self):
        return self.length

    def __getitem__(self, i):
        self.read.append(i)
        self.work()
        return torch.full((4,), float(i)), i


def sleep():
    time.sleep(0.01)


def compute():
    until = time.thread_time() + 0.004
    while time.thread_time() < until:
        pass


def compute_in_c():
    for _ in range(10):
        hashlib.sha256(BLOCK).digest()


def nothing():
    pass


def draw():
    random.random(), np.random.rand(), torch.rand(1)


def cost(*, wall_ms, cpu_ms, size_bytes=100):
    return SampleCost(wall_ms=wall_ms, cpu_ms=cpu_ms, size_bytes=size_bytes, samples=8)


def cpus(count):
    return cpu_limit(
        affinity_cpus=count, quota_cpus=None, quota_source=None, ranks=1, bound_to_rank=False
    )


def memory(ram=64 * GIB, soft=65536):
    return HostMemory(
        ram_available_bytes=ram,
        cgroup_available_bytes=None,
        shm_free_bytes=None,
        open_files_soft=soft,
        open_files_hard=soft,
    )


# What is measured


def test_a_sample_that_sleeps_waits_and_ones_that_compute_do_not():
    assert waits(measure_samples(Planted(sleep)))
    for work in (compute, compute_in_c, nothing):
        assert not waits(measure_samples(Planted(work)))


def test_time_spent_queueing_for_a_cpu_is_no_waiting():
    wall, queue = iter(range(10_000)), iter(range(10_000))
    measured = measure_samples(
        Planted(nothing),
        clock_s=lambda: next(wall) * 0.01,
        cpu_s=lambda: 0.0,
        queue_s=lambda: next(queue) * 0.01,
    )
    assert measured is not None
    assert (measured.wall_ms, measured.wait_ms) == pytest.approx((0, 0), abs=1e-6)


def test_samples_from_all_over_the_dataset_are_read_within_the_budget():
    ticks = iter(range(10_000))
    data = Planted(nothing, length=1000)
    # Each sample asks the clock for its begin, its end, and whether to go on.
    measured = measure_samples(data, budget_s=0.2, clock_s=lambda: next(ticks) * 0.01)
    assert data.read == spread_indices(1000, 32)[:7]
    assert measured is not None
    assert measured.samples == 6
    slow = Planted(nothing)
    once = measure_samples(slow, clock_s=lambda: next(ticks) * 1.0)
    assert len(slow.read) == 1
    assert once is not None
    assert once.samples == 1


@given(length=st.integers(0, 10_000), count=st.integers(1, 64))
def test_indices_are_different_ones_of_the_dataset(length, count):
    indices = spread_indices(length, count)
    assert len(set(indices)) == len(indices) == min(length, count)
    assert all(0 <= index < length for index in indices)


NAMES = ["a", "b", "c", "d"]


class Counting:
    """A sampler that knows how often it was iterated."""

    def __init__(self):
        self.iterated = 0

    def __iter__(self):
        self.iterated += 1
        return iter(NAMES)


@pytest.mark.parametrize(
    ("orders", "keys"),
    [
        ({}, [5, 15, 25, 35]),
        ({"sampler": SequentialSampler(range(40))}, [5, 15, 25, 35]),
        ({"sampler": RandomSampler(range(40))}, [5, 15, 25, 35]),
        ({"sampler": DistributedSampler(range(40), 2, 0)}, [5, 15, 25, 35]),
        ({"sampler": NAMES}, NAMES),
        ({"sampler": SubsetRandomSampler([7, 9])}, [7, 9]),
        ({"sampler": WeightedRandomSampler([0.0, 1.0, 0.0, 2.0], 9)}, [1, 3]),
        ({"batch_sampler": [["a", "b"], ["c"]]}, ["a", "c"]),
        ({"batch_sampler": BatchSampler(NAMES, 2, False)}, NAMES),
        ({"sampler": Counting()}, None),
        ({"sampler": iter(NAMES)}, None),
        ({"batch_sampler": BatchSampler(Counting(), 2, False)}, None),
        ({"batch_sampler": Counting()}, None),
    ],
)
def test_keys_to_probe_are_those_of_the_sampler_and_no_sampler_is_iterated(orders, keys):
    assert probe_indices(Planted(nothing), 4, **orders) == keys
    for order in orders.values():
        inner = getattr(order, "sampler", order)
        assert not isinstance(inner, Counting) or inner.iterated == 0
    if keys is None:
        assert probe_indices(Planted(nothing), 4, **orders, peek=True) in (NAMES, ["a", "b"])


def test_what_cannot_be_read_has_no_cost():
    def fail():
        raise ValueError("broken")

    assert measure_samples(Planted(fail)) is None
    assert measure_samples(Planted(nothing, length=0)) is None


def test_further_samples_are_read_one_by_one_and_leave_no_trace():
    dataset, watch = Planted(lambda: random.random() + np.random.random()), DrawWatch()
    samples = further_samples(dataset, 7)
    assert dataset.read == []
    assert next(samples)[1] == 2
    assert dataset.read == [2]
    assert [index for _, index in samples] == [8, 14, 20, 25, 31, 37]
    assert not watch.drew()


def test_further_samples_end_at_the_budget_or_where_one_cannot_be_read():
    ticks = iter([0.0, 0.0, 0.1, 0.2])
    dataset = Planted(lambda: None)
    assert len(list(further_samples(dataset, 7, budget_s=0.2, clock_s=lambda: next(ticks)))) == 2

    def fail():
        raise OSError("gone")

    assert list(further_samples(Planted(fail), 7)) == []
    assert list(further_samples(Planted(fail, length=0), 7)) == []


def test_the_size_of_a_sample_is_that_of_its_tensors():
    measured = measure_samples(Planted(nothing))
    assert measured is not None
    assert measured.size_bytes == 4 * 4 + 8


def test_queueing_is_read_from_the_kernel_or_is_nothing(tmp_path):
    file = tmp_path / "schedstat"
    file.write_text("21001 60109 1\n")
    assert queued_s(file) == pytest.approx(60109e-9)
    file.write_text("")
    assert queued_s(file) == queued_s(tmp_path / "absent") == 0


def test_each_turn_of_the_thread_trial_reads_every_sample_once():
    data = Planted(nothing)
    ticks = iter([0, 4, 4, 6, 6, 9, 9, 12, 12, 17, 17, 19])
    speedup = thread_speedup(data.__getitem__, [1, 2, 3], clock_s=lambda: next(ticks))
    assert speedup == 3 / 2  # the best of (4, 3, 5) by the best of (2, 3, 2)
    assert sorted(data.read) == sorted([1, 2, 3] * 6)


def test_two_threads_wait_in_half_the_time():
    # The bound is far from 2, so that it holds on a machine whose CPUs are busy.
    assert thread_speedup(lambda _: sleep(), range(8)) > 1.3


@pytest.mark.parametrize("work", [sleep, compute, nothing, draw])
def test_looking_leaves_the_random_state_as_it_was(work):
    watch = DrawWatch()
    look = look_at(Planted(work), default_collation=True, transformed=False)
    assert not watch.drew()
    assert look.draws == (work is draw)


def test_a_foreign_dataset_is_read_by_no_other_thread():
    import threading

    threads = set()
    data = Planted(lambda: threads.add(threading.get_ident()))
    look = look_at(data, default_collation=True, transformed=False)
    assert threads == {threading.get_ident()}
    assert look.thread_speedup is None


# What follows from it


@pytest.mark.parametrize(
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


@pytest.mark.parametrize(
    ("computing", "measured", "about", "workers", "words"),
    [
        (2, cost(wall_ms=5.5, cpu_ms=0.4), {}, 23, "waits 5.1 of its 5.5 ms"),
        (8, cost(wall_ms=4, cpu_ms=1.9), {}, 17, "8 CPUs feed 17"),
        (8, cost(wall_ms=5.5, cpu_ms=0.4), {}, 64, "no more than 64"),
        (2, cost(wall_ms=5000, cpu_ms=0), {}, 64, "no more than 64"),
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
    about = {"tasks": None, "memory": memory(), "ranks": 1, "forked": True, **about}
    count, why = workers_that_wait(computing, measured, **about)
    assert count == workers
    assert words in why


@given(
    computing=st.integers(1, 64),
    cpu_ms=st.floats(0, 100),
    wait_ms=st.floats(0, 1000),
    more_ms=st.floats(0, 1000),
)
def test_longer_waits_never_get_fewer_workers(computing, cpu_ms, wait_ms, more_ms):
    about = {"tasks": None, "memory": memory(), "ranks": 1, "forked": True}
    short = cost(wall_ms=cpu_ms + wait_ms, cpu_ms=cpu_ms)
    long = cost(wall_ms=cpu_ms + wait_ms + more_ms, cpu_ms=cpu_ms)
    few, many = (workers_that_wait(computing, c, **about)[0] for c in (short, long))
    assert computing <= few <= many <= 64


@pytest.mark.parametrize(
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
    arguments = {
        "stage": "train",
        "cpu": cpus(2),
        "memory": memory(),
        "accelerator": "cpu",
        "sample_bytes": 600_000,
        "batch_size": 32,
        "dataset_length": 512,
        "iterable": False,
        "batched_fetch": False,
        "suited": ("workers", "as planted"),
        "cost": cost(wall_ms=5.5, cpu_ms=0.4),
        "split": True,
        "platform": "linux",
    }
    options = options or LoaderOptions(executor="auto")
    return plan_loader(options, **{**arguments, **changes})


def test_the_plan_says_that_a_sample_waits():
    made = planned()
    assert (made.executor, made.num_workers, made.prefetch_factor) == ("workers", 23, None)
    assert "waits 5.1 of its 5.5 ms" in made.explain()
    assert made.limits == ()


@pytest.mark.parametrize(
    ("changes", "workers"),
    [
        ({"cost": None}, 2),
        ({"cost": cost(wall_ms=5, cpu_ms=5)}, 2),
        ({"split": False}, 16),
        ({"dataset_length": 0}, 0),
        ({"suited": ("torch", "no shared memory")}, 2),
        ({"suited": ("inline", "cheap")}, 0),
        ({"suited": ("sidecar", "images")}, 23),
        ({"stage": "val"}, 12),
        ({"memory": memory(soft=64)}, 8),
    ],
)
def test_only_waiting_samples_of_the_engine_get_more_workers_than_cpus(changes, workers):
    assert planned(**changes).num_workers == workers


def test_the_users_workers_win_and_hear_of_samples_that_wait():
    few = planned(LoaderOptions(executor="auto", num_workers=2))
    assert few.num_workers == 2
    assert 'Set num_workers="auto"' in few.limits[0]
    many = planned(LoaderOptions(executor="auto", num_workers=30))
    assert many.num_workers == 30
    assert many.limits == ()
    computing = planned(
        LoaderOptions(executor="auto", num_workers=30), cost=cost(wall_ms=5, cpu_ms=5)
    )
    assert "more than the CPUs" in computing.limits[0]


def look(**changes):
    about = {
        "stream": False,
        "rows": False,
        "images": False,
        "pipelines": False,
        "draws": False,
        "cost": cost(wall_ms=5, cpu_ms=5),
        "thread_speedup": None,
        "split": True,
        "shared_memory": True,
    }
    return DatasetLook(**{**about, **changes})


@pytest.mark.parametrize(
    ("changes", "workers", "name"),
    [
        ({}, "auto", "workers"),
        ({"cost": None}, "auto", "workers"),
        ({"cost": cost(wall_ms=5, cpu_ms=0.1)}, "auto", "workers"),
        ({"cost": cost(wall_ms=0.001, cpu_ms=0.001)}, "auto", "inline"),
        ({"cost": cost(wall_ms=0.001, cpu_ms=0.001), "draws": True}, "auto", "workers"),
        ({"stream": True}, "auto", "workers"),
        ({"rows": True}, "auto", "gather"),
        ({"shared_memory": False}, "auto", "torch"),
        ({}, 0, "torch"),
        ({"draws": True}, 0, "inline"),
        ({"pipelines": True}, 0, "inline"),
        ({"images": True}, "auto", "sidecar"),
        ({"images": True, "thread_speedup": 2.0}, "auto", "sidecar"),
        ({"images": True, "thread_speedup": 1.5}, "auto", "workers"),
        (
            {"images": True, "thread_speedup": 1.5, "cost": cost(wall_ms=5, cpu_ms=1)},
            "auto",
            "sidecar",
        ),
        ({"thread_speedup": 2.0}, "auto", "workers"),
    ],
)
def test_the_executor_follows_from_the_look(changes, workers, name):
    chosen, why = suited_executor(look(**changes), workers=workers, batch_size=16)
    assert chosen == name
    assert why


@pytest.mark.parametrize(
    ("size_bytes", "batch_size", "name"),
    [
        (100, 16, "inline"),
        (30_000, 16, "inline"),
        (100_000, 16, "workers"),
        (100_000, 2, "inline"),
        (2**30, None, "inline"),
    ],
)
def test_copying_large_samples_into_a_batch_counts_as_work(size_bytes, batch_size, name):
    cheap = cost(wall_ms=0.001, cpu_ms=0.001, size_bytes=size_bytes)
    assert suited_executor(look(cost=cheap), workers="auto", batch_size=batch_size)[0] == name


# The loader alone


def test_a_loader_finds_by_itself_that_its_samples_wait():
    data = Planted(sleep)
    loader = FastDataLoader(data, batch_size=4, executor="auto")
    assert loader.executor == "workers"
    computing = workers_for("train", read_limit(), on_cpu=True, batches=10)[0]
    assert loader.num_workers > computing
    assert loader.plan is not None
    assert "waits" in loader.plan.explain()
    try:
        for _ in range(2):
            assert torch.cat([index for _, index in loader]).tolist() == list(range(40))
    finally:
        loader.close()


def read_limit() -> CpuLimit:
    from lightning_fastdata.host.cpu import read_cpu_limit

    return read_cpu_limit()


@pytest.mark.parametrize("workers", [0, 1])
def test_the_workers_given_to_a_loader_always_win(workers):
    loader = FastDataLoader(Planted(sleep), batch_size=4, executor="auto", num_workers=workers)
    assert loader.num_workers == workers
    assert loader.executor == ("workers" if workers else "torch")
    assert loader.persistent_workers == bool(workers)


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
@pytest.mark.parametrize("work", [nothing, sleep])
def test_a_loader_chooses_around_whatever_else_is_set(settings, work):
    settings = {"batch_size": 2, **settings}
    data = Planted(work, length=3)
    loader = FastDataLoader(data, executor="auto", **settings)
    plain = {name: value for name, value in settings.items() if "batch" in name or "coll" in name}
    expected = [repr(batch) for batch in torch.utils.data.DataLoader(data, **plain)]
    try:
        assert [repr(batch) for batch in loader] == expected
    finally:
        loader.close()


def test_without_a_choice_a_loader_is_as_torchs():
    loader = FastDataLoader(TensorDataset(torch.arange(4)))
    assert (loader.num_workers, loader.persistent_workers, loader.executor) == (0, False, "torch")
    assert loader.plan is None
    assert loader.worker_nice == 0
