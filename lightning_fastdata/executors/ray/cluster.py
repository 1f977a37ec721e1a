"""The Ray cluster that the actors run in: how it is reached, and what it has."""

from __future__ import annotations

import logging
import os
import socket
from pathlib import Path
from typing import Any, Final

from lightning_fastdata.errors import OptionsError, WorkerError

_INSTALL: Final = (
    'executor="ray" needs Ray, which is not installed ({error}). Run '
    "`pip install 'lightning-fastdata[ray]'`, or use executor=\"workers\"."
)

_STORE_BYTES: Final = 2**31
"""Taken for the size of an object store that is not told."""


def connect(*, start: bool = True) -> Any:
    """Return Ray, connected to a cluster.

    A connection of the program is used as it is. Otherwise it is the cluster of ``RAY_ADDRESS``,
    the one that runs on this machine, or a new one, of this machine alone, which ends with the
    program; without ``start`` none is started.

    Raises:
        OptionsError: Ray is not installed.
        WorkerError: The cluster cannot be reached, or none can be started.
    """
    try:
        import ray
    except ImportError as error:
        raise OptionsError(_INSTALL.format(error=error)) from error
    if not ray.is_initialized():
        try:
            address = _address()
            if not start:
                if address is not None:
                    raise ConnectionError("The cluster that ran on this machine last is gone.")
                address = "auto"
            ray.init(address, logging_level=logging.ERROR, log_to_driver=False)
        except Exception as error:  # of many classes
            raise WorkerError(
                f"No Ray cluster can be reached{' or started' * start}: "
                f"{type(error).__name__}: {error} Start "
                "one (`ray start --head`), set RAY_ADDRESS to the address of one, or call "
                'ray.init(...) before the training; or use executor="workers".'
            ) from error
    return ray


def _address() -> str | None:
    """Return ``"local"`` if the cluster is gone that ran on this machine last; None: Ray decides.

    It would try for minutes to reach that.
    """
    last = Path(os.environ.get("RAY_TMPDIR", "/tmp"), "ray", "ray_current_cluster")
    if "RAY_ADDRESS" in os.environ or not last.exists():
        return None
    try:
        host, _, port = last.read_text(encoding="utf-8").strip().rpartition(":")
        socket.create_connection((host, int(port)), timeout=3).close()
    except (OSError, ValueError):
        return "local"
    return None


def free_cpus(ray: Any) -> float:
    """Return how many CPUs of the cluster nobody holds, as of a moment ago."""
    return float(ray.available_resources().get("CPU", 0.0))


def offers(ray: Any) -> str:
    """Return in words what a cluster has, and what of it is free."""
    has: dict[str, float] = ray.cluster_resources()
    free: dict[str, float] = ray.available_resources()
    nodes = sum(1 for node in ray.nodes() if node["Alive"])
    machines = f"{nodes} node{'s' * (nodes != 1)}"
    cpus = f"{free.get('CPU', 0):g} of its {has.get('CPU', 0):g} CPUs are free"
    others = [
        f"{free.get(name, 0):g} of {amount:g} {name}"
        for name, amount in sorted(has.items())
        if name != "CPU" and "memory" not in name and not name.startswith(("node:", "accelerator"))
    ]
    return f"The cluster has {machines}; {', '.join([cpus, *others])}"


def store_bytes(ray: Any) -> int:
    """Return the size of the object store of this machine."""
    own = ray.get_runtime_context().get_node_id()
    for node in ray.nodes():
        if node["NodeID"] == own:
            return int(node["Resources"].get("object_store_memory", _STORE_BYTES))
    return _STORE_BYTES
