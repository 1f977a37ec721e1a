"""Trainings on a pretended CUDA, in all ways of loading, and the laws of their copies.

A training is one :class:`Case`; :func:`train` runs it and tells what the device saw.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import logging
import warnings
import weakref
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any, Literal

import albumentations as A
import lightning.pytorch as pl
import numpy as np
import torch
from albumentations.pytorch import ToTensorV2
from device.host_streams import made_ahead
from torch.utils.data import Dataset, TensorDataset
from trainers import quiet_trainer

from lightning_fastdata import (
    DataThroughputCallback,
    FastDataLoader,
    FastDataModule,
    LoaderOptions,
    prefetch,
)
from lightning_fastdata.augment.transform import as_batch_transform
from lightning_fastdata.batches.staged import move
from lightning_fastdata.device import DeviceStreams
from lightning_fastdata.loading.prefetch import BATCHES_AHEAD, SideLane
from rig.late_cuda import HostWait, LateCuda, late_cuda

torch.set_num_threads(1)
GARBAGE = -12345
SAMPLES, BATCH, EPOCHS = 24, 4, 2

Executor = Literal["inline", "gather", "workers"]
Memory = Literal["ordinary", "pinned"]
Way = Literal["prefetch", "off", "auto"]


@dataclass(frozen=True)
class Case:
    """One training."""

    executor: Executor
    memory: Memory
    """Of the batches on the host."""
    way: Way
    """``prefetch()`` in a plain loop, or how a ``FastDataModule`` under a ``Trainer`` moves."""
    augmented: bool = False
    """Whether a pipeline runs on the device."""
    measured: bool = False
    """Whether a ``DataThroughputCallback`` watches the trainer."""
    device: int = 0
    """The index of the device. The current one is the first."""

    @property
    def copies(self) -> int:
        """From the host, for each batch: images, labels, and what was drawn for them."""
        return 3 if self.augmented else 2

    def __str__(self) -> str:
        words = [self.executor, self.memory, self.way]
        words += ["augmented"] * self.augmented + ["measured"] * self.measured
        words += [f"device_{self.device}"] * (self.device > 0)
        return "-".join(words)


def all_cases() -> list[Case]:
    """Return all trainings that there are."""
    cases = []
    ways: list[Way] = ["prefetch", "off", "auto"]
    executors: list[Executor] = ["inline", "gather", "workers"]
    memories: list[Memory] = ["ordinary", "pinned"]
    for way, executor, memory in itertools.product(ways, executors, memories):
        case = Case(executor, memory, way)
        # Batches that are gathered hold what the dataset has, without a pipeline.
        cases += [case] if executor == "gather" else [case, replace(case, augmented=True)]
    watched = [replace(case, measured=True) for case in cases if case.way != "prefetch"]
    elsewhere = [
        replace(case, device=1) for case in cases if case.way != "off" and not case.augmented
    ]
    return cases + watched + elsewhere


@dataclass(frozen=True)
class Step:
    """What one step has read of its batch."""

    labels: list[int]
    first: torch.Tensor
    """The images as the first kernel of the step finds them."""
    last: torch.Tensor
    """As its last kernel does."""
    held: int
    """Batches sent by its beginning that the device was not through with."""
    crossed: int
    """Batches that had been copied by its beginning."""


@dataclass(frozen=True)
class Seen:
    """What was seen of one training."""

    steps: list[Step]
    torn: list[str]
    """Page-locked memory that was written while a queued copy read from it."""
    waits: list[HostWait]
    """Where the host waited for the device, between the first step and the last."""
    copies: Counter[str]
    """Copies to the device, by the kind of memory that they read from."""
    order: list[int]
    """The numbers of the streams whose work was carried out, piece by piece."""


# The laws


def check_bytes(case: Case, seen: Seen) -> None:
    """The bytes of a batch are right at the first and at the last read of a step."""
    expected = right_images(case)
    assert len(seen.steps) == EPOCHS * SAMPLES // BATCH
    for number, step in enumerate(seen.steps):
        epoch = number // (SAMPLES // BATCH)
        assert set(step.labels) <= set(range(SAMPLES)), f"{case}: step {number} has wrong labels"
        right = torch.stack([expected[epoch, each] for each in step.labels])
        assert torch.equal(step.first, right), f"{case}: step {number} began with wrong bytes"
        assert torch.equal(step.last, right), f"{case}: the bytes changed within step {number}"
    labels = [label for step in seen.steps for label in step.labels]
    assert sorted(labels) == sorted(EPOCHS * list(range(SAMPLES)))


def check_sources(case: Case, seen: Seen) -> None:
    """No page-locked memory is written while a queued copy reads from it."""
    assert not seen.torn, f"{case}: {seen.torn}"
    assert seen.copies[case.memory] >= len(seen.steps), f"{case}: copied from {seen.copies}"


def check_waits(case: Case, seen: Seen) -> None:
    """The host waits for the device only to hold no more batches there than it may.

    It goes on as soon as it is within that limit again. A copy from ordinary memory waits for its
    stream in any case, as CUDA does it.
    """
    for wait in seen.waits:
        if case.memory == "ordinary" and wait.call == "copy from ordinary memory":
            continue
        assert wait.call == "Event.synchronize", f"{case}: {wait}"
        assert wait.notes < wait.noted, f"{case}: no step is left to do after {wait}"
        held = wait.copies // case.copies - wait.notes
        assert held >= BATCHES_AHEAD, f"{case}: {held} batches were left on the device after {wait}"


def check_limit(case: Case, seen: Seen) -> None:
    """However late the device is, it holds the batch of a step and those that may be ahead."""
    most = max(step.held for step in seen.steps)
    assert case.way == "off" or most <= 1 + BATCHES_AHEAD, f"{case}: {most} batches on the device"


def check_overlap(case: Case, seen: Seen) -> None:
    """A batch is copied and transformed beside the steps before it, with steps that are late."""
    assert any(step.held > BATCHES_AHEAD for step in seen.steps)
    for number, step in enumerate(seen.steps):
        assert step.crossed > number, f"{case}: step {number} began before its batch had crossed"


def overlaps(case: Case) -> bool:
    """Return whether nothing that a batch has to wait for keeps it from crossing early."""
    return case.memory != "ordinary" and case.way != "off"


# The trainings


class Images(Dataset):
    """Sample ``i`` is an image whose bytes come from ``i``, and ``i``."""

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, i: int) -> dict[str, Any]:
        return {"image": image(i), "label": i}


def image(i: int) -> np.ndarray:
    """Return the image of a sample: four are more than is copied out of a slot for its size."""
    return np.random.default_rng(i).integers(0, 256, (48, 48, 3), np.uint8)


def pipeline() -> A.Compose:
    return A.Compose(
        [A.RandomCrop(44, 40), A.HorizontalFlip(), A.RandomBrightnessContrast(p=0.5), ToTensorV2()]
    )


@functools.cache
def columns() -> TensorDataset:
    images = torch.stack([torch.from_numpy(image(i)) for i in range(SAMPLES)])
    return TensorDataset(images, torch.arange(SAMPLES))


@functools.cache
def right_images(case: Case) -> dict[tuple[int, int], torch.Tensor]:
    """Return the right image by epoch and label.

    An augmented one is what Albumentations makes in this process, without a device: draws depend
    on the seed, the epoch and the sample.
    """
    if not case.augmented:
        plain = {i: torch.from_numpy(image(i)) for i in range(SAMPLES)}
        return {(epoch, i): plain[i] for epoch in range(EPOCHS) for i in range(SAMPLES)}
    loader: Any = FastDataLoader(
        Images(), BATCH, seed=5, transform=as_batch_transform(pipeline()), executor="inline"
    )
    right = {}
    for epoch in range(EPOCHS):
        loader.epoch = lambda number=epoch: number
        for batch in loader:
            for label, one in zip(batch["label"].tolist(), batch["image"], strict=True):
                right[epoch, label] = one
    return right


def train(case: Case, schedule: str, seed: int = 0) -> Seen:
    """Run a training on a pretended CUDA, and return what was seen of it."""
    torch.manual_seed(7)
    with contextlib.ExitStack() as stack:
        stack.enter_context(warnings.catch_warnings())
        cuda = stack.enter_context(late_cuda(schedule, seed))
        # Lightning warns of few workers and of a step without a loss, and says what it trains on.
        warnings.simplefilter("ignore")
        if case.executor == "inline":
            stack.enter_context(made_ahead())
        stack.callback(logging.disable, logging.root.manager.disable)
        logging.disable(logging.WARNING)
        record: list[tuple[Any, ...]] = []
        run = _loop if case.way == "prefetch" else _fit
        waits = run(case, cuda, record)
        # By now nothing of the training is left but what its steps have computed.
        steps = [
            Step(
                labels.read().tolist(),
                first.read(),
                last.read(),
                held=sent // case.copies - passed,
                crossed=copied // case.copies,
            )
            for labels, first, last, sent, copied, passed in record
        ]
    return Seen(steps, cuda.torn, waits, cuda.copies, cuda.order)


def _step(batch: Any, cuda: LateCuda, record: list[tuple[Any, ...]]) -> None:
    images, labels = batch.values() if isinstance(batch, dict) else batch
    counts = cuda.copies.total(), cuda.copied, cuda.notes
    first = images + 0
    # Something in between, which takes memory and lets go of it.
    images.float().mul(0).sub(1)
    record.append((labels + 0, first, images + 0, *counts))
    cuda.note(images.device)


def _options(case: Case) -> dict[str, Any]:
    workers = case.executor == "workers"
    return {
        "executor": case.executor,
        "num_workers": 1 if workers else 0,
        "persistent_workers": workers,
        "pin_memory": case.memory != "ordinary",
    }


def _loop(case: Case, cuda: LateCuda, record: list[tuple[Any, ...]]) -> list[HostWait]:
    options: dict[str, Any] = {"shuffle": True, "seed": 5, **_options(case)}
    if case.augmented:
        transform = as_batch_transform(pipeline())
        options |= {"transform": transform, "on_device": True, "staged": "train"}
    dataset = columns() if case.executor == "gather" else Images()
    loader = FastDataLoader(dataset, BATCH, **options)
    batches = prefetch(loader, f"cuda:{case.device}")
    for epoch in range(EPOCHS):
        batches.set_epoch(epoch)
        for batch in batches:
            _step(batch, cuda, record)
            del batch
    waits = list(cuda.waits)
    loader.close()
    return waits


class Module(pl.LightningModule):
    """Reads its batches, and learns nothing."""

    def __init__(self, cuda: LateCuda, record: list[tuple[Any, ...]]) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.read = functools.partial(_step, cuda=cuda, record=record)
        self.cuda = cuda
        self.waits: list[HostWait] = []

    def on_train_start(self) -> None:
        # Lightning has copied numbers of its own until now.
        self.cuda.copies.clear()
        self.cuda.copied = 0
        self.before = len(self.cuda.waits)

    def training_step(self, batch: Any, index: int) -> None:
        self.read(batch)

    def on_train_end(self) -> None:
        self.waits = self.cuda.waits[self.before :]

    def configure_optimizers(self) -> None:
        return None


def _fit(case: Case, cuda: LateCuda, record: list[tuple[Any, ...]]) -> list[HostWait]:
    arguments: dict[str, Any] = {}
    if case.augmented:
        arguments = {"augment": {"train": pipeline()}, "augment_on": "gpu"}
    data = FastDataModule.from_datasets(
        columns() if case.executor == "gather" else Images(),
        batch_size=BATCH,
        seed=5,
        prefetch=case.way,
        guard="off",
        options=LoaderOptions(**_options(case)),
        **arguments,
    )
    module = Module(cuda, record)
    trainer = quiet_trainer(
        accelerator="gpu",
        devices=[case.device],
        max_epochs=EPOCHS,
        callbacks=[DataThroughputCallback(summary=False, report=False)] if case.measured else [],
    )
    trainer.fit(module, datamodule=data)
    return module.waits


# Batches without a loader


class Announced(Iterator[Any]):
    """Batches that are there before they are asked for, and so may be sent ahead."""

    def __init__(self, batches: Iterator[Any]) -> None:
        self._batches = batches

    def __next__(self) -> Any:
        return next(self._batches)

    def ready(self) -> bool:
        return True


def reused_batches(cuda: LateCuda, count: int, rows: int = 8) -> Announced:
    """Return batches in locked memory that the host writes again when it has let go of them.

    All numbers of batch ``n`` are ``n``.
    """
    return Announced(_reused_batches(cuda, count, rows))


def _reused_batches(cuda: LateCuda, count: int, rows: int) -> Iterator[list[torch.Tensor]]:
    for number in range(count):
        kept = cuda.lock_memory(rows)
        kept[:] = number
        view = kept[:]
        weakref.finalize(view, kept.fill, GARBAGE).atexit = False
        yield [torch.from_numpy(view)]


def consume(batches: Iterable[Any], reads: int = 3) -> list[list[Any]]:
    """Train on batches: read each tensor several times; return what is read in the end."""
    seen = []
    for batch in batches:
        seen.append([tensor + 0 for tensor in batch for _ in range(reads)])
        del batch
    return seen


def read(seen: list[list[Any]]) -> list[list[list[int]]]:
    """Return what :func:`consume` has seen, as numbers."""
    return [[one.read().tolist() for one in each] for each in seen]


def check_lane(schedule: str, seed: int = 0) -> None:
    """Batches whose host memory is written again at once cross whole, beside the steps."""
    with late_cuda(schedule, seed) as cuda:
        lane = SideLane(DeviceStreams(torch.device("cuda", 0)))
        crossings = (lane.send(batch, moved_and_doubled) for batch in reused_batches(cuda, 8))
        seen = read(consume(crossing.land() for crossing in crossings))
        assert seen == [[[2 * number] * 8] * 3 for number in range(8)]
        assert not cuda.torn


def moved_and_doubled(batch: list[torch.Tensor]) -> list[torch.Tensor]:
    """Have a batch cross, with memory of its own in between."""
    return doubled(move(batch, torch.device("cuda", 0), non_blocking=True))


def doubled(batch: list[torch.Tensor]) -> list[torch.Tensor]:
    """Transform a batch, with memory of its own in between."""
    halfway = [tensor * 4 for tensor in batch]
    return [tensor // 2 for tensor in halfway]
