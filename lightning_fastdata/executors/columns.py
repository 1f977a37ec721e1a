"""Datasets whose batches are rows of columns of numbers: our own and others, read as columns."""

from __future__ import annotations

import math
import sys
import warnings
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Final, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data import Dataset, StackDataset, Subset, TensorDataset, default_collate

from lightning_fastdata.batches.keyed import fetches_in_batches
from lightning_fastdata.batches.memory import is_plain, mapped, same_batch
from lightning_fastdata.caches.cached import CachedDataset
from lightning_fastdata.caches.sample_file import column_of
from lightning_fastdata.errors import DatasetError, is_whole
from lightning_fastdata.fingerprint import file_under
from lightning_fastdata.host.memory import read_host_memory
from lightning_fastdata.order.epoch_order import dataset_length
from lightning_fastdata.tree import leaves
from lightning_fastdata.types import Batch

if TYPE_CHECKING:
    import pyarrow

Numbers: TypeAlias = torch.Tensor | NDArray[Any]

_FORMATS: Final = ("numpy", "torch")
_FREE_SHARE: Final = 8
_TypedArrays: TypeAlias = dict[str, tuple[NDArray[Any], torch.dtype]]
_seen: weakref.WeakKeyDictionary[object, tuple[object, _TypedArrays]] = weakref.WeakKeyDictionary()
"""Columns by dataset, with the format they were read in, as joining their pieces copies them."""
_LARGE_ROW_BYTES = 2**12
_SAME_WIDTH = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


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
        """Return the number of rows."""
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
        dtype: Type of the windows, ``torch.int64`` by default, which embeddings and losses take.

    Raises:
        DatasetError: The tokens are not one row of whole numbers, or length or stride is no whole
            number from 1.

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
            if not is_whole(value, 1):
                raise DatasetError(
                    f"{name} of TokenWindows is {value!r}; give a whole number, at least 1."
                )
        _check_column("The row of tokens", tokens)
        if tokens.ndim != 1 or not _is_whole(torch.as_tensor(tokens[:0]).dtype):
            raise DatasetError(
                f"TokenWindows needs one row of whole numbers; got {tokens.dtype} "
                f"{list(tokens.shape)}."
            )
        if not isinstance(dtype, torch.dtype) or not _is_whole(dtype):
            raise DatasetError(f"dtype of TokenWindows is {dtype}; give one of whole numbers.")
        self.tokens = tokens
        self.length, self.stride = int(length), int(stride)
        self.dtype = dtype

    def __len__(self) -> int:
        """Return the number of windows that fit."""
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


def arrays_of(dataset: Any) -> tuple[_TypedArrays, NDArray[np.int64] | None]:
    """Return the columns of a ``datasets.Dataset`` in the torch or numpy format, as stored.

    Each comes with the type of its batches; the second value are the rows that count, None: all.

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
    pieces = {name: dataset.data.column(name) for name in about["columns"]}
    if not all(_holds_numbers(piece.type) for piece in pieces.values()):
        raise NotRowsError  # before a row is read, which may be a file that is damaged or far away
    # Whole batches are what loaders ask for; a single row may come in other types.
    sample = dataset.__getitems__([0])[0]
    joined = sum(piece.nbytes for piece in pieces.values() if piece.num_chunks > 1)
    if joined > read_host_memory().available_bytes // _FREE_SHARE:  # joining copies them
        raise NotRowsError
    columns = {}
    for name in sample:
        piece = pieces[name]
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
        # Numbers that the format rounds and the collation widens cannot be had in one step.
        own = torch.from_numpy(np.empty(0, value.dtype))
        if own.dtype != batch.dtype:
            raise NotRowsError
    return batch.dtype


@dataclass(slots=True, eq=False)
class Column:
    """One leaf of the samples, over all rows."""

    array: NDArray[Any]
    """Rows of the column, [rows, *shape]; integers of equal width where numpy lacks the type."""
    dtype: torch.dtype
    """Type of the column in a batch, as the default collation makes it."""
    stored: np.dtype[Any]
    """Type with which numpy writes a batch of ``dtype``."""
    select: NDArray[np.int64] | None = None
    """Row of the array for each index of the dataset; None: row and index are the same."""
    lasts: bool = False
    """Whether no program changes the array, or it is that of a file, whose changes all
    processes see."""
    row_bytes: int = field(init=False)
    plain: bool = field(init=False)

    def __post_init__(self) -> None:
        self.lasts = self.lasts or file_under(self.array) is not None
        self.row_bytes = math.prod(self.shape) * self.stored.itemsize
        self.plain = self.array.flags.c_contiguous and self.array.dtype == self.stored

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of each row."""
        return self.array.shape[1:]

    def __len__(self) -> int:
        return len(self.array if self.select is None else self.select)

    def selected(self, select: NDArray[np.int64]) -> Column:
        """Return the same column over some of the rows, each within bounds and from 0."""
        if self.select is not None:
            select = self.select[select]
        return replace(self, select=select)

    @property
    def own_bytes(self) -> int:
        """Bytes of this process's memory that a program may change."""
        return 0 if self.lasts else self.array.nbytes

    def as_now(self) -> Column:
        """Return a column that stays as this one is now."""
        array = self.array if self.lasts else self.array.copy()
        select = None if self.select is None else self.select.copy()
        return replace(self, array=array, select=select, lasts=True)

    def take(self, index: NDArray[np.int64], out: NDArray[Any]) -> None:
        """Copy rows, whose indices are within bounds and from 0, into an array."""
        if self.select is not None:
            index = self.select[index]
        if self.plain:
            # With "raise" the rows would go through a buffer.
            self.array.take(index, 0, out, "clip")
        elif self.row_bytes >= _LARGE_ROW_BYTES:
            for place, row in enumerate(index.tolist()):  # each copied once
                out[place] = self.array[row]
        else:
            # take() would first copy the whole array.
            out[...] = self.array[index]


@dataclass(frozen=True, slots=True, kw_only=True)
class Rows:
    """All samples of a dataset."""

    columns: tuple[Column, ...]
    """Columns over all samples, one for each leaf of a sample."""
    form: Batch
    """Structure of a batch, with the number of a column in the place of each tensor."""
    length: int
    """Number of samples."""

    def batch(self, tensors: list[torch.Tensor]) -> Batch:
        """Return a batch of the tensors of its columns, in the form of the default collation."""
        return mapped(self.form, tensors.__getitem__)

    @property
    def own_bytes(self) -> int:
        """Bytes of this process's memory that a program may change while they are read."""
        return sum(column.own_bytes for column in self.columns)

    def as_now(self) -> Rows:
        """Return rows that stay as these are now."""
        return replace(self, columns=tuple(column.as_now() for column in self.columns))

    def index_of(self, indices: object) -> NDArray[np.int64] | None:
        """Return the rows that a batch of a sampler asks for; None: some are none of these."""
        index = whole_numbers(indices)
        return None if index is None else in_bounds(index, self.length)

    def gathered(self, index: NDArray[np.int64]) -> Batch:
        """Return the batch of some rows, whose indices are within bounds and from 0."""
        tensors = []
        for column in self.columns:
            out = np.empty((len(index), *column.shape), column.stored)
            column.take(index, out)
            tensors.append(torch.from_numpy(out).view(column.dtype))
        return self.batch(tensors)


def rows_of(dataset: Any, *, tried: bool = True) -> Rows | None:
    """Return the columns of a dataset, or None if it has none that could be gathered.

    They are found in a ``TensorDataset``, a :class:`ColumnDataset`, :class:`TokenWindows`, a
    tensor, an array, a ``datasets.Dataset`` of numbers in the torch or numpy format, a complete
    :class:`CachedDataset`, and in a ``Subset`` or ``StackDataset`` of those; all of that very type,
    since a subclass may change its samples. ``tried``: whether the first and last row are compared
    with what the default collation makes of them.
    """
    columns: list[Column] = []
    try:
        form = _form(dataset, columns)
        if not columns or len({len(column) for column in columns}) != 1:
            return None
        rows = Rows(columns=tuple(columns), form=form, length=len(columns[0]))
        if len(dataset) != rows.length or (tried and not _as_collated(rows, dataset)):
            return None
    except NotRowsError:
        return None
    return rows


def _form(dataset: Any, columns: list[Column]) -> Batch:
    """Append the columns of a dataset, and return the form of its batches."""
    kind = type(dataset)
    if kind is Subset:
        return _form_of_subset(dataset, columns)
    if kind is StackDataset:
        return _form_of_parts(dataset.datasets, lambda part: _form(part, columns))
    if kind is TensorDataset:
        return [_leaf(_tensor_column(tensor), columns) for tensor in dataset.tensors]
    if kind is ColumnDataset:
        return _form_of_parts(dataset.columns, lambda part: _leaf(_typed_column(part), columns))
    if kind is TokenWindows:
        return _leaf(Column(dataset.windows(), dataset.dtype, _stored(dataset.dtype)), columns)
    if kind is CachedDataset:
        return _form_of_cached(dataset, columns)
    if kind is torch.Tensor:
        return _leaf(_tensor_column(dataset), columns)
    if kind is np.ndarray or kind is np.memmap:
        return _leaf(_array_column(dataset), columns)
    library = sys.modules.get("datasets")  # which is not imported to see this
    if library is None or kind is not vars(library).get("Dataset"):
        raise NotRowsError
    arrays, select = arrays_of(dataset)
    return {
        name: _leaf(Column(array, dtype, _stored(dtype), select, lasts=True), columns)
        for name, (array, dtype) in arrays.items()
    }


def _form_of_parts(parts: Any, form_of: Callable[[Any], Batch]) -> Batch:
    if isinstance(parts, Mapping):
        return {name: form_of(part) for name, part in parts.items()}
    return [form_of(part) for part in parts]


def _stored(dtype: torch.dtype) -> np.dtype[Any]:
    return torch.empty(0, dtype=dtype).numpy().dtype


def _leaf(column: Column, columns: list[Column]) -> int:
    columns.append(column)
    return len(columns) - 1


def _form_of_subset(dataset: Subset[Any], columns: list[Column]) -> Batch:
    inner: list[Column] = []
    form = _form(dataset.dataset, inner)
    select = np.asarray(dataset.indices) if len(dataset.indices) else np.empty(0, np.int64)
    if select.ndim != 1 or select.dtype.kind not in "iu":
        raise NotRowsError
    within = in_bounds(select.astype(np.int64, copy=False), dataset_length(dataset.dataset) or 0)
    if within is None:  # the sample that is out of range raises it, and no other
        raise NotRowsError
    start = len(columns)
    columns.extend(column.selected(within) for column in inner)
    return mapped(form, start.__add__)


def _form_of_cached(dataset: CachedDataset, columns: list[Column]) -> Batch:
    kept, sample = dataset.columns(), dataset.form()
    if kept is None or sample is None:
        raise NotRowsError
    arrays = iter(kept)

    def form_of(form: dict[str, Any]) -> Batch:
        if "of" not in form:
            numbers = column_of(form)
            assert numbers is not None
            array = next(arrays)
            return _leaf(Column(array, numbers[0], array.dtype, lasts=True), columns)
        parts = [form_of(part) for part in form["of"]]
        return dict(zip(form["keys"], parts, strict=True)) if form["is"] == "dict" else parts

    return form_of(sample)


def whole_numbers(indices: object) -> NDArray[np.int64] | None:
    """Return the indices of a batch as an array, or None if there are none or not whole ones."""
    try:
        index = np.array(indices)  # a copy, as a sampler may use its own array again
    except (TypeError, ValueError):
        return None
    if index.ndim != 1 or not len(index) or index.dtype.kind not in "iu":
        return None
    if index.dtype == np.int64:
        return index
    return index.astype(np.int64) if np.can_cast(index.dtype, np.int64) else None


def in_bounds(index: NDArray[np.int64], length: int) -> NDArray[np.int64] | None:
    """Return the indices counted from the start, or None if one is out of range."""
    # As unsigned numbers the negative ones are the largest, so that one pass checks both bounds.
    if not len(index) or np.maximum.reduce(index.view(np.uint64)) < length:
        return index
    outside = index.min() < -length or index.max() >= length
    return None if outside else np.where(index < 0, index + length, index)


def _tensor_column(tensor: torch.Tensor) -> Column:
    plain = (
        type(tensor) is torch.Tensor
        and is_plain(tensor)
        and tensor.dim() > 0
        and not (tensor.requires_grad or tensor.is_conj() or tensor.is_neg())
    )
    if not plain:
        raise NotRowsError
    try:
        array = tensor.numpy()
    except TypeError:  # bfloat16 and the like
        whole = _SAME_WIDTH.get(tensor.element_size())
        if whole is None:
            raise NotRowsError from None
        array = tensor.view(whole).numpy()
    return Column(array, tensor.dtype, array.dtype)


def _typed_column(column: Numbers) -> Column:
    # A ColumnDataset makes tensors of rows itself, so that the type of numbers stays.
    if isinstance(column, torch.Tensor):
        return _tensor_column(column)
    dtype = torch.as_tensor(np.empty(0, column.dtype)).dtype
    return Column(np.asarray(column), dtype, column.dtype)


def _array_column(array: NDArray[Any]) -> Column:
    if array.ndim == 0 or array.dtype.kind not in "biufc":
        raise NotRowsError
    # The default collation makes tensors of numbers in another way than of arrays. (Which bits of a
    # not-a-number it keeps is left open here.)
    like = array[0] if array.ndim == 1 and len(array) else np.empty(0, array.dtype)
    try:
        dtype = default_collate([like]).dtype
    except (TypeError, ValueError, OverflowError):
        raise NotRowsError from None
    stored = _stored(dtype)
    if not np.can_cast(array.dtype, stored, "safe"):
        raise NotRowsError
    return Column(np.asarray(array), dtype, stored)


def _as_collated(rows: Rows, dataset: Any) -> bool:
    if not rows.length:
        return True
    ends = np.array([0, rows.length - 1])
    ours = rows.gathered(ends)
    try:
        if fetches_in_batches(dataset):
            samples = dataset.__getitems__(ends.tolist())
        else:
            samples = [dataset[0], dataset[rows.length - 1]]
        with warnings.catch_warnings():
            # torch warns of arrays that are read-only, as it would take them as they are.
            warnings.simplefilter("ignore")
            theirs = default_collate(samples)
    except Exception:  # the true collation raises it, on the true batch
        return False
    return same_batch(ours, theirs) and all(map(torch.Tensor.is_contiguous, leaves(theirs)))
