"""Batches of any structure: moved to a device, counted, and searched for what lies on one."""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence, Sized
from dataclasses import fields, is_dataclass
from typing import TYPE_CHECKING, Any

import torch

from lightning_fastdata.batches.staged import StagedBatch

if TYPE_CHECKING:
    from lightning_fastdata.types import Batch

_NOT_TAKEN_APART = (str, bytes, bytearray, range)


def move(batch: Batch, device: torch.device, *, non_blocking: bool = False) -> Batch:
    """Return a batch whose tensors are on a device; the structure stays.

    What has a method ``to`` is moved with it, in dicts, lists, tuples, named tuples and dataclasses
    and whatever they nest, as ``lightning.fabric.utilities.move_data_to_device`` does it. The rest
    is returned as it is.

    Args:
        batch: The batch.
        device: Where to.
        non_blocking: Do not wait for tensors that lie in page-locked memory.
    """
    if isinstance(batch, StagedBatch):
        draws = batch.draws
        draws = None if draws is None else draws.to(device, non_blocking=non_blocking)
        plain = move(batch.batch, device, non_blocking=non_blocking)
        return StagedBatch(plain, draws, batch.stage)

    def moved(leaf: Any) -> Any:
        if isinstance(leaf, StagedBatch):
            return move(leaf, device, non_blocking=non_blocking)
        how = {"non_blocking": True} if non_blocking and _is_tensor(leaf) else {}
        result = leaf.to(device, **how)
        return leaf if result is None else result  # None: a ``to`` that changes it in place

    return with_leaves(batch, moved)


def with_leaves(batch: Batch, function: Callable[[Any], Any]) -> Batch:
    """Return a batch with what can be moved replaced by what a function makes of it."""
    if isinstance(batch, StagedBatch):
        return function(batch)
    if not isinstance(batch, type) and callable(getattr(batch, "to", None)):
        return function(batch)
    if is_dataclass(batch) and not isinstance(batch, type):
        twin = copy.copy(batch)
        for field in fields(batch):
            object.__setattr__(twin, field.name, with_leaves(getattr(batch, field.name), function))
        return twin
    if isinstance(batch, Mapping):
        items = {key: with_leaves(value, function) for key, value in batch.items()}
        if isinstance(batch, defaultdict):
            return type(batch)(batch.default_factory, items)
        return items if type(batch) is dict else type(batch)(items)  # type: ignore[call-arg]
    if isinstance(batch, Sequence) and not isinstance(batch, _NOT_TAKEN_APART):
        values = [with_leaves(value, function) for value in batch]
        return type(batch)(*values) if hasattr(batch, "_fields") else type(batch)(values)  # type: ignore[call-arg]
    return batch


def leaves(batch: Batch) -> Iterator[Any]:
    """Yield what :func:`move` moves, down to the tensors where it can see them."""
    if isinstance(batch, StagedBatch):
        yield from leaves(batch.batch)
        if batch.draws is not None:
            yield from batch.draws.tensors()
    elif _is_tensor(batch):
        yield batch
    elif is_dataclass(batch) and not isinstance(batch, type):
        for field in fields(batch):
            yield from leaves(getattr(batch, field.name))
    elif isinstance(batch, Mapping):
        for value in batch.values():
            yield from leaves(value)
    elif isinstance(batch, Sequence) and not isinstance(batch, _NOT_TAKEN_APART):
        for value in batch:
            yield from leaves(value)
    elif not isinstance(batch, type) and callable(getattr(batch, "to", None)):
        yield batch


def batch_samples(batch: Batch) -> int:
    """Return the number of samples in a batch: the first dimension of its first tensor.

    Without any tensor it is the length of the batch, or 1 where it has none.
    """
    for leaf in leaves(batch):
        if getattr(leaf, "ndim", 0):
            return int(leaf.shape[0])
    return len(batch) if isinstance(batch, Sized) else 1


def shows_its_memory(leaf: Any) -> bool:
    """Return whether the memory of a leaf can be kept from being used again too early."""
    if isinstance(leaf, torch.Tensor):
        return leaf.layout is torch.strided and not leaf.is_nested
    return _is_tensor(leaf)


def _is_tensor(value: Any) -> bool:
    # Also batches of graph libraries, which offer the two methods of tensors that matter here.
    if isinstance(value, torch.Tensor):
        return True
    return hasattr(value, "record_stream") and not isinstance(value, type)
