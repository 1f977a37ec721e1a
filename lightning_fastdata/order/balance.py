"""Which rank gets which batch of a step, so that all have as much to do in an epoch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from lightning_fastdata.order.epoch_order import Ints

_BY_LOAD: Final = 4096
"""Steps whose batches are given to ranks by what each has had; those of the others are nearly of
one cost, and go in turn."""


def dealt(costs: NDArray[np.float64]) -> Ints:
    """Return the number of the batch that each rank gets of each step, int64 [steps, ranks].

    What ranks have in the end differs by little, unless the batches of one step differ by more
    than those of all others together.

    Args:
        costs: Of the batches of each step [steps, ranks].
    """
    dearest = np.argsort(-costs, axis=1, kind="stable")
    by_spread = np.argsort(np.min(costs, axis=1) - np.max(costs, axis=1), kind="stable")
    given = dearest.copy()
    given[by_spread[1::2]] = dearest[by_spread[1::2], ::-1]
    loads = np.take_along_axis(costs, given, axis=1)[by_spread[_BY_LOAD:]].sum(axis=0)
    for step in by_spread[:_BY_LOAD]:
        # Who has least so far gets the dearest batch.
        given[step, np.argsort(loads, kind="stable")] = dearest[step]
        loads += costs[step, given[step]]
    return given
