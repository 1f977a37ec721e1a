"""What is seen of a cluster: its CPUs and its object stores.

While its actors read, only what Ray documents is read: its resources, its nodes, and the metrics
that each node publishes
(https://docs.ray.io/en/latest/ray-observability/reference/system-metrics.html).
"""

from __future__ import annotations

import contextlib
import re
import threading
import urllib.request
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final

from lightning_fastdata.errors import WorkerError
from lightning_fastdata.ext.ray.actors import actors_here
from lightning_fastdata.ext.ray.cluster import connect, read_nodes, read_training
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
    each = float(options["num_cpus"])
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
