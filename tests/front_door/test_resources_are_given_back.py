"""After each way of use, threads, files and processes are as they were before."""

from __future__ import annotations

import gc
import multiprocessing
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from lightning.pytorch.demos.boring_classes import BoringModel
from misses import each
from open_files import open_files
from samples import Samples, Stream
from torch.utils.data import DataLoader
from trainers import quiet_trainer

from lightning_fastdata import DataThroughputCallback, FastDataLoader, FastDataModule, StepTimer
from lightning_fastdata.errors import BatchError

ROWS = Samples(lambda index: torch.full((32,), float(index)), 12)


class Breaks(BoringModel):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if batch_idx == 4:
            raise ValueError("broken")
        return super().training_step(batch, batch_idx)


def fit(model: BoringModel | None = None, **how: Any) -> tuple[object, ...]:
    trainer = quiet_trainer(callbacks=[DataThroughputCallback(summary=False, report=False)])
    trainer.fit(model or BoringModel(), **how)
    return trainer, how


def module() -> object:
    data = FastDataModule.from_datasets(ROWS, ROWS, batch_size=2, num_workers=0)
    return fit(datamodule=data)


def module_with_workers() -> object:
    return fit(datamodule=FastDataModule.from_datasets(ROWS, batch_size=2, num_workers=1))


def stream() -> object:
    return fit(
        datamodule=FastDataModule.from_datasets(
            Stream(lambda: iter(torch.ones(12, 32))), batch_size=2, num_workers=0
        )
    )


def from_loaders() -> object:
    given = DataLoader(ROWS, 2), DataLoader(ROWS, 2)
    return fit(datamodule=FastDataModule.from_loaders(*given))


def callback() -> object:
    return fit(train_dataloaders=DataLoader(ROWS, 2), val_dataloaders=DataLoader(ROWS, 2))


def training_that_breaks() -> object:
    data = FastDataModule.from_datasets(ROWS, batch_size=2, num_workers=0)
    with pytest.raises(ValueError, match="broken"):
        fit(Breaks(), datamodule=data)
    return data


def loop() -> object:
    for _ in FastDataLoader(ROWS, 2, num_workers=0):
        pass
    return None


def timed_loop() -> object:
    timer = StepTimer("cpu")
    for _ in timer.batches(FastDataLoader(ROWS, 2, num_workers=0)):
        pass
    return None


def timed_loop_that_is_left() -> object:
    for number, _ in enumerate(StepTimer("cpu").batches(FastDataLoader(ROWS, 2, num_workers=0))):
        if number == 4:
            break
    return None


def breaks_at_once(worker: int) -> None:
    raise ValueError("broken")


def loop_whose_workers_fail_as_they_start() -> object:
    for data in (ROWS, Stream(lambda: iter(torch.ones(12, 32)))):
        loader = FastDataLoader(data, 2, num_workers=1, worker_init_fn=breaks_at_once)
        with pytest.raises(ValueError, match="broken"):
            next(iter(loader))
    return None


def loop_over_batches_that_are_errors() -> object:
    loader = FastDataLoader(Samples(lambda index: {index}, 12), 2, num_workers="auto")
    for _ in range(2):
        with pytest.raises(BatchError):
            next(iter(loader))
    return None


WAYS = (module, module_with_workers, stream, from_loaders, callback, training_that_breaks)
TIMED_LOOPS = (timed_loop, timed_loop_that_is_left)
LOOPS_THAT_BREAK = (loop_whose_workers_fail_as_they_start, loop_over_batches_that_are_errors)
LOOPS = (loop, *TIMED_LOOPS, *LOOPS_THAT_BREAK)


@pytest.mark.filterwarnings("ignore:.*does not have many workers", "ignore:Total length")
@pytest.mark.filterwarnings("ignore:.*no `val_dataloader`")
@each("way", [*WAYS, *LOOPS])
def test_a_way_of_use_leaves_nothing_behind(way: Callable[[], object]) -> None:
    way()  # what is loaded and opened once
    files, threads = open_files(), set(threading.enumerate())
    kept = way()
    gc.collect()
    for thread in set(threading.enumerate()) - threads:
        thread.join(20)  # it has been told to end
        assert not thread.is_alive(), thread.name
    for process in multiprocessing.active_children():
        process.join(20)  # it was killed, and takes the kernel a while
        assert process.exitcode is not None, process.name
        del process
    del kept
    gc.collect()
    assert not open_files() - files
