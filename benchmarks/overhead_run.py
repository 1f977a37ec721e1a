"""One short training on the CPU, with what is to be measured, timed step by step.

    python benchmarks/overhead_run.py plain --steps 2000

Prints its figures as JSON. ``overhead.py`` compares such trainings, most of them in one process.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import logging
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable
from typing import Any

import torch
from lightning.pytorch import Callback, LightningDataModule, LightningModule, Trainer
from lightning.pytorch.callbacks import DeviceStatsMonitor, ThroughputMonitor
from lightning.pytorch.loggers import TensorBoardLogger
from torch.utils.data import DataLoader, Dataset

from lightning_fastdata import DataThroughputCallback, FastDataModule, LoaderOptions

_WARM_STEPS = 50
LOG_EVERY = 50


class Rows(Dataset):
    def __init__(self, length):
        self.rows = torch.randn(length, 4)

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, i):
        return self.rows[i]


class Tiny(LightningModule):
    """A model of a few weights, which notes the time now and then.

    Args:
        block: Steps between two notes.
        step_s: What each step computes, at least.
    """

    def __init__(self, block, step_s):
        super().__init__()
        self.layer = torch.nn.Linear(4, 1)
        self.block = block
        self.step_s = step_s
        self.notes = []
        self.last_step_ns = self.epoch_end_ns = 0

    def training_step(self, batch, batch_idx):
        if batch_idx >= _WARM_STEPS and (batch_idx - _WARM_STEPS) % self.block == 0:
            self.notes.append((time.process_time_ns(), time.perf_counter_ns()))
        ended = time.perf_counter() + self.step_s
        loss = self.layer(batch).mean()
        while time.perf_counter() < ended:
            pass
        self.last_step_ns = time.process_time_ns()
        return loss

    def on_train_epoch_end(self):
        # Lightning calls it after the callbacks' hooks of this name.
        self.epoch_end_ns = time.process_time_ns() - self.last_step_ns

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=1e-3)


class Plain(LightningDataModule):
    def __init__(self, steps, workers=0):
        super().__init__()
        self.steps = steps
        self.workers = workers

    def train_dataloader(self):
        return DataLoader(Rows(self.steps), batch_size=1, shuffle=True, num_workers=self.workers)


def plain_workers(steps):
    return Plain(steps, workers=2)


def ours(steps):
    options = LoaderOptions(num_workers=0)
    return FastDataModule.from_datasets(Rows(steps), batch_size=1, options=options)


def ours_workers(steps):
    options = LoaderOptions(num_workers=2, executor="workers")
    return FastDataModule.from_datasets(Rows(steps), batch_size=1, options=options)


def identity(batch):
    return batch


def callback():
    return DataThroughputCallback(summary=False, report=False)


def everything():
    return DataThroughputCallback(summary=False, augment=identity)


def throughput_monitor():
    return ThroughputMonitor(batch_size_fn=len)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    data: Callable[[int], Any] = Plain
    callback: Callable[[], Any] | None = None
    """Makes the one callback."""
    profiler: str | None = None
    logs: bool = True
    """To TensorBoard, every 50 steps."""
    against: str | None = "plain"
    """The case it is compared with."""
    target_us: float | None = None


CASES = {
    "plain": Case(against=None),
    "plain, 2 workers": Case(data=plain_workers, against=None),
    "any callback (an empty one)": Case(callback=Callback),
    "FastDataModule": Case(data=ours),
    "callback, plain loader": Case(callback=callback),
    "both, no logger": Case(data=ours, callback=callback, logs=False),
    "everything": Case(data=ours, callback=everything, target_us=100),
    "everything, 2 workers": Case(
        data=ours_workers, callback=everything, against="plain, 2 workers", target_us=100
    ),
    "ThroughputMonitor": Case(callback=throughput_monitor),
    "DeviceStatsMonitor": Case(callback=DeviceStatsMonitor),
    "SimpleProfiler": Case(profiler="simple"),
}


def train(case, folder, *, steps, block=300, step_ms=0.0):
    """Return what one training costs the process.

    Args:
        case: What is trained with.
        folder: Where logs go.
        steps: Of the one epoch.
        block: Steps that are timed together; the median block counts. Of a multiple of 50 steps
            each one has its share of what is logged.
        step_ms: What each step computes, at least.

    Returns:
        ``cpu_us`` and ``wall_us`` of a step, and ``epoch_end_ms`` of CPU time after the last step.
    """
    model = Tiny(block, step_ms / 1e3)
    trainer = Trainer(
        max_epochs=1,
        accelerator="cpu",
        devices=1,
        callbacks=[] if case.callback is None else [case.callback()],
        profiler=case.profiler,
        logger=TensorBoardLogger(folder) if case.logs else False,
        log_every_n_steps=LOG_EVERY,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=folder,
    )
    trainer.fit(model, datamodule=case.data(steps))
    cpu, wall = (
        statistics.median(after - before for before, after in itertools.pairwise(notes))
        for notes in zip(*model.notes, strict=True)
    )
    return {
        "cpu_us": cpu / 1e3 / block,
        "wall_us": wall / 1e3 / block,
        "epoch_end_ms": model.epoch_end_ns / 1e6,
    }


def quiet():
    """Have nothing printed but what is measured, and one thread compute."""
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("case", choices=CASES)
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--block", type=int, default=300)
    parser.add_argument("--step-ms", type=float, default=0.0)
    parser.add_argument("--out", help="write the figures to this file")
    arguments = parser.parse_args()
    quiet()
    with tempfile.TemporaryDirectory() as folder:
        case = CASES[arguments.case]
        train(case, folder, steps=300, block=50)  # imports
        found = train(
            case,
            folder,
            steps=arguments.steps,
            block=arguments.block,
            step_ms=arguments.step_ms,
        )
    text = json.dumps(found)
    if arguments.out is None:
        print(text)
        return
    with open(arguments.out, "w", encoding="utf-8") as file:
        file.write(text)


if __name__ == "__main__":
    main()
