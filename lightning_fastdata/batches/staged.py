"""A batch on its way to the device: collated beside what was drawn for a transform still to run.

In between, a thread may copy it into page-locked memory while the training goes on.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence, Sized
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import islice
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn, Protocol

import torch
from torch.nn.utils.rnn import PackedSequence

from lightning_fastdata import tree
from lightning_fastdata.batches.collate import AroundCollate, Collate, ListsOf
from lightning_fastdata.device.backend import current_index, is_out_of_memory, set_current_index
from lightning_fastdata.errors import BatchError, FastDataWarning, OptionsError
from lightning_fastdata.host import clock
from lightning_fastdata.torch_internals import pinned
from lightning_fastdata.tree import replace_leaves

if TYPE_CHECKING:
    from lightning_fastdata.augment import Draws, WorkerTransform
    from lightning_fastdata.tree import Path
    from lightning_fastdata.types import Batch, Stage

_NOT_UNWRAPPED = (
    "This batch still waits for its transform on the device (a StagedBatch, of which {used} was "
    "used). "
    "FastDataModule.on_after_batch_transfer applies the transform and hands over the plain batch. "
    "If your class overrides on_before_batch_transfer, transfer_batch_to_device or "
    "on_after_batch_transfer, start it with `batch = super().<hook>(...)`; in the first two, read "
    "`batch.batch` and return `batch.with_batch(...)`. In a loop of your own over a loader, "
    "within a run, begin with `batch = trainer.strategy.batch_to_device(batch)`."
)


class Landing(Protocol):
    """A batch that a side stream brings to the device."""

    @property
    def source(self) -> Batch:
        """The batch as it was before the move."""

    def land(self) -> Batch:
        """Return the batch on the device; the current stream waits for it."""


class StagedBatch:
    """A collated batch and the draws of the transform that will run on it on the device.

    It passes unchanged through Lightning's combined loaders, precision plugins and hooks, so that
    what belongs to a batch cannot be mixed up with another batch's, and a tensor that did not come
    from our loader (``example_input_array``) is never taken for a batch.

    With a ``crossing`` a side stream is moving the batch already: ``batch`` is None, and what
    ``crossing.land()`` returns is the batch on the device.
    """

    __slots__ = ("batch", "crossing", "draws", "stage")

    def __init__(
        self,
        batch: Batch,
        draws: Draws | None,
        stage: Stage,
        crossing: Landing | None = None,
    ) -> None:
        self.batch = batch
        self.draws = draws
        self.stage = stage
        self.crossing = crossing

    def with_batch(self, batch: Batch) -> StagedBatch:
        """Return the same draws for another form of the batch, e.g. its copy on the device."""
        return StagedBatch(batch, self.draws, self.stage, self.crossing)

    def pin_memory(self, device: str | None = None) -> StagedBatch:
        """Return the same batch in page-locked memory; torch's pin thread calls this."""
        return StagedBatch(pinned(self.batch, device), pinned(self.draws, device), self.stage)

    def __getitem__(self, item: object) -> NoReturn:
        raise _StillStagedError("[...]")

    def __iter__(self) -> NoReturn:
        raise _StillStagedError("iteration")

    def __getattr__(self, name: str) -> NoReturn:
        raise _StillStagedError(f".{name}")


class _StillStagedError(BatchError, AttributeError):
    """A StagedBatch was taken for the batch; an AttributeError too, so that hasattr works."""

    def __init__(self, used: str) -> None:
        super().__init__(_NOT_UNWRAPPED.format(used=used))


def move(batch: Batch, device: torch.device, *, non_blocking: bool = False) -> Batch:
    """Return a batch whose tensors are on a device; the structure stays.

    What has a method ``to`` is moved with it, in dicts, lists, tuples, named tuples and dataclasses
    and whatever they nest, as ``lightning.fabric.utilities.move_data_to_device`` does it. With
    ``non_blocking`` tensors in page-locked memory are not waited for.
    """

    def moved(_: Path, leaf: Batch) -> Batch:
        if not _can_be_moved(leaf):
            return leaf
        if isinstance(leaf, StagedBatch):
            draws = leaf.draws
            draws = None if draws is None else draws.to(device, non_blocking=non_blocking)
            plain = move(leaf.batch, device, non_blocking=non_blocking)
            return StagedBatch(plain, draws, leaf.stage)
        how = {"non_blocking": True} if non_blocking and _is_tensor(leaf) else {}
        result = leaf.to(device, **how)
        return leaf if result is None else result  # None: a ``to`` that changes it in place

    return replace_leaves(batch, moved, depth=-1, is_leaf=_can_be_moved)


def leaves(batch: Batch) -> Iterator[Any]:
    """Yield what :func:`move` moves, down to the tensors where it can see them."""
    for leaf in tree.leaves(batch, _is_whole):
        if isinstance(leaf, StagedBatch):
            yield from leaves(leaf.batch)
            if leaf.draws is not None:
                yield from leaf.draws.tensors()
        elif _is_tensor(leaf) or _can_be_moved(leaf):
            yield leaf


def batch_samples(batch: Batch) -> int:
    """Return the number of samples in a batch: the first dimension of its first tensor.

    For packed documents it is their number, as ``cu_seqlens`` says, and for graphs theirs; for
    lists that were not stacked, as ``tuple(zip(*samples))`` makes them, of samples, or of three
    pictures and more of unequal size, their length. Without any tensor it is the length of the
    batch, or 1 where it has none, as a single number.
    """
    packed = packed_documents(batch)
    if packed is not None:
        return packed
    parts = batch.values() if type(batch) is dict else batch
    first = next(iter(parts), batch) if type(batch) in (list, tuple, dict) else batch
    if type(first) is torch.Tensor and first.ndim:  # asked for in each step, mostly of these
        # Nested tensors have no shape.
        return len(batch) if first.ndim == 3 and _lists_pictures(batch) else first.size(0)
    if isinstance(first, PackedSequence):
        return int(first.batch_sizes[0])
    if isinstance(graphs := getattr(first, "num_graphs", None), int):  # of torch_geometric
        return graphs
    if _lists_samples(batch):
        return len(batch)
    unstacked = _length_of_columns(batch)
    if unstacked is not None:
        return unstacked
    for leaf in leaves(batch):
        if isinstance(leaf, Sized) and getattr(leaf, "ndim", False):
            return leaf.size(0) if isinstance(leaf, torch.Tensor) else len(leaf)
    return len(batch) if isinstance(batch, Sized) and getattr(batch, "ndim", True) else 1


def _lists_samples(batch: Batch) -> bool:
    """Return whether a batch is a list of samples of one form, as its first leaves tell.

    Collation makes lists, too, but of tensors that are as long as each other.
    """
    kinds = set(map(type, batch)) if type(batch) is list else set()
    if len(kinds) != 1 or kinds.isdisjoint((dict, list, tuple)):
        return False
    some = [leaf for leaf in islice(tree.leaves(batch), 64) if not isinstance(leaf, str)]
    sizes = {len(leaf) if getattr(leaf, "ndim", 0) else None for leaf in some}
    forms = {tuple(row) if type(row) is dict else len(row) for row in batch}
    return len(forms) == 1 and (None in sizes or len(sizes) > 1)


def _lists_pictures(batch: Batch) -> bool:
    """Return whether a batch is a list of pictures [channels, height, width] of unequal size."""
    if type(batch) is not list or len(batch) < 3:
        return False
    shapes = {tuple(each.shape) if type(each) is torch.Tensor else () for each in batch}
    channels = {shape[0] if len(shape) == 3 else 0 for shape in shapes}
    return len(shapes) > 1 and channels <= {1, 3, 4} and len(channels) == 1


def _length_of_columns(batch: Batch) -> int | None:
    """Return how long the lists are that a batch consists of; None: it does not, or was collated.

    Each has values of one kind; a list of whole samples, most often, has not. What collation made
    of nested samples are lists, too, but all of tensors that are as long as each other.
    """
    columns = list(batch.values()) if isinstance(batch, Mapping) else batch
    if type(columns) not in (list, tuple) or not all(type(c) in (list, tuple) for c in columns):
        return None
    lengths = {len(column) for column in columns}
    kinds = [{_kind(value) for value in column} for column in columns]
    if len(lengths) != 1 or any(len(k) != 1 or k & {(list, 0), (tuple, 0)} for k in kinds):
        return None
    sizes = {len(leaf) if _kind(leaf)[1] else None for leaf in tree.leaves(batch)}
    return None if len(sizes) == 1 and None not in sizes else lengths.pop()


def _kind(value: object) -> tuple[type, int]:
    return type(value), value.ndim if isinstance(value, torch.Tensor) else 0


def packed_documents(batch: Batch) -> int | None:
    """Return how many documents a batch of :func:`pack` has; None: it is no such batch."""
    ends = batch.get("cu_seqlens") if isinstance(batch, Mapping) else None
    return len(ends) - 1 if isinstance(ends, torch.Tensor) and ends.ndim == 1 else None


def shows_its_memory(leaf: object) -> bool:
    """Return whether the memory of a leaf can be kept from being used again too early."""
    if isinstance(leaf, torch.Tensor):
        return leaf.layout is torch.strided and not leaf.is_nested
    return _is_tensor(leaf)


def _can_be_moved(value: object) -> bool:
    return isinstance(value, StagedBatch) or (
        not isinstance(value, type) and callable(getattr(value, "to", None))
    )


def _is_whole(value: object) -> bool:
    return isinstance(value, StagedBatch) or _is_tensor(value)


def _is_tensor(value: object) -> bool:
    # Also batches of graph libraries, which offer the two methods of tensors that matter here.
    if isinstance(value, torch.Tensor):
        return True
    return hasattr(value, "record_stream") and not isinstance(value, type)


class StagingCollate(AroundCollate):
    """Collates samples and, beside them, what was drawn for their transform on the device."""

    def __init__(
        self,
        collate_fn: Collate,
        transform: WorkerTransform | None,
        stage: Stage,
    ) -> None:
        super().__init__(collate_fn)
        self.transform = transform
        self.stage = stage

    def __call__(self, samples: list[Any]) -> StagedBatch:
        """Return the staged batch of samples, or of ``(sample, tape)`` pairs."""
        if self.transform is None:
            return StagedBatch(self._collate_inside(samples), None, self.stage)
        drawn = [tape for _sample, tape in samples]
        samples = [sample for sample, _tape in samples]
        listed = self.collate_fn.fields if isinstance(self.collate_fn, ListsOf) else ()
        if not self.transform.stacks(samples, drawn, listed):
            samples, drawn = self.transform.finish_each(samples, drawn)
        draws = self.transform.collate(drawn)
        batch = self._collate_inside(samples)
        return StagedBatch(batch, None if batch is None else draws, self.stage)


class FirstOfPairs(AroundCollate):
    """Collates the samples of ``(sample, tape)`` pairs, where nothing is deferred to a device.

    Raises:
        OptionsError: The transform needs batches, and the loader makes none.
    """

    def __init__(self, collate_fn: Collate, transform: WorkerTransform, *, single: bool) -> None:
        if single and transform.needs_batches:
            raise OptionsError(
                "The transform works on the samples of a batch together, as mixing does, but "
                "batch_size=None makes no batches. Set batch_size, or do it where batches are made."
            )
        super().__init__(collate_fn)
        self.transform = transform
        self.single = single

    def __call__(self, pairs: Sequence[Any]) -> Batch:
        """Return the batch of the samples, or what becomes of the single one."""
        if self.single:
            return self.collate_fn(pairs[0])
        samples = [sample for sample, _tape in pairs]
        if not self.transform.needs_batches:
            return self._collate_inside(samples)
        batch, tapes = self.collate_fn(samples), [tape for _sample, tape in pairs]
        # None says that the batch is to be skipped.
        return None if batch is None else self.transform.finish(batch, tapes)


class Pinned(NamedTuple):
    """A batch in page-locked memory."""

    batch: Batch
    began_ns: int
    ended_ns: int


class PinThread:
    """Copies batches into page-locked memory, for an accelerator, in one thread one by one.

    The thread begins with the first batch, after workers were forked, and ends with this object.
    """

    def __init__(self, device: str) -> None:
        self._device = device
        # As torch's thread does: more threads would take the CPUs of the workers.
        self._threads = ThreadPoolExecutor(1, "fastdata pin", torch.set_num_threads, (1,))

    def pin(self, whole: Callable[[], Batch]) -> Future[Pinned]:
        """Begin to copy the batch that ``whole`` returns, and go on without waiting for it."""
        index = current_index()
        return self._threads.submit(_pinned, whole, self._device, index)


def _pinned(whole: Callable[[], Batch], device: str, index: int) -> Pinned:
    # A thread begins with the first device, and would make a context there in each rank.
    set_current_index(index)
    batch, began_ns = whole(), clock.monotonic_ns()
    return Pinned(pinned_if_room(batch, device), began_ns, clock.monotonic_ns())


def pinned_if_room(batch: Batch, device: str) -> Batch:
    """Return a copy of a batch in page-locked memory, or the batch itself if there is none left."""
    try:
        return pinned(batch, device)
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        said = str(error).partition("\n")[0]
    warnings.warn(
        f"There was no page-locked memory for a batch ({said}), which comes in ordinary memory. "
        "Its copy to the device takes longer. Take smaller batches, or fewer ahead "
        "(prefetch_factor).",
        FastDataWarning,
        stacklevel=2,
    )
    return batch
