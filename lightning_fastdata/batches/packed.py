"""A batch taken apart: its tensors and arrays into a slot, everything else pickled beside them."""

from __future__ import annotations

import functools
import io
import math
import pickle
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeAlias

import numpy as np
import torch

if TYPE_CHECKING:
    import mmap

    from numpy.typing import NDArray

    from lightning_fastdata.types import Batch

ALIGNMENT_BYTES: Final = 64
SMALL_BYTES: Final = 16 * 1024
"""Leaves up to this size are handed over as copies, so that labels a user keeps hold no images."""
_MIN_ARRAY_BYTES: Final = 256


Memory: TypeAlias = "mmap.mmap | bytearray | NDArray[np.uint8]"
"""What a slot's bytes are reached by."""
_Leaf: TypeAlias = "torch.Tensor | LateStack | NDArray[Any]"


class PackedLeaf(NamedTuple):
    """Where one tensor or array of a batch lies in its slot."""

    dtype: Any
    """A ``torch.dtype`` of a tensor; the type string of an array."""
    shape: tuple[int, ...]
    offset_bytes: int
    size_bytes: int
    layout: str
    """``"C"``, or ``"last"`` for tensors whose channels come last in memory."""
    requires_grad: bool


class Packed(NamedTuple):
    """A batch in parts."""

    skeleton: bytes
    """The pickled structure with numbered places for the leaves."""
    table: tuple[PackedLeaf, ...]
    """One entry for each place."""
    size_bytes: int
    """Bytes of slot that the leaves need."""


class LateStack:
    """Tensors that are stacked where their batch is written, so that they are copied once.

    They are at least one, plain and dense, in host memory, without gradient, of one shape and type,
    and such that torch would stack them to a contiguous tensor.
    """

    __slots__ = ("dtype", "shape", "tensors")

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        self.tensors = tuple(tensors)
        self.dtype = tensors[0].dtype
        self.shape = (len(tensors), *tensors[0].shape)


def pack(
    batch: Batch, pickled_by: type[pickle.Pickler] = pickle.Pickler
) -> tuple[Packed, list[_Leaf]]:
    """Take a batch apart; the leaves are still to be written with :func:`write_leaves`.

    Its structure may be any that can be pickled. One tensor in two places stays one tensor. Tensors
    of other kinds than plain, dense ones in host memory, and their subclasses, are pickled whole. A
    :class:`LateStack` becomes the tensor that it stands for.

    ``pickled_by``: What pickles all else, where Python's own pickler cannot.
    """
    buffer = io.BytesIO()
    pickler = _pickler_over(pickled_by)(buffer)  # type: ignore[arg-type]
    pickler.dump(batch)
    packed = Packed(buffer.getvalue(), tuple(pickler.table), pickler.size_bytes)
    return packed, pickler.leaves


def write_leaves(packed: Packed, leaves: list[_Leaf], memory: Memory) -> None:
    """Copy leaves into memory: anything with a writable buffer of ``packed.size_bytes``."""
    for entry, leaf in zip(packed.table, leaves, strict=True):
        if isinstance(leaf, LateStack):
            torch.stack(leaf.tensors, out=_tensor_view(entry, memory))
        elif isinstance(leaf, torch.Tensor):
            with torch.no_grad():
                _tensor_view(entry, memory).copy_(leaf)
        else:
            np.copyto(_array_view(entry, np.frombuffer(memory, np.uint8)), leaf)


def unpack(packed: Packed, owner: NDArray[np.uint8] | None, *, copy: bool = False) -> Batch:
    """Put a batch together again, over the slot's memory; ``owner`` is None if no leaf has bytes.

    With ``copy`` every leaf has memory of its own instead of a view of the slot.
    """
    unpickler = _Unpickler(packed, owner, copy)
    try:
        return unpickler.load()
    finally:
        # It holds itself and all tensors through its memo, and with them the slot.
        unpickler.memo.clear()


def copied(batch: Batch) -> tuple[Batch, int]:
    """Return a batch as another process would hand it over, and its bytes.

    It has nothing in common with what it was made of.
    """
    packed, leaves = pack(batch)
    memory = np.empty(packed.size_bytes, np.uint8)
    write_leaves(packed, leaves, memory)
    return unpack(packed, memory), packed.size_bytes + len(packed.skeleton)


def tensor_over(
    owner: Memory, dtype: torch.dtype, shape: tuple[int, ...], offset: int
) -> torch.Tensor:
    """Return a tensor over part of a buffer; its storage spans that part and no more."""
    count = math.prod(shape)
    if count == 0:
        return torch.empty(shape, dtype=dtype)
    flat = torch.frombuffer(owner, dtype=dtype, count=count, offset=offset)
    return flat if len(shape) == 1 else flat.view(shape)


def _tensor_view(leaf: PackedLeaf, owner: Memory) -> torch.Tensor:
    shape = leaf.shape
    if leaf.layout == "last":
        moved = (shape[0], *shape[2:], shape[1])
        return tensor_over(owner, leaf.dtype, moved, leaf.offset_bytes).movedim(-1, 1)
    return tensor_over(owner, leaf.dtype, shape, leaf.offset_bytes)


def _array_view(leaf: PackedLeaf, owner: NDArray[np.uint8]) -> NDArray[Any]:
    part: NDArray[Any] = owner[leaf.offset_bytes : leaf.offset_bytes + leaf.size_bytes]
    array: NDArray[Any] = part.view(leaf.dtype).reshape(leaf.shape)
    return array


def _place(_number: int) -> object:
    """Stand for a leaf in a pickled structure; the reader puts its own function in its place."""
    raise pickle.UnpicklingError("A batch in parts can only be put together by unpack().")


class _Leaves:
    """The part of a pickler that takes out the leaves; the rest is of the class beside it."""

    def __init__(self, buffer: io.BytesIO) -> None:
        super().__init__(buffer, protocol=5)  # type: ignore[call-arg]
        self.table: list[PackedLeaf] = []
        self.leaves: list[_Leaf] = []
        self.size_bytes = 0

    # Unlike persistent_id this is not called for each number and string of a batch.
    def reducer_override(self, obj: Any) -> object:
        kind = type(obj)
        if kind is LateStack:
            size = math.prod(obj.shape) * obj.dtype.itemsize
            return self._leaf(obj, obj.dtype, size, "C", requires_grad=False)
        if kind is torch.Tensor:
            if not is_plain(obj):
                return self._as_it_is(obj)
            layout = _memory_layout(obj)
            size = obj.numel() * obj.element_size()
            return self._leaf(obj, obj.dtype, size, layout, obj.requires_grad)
        if kind is np.ndarray or kind is np.memmap:
            if obj.nbytes < _MIN_ARRAY_BYTES or obj.dtype.hasobject or obj.dtype.names:
                return self._as_it_is(obj)
            return self._leaf(obj, obj.dtype.str, obj.nbytes, "C", requires_grad=False)
        return self._as_it_is(obj)

    def _as_it_is(self, obj: object) -> object:
        other = getattr(super(), "reducer_override", None)
        return NotImplemented if other is None else other(obj)

    def _leaf(
        self, leaf: _Leaf, dtype: torch.dtype | str, size: int, layout: str, requires_grad: bool
    ) -> tuple[object, tuple[int]]:
        self.table.append(
            PackedLeaf(dtype, tuple(leaf.shape), self.size_bytes, size, layout, requires_grad)
        )
        self.leaves.append(leaf)
        self.size_bytes += -(-size // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
        return _place, (len(self.leaves) - 1,)


@functools.cache
def _pickler_over(base: type[pickle.Pickler]) -> Any:
    return type("Pickler", (_Leaves, base), {})


class _Unpickler(pickle.Unpickler):
    def __init__(self, packed: Packed, owner: NDArray[np.uint8] | None, copy: bool) -> None:
        super().__init__(io.BytesIO(packed.skeleton))
        self._packed = packed
        self._owner = np.empty(0, np.uint8) if owner is None else owner
        self._copy = copy

    def find_class(self, module: str, name: str) -> object:
        if name == "_place" and module == __name__:
            return self._take
        return super().find_class(module, name)

    def _take(self, number: int) -> torch.Tensor | NDArray[Any]:
        leaf = self._packed.table[number]
        copy = self._copy or leaf.size_bytes <= SMALL_BYTES
        if isinstance(leaf.dtype, torch.dtype):
            tensor = _tensor_view(leaf, self._owner)
            if copy:
                tensor = tensor.clone()
            return tensor.requires_grad_() if leaf.requires_grad else tensor
        array = _array_view(leaf, self._owner)
        return array.copy() if copy else array


def is_plain(tensor: torch.Tensor) -> bool:
    """Return whether a tensor is dense, in host memory, and nothing but its numbers."""
    return (
        tensor.layout is torch.strided
        and tensor.device.type == "cpu"
        and not tensor.is_nested
        and not tensor.is_quantized
    )


def _memory_layout(tensor: torch.Tensor) -> str:
    if tensor.is_contiguous():
        return "C"
    four = tensor.dim() == 4 and tensor.is_contiguous(memory_format=torch.channels_last)
    five = tensor.dim() == 5 and tensor.is_contiguous(memory_format=torch.channels_last_3d)
    return "last" if four or five else "C"
