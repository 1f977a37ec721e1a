"""A loader is modelled as it works: checked against the executor that it opens."""

from __future__ import annotations

from collections import deque

import albumentations as A
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from loading.planned import Stream
from misses import each
from rig.machine import sleep
from rig.virtual_crew import on_machine
from torch.utils.data import (
    DataLoader,
    Dataset,
    TensorDataset,
    default_collate,
)

from lightning_fastdata.augment.transform import as_batch_transform
from lightning_fastdata.loading.loader import FastDataLoader
from lightning_fastdata.loading.simulate import TrainingTimes
from lightning_fastdata.loading.source import setup_of

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")

HERE = {"cpus": 4.0, "step_cpus": 0.5}
FLIP = A.Compose([A.HorizontalFlip()])


class Waiting(Dataset):
    """Samples that take longer than a message, so that it pays to share out a batch."""

    def __init__(self, length=32, seconds=0.002):
        self.length, self.seconds = length, seconds

    def __len__(self):
        return self.length

    def __getitem__(self, index):
        sleep(self.seconds)
        return torch.full((3,), index)


class Together(Waiting):
    def __getitems__(self, indices):
        return [self[index] for index in indices]


def stacked(samples):
    return torch.stack(samples)


def setup(dataset=None, **settings):
    batch_size = settings.pop("batch_size", 4)
    loader = FastDataLoader(dataset or Waiting(), batch_size, **settings)
    return setup_of(loader, **HERE)


@each(
    ("settings", "scheduling"),
    [
        ({"executor": "torch"}, "batch"),
        ({"executor": "workers"}, "sample"),
        ({"executor": "workers", "collate_fn": stacked}, "queue"),
        ({"executor": "workers", "batch_size": None}, "queue"),
        ({"executor": "workers", "dataset": Together()}, "queue"),
        ({"executor": "workers", "transform": as_batch_transform(FLIP)}, "queue"),
        ({"executor": "workers", "dataset": Stream(12)}, "batch"),
        ({"executor": "gather", "dataset": Stream(12)}, "batch"),
        ({"executor": "torch", "dataset": Stream(12)}, "batch"),
    ],
)
def test_who_makes_a_batch_follows_from_the_executor_and_its_data(settings, scheduling):
    assert setup(num_workers=3, **settings).scheduling == scheduling


@pytest.mark.parametrize("executor", ["inline", "workers", "torch"])
def test_without_workers_the_training_process_reads(executor):
    assert setup(executor=executor, num_workers=0).workers == 0


@each(
    "settings",
    [
        {},
        {"executor": "inline"},
        {"executor": "torch"},
        {"num_workers": 2},
        {"num_workers": 2, "executor": "torch", "prefetch_factor": 3},
        {"num_workers": 2, "prefetch_factor": 5},
        {"collate_fn": stacked},
    ],
)
def test_with_other_workers_the_setup_is_that_of_the_loader_which_is_made_so(settings):
    told = FastDataLoader(Waiting(), 4, **settings)
    aside = {"executor": "workers"} if settings.get("executor") == "inline" else {}
    for workers in (1, 3, 32):
        made = setup(**{**settings, **aside, "num_workers": workers})
        assert told.setup_with(workers, **HERE) == made


@pytest.mark.parametrize("workers", [0, 2])
def test_what_the_model_does_not_know_has_no_setup(workers):
    rows = TensorDataset(torch.arange(8.0))
    assert setup(rows, executor="gather", num_workers=workers) is None


def test_the_setup_has_what_the_loader_was_given():
    found = setup(executor="workers", num_workers=3)
    assert (found.workers, found.cpus, found.step_cpus) == (3, 4.0, 0.5)


@pytest.mark.parametrize("prefetch", [None, 1, 5])
def test_torch_is_as_far_ahead_as_torch_says(prefetch):
    told = DataLoader(Waiting(), 4, num_workers=3, prefetch_factor=prefetch).prefetch_factor
    made = setup(num_workers=3, prefetch_factor=prefetch, executor="torch")
    assert made.look_ahead == 3 * told


@pytest.mark.cases(4)
@pytest.mark.parametrize("executor", ["workers", "torch"])
@pytest.mark.parametrize("collate_fn", [None, default_collate, stacked])
def test_samples_are_shared_out_exactly_where_the_setup_says(executor, collate_fn):
    # Eight samples take at least as long as the longest task.
    samples = Waiting(24, seconds=0.004)
    records = deque()
    with on_machine():
        loader = FastDataLoader(samples, 8, executor=executor, num_workers=2, collate_fn=collate_fn)
        loader.record_stamps(records)
        try:
            for _ in loader:
                pass
        finally:
            loader.close()
    shared_out = any(len(batch.tasks) > 1 for batch in records)
    assert shared_out == (setup_of(loader, **HERE).scheduling == "sample")


seconds = st.floats(0.0, 100.0)


@given(busy=st.floats(0.0, 8.0), working=st.floats(0.01, 100.0), waited=seconds, queued=seconds)
def test_the_step_uses_its_cpus_however_long_it_waited(busy, working, waited, queued):
    found = TrainingTimes(
        cpu_s=busy * working, wall_s=working + waited + queued, waited_s=waited, runqueue_s=queued
    ).step_cpus
    expected = min(busy, 1.0) if busy <= 1.1 else busy
    assert found == pytest.approx(expected, rel=1e-6, abs=1e-6) or busy == pytest.approx(1.1)


def test_a_step_that_computes_was_queued_for_as_long_as_it_had_no_cpu():
    times = TrainingTimes(cpu_s=6.0, wall_s=10.0, waited_s=1.0, runqueue_s=3.0)
    assert times.step_queued == pytest.approx(3 / 9)
