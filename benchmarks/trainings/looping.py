"""Trainings in which the training process is slow: samplers, unpickling, hooks, pauses, ranks."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lightning.pytorch as lightning
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from torch.utils.data import Dataset, Sampler

from trainings.decoding import Rows
from trainings.parts import Accepted, Load, Made, Model, several, spin


class WeightedDraws(Sampler[int]):
    """Draws by weight, one after the other, as the textbook says."""

    def __init__(self, count: int, classes: int) -> None:
        self.count = count
        self.weights = [1.0 + n % 5 for n in range(classes)]

    def __len__(self) -> int:
        return self.count

    def __iter__(self) -> Iterator[int]:
        draw = random.Random(0)
        for _ in range(self.count):
            left = draw.random() * sum(self.weights)
            drawn = 0
            while drawn < len(self.weights) - 1 and left > self.weights[drawn]:
                left -= self.weights[drawn]
                drawn += 1
            yield drawn % self.count


class SimilarLengths(Sampler[list[int]]):
    """Batches of similar lengths, found by sorting all that is left for each batch."""

    def __init__(self, batches: int, size: int, texts: int) -> None:
        self.batches, self.size = batches, size
        draw = random.Random(0)
        self.lengths = [draw.randint(5, 500) for _ in range(texts)]

    def __len__(self) -> int:
        return self.batches

    def __iter__(self) -> Iterator[list[int]]:
        draw = random.Random(1)
        for _ in range(self.batches):
            like = draw.choice(self.lengths)
            near = sorted(range(len(self.lengths)), key=lambda n: abs(self.lengths[n] - like))
            yield [n % (self.size * self.batches) for n in near[: self.size]]


def sampling(_: Path, form: Any, workers: int, batches: int, size: int, by_batch: bool) -> Made:
    options: dict[str, Any] = {"num_workers": workers, "persistent_workers": workers > 0}
    if by_batch:
        options["batch_sampler"] = SimilarLengths(batches, 16, size)
    else:
        options["sampler"] = WeightedDraws(16 * batches, size)
    dataset = Rows(16 * batches, 500)
    return Made(load=Load(dataset=dataset, form=form, options=options), model=Model(0.005))


class Annotations:
    """What is known of a picture, in a class of one's own."""

    def __init__(self, boxes: list[Any]) -> None:
        self.boxes = boxes


class Annotated(Dataset[dict[str, Any]]):
    """Pictures with annotations as they come from JSON: dicts in lists in dicts."""

    def __init__(self, count: int, boxes: int, wrapped: bool) -> None:
        self.count, self.boxes, self.wrapped = count, boxes, wrapped

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> dict[str, Any]:
        boxes = [
            {
                "box": [n, n + 1.0, 2.0 * n, float(index)],
                "label": f"thing-{n}",
                "crowd": bool(n % 2),
            }
            for n in range(self.boxes)
        ]
        held = Annotations(boxes) if self.wrapped else boxes
        return {"image": torch.zeros(64), "boxes": held, "id": index}


def as_they_are(samples: list[Any]) -> list[Any]:
    return samples


def objects(
    _: Path, form: Any, workers: int, batches: int, boxes: int, step_s: float, wrapped: bool
) -> Made:
    options = {"num_workers": workers, "collate_fn": as_they_are}
    load = Load(dataset=Annotated(16 * batches, boxes, wrapped), form=form, options=options)
    return Made(load=load, model=Model(step_s))


class ConfusionPlotter(lightning.Callback):
    """Draws something in a hook."""

    def __init__(self, hook: str, seconds: float) -> None:
        setattr(self, hook, lambda *_args, **_kwargs: spin(seconds))


class Watching(Model):
    """A model whose own hook computes statistics of its weights."""

    def on_train_batch_end(self, *_args: Any, **_kwargs: Any) -> None:
        spin(0.012)


def watched(
    _: Path, form: Any, hook: str, seconds: float, batches: int = 120, epochs: int = 1
) -> Made:
    model: Model = Watching(0.01) if hook == "of the module" else Model(0.01)
    callbacks = () if hook == "of the module" else (ConfusionPlotter(hook, seconds),)
    load = Load(dataset=Rows(16 * batches, 200), form=form, options={"num_workers": 1})
    return Made(load=load, model=model, callbacks=callbacks, trainer={"max_epochs": epochs})


class RemoteLogger(CSVLogger):
    """Sends each value to a server, and waits for it."""

    answer_s = 0.01

    def log_metrics(self, metrics: Any, step: int | None = None) -> None:
        time.sleep(self.answer_s)
        super().log_metrics(metrics, step)


class Talkative(Model):
    """Logs its loss in each step."""

    def training_step(self, batch: Any, number: int) -> torch.Tensor:
        loss = super().training_step(batch, number)
        self.log("loss", loss, on_step=True, batch_size=16)
        return loss


def logged(folder: Path, form: Any, every: int, seconds: float, batches: int = 150) -> Made:
    logger = RemoteLogger(folder)
    logger.answer_s = seconds
    load = Load(dataset=Rows(16 * batches, 200), form=form, options={"num_workers": 1})
    trainer = {"logger": logger, "log_every_n_steps": every}
    return Made(load=load, model=Talkative(0.008), trainer=trainer)


class Large(Model):
    """A model with many weights that it hardly uses."""

    def __init__(self, floats: int) -> None:
        super().__init__(0.01)
        self.embedding = torch.nn.Parameter(torch.zeros(floats), requires_grad=False)


def saved(folder: Path, form: Any, every: int, floats: int, batches: int) -> Made:
    callback = ModelCheckpoint(folder / "saved", every_n_train_steps=every, save_top_k=-1)
    load = Load(dataset=Rows(16 * batches, 200), form=form, options={"num_workers": 1})
    trainer = {"enable_checkpointing": True}
    return Made(load=load, model=Large(floats), callbacks=(callback,), trainer=trainer)


class Normalizing(Model):
    """Does on the way to the device, or behind it, what workers could have done."""

    def __init__(self, hook: str, seconds: float) -> None:
        super().__init__(0.01)
        self.hook, self.seconds = hook, seconds

    def transfer_batch_to_device(self, batch: Any, device: Any, dataloader_idx: int) -> Any:
        if self.hook == "transfer":
            spin(self.seconds)
        return super().transfer_batch_to_device(batch, device, dataloader_idx)

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        if self.hook == "after":
            spin(self.seconds)
        return batch


def hooked(_: Path, form: Any, hook: str, seconds: float) -> Made:
    load = Load(dataset=Rows(16 * 120, 200), form=form, options={"num_workers": 1})
    return Made(load=load, model=Normalizing(hook, seconds))


def held_up(*words: str) -> Accepted:
    """Return what is to be said of something beside steps."""
    return Accepted(codes=("FD320",), kinds=("held up",), words=words, cost="between steps")


LOOPING = [
    *several(
        "sampler in Python", Accepted(codes=("FD323",), words=("sampler",)), sampling,
        {
            "20000 weights, 2 workers": {
                "form": "fast", "workers": 2, "batches": 60, "size": 20_000, "by_batch": False,
            },
            "40000 weights, 1 worker, module's own": {
                "form": "own", "workers": 1, "batches": 30, "size": 40_000, "by_batch": False,
            },
        },
    ),
    *several(
        "batch sampler that sorts", Accepted(codes=("FD323",), words=("sampler",)), sampling,
        {
            "50000 texts, 2 workers": {
                "form": "fast", "workers": 2, "batches": 80, "size": 50_000, "by_batch": True,
            },
            "100000 texts, 1 worker": {
                "form": "fast", "workers": 1, "batches": 50, "size": 100_000, "by_batch": True,
            },
        },
    ),
    # Lightning looks into dicts and lists for tensors to move, but not into classes of one's own.
    *several(
        "annotations to unpickle", Accepted(codes=("FD324",)), objects,
        {
            "300 boxes, 2 workers": {
                "form": "fast", "workers": 2, "batches": 80, "boxes": 300, "step_s": 0.005,
                "wrapped": True,
            },
            "800 boxes, FastDataModule": {
                "form": "module", "workers": 3, "batches": 40, "boxes": 800, "step_s": 0.01,
                "wrapped": True,
            },
        },
    ),
    *several(
        "annotations to unpickle and to look into",
        Accepted(codes=("FD312", "FD324"), kinds=("data-bound", "balanced"), words=("object",)),
        objects,
        {
            "60 boxes, 2 workers": {
                "form": "fast", "workers": 2, "batches": 60, "boxes": 60, "step_s": 0.005,
                "wrapped": False,
            },
            "200 boxes, torch's DataLoader": {
                "form": "torch", "workers": 2, "batches": 20, "boxes": 200, "step_s": 0.01,
                "wrapped": False,
            },
        },
    ),
    *several(
        "slow callback", held_up("ConfusionPlotter"), watched,
        {
            "10 ms in on_train_batch_end": {
                "form": "fast", "hook": "on_train_batch_end", "seconds": 0.01,
            },
            "30 ms in on_train_batch_end, torch's loader": {
                "form": "torch", "hook": "on_train_batch_end", "seconds": 0.03,
            },
            "8 ms in on_train_batch_start": {
                "form": "module", "hook": "on_train_batch_start", "seconds": 0.008,
            },
            "400 ms in on_train_epoch_end": {
                "form": "fast", "hook": "on_train_epoch_end", "seconds": 0.4, "batches": 30,
                "epochs": 5,
            },
            "200 ms in on_train_epoch_end, torch's loader": {
                "form": "own", "hook": "on_train_epoch_end", "seconds": 0.2, "batches": 30,
                "epochs": 5,
            },
        },
    ),
    *several(
        "slow hook of the module", held_up("Watching"), watched,
        {
            "12 ms in on_train_batch_end": {
                "form": "fast", "hook": "of the module", "seconds": 0.012,
            },
            "12 ms, torch's loader": {"form": "torch", "hook": "of the module", "seconds": 0.012},
        },
    ),
    *several(
        "slow logger", held_up("log"), logged,
        {
            "10 ms in each step": {"form": "fast", "every": 1, "seconds": 0.01},
            "50 ms in every fifth, torch's loader": {"form": "torch", "every": 5, "seconds": 0.05},
        },
    ),
    *several(
        "frequent checkpoints", held_up("save"), saved,
        {
            "every 5 steps, 16 MB": {
                "form": "fast", "every": 5, "floats": 4_000_000, "batches": 120,
            },
            "every 10 steps, 80 MB": {
                "form": "own", "every": 10, "floats": 20_000_000, "batches": 80,
            },
        },
    ),
    *several(
        "slow transfer_batch_to_device",
        Accepted(
            codes=("FD312",), kinds=("balanced", "compute-bound"),
            words=("transfer_batch_to_device",), cost="between steps",
        ),
        hooked,
        {
            "8 ms": {"form": "fast", "hook": "transfer", "seconds": 0.008},
            "20 ms, torch's DataLoader": {"form": "torch", "hook": "transfer", "seconds": 0.02},
        },
    ),
    *several(
        "slow on_after_batch_transfer",
        Accepted(codes=("FD313",), kinds=("balanced", "compute-bound"),
                 cost="between steps"),
        hooked,
        {
            "8 ms": {"form": "fast", "hook": "after", "seconds": 0.008},
            "20 ms, torch's DataLoader": {"form": "own", "hook": "after", "seconds": 0.02},
        },
    ),
]  # fmt: skip
