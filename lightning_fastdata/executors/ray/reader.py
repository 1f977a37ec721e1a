"""An actor as the training process sees it, and what it was asked for."""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

from lightning_fastdata.executors.ray.actor import Place
from lightning_fastdata.stamps.travel import ClockOffset

if TYPE_CHECKING:
    from lightning_fastdata.executors.pool.process import Hang

EACH: Final = 2
"""Batches that an actor is given at once."""
_COMPARED_S: Final = 60.0
"""So long what is known of a clock is exact enough."""


@dataclass(slots=True, eq=False)
class Call:
    """A batch, or one sample of it, that an actor was asked for."""

    ref: Any
    """What Ray knows the answer by."""
    task: int
    """Number of the task."""
    alone: int | None
    """Position in the batch of a sample that is read on trial; None: the batch itself."""
    asked_ns: int
    """When it was."""


@dataclass(slots=True, eq=False)
class Reader:
    """An actor, as it is seen from here."""

    number: int
    actor: Any
    """Ray's handle."""
    has_cpu: bool = True
    """False: it shares that of another one."""
    place: Place | None = None
    """None until it is ready."""
    clock: ClockOffset | None = None
    """Of another node; None: it has ours."""
    compared_s: float = 0.0
    """When it was last asked with nothing to do, for a batch with stamps: its clock shows best."""
    calls: deque[Call] = field(default_factory=deque)
    """In the order in which it does them."""
    since_s: float = 0.0
    """When it began with the first of them, as far as is known here."""
    hang: Hang | None = None
    """Why it was killed."""
    exitcode: int | None = None
    """Not told by Ray."""

    def has_room(self, *, stamped: bool) -> bool:
        """Return whether it may be given a batch now.

        While stamps are taken it runs out of work once a minute, so that asking it for more shows
        its clock.
        """
        fresh = time.monotonic() - self.compared_s < _COMPARED_S
        return len(self.calls) < (EACH if fresh or not stamped or self.clock is None else 1)

    @property
    def node(self) -> str:
        """Id of its node; empty until it is ready."""
        return "" if self.place is None else self.place.node

    @property
    def store_bytes(self) -> int:
        """Size of the object store of its node; 0 until it is ready."""
        return 0 if self.place is None else self.place.store_bytes

    def __str__(self) -> str:
        where = "" if self.place is None else f" on {self.place.address}"
        return f"actor {self.number}{where}"
