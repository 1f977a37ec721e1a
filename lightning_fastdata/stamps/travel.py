"""How a batch came from an actor, and how the clocks of both ends are compared."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final, NamedTuple

_DRIFT: Final = 1e-4
"""Two clocks may drift apart by so much: ten times what clocks do that NTP looks after."""


class Way(NamedTuple):
    """How a batch came here after it was made."""

    node: str
    """The machine, and in short the node of the cluster, that made it."""
    taken_ns: int
    """What the training process took to take it: to ask for it, and to copy it."""
    landed_ns: int
    """When its copy in the training's memory was complete."""
    uncertain_ns: int = 0
    """When it was made is known to so much, either way; 0: both ends have one clock."""
    free_cpus: float | None = None
    """CPUs of the cluster that nobody held just before; None: it was not looked at."""


@dataclass(slots=True)
class ClockOffset:
    """What another machine's clock is ahead of ours, as closely as questions and answers tell.

    Whatever is done there begins after it was asked for and ends before the answer is here. So each
    batch bounds the offset from both sides, most closely where the actor was idle and its answer
    was waited for. Bounds get looser with time, as clocks drift.
    """

    offset_ns: float = 0.0
    bounds_ns: tuple[float, float] | None = None
    """The offset is not below and not above; None: nothing is known."""
    as_of_ns: int = 0
    """When something was last learned, by our clock."""

    @property
    def uncertain_ns(self) -> int:
        """How far the offset may be off, at most."""
        least, most = self.bounds_ns or (self.offset_ns, self.offset_ns)
        return math.ceil(max(self.offset_ns - least, most - self.offset_ns))

    def note(self, asked_ns: int, began_ns: int, ended_ns: int, got_ns: int) -> None:
        """Learn from what was asked for, was done there from one time to another, and came back.

        ``asked_ns`` and ``got_ns`` are of our clock, the others of the other one.
        """
        meanwhile = _DRIFT * (got_ns - asked_ns)
        least, most = ended_ns - got_ns - meanwhile, began_ns - asked_ns + meanwhile
        known = self.bounds_ns
        if known is not None:
            loose = _DRIFT * max(0, got_ns - self.as_of_ns)
            closer = max(least, known[0] - loose), min(most, known[1] + loose)
            # Where the two exclude each other a clock was set anew, and only the new one counts.
            least, most = closer if closer[0] <= closer[1] else (least, most)
        if known is None or most - least <= known[1] - known[0]:
            self.offset_ns = (least + most) / 2
        self.offset_ns = min(max(self.offset_ns, least), most)
        self.bounds_ns, self.as_of_ns = (least, most), got_ns

    def aligned(self, asked_ns: int, began_ns: int, ended_ns: int, got_ns: int) -> tuple[int, int]:
        """Return when something began and ended there, by our clock.

        Never before it was asked for, and never after its answer was here.
        """
        began, ended = round(began_ns - self.offset_ns), round(ended_ns - self.offset_ns)
        shift = max(0, asked_ns - began) or min(0, got_ns - ended)
        began = min(max(began + shift, asked_ns), got_ns)
        return began, min(max(ended + shift, began), got_ns)
