"""Batches gathered from tensors and arrays in one call each, into reused memory."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import torch
from torch.utils.data import TensorDataset

from lightning_fastdata.errors import OptionsError
from lightning_fastdata.loading.leaves import tensor_over
from lightning_fastdata.loading.slots import SlotPool

if TYPE_CHECKING:
    from lightning_fastdata.loading.executors.fetch import FetchPlan
    from lightning_fastdata.loading.page_lock import PageLocks

_SHORT_S: Final = 0.0003
"""Gathers shorter than this cost less than handing them over from another thread."""
_ALIGNMENT_BYTES: Final = 64
_END: Final = object()


def gatherable(dataset: Any) -> bool:
    """Return whether batches of the dataset are rows of tensors or arrays and nothing else.

    That is a ``TensorDataset``, a tensor, or an array (a memory-mapped one, too).
    """
    return columns_of(dataset) is not None


def columns_of(dataset: Any) -> Any:
    """Return the tensors of a gatherable dataset in the form its batches have, or None."""
    if type(dataset) is TensorDataset:
        columns = list(dataset.tensors)
        return columns if all(_gathers(c) for c in columns) else None
    return dataset if _gathers(dataset) else None


def _gathers(column: Any) -> bool:
    if type(column) is torch.Tensor:
        plain = column.layout is torch.strided and column.device.type == "cpu"
        return plain and column.dim() > 0 and not column.requires_grad and not column.is_quantized
    if type(column) in (np.ndarray, np.memmap):
        try:
            torch.as_tensor(np.empty(0, column.dtype))
        except TypeError:
            return False
        # The default collation makes no tensor of numbers in the same way as of arrays.
        return bool(column.ndim > 1)
    return False


class GatherExecutor:
    """Gathers in the calling thread while that is short, and else one thread ahead of it."""

    def __init__(self, plan: FetchPlan, *, page_locks: PageLocks | None = None) -> None:
        columns = columns_of(plan.dataset)
        if columns is None or not plan.default_collation or not plan.batched:
            raise OptionsError(
                f"executor is 'gather', but {type(plan.dataset).__name__} is neither tensors nor "
                "arrays, or its batches are not torch's default ones. Use 'auto' or 'workers'."
            )
        self._columns = columns
        self._look_ahead = max(1, min(plan.look_ahead, 4))
        self._slots = SlotPool(
            limit_bytes=plan.memory_limit_bytes, shared=False, page_locks=page_locks
        )
        self._batches: Iterator[Any] = iter(())
        self._ready: queue.Queue[Any] | None = None
        self._stop = threading.Event()
        self._quick = 0

    def start_epoch(self, batches: Iterable[Any], epoch: int) -> None:  # noqa: ARG002 - the contract
        """Begin an epoch; what is left of the one before is dropped."""
        self.close()
        self._batches = iter(batches)
        self._quick = 0

    def __iter__(self) -> GatherExecutor:
        return self

    def __next__(self) -> Any:
        if self._ready is not None:
            batch = self._ready.get()
            if batch is _END:
                self.close()
                raise StopIteration
            if isinstance(batch, BaseException):
                self.close()
                raise batch
            return batch
        indices = next(self._batches)
        began = time.perf_counter()
        batch = self._gather(indices)
        if time.perf_counter() - began > _SHORT_S:
            # The first batches pay for new memory.
            self._quick += 1
            if self._quick > 2:
                self._go_ahead()
        return batch

    def record(self, records: Any) -> None:
        """Take no stamps yet."""

    def resize(self, workers: int) -> None:
        """Do nothing: one thread moves as many bytes as the memory gives."""

    def close(self) -> None:
        """End the thread; batches handed out stay valid."""
        self._stop.set()
        self._ready = None
        self._stop = threading.Event()
        self._batches = iter(())

    def _go_ahead(self) -> None:
        self._ready = queue.Queue(self._look_ahead)
        work = (self._ready, self._stop, self._batches)
        threading.Thread(target=self._run, args=work, daemon=True).start()

    def _run(self, ready: queue.Queue[Any], stop: threading.Event, batches: Iterator[Any]) -> None:
        result: Any = None
        while result is not _END and not stop.is_set():
            try:
                result = self._gather(next(batches))
            except StopIteration:
                result = _END
            except BaseException as error:
                _put(ready, stop, error)
                return
            _put(ready, stop, result)
            if result is not _END:
                result = None

    def _gather(self, indices: Any) -> Any:
        index = np.asarray(indices, np.int64)
        columns = self._columns if isinstance(self._columns, list) else [self._columns]
        starts, end = [], 0
        for column in columns:
            starts.append(end)
            row = column[:0].nbytes if not len(column) else column[0].nbytes
            end += -(-row * len(index) // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES
        slot = self._slots.take(max(1, end))
        if slot is None:
            owner: Any = np.empty(max(1, end), np.uint8)
        else:
            owner = self._slots.lease(slot)
        batch = [
            _take(column, index, owner, start)
            for column, start in zip(columns, starts, strict=True)
        ]
        return batch if isinstance(self._columns, list) else batch[0]


def _put(ready: queue.Queue[Any], stop: threading.Event, item: Any) -> None:
    while not stop.is_set():
        try:
            ready.put(item, timeout=0.2)
        except queue.Full:
            continue
        return


def _take(column: Any, index: Any, owner: Any, start: int) -> torch.Tensor:
    shape = (len(index), *column.shape[1:])
    length = len(column)
    if len(index) and (index.min() < -length or index.max() >= length):
        raise IndexError(f"index out of range for a dataset of {length} samples")
    if len(index) and index.min() < 0:
        index = np.where(index < 0, index + length, index)
    if isinstance(column, torch.Tensor):
        out = tensor_over(owner, column.dtype, shape, start)
        return torch.index_select(column, 0, torch.from_numpy(index), out=out)
    dtype = torch.as_tensor(np.empty(0, column.dtype)).dtype
    out = tensor_over(owner, dtype, shape, start)
    # mode="clip" writes into out directly; "raise" would go through a buffer.
    np.take(column, index, axis=0, out=out.numpy(), mode="clip")
    return out  # type: ignore[no-any-return]
