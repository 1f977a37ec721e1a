"""A thread copies what workers and threads have made into page-locked memory."""

from __future__ import annotations

import threading
from contextlib import contextmanager

import pytest
import torch
from misses import each
from rig.late_cuda import late_cuda
from torch.utils.data import Dataset, IterableDataset, get_worker_info

from lightning_fastdata import FastDataLoader, prefetch
from lightning_fastdata.device.prefetch import is_ready
from lightning_fastdata.errors import FastDataWarning
from lightning_fastdata.executors import standby
from lightning_fastdata.loading.loader import Training

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


def columns():
    """Return the same samples as one tensor, which is gathered."""
    return torch.stack([Rows()[i] for i in range(BATCH * BATCHES)])


def loader_of(dataset, executor="workers", **options):
    how = {"num_workers": 1, "executor": executor, "pin_memory": True, **options}
    return FastDataLoader(dataset, BATCH, **how)


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


MADE_ASIDE = pytest.mark.parametrize(
    ("dataset", "executor"),
    [(Rows(), "workers"), (Stream(), "workers"), (columns(), "gather")],
    ids=["rows", "stream", "columns"],
)


@MADE_ASIDE
@pytest.mark.parametrize("way", [in_loop, ahead])
def test_a_step_is_launched_before_the_batch_behind_it_is_pinned(dataset, executor, way):
    launched = [threading.Event() for _ in range(BATCHES)]
    late = []

    def behind_the_step_before(batch):
        if batch and not launched[batch - 1].wait(LONG_S):
            late.append(batch)

    with watched_pins(behind_the_step_before) as (_, seen):
        loader = loader_of(dataset, executor)
        for number, batch in enumerate(way(loader)):
            assert batch.is_cuda if way is ahead else batch.is_pinned()
            launched[number].set()
        loader.close()
        assert len(seen) == BATCHES
        assert not late
        assert threading.main_thread() not in [thread for thread, _ in seen]


class Notes(Rows):
    """Notes what is read."""

    def __init__(self):
        self.seen = []

    def __getitem__(self, i):
        self.seen.append(("read", i // BATCH))
        return super().__getitem__(i)


@pytest.mark.parametrize("executor", ["inline", "torch"])
@pytest.mark.parametrize("way", [in_loop, ahead])
def test_without_workers_nothing_is_done_for_a_batch_before_the_step_before_it(executor, way):
    dataset = Notes()
    with watched_pins(lambda batch: dataset.seen.append(("pinned", batch))):
        loader = FastDataLoader(dataset, BATCH, executor=executor, pin_memory=True)
        for number, _ in enumerate(way(loader)):
            dataset.seen.append(("step", number))
    per_batch = [*["read"] * BATCH, "pinned", "step"]
    assert dataset.seen == [(what, number) for number in range(BATCHES) for what in per_batch]


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


@MADE_ASIDE
def test_a_batch_is_ready_when_it_is_pinned_and_not_before(dataset, executor):
    begun, go = threading.Event(), threading.Event()

    def held(batch):
        if batch == 1:
            begun.set()
            assert go.wait(LONG_S)

    with watched_pins(held):
        loader = loader_of(dataset, executor)
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


@pytest.mark.parametrize("way", [in_loop, ahead])
def test_what_is_read_while_workers_stand_by_is_pinned_when_it_is_its_turn(monkeypatch, way):
    for bound in ("_WITHIN_S", "_CHEAP_S", "_TIMED_S"):  # workers have no reason to read
        monkeypatch.setattr(standby, bound, LONG_S)
    seen = []
    with watched_pins(lambda batch: seen.append(("pinned", batch))):
        loader = loader_of(
            Rows(), persistent_workers="unchanged", training=Training(chosen=True, standby=True)
        )
        for number, batch in enumerate(way(loader)):
            assert batch.is_cuda if way is ahead else batch.is_pinned()
            seen.append(("step", number))
        loader.close()
    assert seen == [(what, number) for number in range(BATCHES) for what in ("pinned", "step")]


@MADE_ASIDE
@pytest.mark.parametrize("device", [0, 1])
def test_the_thread_pins_for_the_device_of_the_training(dataset, executor, device):
    with watched_pins() as (_, seen):
        torch.cuda.set_device(device)
        loader = loader_of(dataset, executor)
        list(loader)
        loader.close()
        assert {index for _, index in seen} == {device}


def given(dataset, workers=1, **options):
    """Return what each request of two epochs gave, errors included."""
    loader, found = FastDataLoader(dataset, BATCH, num_workers=workers, **options), []
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
    ("dataset", "options"),
    [
        (Rows(), {}),
        (BadRow(), {}),
        (BadRow(), {"on_bad_sample": "skip"}),
        (Stream(), {}),
        (columns()[:-1], {"executor": "gather"}),
        (columns()[:-1], {"executor": "gather", "workers": 0, "drop_last": True}),
    ],
    ids=["rows", "bad row", "skipped row", "stream", "columns", "columns in this thread"],
)
@pytest.mark.filterwarnings("ignore:.*sample:lightning_fastdata.errors.FastDataWarning")
def test_batches_errors_and_the_end_come_as_without_it(dataset, options):
    plain = given(dataset, **options)
    with watched_pins():
        assert given(dataset, pin_memory=True, **options) == plain


@MADE_ASIDE
@each("pinned", [False, True])
@each("persistent", [False, True])
def test_an_epoch_that_is_left_in_its_middle_leaves_nothing_in_the_next(
    dataset, executor, pinned, persistent
):
    with watched_pins():
        how = {"pin_memory": pinned, "persistent_workers": persistent}
        loader = loader_of(dataset, executor, **how)
        for _ in range(3):
            batches = iter(loader)
            assert [next(batches)[0, 0].item() for _ in range(2)] == [0, BATCH]
        assert [batch[0, 0].item() for batch in loader] == list(range(0, BATCH * BATCHES, BATCH))
        loader.close()


def fails_at_2(error):
    def fails(batch):
        if batch == 2:
            raise error

    return fails


@MADE_ASIDE
def test_an_error_of_the_copy_is_raised_at_its_batch(dataset, executor):
    with watched_pins(fails_at_2(RuntimeError("CUDA error: unspecified launch failure"))):
        loader = loader_of(dataset, executor)
        batches = iter(loader)
        assert [next(batches)[0, 0].item() for _ in range(2)] == [0, 2]
        with pytest.raises(RuntimeError, match="launch failure"):
            next(batches)
        assert next(batches)[0, 0] == 3 * BATCH
        loader.close()


@pytest.mark.parametrize("executor", ["workers", "inline", "gather"])
def test_a_batch_without_room_in_page_locked_memory_comes_in_ordinary_memory(executor):
    with watched_pins(fails_at_2(RuntimeError("CUDA error: out of memory"))):
        loader = loader_of(columns() if executor == "gather" else Rows(), executor)
        with pytest.warns(FastDataWarning, match="no page-locked memory"):
            batches = list(loader)
        assert [batch[0, 0].item() for batch in batches] == list(range(0, BATCH * BATCHES, BATCH))
        assert [batch.is_pinned() for batch in batches] == [n != 2 for n in range(BATCHES)]
        loader.close()


@MADE_ASIDE
def test_stamps_tell_when_a_batch_was_pinned(dataset, executor):
    with watched_pins():
        loader = loader_of(dataset, executor)
        records = []
        loader.record_stamps(records)
        list(loader)
        loader.close()
    for stamps in records:
        began_ns, ended_ns = stamps.pinned_ns
        made_ns = max(task.ended_ns for task in stamps.tasks)
        assert executor == "gather" or made_ns <= began_ns
        assert began_ns <= ended_ns
        assert made_ns <= max(began_ns, stamps.requested_ns)
        assert ended_ns <= stamps.delivered_ns
