"""What a data module asks its trainer; each function also answers without one."""

from __future__ import annotations

from typing import Any

import torch

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
    """Return the epoch, counted from 0."""
    return 0 if trainer is None else int(trainer.current_epoch)


def first_epoch() -> int:
    """Return 0: evaluation draws the same each time, so that its metrics can be compared."""
    return 0
