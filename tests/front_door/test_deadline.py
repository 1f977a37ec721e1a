"""A training whose workers get nowhere ends with a report of what they do; a slow one goes on."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from rig.machine import sleep, work
from rig.virtual_crew import on_machine
from torch.utils.data import Dataset, IterableDataset
from trainers import Learner, quiet_trainer

from lightning_fastdata import FastDataLoader, FastDataModule, LoaderOptions
from lightning_fastdata.errors import FastDataWarning, OptionsError, WorkerError
from lightning_fastdata.host import clock


def wait_for_an_answer() -> None:
    clock.sleep(600)


class Stuck(Dataset):
    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> Any:
        if index == 37:
            wait_for_an_answer()
        return torch.full((1,), float(index))


class StuckStream(IterableDataset):
    def __iter__(self) -> Any:
        yield torch.zeros(1)
        wait_for_an_answer()


class Slow(Dataset):
    """Its batches take longer than the deadline, its samples do not."""

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> Any:
        sleep(0.9)
        return torch.full((1,), float(index))


class Busy(Dataset):
    """Its first sample computes for longer than the deadline, as one that builds an index."""

    def __len__(self) -> int:
        return 2

    def __getitem__(self, index: int) -> Any:
        work(7.0 if index == 0 else 0.0)
        return torch.full((1,), float(index))


class Data(FastDataModule):
    def __init__(self, dataset: Dataset, options: LoaderOptions) -> None:
        super().__init__(batch_size=8, options=options)
        self.data = dataset

    def train_dataset(self) -> Dataset:
        return self.data


def fit(data: Any) -> None:
    quiet_trainer().fit(Learner(), data)


def quiet_loader(dataset: Any, executor: str, **how: Any) -> FastDataLoader:
    return FastDataLoader(dataset, 8, num_workers=1, executor=executor, **how)


@pytest.mark.filterwarnings("ignore:.*training batches", "ignore:.*does not have many workers")
def test_a_training_that_is_stuck_warns_and_then_ends_with_the_sample_and_the_stack():
    with (
        on_machine() as machine,
        pytest.warns(FastDataWarning, match=r"for 60 s with a sample, and is[\s\S]*wait_for_an_a"),
        pytest.raises(WorkerError, match=r"timeout[\s\S]*wait_for_an_answer") as told,
    ):
        fit(quiet_loader(Stuck(), "workers"))
    assert str(told.value).startswith("Sample 37 of the dataset was read twice")
    assert 120 < machine.now_ns / 1e9 < 130


@pytest.mark.realtime
@pytest.mark.filterwarnings("ignore:.*training batches", "ignore:.*does not have many workers")
def test_a_stream_that_is_stuck_warns_and_then_ends_with_the_stack():
    """Its workers are no crew of the pool, and are real."""
    with (
        pytest.warns(FastDataWarning, match=r"for 0\.5 s[\s\S]*wait_for_an_answer"),
        pytest.raises(WorkerError, match=r"timeout[\s\S]*wait_for_an_answer"),
    ):
        fit(quiet_loader(StuckStream(), "workers", timeout=1))


@pytest.mark.filterwarnings("ignore:.*training batches", "ignore:.*does not have many workers")
def test_the_option_of_a_data_module_sets_the_deadline():
    options = LoaderOptions(num_workers=1, executor="workers", timeout=1)
    with (
        on_machine() as machine,
        pytest.warns(FastDataWarning, match="is replaced"),
        pytest.raises(WorkerError),
    ):
        fit(Data(Stuck(), options))
    assert machine.now_ns / 1e9 < 5  # and not 120


@pytest.mark.filterwarnings("ignore:.*training batches", "ignore:.*does not have many workers")
@pytest.mark.parametrize("dataset", [Slow(), Busy()])
def test_a_slow_training_goes_on(dataset):
    with warnings.catch_warnings(), on_machine():
        warnings.simplefilter("error", FastDataWarning)
        fit(quiet_loader(dataset, "workers", timeout=1))


def test_there_is_a_deadline_by_default_and_it_can_be_turned_off():
    assert FastDataLoader(Slow()).timeout == "auto"
    assert LoaderOptions().timeout == "auto"
    assert FastDataLoader(Slow(), timeout=0).timeout == 0
    with pytest.raises(OptionsError, match="timeout is -1"):
        FastDataLoader(Slow(), timeout=-1)
    with pytest.raises(OptionsError, match="timeout is 'never'"):
        LoaderOptions(timeout="never")
