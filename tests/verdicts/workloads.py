"""Trainings whose costs are known: what samples, collation and steps take is given, to the bit.

They run on a virtual machine (:mod:`rig.machine`): loader, workers, stamps, timeline and verdicts
are real, and what takes time is modelled.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from rig.machine import machine, sleep, work
from torch.utils.data import Dataset, default_collate

from lightning_fastdata.host import clock
from lightning_fastdata.insight.evidence import Evidence, evidence_of
from lightning_fastdata.insight.finding import read_loader
from lightning_fastdata.insight.steps import StepTimeline
from lightning_fastdata.insight.waits import CauseTotals
from lightning_fastdata.loading.loader import FastDataLoader
from lightning_fastdata.loading.source import setup_of
from verdicts.known import evidence_with, of_loop

CPUS = 2
SLEEPING = 0.05
"""CPUs that a training uses which sleeps while a device would compute."""


class Samples(Dataset[torch.Tensor]):
    """Samples that cost time blocked, time on a CPU and bytes; some a lot more."""

    def __init__(self, count, *, blocked_s=0.0, cpu_s=0.0, slow_s=0.0, slow_every=0, floats=1000):
        self.count, self.blocked_s, self.cpu_s = count, blocked_s, cpu_s
        self.slow_s, self.slow_every = slow_s, slow_every
        self.sample = torch.zeros(floats)

    def __len__(self):
        return self.count

    def __getitem__(self, index):
        if self.slow_every and index % self.slow_every == self.slow_every // 2:
            sleep(self.slow_s)
        if self.blocked_s:
            sleep(self.blocked_s)
        if self.cpu_s:
            work(self.cpu_s)
        return self.sample


def slow_collate(seconds: float, samples: list[Any]) -> Any:
    """Collate, and use a CPU for some time."""
    work(seconds)
    return default_collate(samples)


def start_late(seconds: float, worker: int) -> None:
    """Let a worker start late, as imports do."""
    sleep(seconds)


def sleep_for(seconds: float) -> Callable[[Any, StepTimeline], None]:
    """Return a step during which a device computes and the host sleeps."""
    return lambda batch, timeline: sleep(seconds)


@dataclass(frozen=True, slots=True, kw_only=True)
class Training:
    """A loader and what is done with its batches."""

    dataset: Any
    step: Callable[[Any, StepTimeline], None]
    """Called with each batch; may mark a transfer and an augmentation."""
    batch_size: int | None = 16
    epochs: int = 1
    loader: dict[str, Any] = field(default_factory=lambda: {"num_workers": 1})
    """Arguments of the loader."""

    def with_options(self, **options: Any) -> Training:
        """Return the same with other arguments of the loader."""
        return replace(self, loader={**self.loader, **options})


@dataclass(slots=True)
class Stage:
    """One stage under way: a loader whose stamps are taken, and a timeline."""

    training: Training
    loader: FastDataLoader
    timeline: StepTimeline
    records: deque[Any]
    lasted_s: float = 0.0
    """Seconds of its epochs."""

    @classmethod
    def start(cls, training: Training) -> Stage:
        options = {"executor": "workers", "multiprocessing_context": "fork", **training.loader}
        if not options.get("num_workers"):
            options.pop("multiprocessing_context")
        loader = FastDataLoader(training.dataset, training.batch_size, **options)
        records: deque[Any] = deque()
        loader.record_stamps(records)
        return cls(training, loader, StepTimeline(), records)

    def epoch(self) -> None:
        """Train for one epoch."""
        timeline, training = self.timeline, self.training
        began_s = clock.monotonic()
        timeline.epoch_began()
        batches = iter(self.loader)
        while True:
            timeline.wait_began()
            batch = next(batches, None)
            if batch is None:
                timeline.drop_open_step()
                self.lasted_s += clock.monotonic() - began_s
                return
            timeline.wait_ended()
            training.step(batch, timeline)
            timeline.compute_ended(16)

    def summary(self, name: str = "train") -> Any:
        """Return where the steps went."""
        found = self.timeline.history.summarize(name, duration_s=self.lasted_s, device="cpu")
        totals = CauseTotals()
        for batch in self.records:
            totals.add(batch)
        return replace(found, causes=totals.summary())

    def evidence(self, *, val: Any = None, **measured: Any) -> Evidence:
        """Return what is known of the stage; further facts may be given."""
        here = {"cpus": float(machine().cpus), "step_cpus": SLEEPING}
        measured["setup_with"] = partial(self.loader.setup_with, **here)
        setup = setup_of(self.loader, **here)
        rates = [stamps.rates for stamps in self.records if stamps.rates is not None]
        summary, loader = self.summary(), replace(read_loader(self.loader), closed={})
        late = evidence_of(summary, loader, list(self.records), setup)
        measured["read_rates"] = rates[-1] if rates else None
        return evidence_with(of_loop(summary, loader, late, val), **measured)


def train(training: Training) -> Evidence:
    """Train for all epochs and return what is known."""
    stage = Stage.start(training)
    try:
        for _ in range(training.epochs):
            stage.epoch()
        return stage.evidence()
    finally:
        stage.loader.close()
