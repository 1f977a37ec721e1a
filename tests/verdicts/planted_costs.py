"""Causes apart from late batches, planted on a virtual machine.

Not real is the device: the copy to it and its augmentation are durations of the host. The ranks of
FD316 are processes of one machine, which wait for each other after each step.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

from rig.machine import VirtualBarrier, machine, sleep, work

from lightning_fastdata.insight.evidence import Evidence
from lightning_fastdata.insight.ranks import RankTiming
from verdicts.known import evidence_with
from verdicts.planted import BATCH, Plant, of_training
from verdicts.workloads import Samples, Training, train

if TYPE_CHECKING:
    import torch

_STEP_S = 0.02
_STEPS = 50


# FD312 and FD313: the batch is copied, and augmented.


def _transfer(copy_s: float) -> Training:
    def step(batch: torch.Tensor, timeline: Any) -> None:
        timeline.transfer_began()
        sleep(copy_s)
        timeline.transfer_ended()
        sleep(0.5 * _STEP_S)

    return Training(dataset=Samples(_STEPS * BATCH), step=step)


def _augmentation(augment_s: float) -> Training:
    def step(batch: torch.Tensor, timeline: Any) -> None:
        timeline.augment_began()
        work(augment_s)
        timeline.augment_ended()
        sleep(_STEP_S)

    return Training(dataset=Samples(_STEPS * BATCH), step=step)


# FD316: the data of one rank come late, and the others wait for it.


def _straggling_rank(magnitude: tuple[int, float]) -> Evidence:
    """Train on ranks of which the last one's storage is slow; return what rank 0 knows."""
    ranks, blocked_s = magnitude
    here, reduced = machine(), VirtualBarrier(ranks)
    found: dict[int, Evidence] = {}

    def step(batch: Any, timeline: Any) -> None:
        sleep(0.01)
        reduced.wait()

    def train_rank(rank: int) -> None:
        slow = rank == ranks - 1
        dataset = Samples(_STEPS * BATCH, blocked_s=blocked_s if slow else 0.0)
        found[rank] = train(Training(dataset=dataset, step=step))

    for rank in range(1, ranks):
        here.start(here.process(), partial(train_rank, rank))
    train_rank(0)
    while len(found) < ranks:
        sleep(0.001)
    timings = tuple(
        RankTiming(rank=rank, host="a", steps=_STEPS, stall_ms=found[rank].times.stall_ms)
        for rank in range(ranks)
    )
    return evidence_with(found[0], ranks=timings)


COSTS: tuple[Plant, ...] = (
    of_training("FD312", "s that a batch is copied", (0.005, 0.008, 0.012, 0.02, 0.04), _transfer),
    of_training("FD313", "s of an augmentation", (0.004, 0.006, 0.01, 0.02, 0.04), _augmentation),
    Plant(
        code="FD316",
        what="ranks, s that a sample of the last one sleeps",
        magnitudes=((2, 0.0008), (2, 0.0012), (2, 0.002), (3, 0.002), (2, 0.004)),
        run=_straggling_rank,
    ),
)  # fmt: skip
