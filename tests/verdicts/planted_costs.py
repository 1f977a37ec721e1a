"""Causes apart from late batches, planted on a virtual machine.

Not real is the device: its kernels are durations on :class:`VirtualStream` (FD301, FD314), the copy
to it and its augmentation are durations of the host (FD311 to FD313), and its memory is that of
:class:`CachedMemory` (FD317). The ranks of FD316 are processes of one machine, which wait for each
other after each step.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from rig.machine import VirtualBarrier, machine, sleep, work

from lightning_fastdata.insight.model.evidence import Evidence
from lightning_fastdata.insight.waits.ranks import RankTiming
from verdicts.planted import BATCH, Plant, of_training
from verdicts.virtual_stream import VirtualStream
from verdicts.workloads import Samples, Stage, Training, sleep_for, train

if TYPE_CHECKING:
    import torch

_STEP_S = 0.02
_STEPS = 50


# FD301: the training process reads by itself, while the device has work.


def _hidden(read_s: float) -> Training:
    device = VirtualStream()

    def step(batch: Any, timeline: Any) -> None:
        device.launch(_STEP_S)
        device.synchronize(left_s=3 * _STEP_S)  # the queue is full

    dataset = Samples(_STEPS * BATCH, cpu_s=read_s / BATCH)
    return Training(dataset=dataset, step=step, device=device, loader={"executor": "inline"})


# FD311: a thread copies each batch into memory of its own, as torch's pin thread does.


class CopyingThread:
    """Copies batches one ahead, and notes when, and when they were asked for and given."""

    def __init__(self, copy_s: float) -> None:
        self.copy_s = copy_s
        self.times: list[tuple[int, int, tuple[int, int]]] = []
        self.ready: deque[Any] = deque()

    def __call__(self, batches: Iterator[torch.Tensor]) -> Iterator[torch.Tensor]:
        here = machine()
        asks = here.current

        def copy() -> None:
            for batch in batches:
                began_ns = here.now_ns
                work(self.copy_s)
                self.ready.append((batch, (began_ns, here.now_ns)))
                here.wake(asks)
                while self.ready:  # one is ahead
                    here.wait()
            self.ready.append(None)
            here.wake(asks)

        copies = here.start(here.training, copy)
        while True:
            asked_ns = here.now_ns
            while not self.ready:
                here.wait()
            found = self.ready.popleft()
            here.wake(copies)
            if found is None:
                return
            self.times.append((asked_ns, here.now_ns, found[1]))
            yield found[0]


def _pinning(copy_s: float) -> Evidence:
    copying = CopyingThread(copy_s)
    training = Training(
        dataset=Samples(_STEPS * BATCH),
        step=sleep_for(0.0),
        loader={"num_workers": 1, "ahead": copying},
    )
    stage = Stage.start(training)
    try:
        stage.epoch()
        stamps = [
            stamps._replace(requested_ns=asked, delivered_ns=given, pinned_ns=copied)
            for stamps, (asked, given, copied) in zip(stage.records, copying.times, strict=True)
        ]
        stage.records.clear()
        stage.records.extend(stamps)
        return stage.evidence()
    finally:
        stage.loader.close()


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


# FD314: something on the host runs between steps.


def _host_gap(gap_s: float) -> Training:
    device = VirtualStream()

    def step(batch: Any, timeline: Any) -> None:
        device.launch(_STEP_S)

    def log() -> None:
        device.synchronize()
        work(gap_s)

    dataset = Samples(_STEPS * BATCH)
    return Training(dataset=dataset, step=step, device=device, between=log)


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
        RankTiming(rank=rank, host="a", steps=_STEPS, stall_ms=found[rank].stall_ms)
        for rank in range(ranks)
    )
    return replace(found[0], ranks=timings)


# FD317: memory runs short.


class CachedMemory:
    """An allocator that caches blocks as torch's does: what was freed is used again, if it fits.

    Where there is no room left, it gives all free blocks back and tries again.
    """

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.reserved = self.most = self.retries = 0
        self.free: list[int] = []

    def allocate(self, size: int) -> int:
        """Return the size of the block that was found."""
        fitting = [block for block in self.free if size <= block <= 1.2 * size]
        if fitting:
            self.free.remove(min(fitting))
            return min(fitting)
        if self.reserved + size > self.capacity:
            self.retries += 1
            sleep(0.002)
            self.reserved -= sum(self.free)
            self.free.clear()
        self.reserved += size
        self.most = max(self.most, self.reserved)
        return size


def _memory(share: float) -> Evidence:
    """Train on batches of uneven length whose activations take up to a share of the memory."""
    draw = random.Random(round(share * 100))
    memory = CachedMemory(10_000)

    def step(batch: Any, timeline: Any) -> None:
        longest = draw.uniform(0.4, 1.0) * share
        blocks = [memory.allocate(round(longest * memory.capacity / 20)) for _ in range(20)]
        sleep(_STEP_S)
        memory.free += blocks

    evidence = train(Training(dataset=Samples(_STEPS * BATCH), step=step))
    unused = 1 - memory.most / memory.capacity
    return replace(evidence, alloc_retries=memory.retries, device_headroom_share=unused)


COSTS: tuple[Plant, ...] = (
    of_training("FD301", "s to read a batch in 20 ms", (0.002, 0.005, 0.008, 0.012, 0.016),
                _hidden),
    Plant(
        code="FD311", what="s that a thread copies a batch into memory of its own",
        magnitudes=(0.002, 0.004, 0.008, 0.012, 0.02), run=_pinning,
    ),
    of_training("FD312", "s that a batch is copied", (0.005, 0.008, 0.012, 0.02, 0.04), _transfer),
    of_training("FD313", "s of an augmentation", (0.004, 0.006, 0.01, 0.02, 0.04), _augmentation),
    of_training("FD314", "s that a logger computes which waits for the device",
                (0.003, 0.005, 0.01, 0.02, 0.04), _host_gap),
    Plant(
        code="FD316",
        what="ranks, s that a sample of the last one sleeps",
        magnitudes=((2, 0.0008), (2, 0.0012), (2, 0.002), (3, 0.002), (2, 0.004)),
        run=_straggling_rank,
    ),
    Plant(
        code="FD317", what="part of the memory that batches need",
        magnitudes=(0.8, 0.85, 0.9, 0.95, 0.99), run=_memory,
    ),
)  # fmt: skip
