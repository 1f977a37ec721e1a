"""A training whose workers get nowhere ends with a report of what they do; a slow one goes on."""

from __future__ import annotations

import time
import warnings
from typing import Any

import lightning
import pytest
import torch
from torch.utils.data import Dataset, IterableDataset

from lightning_fastdata import FastDataLoader, FastDataModule, LoaderOptions
from lightning_fastdata.errors import FastDataWarning, OptionsError, WorkerError


def wait_for_an_answer() -> None:
    time.sleep(600)


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
        time.sleep(0.4)
        return torch.full((1,), float(index))


class Busy(Dataset):
    """Its first sample computes for longer than the deadline, as one that builds an index."""

    def __len__(self) -> int:
        return 2

    def __getitem__(self, index: int) -> Any:
        began = time.process_time()
        while index == 0 and time.process_time() - began < 1.7:
            sum(range(1000))
        return torch.full((1,), float(index))


class Model(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)

    def training_step(self, batch: Any, _number: int) -> Any:
        return self.layer(batch).mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), 0.001)


class Data(FastDataModule):
    def __init__(self, dataset: Dataset, options: LoaderOptions) -> None:
        super().__init__(batch_size=8, options=options)
        self.data = dataset

    def train_dataset(self) -> Dataset:
        return self.data


def fit(data: Any) -> None:
    lightning.Trainer(
        max_epochs=1,
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    ).fit(Model(), data)


def quiet_loader(dataset: Any, **how: Any) -> FastDataLoader:
    return FastDataLoader(dataset, 8, num_workers=1, executor="workers", **how)


@pytest.mark.filterwarnings("ignore:.*training batches", "ignore:.*does not have many workers")
@pytest.mark.parametrize("dataset", [Stuck(), StuckStream()])
def test_a_training_that_is_stuck_warns_and_then_ends_with_the_sample_and_the_stack(dataset):
    loader = quiet_loader(dataset, stall_timeout=1)
    stream = isinstance(dataset, StuckStream)
    when = r"for 0\.5 s" if stream else "for 1 s with a sample, and is replaced"
    with (
        pytest.warns(FastDataWarning, match=rf"{when}[\s\S]*wait_for_an_answer"),
        pytest.raises(WorkerError, match=r"stall_timeout[\s\S]*wait_for_an_answer") as told,
    ):
        fit(loader)
    assert stream or str(told.value).startswith("Sample 37 of the dataset was read twice")


@pytest.mark.filterwarnings("ignore:.*training batches", "ignore:.*does not have many workers")
def test_the_option_of_a_data_module_sets_the_deadline():
    options = LoaderOptions(num_workers=1, executor="workers", stall_timeout_s=1)
    with pytest.warns(FastDataWarning, match="is replaced"), pytest.raises(WorkerError):
        fit(Data(Stuck(), options))


@pytest.mark.filterwarnings("ignore:.*training batches", "ignore:.*does not have many workers")
@pytest.mark.parametrize("dataset", [Slow(), Busy()])
def test_a_slow_training_goes_on(dataset):
    with warnings.catch_warnings():
        warnings.simplefilter("error", FastDataWarning)
        fit(quiet_loader(dataset, stall_timeout=3))


def test_the_timeout_of_torch_takes_its_place():
    with pytest.raises(WorkerError, match=r"No batch within timeout=1 s"):
        list(quiet_loader(Stuck(), timeout=1, stall_timeout=0.1))


def test_there_is_a_deadline_by_default_and_it_can_be_turned_off():
    assert FastDataLoader(Slow()).stall_timeout == "auto"
    assert LoaderOptions().stall_timeout_s == "auto"
    assert FastDataLoader(Slow(), stall_timeout=0).stall_timeout == 0
    with pytest.raises(OptionsError, match="stall_timeout is -1"):
        FastDataLoader(Slow(), stall_timeout=-1)
    with pytest.raises(OptionsError, match="stall_timeout_s is 'never'"):
        LoaderOptions(stall_timeout_s="never")
