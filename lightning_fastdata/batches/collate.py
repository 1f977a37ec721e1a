"""Samples to one batch: torch's own collation, dataclasses besides, and what hinders it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Mapping, Sequence
from copy import copy
from dataclasses import fields, is_dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Final, Self, TypeAlias

import numpy as np
import torch
from torch.utils.data import Dataset, default_collate

from lightning_fastdata.batches.memory import LateStack, is_plain
from lightning_fastdata.batches.rows import CollateMap, dtype_of_rows, in_one_call, is_extended
from lightning_fastdata.errors import BatchError, check
from lightning_fastdata.torch_internals import collate, collate_tensor_fn, default_collate_fn_map
from lightning_fastdata.tree import children, is_named_tuple, leaves

if TYPE_CHECKING:
    from lightning_fastdata.types import Batch

Collate: TypeAlias = "Callable[[Any], Batch]"
_KNOWN: Final = frozenset(
    {torch.Tensor, LateStack, np.ndarray, np.memmap, int, float, bool, str, bytes}
)
"""Types whose collation, as part of a sample, runs no code of the user's."""
_IMAGE_DIMENSIONS: Final = 3
_ROWS: Final = (tuple, list)
_REMEDIES: Final = {
    "PIL": "Turn images into arrays or tensors (numpy.asarray, torchvision's PILToTensor)",
    "torch_geometric": "Pass collate_fn=torch_geometric.data.Batch.from_data_list",
    "torchio": "Return the tensors of a subject ({name: image.data})",
}
"""What to do about values of types of these packages."""


def collate_samples(samples: Sequence[Any]) -> Batch:
    """Return the samples, at least one, as a batch: ``default_collate``, and dataclasses besides.

    What an Albumentations pipeline has written down of its draws (``applied_transforms``,
    ``replay``) differs from sample to sample, and is a list in the batch.

    Raises:
        BatchError: The samples cannot be stacked, for example because their shapes differ.
    """
    return _collate_samples(samples, _collate)


def _collate_samples(samples: Sequence[Any], collate_fields: Collate) -> Batch:
    try:
        return _collate_without_notes(samples, collate_fields)
    except (TypeError, RuntimeError, ValueError, KeyError) as error:
        raise BatchError(
            f"These {len(samples)} samples cannot be made into one batch: "
            f"{str(error).rstrip('.')}. {advice(samples)}"
        ) from error


class ListsOf:
    """Collation as :func:`collate_samples`, but for fields that stay lists, one value a sample.

    For what has another length in each sample, as boxes and their labels do. Images beside them
    are stacked, so that a device may augment them; a ``collate_fn`` of your own gets finished ones.

    Args:
        fields: keys or positions, from 0, in the samples, which are mappings, tuples or lists.

    Raises:
        OptionsError: A field is neither, as a list of fields is.
    """

    def __init__(self, *fields: str | int) -> None:
        for name in fields:
            allowed = "keys and positions in samples, each an argument: ListsOf('boxes', 'labels')"
            check("A field of ListsOf", name, isinstance(name, Hashable), allowed)
        self.fields = fields

    def __call__(self, samples: Sequence[Any]) -> Batch:
        """Return the batch: a dict, or a list for samples that are tuples or lists.

        Raises:
            BatchError: A sample has no such field, or the others cannot be stacked.
        """
        first = samples[0]
        named = isinstance(first, Mapping)
        known = dict(first) if named else dict(enumerate(first)) if type(first) in _ROWS else {}
        for name in self.fields:
            if name not in known:
                raise BatchError(
                    f"There is no field {name!r}, which is to stay a list, in a sample of type "
                    f"{type(first).__name__} with {list(known)}. Give ListsOf() keys of dicts, or "
                    "positions in tuples."
                )
        batch = {}
        for name in known:
            column = [sample[name] for sample in samples]
            listed = name in self.fields or is_note(name, first[name])
            batch[name] = column if listed else collate_samples(column)
        return batch if named else list(batch.values())


def only_stacks(collate_fn: object) -> bool:
    """Return whether a collation is known to do nothing with images but to stack them in order.

    None is the default one. What other code does with them nobody can know.
    """
    known = (None, collate_samples, default_collate)
    return type(collate_fn) is ListsOf or any(collate_fn is each for each in known)


def collate_privately(samples: Batch) -> Batch:
    """Return what ``default_collate`` returns in the training process.

    In a worker torch collates into new shared memory for each batch, which costs a page fault for
    every 4 KiB, and refuses types that it promotes elsewhere.
    """
    return collate(samples, collate_fn_map=in_one_call(_stack))


def _stack(samples: Batch, *, collate_fn_map: CollateMap | None = None) -> Batch:
    if samples[0].is_nested or samples[0].layout is not torch.strided:
        return collate_tensor_fn(samples, collate_fn_map=collate_fn_map)
    return torch.stack(samples)


def use_own_memory() -> None:
    """Have this process collate into its own memory, as a side process whose batches we pack.

    In a worker, torch would collate into new shared memory.
    """
    global _default  # noqa: PLW0603  # a property of the process
    _default = collate_privately


def _collate_shared(samples: Batch) -> Batch:
    """Return what ``default_collate`` returns; in torch's workers in memory that is shared."""
    return collate(samples, collate_fn_map=in_one_call())


_default: Collate = _collate_shared


def for_writing(collate_fn: Collate) -> Collate:
    """Return what collates likewise for :func:`~lightning_fastdata.batches.memory.pack` alone.

    Where the whole collation is this package's, no code reads the batch before it is packed, and
    tensors are stacked only then (:class:`~lightning_fastdata.batches.memory.LateStack`).
    """
    if collate_fn is default_collate:
        return partial(_collate_late, otherwise=collate_privately)
    if collate_fn is collate_samples:
        fields_late = partial(_collate_late, otherwise=_collate)
        return partial(_collate_samples, collate_fields=fields_late)
    if isinstance(collate_fn, AroundCollate):
        return collate_fn.for_writing()
    return collate_fn


def _collate_late(samples: Sequence[Any], otherwise: Collate) -> Batch:
    if is_extended() or not _runs_no_user_code(samples[0]):
        return otherwise(samples)
    table = in_one_call(_stack_late)
    arrays = partial(_arrays_late, otherwise=table[np.ndarray])
    return collate(samples, collate_fn_map={**table, np.ndarray: arrays})


def _runs_no_user_code(value: object) -> bool:
    """Return whether a sample becomes part of a batch without the user's code."""
    if type(value) is dict:
        return all(map(_runs_no_user_code, value.values()))
    if type(value) is list or type(value) is tuple:
        return all(map(_runs_no_user_code, value))
    return type(value) in _KNOWN or isinstance(value, np.generic)


def _stack_late(samples: Batch, *, collate_fn_map: CollateMap | None = None) -> Batch:
    first = samples[0]
    # A single sample may be given, of whose rows torch makes no batch.
    late = not isinstance(samples, torch.Tensor) and all(
        type(sample) is torch.Tensor
        and is_plain(sample)
        and sample.dtype == first.dtype
        and sample.shape == first.shape
        # With more dimensions, torch keeps channels that come last in memory.
        and (sample.dim() <= _IMAGE_DIMENSIONS or sample.is_contiguous())
        and not sample.requires_grad
        for sample in samples
    )
    return (
        LateStack(samples, first.dtype) if late else _stack(samples, collate_fn_map=collate_fn_map)
    )


def _arrays_late(
    samples: Batch, *, otherwise: Callable[..., Batch], collate_fn_map: CollateMap | None = None
) -> Batch:
    dtype = dtype_of_rows(samples)
    if dtype is None:
        return otherwise(samples, collate_fn_map=collate_fn_map)
    return LateStack(samples, dtype)


def _collate_without_notes(samples: Sequence[Any], collate_fields: Collate) -> Batch:
    """Return the batch of samples; notes of an Albumentations pipeline in them become lists."""
    first = samples[0]
    notes = [key for key in first if is_note(key, first[key])] if type(first) is dict else []
    if not notes:
        return collate_fields(samples)
    rest = [{key: value for key, value in s.items() if key not in notes} for s in samples]
    return {**collate_fields(rest), **{key: [s[key] for s in samples] for key in notes}}


def _collate(samples: Sequence[Any]) -> Batch:
    first = samples[0]
    if not _holds_dataclass(first):
        return _default(samples)
    if is_dataclass(first) and not isinstance(first, type):
        columns = {f.name: _collate([getattr(s, f.name) for s in samples]) for f in fields(first)}
        return type(first)(**columns)
    if isinstance(first, Mapping):
        return {key: _collate([s[key] for s in samples]) for key in first}
    columns_ = [_collate(column) for column in zip(*samples, strict=True)]
    return type(first)(*columns_) if is_named_tuple(first) else columns_


def _holds_dataclass(sample: object) -> bool:
    kind = type(sample)
    if kind in _KNOWN:  # asked of each batch, and most samples are made of these
        return False
    if kind is tuple or kind is list:
        return any(map(_holds_dataclass, sample))  # type: ignore[call-overload]
    if is_dataclass(sample):
        return True
    if isinstance(sample, Mapping):
        return any(_holds_dataclass(value) for value in sample.values())
    return isinstance(sample, list | tuple) and any(_holds_dataclass(value) for value in sample)


class AroundCollate(ABC):
    """A collation around another one, ``collate_fn``, which makes the batch itself."""

    def __init__(self, collate_fn: Collate) -> None:
        self.collate_fn = collate_fn
        self._collate_inside = collate_fn

    @abstractmethod
    def __call__(self, samples: Batch) -> Batch:
        """Return the batch of samples, or of what stands in their place."""

    def for_writing(self) -> Self:
        """Return the same for batches that are packed next; see :func:`for_writing`."""
        late = copy(self)
        late._collate_inside = for_writing(self.collate_fn)
        return late


def uncollatable(sample: object) -> str | None:
    """Return what in a sample torch cannot collate by default, and what to do; None: nothing."""
    found = _first_uncollatable(sample, "")
    return None if found is None else _about_uncollatable(*found)


def advice(samples: Sequence[object]) -> str:
    """Return what seems to hinder the collation of samples, and what to do."""
    for number, sample in enumerate(samples):
        found = _first_uncollatable(sample, "")
        if found is not None:
            return f"In sample {number} of them: {_about_uncollatable(*found)}"
    try:
        _collate_without_notes(samples[:1], _collate)
    except Exception:  # whatever torch raises: the size of others is not what hinders it
        return (
            "Sample 0 of them makes no batch alone either. Return tensors, arrays or numbers that "
            "torch can stack, or pass a collate_fn."
        )
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


def _has_shape(value: object) -> bool:
    if isinstance(value, torch.Tensor):
        return not value.is_nested
    return hasattr(value, "shape")


def _first_uncollatable(sample: object, where: str) -> tuple[str, object] | None:
    """Return the first value of a sample that torch cannot collate, and where it is."""
    if isinstance(sample, np.ndarray) and sample.dtype.kind in "OUS":
        return where, sample
    if isinstance(sample, tuple(default_collate_fn_map)):
        return None
    if isinstance(sample, LateStack | np.generic | range | bytearray | memoryview):
        return None
    parts = children(sample)
    if parts is None:
        return where, sample
    if isinstance(sample, Mapping):
        parts = [(key, value) for key, value in parts if not is_note(key, value)]
    at = "{}.{}" if is_dataclass(sample) and not isinstance(sample, Mapping) else "{}[{!r}]"
    found = (_first_uncollatable(value, at.format(where, key)) for key, value in parts)
    return next(filter(None, found), None)


def _about_uncollatable(where: str, value: object) -> str:
    at = f"At {where} it holds" if where else "It is"
    if value is None:
        return (
            f"{at} None, of which no batch can be made. Leave such samples out of the dataset, "
            "return a value that says that there is none (as -1 or an empty tensor), or pass a "
            "collate_fn that sorts them out."
        )
    kind = type(value)
    if isinstance(value, Dataset):
        return (
            f"{at} a dataset itself, a {kind.__name__}. Return several datasets as a list, a tuple "
            "or a dict of Python's own types."
        )
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
    """Return whether a field is what ``save_applied_params`` or ReplayCompose adds to a result."""
    if key == "applied_transforms":
        return type(value) is list
    return type(value) is dict and "__class_fullname__" in value
