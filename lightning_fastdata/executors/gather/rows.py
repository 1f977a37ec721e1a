"""Datasets whose batches are rows of tensors and arrays: recognised, and read as columns."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

import numpy as np
import torch
from torch.utils.data import StackDataset, Subset, TensorDataset, default_collate

from lightning_fastdata.batches.keyed import fetches_in_batches
from lightning_fastdata.batches.layout import same_batch
from lightning_fastdata.caches.cached import CachedDataset
from lightning_fastdata.caches.sample_form import column_of
from lightning_fastdata.executors.gather.columns import (
    ColumnDataset,
    NotRowsError,
    TokenWindows,
    arrays_of,
    is_hugging_face,
)
from lightning_fastdata.order.epoch_order import dataset_length
from lightning_fastdata.tree import leaves
from lightning_fastdata.types import Batch

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from lightning_fastdata.executors.gather.columns import Numbers

_Part = TypeVar("_Part")
_Parts: TypeAlias = "Mapping[str, _Part] | Iterable[_Part]"
_LARGE_ROW_BYTES = 2**12
_SAME_WIDTH = {1: np.uint8, 2: np.int16, 4: np.int32, 8: np.int64}


class Column:
    """One leaf of the samples, over all rows.

    Args:
        array: Where the rows lie, [rows, *shape]; integers as wide where numpy has no such numbers.
        dtype: What the default collation makes of them.
        stored: How numpy writes a batch of ``dtype``; default: as the array.
        select: Row of the array for each index of the dataset; None: they are the same.
        lasts: No program changes the array, or all processes see it change: it is that of a file.
    """

    __slots__ = ("array", "dtype", "lasts", "plain", "row_bytes", "select", "shape", "stored")

    def __init__(
        self,
        array: NDArray[Any],
        dtype: torch.dtype,
        stored: np.dtype[Any] | None = None,
        select: NDArray[np.int64] | None = None,
        *,
        lasts: bool = False,
    ) -> None:
        self.array = array
        self.lasts = lasts or is_of_file(array)
        self.dtype = dtype
        self.stored = array.dtype if stored is None else stored
        self.select = select
        self.shape = array.shape[1:]
        self.row_bytes = math.prod(self.shape) * self.stored.itemsize
        self.plain = array.flags.c_contiguous and array.dtype == self.stored

    def __len__(self) -> int:
        return len(self.array if self.select is None else self.select)

    def selected(self, select: NDArray[np.int64]) -> Column:
        """Return the same column over some of the rows, each within bounds and from 0."""
        if self.select is not None:
            select = self.select[select]
        return Column(self.array, self.dtype, self.stored, select, lasts=self.lasts)

    @property
    def own_bytes(self) -> int:
        """Bytes of this process's memory that a program may change."""
        return 0 if self.lasts else self.array.nbytes

    def as_now(self) -> Column:
        """Return a column that stays as this one is now."""
        array = self.array if self.lasts else self.array.copy()
        select = None if self.select is None else self.select.copy()
        return Column(array, self.dtype, self.stored, select, lasts=True)

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
    """The leaves of a sample."""
    form: Batch
    """A batch with numbers of columns in the places of tensors."""
    length: int
    """Samples."""

    def batch(self, tensors: list[torch.Tensor]) -> Batch:
        """Return a batch of the tensors of its columns, in the form of the default collation."""
        return _mapped(self.form, tensors.__getitem__)

    @property
    def own_bytes(self) -> int:
        """Bytes of this process's memory that a program may change while they are read."""
        return sum(column.own_bytes for column in self.columns)

    def as_now(self) -> Rows:
        """Return rows that stay as these are now."""
        return replace(self, columns=tuple(column.as_now() for column in self.columns))

    def index_of(self, indices: object) -> NDArray[np.int64] | None:
        """Return the rows that a batch of a sampler asks for; None: they are no rows of these."""
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
    :class:`CachedDataset`, and in a ``Subset`` or ``StackDataset`` of those; all
    of that very type, since a subclass may change its samples.

    Args:
        dataset: Any dataset.
        tried: Compare the first and last row with what the default collation makes of them.
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


def gatherable(dataset: object) -> bool:
    """Return whether batches of the dataset can be gathered; see :func:`rows_of`."""
    return rows_of(dataset) is not None


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
    if not is_hugging_face(dataset):
        raise NotRowsError
    arrays, select = arrays_of(dataset)
    return {
        name: _leaf(Column(array, dtype, _stored(dtype), select, lasts=True), columns)
        for name, (array, dtype) in arrays.items()
    }


def _form_of_parts(parts: _Parts[_Part], form_of: Callable[[_Part], Batch]) -> Batch:
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
    if within is None:  # the sample that is out of range is to raise it, and no other
        raise NotRowsError
    start = len(columns)
    columns.extend(column.selected(within) for column in inner)
    return _mapped(form, start.__add__)


def _form_of_cached(dataset: CachedDataset, columns: list[Column]) -> Batch:
    kept, sample = dataset.columns(), dataset.form()
    if kept is None or sample is None:
        raise NotRowsError
    arrays = iter(kept)

    def of(form: dict[str, Any]) -> Batch:
        if "of" not in form:
            numbers = column_of(form)
            assert numbers is not None
            return _leaf(Column(next(arrays), numbers[0], lasts=True), columns)
        parts = [of(part) for part in form["of"]]
        return dict(zip(form["keys"], parts, strict=True)) if form["is"] == "dict" else parts

    return of(sample)


def is_of_file(array: NDArray[Any]) -> bool:
    """Return whether an array lies in a file that is mapped, which all processes see change."""
    owner: Any = array
    while isinstance(owner, np.ndarray) and isinstance(owner.base, np.ndarray):
        owner = owner.base
    return isinstance(owner, np.memmap) and owner.mode != "c"


def whole_numbers(indices: object) -> NDArray[np.int64] | None:
    """Return the indices of a batch as an array, or None if they are none or not whole numbers."""
    try:
        index = np.array(indices)  # a sampler may use its own again
    except (TypeError, ValueError):
        return None
    if index.ndim != 1 or not len(index) or index.dtype.kind not in "iu":
        return None
    if index.dtype == np.int64:
        return index
    return index.astype(np.int64) if np.can_cast(index.dtype, np.int64) else None


def in_bounds(index: NDArray[np.int64], length: int) -> NDArray[np.int64] | None:
    """Return the indices counted from the start, or None if one is out of range."""
    # As unsigned numbers the negative ones are the largest, so that one pass sees to both ends.
    if not len(index) or np.maximum.reduce(index.view(np.uint64)) < length:
        return index
    outside = index.min() < -length or index.max() >= length
    return None if outside else np.where(index < 0, index + length, index)


def _tensor_column(tensor: torch.Tensor) -> Column:
    plain = (
        type(tensor) is torch.Tensor
        and tensor.layout is torch.strided
        and tensor.device.type == "cpu"
        and tensor.dim() > 0
        and not (tensor.requires_grad or tensor.is_quantized or tensor.is_nested)
        and not (tensor.is_conj() or tensor.is_neg())
    )
    if not plain:
        raise NotRowsError
    try:
        array = tensor.numpy()
    except TypeError:  # bfloat16 and the like
        whole = _SAME_WIDTH.get(tensor.element_size())
        if whole is None:
            raise NotRowsError from None
        array = tensor.view(torch.from_numpy(np.empty(0, whole)).dtype).numpy()
    return Column(array, tensor.dtype)


def _typed_column(column: Numbers) -> Column:
    # A ColumnDataset makes tensors of rows itself, so that the type of numbers stays.
    if isinstance(column, torch.Tensor):
        return _tensor_column(column)
    dtype = torch.as_tensor(np.empty(0, column.dtype)).dtype
    return Column(np.asarray(column), dtype)


def _array_column(array: NDArray[Any]) -> Column:
    if array.ndim == 0 or array.dtype.kind not in "biufc":
        raise NotRowsError
    # The default collation makes no tensor of numbers in the same way as of arrays. (Which bits of
    # a not-a-number it keeps is left open here.)
    like = array[0] if array.ndim == 1 and len(array) else np.empty(0, array.dtype)
    try:
        dtype = default_collate([like]).dtype
    except (TypeError, ValueError, OverflowError):
        raise NotRowsError from None
    stored = _stored(dtype)
    if not np.can_cast(array.dtype, stored, "safe"):
        raise NotRowsError
    return Column(np.asarray(array), dtype, stored)


def _mapped(form: Batch, function: Callable[[int], Any]) -> Batch:
    """Return a form with its numbers of columns replaced."""
    if isinstance(form, dict):
        return {name: _mapped(part, function) for name, part in form.items()}
    if isinstance(form, list):
        return [_mapped(part, function) for part in form]
    return function(form)


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
    except Exception:  # the true collation is to raise it, on the true batch
        return False
    return same_batch(ours, theirs) and all(map(torch.Tensor.is_contiguous, leaves(theirs)))
