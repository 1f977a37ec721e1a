"""Trainings that are slow for one known reason each, to be diagnosed by ``diagnose.py``.

An ordinary Lightning script: a small convolutional network, one thread of a CPU, a ``DataLoader``.
What the reason costs is waited for or computed by a plain function, so that it is the same on every
machine::

    python benchmarks/slow_trainings.py storage --watch none

``--watch`` says who looks on: nobody, this package's callback (with torch's ``DataLoader`` or with
``FastDataLoader`` in its place), or Lightning's ``SimpleProfiler``. TraceML attaches itself to an
unchanged script: ``traceml run benchmarks/slow_trainings.py --args storage``.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as lightning
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, default_collate

BATCH = 16
IMAGE_PX = 32
SLOW_ONE_IN = 160


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """What samples, batches and steps of a training cost."""

    blocked_s: float = 0.0
    """Of a sample: blocked in a read."""
    cpu_s: float = 0.0
    """Of a sample: on a CPU."""
    slow_s: float = 0.0
    """Of one sample in 160: blocked for so much longer."""
    collate_s: float = 0.0
    """Of a batch: on a CPU, in ``collate_fn``."""
    start_s: float = 0.0
    """Of a worker that starts: blocked, as if it opened an index."""
    callback_s: float = 0.0
    """Of a step: on a CPU, in a callback at its end."""
    workers: int = 2
    """Of the loader."""
    epochs: int = 2
    """Of the training."""
    batches: int = 80
    """In an epoch."""
    width: int = 32
    """Channels of the network: a step takes some 10 ms with 32."""


def _cpus() -> int:
    return len(os.sched_getaffinity(0))


WORKLOADS = {
    "storage": Workload(blocked_s=0.003),
    "transform": Workload(cpu_s=0.0015, workers=1),
    "collate": Workload(collate_s=0.03),
    "slow-sample": Workload(blocked_s=0.001, slow_s=0.3),
    # More work than the CPUs can do, however many they are.
    "too-many-workers": Workload(cpu_s=0.00075 * _cpus(), workers=4 * _cpus()),
    "epoch-starts": Workload(start_s=0.25, epochs=16, batches=10),
    "slow-callback": Workload(callback_s=0.01),
    "healthy": Workload(width=64),
}
"""Fixed before anybody was asked about them."""


def spin(seconds: float) -> None:
    """Use a CPU for so long, however often it is taken away meanwhile."""
    until = time.thread_time() + seconds
    while time.thread_time() < until:
        pass


class Images(Dataset[tuple[torch.Tensor, int]]):
    """Random images, and what it costs to get one."""

    def __init__(self, work: Workload) -> None:
        self.work = work
        self.images = torch.rand(64, 3, IMAGE_PX, IMAGE_PX)

    def __len__(self) -> int:
        return self.work.batches * BATCH

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        if self.work.blocked_s:
            time.sleep(self.work.blocked_s)
        if self.work.slow_s and index % SLOW_ONE_IN == 5:
            time.sleep(self.work.slow_s)
        if self.work.cpu_s:
            spin(self.work.cpu_s)
        return self.images[index % 64], index % 10


def slow_collate(samples: list[Any], seconds: float) -> Any:
    spin(seconds)
    return default_collate(samples)


def open_index(worker: int, seconds: float) -> None:
    time.sleep(seconds)


class Network(lightning.LightningModule):
    """Two convolutions and a linear layer."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(3, width, 3, padding=1),
            nn.ReLU(),
            nn.Conv2d(width, width, 3, stride=2, padding=1),
            nn.ReLU(),
            nn.AdaptiveAvgPool2d(1),
            nn.Flatten(),
            nn.Linear(width, 10),
        )

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.layers(images)  # type: ignore[no-any-return]

    def training_step(self, batch: tuple[torch.Tensor, torch.Tensor], _: int) -> torch.Tensor:
        images, classes = batch
        return nn.functional.cross_entropy(self(images), classes)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.01)


class SlowCallback(lightning.Callback):
    """Somebody's callback that takes its time after each step."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds

    def on_train_batch_end(self, *_: Any) -> None:
        spin(self.seconds)


def train(work: Workload, watch: str, out: Path | None) -> None:
    """Train, and write what the one who looks on leaves behind."""
    options: dict[str, Any] = {
        "batch_size": BATCH,
        "num_workers": work.workers,
        "collate_fn": partial(slow_collate, seconds=work.collate_s) if work.collate_s else None,
        "worker_init_fn": partial(open_index, seconds=work.start_s) if work.start_s else None,
    }
    loader: DataLoader[Any] = DataLoader(Images(work), **options)
    callbacks: list[Any] = [SlowCallback(work.callback_s)] if work.callback_s else []
    profiler = None
    if watch.startswith("fastdata"):
        from lightning_fastdata import DataThroughputCallback
        from lightning_fastdata.loading.loader import FastDataLoader

        if watch == "fastdata":
            loader = FastDataLoader(Images(work), **options)
        report = False if out is None else out / "report.json"
        callbacks.append(DataThroughputCallback(report=report))
    elif watch == "profiler":
        from lightning.pytorch.profilers import SimpleProfiler

        profiler = SimpleProfiler()
    trainer = lightning.Trainer(
        accelerator="cpu", devices=1, max_epochs=work.epochs, callbacks=callbacks,
        profiler=profiler, logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False,
    )  # fmt: skip
    began = time.perf_counter()
    trainer.fit(Network(work.width), loader)
    fit_s = time.perf_counter() - began
    if out is not None:
        known = {"fit_s": fit_s, "steps": trainer.global_step}
        if profiler is not None:
            known["seconds"] = {
                action: sum(times) for action, times in profiler.recorded_durations.items()
            }
        (out / "run.json").write_text(json.dumps(known))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("workload", choices=tuple(WORKLOADS))
    parser.add_argument(
        "--watch", choices=("none", "fastdata", "fastdata-torch", "profiler"), default="none"
    )
    parser.add_argument("--out", type=Path, help="folder for what was found")
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    train(WORKLOADS[chosen.workload], chosen.watch, chosen.out)


if __name__ == "__main__":
    main()
