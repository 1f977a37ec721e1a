"""Columns of numbers of a Hugging Face dataset, read where they lie."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import torch
from torch.utils.data import default_collate

from lightning_fastdata.host.memory import read_host_memory

if TYPE_CHECKING:
    from numpy.typing import NDArray

_FORMATS: Final = ("numpy", "torch")
_FREE_SHARE: Final = 8
_seen: weakref.WeakKeyDictionary[Any, tuple[Any, dict[str, Any]]] = weakref.WeakKeyDictionary()
"""Columns of datasets, with the format they were read in: joining their pieces copies them."""


class UnsuitedError(Exception):
    """The dataset has columns of something else than equally many numbers."""


def is_hugging_face(dataset: object) -> bool:
    """Return whether this is a ``datasets.Dataset`` and no subclass, without importing it."""
    library = sys.modules.get("datasets")
    return library is not None and type(dataset) is getattr(library, "Dataset", None)


def arrays_of(
    dataset: Any, *, free_bytes: Callable[[], int] = lambda: read_host_memory().available_bytes
) -> tuple[dict[str, tuple[NDArray[Any], torch.dtype]], NDArray[np.int64] | None]:
    """Return the columns as stored, with what their batches are made of, and which rows count.

    Args:
        dataset: A ``datasets.Dataset`` in the torch or numpy format.
        free_bytes: Asked before pieces of a table are joined, which copies them; they may take an
            eighth of it.

    Raises:
        UnsuitedError: A column holds missing values, lists of different lengths, or no numbers; or
            the format computes something.
    """
    about = dataset.format
    if about["type"] not in _FORMATS or about["format_kwargs"] or about["output_all_columns"]:
        raise UnsuitedError
    # No public attribute tells of shuffle(), select() and sort().
    mapping: Any = getattr(dataset, "_indices", False)
    if mapping is False or not len(dataset):
        raise UnsuitedError
    select = None if mapping is None else mapping.column(0).to_numpy().astype(np.int64)
    kept = _seen.get(dataset)
    if kept is not None and kept[0] == about:
        return kept[1], select
    # Whole batches are what loaders ask for; a single row may come in other types.
    sample = dataset.__getitems__([0])[0]
    pieces = {name: dataset.data.column(name) for name in sample}
    for piece in pieces.values():
        _check_numbers(piece.type)
    joined = sum(piece.nbytes for piece in pieces.values() if piece.num_chunks > 1)
    if joined > free_bytes() // _FREE_SHARE:
        raise UnsuitedError
    columns = {}
    for name, piece in pieces.items():
        array = _as_array(piece.combine_chunks() if piece.num_chunks != 1 else piece.chunk(0))
        columns[name] = array, _batch_type(array, sample[name])
    _seen[dataset] = about, columns
    return columns, select


def _check_numbers(kind: Any) -> None:
    from pyarrow import types  # type: ignore[import-untyped]

    while types.is_fixed_size_list(kind) or types.is_list(kind) or types.is_large_list(kind):
        kind = kind.value_type
    if not (types.is_integer(kind) or types.is_floating(kind)):
        raise UnsuitedError


def _as_array(column: Any) -> NDArray[Any]:
    from pyarrow import types

    shape = [len(column)]
    while hasattr(column.type, "value_type"):
        if types.is_fixed_size_list(column.type):
            size = column.type.list_size
        else:
            lengths = np.diff(column.offsets.to_numpy())
            size = int(lengths[0]) if len(lengths) else -1
            if size < 0 or (lengths != size).any():
                raise UnsuitedError
        if column.null_count:
            raise UnsuitedError
        shape.append(size)
        column = column.flatten()
    if column.null_count:
        raise UnsuitedError
    array: NDArray[Any] = column.to_numpy(zero_copy_only=True).reshape(shape)
    return array


def _batch_type(array: NDArray[Any], value: object) -> torch.dtype:
    try:
        batch = default_collate([value])
    except (TypeError, ValueError) as error:
        raise UnsuitedError from error
    if not isinstance(batch, torch.Tensor):
        raise UnsuitedError
    if isinstance(value, np.generic) and value.dtype != array.dtype:
        # What the format rounds and the collation widens cannot be had in one step.
        own = torch.from_numpy(np.empty(0, value.dtype))
        if own.dtype != batch.dtype:
            raise UnsuitedError
    return batch.dtype
