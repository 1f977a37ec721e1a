"""What is seen of a cluster: its free CPUs."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Mapping
from typing import Any, Final

from lightning_fastdata.errors import WorkerError
from lightning_fastdata.ext.ray.actors import actors_here
from lightning_fastdata.ext.ray.cluster import connect, read_nodes, read_training
from lightning_fastdata.host import clock

_EVERY_S: Final = 10.0
_MOST_ACTORS: Final = 64


def read_free_cpus(ray: Any) -> float:
    """Ask a cluster for the CPUs that nobody holds; one on this node is left to the training.

    Raises:
        WorkerError: The program is not connected any more.
    """
    if not ray.is_initialized():
        raise WorkerError("The connection to the Ray cluster was closed.")
    return max(0.0, float(ray.available_resources().get("CPU", 0.0)) - own_share(ray))


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
        read: Returns its free CPUs.
        clock_s: Seconds from any start.
    """

    def __init__(
        self, read: Callable[[], float], clock_s: Callable[[], float] = clock.monotonic
    ) -> None:
        self._read, self._clock_s = read, clock_s
        self._looked_s: float | None = None
        self._thread: threading.Thread | None = None
        self._seen: float | None = None

    def news(self) -> float | None:
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
