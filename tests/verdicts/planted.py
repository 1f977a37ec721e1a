"""Causes of slow steps, planted on a virtual machine: what is planted has to be the first finding.

Samples sleep, compute or share a lock, neighbours compute on the same CPUs. What they cost is
modelled (:mod:`rig.machine`); loader, pool, stamps, timeline and verdicts are real.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from rig.machine import Machine, VirtualLock, machine, sleep, work
from rig.virtual_crew import USUAL, Costs, on_machine
from torch.utils.data import Dataset

from lightning_fastdata.insight.evidence import Evidence
from verdicts.workloads import (
    CPUS,
    Samples,
    Stage,
    Training,
    sleep_for,
    slow_collate,
    start_late,
    train,
)

BATCH = 16
RUN_S = 2.0
"""About how long a run takes, on the machine; its first steps are slower than the others."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plant:
    """One cause, planted in five magnitudes or kinds."""

    code: str
    """Of the finding that has to come first."""
    what: str
    """What is planted."""
    magnitudes: tuple[Any, ...]
    """How much of it, from what just matters to what nobody overlooks."""
    run: Callable[[Any], Evidence]
    """Plants one of them, on a machine, and returns what was measured."""
    costs: Callable[[Any], Costs] = lambda _: USUAL
    """What workers cost there, with such a magnitude."""

    def machine(self, magnitude: Any) -> AbstractContextManager[Machine]:
        """Return the machine that one of them is to run on."""
        return on_machine(self.costs(magnitude))


def of_training(
    code: str,
    what: str,
    magnitudes: tuple[Any, ...],
    training: Callable[[Any], Training],
    **how: Any,
) -> Plant:
    """Return a plant that is a training, and nothing else."""
    return Plant(
        code=code,
        what=what,
        magnitudes=magnitudes,
        run=lambda magnitude: train(training(magnitude)),
        **how,
    )


def _batches(batch_s: float, *, least: int = 24, most: int = 150) -> int:
    return min(most, max(least, round(RUN_S / batch_s)))


# FD302: one sample in 160 takes long.


def _slow_samples(slow_s: float) -> Training:
    return Training(
        dataset=Samples(
            _batches(slow_s / 20, least=60) * BATCH, blocked_s=0.0005, slow_s=slow_s, slow_every=160
        ),
        step=sleep_for(0.006),
        loader={"num_workers": 2},
    )


# FD303 and FD304: reading waits.


def _latency(blocked_s: float) -> Training:
    batches = _batches(BATCH * blocked_s)
    dataset = Samples(batches * BATCH, blocked_s=blocked_s)
    return Training(dataset=dataset, step=sleep_for(0.25 * BATCH * blocked_s))


class SharedLine(Dataset[torch.Tensor]):
    """Samples of a storage that gives so many a second to all readers together."""

    def __init__(self, count: int, read_s: float) -> None:
        self.count, self.read_s = count, read_s
        self.turn = VirtualLock()

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> torch.Tensor:
        with self.turn:
            sleep(self.read_s)
        return torch.zeros(10)


def _bandwidth(magnitude: tuple[float, int]) -> Training:
    """Read for so long that half of the workers are tried alone, which read as much."""
    read_s, workers = magnitude
    return Training(
        dataset=SharedLine(300 * BATCH, read_s),
        step=sleep_for(0.3 * BATCH * read_s),
        loader={"num_workers": workers},
    )


# FD305 and FD306: reading computes.


def _few_workers(cpu_s: float) -> Training:
    batches = _batches(BATCH * cpu_s)
    dataset = Samples(batches * BATCH, cpu_s=cpu_s)
    return Training(dataset=dataset, step=sleep_for(0.3 * BATCH * cpu_s))


def _few_cpus(magnitude: tuple[int, float]) -> Training:
    """More processes than CPUs."""
    workers, cpu_s = magnitude
    batches = _batches(BATCH * cpu_s / CPUS, least=30)
    dataset = Samples(batches * BATCH, cpu_s=cpu_s)
    step = sleep_for(0.2 * BATCH * cpu_s / CPUS)
    return Training(dataset=dataset, step=step, loader={"num_workers": workers})


# FD307 and FD308: collation, hand-over.


def _collation(collate_s: float) -> Training:
    return Training(
        dataset=Samples(_batches(collate_s) * BATCH, blocked_s=0.0001),
        step=sleep_for(0.2 * collate_s),
        loader={"num_workers": 1, "collate_fn": partial(slow_collate, collate_s)},
    )


def _handover(magnitude: tuple[str, float]) -> Training:
    return Training(dataset=Samples(60 * BATCH), step=sleep_for(0.002))


def _costs_of_handover(magnitude: tuple[str, float]) -> Costs:
    part, seconds = magnitude
    return replace(USUAL, **{f"{part}_s": lambda _: seconds})


# FD310: epochs start anew.


def _epoch_starts(start_s: float) -> Training:
    return Training(
        dataset=Samples(15 * BATCH),
        step=sleep_for(0.02),
        epochs=4,
        loader={"num_workers": 1, "worker_init_fn": partial(start_late, start_s)},
    )


# FD315: neighbours.


def _neighbours(each: int) -> Evidence:
    """Have other programs take the CPUs from work that would fit."""
    machine().programs(each * CPUS)
    dataset = Samples(60 * BATCH, cpu_s=0.0006)
    return train(Training(dataset=dataset, step=sleep_for(0.012)))


# FD318: validation has its own loader.


def _validation(blocked_s: float) -> Evidence:
    """Train with a loader that keeps up, and validate with one that does not."""
    training = Training(
        dataset=Samples(30 * BATCH, blocked_s=blocked_s),
        step=sleep_for(0.02),
        loader={"num_workers": max(2, round(3 * BATCH * blocked_s / 0.02))},
    ).with_options(persistent_workers=True)
    few = Samples(10 * BATCH, blocked_s=blocked_s)
    validation = replace(training, dataset=few, step=sleep_for(0.01))
    fed = Stage.start(training)
    starved = Stage.start(validation.with_options(num_workers=1))
    try:
        for _ in range(3):
            fed.epoch()
            starved.epoch()
        return fed.evidence(val=starved.summary("val"))
    finally:
        fed.loader.close()
        starved.loader.close()


# FD323 and FD324: what the training process does by itself.


class SlowSampler:
    """Computes for each index."""

    def __init__(self, count: int, each_s: float) -> None:
        self.count, self.each_s = count, each_s

    def __len__(self) -> int:
        return self.count

    def __iter__(self) -> Any:
        for number in range(self.count):
            work(self.each_s)
            yield number


def _sampler(each_s: float) -> Training:
    dataset = Samples(60 * BATCH)
    sampler = SlowSampler(60 * BATCH, each_s)
    return Training(
        dataset=dataset, step=sleep_for(0.005), loader={"num_workers": 1, "sampler": sampler}
    )


class ManyObjects:
    """A batch that takes some time to be put together from what was sent."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds

    def __reduce__(self) -> tuple[Any, ...]:
        return _put_together, (self.seconds,)


def _put_together(seconds: float) -> ManyObjects:
    work(seconds)
    return ManyObjects(seconds)


def _objects(seconds: float) -> Training:
    return Training(
        dataset=Samples(60 * BATCH),
        step=sleep_for(0.003),
        loader={"num_workers": 1, "collate_fn": partial(_only_objects, seconds)},
    )


def _only_objects(seconds: float, samples: list[torch.Tensor]) -> ManyObjects:
    return ManyObjects(seconds)


LOADING: tuple[Plant, ...] = (
    of_training(
        "FD302", "s that one sample in 160 sleeps", (0.1, 0.15, 0.25, 0.4, 0.6), _slow_samples
    ),
    of_training("FD303", "s that a sample sleeps", (0.0005, 0.001, 0.002, 0.005, 0.01), _latency),
    of_training(
        "FD304",
        "s that a sample takes of a line that all share, and readers",
        ((0.0005, 2), (0.001, 4), (0.002, 3), (0.004, 8), (0.01, 4)),
        _bandwidth,
    ),
    of_training(
        "FD305", "s that a sample computes", (0.0005, 0.001, 0.002, 0.005, 0.01), _few_workers
    ),
    of_training(
        "FD306",
        "processes that read, s that a sample computes",
        ((2 * CPUS, 0.001), (3 * CPUS, 0.002), (6 * CPUS, 0.001), (2 * CPUS, 0.004),
         (3 * CPUS, 0.01)),
        _few_cpus,
    ),
    of_training("FD307", "s that collating computes", (0.005, 0.01, 0.02, 0.05, 0.1), _collation),
    of_training(
        "FD308",
        "s to send a batch, or to take it in",
        (("send", 0.005), ("take", 0.005), ("send", 0.01), ("take", 0.02), ("send", 0.03)),
        _handover,
        costs=_costs_of_handover,
    ),
    of_training("FD310", "s that a worker starts", (0.05, 0.1, 0.2, 0.4, 0.8), _epoch_starts),
    Plant(code="FD315", what="computing programs for each CPU", magnitudes=(1, 2, 3, 4, 6),
          run=_neighbours),
    Plant(
        code="FD318",
        what="s that a sample sleeps, beside one worker in validation",
        magnitudes=(0.001, 0.002, 0.003, 0.004, 0.006),
        run=_validation,
    ),
    of_training("FD323", "s that a sampler computes for an index",
                (0.0005, 0.001, 0.002, 0.004, 0.01), _sampler),
    of_training("FD324", "s that it takes to unpickle a batch",
                (0.005, 0.008, 0.012, 0.02, 0.05), _objects),
)  # fmt: skip
