"""Whether two samples or batches are alike, whatever they hold; and what comes out of a slot."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from lightning_fastdata.batches.memory import pack, unpack, write_leaves


def alike(one: Any, other: Any, *, strides: bool = False) -> bool:
    """Return whether both are of the same types, in the same order, and hold the same bits.

    Args:
        one: A batch.
        other: What it is to be.
        strides: Tensors have to lie in memory alike, too.
    """
    if type(one) is not type(other):
        return False
    if isinstance(one, torch.Tensor):
        form = (one.dtype, one.shape, one.requires_grad)
        if form != (other.dtype, other.shape, other.requires_grad):
            return False
        lie = not strides or _strides(one) == _strides(other)
        return lie and torch.equal(_bits(one), _bits(other))
    if isinstance(one, np.ndarray | np.generic):
        form = one.dtype == other.dtype and one.shape == other.shape
        return form and np.asarray(one).tobytes() == np.asarray(other).tobytes()
    if isinstance(one, Mapping):
        same = list(one) == list(other)
        return same and all(alike(one[key], other[key], strides=strides) for key in one)
    if isinstance(one, list | tuple):
        pairs = zip(one, other, strict=False)
        return len(one) == len(other) and all(alike(*pair, strides=strides) for pair in pairs)
    return bool(one == other)


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    dense = tensor.detach()
    if dense.layout is not torch.strided:
        dense = dense.to_dense()
    return dense.clone(memory_format=torch.contiguous_format).reshape(-1).view(torch.uint8)


def _strides(tensor: torch.Tensor) -> list[int]:
    """Return those that count."""
    sizes = zip(tensor.stride(), tensor.shape, strict=True)
    return [stride for stride, size in sizes if size > 1 and tensor.numel()]


def written(batch: Any) -> Any:
    """Return a batch as it comes out of a slot."""
    packed, leaves = pack(batch)
    memory = np.full(max(1, packed.size_bytes), 0xAA, np.uint8)
    write_leaves(packed, leaves, memory)
    return unpack(packed, memory)
