"""What a data module and a callback ask their trainer; the former may have none."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch

from lightning_fastdata.errors import TransformError
from lightning_fastdata.plugin.seams.hooks import overridden_hook
from lightning_fastdata.plugin.seams.internals import batches_that_stepped, began_from_file
from lightning_fastdata.types import Stage

_STAGE_OF_FN: dict[str, Stage] = {
    "fit": "train",
    "validate": "val",
    "test": "test",
    "predict": "predict",
}


def device_type(trainer: Any) -> str:
    """Return ``"cpu"``, ``"cuda"`` or another type; without a trainer, the best there is."""
    if trainer is not None:
        return str(trainer.strategy.root_device.type)
    return "cuda" if torch.cuda.is_available() else "cpu"


def has_cuda(trainer: Any) -> bool:
    """Return whether a trainer runs on CUDA; some strategies have no device before they launch."""
    accelerator = getattr(trainer, "accelerator", None)
    return any(kind.__name__ == "CUDAAccelerator" for kind in type(accelerator).__mro__)


def running_stage(trainer: Any) -> Stage | None:
    """Return the stage of the trainer method that runs now; ``"train"`` during all of a fit."""
    state = getattr(trainer, "state", None)
    return None if state is None or state.fn is None else _STAGE_OF_FN[state.fn.value]


def training_epoch(trainer: Any) -> int:
    """Return the epoch, counted from 0, of the training batches that come next.

    A file of ``ModelCheckpoint`` is written before Lightning counts its epoch as completed, and a
    fit that resumes from it makes its first iterator before that is made up for. Until its first
    epoch is over, the epochs that were processed are counted instead.
    """
    if trainer is None:
        return 0
    if began_from_file(trainer):
        return int(trainer.fit_loop.epoch_progress.current.processed)
    return int(trainer.current_epoch)


def first_epoch() -> int:
    """Return 0: evaluation draws the same each time, so that its metrics can be compared."""
    return 0


def augmenting_stages(trainer: Any, pl_module: Any) -> Callable[[Stage], bool]:
    """Return what says whether something runs in ``on_after_batch_transfer`` in a stage.

    A data module knows it once it has made the stage's loaders.
    """
    hook = "on_after_batch_transfer"
    augments = getattr(trainer.datamodule, "augments_on_device", None)
    written = overridden_hook(pl_module, hook) is not None
    if augments is not None and not written:
        return augments  # type: ignore[no-any-return]
    written = written or overridden_hook(trainer.datamodule, hook) is not None
    return lambda _stage: written


def written_hook(trainer: Any, name: str) -> str:
    """Return which transfer hook of the user runs, e.g. ``"Net.on_after_batch_transfer"``.

    Args:
        trainer: Lightning calls that of its data module, if it has one of its own.
        name: Of the hook.

    Returns:
        Its class and name; empty if nobody wrote one.
    """
    data, module = trainer.datamodule, trainer.lightning_module
    known = getattr(data, "written_hooks", None)
    of_data = overridden_hook(data, name) is not None if known is None else name in known()
    if of_data:
        return f"{type(data).__name__}.{name}"
    return f"{type(module).__name__}.{name}" if overridden_hook(module, name) else ""


def steps_logged_by(trainer: Any, counted: int) -> int:
    """Return the step of Lightning's own x axis; where that is not known, what was counted."""
    stepped = batches_that_stepped(trainer)
    return counted if stepped is None else int(stepped)


def check_hooks_run(pl_module: Any) -> None:
    """Refuse to augment for a training step whose batches pass no transfer hook."""
    if "dataloader_iter" in inspect.signature(pl_module.training_step).parameters:
        raise TransformError(
            f"{type(pl_module).__name__}.training_step(dataloader_iter) fetches its batches "
            "itself, and Lightning then calls no on_after_batch_transfer, so that `augment` would "
            "never run. Use training_step(batch, batch_idx), or call the transform in the step "
            "and leave out `augment`."
        )
