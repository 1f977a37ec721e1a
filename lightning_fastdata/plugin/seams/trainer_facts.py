"""What a data module and a callback ask their trainer; the former may have none."""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any, Protocol, cast

import torch

from lightning_fastdata.errors import TransformError
from lightning_fastdata.plugin.contracts import DataModule
from lightning_fastdata.plugin.seams.hooks import overridden_hook
from lightning_fastdata.plugin.seams.internals import batches_that_stepped, began_from_file

if TYPE_CHECKING:
    from collections.abc import Callable

    from lightning.pytorch import Callback, LightningModule, Trainer

    from lightning_fastdata.types import Stage

_STAGE_OF_FN: dict[str, Stage] = {
    "fit": "train",
    "validate": "val",
    "test": "test",
    "predict": "predict",
}


class TrainerAttributes(Protocol):
    """Attributes of a trainer that other classes of Lightning set, unseen by a type checker."""

    datamodule: object
    callbacks: list[Callback]
    profiler: Any
    fast_dev_run: bool | int
    log_every_n_steps: int


def attributes_of(trainer: Trainer) -> TrainerAttributes:
    """Return the trainer, with types for the attributes that its class does not declare."""
    return cast("TrainerAttributes", trainer)


def own_datamodule(trainer: Trainer) -> DataModule | None:
    """Return the trainer's data module if it is a FastDataModule, else None."""
    datamodule = attributes_of(trainer).datamodule
    return datamodule if isinstance(datamodule, DataModule) else None


def device_type(trainer: Trainer | None) -> str:
    """Return ``"cpu"``, ``"cuda"`` or another type; without a trainer, the best there is."""
    if trainer is not None:
        return str(trainer.strategy.root_device.type)
    return "cuda" if torch.cuda.is_available() else "cpu"


def has_cuda(trainer: Trainer) -> bool:
    """Return whether a trainer runs on CUDA; some strategies have no device before they launch."""
    return any(kind.__name__ == "CUDAAccelerator" for kind in type(trainer.accelerator).__mro__)


def running_stage(trainer: Trainer | None) -> Stage | None:
    """Return the stage of the trainer method that runs now; ``"train"`` during all of a fit."""
    method = None if trainer is None else trainer.state.fn
    return None if method is None else _STAGE_OF_FN[method.value]


def training_epoch(trainer: Trainer | None) -> int:
    """Return the epoch, counted from 0, of the training batches that come next.

    A file of ``ModelCheckpoint`` is written before Lightning counts its epoch as completed, and a
    fit that resumes from it makes its first iterator before that is made up for. Until its first
    epoch is over, the epochs that were processed are counted instead.
    """
    if trainer is None:
        return 0
    if began_from_file(trainer):
        current: Any = trainer.fit_loop.epoch_progress.current
        return int(current.processed)
    return int(trainer.current_epoch)


def first_epoch() -> int:
    """Return 0: evaluation draws the same each time, so that its metrics can be compared."""
    return 0


def augmenting_stages(trainer: Trainer, pl_module: LightningModule) -> Callable[[Stage], bool]:
    """Return what says whether something runs in ``on_after_batch_transfer`` in a stage.

    A data module knows it once it has made the stage's loaders.
    """
    hook = "on_after_batch_transfer"
    ours, written = own_datamodule(trainer), overridden_hook(pl_module, hook) is not None
    if ours is not None and not written:
        return ours.augments_on_device
    written = written or overridden_hook(attributes_of(trainer).datamodule, hook) is not None
    return lambda _stage: written


def written_hook(trainer: Trainer, name: str) -> str:
    """Return which transfer hook of the user runs, e.g. ``"Net.on_after_batch_transfer"``.

    Args:
        trainer: Lightning calls that of its data module, if it has one of its own.
        name: Of the hook.

    Returns:
        Its class and name; empty if nobody wrote one.
    """
    data, module = attributes_of(trainer).datamodule, trainer.lightning_module
    ours = own_datamodule(trainer)
    if overridden_hook(data, name) if ours is None else name in ours.written_hooks():
        return f"{type(data).__name__}.{name}"
    return f"{type(module).__name__}.{name}" if overridden_hook(module, name) else ""


def steps_logged_by(trainer: Trainer, counted: int) -> int:
    """Return the step of Lightning's own x axis; where that is not known, what was counted."""
    stepped = batches_that_stepped(trainer)
    return counted if stepped is None else int(stepped)


def check_hooks_run(pl_module: LightningModule) -> None:
    """Refuse to augment for a training step whose batches pass no transfer hook."""
    if "dataloader_iter" in inspect.signature(pl_module.training_step).parameters:
        raise TransformError(
            f"{type(pl_module).__name__}.training_step(dataloader_iter) fetches its batches "
            "itself, and Lightning then calls no on_after_batch_transfer, so that `augment` would "
            "never run. Use training_step(batch, batch_idx), or call the transform in the step "
            "and leave out `augment`."
        )
