"""Where each sample of a batch goes, so that it can be written in place and nothing is collated."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import torch
from torch.utils.data import default_collate

from lightning_fastdata.batches.packed import tensor_over
from lightning_fastdata.tree import children

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from lightning_fastdata.types import Batch

_ALIGNMENT_BYTES: Final = 64
_SMALL_BYTES: Final = 16 * 1024
_SCALARS: Final = (int, float, bool)
_BLOCK_BYTES: Final = 64 * 1024
"""Small samples are written together, a call for each leaf, while they are in the cache."""
_FEWEST_ROWS: Final = 4
_OF_ARRAY = attrgetter("dtype", "shape")
_OF_TENSOR = attrgetter("dtype", "shape", "requires_grad", "is_cpu")


class MisfitError(Exception):
    """A sample has another structure, type or shape than the first one."""


@dataclass(frozen=True, slots=True)
class Field:
    """One leaf of a sample."""

    kind: type
    """The exact type of the leaf."""
    dtype: Any
    """The leaf's own type of numbers."""
    shape: tuple[int, ...]
    """The leaf's shape; () for numbers."""
    batch_dtype: torch.dtype
    """What the default collation makes of it."""


@dataclass(frozen=True, slots=True)
class Node:
    """A container of a sample, or one of its leaves."""

    kind: type
    """The exact type of the container; that of the leaf for leaves."""
    keys: tuple[Any, ...] = ()
    """Keys of a dict."""
    parts: tuple[Node, ...] = ()
    """What the container holds."""
    leaf: int = -1
    """Number of the field; -1 for a container."""


@dataclass(frozen=True, slots=True)
class SampleLayout:
    """The structure of all samples of a dataset, inferred from one."""

    root: Node
    """The sample's structure."""
    fields: tuple[Field, ...]
    """Its leaves."""

    def offsets(self, samples: int) -> tuple[list[int], int]:
        """Return where each leaf's batch starts in the slot, and the bytes of all."""
        starts, end = [], 0
        for field in self.fields:
            starts.append(end)
            size = samples * math.prod(field.shape) * field.batch_dtype.itemsize
            end += -(-size // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES
        return starts, end

    def tensors(self, memory: object, samples: int) -> list[torch.Tensor]:
        """Return the batch of each leaf as a tensor [samples, *shape] over a slot's memory."""
        starts, _ = self.offsets(samples)
        return [
            tensor_over(memory, field.batch_dtype, (samples, *field.shape), start)
            for field, start in zip(self.fields, starts, strict=True)
        ]

    def writers(self, memory: object, samples: int, start: int = 0, stop: int | None = None) -> Any:
        """Return what :meth:`write` writes the rows from ``start`` to ``stop`` of a batch to."""
        parts = [tensor[start:stop] for tensor in self.tensors(memory, samples)]
        return [
            part if field.kind is torch.Tensor else part.numpy()
            for field, part in zip(self.fields, parts, strict=True)
        ]

    @property
    def rows_at_once(self) -> int:
        """How many samples are best written with one call of :meth:`write`."""
        size = sum(math.prod(f.shape) * f.batch_dtype.itemsize for f in self.fields)
        rows = _BLOCK_BYTES // max(1, size)
        return rows if rows >= _FEWEST_ROWS else 1

    def write(self, samples: Sequence[Any], writers: object, row: int) -> None:
        """Write samples, from a row on that is counted from the ``start`` of the writers.

        Raises:
            MisfitError: A sample does not look like the first one.
        """
        if len(samples) == 1:
            _write(self.root, samples[0], self.fields, writers, row)
        else:
            _write_many(self.root, samples, self.fields, writers, row)

    def batch(self, owner: NDArray[np.uint8], samples: int, *, copy: bool = False) -> Batch:
        """Return the batch: the structure of the default collation over the slot's memory."""
        tensors = [
            t.clone() if copy or t.nbytes <= _SMALL_BYTES else t
            for t in self.tensors(owner, samples)
        ]
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
        same = same_bytes(layout.batch(memory, 2), collate([sample, sample]))
    except Exception:  # the true collation is to raise it, on the true batch
        return None
    return layout if same else None


def _node(value: Any, fields: list[Field]) -> Node:
    kind = type(value)
    if kind is dict:
        parts = tuple(_node(part, fields) for part in value.values())
        return Node(kind, tuple(value), parts)
    if kind is list or kind is tuple or (isinstance(value, tuple) and hasattr(kind, "_fields")):
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


def _write(node: Node, value: Any, fields: tuple[Field, ...], writers: Any, row: int) -> None:
    kind: object = type(value)
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
    node: Node, values: Sequence[Any], fields: tuple[Field, ...], writers: Any, row: int
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
        _same_for_all(map(_OF_TENSOR, values), (field.dtype, field.shape, False, True))
        torch.stack(tuple(values), out=out)
    else:
        _same_for_all(map(_OF_ARRAY, values), (field.dtype, field.shape))
        if field.shape:
            np.concatenate(values, out=out.reshape(-1, *field.shape[1:]))
        else:
            out[:] = values


def _same_for_all(found: Iterable[Any], wanted: object) -> None:
    if set(found) != {wanted}:
        raise MisfitError


def _collated(node: Node, tensors: list[torch.Tensor]) -> Batch:
    if node.leaf >= 0:
        return tensors[node.leaf]
    parts = [_collated(part, tensors) for part in node.parts]
    if node.kind is dict:
        return dict(zip(node.keys, parts, strict=True))
    return node.kind(*parts) if hasattr(node.kind, "_fields") else parts


def same_bytes(ours: object, theirs: object) -> bool:
    """Return whether two batches are the same in structure, types and bytes.

    NaN equals NaN here, as the bytes are what matters.
    """
    if type(ours) is not type(theirs):
        return False
    if isinstance(ours, torch.Tensor) and isinstance(theirs, torch.Tensor):
        alike = ours.dtype == theirs.dtype and ours.shape == theirs.shape
        return alike and _bytes(ours) == _bytes(theirs)
    mine, other = children(ours) or [], children(theirs) or []
    return [key for key, _ in mine] == [key for key, _ in other] and all(
        same_bytes(one, another) for (_, one), (_, another) in zip(mine, other, strict=True)
    )


def _bytes(tensor: torch.Tensor) -> bytes:
    flat = tensor.detach().contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy().tobytes() if flat.numel() else b""
