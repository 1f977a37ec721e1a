"""The user's own pipeline of Albumentations or torchvision: draws by sample, pixels on the device.

- A front end (:mod:`transform` lists them) knows the pipelines of one library. In a worker it runs
  a pipeline for a sample without its pixel work, and writes down the operations, with what was
  drawn, as a tape.
- The tapes of a batch are packed into draws, which travel beside the batch (:mod:`replay.program`).
- Draws are carried out where the batch lies (:mod:`replay.torch`), by the operations of the front
  end, which have to make the pixels that its own library makes.
- The plugin measures whether pixels are better computed in the workers or on the device.

Other rooms import the names below, and nothing inside. They are loaded on first use, so that
importing the package stays light.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from lightning_fastdata.augment.registry import register as register
    from lightning_fastdata.augment.replay.program import Draws as Draws
    from lightning_fastdata.augment.stage_transform import StageTransform as StageTransform
    from lightning_fastdata.augment.stage_transform import WorkerTransform as WorkerTransform
    from lightning_fastdata.augment.transform import BatchTransform as BatchTransform
    from lightning_fastdata.augment.transform import as_batch_transform as as_batch_transform
    from lightning_fastdata.augment.transform import left_undone as left_undone

_HOME = {
    "BatchTransform": "transform",
    "Draws": "replay.program",
    "StageTransform": "stage_transform",
    "WorkerTransform": "stage_transform",
    "as_batch_transform": "transform",
    "left_undone": "transform",
    "register": "registry",
}

__all__ = sorted(_HOME)  # noqa: PLE0605


# If type checkers saw this function, they would accept any name.
if not TYPE_CHECKING:

    def __getattr__(name: str) -> object:
        if name not in _HOME:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        value = globals()[name] = getattr(import_module(f"{__name__}.{_HOME[name]}"), name)
        return value
