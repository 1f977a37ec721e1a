"""A training whose workers get nowhere ends with a report of what they do; a slow one goes on."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from rig.machine import sleep, work
from rig.virtual_crew import on_machine
from samples import Samples, Stream
from trainers import trained

from lightning_fastdata import FastDataLoader, LoaderOptions
from lightning_fastdata.errors import FastDataWarning, OptionsError, WorkerError
from lightning_fastdata.host import clock

pytestmark = pytest.mark.filterwarnings(
    "ignore:.*training batches", "ignore:.*does not have many workers"
)


def wait_for_an_answer() -> None:
    clock.sleep(600)


def stuck(index: int) -> Any:
    if index == 37:
        wait_for_an_answer()
    return torch.full((1,), float(index))


def stuck_stream() -> Any:
    yield torch.zeros(1)
    wait_for_an_answer()


def slow(index: int) -> Any:
    """Take so long that batches take longer than the deadline, and samples do not."""
    sleep(0.9)
    return torch.full((1,), float(index))


def busy(index: int) -> Any:
    """Compute for longer than the deadline for the first sample, as what builds an index does."""
    work(7.0 if index == 0 else 0.0)
    return torch.full((1,), float(index))


def fit(dataset: Any, **how: Any) -> None:
    trained(FastDataLoader(dataset, 8, num_workers=1, executor="workers", **how))


def test_a_training_that_is_stuck_warns_and_then_ends_with_the_sample_and_the_stack():
    with (
        on_machine() as machine,
        pytest.warns(FastDataWarning, match=r"for 60 s with a sample, and is[\s\S]*wait_for_an_a"),
        pytest.raises(WorkerError, match=r"timeout[\s\S]*wait_for_an_answer") as told,
    ):
        fit(Samples(stuck, 64))
    assert str(told.value).startswith("Sample 37 of the dataset was read twice")
    assert 120 < machine.now_ns / 1e9 < 130


@pytest.mark.realtime
def test_a_stream_that_is_stuck_warns_and_then_ends_with_the_stack():
    """Its workers are no crew of the pool, and are real."""
    with (
        pytest.warns(FastDataWarning, match=r"for 0\.5 s[\s\S]*wait_for_an_answer"),
        pytest.raises(WorkerError, match=r"timeout[\s\S]*wait_for_an_answer"),
    ):
        fit(Stream(stuck_stream), timeout=1)


@pytest.mark.parametrize("dataset", [Samples(slow, 8), Samples(busy, 2)])
def test_a_slow_training_goes_on(dataset):
    with warnings.catch_warnings(), on_machine():
        warnings.simplefilter("error", FastDataWarning)
        fit(dataset, timeout=1)


def test_there_is_a_deadline_by_default_and_it_can_be_turned_off():
    assert FastDataLoader([0]).timeout == 0  # as torch's, for those who make a loader of it
    assert LoaderOptions().timeout == "auto"
    assert FastDataLoader([0], timeout=0).timeout == 0
    with pytest.raises(OptionsError, match="timeout is -1"):
        FastDataLoader([0], timeout=-1)
