"""Causes apart from late batches, planted without a device.

Real are all processes, copies, sleeps and waits, and the time they take. Not real is the device:
its kernels are durations on :class:`VirtualStream` (FD301, FD314), the copy to it is a copy within
the host's memory (FD311, FD312), its augmentation computes on the CPU (FD313), and its memory is
that of :class:`CachedMemory` (FD317). The ranks of FD316 are real.
"""

from __future__ import annotations

import multiprocessing
import queue
import random
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed
import torch.nn.functional

from lightning_fastdata.insight.model.evidence import Evidence
from verdicts.planted import BATCH, Plant, of_training
from verdicts.virtual_stream import VirtualStream
from verdicts.workloads import Samples, Stage, Training, sleep_for, spin, train

_STEP_S = 0.02
_STEPS = 50
_RANK_TIMEOUT_S = 60
_NO_DEVICE = "the device's kernels are durations"


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

    def __init__(self) -> None:
        self.times: list[tuple[int, int, tuple[int, int]]] = []

    def __call__(self, batches: Iterator[torch.Tensor]) -> Iterator[torch.Tensor]:
        ready: queue.Queue[Any] = queue.Queue(maxsize=1)

        def copy() -> None:
            for batch in batches:
                began_ns = time.monotonic_ns()
                fresh = torch.empty(batch.shape).copy_(batch)
                ready.put((fresh, (began_ns, time.monotonic_ns())))
                del batch, fresh
            ready.put(None)

        thread = threading.Thread(target=copy, daemon=True)
        thread.start()
        while True:
            asked_ns = time.monotonic_ns()
            found = ready.get()
            if found is None:
                break
            self.times.append((asked_ns, time.monotonic_ns(), found[1]))
            yield found[0]
        thread.join()


def _pinning(megabytes: int) -> Evidence:
    copying = CopyingThread()
    training = Training(
        dataset=Samples(_STEPS * BATCH, floats=megabytes * 250_000 // BATCH),
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


def _transfer(megabytes: int) -> Training:
    def step(batch: torch.Tensor, timeline: Any) -> None:
        timeline.transfer_began()
        batch.clone()
        timeline.transfer_ended()
        time.sleep(0.5 * _STEP_S)

    dataset = Samples(_STEPS * BATCH, floats=megabytes * 250_000 // BATCH)
    return Training(dataset=dataset, step=step)


def _augmentation(pixels: int) -> Training:
    kernel = torch.full((1, 1, 5, 5), 1 / 25)

    def step(batch: torch.Tensor, timeline: Any) -> None:
        timeline.augment_began()
        torch.nn.functional.conv2d(batch.view(BATCH, 1, pixels, pixels), kernel, padding=2)
        timeline.augment_ended()
        time.sleep(_STEP_S)

    return Training(dataset=Samples(_STEPS * BATCH, floats=pixels**2), step=step)


# FD314: something on the host runs between steps.


def _host_gap(magnitude: tuple[str, float]) -> Training:
    kind, gap_s = magnitude
    dataset = Samples(_STEPS * BATCH)
    if kind == "callback":
        return Training(dataset=dataset, step=sleep_for(_STEP_S), between=partial(spin, gap_s))
    device = VirtualStream()

    def step(batch: Any, timeline: Any) -> None:
        device.launch(_STEP_S)

    def log() -> None:
        device.synchronize()
        spin(gap_s)

    return Training(dataset=dataset, step=step, device=device, between=log)


# FD316: the data of one rank come late, and the others wait for it.


def _of_rank(rank: int, slow_rank: int, ranks: int, blocked_s: float, store: str, out: Any) -> None:
    torch.set_num_threads(1)
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{store}", rank=rank, world_size=ranks
    )
    gradient = torch.zeros(10_000)

    def step(batch: Any, timeline: Any) -> None:
        time.sleep(0.01)
        torch.distributed.all_reduce(gradient)

    dataset = Samples(_STEPS * BATCH, blocked_s=blocked_s if rank == slow_rank else 0.0)
    evidence = train(Training(dataset=dataset, step=step))
    stalls: list[Any] = [None] * ranks
    torch.distributed.all_gather_object(stalls, evidence.stall_ms)
    if rank == 0:
        out.send(replace(evidence, rank_stalls_ms=tuple(stalls)))
    torch.distributed.destroy_process_group()


def _straggling_rank(magnitude: tuple[int, float]) -> Evidence:
    """Train on ranks of which the last one's storage is slow; return what rank 0 knows."""
    ranks, blocked_s = magnitude
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe()
    with tempfile.TemporaryDirectory() as folder:
        store = str(Path(folder, "store"))
        started = [
            context.Process(
                target=_of_rank, args=(rank, ranks - 1, ranks, blocked_s, store, theirs)
            )
            for rank in range(ranks)
        ]
        for process in started:
            process.start()
        try:
            if not ours.poll(_RANK_TIMEOUT_S):
                raise TimeoutError(f"no word from rank 0 after {_RANK_TIMEOUT_S} s")
            return ours.recv()  # type: ignore[no-any-return]
        finally:
            for process in started:
                process.join(5.0)
                process.kill()
                process.join()


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
            time.sleep(0.002)
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
        time.sleep(_STEP_S)
        memory.free += blocks

    evidence = train(Training(dataset=Samples(_STEPS * BATCH), step=step))
    unused = 1 - memory.most / memory.capacity
    return replace(evidence, alloc_retries=memory.retries, device_headroom_share=unused)


def _virtual(plant: Plant, what: str) -> Plant:
    return replace(plant, virtual=what)


def _measured(
    code: str, what: str, magnitudes: tuple[Any, ...], run: Callable[[Any], Evidence]
) -> Plant:
    return Plant(code=code, what=what, magnitudes=magnitudes, run=run)


COSTS: tuple[Plant, ...] = (
    _virtual(
        of_training("FD301", "s to read a batch in 20 ms", (0.002, 0.005, 0.008, 0.012, 0.016),
                    _hidden),
        _NO_DEVICE,
    ),
    _virtual(
        _measured("FD311", "MB that a thread copies", (4, 8, 12, 16, 24), _pinning),
        "the memory is fresh, but not page-locked",
    ),
    _virtual(
        of_training("FD312", "MB that are copied", (16, 20, 24, 32, 48), _transfer),
        "the copy stays in the host's memory",
    ),
    _virtual(
        of_training("FD313", "pixels of a blurred edge", (112, 128, 160, 192, 224), _augmentation),
        "the augmentation computes on the CPU",
    ),
    _virtual(
        of_training(
            "FD314",
            "synchronizing logger or plain callback, s that it spins",
            (("item", 0.003), ("item", 0.01), ("item", 0.04), ("callback", 0.005),
             ("callback", 0.02)),
            _host_gap,
        ),
        _NO_DEVICE,
    ),
    _measured(
        "FD316",
        "ranks, s that a sample of the last one sleeps",
        ((2, 0.0008), (2, 0.0012), (2, 0.002), (3, 0.002), (2, 0.004)),
        _straggling_rank,
    ),
    _virtual(
        _measured("FD317", "part of the memory that batches need", (0.8, 0.85, 0.9, 0.95, 0.99),
                  _memory),
        "the memory and its allocator are numbers",
    ),
)  # fmt: skip
