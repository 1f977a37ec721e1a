"""What batches cost, and the loader that is to make them: what a prediction is made from."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, TypeAlias

Scheduling: TypeAlias = Literal["batch", "queue", "sample", "actors"]


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchCost:
    """What one batch costs, whoever makes it; times without any waiting for CPUs."""

    samples: int
    cpu_ns: float
    """To read its samples: time on a CPU."""
    blocked_ns: float
    """To read its samples: time neither on a CPU nor waiting for one."""
    collate_ns: float
    """To collate it: time on a CPU."""
    slowest_ns: float
    """Of ``cpu_ns + blocked_ns``, what its slowest sample takes."""
    handover_ns: float
    """From the end of its last task until the training has it, if the training is waiting."""
    taking_ns: float
    """To take it, if it was complete when it was asked for."""
    step_ns: float
    """From then until the training asks for the next batch."""
    size_bytes: float = 0.0
    """Of the batch, where actors make it."""
    task_ns: float = 0.0
    """To begin and end one of the tasks that it is made in: time on a CPU, not in ``cpu_ns``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoaderSetup:
    """A loader as the model knows it."""

    workers: int
    """Side processes or threads that read; 0: the training process does."""
    look_ahead: int
    """Batches under way at once; torch: ``workers * prefetch_factor``."""
    scheduling: Scheduling = "sample"
    """``"batch"``: a worker makes a whole batch, in turn, as torch has it. ``"queue"``: whoever is
    free does. ``"sample"``: whoever is free makes some samples of a batch. ``"actors"``: whole
    batches, two of which are given to a worker while the training waits for one."""
    in_order: bool = True
    """Batches are delivered in order."""
    cpus: float = 1.0
    """CPUs this process and its workers may use."""
    step_cpus: float = 1.0
    """CPUs the training uses between two requests: 1 where it drives a device, or more."""
    worker_nice: int = 0
    """Niceness of the workers above that of the training, 0 to 19."""
    inline: bool = False
    """Its executor reads in the training process, however many workers it has."""
    other_cpus: float = 0.0
    """Of ``cpus``, those that other programs use when they have to share."""
    worker_threads: float = 1.0
    """CPUs that a worker uses while it computes: above 1 where it starts threads of its own."""
    far_share: float = 0.0
    """Part of the workers, 0 to 1, that are on other machines, each with CPUs of its own there."""
    sent_share: float = 0.0
    """Part of the workers, 0 to 1, whose batches come over the link."""
    link_bytes_per_s: float = math.inf
    """What comes over it a second, one batch after the other."""
