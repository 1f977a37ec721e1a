"""A Ray cluster of several nodes on this machine, and the actors in it."""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Callable, Iterator
from typing import Any

import psutil
import ray
from processes import until
from ray.cluster_utils import Cluster


@contextlib.contextmanager
def cluster_of(*cpus: int) -> Iterator[Cluster]:
    """Be connected to nodes with so many CPUs each; the training process is on the first."""
    # Ray has its workers give way to all other programs, which takes minutes on a loaded machine.
    os.environ.setdefault("RAY_worker_niceness", "0")
    cluster = patiently(lambda: Cluster(initialize_head=True, head_node_args={"num_cpus": cpus[0]}))
    try:
        for each in cpus[1:]:
            patiently(lambda each=each: cluster.add_node(num_cpus=each))
        ray.init(address=cluster.address, logging_level=logging.ERROR, log_to_driver=False)
        yield cluster
    finally:
        ray.shutdown()
        cluster.shutdown()


def patiently(start):
    """Return what a call starts; Ray gives a node 30 s, which a loaded machine may not keep."""
    for _ in range(3):
        try:
            return start()
        except Exception as error:
            told = error
    raise told


def actors(cluster: Cluster) -> list[psutil.Process]:
    """Return the processes of all actors that read, on all nodes of a cluster."""
    nodes = [node for node in cluster.list_all_nodes() if node.any_processes_alive()]
    raylets = [each.process.pid for node in nodes for each in node.all_processes["raylet"]]
    found = []
    for raylet in raylets:
        with contextlib.suppress(psutil.Error):
            for process in psutil.Process(raylet).children(recursive=True):
                if " ".join(process.cmdline()).startswith("ray::ReadingActor"):
                    found.append(process)
    return found


def wait_until(condition: Callable[[], Any]) -> None:
    """Wait for what Ray does without fail, which takes it minutes on a loaded machine."""
    until(condition, seconds=600)
