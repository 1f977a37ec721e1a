"""Causes of slow steps, planted for real: what is planted has to be the first finding.

Samples sleep, spin or read files, workers are processes, ranks are processes that reduce with gloo,
neighbours are processes that spin. What needs a device is planted as far as a machine without one
allows, and ``virtual`` says what is not real; see :mod:`verdicts.planted_costs`.
"""

from __future__ import annotations

import multiprocessing
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset

from lightning_fastdata.insight.model.evidence import Evidence
from lightning_fastdata.stamps.batch_stamps import ReadRates
from verdicts.workloads import (
    CPUS,
    Samples,
    SlowCollate,
    SlowStart,
    Stage,
    Training,
    sleep_for,
    spin,
    train,
)

BATCH = 16
RUN_S = 1.2
"""About how long a run takes; the first steps of it are slower than the others."""


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
    """Plants one of them and returns what was measured."""
    virtual: str = ""
    """What is not real; empty: everything is."""


def of_training(
    code: str, what: str, magnitudes: tuple[Any, ...], training: Callable[[Any], Training]
) -> Plant:
    """Return a plant that is a training, and nothing else."""
    return Plant(
        code=code,
        what=what,
        magnitudes=magnitudes,
        run=lambda magnitude: train(training(magnitude)),
    )


def _batches(batch_s: float, *, least: int = 16, most: int = 150) -> int:
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


class SharedBandwidth(Dataset[torch.Tensor]):
    """Real files of a storage that gives so many MB/s to all readers together."""

    def __init__(self, folder: Path, count: int, kilobytes: int, mb_s: float) -> None:
        self.paths = [folder / f"{number}.bin" for number in range(8)]
        for path in self.paths:
            path.write_bytes(bytes(kilobytes * 1000))
        self.count = count
        self.read_s = kilobytes / 1e3 / mb_s
        self.turn = multiprocessing.get_context("fork").Lock()

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> torch.Tensor:
        with self.turn:
            began = time.monotonic()
            data = self.paths[index % len(self.paths)].read_bytes()
            time.sleep(max(0.0, began + self.read_s - time.monotonic()))
        return torch.frombuffer(bytearray(data), dtype=torch.uint8)


def _bandwidth(magnitude: tuple[int, int]) -> Evidence:
    """Read with one worker, then with more, and compare what they were given."""
    mb_s, many = magnitude
    kilobytes = mb_s * 3  # 3 ms a sample
    rates = []
    with tempfile.TemporaryDirectory() as folder:
        dataset = SharedBandwidth(Path(folder), 20 * BATCH, kilobytes, mb_s)
        for workers in (1, many):
            training = Training(
                dataset=dataset, step=sleep_for(0.01), loader={"num_workers": workers}
            )
            evidence = train(training)
            assert evidence.step_ms is not None
            rates += [workers, BATCH / evidence.step_ms]
    return replace(evidence, read_rates=ReadRates(*rates))


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
    loader = {"num_workers": workers, "executor": "workers"}
    return Training(dataset=dataset, step=step, loader=loader)


# FD307 to FD309: collation, hand-over, a bit of everything.


def _collation(collate_s: float) -> Training:
    return Training(
        dataset=Samples(_batches(collate_s) * BATCH, blocked_s=0.0001),
        step=sleep_for(0.2 * collate_s),
        loader={"num_workers": 1, "collate_fn": SlowCollate(collate_s)},
    )


class Pickled:
    """Collates to an object that has to be pickled, as arrays and lists of objects are."""

    def __init__(self, megabytes: int, kind: str) -> None:
        self.megabytes, self.kind = megabytes, kind
        self.batch: Any = np.ones(megabytes * 125_000)
        if kind == "objects":
            self.batch = [{"name": str(n), "box": (n, n + 1)} for n in range(megabytes * 8_000)]

    def __call__(self, samples: list[torch.Tensor]) -> Any:
        return self.batch

    def __reduce__(self) -> tuple[Any, ...]:
        return Pickled, (self.megabytes, self.kind)


class BusyThreads:
    """Threads of the training process that hold the interpreter's lock."""

    def __init__(self, count: int) -> None:
        self.stop = threading.Event()
        self.threads = [threading.Thread(target=self._spin, daemon=True) for _ in range(count)]

    def _spin(self) -> None:
        while not self.stop.is_set():
            sum(range(1000))

    def __enter__(self) -> None:
        for thread in self.threads:
            thread.start()

    def __exit__(self, *_: object) -> None:
        self.stop.set()
        for thread in self.threads:
            thread.join()


def _handover(magnitude: tuple[str, int]) -> Evidence:
    kind, much = magnitude
    if kind == "threads":
        training = Training(dataset=Samples(60 * BATCH), step=sleep_for(0.002), step_cpus=1.0)
        with BusyThreads(much):
            return train(training)
    return train(
        Training(
            dataset=Samples(40 * BATCH, floats=10),
            step=sleep_for(0.002),
            loader={"num_workers": 1, "executor": "torch", "collate_fn": Pickled(much, kind)},
        )
    )


def _everything(batch_s: float) -> Training:
    """35 % on a CPU, 30 % blocked, 30 % in collation, and what is left for the hand-over."""
    return Training(
        dataset=Samples(
            _batches(batch_s) * BATCH,
            cpu_s=0.35 * batch_s / BATCH,
            blocked_s=0.30 * batch_s / BATCH,
        ),
        step=sleep_for(0.25 * batch_s),
        loader={"num_workers": 1, "collate_fn": SlowCollate(0.30 * batch_s)},
    )


# FD310: epochs start anew.


def _epoch_starts(start_s: float) -> Training:
    return Training(
        dataset=Samples(15 * BATCH),
        step=sleep_for(0.02),
        epochs=4,
        loader={"num_workers": 1, "worker_init_fn": SlowStart(start_s)},
    )


# FD315: neighbours.


def _spin_for_ever() -> None:
    while True:
        spin(1.0)


def _neighbours(each: int) -> Evidence:
    """Have processes take the CPUs from work that would fit."""
    context = multiprocessing.get_context("fork")
    spinning = [context.Process(target=_spin_for_ever, daemon=True) for _ in range(each * CPUS)]
    for process in spinning:
        process.start()
    try:
        dataset = Samples(60 * BATCH, cpu_s=0.0006)
        return train(Training(dataset=dataset, step=sleep_for(0.012)))
    finally:
        for process in spinning:
            process.terminate()
        for process in spinning:
            process.join()


# FD318: validation has its own loader.


def _validation(blocked_s: float) -> Evidence:
    """Train with a loader that keeps up, and validate with one that does not."""
    training = Training(
        dataset=Samples(20 * BATCH, blocked_s=blocked_s),
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
        return fed.evidence(val_stall_share=starved.summary("val").stall_share)
    finally:
        fed.loader.close()
        starved.loader.close()


def _cheap(step_s: float) -> Training:
    return Training(dataset=Samples(_batches(step_s, least=8) * BATCH), step=sleep_for(step_s))


LOADING: tuple[Plant, ...] = (
    of_training(
        "FD302", "s that one sample in 160 sleeps", (0.1, 0.15, 0.25, 0.4, 0.6), _slow_samples
    ),
    of_training("FD303", "s that a sample sleeps", (0.0005, 0.001, 0.002, 0.005, 0.01), _latency),
    Plant(
        code="FD304",
        what="MB/s that all readers share, and readers",
        magnitudes=((2, 2), (5, 4), (20, 3), (50, 8), (100, 4)),
        run=_bandwidth,
    ),
    of_training(
        "FD305", "s that a sample spins", (0.0005, 0.001, 0.002, 0.005, 0.01), _few_workers
    ),
    of_training(
        "FD306",
        "processes that read, s that a sample spins",
        (
            (2 * CPUS, 0.001), (3 * CPUS, 0.002), (6 * CPUS, 0.001), (4 * CPUS, 0.001),
            (4 * CPUS, 0.004),
        ),
        _few_cpus,
    ),
    of_training("FD307", "s that collating spins", (0.005, 0.01, 0.02, 0.05, 0.1), _collation),
    Plant(
        code="FD308",
        what="MB of one array, or of objects, that are pickled; threads that compute",
        magnitudes=(("array", 8), ("array", 32), ("objects", 2), ("threads", 1), ("threads", 3)),
        run=_handover,
    ),
    of_training("FD309", "s of all parts of a batch", (0.01, 0.02, 0.03, 0.05, 0.08), _everything),
    of_training("FD310", "s that a worker starts", (0.05, 0.1, 0.2, 0.4, 0.8), _epoch_starts),
    Plant(code="FD315", what="spinning processes for each CPU", magnitudes=(1, 2, 3, 4, 6),
          run=_neighbours),
    Plant(
        code="FD318",
        what="s that a sample sleeps, beside one worker in validation",
        magnitudes=(0.001, 0.002, 0.003, 0.005, 0.008),
        run=_validation,
    ),
    of_training("FD319", "s of a step over cheap data", (0.05, 0.08, 0.12, 0.2, 0.3), _cheap),
)  # fmt: skip
