"""Datasets that are columns of numbers, whose batches are gathered in one call per column."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np
import torch
from torch.utils.data import Dataset

from lightning_fastdata.errors import DatasetError

Numbers: TypeAlias = "torch.Tensor | np.ndarray[Any, Any]"


class ColumnDataset(Dataset[Any]):
    """Rows of equally long columns, each a tensor or an array (a memory-mapped one, too).

    Sample ``i`` holds row ``i`` of each column as a tensor of the column's own type of numbers, in
    a dict if the columns came in a mapping and in a tuple if they came in a sequence.

    Args:
        columns: Tensors and arrays [rows, ...] by name, or in order.

    Raises:
        DatasetError: There is no column, or they differ in length, or torch has no such numbers.

    Example:
        >>> data = ColumnDataset({"x": torch.arange(6).view(3, 2), "y": np.array([7, 8, 9])})
        >>> data[1]
        {'x': tensor([2, 3]), 'y': tensor(8)}
    """

    def __init__(self, columns: Mapping[str, Numbers] | Sequence[Numbers]) -> None:
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

    def __getitem__(self, index: int) -> Any:
        """Return the row as a dict or a tuple of tensors: views of tensors, copies of arrays."""
        return self._in_form([_row(column, index) for column in self._named().values()])

    def __getitems__(self, indices: Sequence[int]) -> list[Any]:
        """Return several rows, read with one call per column."""
        index = np.asarray(indices, np.int64)
        columns = [_rows(column, index) for column in self._named().values()]
        return [self._in_form(row) for row in zip(*columns, strict=True)]

    def _named(self) -> dict[Any, Numbers]:
        columns = self.columns
        return columns if isinstance(columns, dict) else dict(enumerate(columns))

    def _in_form(self, values: Sequence[torch.Tensor]) -> Any:
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

    def windows(self) -> np.ndarray[Any, Any]:
        """Return all windows as a read-only view [windows, length] of the tokens."""
        row = np.asarray(self.tokens)
        step = row.strides[0]
        return np.lib.stride_tricks.as_strided(
            row, (len(self), self.length), (self.stride * step, step), writeable=False
        )

    def _copied(self, window: np.ndarray[Any, Any]) -> torch.Tensor:
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


def _row(column: Numbers, index: int) -> torch.Tensor:
    if isinstance(column, torch.Tensor):
        return column[index]
    return torch.from_numpy(np.array(column[index]))


def _rows(column: Numbers, index: np.ndarray[Any, Any]) -> tuple[torch.Tensor, ...]:
    if isinstance(column, torch.Tensor):
        return column[torch.from_numpy(index)].unbind()
    return torch.from_numpy(np.asarray(column[index])).unbind()
