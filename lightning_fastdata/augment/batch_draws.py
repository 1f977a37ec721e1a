"""What is drawn for a batch as a whole, and carried out by the library that draws it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, Self

import torch

from lightning_fastdata.augment.replay.program import Draws

if TYPE_CHECKING:
    from lightning_fastdata.types import SampleKey

_COLLATION: Final = -1
"""As samplers have no such index, these draws are independent of those of any sample."""


def key_of_batch(first: SampleKey) -> SampleKey:
    """Return the key of a batch whose first sample has this key.

    It is that of what a ``collate_fn`` draws, too.
    """
    return first._replace(index=(_COLLATION, first.index))  # type: ignore[arg-type]


class BatchDraws(Draws):
    """What was drawn for a batch as a whole: it stays in the host's memory, where it is read.

    Attributes:
        values: seeds, parameters, ... of the batch.
        before: what a pipeline drew that runs first; None: there is none, or nothing is left of it.
    """

    __slots__ = ("before", "values")

    def __init__(self, samples: int, values: Any, before: Draws | None = None) -> None:
        super().__init__(samples, {}, torch.empty(0, dtype=torch.uint8))
        self.values = values
        self.before = before

    def tensors(self) -> list[torch.Tensor]:
        """Return the tensors that are moved."""
        return [] if self.before is None else self.before.tensors()

    def pin_memory(self, device: str | None = None) -> Self:
        """Return the same draws, with those of the pipeline before in page-locked memory."""
        before = self.before
        return self if before is None else self._behind(before.pin_memory(device))

    def to(self, device: torch.device | str, non_blocking: bool = False) -> Self:
        """Return the same draws, with those of the pipeline before on a device."""
        before = self.before
        return self if before is None else self._behind(before.to(device, non_blocking))

    def _behind(self, before: Draws) -> Self:
        return type(self)(self.samples, self.values, before)
