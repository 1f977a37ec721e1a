"""In what a batch whose pixels were left over differs from the plain one."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from enum import Enum
from typing import TYPE_CHECKING, Any, Final

import torch

from lightning_fastdata.augment.pipeline.trial import is_equal
from lightning_fastdata.augment.record.deferred import DeferredTensor
from lightning_fastdata.tree import Path, replace_leaves, spelled

if TYPE_CHECKING:
    from lightning_fastdata.augment.ops.operation import DeviceOp
    from lightning_fastdata.types import Batch

_CLOSE: Final = 0.01
"""Part of the range of values that the mean difference may be, where operations may be a level off.
These make a hundredth of it; a mirror or another draw twenty times as much."""
_ROUNDING: Final = 1e-4
"""Part of the range of values that the largest difference may be, where operations are equal: a
fortieth of a level."""


class Likeness(Enum):
    """How like the plain field one that was left over has to be."""

    EQUAL = "equal"
    """But for the last bits of floats."""
    ALIKE = "alike"
    """Some values may be a level off."""
    SAME_LAW = "same law"
    """The device draws other numbers: nothing can be said of single values."""


def find_difference(
    plain: Batch,
    waiting: Batch,
    done: Batch,
    ops: Mapping[str, DeviceOp],
    redrawn: Collection[str],
    *,
    again: Callable[[], Batch],
) -> str | None:
    """Return in what a batch differs from the plain one, in words; None if in nothing.

    Args:
        plain: The batch as always.
        waiting: The one that was recorded; what still waits in it is computed by Albumentations.
        done: The same, computed by the device forms.
        ops: Device forms by name.
        redrawn: Names of operations of which a device makes other pixels of the same distribution.
        again: Reads the plain batch once more, to tell fields that are other ones each time.
    """
    left = {
        path: [op.name for one in leaf.waiting for op in one.track.ops]
        for path, leaf in _leaves(waiting).items()
        if isinstance(leaf, DeferredTensor) and not leaf.is_computed
    }
    computed = replace_leaves(
        waiting, lambda _, leaf: leaf.computed() if isinstance(leaf, DeferredTensor) else leaf
    )
    by_device = {path: _likeness(names, ops, redrawn) for path, names in left.items()}
    by_itself = {
        path: by_device[path] if any(ops[name].draw for name in names) else Likeness.EQUAL
        for path, names in left.items()
    }
    return _difference(plain, computed, by_itself, again) or _difference(
        plain, done, by_device, again
    )


def _likeness(
    names: Sequence[str], ops: Mapping[str, DeviceOp], redrawn: Collection[str]
) -> Likeness:
    if any(name in redrawn for name in names):
        return Likeness.SAME_LAW
    equal = all(is_equal(name) and ops[name].owner is None for name in names)
    return Likeness.EQUAL if equal else Likeness.ALIKE


def _difference(
    plain: Batch, done: Batch, left: Mapping[Path, Likeness], again: Callable[[], Batch]
) -> str | None:
    before, after = _leaves(plain), _leaves(done)
    if before.keys() != after.keys():
        return "the batch had another structure"
    changed = []
    for path, one in before.items():
        other = after[path]
        if type(one) is not type(other):
            return f"{spelled(path)} became a {type(other).__name__}"
        if not isinstance(one, torch.Tensor):
            continue
        if (one.shape, one.dtype) != (other.shape, other.dtype):
            return f"{spelled(path)} became {other.dtype} {tuple(other.shape)}"
        if path in left:
            if not _close(one, other, left[path]):
                return f"{spelled(path)} had other values"
        elif not torch.equal(one, other):
            changed.append(path)
    if changed:
        twin = _leaves(again())
        for path in changed:
            if path in twin and _equal(before[path], twin[path]):
                return f"{spelled(path)} had other values"
    return None


def _leaves(batch: Batch) -> dict[Path, Any]:
    found: dict[Path, Any] = {}
    replace_leaves(batch, found.setdefault)
    return found


def _equal(one: torch.Tensor, other: Any) -> bool:
    return isinstance(other, torch.Tensor) and torch.equal(one, other)


def _close(one: torch.Tensor, other: torch.Tensor, likeness: Likeness) -> bool:
    if one.numel() == 0 or likeness is Likeness.SAME_LAW:
        return True
    one, other = one.double(), other.double()
    gap, reach = (one - other).abs(), (one.max() - one.min()).clamp(min=1e-6)
    if likeness is Likeness.ALIKE:
        return bool(gap.mean() <= _CLOSE * reach)
    return bool(gap.max() <= _ROUNDING * torch.maximum(reach, one.abs().max()))
