"""What a transform of v2 does to a batch: torchvision's own code, on samples of equal parameters.

Every transform has this general form. It is right by construction: the transform itself is called,
with the parameters that it drew, on the samples that share them.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, Final, TypeAlias

import torch
from torchvision import tv_tensors

from lightning_fastdata.augment.ops.operation import DeviceOp, Encoded
from lightning_fastdata.augment.replay.compiled import Compiled
from lightning_fastdata.augment.torchvision.kinds import METHODS, kind_of
from lightning_fastdata.augment.torchvision.pipeline import Leaf, leaves_of

if TYPE_CHECKING:
    from torch import Tensor

    from lightning_fastdata.augment.ops.operation import Arrays, Run, Values

Call: TypeAlias = Callable[..., torch.Tensor]
"""What carries out an operation on a tensor: ``call(tensor, *given, **named)``."""

TYPES: Final[Mapping[str, type[torch.Tensor]]] = {
    "Tensor": torch.Tensor,
    "Image": tv_tensors.Image,
    "Mask": tv_tensors.Mask,
}
"""Types of tensors whose pixels may be left to a device."""


def device_ops(pipeline: Any) -> Mapping[str, DeviceOp]:
    """Return the operations that a pipeline may note, by name."""
    from lightning_fastdata.augment.torchvision.forms import FORMS

    ops = dict(FORMS)
    for leaf in leaves_of(pipeline):
        if kind_of(leaf.transform) in METHODS:
            ops[general_name(leaf)] = device_op(general_name(leaf), partial(_run, leaf.transform))
    return ops


def device_op(name: str, run: Run, *, compiled: bool = False) -> DeviceOp:
    """Return an operation that is the same for images and masks, and is encoded elsewhere."""
    image, mask = (Compiled(run), Compiled(run, exact=True)) if compiled else (run, run)
    return DeviceOp(name=name, encode=lambda *_: None, image=image, mask=mask)


def general_name(leaf: Leaf) -> str:
    """Return the name of the operation that is a transform itself."""
    return f"{leaf.number} {type(leaf.transform).__name__}"


def general(type_name: str, given: tuple[Any, ...], named: Mapping[str, Any]) -> Encoded:
    """Return a call of a transform, as it is packed for a batch."""
    # Equal parameters are equal bytes, by which samples are put together.
    return Encoded((("type", type_name), ("call", pickle.dumps((given, dict(named))))), {})


def as_type(tensor: torch.Tensor, type_name: str) -> torch.Tensor:
    """Return a tensor as one of the types by name."""
    return tensor.as_subclass(TYPES[type_name])


def plain(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor as torch's own."""
    return tensor.as_subclass(torch.Tensor)


def _run(transform: Any, batch: Tensor, static: Values, arrays: Arrays) -> Tensor:  # noqa: ARG001
    given, named = pickle.loads(static["call"])
    batch = batch.clone() if getattr(transform, "inplace", False) else batch
    call: Call = getattr(transform, METHODS[kind_of(transform)])
    made = plain(call(as_type(batch, static["type"]), *given, **named))
    return made.contiguous()  # of gray images all channels are one memory
