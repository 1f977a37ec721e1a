"""What trainings are made of: a model, loaders in the forms that users give them, expectations."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, TypeAlias

import lightning.pytorch as lightning
import torch
from torch.utils.data import DataLoader

from lightning_fastdata import FastDataLoader, FastDataModule, LoaderOptions

CPUS = len(os.sched_getaffinity(0))

Form: TypeAlias = Literal["torch", "fast", "module", "own"]
Cost: TypeAlias = Literal["data", "between steps", "computing"]


def spin(seconds: float) -> None:
    """Use a CPU for so long, however often it is taken away meanwhile."""
    until = time.thread_time() + seconds
    while time.thread_time() < until:
        pass


@dataclass(frozen=True, slots=True, kw_only=True)
class Accepted:
    """What may be said of a training, as one would explain it to whoever wrote it."""

    codes: tuple[str, ...]
    """Codes of the first finding."""
    kinds: tuple[str, ...] = ("data-bound",)
    """Kinds of the verdict."""
    words: tuple[str, ...] = ()
    """One of them has to be in the cause or the remedy of the first finding; none: any text."""
    cost: Cost = "data"
    """What a tool that tells no more than that has to name."""

    def __str__(self) -> str:
        named = f" with {', '.join(self.words[:3])}" if self.words else ""
        return f"{'/'.join(self.codes)}{named}"

    def kind_is_right(self, verdict: Mapping[str, Any]) -> bool:
        """Return whether the verdict is of an accepted kind."""
        return verdict["kind"] in self.kinds

    def is_right(self, verdict: Mapping[str, Any]) -> bool:
        """Return whether kind, code and words are as accepted."""
        first = verdict["findings"][0]
        text = f"{first['cause']} {first['remedy']}"
        named = not self.words or any(word in text for word in self.words)
        return self.kind_is_right(verdict) and first["code"] in self.codes and named


@dataclass(frozen=True, slots=True, kw_only=True)
class Healthy(Accepted):
    """Whatever does not blame data, and calls nothing severe but what is allowed."""

    allowed: tuple[str, ...] = ()
    """Codes of findings that may be severe: where other programs do slow it down."""

    codes: tuple[str, ...] = ()
    kinds: tuple[str, ...] = ()
    cost: Cost = "computing"

    def __str__(self) -> str:
        return "data not blamed, nothing severe"

    def kind_is_right(self, verdict: Mapping[str, Any]) -> bool:
        return verdict["kind"] != "data-bound"

    def is_right(self, verdict: Mapping[str, Any]) -> bool:
        severe = any(
            each["severity"] == "high" and each["code"] not in self.allowed
            for each in verdict["findings"]
        )
        return self.kind_is_right(verdict) and not severe


class Model(lightning.LightningModule):
    """A small network; a step takes as long as a device would compute, or uses a CPU for it.

    Args:
        step_s: What a step takes besides.
        on: ``"device"`` leaves the CPUs free meanwhile, as a GPU does; ``"host"`` uses one.
    """

    def __init__(self, step_s: float = 0.01, on: Literal["device", "host"] = "device") -> None:
        super().__init__()
        self.step_s, self.on = step_s, on
        self.layers = torch.nn.Sequential(
            torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 1)
        )

    def loss_of(self, batch: Any) -> torch.Tensor:
        tensor = first_tensor(batch)
        values = torch.zeros(64) if tensor is None else tensor.flatten()[:64].float()
        values = torch.nn.functional.pad(values, (0, 64 - len(values)))
        loss: torch.Tensor = self.layers(values / 256).mean()
        return loss

    def training_step(self, batch: Any, _: int) -> torch.Tensor:
        loss = self.loss_of(batch)
        if self.on == "device":
            time.sleep(self.step_s)
        else:
            spin(self.step_s)
        return loss

    def validation_step(self, batch: Any, _: int) -> None:
        self.log("val_loss", self.loss_of(batch), batch_size=1)
        time.sleep(self.step_s / 3)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.01)


def first_tensor(batch: Any) -> torch.Tensor | None:
    """Return the first tensor within a batch; None if there is none at the front."""
    while not isinstance(batch, torch.Tensor):
        if isinstance(batch, Mapping):
            batch = next(iter(batch.values()), None)
        elif isinstance(batch, list | tuple) and batch:
            batch = batch[0]
        else:
            return None
    return batch


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """A dataset, and how a user loads it."""

    dataset: Any
    form: Form = "fast"
    """torch's DataLoader, FastDataLoader, FastDataModule, or either of the first two from the
    LightningModule's own ``train_dataloader``."""
    batch_size: int | None = 16
    options: dict[str, Any] = field(default_factory=dict)
    """Arguments of the loader."""

    def with_options(self, changed: Mapping[str, Any]) -> Load:
        """Return the same with other arguments; who takes another executor takes our loader."""
        form = "fast" if self.form == "torch" and "executor" in changed else self.form
        return replace(self, form=form, options={**self.options, **changed})

    def plain(self) -> Load:
        """Return the same with torch's DataLoader."""
        options = {key: value for key, value in self.options.items() if key != "executor"}
        if self.form == "module" and "num_workers" not in options:
            options["num_workers"] = CPUS
        return replace(self, form="own" if self.form == "own" else "torch", options=options)

    def loader(self) -> DataLoader[Any]:
        """Return the loader."""
        options = dict(self.options)
        if "batch_sampler" not in options:
            options["batch_size"] = self.batch_size
        of = DataLoader if self.form == "torch" else FastDataLoader
        return of(self.dataset, **options)

    def module(self) -> FastDataModule:
        """Return the data module."""
        options = dict(self.options)
        collate_fn = options.pop("collate_fn", None)
        shuffle = options.pop("shuffle", None)
        assert self.batch_size is not None
        module = FastDataModule(
            self.batch_size, options=LoaderOptions(**options), collate_fn=collate_fn,
            shuffle=shuffle,
        )  # fmt: skip
        module.train_dataset = lambda: self.dataset  # type: ignore[attr-defined]
        return module


@dataclass(frozen=True, slots=True, kw_only=True)
class Made:
    """A training, ready to be fitted."""

    load: Load | dict[str, Load]
    """Of training; several are combined by Lightning."""
    model: lightning.LightningModule = field(default_factory=Model)
    val: Load | None = None
    callbacks: tuple[Any, ...] = ()
    trainer: dict[str, Any] = field(default_factory=dict)
    """Further arguments of the Trainer."""
    close: Callable[[], None] = lambda: None
    """Ends what the training needed beside it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Training:
    """One training in one magnitude, and what may be said of it."""

    cause: str
    """Short name, the same for all magnitudes."""
    what: str
    """The magnitude, in words."""
    accepted: Accepted
    make: Callable[[Path], Made]
    """Makes it; the folder is for its files."""
    hogs: int = 0
    """Processes beside it that burn a CPU each."""
    threads: int = 1
    """Of torch in the training process."""


def several(
    cause: str,
    accepted: Accepted,
    make: Callable[..., Made],
    magnitudes: Mapping[str, Mapping[str, Any]],
    **facts: Any,
) -> list[Training]:
    """Return a training for each magnitude: its words, and what ``make`` takes besides a folder."""

    def bound(values: Mapping[str, Any]) -> Callable[[Path], Made]:
        return lambda folder: make(folder, **values)

    return [
        Training(cause=cause, what=what, accepted=accepted, make=bound(values), **facts)
        for what, values in magnitudes.items()
    ]
