"""What the nodes of a cluster offer, and what a batch from each costs: for ``fastdata doctor``."""

from __future__ import annotations

import contextlib
import statistics
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from lightning_fastdata.errors import printable
from lightning_fastdata.executors.ray.cluster import connect
from lightning_fastdata.executors.ray.watch import read_cluster
from lightning_fastdata.stamps.travel import ClusterSeen

SMALL_BYTES: Final = 2**10
LARGE_BYTES: Final = 10**7
_TIMES: Final = 9
_STARTS_S: Final = 60.0
"""A node that has not started an actor by then gets none for now."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeOffer:
    """What a node has, and what a batch from it costs."""

    name: str
    """Its machine and, in short, its id."""
    trains: bool
    """This process is on it."""
    cpus: float
    store_bytes: int
    small_ms: float | None = None
    """To ask for a batch of 1 KiB and to have it in own memory: the median; None: no actor started
    there within a minute."""
    large_ms: float | None = None
    """The same of 10 MB."""
    why_not: str = ""
    """Why no actor started there."""

    @property
    def mb_per_s(self) -> float | None:
        """What comes from there, in megabytes (10^6) a second, without what a small batch takes."""
        if self.small_ms is None or self.large_ms is None:
            return None
        return LARGE_BYTES / 1e3 / max(1e-3, self.large_ms - self.small_ms)


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterOffer:
    """What a cluster has for actors."""

    ray_version: str
    seen: ClusterSeen
    nodes: tuple[NodeOffer, ...]
    """The one that trains first."""

    @property
    def room(self) -> int:
        """Actors of one CPU that there are CPUs for."""
        return int(self.seen.free_cpus)

    @property
    def slowest_link(self) -> tuple[float, float]:
        """Megabytes a second, and ms of a small batch, from the other node that is slowest.

        Of a single node its own; 1000 MB/s and 1 ms where nothing could be measured.
        """
        known = [node for node in self.nodes if node.mb_per_s is not None]
        known = [node for node in known if not node.trains] or known
        if not known:
            return 1000.0, 1.0
        slow = min(known, key=lambda node: node.mb_per_s or 0.0)
        return slow.mb_per_s or 0.0, slow.small_ms or 0.0

    def text(self) -> str:
        """Return it as plain text."""
        seen = self.seen
        store = f"{_size(seen.store_used_bytes)} of {_size(seen.store_bytes)} used"
        if seen.spilled_bytes:
            store += f", and {_size(seen.spilled_bytes)} on disk, as it was full"
        nodes = f"{len(self.nodes)} node{'s' * (len(self.nodes) != 1)}"
        cpus = f"{sum(node.cpus for node in self.nodes):g} CPUs"
        head = ("node", "CPUs", "store", "small, ms", "10 MB, ms", "MB/s")
        lines = [
            f"Ray {self.ray_version}; {nodes}, {cpus}",
            f"room for {self.room} actors of one CPU beside the training process",
            f"object stores: {store}",
            "",
            "{:<32} {:>5} {:>9} {:>10} {:>10} {:>6}".format(*head),
        ]
        for node in self.nodes:
            name = f"{node.name}{' (this one)' if node.trains else ''}"
            costs = f"  no actor started there: {node.why_not}"
            if node.small_ms is not None and node.large_ms is not None:
                costs = f"{node.small_ms:>10.2f} {node.large_ms:>10.1f} {node.mb_per_s:>6.0f}"
            lines.append(f"{name:<32} {node.cpus:>5g} {_size(node.store_bytes):>9} {costs}")
        return "\n".join(lines)


class _Sender:
    def send(self, size_bytes: int) -> np.ndarray[Any, np.dtype[np.uint8]]:
        return np.ones(size_bytes, np.uint8)


def look_at_cluster() -> ClusterOffer:
    """Ask a running cluster what it has, and have an actor on each node send some batches.

    The actors take no CPU of the cluster's count, and end at once.

    Raises:
        OptionsError: Ray is not installed.
        WorkerError: No cluster runs.
    """
    ray = connect(start=False)
    own = ray.get_runtime_context().get_node_id()
    alive = [node for node in ray.nodes() if node["Alive"]]
    nodes = sorted(alive, key=lambda node: node["NodeID"] != own)
    seen = read_cluster(ray)
    offers = []
    for node in nodes:
        small_ms, large_ms, why_not = _costs(ray, node["NodeID"])
        offers.append(
            NodeOffer(
                name=f"{node['NodeManagerHostname']}/{node['NodeID'][:8]}",
                trains=node["NodeID"] == own,
                cpus=float(node["Resources"].get("CPU", 0.0)),
                store_bytes=int(node["Resources"].get("object_store_memory", 0)),
                small_ms=small_ms,
                large_ms=large_ms,
                why_not=why_not,
            )
        )
    return ClusterOffer(ray_version=ray.__version__, seen=seen, nodes=tuple(offers))


def _costs(ray: Any, node: str) -> tuple[float | None, float | None, str]:
    """Return what a small and a large batch from a node cost, in ms; or why there are none."""
    with _sender_on(ray, node) as sender:
        try:
            ray.get(sender.send.remote(1), timeout=_STARTS_S)
        except ray.exceptions.RayError as error:
            return None, None, printable(f"{type(error).__name__}: {error}".partition("\n")[0])
        return _taken_ms(ray, sender, SMALL_BYTES), _taken_ms(ray, sender, LARGE_BYTES), ""


@contextlib.contextmanager
def _sender_on(ray: Any, node: str) -> Iterator[Any]:
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    there = NodeAffinitySchedulingStrategy(node, soft=False)
    sender = ray.remote(_Sender).options(num_cpus=0, scheduling_strategy=there).remote()
    try:
        yield sender
    finally:
        ray.kill(sender)


def _taken_ms(ray: Any, sender: Any, size_bytes: int) -> float:
    memory, spent = np.empty(size_bytes, np.uint8), []
    for _ in range(_TIMES):
        began_s = time.perf_counter()
        np.copyto(memory, ray.get(sender.send.remote(size_bytes)))
        spent.append((time.perf_counter() - began_s) * 1e3)
    return statistics.median(spent)


def _size(count_bytes: float) -> str:
    return f"{count_bytes / 2**30:.1f} GiB"
