"""What ``executor="auto"`` chooses, where anybody would say the same."""

from __future__ import annotations

import os

import numpy as np
import pytest
import torch
from rig.machine import sleep, work
from rig.virtual_crew import on_machine
from samples import Samples
from torch.utils.data import Dataset

from lightning_fastdata import FastDataLoader, FastDataModule

BATCH = 16


on_a_machine = pytest.mark.usefixtures("machine")


class Reads(Dataset):
    """Samples that compute and wait for so many milliseconds, and say which process read them."""

    def __init__(self, computes_ms=None, waits_ms=None, length=96):
        self.computes_ms, self.waits_ms, self.length = computes_ms, waits_ms, length
        self.row = torch.zeros(4)

    def __len__(self):
        return self.length

    def __getitem__(self, index):
        if self.computes_ms is not None:
            work(self.computes_ms(index) / 1000)
        if self.waits_ms is not None:
            sleep(self.waits_ms(index) / 1000)
        return self.row, os.getpid()


class InBatches(Reads):
    def __getitems__(self, indices):
        return [(self.row, os.getpid()) for _ in indices]


TABLE = np.zeros((1024, 8), np.float32)


def padded(samples):
    rows = torch.nn.utils.rnn.pad_sequence([row for row, _ in samples], batch_first=True)
    return rows, torch.tensor([process for _, process in samples])


def slow_collation(samples):
    work(0.03)
    return padded(samples)


def loaders(data, batch_size=BATCH, **settings):
    """The two ways to an automatic loader."""
    yield FastDataLoader(data, batch_size, **{"num_workers": "auto", **settings})
    yield FastDataModule.from_datasets(data, batch_size=batch_size, **settings).train_dataloader()


def readers(loader):
    """The processes that read the samples of an epoch."""
    try:
        return {int(process) for _, processes in loader for process in processes}
    finally:
        loader.close()


@on_a_machine
@pytest.mark.parametrize(
    ("data", "settings"),
    [
        (Reads(), {}),
        (Reads(), {"batch_size": 1}),
        (InBatches(length=512), {"batch_size": 256}),
        (Samples(lambda i: (torch.from_numpy(TABLE[i]), os.getpid()), 1024), {"batch_size": 32}),
        (Samples(lambda _: (torch.rand(4), os.getpid()), 96), {"batch_size": 4}),
    ],
    ids=["rows", "single rows", "__getitems__", "table", "draws"],
)
def test_samples_that_cost_next_to_nothing_are_read_by_the_training_process(data, settings):
    for loader in loaders(data, **settings):
        assert loader.num_workers == 0
        assert readers(loader) == {os.getpid()}


class Level(Dataset):
    """Rows of a number that the training raises."""

    number = 0

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> int:
        return self.number


@pytest.mark.parametrize("settings", [{}, {"collate_fn": list}], ids=["copied", "as they are"])
def test_workers_that_the_program_keeps_read_what_the_first_epoch_began_with(settings):
    data = Level()
    for loader in loaders(data, persistent_workers=True, **settings):
        first = data.number
        for _ in range(3):
            for batch in loader:
                assert set(map(int, batch)) == {first}
                data.number += 1
        loader.close()


def test_a_collate_fn_that_may_hand_out_the_datasets_memory_gives_copies_whoever_calls_it() -> None:
    data = Reads()
    with on_machine():  # on which samples cost nothing, however long this one makes them wait
        made = list(loaders(data, collate_fn=list))
    for loader in made:
        assert loader.num_workers == 1
        processes = set()
        for batch in loader:
            rows, (process, *_) = zip(*batch, strict=True)
            assert not torch.stack(rows).any()
            rows[0].add_(1)
            processes.add(process)
        assert os.getpid() in processes
        loader.close()
    assert not data.row.any()


@on_a_machine
@pytest.mark.parametrize(
    ("data", "settings"),
    [
        (Reads(waits_ms=lambda _: 20), {}),
        # A few samples take as long as all the others.
        (Reads(waits_ms=lambda index: 200 if index % 24 == 11 else 0, length=960), {}),
        (Reads(waits_ms=lambda index: 40 if index // 16 % 4 == 1 else 0, length=960), {}),
    ],
    ids=["all wait", "stragglers", "bursts"],
)
def test_samples_that_wait_get_more_workers_than_there_are_cpus(data, settings):
    for loader in loaders(data, **settings):
        assert loader.executor == "workers"
        assert loader.num_workers > 2
        loader.close()


needs_cpus = pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="has one CPU")


@on_a_machine
@needs_cpus
@pytest.mark.parametrize(
    ("data", "settings"),
    [
        (Reads(computes_ms=lambda _: 5), {}),
        (Reads(computes_ms=lambda index: 60 if index % 12 == 5 else 0, length=480), {}),
        (Reads(), {"collate_fn": slow_collation}),
    ],
    ids=["all compute", "stragglers", "collation"],
)
def test_batches_that_take_long_to_make_are_made_by_workers(data, settings):
    for loader in loaders(data, **settings):
        assert loader.executor == "workers"
        assert loader.num_workers >= 1
        loader.close()
