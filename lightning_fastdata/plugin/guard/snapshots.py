"""What a training step changes, remembered and put back."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection
from functools import partial
from typing import Any, TypeAlias

import torch
from torch import nn

from lightning_fastdata.tree import held_by

Undo: TypeAlias = Callable[[], object]

_FOLLOWED = (torch.Tensor, torch.Generator, nn.Module, torch.optim.Optimizer)
_CONTAINERS = (dict, list, deque, set, tuple)


class NoRoomError(Exception):
    """Host memory has no room for a copy of so many bytes."""


class Snapshot:
    """Puts objects back into the state that they have now, as often as it is called.

    From the attributes of the roots on, through tuples, lists, dicts, sets and deques, it covers
    tensors (their values; gradients are dropped), generators, modules and optimizers. Other objects
    are put back by reference. Identities stay: tensors and containers are written in place. Values
    are copied to host memory.

    Args:
        *roots: The objects.
        room_bytes: Most bytes that the copies may take; None: any number.

    Raises:
        NoRoomError: The copies would take more.
    """

    def __init__(self, *roots: object, room_bytes: int | None = None) -> None:
        self._links: list[Undo] = []
        tensors: list[torch.Tensor] = []
        seen: dict[int, object] = {}  # keeps what it has seen alive, so that no id comes twice
        waiting: list[object] = [held_by(root) for root in roots]
        while waiting:
            value = waiting.pop()
            if id(value) in seen or not isinstance(value, (*_FOLLOWED, *_CONTAINERS)):
                continue
            seen[id(value)] = value
            if isinstance(value, torch.Tensor):
                tensors.append(value)
                self._links.append(partial(_drop_gradient, value, value.requires_grad))
            elif isinstance(value, torch.Generator):
                self._links.append(partial(value.set_state, value.get_state()))
            elif isinstance(value, _FOLLOWED):
                waiting.append(vars(value))
            elif isinstance(value, dict):
                self._links.append(partial(_refill, value, dict(value)))
                waiting.extend(value.values())
            else:
                if not isinstance(value, tuple):
                    self._links.append(partial(_refill, value, list(value)))
                waiting.extend(value)
        written = [tensor for tensor in tensors if _can_be_written(tensor)]
        size_bytes = sum(tensor.nbytes for tensor in written)
        if room_bytes is not None and size_bytes > room_bytes:
            raise NoRoomError(size_bytes)
        self._values = [_snapshot_tensor(tensor) for tensor in written]

    def __enter__(self) -> Snapshot:
        return self

    def __exit__(self, *_: object) -> None:
        self()

    def __call__(self) -> None:
        """Put everything back, as the end of a ``with`` block does."""
        for undo in (*self._values, *self._links):
            undo()

    def let_go(self) -> None:
        """Put everything back but the values of tensors, so that nothing new is held."""
        for undo in self._links:
            undo()


def _can_be_written(tensor: torch.Tensor) -> bool:
    strides = tensor.stride() if tensor.layout == torch.strided else ()
    expanded = any(s == 0 and n > 1 for s, n in zip(strides, tensor.shape, strict=False))
    return not (tensor.is_meta or expanded)


def _snapshot_tensor(tensor: torch.Tensor) -> Undo:
    values = tensor.detach().to("cpu", copy=True)

    def undo() -> None:
        with torch.inference_mode(tensor.is_inference()), torch.no_grad():
            tensor.copy_(values)

    return undo


def _drop_gradient(tensor: torch.Tensor, requires_grad: bool) -> None:
    if tensor.is_leaf and (tensor.grad is not None or tensor.requires_grad != requires_grad):
        tensor.grad = None
        tensor.requires_grad_(requires_grad)


def _refill(live: Any, saved: dict[Any, Any] | list[Any]) -> None:
    def identities(value: Collection[object]) -> list[int]:
        return [id(part) for part in (*value, *(value.values() if isinstance(value, dict) else ()))]

    if identities(live) != identities(saved):  # else it is left alone, as it may be read meanwhile
        live.clear()
        (live.update if isinstance(live, (dict, set)) else live.extend)(saved)
