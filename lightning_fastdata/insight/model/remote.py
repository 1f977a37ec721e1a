"""What the batches of actors tell of a cluster: its link, its nodes, its object stores."""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from lightning_fastdata.tuning.remote import journeys, link_bytes_per_s, ways_of

if TYPE_CHECKING:
    from lightning_fastdata.stamps.batch_stamps import BatchStamps


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeSeen:
    """A node whose actors made batches."""

    name: str
    """Its machine and, in short, its id."""
    batches: int
    sample_ms: float
    """What a sample of its batches took, collation included: the median."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RemoteSeen:
    """What was seen of a cluster."""

    batch_bytes: float
    """Of a batch, the mean."""
    way_ms: float | None = None
    """From its end in an actor until it is here, while it is waited for: the median."""
    link_bytes_per_s: float = math.inf
    """What came from other nodes a second, while anything came; infinite: not known."""
    nodes: tuple[NodeSeen, ...] = ()
    """The slowest first."""
    free_cpus: float | None = None
    """CPUs of the cluster that nobody held, as last seen."""
    store_used_share: float | None = None
    """Of all object stores, what held objects, as last seen, 0 to 1."""
    spilled_bytes: int | None = None
    """What more of objects was on disk than when it was first seen."""

    @classmethod
    def of(cls, stamps: Sequence[BatchStamps]) -> RemoteSeen | None:
        """Return it by the stamps of a loader; None: no actor made its batches."""
        ways = ways_of(stamps)
        if not ways:
            return None
        sample_ms: defaultdict[str, list[float]] = defaultdict(list)
        for task, way in ways:
            spent_ns = task.ended_ns - task.began_ns
            sample_ms[way.node].append(spent_ns / max(1, task.samples) / 1e6)
        nodes = [
            NodeSeen(name=name, batches=len(each), sample_ms=statistics.median(each))
            for name, each in sample_ms.items()
        ]
        lasted = [each.lasted_ns for each in journeys(stamps)]
        seen = [way.cluster for _, way in ways if way.cluster is not None]
        spilled = [each.spilled_bytes for each in seen if each.spilled_bytes is not None]
        return cls(
            batch_bytes=statistics.fmean(way.size_bytes for _, way in ways),
            way_ms=statistics.median(lasted) / 1e6 if lasted else None,
            link_bytes_per_s=link_bytes_per_s(stamps),
            nodes=tuple(sorted(nodes, key=lambda node: -node.sample_ms)),
            free_cpus=seen[-1].free_cpus if seen else None,
            store_used_share=_share(seen[-1].store_used_bytes, seen[-1].store_bytes)
            if seen
            else None,
            spilled_bytes=max(0, max(spilled) - spilled[0]) if spilled else None,
        )


def _share(part: float, whole: float) -> float | None:
    return min(1.0, part / whole) if whole else None
