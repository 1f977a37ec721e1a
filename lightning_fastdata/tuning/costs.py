"""What batches cost and the loader that is to make them: what a prediction is made from.

Of those that actors make it is known where they were made, and how they came.
"""

from __future__ import annotations

import math
import statistics
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final, Literal, NamedTuple, TypeAlias

if TYPE_CHECKING:
    from lightning_fastdata.stamps.batch_stamps import BatchStamps, TaskStamps
    from lightning_fastdata.stamps.travel import Way

Scheduling: TypeAlias = Literal["batch", "queue", "sample", "actors"]
_FEWEST_SEEN: Final = 4
"""Of fewer batches nothing is said."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchCost:
    """What one batch costs, whoever makes it; times without any waiting for CPUs."""

    samples: int
    cpu_ns: float
    """To read its samples: time on a CPU."""
    blocked_ns: float
    """To read its samples: time neither on a CPU nor waiting for one."""
    collate_ns: float
    """To collate it: time on a CPU."""
    slowest_ns: float
    """Of ``cpu_ns + blocked_ns``, what its slowest sample takes."""
    handover_ns: float
    """From the end of its last task until the training has it, if the training is waiting."""
    taking_ns: float
    """To take it, if it was complete when it was asked for."""
    step_ns: float
    """From then until the training asks for the next batch."""
    size_bytes: float = 0.0
    """Of the batch, where actors make it."""
    task_ns: float = 0.0
    """To begin and end one of the tasks that it is made in: time on a CPU, not in ``cpu_ns``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoaderSetup:
    """A loader as the model knows it."""

    workers: int
    """Side processes that read; 0: the training process does."""
    look_ahead: int
    """Batches under way at once; torch: ``workers * prefetch_factor``."""
    scheduling: Scheduling = "sample"
    """``"batch"``: a worker makes a whole batch, in turn, as torch has it. ``"queue"``: whoever is
    free does. ``"sample"``: whoever is free makes some samples of a batch. ``"actors"``: whole
    batches, two of which are given to a worker while the training waits for one."""
    in_order: bool = True
    """Batches are delivered in order."""
    cpus: float = 1.0
    """CPUs this process and its workers may use."""
    step_cpus: float = 1.0
    """CPUs the training uses between two requests: 1 where it drives a device, or more."""
    inline: bool = False
    """Its executor reads in the training process, however many workers it has."""
    other_cpus: float = 0.0
    """Of ``cpus``, those that other programs use when they have to share."""
    worker_threads: float = 1.0
    """CPUs that a worker uses while it computes: above 1 where it starts threads of its own."""
    far_share: float = 0.0
    """Part of the workers, 0 to 1, that are on other machines, each with CPUs of its own there."""
    sent_share: float = 0.0
    """Part of the workers, 0 to 1, whose batches come over the link."""
    link_bytes_per_s: float = math.inf
    """What comes over it a second, one batch after the other."""


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
