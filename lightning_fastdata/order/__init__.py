"""Which sample is read when."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol, TypeAlias

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


class DrawnOrder(Protocol):
    """The samples of one epoch in an order that is computed where it is asked for."""

    def __len__(self) -> int:
        """Return how many samples there are."""

    def __getitem__(self, part: slice) -> NDArray[np.int64]:
        """Return a part of the order, int64; the slice has no step."""


class OrdersEpochs(Protocol):
    """What gives each epoch an order of its own."""

    def order(self, seed: int, epoch: int) -> DrawnOrder:
        """Return the order of an epoch."""


Order: TypeAlias = "NDArray[np.int64] | DrawnOrder | range"
"""Samples in an order: held, computed, or as the dataset has them."""
