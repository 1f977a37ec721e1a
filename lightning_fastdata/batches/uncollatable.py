"""What hinders samples from becoming a batch, and what to do about it, in words."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import is_dataclass
from typing import Final, Protocol, runtime_checkable

import numpy as np
import torch

from lightning_fastdata.augment import DeferredTensor
from lightning_fastdata.batches.packed import LateStack
from lightning_fastdata.torch_internals import default_collate_fn_map
from lightning_fastdata.tree import children, leaves

_REMEDIES: Final = {
    "PIL": "Turn images into arrays or tensors (numpy.asarray, torchvision's PILToTensor)",
    "torch_geometric": "Pass collate_fn=torch_geometric.data.Batch.from_data_list",
    "torchio": "Return the tensors of a subject ({name: image.data})",
}
"""What to do about types of these packages."""


def uncollatable(sample: object) -> str | None:
    """Return what in a sample torch cannot collate by default, and what to do; None: nothing."""
    found = _stranger(sample, "")
    return None if found is None else _about_stranger(*found)


def advice(samples: Sequence[object]) -> str:
    """Return what is seen to hinder the collation of samples, and what to do."""
    for number, sample in enumerate(samples):
        found = _stranger(sample, "")
        if found is not None:
            return f"In sample {number} of them: {_about_stranger(*found)}"
    if isinstance(samples[0], Mapping):
        keys = list(dict.fromkeys(str(list(s)) for s in samples if isinstance(s, Mapping)))
        if len(keys) > 1:
            return f"Keys found: {', '.join(keys[:4])}. Give samples the same keys."
    shapes = sorted(
        {str(tuple(leaf.shape)) for leaf in leaves(samples, _has_shape) if _has_shape(leaf)}
    )
    seen = f"Shapes found: {', '.join(shapes[:6])}. " if len(shapes) > 1 else ""
    return (
        f"{seen}Give samples one size (for images: a Resize or a crop; for lists and sequences: "
        "padding), or pass a collate_fn. If samples are batches already, as of a stream that "
        "batches itself, make the loader with batch_size=None."
    )


@runtime_checkable
class _Shaped(Protocol):
    shape: Sequence[int]


def _has_shape(value: object) -> bool:
    if isinstance(value, torch.Tensor):
        return not value.is_nested
    return isinstance(value, _Shaped)


def _stranger(sample: object, where: str) -> tuple[str, object] | None:
    """Return the first value of a sample that torch cannot collate, and where it is."""
    if isinstance(sample, np.ndarray) and sample.dtype.kind in "OUS":
        return where, sample
    if isinstance(sample, tuple(default_collate_fn_map)):
        return None
    if isinstance(sample, DeferredTensor | LateStack | np.generic | range | bytearray | memoryview):
        return None
    parts = children(sample)
    if parts is None:
        return where, sample
    if isinstance(sample, Mapping):
        parts = [(key, value) for key, value in parts if not is_note(key, value)]
    at = "{}.{}" if is_dataclass(sample) and not isinstance(sample, Mapping) else "{}[{!r}]"
    found = (_stranger(value, at.format(where, key)) for key, value in parts)
    return next(filter(None, found), None)


def _about_stranger(where: str, value: object) -> str:
    at = f"At {where} it holds" if where else "It is"
    if value is None:
        return (
            f"{at} None, of which no batch can be made. Leave such samples out of the dataset, "
            "return a value that says that there is none (as -1 or an empty tensor), or pass a "
            "collate_fn that sorts them out."
        )
    kind = type(value)
    if isinstance(value, np.ndarray):
        return (
            f"{at} an array of {value.dtype}, and batches hold numbers. Return a list, or numbers."
        )
    remedy = _REMEDIES.get(kind.__module__.partition(".")[0], "Return tensors, arrays or numbers")
    return (
        f"{at} a {kind.__module__}.{kind.__qualname__}, which torch's collation does not know. "
        f"{remedy}, or pass a collate_fn."
    )


def is_note(key: object, value: object) -> bool:
    """Whether a field is what ``save_applied_params`` or ReplayCompose adds to a result."""
    if key == "applied_transforms":
        return type(value) is list
    return type(value) is dict and "__class_fullname__" in value
