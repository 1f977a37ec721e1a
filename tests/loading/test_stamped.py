"""Stamps from torch's own loader: what they tell, and that nobody but their reader notices."""

from __future__ import annotations

import gc
from collections import deque
from pathlib import Path

import numpy as np
import pytest
import torch
from alike import alike
from insight.cut_waits import Cutter, total
from torch.utils.data import (
    Dataset,
    IterableDataset,
    TensorDataset,
    default_collate,
    get_worker_info,
)
from torch.utils.data.datapipes.iter import IterableWrapper
from virtual_time import virtual_time

from lightning_fastdata.batches.staged import StagedBatch
from lightning_fastdata.host import clock
from lightning_fastdata.loading.loader import FastDataLoader
from lightning_fastdata.loading.stamped import Envelope
from lightning_fastdata.stamps.batch_stamps import BatchStamps, TaskWatch


class Draws(Dataset):
    """Samples of many types, from torch's, NumPy's and the dataset's own randomness."""

    def __init__(self, length=24):
        self.length = length

    def __len__(self):
        return self.length

    def __getitem__(self, i):
        return {
            "i": i,
            "torch": torch.rand(3),
            "numpy": np.random.rand(2),
            "text": f"sample {i}",
            "worker": -1 if get_worker_info() is None else get_worker_info().id,
            "dataset": ""
            if get_worker_info() is None
            else type(get_worker_info().dataset).__name__,
        }


class Batched(Draws):
    """Answers for several samples at once, and says so."""

    def __getitems__(self, indices):
        return [{**self[i], "together": len(indices)} for i in indices]


class Stream(IterableDataset):
    def __init__(self, length=20):
        self.start, self.stop = 0, length

    def __iter__(self):
        # Not a generator: what is drawn here is drawn when the iterator is made.
        first = torch.rand(1)
        return iter([(i, first, torch.rand(2)) for i in range(self.start, self.stop)])


class LongStream(Stream):
    def __len__(self):
        return 20


def shard(worker_id):
    info = get_worker_info()
    half = info.dataset.stop // info.num_workers
    info.dataset.start, info.dataset.stop = half * worker_id, half * (worker_id + 1)


def epochs(dataset, *, stamp, times=2, step_s=0.0, **options):
    """Return all batches of some epochs, and the stamps; each batch is used for a while."""
    torch.manual_seed(5)
    np.random.seed(5)
    records = deque()
    loader = FastDataLoader(dataset, **{"executor": "torch", **options})
    if stamp:
        loader.record_stamps(records)
    batches = []
    for _ in range(times):
        for batch in loader:
            batches.append(batch)
            clock.sleep(step_s)
    loader.close()
    return batches, list(records), torch.rand(1).item()


def opened(batch):
    return [batch.batch, batch.stage] if isinstance(batch, StagedBatch) else batch


WORKERS = [
    {"num_workers": 0},
    {"num_workers": 2},
    {"num_workers": 1, "persistent_workers": True},
    {"num_workers": 1, "multiprocessing_context": "spawn", "persistent_workers": True},
]


@pytest.mark.cases(2)
@pytest.mark.parametrize("workers", WORKERS, ids=["inline", "workers", "persistent", "spawn"])
@pytest.mark.parametrize(
    ("dataset", "options"),
    [
        (Draws(), {"batch_size": 5, "shuffle": True}),
        (Draws(), {"batch_size": None}),
        (Draws(), {"batch_size": 5, "staged": "train"}),
        (Batched(), {"batch_size": 5, "drop_last": True}),
        (Stream(), {"batch_size": 6}),
        (LongStream(), {"batch_size": None}),
    ],
    ids=["shuffled", "single", "staged", "getitems", "stream", "single stream"],
)
def test_batches_order_and_draws_are_the_same_with_stamps(dataset, options, workers):
    if workers.get("multiprocessing_context") == "spawn" and not isinstance(dataset, Batched):
        pytest.skip("one data set is enough for what takes seconds to start")
    plain, none, after = epochs(dataset, stamp=False, **options, **workers)
    stamped, records, after_stamped = epochs(dataset, stamp=True, **options, **workers)
    assert alike([*map(opened, plain)], [*map(opened, stamped)])
    assert after == after_stamped
    assert none == []
    assert len(records) == len(stamped)
    assert [stamps.number for stamps in records] == list(range(1, len(records) + 1))
    assert [stamps.first for stamps in records].count(True) == 2


@pytest.mark.parametrize("workers", [0, 2])
def test_each_stamp_lies_within_its_batch_and_counts_its_samples(workers):
    _, records, _ = epochs(Draws(), stamp=True, batch_size=5, num_workers=workers)
    assert [stamps.samples for stamps in records] == [5, 5, 5, 5, 4] * 2
    for stamps in records:
        (task,) = stamps.tasks
        assert task.process in (range(workers) if workers else [-1])
        assert task.began_ns <= task.ended_ns <= stamps.delivered_ns
        assert stamps.requested_ns <= stamps.delivered_ns
        assert task.read_ns + task.collate_ns <= task.ended_ns - task.began_ns
        assert task.slowest_ns <= task.read_ns
    assert {task.slowest_index for stamps in records for task in stamps.tasks} <= set(range(24))


def test_a_stream_is_numbered_in_its_worker_and_a_dropped_rest_is_in_no_batch():
    _, records, _ = epochs(
        Stream(22), stamp=True, batch_size=4, num_workers=2, worker_init_fn=shard, drop_last=True
    )
    assert [stamps.samples for stamps in records] == [4] * 8
    assert {stamps.tasks[0].slowest_index for stamps in records} <= set(range(8))


def test_datapipes_are_left_alone():
    batches, records, _ = epochs(IterableWrapper(range(6)).shuffle(), stamp=True, batch_size=3)
    assert sum(len(batch) for batch in batches) == 12
    assert records == []


@pytest.mark.parametrize("workers", [0, 1])
def test_recording_begins_and_ends_with_an_iteration(workers):
    first, second = deque(), deque()
    loader = FastDataLoader(
        TensorDataset(torch.arange(8)), 2, num_workers=workers, persistent_workers=workers > 0,
        executor="torch",
    )  # fmt: skip
    running = iter(loader)
    next(running)
    loader.record_stamps(first)
    assert [len(list(running)), len(first)] == [3, 0]
    assert [len(list(loader)), len(first)] == [4, 4]
    running = iter(loader)
    next(running)
    loader.record_stamps(second)
    next(running)
    assert [len(first), len(second)] == [5, 1]
    loader.record_stamps(None)
    list(running)
    list(loader)
    assert [len(first), len(second)] == [5, 1]
    loader.close()


def test_a_failing_sample_fails_as_ever_and_spoils_no_stamp():
    class Fails(Draws):
        def __getitem__(self, i):
            if i == 6:
                raise ValueError("sample 6")
            return i

    records = deque()
    loader = FastDataLoader(Fails(12), 4, executor="torch")
    loader.record_stamps(records)
    batches = iter(loader)
    next(batches)
    with pytest.raises(ValueError, match="sample 6"):
        next(batches)
    next(batches)
    assert [stamps.samples for stamps in records] == [4, 4]


def open_schedstats():
    gc.collect()
    return sum(
        path.readlink().name == "schedstat"
        for path in Path("/proc/self/fd").iterdir()
        if path.is_symlink()
    )


def test_a_watch_that_is_dropped_closes_its_file():
    before = open_schedstats()
    watches = [TaskWatch(0) for _ in range(20)]
    assert open_schedstats() == before + 20
    del watches
    assert open_schedstats() == before


class Planted(Dataset):
    def __init__(self, *, sleep_s=0.0, work=None, slow=-1):
        self.sleep_s, self.work, self.slow = sleep_s, work, slow

    def __len__(self):
        return 192

    def __getitem__(self, index):
        clock.sleep(0.4 if index == self.slow else self.sleep_s)
        if self.work is not None:
            self.work(0.003)
        return torch.zeros(10)


def cut(dataset, **options):
    _, records, _ = epochs(dataset, stamp=True, times=1, batch_size=16, **options)
    cutter = Cutter()
    return records, [cutter.cut(stamps) for stamps in records]


@pytest.mark.parametrize("cause", ["read_blocked", "read_cpu", "collate"])
def test_the_planted_cause_takes_all_of_the_waits(cause):
    with virtual_time() as time:

        def slow_collate(samples):
            time.work(0.03)
            return default_collate(samples)

        dataset, options = {
            "read_blocked": (Planted(sleep_s=0.004), {}),
            "read_cpu": (Planted(work=time.work), {}),
            "collate": (Planted(), {"collate_fn": slow_collate}),
        }[cause]
        _, waits = cut(dataset, num_workers=0, **options)
    assert total(waits).shares()[cause] == pytest.approx(1.0)


class Pins:
    def __init__(self, where="host"):
        self.where = where

    def pin_memory(self):
        clock.sleep(0.01)
        return Pins("pinned")


def test_the_pin_thread_passes_an_envelope_through_and_is_stamped():
    from torch.utils.data._utils.pin_memory import pin_memory

    with virtual_time() as time:
        watch = TaskWatch(0)
        watch.begin()
        envelope = pin_memory(Envelope({"x": Pins(), "y": 3}, watch.end()))
        time.advance(1000)
        given_ns = time.monotonic_ns()
    assert (envelope.batch["x"].where, envelope.batch["y"]) == ("pinned", 3)
    asked_ns, pinned_ns = envelope.task.ended_ns, envelope.pinned_ns
    assert pinned_ns[1] - pinned_ns[0] == 10_000_000
    stamps = BatchStamps(1, 1, asked_ns, given_ns, (envelope.task,), False, pinned_ns)
    parts = Cutter().cut(stamps).parts
    assert (parts.pin_ms, parts.total_ms) == (10.0, 10.001)
