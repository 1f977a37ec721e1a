"""Albumentations pipelines whose draws cannot be keyed by sample: those of a ``collate_fn``.

Such a pipeline keeps the random stream that Albumentations gives it: the same one in every worker.
"""

from __future__ import annotations

import warnings
from typing import Final

from lightning_fastdata.augment.pipeline.tree import list_nodes
from lightning_fastdata.errors import FastDataWarning
from lightning_fastdata.randomness.search import find_composes

_DRAWS_NOTHING: Final = frozenset(
    {
        *("CenterCrop", "Crop", "LongestMaxSize", "Pad", "PadIfNeeded", "Resize"),
        *("SmallestMaxSize", "FromFloat", "Normalize", "ToFloat", "ToTensor3D", "ToTensorV2"),
        *("HorizontalFlip", "InvertImg", "NoOp", "ToGray", "ToRGB", "ToSepia", "Transpose"),
        *("VerticalFlip", "Compose", "ReplayCompose", "Sequential"),
    }
)
"""What does the same to every image, if it is always applied."""
_warned: set[tuple[str, str]] = set()


def warn_of_unkeyed(dataset: object, collate_fn: object) -> None:
    """Warn of pipelines of a ``collate_fn`` that draw, once for each."""
    inside = [] if collate_fn is None else find_composes(collate_fn)
    known = {id(compose) for compose in find_composes(dataset)} if inside else set()
    if not any(id(compose) not in known and may_draw(compose) for compose in inside):
        return
    # By name: loaders are made again, and what they are made of may be copied.
    name = str(getattr(collate_fn, "__qualname__", type(collate_fn).__qualname__))
    if (collate_fn.__module__, name) in _warned:
        return
    _warned.add((collate_fn.__module__, name))
    warnings.warn(
        f"The collate_fn {name} calls an Albumentations pipeline. Its draws do not belong to the "
        "sample: Albumentations 2.0.8 gives every worker the same random stream, so that workers "
        "repeat each other, and no seed of this package reaches it. Call the pipeline in the "
        "dataset's __getitem__, as an attribute of the dataset, or pass it as "
        "FastDataModule(augment=...).",
        FastDataWarning,
        stacklevel=3,
    )


def may_draw(compose: object) -> bool:
    """Return whether a pipeline may make different things of one image."""
    return any(
        node.p < 1 or type(node).__name__ not in _DRAWS_NOTHING for node in list_nodes(compose)
    )
