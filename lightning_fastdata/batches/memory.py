"""The memory of batches: slots that are used again, and how batches are written to them and read.

A slot is one anonymous file in memory (``memfd_create``): it has no name that could be left over,
its pages are reserved before they are used, and it is gone when the last process that maps it is.
Tensors of a batch view the slot; it is written again only when none of them is alive. If the
process was forked meanwhile, the other one may still view it, and it is not written again.

A batch is written either sample by sample, each to its row, by the layout that all samples share;
or it is collated first, and taken apart: tensors and arrays, and everything else pickled beside
them.
"""

from __future__ import annotations

import dataclasses
import errno
import functools
import io
import math
import mmap
import os
import pickle
import sys
import warnings
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeAlias

import numpy as np
import torch
from torch.utils.data import default_collate

from lightning_fastdata.batches.rows import write_rows
from lightning_fastdata.errors import FastDataWarning, WorkerError
from lightning_fastdata.host.memory import read_host_memory, read_open_file_limits
from lightning_fastdata.tree import bytes_of, is_named_tuple

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from lightning_fastdata.types import Batch

_PAGE_BYTES: Final = 4096
_HUGE_PAGE_BYTES: Final = 2**21
_LARGE_BYTES: Final = 2**25
_NO_MEMORY: Final = (
    "No memory for a batch of {mib:,.1f} MiB ({why}). Use a smaller batch_size or prefetch_factor, "
    "or give the job more memory."
)
_TOO_LARGE: Final = (
    "No memory for a batch of {mib:,.1f} MiB: what is shared with workers is a file, and no file "
    "of this process may be so large. Raise the limit (ulimit -f), or set num_workers=0."
)
_NO_FILES: Final = (
    "This process has all the {limit} files open that it may have, so that no memory can be shared "
    "with its workers. Raise the limit (ulimit -n {more}), or use fewer workers."
)
_COPIES: Final = (
    "Batches come as copies from now on: {slots} that were kept or are under way take two open "
    "files each, and this process may have {limit}. Raise the limit (ulimit -n {more}) or keep "
    "fewer batches."
)
_forks: Final = [0]
"""Number of times that this process was forked, or was about to be, in a list of one."""
_FEW_FILES: Final = (errno.EMFILE, errno.ENFILE)
_FILES_PER_SLOT: Final = 8
"""Open files for each slot: two here, three in a forked worker, and some for other loaders."""


def shared_slots_supported() -> bool:
    """Return whether this system has memory files without a name (Linux)."""
    if not sys.platform.startswith("linux"):
        return False
    try:
        os.close(os.memfd_create("fastdata"))
    except OSError as error:
        return error.errno in _FEW_FILES  # else it is refused, by a seccomp filter as a rule
    return True


def create_shared_memory(
    size_bytes: int,
    *,
    available_bytes: Callable[[], int] = lambda: read_host_memory().available_bytes,
) -> int:
    """Return the descriptor of an anonymous memory file whose pages are reserved.

    ``available_bytes`` is asked before large reservations, because the kernel answers one that is
    too large by killing processes, not with an error.

    Raises:
        WorkerError: There is not so much memory, or there are too many open files.
    """
    if size_bytes >= _LARGE_BYTES and size_bytes > available_bytes():
        raise WorkerError(_NO_MEMORY.format(mib=size_bytes / 2**20, why="more than is available"))
    descriptor = None
    try:
        descriptor = os.memfd_create("fastdata", os.MFD_CLOEXEC)
        os.ftruncate(descriptor, size_bytes)
        os.posix_fallocate(descriptor, 0, size_bytes)
    except OSError as error:
        if descriptor is not None:
            os.close(descriptor)
        raise _as_worker_error(error, size_bytes) from error
    return descriptor


def _as_worker_error(error: OSError, size_bytes: int) -> WorkerError:
    limit, _ = read_open_file_limits()
    if error.errno in _FEW_FILES and limit is not None:
        return WorkerError(_NO_FILES.format(limit=limit, more=2 * limit))
    if error.errno == errno.EFBIG:  # the limit of the process: files in memory have no other
        return WorkerError(_TOO_LARGE.format(mib=size_bytes / 2**20))
    return WorkerError(_NO_MEMORY.format(mib=size_bytes / 2**20, why=error.strerror))


def map_shared_memory(descriptor: int) -> mmap.mmap:
    """Map a memory file for reading and writing.

    Raises:
        WorkerError: There are too many open files, or too many mappings.
    """
    try:
        if sys.version_info >= (3, 13):  # the mapping needs no descriptor of its own
            return _advised(mmap.mmap(descriptor, 0, trackfd=False))
        return _advised(mmap.mmap(descriptor, 0))
    except OSError as error:
        raise _as_worker_error(error, os.fstat(descriptor).st_size) from error


def _private_memory(size_bytes: int) -> mmap.mmap:
    if sys.platform == "win32":
        return mmap.mmap(-1, size_bytes)
    # Without the flag these are pages of a memory file, whose first use costs more.
    return _advised(mmap.mmap(-1, size_bytes, mmap.MAP_PRIVATE))


def _advised(mapping: mmap.mmap) -> mmap.mmap:
    if len(mapping) >= _HUGE_PAGE_BYTES and sys.platform == "linux":
        with suppress(OSError):  # a kernel built without huge pages
            mapping.madvise(mmap.MADV_HUGEPAGE)
    return mapping


@dataclass(slots=True, eq=False)
class Slot:
    """One piece of batch memory. Made by a pool only."""

    number: int
    descriptor: int | None
    """Descriptor of the memory file; None: private memory, or a closed file."""
    mapping: mmap.mmap
    size_bytes: int
    """Length of the memory in bytes."""
    lease: weakref.ref[NDArray[np.uint8]] | None = None
    """Array that was handed out last over the memory; None: none was."""
    forked: bool = False
    """Whether a process was forked while the slot was leased, and may view it while it lives."""

    def close(self) -> None:
        """Close the file; what still views the memory has it mapped."""
        if self.descriptor is not None:
            os.close(self.descriptor)
            self.descriptor = None


class SlotPool:
    """The slots of one executor; together they take ``limit_bytes`` at most.

    Two slots are granted in any case, since a batch is read while the next is written. They are
    ``shared`` memory that side processes can map, or private memory of this process.
    """

    def __init__(self, *, limit_bytes: int, shared: bool = True) -> None:
        self.limit_bytes = limit_bytes
        self.shared = shared
        self._files = read_open_file_limits()[0] if shared else None
        self._most = sys.maxsize
        if self._files is not None:
            opened = sum(1 for _ in Path("/proc/self/fd").iterdir())
            self._most = max(2, (self._files - opened) // _FILES_PER_SLOT)
        self._warned = False
        self._numbers = 0
        self.size_bytes = 0
        """Bytes of all slots together; kept, as they are asked for several times a batch."""
        self._slots: dict[int, Slot] = {}
        self._free: list[Slot] = []
        self._returned: deque[Slot] = deque()
        self.dropped: deque[int] = deque()
        """Numbers of slots given up since this was last emptied; side processes unmap them."""
        weakref.finalize(self, _close_files, self._slots).atexit = False

    def take(self, size_bytes: int) -> Slot | None:
        """Return a slot of at least ``size_bytes``, or None while the limit allows no more."""
        self._collect()
        fitting = [slot for slot in self._free if slot.size_bytes >= size_bytes]
        if fitting:
            # The slot used last is still in the processor's cache.
            slot = min(reversed(fitting), key=lambda slot: slot.size_bytes)
            self._free.remove(slot)
            return slot
        unit = _HUGE_PAGE_BYTES if size_bytes > _HUGE_PAGE_BYTES else _PAGE_BYTES
        size_bytes = max(1, -(-size_bytes // unit)) * unit
        while self._free and not self._is_within_bounds(size_bytes):
            self._drop(self._free[0])
        if not self._fits(size_bytes):
            return None
        if self.shared:
            return self.adopt(create_shared_memory(size_bytes))
        return self._add(None, _private_memory(size_bytes))

    def adopt(self, descriptor: int) -> Slot:
        """Take over a memory file, as a side process makes for a batch that fits no slot."""
        try:
            return self._add(descriptor, map_shared_memory(descriptor))
        except WorkerError:
            os.close(descriptor)
            raise

    def may_grow(self, size_bytes: int) -> bool:
        """Return whether a slot of ``size_bytes`` is free or may still be made."""
        self._collect()
        return self._fits(size_bytes) or any(s.size_bytes >= size_bytes for s in self._free)

    def has_to_copy(self, slot: Slot) -> bool:
        """Return whether a batch has to be copied out of its slot, since no other slot is left.

        So batches that a user keeps get memory of their own once the slots are used up.
        """
        if self.may_grow(slot.size_bytes):
            return False
        if len(self._slots) >= self._most and not self._warned and self._files is not None:
            self._warned = True
            counts = {"slots": len(self._slots), "limit": self._files, "more": 4 * self._files}
            warnings.warn(_COPIES.format(**counts), FastDataWarning, stacklevel=2)
        return True

    def lease(self, slot: Slot) -> NDArray[np.uint8]:
        """Return the slot's memory, uint8 [size]; the slot is free when no view of it is left."""
        returned, shared, forks = self._returned, self.shared, _forks[0]
        owner = np.frombuffer(slot.mapping, np.uint8)

        def ended(_: object) -> None:
            slot.forked = shared and _forks[0] != forks
            # Deque appends are atomic, and a collected tensor may end its life in any thread.
            returned.append(slot)

        slot.lease = weakref.ref(owner, ended)
        return owner

    def give_back(self, slot: Slot) -> None:
        """Free a slot that was taken and is not leased."""
        self._returned.append(slot)

    def close(self) -> None:
        """Let go of all slots; tensors that view one keep its memory alive."""
        for slot in list(self._slots.values()):
            self._drop(slot)
        self._returned.clear()

    def _fits(self, size_bytes: int) -> bool:
        return len(self._slots) < 2 or self._is_within_bounds(size_bytes)

    def _is_within_bounds(self, size_bytes: int) -> bool:
        return len(self._slots) < self._most and self.size_bytes + size_bytes <= self.limit_bytes

    def _add(self, descriptor: int | None, mapping: mmap.mmap) -> Slot:
        slot = Slot(self._numbers, descriptor, mapping, len(mapping))
        self._numbers += 1
        self.size_bytes += slot.size_bytes
        self._slots[slot.number] = slot
        return slot

    def _drop(self, slot: Slot) -> None:
        del self._slots[slot.number]
        self.size_bytes -= slot.size_bytes
        if slot in self._free:
            self._free.remove(slot)
        if slot.descriptor is not None:
            slot.close()
            self.dropped.append(slot.number)

    def _collect(self) -> None:
        while self._returned:
            self._reuse(self._returned.popleft())

    def _reuse(self, slot: Slot) -> None:
        if slot.number not in self._slots:
            return
        if slot.forked:
            self._drop(slot)
            return
        self._free.append(slot)
        # Sizes that batches have outgrown would otherwise pile up.
        crowded = self.size_bytes > self.limit_bytes or len(self._slots) > self._most
        if crowded and len(self._slots) > 2:
            self._drop(slot)


def _count_fork() -> None:
    _forks[0] += 1


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_count_fork)


def _close_files(slots: dict[int, Slot]) -> None:
    for slot in slots.values():
        slot.close()


# A batch taken apart

ALIGNMENT_BYTES: Final = 64
SMALL_BYTES: Final = 16 * 1024
"""Most bytes of a leaf that is handed over as a copy, so that labels a user keeps hold no image."""
_MIN_ARRAY_BYTES: Final = 256


Memory: TypeAlias = "mmap.mmap | bytearray | NDArray[np.uint8]"
"""Object through which a slot's bytes are reached."""
_Leaf: TypeAlias = "torch.Tensor | LateStack | NDArray[Any]"


class PackedLeaf(NamedTuple):
    """Where one tensor or array of a batch lies in its slot."""

    dtype: Any
    """Type of a tensor as ``torch.dtype``, or of an array as its type string."""
    shape: tuple[int, ...]
    offset_bytes: int
    size_bytes: int
    strides: tuple[int, ...] | None
    """Strides of a tensor in elements, of an array in bytes; None: in the order of its indices."""
    requires_grad: bool


class Packed(NamedTuple):
    """A batch in parts."""

    skeleton: bytes
    """Pickled structure with numbered places for the leaves."""
    table: tuple[PackedLeaf, ...]
    """Entries of the leaves, one for each place in the skeleton."""
    size_bytes: int
    """Bytes that the leaves need in a slot."""


class LateStack:
    """Tensors or arrays that are stacked where their batch is written: they are copied once.

    They are at least one, of one shape and type, and such that torch would stack them to a
    contiguous tensor of the type ``dtype``. Tensors are plain and dense, in host memory, without
    gradient; arrays are as :func:`~lightning_fastdata.batches.rows.dtype_of_rows` has them.
    """

    __slots__ = ("dtype", "rows", "shape")

    def __init__(
        self, rows: Sequence[torch.Tensor] | Sequence[NDArray[Any]], dtype: torch.dtype
    ) -> None:
        self.rows = tuple(rows)
        self.dtype = dtype
        self.shape = (len(rows), *rows[0].shape)

    def write(self, out: torch.Tensor) -> None:
        """Stack the rows into a tensor of the right shape and type."""
        if isinstance(self.rows[0], torch.Tensor):
            torch.stack(self.rows, out=out)  # type: ignore[arg-type]
        else:
            write_rows(self.rows, out)  # type: ignore[arg-type]


def pack(
    batch: Batch, pickled_by: type[pickle.Pickler] = pickle.Pickler
) -> tuple[Packed, list[_Leaf]]:
    """Take a batch apart; the leaves are still to be written with :func:`write_leaves`.

    Its structure may be any that can be pickled. One tensor in two places stays one tensor. Tensors
    of other kinds than plain, dense ones in host memory, and their subclasses, are pickled whole. A
    :class:`LateStack` becomes the tensor that it stands for.

    ``pickled_by``: class that pickles all else, where Python's own pickler cannot.
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
            leaf.write(_tensor_view(entry, memory))
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
        # The unpickler holds itself and all tensors through its memo, and with them the slot.
        unpickler.memo.clear()


def copied(batch: Batch) -> tuple[Batch, int]:
    """Return a batch as another process would hand it over, and its bytes.

    The copy shares no memory with the original.
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
    tensor = tensor_over(owner, leaf.dtype, leaf.shape, leaf.offset_bytes)
    return tensor if leaf.strides is None else tensor.as_strided(leaf.shape, leaf.strides)


def _array_view(leaf: PackedLeaf, owner: NDArray[np.uint8]) -> NDArray[Any]:
    part: NDArray[Any] = owner[leaf.offset_bytes : leaf.offset_bytes + leaf.size_bytes]
    return np.ndarray(leaf.shape, leaf.dtype, part, strides=leaf.strides)


def _place(_number: int) -> object:
    """Stand for a leaf in a pickled structure; the reader puts its own function in its place."""
    raise pickle.UnpicklingError("A batch in parts can only be put together by unpack().")


class _Leaves:
    """The part of a pickler that takes out the leaves; the other base class does the rest."""

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
            return self._leaf(obj, obj.dtype, size, None, requires_grad=False)
        if kind is torch.Tensor:
            if not is_plain(obj):
                return self._as_it_is(obj)
            size = obj.numel() * obj.element_size()
            return self._leaf(obj, obj.dtype, size, _strides_of(obj), obj.requires_grad)
        if kind is np.ndarray or kind is np.memmap:
            kept = obj.dtype.isnative and not (obj.dtype.hasobject or obj.dtype.names)
            if obj.nbytes < _MIN_ARRAY_BYTES or not kept:
                # As from torch's workers, it comes in this machine's order of bytes, and may be
                # written to: by the protocol of this pickle, one that is read-only would be so.
                return obj.__reduce__()
            # A pickle keeps these two orders.
            strides = obj.strides if obj.flags.fnc else None
            return self._leaf(obj, obj.dtype.str, obj.nbytes, strides, requires_grad=False)
        return self._as_it_is(obj)

    def _as_it_is(self, obj: object) -> object:
        other = getattr(super(), "reducer_override", None)
        return NotImplemented if other is None else other(obj)

    def _leaf(
        self,
        leaf: _Leaf,
        dtype: torch.dtype | str,
        size: int,
        strides: tuple[int, ...] | None,
        requires_grad: bool,
    ) -> tuple[object, tuple[int]]:
        self.table.append(
            PackedLeaf(dtype, tuple(leaf.shape), self.size_bytes, size, strides, requires_grad)
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
        return array.copy(order="K") if copy else array


def is_plain(tensor: torch.Tensor) -> bool:
    """Return whether a tensor is dense, in host memory, and nothing but its numbers."""
    return (
        tensor.layout is torch.strided
        and tensor.device.type == "cpu"
        and not tensor.is_nested
        and not tensor.is_quantized
    )


def _strides_of(tensor: torch.Tensor) -> tuple[int, ...] | None:
    """Return the strides of a copy that is dense: the tensor's own where it is dense itself.

    Where they differ, a ``view()`` that is possible of a tensor may not be of its copy.
    """
    return None if tensor.is_contiguous() else torch.empty_like(tensor, device="meta").stride()


# A batch written sample by sample

_Writers: TypeAlias = Sequence[Any]
_SCALARS: Final = (int, float, bool)
_BLOCK_BYTES: Final = 64 * 1024
"""Bytes of small samples that are written together, leaf by leaf, while they are in the cache."""
_FEWEST_ROWS: Final = 4
_OF_ARRAY = attrgetter("dtype", "shape")
_DTYPE = attrgetter("dtype")


class MisfitError(Exception):
    """A sample has another structure, type or shape than the first one."""


@dataclass(frozen=True, slots=True)
class Field:
    """One leaf of a sample."""

    kind: type
    """Exact type of the leaf."""
    dtype: torch.dtype | np.dtype[Any] | None
    """Type of the numbers in a tensor or an array; None: the leaf is a plain number."""
    shape: tuple[int, ...]
    batch_dtype: torch.dtype
    """Type of the leaf in a batch, as the default collation makes it."""
    row_bytes: int = dataclasses.field(init=False)
    """Bytes of the leaf in a batch for each sample; kept, as each batch asks several times."""

    def __post_init__(self) -> None:
        size = math.prod(self.shape) * self.batch_dtype.itemsize
        object.__setattr__(self, "row_bytes", size)


@dataclass(frozen=True, slots=True)
class SampleLayout:
    """The structure of all samples of a dataset, inferred from one."""

    form: Any
    """Structure of a sample, with the number of a field in the place of each leaf."""
    fields: tuple[Field, ...]
    """Leaves of a sample, in their order in the structure."""

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
        """Return the arrays to which :meth:`write` writes rows ``start`` to ``stop`` of a batch."""
        parts = [tensor[start:stop] for tensor in self.tensors(memory, samples)]
        return [
            part if field.kind is torch.Tensor else part.numpy()
            for field, part in zip(self.fields, parts, strict=True)
        ]

    @property
    def rows_at_once(self) -> int:
        """Number of samples that are best written with one call of :meth:`write`."""
        size = sum(field.row_bytes for field in self.fields)
        rows = _BLOCK_BYTES // max(1, size)
        return rows if rows >= _FEWEST_ROWS else 1

    def write(self, samples: Sequence[Any], writers: _Writers, row: int) -> None:
        """Write samples to rows from ``row`` on, counted from the ``start`` of the writers.

        Raises:
            MisfitError: A sample does not look like the first one.
        """
        if len(samples) == 1:
            _write(self.form, samples[0], self.fields, writers, row)
        else:
            _write_many(self.form, samples, self.fields, writers, row)

    def batch(
        self,
        owner: NDArray[np.uint8],
        samples: int,
        *,
        copy: bool = False,
        rows: list[int] | None = None,
    ) -> Batch:
        """Return the batch: the structure of the default collation over the slot's memory.

        ``rows``: positions of the samples to take, as a copy; None: all.
        """
        tensors = self.tensors(owner, samples)
        if rows is not None:
            tensors = [t[rows] for t in tensors]
        else:
            tensors = [t.clone() if copy or t.nbytes <= SMALL_BYTES else t for t in tensors]
        return mapped(self.form, tensors.__getitem__)


def layout_of(sample: object, collate: Callable[[list[Any]], Any]) -> SampleLayout | None:
    """Return the layout of a sample, or None if its batches have to be collated.

    The layout is tried on the sample itself: where ``collate`` does not give the very same batch,
    in structure, types and bytes, there is none.
    """
    fields: list[Field] = []
    try:
        layout = SampleLayout(_form(sample, fields), tuple(fields))
        if not fields:
            return None
        memory = np.zeros(max(1, layout.offsets(2)[1]), np.uint8)
        writers = layout.writers(memory, 2)
        layout.write([sample, sample], writers, 0)
        same = same_batch(layout.batch(memory, 2), collate([sample, sample]))
    except Exception:  # the true collation raises it, on the true batch
        return None
    return layout if same else None


def _form(value: Batch, fields: list[Field]) -> Any:
    """Append the leaves of a sample to ``fields``, and return its form."""
    kind = type(value)
    if kind is dict:
        return {key: _form(part, fields) for key, part in value.items()}
    if kind is list or kind is tuple or is_named_tuple(value):
        parts = [_form(part, fields) for part in value]
        return kind(*parts) if is_named_tuple(value) else kind(parts)
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
    return len(fields) - 1


def _write(form: Any, value: Batch, fields: tuple[Field, ...], writers: _Writers, row: int) -> None:
    kind: type = type(value)
    wanted: type = type(form)
    if wanted is int:
        field = fields[form]
        if kind is not field.kind:
            raise MisfitError
        if field.dtype is None:
            try:
                writers[form][row] = value
            except OverflowError as error:
                raise MisfitError from error
            return
        if value.dtype != field.dtype or value.shape != field.shape:
            raise MisfitError
        if kind is torch.Tensor:
            if value.requires_grad or not value.is_cpu:
                raise MisfitError
            writers[form][row].copy_(value)
        else:
            writers[form][row] = value
        return
    if kind is not wanted or len(value) != len(form):
        raise MisfitError
    if kind is dict:
        if list(value) != list(form):  # a batch has its keys in the order of the first sample
            raise MisfitError
        form, value = form.values(), value.values()
    for part, item in zip(form, value, strict=True):
        _write(part, item, fields, writers, row)


def _write_many(
    form: Any, values: Sequence[Any], fields: tuple[Field, ...], writers: _Writers, row: int
) -> None:
    """Do as :func:`_write` for many samples in a fraction of the time; one would take longer."""
    if type(form) is int:
        _write_leaf(fields[form], values, writers[form][row : row + len(values)])
        return
    _same_for_all(map(type, values), type(form))
    _same_for_all(map(len, values), len(form))
    columns: Iterable[Any] = values
    if type(form) is dict:
        _same_for_all(map(tuple, values), tuple(form))
        form, columns = form.values(), map(dict.values, values)
    for part, column in zip(form, zip(*columns, strict=True), strict=True):
        _write_many(part, column, fields, writers, row)


def _write_leaf(field: Field, values: Sequence[Any], out: Any) -> None:
    _same_for_all(map(type, values), field.kind)
    if field.dtype is None:
        try:
            out[:] = values
        except OverflowError as error:
            raise MisfitError from error
    elif field.kind is torch.Tensor:
        _same_for_all(map(_DTYPE, values), field.dtype)  # which torch would convert
        if values[0].shape != field.shape:  # torch would give ``out`` another shape
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


def mapped(form: Any, function: Callable[[int], Any]) -> Batch:
    """Return a form with its numbers replaced: dicts, lists and named tuples, as torch collates."""
    kind = type(form)
    if kind is int:
        return function(form)
    if kind is dict:
        return {key: mapped(part, function) for key, part in form.items()}
    parts = [mapped(part, function) for part in form]
    return parts if kind in (list, tuple) else kind(*parts)


def same_batch(ours: Batch, theirs: Batch) -> bool:
    """Return whether two batches are equal in structure, types and bytes; NaN equals NaN here."""
    if type(ours) is not type(theirs):
        return False
    if isinstance(ours, torch.Tensor):
        if ours.dtype != theirs.dtype or ours.shape != theirs.shape:
            return False
        return torch.equal(bytes_of(ours.cpu()), bytes_of(theirs.cpu()))
    if isinstance(ours, dict):
        return list(ours) == list(theirs) and all(same_batch(ours[k], theirs[k]) for k in ours)
    return len(ours) == len(theirs) and all(map(same_batch, ours, theirs))


def decodes_in_place(dataset: object) -> bool:
    """Return whether a dataset writes its samples itself, and no subclass has changed them.

    Such samples are pictures and their classes, as those of FastImageFolder: ``write_into(index,
    out, key=...)`` writes a picture of ``sample_shape`` into an array, and returns its class.
    """
    names = {"write_into", "sample_shape", "samples"}
    writer = next((each for each in type(dataset).__mro__ if names <= vars(each).keys()), None)
    read = getattr(type(dataset), "__getitem__", None)
    return writer is not None and vars(writer).get("__getitem__") is read
