"""The front end for Kornia: its own modules compute, and each sample draws under its own key."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import torch

from lightning_fastdata.errors import TransformError
from lightning_fastdata.randomness.search import loaded_classes

if TYPE_CHECKING:
    from lightning_fastdata.augment.kornia.transform import KorniaTransform
    from lightning_fastdata.augment.pipeline.fields import Fields

_HOME: Final = "kornia.augmentation"
_SINGLE: Final = ("AugmentationBase2D", "MixAugmentationBaseV2")
_SEQUENCES: Final = ("ImageSequential",)  # of which AugmentationSequential is one
_UNKEYED: Final = (
    *("PatchSequential", "VideoSequential"),
    *("ManyToManyAugmentationDispather", "ManyToOneAugmentationDispather"),
)


def stage_transform(
    transform: object,
    fields: Fields,
    *,
    same_pixels: bool,  # noqa: ARG001 - they always are
) -> KorniaTransform | None:
    """Return the transform of batches that a module of Kornia is; None: it is none.

    An ``nn.Sequential`` with modules of Kornia in it is one, too.

    Raises:
        TransformError: it is a container whose draws cannot be told apart by sample.
    """
    from lightning_fastdata.augment.kornia.transform import KorniaTransform

    modules = list(transform.modules()) if isinstance(transform, torch.nn.Module) else []
    unkeyed = loaded_classes(_HOME, *_UNKEYED)
    if not _is_kornias(transform) and not isinstance(transform, unkeyed):
        if type(transform) is not torch.nn.Sequential or not any(map(_is_kornias, modules)):
            return None
    for module in modules:
        if isinstance(module, unkeyed):
            raise TransformError(
                f"{type(module).__name__} of Kornia draws for the patches or frames of a whole "
                "batch, which cannot be drawn for each sample by its key. Give augment= a function "
                "that calls it, lambda batch: ...: it then draws for the batch, as the batch's "
                "number says."
            )
    return KorniaTransform(_as_sequence(transform), fields)


def _is_kornias(module: object) -> bool:
    kinds = loaded_classes(_HOME, *_SINGLE, *_SEQUENCES)
    return isinstance(module, kinds + loaded_classes(f"{_HOME}.auto", "PolicyAugmentBase"))


def _as_sequence(transform: Any) -> Any:
    """Return an ``nn.Sequential`` as Kornia's own, which shows what it draws; else the module."""
    if type(transform) is not torch.nn.Sequential:
        return transform
    [sequence] = loaded_classes(_HOME, "ImageSequential")
    return sequence(*_flat(transform))


def _flat(sequence: torch.nn.Sequential) -> list[torch.nn.Module]:
    parts = []
    for module in sequence:
        parts += _flat(module) if type(module) is torch.nn.Sequential else [module]
    return parts
