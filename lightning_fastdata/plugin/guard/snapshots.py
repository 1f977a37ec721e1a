"""What a training step changes, remembered and put back."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Collection
from functools import partial
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import nn

from lightning_fastdata.tree import held_by

Undo: TypeAlias = Callable[[], object]

_FOLLOWED = (torch.Tensor, torch.Generator, nn.Module, torch.optim.Optimizer)
_CONTAINERS = (dict, list, deque, set, tuple)


def snapshot(*roots: object) -> Undo:
    """Return a function that puts objects back into their present state, as often as it is called.

    Followed are the attributes of the roots and in them, through tuples, lists, dicts, sets and
    deques: tensors (values; a gradient is dropped), generators, modules and optimizers. Other
    objects are put back by reference. Identities stay: tensors and containers are written in place.
    Values are copied to host memory.
    """
    undos: list[Undo] = []
    seen: dict[int, object] = {}  # keeps what it has seen alive, so that no id comes twice
    waiting: list[object] = [held_by(root) for root in roots]
    while waiting:
        value = waiting.pop()
        if id(value) in seen or not isinstance(value, (*_FOLLOWED, *_CONTAINERS)):
            continue
        seen[id(value)] = value
        if isinstance(value, torch.Tensor):
            undos.append(_snapshot_tensor(value))
        elif isinstance(value, torch.Generator):
            undos.append(partial(value.set_state, value.get_state()))
        elif isinstance(value, _FOLLOWED):
            waiting.append(vars(value))
        elif isinstance(value, dict):
            undos.append(partial(_refill, value, dict(value)))
            waiting.extend(value.values())
        else:
            if not isinstance(value, tuple):
                undos.append(partial(_refill, value, list(value)))
            waiting.extend(value)
    return lambda: [undo() for undo in undos]


def _snapshot_tensor(tensor: torch.Tensor) -> Undo:
    strides = tensor.stride() if tensor.layout == torch.strided else ()
    expanded = any(s == 0 and n > 1 for s, n in zip(strides, tensor.shape, strict=False))
    if tensor.is_meta or expanded:  # nothing can be written into them
        return lambda: None
    values, requires_grad = tensor.detach().to("cpu", copy=True), tensor.requires_grad

    def undo() -> None:
        with torch.inference_mode(tensor.is_inference()), torch.no_grad():
            tensor.copy_(values)
        if tensor.is_leaf and (tensor.grad is not None or tensor.requires_grad != requires_grad):
            tensor.grad = None
            tensor.requires_grad_(requires_grad)

    return undo


def _refill(live: Any, saved: dict[Any, Any] | list[Any]) -> None:
    def identities(value: Collection[object]) -> list[int]:
        return [id(part) for part in (*value, *(value.values() if isinstance(value, dict) else ()))]

    if identities(live) != identities(saved):  # else leave it alone, as it may be being read
        live.clear()
        (live.update if isinstance(live, (dict, set)) else live.extend)(saved)


def snapshot_random_states() -> Undo:
    """Return a function that puts back the random states of Python, numpy, torch and CUDA."""
    python, arrays, host = random.getstate(), np.random.get_state(), torch.get_rng_state()
    cuda: Any = torch.cuda
    devices = cuda.get_rng_state_all() if cuda.is_initialized() else []

    def undo() -> None:
        random.setstate(python)
        np.random.set_state(arrays)
        torch.set_rng_state(host)
        cuda.set_rng_state_all(devices)

    return undo
