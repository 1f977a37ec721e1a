"""What every executor can do; which ones there are is in :mod:`.kinds`."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

if TYPE_CHECKING:
    from lightning_fastdata.order.epoch_order import EpochOrder
    from lightning_fastdata.stamps.batch_stamps import BatchStamps


class Executor(Protocol):
    """Turns batches of indices into batches of data."""

    def start_epoch(self, batches: Iterable[Any], epoch: int) -> None:
        """Begin an epoch; what is left of the one before is dropped.

        ``batches`` are those of indices. Of a stream only the first item counts: how many samples
        each batch is to have, or None for single samples.
        """

    def __iter__(self) -> Executor: ...

    def __next__(self) -> Any:
        """Return the next batch; the user may keep it, and nothing will overwrite it."""

    def record(self, records: deque[BatchStamps] | None) -> None:
        """Append the stamps of each delivered batch from now on; None: no more."""

    def close(self) -> None:
        """Stop threads and processes; batches handed out stay valid."""


@runtime_checkable
class ArmingExecutor(Executor, Protocol):
    """An executor that begins the next epoch before the present one has ended."""

    def start_epoch(
        self, batches: Iterable[Any], epoch: int, order: EpochOrder | None = None
    ) -> None:
        """Begin an epoch, with the batches under way if it is the one that was armed."""

    def arm(self, order: EpochOrder) -> None:
        """Fetch the first batches of the next epoch as soon as there is nothing else to fetch."""
