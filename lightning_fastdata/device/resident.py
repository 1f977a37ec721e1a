"""Datasets that stay on the device: read once, and indexed there."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import torch
from torch.utils.data import IterableDataset, default_collate

from lightning_fastdata.batches.staged import StagedBatch, leaves, with_leaves
from lightning_fastdata.errors import OptionsError
from lightning_fastdata.executors.fetch import FetchPlan
from lightning_fastdata.executors.kinds import open_executor
from lightning_fastdata.host.memory import read_device_memory, read_host_memory
from lightning_fastdata.order.epoch_order import dataset_length

if TYPE_CHECKING:
    from lightning_fastdata.types import Batch, Stage

_SHARE: Final = 2
"""One part in so many of the free memory may go to the dataset: the model, its gradients and its
activations need the rest."""
_BLOCK_BYTES: Final = 2**26
_NOT_ROWS: Final = (
    "device_resident keeps datasets of tensors and arrays with torch's own collation, and "
    "{dataset} {why}. Set device_resident=False."
)
_NO_ROOM: Final = (
    "device_resident: the dataset ({dataset}) takes {mib:,.1f} MiB, and of the {free:,.1f} MiB "
    "free on {device} it may take 1/{share}, as the training needs the rest. Keep it in a smaller "
    "type (uint8 for images), take a part of it (Subset), or set device_resident=False."
)


def device_of(resident: bool | str | torch.device) -> torch.device:
    """Return the device that is meant; True: the current accelerator, or else the CPU."""
    if isinstance(resident, bool):
        accelerator = torch.accelerator.current_accelerator()
        if accelerator is None or not torch.accelerator.is_available():
            return torch.device("cpu")
        return torch.device(accelerator.type, torch.accelerator.current_device_index())
    return torch.device(resident)


def free_bytes_on(device: torch.device) -> int | None:
    """Return what a new tensor on a device can take; None if the device does not tell."""
    if device.type == "cpu":
        return read_host_memory().available_bytes
    memory = read_device_memory(device)
    if memory is None:
        return None
    cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return memory.free_bytes + cached


class ResidentBatches:
    """Iterable over epochs of batches that are rows of tensors on a device.

    The dataset is read at the first iteration; what is changed in it later is not seen.

    Args:
        dataset: A dataset of tensors or arrays, as the executor ``"gather"`` reads them.
        device: Where it stays. On the CPU a copy of it.
        default_collation: Whether its batches are torch's default ones.
        batches: Called at the start of each epoch for its batches of indices.
        staged: Deliver :class:`StagedBatch` of this stage, without draws.
        generator: Drawn from at the start of each epoch, as torch does.
        free_bytes: Asked for the free memory of the device.

    Raises:
        OptionsError: The dataset cannot be kept, or at the first iteration: it does not fit.
    """

    _iterator: None = None  # Lightning looks here for workers to stop

    def __init__(
        self,
        dataset: Any,
        device: torch.device,
        *,
        default_collation: bool,
        batches: Callable[[], Iterable[Any]],
        staged: Stage | None = None,
        generator: torch.Generator | None = None,
        free_bytes: Callable[[torch.device], int | None] = free_bytes_on,
    ) -> None:
        name = type(dataset).__name__
        if isinstance(dataset, IterableDataset):
            raise OptionsError(_NOT_ROWS.format(dataset=name, why="is a stream of samples"))
        if not default_collation:
            why = "comes with a collate_fn, a transform in the workers, or batch_size=None"
            raise OptionsError(_NOT_ROWS.format(dataset=name, why=why))
        self.device = device
        self._name = name
        self._length = dataset_length(dataset) or 0
        self._plan = FetchPlan(
            dataset=dataset, collate_fn=default_collate, default_collation=True, look_ahead=1
        )
        self._batches = batches
        self._staged = staged
        self._generator = generator
        self._free_bytes = free_bytes
        self._columns: Batch | None = None

    @property
    def size_bytes(self) -> int:
        """What the dataset takes on the device; 0 before the first iteration."""
        return sum(leaf.nbytes for leaf in leaves(self._columns))

    def __iter__(self) -> Iterator[Batch]:
        """Begin an epoch."""
        torch.empty((), dtype=torch.int64).random_(generator=self._generator)
        if self._columns is None:
            self._columns = self._read()
        return self._epoch(self._columns)

    def close(self) -> None:
        """Give the memory of the device back once its batches are gone."""
        self._columns = None

    def _epoch(self, columns: Batch) -> Iterator[Batch]:
        for indices in self._batches():
            index = _on(self.device, _from_zero(np.asarray(indices, np.int64), self._length))
            batch = with_leaves(columns, partial(_rows, index))
            yield batch if self._staged is None else StagedBatch(batch, None, self._staged)

    def _read(self) -> Batch:
        try:
            executor = open_executor("gather", self._plan)
        except OptionsError as error:
            why = "is nothing of that kind"
            raise OptionsError(_NOT_ROWS.format(dataset=self._name, why=why)) from error
        try:
            executor.start_epoch([np.arange(min(1, self._length))], 0)
            first = next(iter(executor))
            row_bytes = sum(leaf.nbytes for leaf in leaves(first))
            self._check_room(row_bytes * self._length)
            size = max(1, _BLOCK_BYTES // max(1, row_bytes))
            blocks = [
                np.arange(start, min(start + size, self._length))
                for start in range(0, self._length, size)
            ]
            columns = with_leaves(first, self._column_like)
            executor.start_epoch(blocks, 0)
            for block, rows in zip(blocks, executor, strict=True):
                for column, part in zip(leaves(columns), leaves(rows), strict=True):
                    column[block[0] : block[-1] + 1].copy_(part)
        finally:
            executor.close()
        return columns

    def _column_like(self, row: torch.Tensor) -> torch.Tensor:
        return torch.empty(self._length, *row.shape[1:], dtype=row.dtype, device=self.device)

    def _check_room(self, size_bytes: int) -> None:
        free = self._free_bytes(self.device)
        if free is not None and size_bytes * _SHARE > free:
            raise OptionsError(
                _NO_ROOM.format(
                    dataset=self._name,
                    mib=size_bytes / 2**20,
                    free=free / 2**20,
                    device=self.device,
                    share=_SHARE,
                )
            )


def _rows(index: torch.Tensor, column: torch.Tensor) -> torch.Tensor:
    return column.index_select(0, index)


def _from_zero(index: np.ndarray[Any, Any], length: int) -> np.ndarray[Any, Any]:
    if len(index) and (index.min() < -length or index.max() >= length):
        raise IndexError(f"index out of range for a dataset of {length} samples")
    return np.where(index < 0, index + length, index)


def _on(device: torch.device, index: np.ndarray[Any, Any]) -> torch.Tensor:
    rows = torch.from_numpy(index)
    if device.type != "cuda":
        return rows.to(device)
    # Out of ordinary memory the host would wait for all that the device has still to do.
    return rows.pin_memory().to(device, non_blocking=True)
