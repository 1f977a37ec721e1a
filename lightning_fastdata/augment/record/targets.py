"""An image or mask of a sample on its way through a pipeline that is recorded."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from lightning_fastdata.augment.pipeline.values import Values, in_unit_range, unit_after

if TYPE_CHECKING:
    from lightning_fastdata.augment.ops.operation import TapeOp


@dataclass(slots=True)
class Pending:
    """An operation that was noted, and how Albumentations would carry it out."""

    op: TapeOp
    apply: Callable[..., Any]
    params: Mapping[str, Any]
    bars_pixels: bool
    """Whether it changes the form of the image, so that no later operation may have its pixels."""


class Target:
    """An image or mask on its way: real pixels, and what is still to be done to them."""

    __slots__ = ("_unit", "pending", "real", "shown")

    def __init__(self, real: Any, shown: Any) -> None:
        self.real = real
        self.shown = shown
        self.pending: list[Pending] = []
        self._unit: bool | None = None

    def in_unit_range(self) -> bool:
        """Return whether the values here are integers, or sure to lie in [0, 1].

        Pixels that have to be fetched first are: somebody has looked, as that takes long.
        """
        if self._unit is None:
            self._unit = callable(self.real) or in_unit_range(self.real)
        return self._unit

    def note(self, pending: Pending, transform: Any, dtype: np.dtype[Any]) -> None:
        """Note an operation, which makes values of a dtype."""
        self.pending.append(pending)
        if dtype.kind == "f":
            before = Values(self.shown.dtype, True)
            if self.shown.dtype != dtype or not unit_after(transform, before, dtype):
                self._unit = unit_after(transform, before._replace(unit=False), dtype)

    def flush(self) -> Any:
        """Return the pixels after what was noted, which Albumentations carries out now."""
        if self.pending or callable(self.real):
            self._unit = None
        if callable(self.real):
            self.real = self.real()
        for pending in self.pending:
            self.real = contiguous(pending.apply(contiguous(self.real), **pending.params))
        self.pending.clear()
        return self.real


def contiguous(value: Any) -> Any:
    """Return an array that lies in memory as NumPy's do; anything else as it is."""
    return np.ascontiguousarray(value) if isinstance(value, np.ndarray) else value
