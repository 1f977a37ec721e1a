"""What is seen of a cluster: its CPUs, its object stores, and what a batch from each node costs.

While its actors read, only what Ray documents is read: its resources, its nodes, and the metrics
that each node publishes
(https://docs.ray.io/en/latest/ray-observability/reference/system-metrics.html).
``fastdata doctor`` has an actor on each node send some batches, too.
"""

from __future__ import annotations

import contextlib
import re
import statistics
import threading
import urllib.request
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from lightning_fastdata.errors import WorkerError, printable
from lightning_fastdata.executors.ray.actors import actors_here
from lightning_fastdata.executors.ray.cluster import connect, read_nodes, read_training
from lightning_fastdata.host import clock
from lightning_fastdata.stamps.travel import ClusterSeen

_EVERY_S: Final = 10.0
"""So often a node renews its metrics."""
_ANSWERS_S: Final = 2.0
_MOST_NODES: Final = 16
"""No more are asked for their metrics; one that is full is most likely one of the first."""
_MOST_ACTORS: Final = 64
_MOST_BYTES: Final = 2**23
_SPILLED: Final = re.compile(
    rb'^ray_object_store_memory\{[^}]*Location="SPILLED"[^}]*\} ([0-9.e+]+)', re.MULTILINE
)
SMALL_BYTES: Final = 2**10
LARGE_BYTES: Final = 10**7
_TIMES: Final = 9
"""A batch is sent so often, of which the median counts."""
_STARTS_S: Final = 60.0
"""A node that has not started an actor by then gets none for now."""


def spilled_bytes(metrics: bytes) -> int | None:
    """Return what a node's object store has on disk, by its metrics; None: they do not tell."""
    found = [float(number) for number in _SPILLED.findall(metrics)]
    return round(sum(found)) if found else None


def metrics_addresses(nodes: Iterable[Mapping[str, Any]]) -> list[str]:
    """Return where the living among the nodes of ``ray.nodes()`` publish their metrics."""
    return [
        f"http://{node['NodeManagerAddress']}:{node['MetricsExportPort']}/metrics"
        for node in nodes
        if node.get("Alive") and node.get("MetricsExportPort", -1) > 0
    ]


def read_cluster(ray: Any) -> ClusterSeen:
    """Ask a cluster what it has, which takes some milliseconds a node.

    Raises:
        WorkerError: The program is not connected any more.
    """
    if not ray.is_initialized():
        raise WorkerError("The connection to the Ray cluster was closed.")
    has: dict[str, float] = ray.cluster_resources()
    free: dict[str, float] = ray.available_resources()
    size = has.get("object_store_memory", 0.0)
    spilled = []
    for address in metrics_addresses(ray.nodes())[:_MOST_NODES]:
        # A firewall, or a Ray without metrics.
        with (
            contextlib.suppress(OSError, ValueError),
            urllib.request.urlopen(address, timeout=_ANSWERS_S) as answer,
        ):
            spilled.append(spilled_bytes(answer.read(_MOST_BYTES)))
    known = [each for each in spilled if each is not None]
    return ClusterSeen(
        free_cpus=max(0.0, free.get("CPU", 0.0) - own_share(ray)),
        store_bytes=round(size),
        store_used_bytes=round(max(0.0, size - free.get("object_store_memory", 0.0))),
        spilled_bytes=sum(known) if known else None,
    )


def room_for_actors(options: Mapping[str, Any], ranks: int = 1) -> int:
    """Return how many actors with these options each of some ranks can have now, at least 1.

    Raises:
        OptionsError: Ray is not installed.
        WorkerError: No cluster can be reached or started.
    """
    ray = connect()
    each = float(options.get("num_cpus", 1))
    total = float(ray.cluster_resources().get("CPU", 0.0))
    free = sum(node.free_cpus for node in read_nodes(ray))
    left = min(total, free + each * actors_here()) - own_share(ray)
    return max(1, min(_MOST_ACTORS, int(left / each / ranks) if each else _MOST_ACTORS))


def own_share(ray: Any) -> float:
    """Return the CPUs of this node that are left to the training, if Ray has any of them."""
    kept = read_training(ray).kept_cpus
    return sum(min(node.cpus, kept) for node in read_nodes(ray) if node.is_own)


class ClusterWatch:
    """Looks at a cluster from time to time, in a thread of its own: nobody waits for it.

    Args:
        read: Returns what it has now.
        clock_s: Seconds from any start.
    """

    def __init__(
        self, read: Callable[[], ClusterSeen], clock_s: Callable[[], float] = clock.monotonic
    ) -> None:
        self._read, self._clock_s = read, clock_s
        self._looked_s: float | None = None
        self._thread: threading.Thread | None = None
        self._seen: ClusterSeen | None = None

    def news(self) -> ClusterSeen | None:
        """Return what was seen since the last call, if anything; and look again if it is time."""
        if self._thread is not None and self._thread.is_alive():
            return None
        seen, self._seen = self._seen, None
        now_s = self._clock_s()
        if self._looked_s is None or now_s - self._looked_s >= _EVERY_S:
            self._looked_s = now_s
            self._thread = threading.Thread(target=self._look, daemon=True, name="fastdata-cluster")
            self._thread.start()
        return seen

    def _look(self) -> None:
        with contextlib.suppress(Exception):  # Ray is shut down meanwhile, or loses its cluster
            self._seen = self._read()


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
        began_s = clock.monotonic()
        np.copyto(memory, ray.get(sender.send.remote(size_bytes)))
        spent.append((clock.monotonic() - began_s) * 1e3)
    return statistics.median(spent)


def _size(count_bytes: float) -> str:
    return f"{count_bytes / 2**30:.1f} GiB"
