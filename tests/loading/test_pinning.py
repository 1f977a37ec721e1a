"""A thread copies what workers made into page-locked memory: the training does not wait for it."""

from __future__ import annotations

import itertools
import threading
from contextlib import contextmanager

import pytest
import torch
from rig.late_cuda import late_cuda
from torch.utils.data import Dataset, IterableDataset, get_worker_info

from lightning_fastdata import FastDataLoader, prefetch
from lightning_fastdata.errors import DatasetError

torch.set_num_threads(1)
BATCH, BATCHES = 2, 6
LONG_S = 20
"""Ends a test that would otherwise wait for ever."""


class Rows(Dataset):
    """Sample ``i`` is more of ``i`` than is copied out of a slot for its size."""

    def __len__(self):
        return BATCH * BATCHES

    def __getitem__(self, i):
        return torch.full((8192,), i)


class BadRow(Rows):
    def __getitem__(self, i):
        if i == 5:
            raise ValueError("no such row")
        return super().__getitem__(i)


class Stream(IterableDataset):
    def __iter__(self):
        assert get_worker_info().num_workers == 1
        return map(Rows().__getitem__, range(BATCH * BATCHES))


def loader_of(dataset, **options):
    return FastDataLoader(
        dataset, BATCH, num_workers=1, executor="workers", pin_memory=True, **options
    )


@contextmanager
def watched_pins(before=lambda batch: None):
    """Pretend a CUDA, and yield the thread and device of each copy into page-locked memory."""
    with late_cuda("late") as cuda:
        pin, seen = cuda.pin, []

        def watched(tensor):
            before(int(tensor.flatten()[0]) // BATCH)
            seen.append((threading.current_thread(), cuda.current_device()))
            return pin(tensor)

        cuda.pin = watched
        yield cuda, seen


def in_loop(loader):
    return loader


def ahead(loader):
    return prefetch(loader, "cuda")


@pytest.mark.parametrize("dataset", [Rows(), Stream()], ids=["rows", "stream"])
@pytest.mark.parametrize("way", [in_loop, ahead])
def test_a_step_is_launched_before_the_batch_behind_it_is_pinned(dataset, way):
    launched = [threading.Event() for _ in range(BATCHES)]
    late = []

    def behind_the_step_before(batch):
        if batch and not launched[batch - 1].wait(LONG_S):
            late.append(batch)

    with watched_pins(behind_the_step_before) as (_, seen):
        loader = loader_of(dataset)
        for number, batch in enumerate(way(loader)):
            assert batch.is_cuda if way is ahead else batch.is_pinned()
            launched[number].set()
        loader.close()
        assert len(seen) == BATCHES
        assert not late
        assert threading.main_thread() not in [thread for thread, _ in seen]


def test_a_batch_is_sent_ahead_as_soon_as_it_is_pinned():
    with watched_pins() as (cuda, seen):
        loader = loader_of(Rows(), prefetch_factor=BATCHES)
        batches = iter(prefetch(loader, "cuda"))
        ahead = []
        for number in range(BATCHES - 1):
            next(batches)
            settle(lambda n=number: len(seen) >= n + 2)
            ahead.append(batches.ahead)
        loader.close()
    assert ahead[2:] == [1] * len(ahead[2:])


def settle(condition):
    """Wait until other threads have come to a point."""
    for _ in itertools.takewhile(lambda _: not condition(), range(10**7)):
        threading.Event().wait(0.001)


@pytest.mark.parametrize("device", [0, 1])
def test_the_thread_pins_for_the_device_of_the_training(device):
    with watched_pins() as (_, seen):
        torch.cuda.set_device(device)
        loader = loader_of(Rows())
        list(loader)
        loader.close()
        assert {index for _, index in seen} == {device}


@pytest.mark.parametrize("dataset", [Rows(), BadRow(), Stream()], ids=["rows", "bad", "stream"])
@pytest.mark.parametrize("policy", ["raise", "skip"])
def test_batches_errors_and_the_end_come_as_without_it(dataset, policy):
    def given(*, pin_memory):
        loader = FastDataLoader(
            dataset, BATCH, num_workers=1, pin_memory=pin_memory, on_bad_sample=policy
        )
        for _ in range(2):
            try:
                for batch in loader:
                    yield batch.tolist()
            except DatasetError as error:
                yield str(error)
        loader.close()

    plain = list(given(pin_memory=False))
    with watched_pins():
        assert list(given(pin_memory=True)) == plain


def test_an_error_of_the_copy_is_raised_at_its_batch():
    def full(batch):
        if batch == 2:
            raise torch.OutOfMemoryError("no page-locked memory")

    with watched_pins(full):
        loader = loader_of(Rows())
        batches = iter(loader)
        assert [next(batches)[0, 0].item() for _ in range(2)] == [0, 2]
        with pytest.raises(torch.OutOfMemoryError, match="page-locked"):
            next(batches)
        loader.close()


def test_stamps_tell_when_a_batch_was_pinned():
    with watched_pins():
        loader = loader_of(Rows())
        records = []
        loader.record_stamps(records)
        list(loader)
        loader.close()
    for stamps in records:
        began_ns, ended_ns = stamps.pinned_ns
        assert max(task.ended_ns for task in stamps.tasks) <= began_ns <= ended_ns
        assert ended_ns <= stamps.delivered_ns
