"""Where each sample of a batch goes, so that it can be written in place and nothing is collated."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import TYPE_CHECKING, Any, Final, TypeAlias

import numpy as np
import torch
from torch.utils.data import default_collate

from lightning_fastdata.batches.packed import ALIGNMENT_BYTES, SMALL_BYTES, tensor_over
from lightning_fastdata.tree import is_named_tuple

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from lightning_fastdata.batches.packed import Memory
    from lightning_fastdata.types import Batch

    _Writers: TypeAlias = Sequence[Any]

_SCALARS: Final = (int, float, bool)
_BLOCK_BYTES: Final = 64 * 1024
"""Small samples are written together, a call for each leaf, while they are in the cache."""
_FEWEST_ROWS: Final = 4
_OF_ARRAY = attrgetter("dtype", "shape")
_DTYPE = attrgetter("dtype")


class MisfitError(Exception):
    """A sample has another structure, type or shape than the first one."""


@dataclass(frozen=True, slots=True)
class Field:
    """One leaf of a sample."""

    kind: type
    """Its exact type."""
    dtype: torch.dtype | np.dtype[Any] | None
    """Its own type; None of numbers."""
    shape: tuple[int, ...]
    batch_dtype: torch.dtype
    """What the default collation makes of it."""
    row_bytes: int = dataclasses.field(init=False)
    """What it takes in a batch for each sample; kept, as each batch asks several times."""

    def __post_init__(self) -> None:
        size = math.prod(self.shape) * self.batch_dtype.itemsize
        object.__setattr__(self, "row_bytes", size)


@dataclass(frozen=True, slots=True)
class Node:
    """A container of a sample, or one of its leaves."""

    kind: type
    """Its exact type."""
    keys: tuple[object, ...] = ()
    """Of a dict."""
    parts: tuple[Node, ...] = ()
    leaf: int = -1
    """Number of the field; -1 for a container."""


@dataclass(frozen=True, slots=True)
class SampleLayout:
    """The structure of all samples of a dataset, inferred from one."""

    root: Node
    fields: tuple[Field, ...]
    """Its leaves."""

    def offsets(self, samples: int) -> tuple[list[int], int]:
        """Return where each leaf's batch starts in the slot, and the bytes of all."""
        starts, end = [], 0
        for field in self.fields:
            starts.append(end)
            end += -(-samples * field.row_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
        return starts, end

    def tensors(self, memory: Memory, samples: int) -> list[torch.Tensor]:
        """Return the batch of each leaf as a tensor [samples, *shape] over a slot's memory."""
        starts, _ = self.offsets(samples)
        return [
            tensor_over(memory, field.batch_dtype, (samples, *field.shape), start)
            for field, start in zip(self.fields, starts, strict=True)
        ]

    def writers(
        self, memory: Memory, samples: int, start: int = 0, stop: int | None = None
    ) -> _Writers:
        """Return what :meth:`write` writes the rows from ``start`` to ``stop`` of a batch to."""
        parts = [tensor[start:stop] for tensor in self.tensors(memory, samples)]
        return [
            part if field.kind is torch.Tensor else part.numpy()
            for field, part in zip(self.fields, parts, strict=True)
        ]

    @property
    def rows_at_once(self) -> int:
        """How many samples are best written with one call of :meth:`write`."""
        size = sum(field.row_bytes for field in self.fields)
        rows = _BLOCK_BYTES // max(1, size)
        return rows if rows >= _FEWEST_ROWS else 1

    def write(self, samples: Sequence[Any], writers: _Writers, row: int) -> None:
        """Write samples, from a row on that is counted from the ``start`` of the writers.

        Raises:
            MisfitError: A sample does not look like the first one.
        """
        if len(samples) == 1:
            _write(self.root, samples[0], self.fields, writers, row)
        else:
            _write_many(self.root, samples, self.fields, writers, row)

    def batch(
        self,
        owner: NDArray[np.uint8],
        samples: int,
        *,
        copy: bool = False,
        rows: list[int] | None = None,
    ) -> Batch:
        """Return the batch: the structure of the default collation over the slot's memory.

        ``rows``: those of the samples that are in it, as a copy; None: all.
        """
        tensors = self.tensors(owner, samples)
        if rows is not None:
            tensors = [t[rows] for t in tensors]
        else:
            tensors = [t.clone() if copy or t.nbytes <= SMALL_BYTES else t for t in tensors]
        return _collated(self.root, tensors)


def layout_of(sample: object, collate: Callable[[list[Any]], Any]) -> SampleLayout | None:
    """Return the layout of a sample, or None if its batches have to be collated.

    The layout is tried on the sample itself: where ``collate`` does not give the very same batch,
    in structure, types and bytes, there is none.
    """
    fields: list[Field] = []
    try:
        layout = SampleLayout(_node(sample, fields), tuple(fields))
        if not fields:
            return None
        memory = np.zeros(max(1, layout.offsets(2)[1]), np.uint8)
        writers = layout.writers(memory, 2)
        layout.write([sample, sample], writers, 0)
        same = same_batch(layout.batch(memory, 2), collate([sample, sample]))
    except Exception:  # the true collation is to raise it, on the true batch
        return None
    return layout if same else None


def _node(value: Batch, fields: list[Field]) -> Node:
    kind = type(value)
    if kind is dict:
        parts = tuple(_node(part, fields) for part in value.values())
        return Node(kind, tuple(value), parts)
    if kind is list or kind is tuple or is_named_tuple(value):
        return Node(kind, (), tuple(_node(part, fields) for part in value))
    if kind is torch.Tensor:
        if value.requires_grad or value.layout is not torch.strided or value.is_quantized:
            raise MisfitError
        field = Field(kind, value.dtype, tuple(value.shape), value.dtype)
    elif kind is np.ndarray or kind is np.memmap:
        field = Field(kind, value.dtype, value.shape, torch.as_tensor(value).dtype)
    elif kind in _SCALARS or isinstance(value, np.number | np.bool_):
        field = Field(kind, None, (), default_collate([value]).dtype)
    else:
        raise MisfitError
    fields.append(field)
    return Node(kind, leaf=len(fields) - 1)


def _write(
    node: Node, value: Batch, fields: tuple[Field, ...], writers: _Writers, row: int
) -> None:
    kind: type = type(value)
    if kind is not node.kind:
        raise MisfitError
    if node.leaf >= 0:
        field = fields[node.leaf]
        if field.dtype is None:
            try:
                writers[node.leaf][row] = value
            except OverflowError as error:
                raise MisfitError from error
            return
        if value.dtype != field.dtype or value.shape != field.shape:
            raise MisfitError
        if node.kind is torch.Tensor:
            if value.requires_grad or not value.is_cpu:
                raise MisfitError
            writers[node.leaf][row].copy_(value)
        else:
            writers[node.leaf][row] = value
        return
    if len(value) != len(node.parts):
        raise MisfitError
    if node.kind is dict:
        try:
            value = [value[key] for key in node.keys]
        except KeyError as error:
            raise MisfitError from error
    for part, item in zip(node.parts, value, strict=True):
        _write(part, item, fields, writers, row)


def _write_many(
    node: Node, values: Sequence[Any], fields: tuple[Field, ...], writers: _Writers, row: int
) -> None:
    """Do the same for many samples in a fraction of the time, and for one in more."""
    _same_for_all(map(type, values), node.kind)
    if node.leaf >= 0:
        _write_leaf(fields[node.leaf], values, writers[node.leaf][row : row + len(values)])
        return
    _same_for_all(map(len, values), len(node.parts))
    columns: Iterable[Any]
    if node.kind is dict:
        try:
            columns = [[value[key] for value in values] for key in node.keys]
        except KeyError as error:
            raise MisfitError from error
    else:
        columns = zip(*values, strict=True)
    for part, column in zip(node.parts, columns, strict=True):
        _write_many(part, column, fields, writers, row)


def _write_leaf(field: Field, values: Sequence[Any], out: Any) -> None:
    if field.dtype is None:
        try:
            out[:] = values
        except OverflowError as error:
            raise MisfitError from error
    elif field.kind is torch.Tensor:
        _same_for_all(map(_DTYPE, values), field.dtype)  # which torch would convert
        if values[0].shape != field.shape:  # torch would give ``out`` another one
            raise MisfitError
        try:
            torch.stack(tuple(values), out=out)
        except RuntimeError as error:  # another shape or device, or a gradient is wanted
            raise MisfitError from error
    else:
        _same_for_all(map(_OF_ARRAY, values), (field.dtype, field.shape))
        if field.shape:
            np.concatenate(values, out=out.reshape(-1, *field.shape[1:]))
        else:
            out[:] = values


def _same_for_all(found: Iterable[object], wanted: object) -> None:
    if set(found) != {wanted}:
        raise MisfitError


def _collated(node: Node, tensors: list[torch.Tensor]) -> Batch:
    if node.leaf >= 0:
        return tensors[node.leaf]
    parts = [_collated(part, tensors) for part in node.parts]
    if node.kind is dict:
        return dict(zip(node.keys, parts, strict=True))
    return parts if node.kind in (list, tuple) else node.kind(*parts)


def same_batch(ours: Batch, theirs: Batch) -> bool:
    """Return whether two batches are equal in structure, types and bytes; NaN equals NaN here."""
    if type(ours) is not type(theirs):
        return False
    if isinstance(ours, torch.Tensor):
        if ours.dtype != theirs.dtype or ours.shape != theirs.shape:
            return False
        ours, theirs = (t.cpu().contiguous().reshape(-1).view(torch.uint8) for t in (ours, theirs))
        return torch.equal(ours, theirs)
    if isinstance(ours, dict):
        return list(ours) == list(theirs) and all(same_batch(ours[k], theirs[k]) for k in ours)
    return len(ours) == len(theirs) and all(map(same_batch, ours, theirs))


def decodes_in_place(dataset: object) -> bool:
    """Return whether a dataset writes its samples itself, and no subclass has changed them.

    They are pictures and their classes, as those of FastImageFolder: ``write_into(index, out,
    key=...)`` writes a picture of ``sample_shape`` into an array, and returns its class.
    """
    names = {"write_into", "sample_shape", "samples"}
    writer = next((each for each in type(dataset).__mro__ if names <= vars(each).keys()), None)
    read = getattr(type(dataset), "__getitem__", None)
    return writer is not None and vars(writer).get("__getitem__") is read
