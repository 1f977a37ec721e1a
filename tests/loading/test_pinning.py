"""A thread copies what workers made into page-locked memory: the training does not wait for it."""

from __future__ import annotations

import threading
from contextlib import contextmanager

import pytest
import torch
from rig.late_cuda import late_cuda
from torch.utils.data import Dataset, IterableDataset, get_worker_info

from lightning_fastdata import FastDataLoader, prefetch
from lightning_fastdata.device.lookahead import is_ready
from lightning_fastdata.errors import FastDataWarning

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
    with late_cuda("late-side") as cuda:
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


class Tells(Rows):
    """Says when its last sample is read."""

    def __init__(self):
        self.all_read = torch.multiprocessing.get_context("fork").Event()

    def __getitem__(self, i):
        if i == len(self) - 1:
            self.all_read.set()
        return super().__getitem__(i)


class TellsInStream(Tells, IterableDataset):
    def __iter__(self):
        return map(self.__getitem__, range(len(self)))


@pytest.mark.parametrize("dataset", [Tells(), TellsInStream()], ids=["rows", "stream"])
def test_batches_that_are_made_are_pinned_before_they_are_asked_for(dataset):
    begun = [threading.Event() for _ in range(BATCHES)]
    with watched_pins(lambda batch: begun[batch].set()):
        loader = loader_of(dataset, prefetch_factor=BATCHES, multiprocessing_context="fork")
        batches = iter(loader)
        next(batches)
        assert dataset.all_read.wait(LONG_S)
        next(batches)
        assert all(each.wait(LONG_S) for each in begun[2:4])
        loader.close()


@pytest.mark.parametrize("dataset", [Rows(), Stream()], ids=["rows", "stream"])
def test_a_batch_is_ready_when_it_is_pinned_and_not_before(dataset):
    begun, go = threading.Event(), threading.Event()

    def held(batch):
        if batch == 1:
            begun.set()
            assert go.wait(LONG_S)

    with watched_pins(held):
        loader = loader_of(dataset)
        batches = iter(loader)
        next(batches)
        while not begun.is_set():
            assert not is_ready(batches)
        assert not is_ready(batches)
        go.set()
        while not is_ready(batches):
            pass
        assert next(batches)[0, 0] == BATCH
        loader.close()


@pytest.mark.parametrize("device", [0, 1])
def test_the_thread_pins_for_the_device_of_the_training(device):
    with watched_pins() as (_, seen):
        torch.cuda.set_device(device)
        loader = loader_of(Rows())
        list(loader)
        loader.close()
        assert {index for _, index in seen} == {device}


def given(dataset, **options):
    """Return what each request of two epochs gave, errors included."""
    loader, found = FastDataLoader(dataset, BATCH, num_workers=1, **options), []
    for _ in range(2):
        batches = iter(loader)
        while True:
            try:
                found.append(next(batches).tolist())
            except StopIteration:
                break
            except ValueError as error:
                found.append(str(error).partition(" while")[0])
    loader.close()
    return found


@pytest.mark.parametrize(
    ("dataset", "policy"), [(Rows(), "raise"), (BadRow(), "raise"), (BadRow(), "skip")]
)
@pytest.mark.filterwarnings("ignore:.*sample:lightning_fastdata.errors.FastDataWarning")
def test_batches_errors_and_the_end_come_as_without_it(dataset, policy):
    plain = given(dataset, on_bad_sample=policy)
    with watched_pins():
        assert given(dataset, on_bad_sample=policy, pin_memory=True) == plain


def test_streams_come_as_without_it():
    plain = given(Stream())
    with watched_pins():
        assert given(Stream(), pin_memory=True) == plain


def fails_at_2(error):
    def fails(batch):
        if batch == 2:
            raise error

    return fails


def test_an_error_of_the_copy_is_raised_at_its_batch():
    with watched_pins(fails_at_2(RuntimeError("CUDA error: unspecified launch failure"))):
        loader = loader_of(Rows())
        batches = iter(loader)
        assert [next(batches)[0, 0].item() for _ in range(2)] == [0, 2]
        with pytest.raises(RuntimeError, match="launch failure"):
            next(batches)
        loader.close()


@pytest.mark.parametrize("executor", ["workers", "inline"])
def test_a_batch_without_room_in_page_locked_memory_comes_in_ordinary_memory(executor):
    with watched_pins(fails_at_2(RuntimeError("CUDA error: out of memory"))):
        loader = FastDataLoader(Rows(), BATCH, num_workers=1, executor=executor, pin_memory=True)
        with pytest.warns(FastDataWarning, match="no page-locked memory"):
            batches = list(loader)
        assert [batch[0, 0].item() for batch in batches] == list(range(0, BATCH * BATCHES, BATCH))
        assert [batch.is_pinned() for batch in batches] == [n != 2 for n in range(BATCHES)]
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
