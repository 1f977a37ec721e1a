"""Batches that actors make, as the model takes them: which CPUs, which link, what each costs."""

from __future__ import annotations

import math
import statistics
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Final, NamedTuple

if TYPE_CHECKING:
    from lightning_fastdata.stamps.batch_stamps import BatchStamps, TaskStamps
    from lightning_fastdata.stamps.travel import Way
    from lightning_fastdata.tuning.costs import LoaderSetup

_FEWEST_SEEN: Final = 4
"""Of fewer batches nothing is said."""


class Journey(NamedTuple):
    """A batch of an actor that was under way while the training waited."""

    made_ns: int
    way: Way

    @property
    def lasted_ns(self) -> int:
        """From its end in the actor until it was here."""
        return max(0, self.way.landed_ns - self.made_ns)


def ways_of(stamps: Sequence[BatchStamps]) -> list[tuple[TaskStamps, Way]]:
    """Return the tasks of actors, each with its way."""
    tasks = (task for batch in stamps for task in batch.tasks)
    return [(task, task.way) for task in tasks if task.way is not None]


def journeys(stamps: Sequence[BatchStamps]) -> list[Journey]:
    """Return the ways of those batches that the training waited for from their end to landing.

    While the training does something else nobody takes a batch, which says nothing of its way.
    """
    began = [batch.requested_ns for batch in stamps]
    found = []
    for task, way in ways_of(stamps):
        at = bisect_right(began, task.ended_ns) - 1
        if at >= 0 and way.landed_ns <= stamps[at].delivered_ns:
            found.append(Journey(task.ended_ns, way))
    return found


def link_bytes_per_s(stamps: Sequence[BatchStamps]) -> float:
    """Return what came from other nodes a second, while anything came; infinite: not known."""
    seen = sorted(each for each in journeys(stamps) if each.way.other_node)
    if len(seen) < _FEWEST_SEEN:
        return math.inf
    busy_ns, until_ns = 0, seen[0].made_ns
    for each in seen:
        busy_ns += max(0, each.way.landed_ns - max(each.made_ns, until_ns))
        until_ns = max(until_ns, each.way.landed_ns)
    sent_bytes = sum(each.way.size_bytes for each in seen)
    return sent_bytes / busy_ns * 1e9 if busy_ns and sent_bytes else math.inf


class Placement(NamedTuple):
    """Where the actors of a loader are, as their batches tell."""

    far_share: float = 0.0
    """Part of the batches, 0 to 1, that were made on other machines."""
    sent_share: float = 0.0
    """Part of the batches, 0 to 1, that came from other nodes."""
    link_bytes_per_s: float = math.inf
    """What came from there a second."""

    @classmethod
    def of(cls, stamps: Sequence[BatchStamps]) -> Placement:
        """Return it by the stamps of a loader; of one without actors nothing is elsewhere."""
        ways = [way for _, way in ways_of(stamps)]
        if not ways:
            return cls()
        far = sum(way.other_machine for way in ways) / len(ways)
        sent = sum(way.other_node for way in ways) / len(ways)
        return cls(far, sent, link_bytes_per_s(stamps))

    def applied(self, setup: LoaderSetup | None) -> LoaderSetup | None:
        """Return the setup of that loader, or of it with another number of actors, placed so."""
        return None if setup is None else replace(setup, **self._asdict())


def transit_of_actors(stamps: Sequence[BatchStamps]) -> tuple[float, float] | None:
    """Return the hand-over of a batch that is waited for, and the taking of one that is there.

    In nanoseconds; None: no actor made them.
    """
    ways = [way for _, way in ways_of(stamps)]
    if not ways:
        return None
    rest = statistics.median(list(_rests(stamps)) or [0])
    taking = statistics.fmean(way.taken_ns for way in ways) + rest
    lasted = [each.lasted_ns for each in journeys(stamps)]
    return max(taking, statistics.median(lasted or [0]) + rest), taking


def _rests(stamps: Sequence[BatchStamps]) -> Iterator[int]:
    """Yield what it took to hand out each batch that had landed."""
    for batch in stamps:
        ways = [task.way for task in batch.tasks if task.way is not None]
        if ways:
            landed_ns = max(way.landed_ns for way in ways)
            yield max(0, batch.delivered_ns - max(landed_ns, batch.requested_ns))
