"""Datasets that are columns of numbers: our own, and those of Hugging Face."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data import Dataset, default_collate

from lightning_fastdata.errors import DatasetError
from lightning_fastdata.host.memory import read_host_memory
from lightning_fastdata.types import Batch

if TYPE_CHECKING:
    import pyarrow

Numbers: TypeAlias = torch.Tensor | NDArray[Any]

_FORMATS: Final = ("numpy", "torch")
_FREE_SHARE: Final = 8
_TypedArrays: TypeAlias = dict[str, tuple[NDArray[Any], torch.dtype]]
_seen: weakref.WeakKeyDictionary[object, tuple[object, _TypedArrays]] = weakref.WeakKeyDictionary()
"""Columns of datasets, with the format they were read in: joining their pieces copies them."""


class ColumnDataset(Dataset[Any]):
    """Rows of equally long columns, each a tensor or an array (a memory-mapped one, too).

    Sample ``i`` holds row ``i`` of each column as a tensor of the column's own type of numbers, in
    a dict if the columns came in a mapping and in a tuple if they came in a sequence.

    Args:
        columns: Tensors and arrays [rows, ...] by name, or in order.

    Raises:
        DatasetError: There is no column, or they differ in length, or torch has no such numbers; or
            one array was given, whose rows would be columns.

    Example:
        >>> data = ColumnDataset({"x": torch.arange(6).view(3, 2), "y": np.array([7, 8, 9])})
        >>> data[1]
        {'x': tensor([2, 3]), 'y': tensor(8)}
    """

    def __init__(self, columns: Mapping[str, Numbers] | Sequence[Numbers]) -> None:
        if isinstance(columns, torch.Tensor | np.ndarray):
            raise DatasetError(
                f"ColumnDataset was given one array, of shape {tuple(columns.shape)}, whose rows "
                "would be its columns. Give columns by name: ColumnDataset({'x': array})."
            )
        self.columns: dict[str, Numbers] | tuple[Numbers, ...]
        self.columns = dict(columns) if isinstance(columns, Mapping) else tuple(columns)
        named = self._named()
        if not named:
            raise DatasetError("ColumnDataset has no columns; give at least one tensor or array.")
        for name, column in named.items():
            _check_column(f"Column {name!r} of ColumnDataset", column)
        lengths = {name: len(column) for name, column in named.items()}
        if len(set(lengths.values())) > 1:
            found = ", ".join(f"{name!r}: {length}" for name, length in lengths.items())
            raise DatasetError(
                f"The columns of ColumnDataset differ in length ({found}); cut them to the same."
            )

    def __len__(self) -> int:
        """Rows."""
        return len(next(iter(self._named().values())))

    def __getitem__(self, index: int) -> Batch:
        """Return the row as a dict or a tuple of tensors: views of tensors, copies of arrays."""
        rows = [
            column[index]
            if isinstance(column, torch.Tensor)
            else torch.from_numpy(np.array(column[index]))
            for column in self._named().values()
        ]
        return self._in_form(rows)

    def __getitems__(self, indices: Sequence[int]) -> list[Batch]:
        """Return several rows, read with one call per column."""
        index = np.asarray(indices, np.int64)
        columns = [_rows(column, index) for column in self._named().values()]
        return [self._in_form(row) for row in zip(*columns, strict=True)]

    def _named(self) -> Mapping[Any, Numbers]:
        columns = self.columns
        return columns if isinstance(columns, dict) else dict(enumerate(columns))

    def _in_form(self, values: Sequence[torch.Tensor]) -> Batch:
        if isinstance(self.columns, dict):
            return dict(zip(self.columns, values, strict=True))
        return tuple(values)


class TokenWindows(Dataset[torch.Tensor]):
    """Windows of equal length over one long row of tokens.

    Window ``i`` is ``tokens[i * stride : i * stride + length]``, as a tensor int64 [length]; a rest
    that does not fill a window is left out. For next-token training take ``length = context + 1``
    and ``stride = context``: inputs are ``window[:-1]``, targets ``window[1:]``.

    Args:
        tokens: Whole numbers [tokens], a tensor or an array; memory-mapped ones are not read whole.
        length: Tokens in a window, from 1.
        stride: Tokens from the start of a window to that of the next, from 1; default: ``length``.
        dtype: Of the windows, ``torch.int64`` by default, which embeddings and losses take.

    Raises:
        DatasetError: The tokens are not one row of whole numbers, or length or stride is below 1.

    Example:
        >>> TokenWindows(np.arange(10, dtype=np.uint16), 4, stride=3)[1]
        tensor([3, 4, 5, 6])
    """

    def __init__(
        self,
        tokens: Numbers,
        length: int,
        *,
        stride: int | None = None,
        dtype: torch.dtype = torch.int64,
    ) -> None:
        stride = length if stride is None else stride
        for name, value in (("length", length), ("stride", stride)):
            if value < 1:
                raise DatasetError(f"{name} of TokenWindows is {value!r}; it starts at 1.")
        _check_column("The row of tokens", tokens)
        if tokens.ndim != 1 or not _is_whole(torch.as_tensor(tokens[:0]).dtype):
            raise DatasetError(
                f"TokenWindows needs one row of whole numbers; got {tokens.dtype} "
                f"{list(tokens.shape)}."
            )
        if not _is_whole(dtype):
            raise DatasetError(f"dtype of TokenWindows is {dtype}; give one of whole numbers.")
        self.tokens = tokens
        self.length = length
        self.stride = stride
        self.dtype = dtype

    def __len__(self) -> int:
        """Windows that fit."""
        return max(0, (len(self.tokens) - self.length) // self.stride + 1)

    def __getitem__(self, index: int) -> torch.Tensor:
        """Return a window, a tensor [length] of ``dtype``."""
        return self._copied(self.windows()[index])

    def __getitems__(self, indices: Sequence[int]) -> list[torch.Tensor]:
        """Return several windows, read in one call."""
        return list(self._copied(self.windows()[np.asarray(indices, np.int64)]).unbind())

    def windows(self) -> NDArray[Any]:
        """Return all windows as a read-only view [windows, length] of the tokens."""
        row = np.asarray(self.tokens)
        step = row.strides[0]
        return np.lib.stride_tricks.as_strided(
            row, (len(self), self.length), (self.stride * step, step), writeable=False
        )

    def _copied(self, window: NDArray[Any]) -> torch.Tensor:
        out = torch.empty(window.shape, dtype=self.dtype)
        out.numpy()[...] = window
        return out


def _check_column(what: str, column: object) -> None:
    if not isinstance(column, torch.Tensor | np.ndarray):
        raise DatasetError(
            f"{what} is of type {type(column).__name__}; give a tensor or an array, for example "
            "numpy.asarray(values)."
        )
    if column.ndim == 0:
        raise DatasetError(f"{what} has no rows: its shape is ().")
    if isinstance(column, np.ndarray):
        try:
            torch.as_tensor(np.empty(0, column.dtype))
        except (TypeError, ValueError) as error:
            raise DatasetError(f"{what} holds {column.dtype}: {error}") from error


def _is_whole(dtype: torch.dtype) -> bool:
    return not (dtype.is_floating_point or dtype.is_complex or dtype is torch.bool)


def _rows(column: Numbers, index: NDArray[Any]) -> tuple[torch.Tensor, ...]:
    if isinstance(column, torch.Tensor):
        return column[torch.from_numpy(index)].unbind()
    return torch.from_numpy(np.asarray(column[index])).unbind()


class NotRowsError(Exception):
    """Batches of the dataset have to be made sample by sample."""


def is_hugging_face(dataset: object) -> bool:
    """Return whether this is a ``datasets.Dataset`` and no subclass, without importing it."""
    library = sys.modules.get("datasets")
    return library is not None and type(dataset) is vars(library).get("Dataset")


def arrays_of(dataset: Any) -> tuple[_TypedArrays, NDArray[np.int64] | None]:
    """Return the columns as stored, with what their batches are made of, and which rows count.

    Args:
        dataset: A ``datasets.Dataset`` in the torch or numpy format.

    Raises:
        NotRowsError: A column holds missing values, lists of different lengths, or no numbers; or
            the format computes something.
    """
    about = dataset.format
    if about["type"] not in _FORMATS or about["format_kwargs"] or about["output_all_columns"]:
        raise NotRowsError
    # No public attribute tells of shuffle(), select() and sort().
    mapping: Any = getattr(dataset, "_indices", False)
    if mapping is False or not len(dataset):
        raise NotRowsError
    select = None if mapping is None else mapping.column(0).to_numpy().astype(np.int64)
    kept = _seen.get(dataset)
    if kept is not None and kept[0] == about:
        return kept[1], select
    # Whole batches are what loaders ask for; a single row may come in other types.
    sample = dataset.__getitems__([0])[0]
    pieces = {name: dataset.data.column(name) for name in sample}
    if not all(_holds_numbers(piece.type) for piece in pieces.values()):
        raise NotRowsError
    joined = sum(piece.nbytes for piece in pieces.values() if piece.num_chunks > 1)
    if joined > read_host_memory().available_bytes // _FREE_SHARE:  # which copies them
        raise NotRowsError
    columns = {}
    for name, piece in pieces.items():
        array = _as_array(piece.combine_chunks() if piece.num_chunks != 1 else piece.chunk(0))
        columns[name] = array, _batch_type(array, sample[name])
    _seen[dataset] = about, columns
    return columns, select


def _holds_lists(kind: pyarrow.DataType) -> bool:
    from pyarrow import types

    return bool(types.is_fixed_size_list(kind) or types.is_list(kind) or types.is_large_list(kind))


def _holds_numbers(kind: pyarrow.DataType) -> bool:
    from pyarrow import types

    while _holds_lists(kind):
        kind = kind.value_type
    return bool(types.is_integer(kind) or types.is_floating(kind))


def _as_array(column: pyarrow.Array) -> NDArray[Any]:
    from pyarrow import types

    shape = [len(column)]
    while _holds_lists(column.type):
        if types.is_fixed_size_list(column.type):
            size = column.type.list_size
        else:
            lengths = np.diff(column.offsets.to_numpy())
            size = int(lengths[0]) if len(lengths) else -1
            if size < 0 or (lengths != size).any():
                raise NotRowsError
        if column.null_count:
            raise NotRowsError
        shape.append(size)
        column = column.flatten()
    if column.null_count:
        raise NotRowsError
    array: NDArray[Any] = column.to_numpy(zero_copy_only=True).reshape(shape)
    return array


def _batch_type(array: NDArray[Any], value: object) -> torch.dtype:
    try:
        batch = default_collate([value])
    except (TypeError, ValueError) as error:
        raise NotRowsError from error
    if not isinstance(batch, torch.Tensor):
        raise NotRowsError
    if isinstance(value, np.generic) and value.dtype != array.dtype:
        # What the format rounds and the collation widens cannot be had in one step.
        own = torch.from_numpy(np.empty(0, value.dtype))
        if own.dtype != batch.dtype:
            raise NotRowsError
    return batch.dtype
