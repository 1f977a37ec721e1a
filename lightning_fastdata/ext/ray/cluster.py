"""The Ray cluster: how it is reached, its resources, and the nodes to which actors go.

They go first to nodes other than the training's, and never to a CPU that a training needs.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import socket
import threading
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal, TypeAlias

from lightning_fastdata.errors import FastDataWarning, OptionsError, WorkerError
from lightning_fastdata.host import clock
from lightning_fastdata.host.cpu import ranks_on_host

Where: TypeAlias = Literal["elsewhere", "here", "options", "shared"]
"""Place of an actor: on any node but the training's own; on that node; as the user's options say;
or, "shared", without a CPU of its own, next to another program."""

_GO_ON: Final = (
    "Start the cluster again, and go on from the last checkpoint, which continues with the next "
    'batch: trainer.fit(..., ckpt_path="last").'
)

_STORE_BYTES: Final = 2**31
"""Bytes assumed for an object store whose size Ray does not tell."""
_ENDS: Final = "RAY_gcs_rpc_server_reconnect_timeout_s"
"""Environment variable with the seconds without the head until Ray ends a program; default 60."""
_PATIENCE: Final = 0.6
"""Share of the time of ``_ENDS`` after which a head that does not answer is an error."""
_ASK_S: Final = 1.0
_ANSWER_S: Final = 1.0
_EVERY_S: Final = 10.0
_PLACING: Final = frozenset(
    {
        "scheduling_strategy",
        "label_selector",
        "fallback_strategy",
        "resources",
        "memory",
        "num_gpus",
        "accelerator_type",
    }
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """A node of the cluster that is alive."""

    id: str
    is_own: bool
    """Whether the training process runs on it."""
    has: Mapping[str, float]
    """Resources of the node, by their names in Ray."""
    free_cpus: float
    """CPUs that nobody held a moment ago."""
    store_bytes: int
    """Size of its object store, in bytes."""

    @property
    def cpus(self) -> float:
        """Number of CPUs of the node."""
        return self.has.get("CPU", 0.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Training:
    """The ranks that the actors read for."""

    ranks: int = 1
    """Number of ranks of the whole training."""
    rank: int = 0
    """Number of this rank, from 0."""
    ranks_here: int = 1
    """Number of ranks on this machine."""
    held_cpus: float = 0.0
    """CPUs that Ray has given each rank, as to a worker of Ray Train; 0: Ray did not start them."""

    @property
    def kept_cpus(self) -> float:
        """Number of CPUs of the training's own node that no actor may have."""
        return self.ranks_here * max(1.0, self.held_cpus)


def connect() -> Any:
    """Return Ray, connected to a cluster.

    If the program is connected already, that connection is used. Otherwise the cluster is that of
    ``RAY_ADDRESS``, else the one that runs on this machine, else a new one of this machine alone,
    which ends with the program.

    Raises:
        OptionsError: Ray is not installed.
        WorkerError: The cluster cannot be reached, none can be started, or several ranks find none.
    """
    try:
        import ray
    except ImportError as error:
        raise OptionsError(
            f'executor="ray" needs Ray, which is not installed ({error}). Run '
            "`pip install 'lightning-fastdata[ray]'`, or use executor=\"workers\"."
        ) from error
    if not ray.is_initialized():
        address = _address()
        if address == "local" and (ranks := _ranks()[0]) > 1:
            raise WorkerError(
                f"{ranks} ranks train together, and no Ray cluster runs that they could share. "
                "Start one (`ray start --head`), or set RAY_ADDRESS to the address of one; or use "
                'executor="workers".'
            )
        try:
            ray.init(address, logging_level=logging.ERROR, log_to_driver=False)
        except Exception as error:  # Ray raises many classes of errors
            raise WorkerError(
                "No Ray cluster can be reached or started: "
                f"{type(error).__name__}: {error} Start "
                "one (`ray start --head`), set RAY_ADDRESS to the address of one, or call "
                'ray.init(...) before the training; or use executor="workers".'
            ) from error
    return ray


def _address() -> str | None:
    """Return ``"local"`` if no cluster runs on this machine; None: Ray finds the address itself.

    Without this, Ray would try for minutes to reach a cluster that is gone.
    """
    last = Path(os.environ.get("RAY_TMPDIR", "/tmp"), "ray", "ray_current_cluster")
    if "RAY_ADDRESS" in os.environ:
        return None
    with contextlib.suppress(OSError, ValueError):
        return None if _answers(last.read_text(encoding="utf-8").strip()) else "local"
    return "local"


def read_nodes(ray: Any) -> list[Node]:
    """Return the nodes that are alive."""
    own = ray.get_runtime_context().get_node_id()
    free = _free_cpus_by_node(ray)
    return [
        Node(
            id=each["NodeID"],
            is_own=each["NodeID"] == own,
            has=each["Resources"],
            free_cpus=free.get(each["NodeID"], each["Resources"].get("CPU", 0.0)),
            store_bytes=int(each["Resources"].get("object_store_memory", _STORE_BYTES)),
        )
        for each in ray.nodes()
        if each["Alive"]
    ]


def _free_cpus_by_node(ray: Any) -> dict[str, float]:
    """Return how many CPUs of each node nobody holds; nothing if Ray does not tell that.

    Ray's public interface tells only the sum over all nodes.
    """
    try:
        found = ray._private.state.available_resources_per_node()
        return {node: float(free.get("CPU", 0.0)) for node, free in found.items()}
    except Exception:  # another version; then all CPUs count as free, and actors wait for them
        return {}


def read_training(ray: Any) -> Training:
    """Return the ranks of this training, and what Ray has given each of them."""
    context = ray.get_runtime_context()
    is_worker = context.get_actor_id() is not None or context.get_task_id() is not None
    held = context.get_assigned_resources() if is_worker else {}
    here = ranks_on_host(os.environ)
    ranks, rank = _ranks()
    if os.environ.get("MASTER_ADDR") in {"127.0.0.1", "localhost"}:  # Lightning's own launcher
        here = max(here, ranks)
    held_cpus = float(held.get("CPU", 0.0))
    return Training(ranks=ranks, rank=rank, ranks_here=here, held_cpus=held_cpus)


def _ranks() -> tuple[int, int]:
    """Return how many processes train together, and the number of this one among them."""
    from torch import distributed

    if distributed.is_available() and distributed.is_initialized():
        return distributed.get_world_size(), distributed.get_rank()
    told = [os.environ.get(name, "") for name in ("WORLD_SIZE", "RANK", "LOCAL_RANK")]
    ranks, rank, local = (int(each) if each.isdecimal() else 0 for each in told)
    return max(1, ranks), rank or local


def offers(ray: Any) -> str:
    """Return text on the resources of a cluster, and how many of them are free."""
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


def read_free_cpus(ray: Any) -> float:
    """Return the CPUs of a cluster that nobody holds, without those kept for this training.

    Raises:
        WorkerError: The program is no longer connected.
    """
    if not ray.is_initialized():
        raise WorkerError("The connection to the Ray cluster was closed.")
    return max(0.0, float(ray.available_resources().get("CPU", 0.0)) - own_share(ray))


def own_share(ray: Any) -> float:
    """Return the CPUs of this node that are left to the training, if Ray has any of them."""
    kept = read_training(ray).kept_cpus
    return sum(min(node.cpus, kept) for node in read_nodes(ray) if node.is_own)


class ClusterWatch:
    """Looks at a cluster from time to time, in a thread of its own, so that nobody waits for it.

    Args:
        read: Returns the free CPUs of the cluster.
    """

    def __init__(self, read: Callable[[], float]) -> None:
        self._read = read
        self._looked_s: float | None = None
        self._thread: threading.Thread | None = None
        self._seen: float | None = None

    def news(self) -> float | None:
        """Return the free CPUs if they were read since the last call; look again if it is time."""
        if self._thread is not None and self._thread.is_alive():
            return None
        seen, self._seen = self._seen, None
        now_s = clock.monotonic()
        if self._looked_s is None or now_s - self._looked_s >= _EVERY_S:
            self._looked_s = now_s
            self._thread = threading.Thread(target=self._look, daemon=True, name="fastdata-cluster")
            self._thread.start()
        return seen

    def _look(self) -> None:
        with contextlib.suppress(Exception):  # Ray was shut down meanwhile, or lost its cluster
            self._seen = self._read()


class HeadWatch:
    """Notices in time that the head of the cluster, or this machine's raylet, is gone.

    Without raising an error, Ray ends a program that cannot reach the head for a minute, or whose
    own raylet has ended.
    """

    def __init__(self, ray: Any) -> None:
        context = ray.get_runtime_context()
        self._head, self._node = context.gcs_address, context.get_node_id()
        own = next(each for each in ray.nodes() if each["NodeID"] == self._node)
        self._raylet = f"{own['NodeManagerAddress']}:{own['NodeManagerPort']}"
        # An address that cannot be reached even now, as with Ray Client, is not watched.
        self._watched = {each for each in (self._head, self._raylet) if _answers(each)}
        self._patience_s = _PATIENCE * float(os.environ.get(_ENDS, "60"))
        self._looked_s, self._gone_since_s = clock.monotonic(), math.inf

    @property
    def is_gone(self) -> bool:
        """Whether the head did not answer when it was last asked, or Ray has ended here."""
        return self._gone_since_s < math.inf

    def look(self, *, now: bool = False) -> None:
        """Look whether head and raylet answer, if that is due or asked for ``now``.

        Raises:
            WorkerError: One of them is gone, and Ray is about to end this program.
        """
        now_s = clock.monotonic()
        if not now and now_s - self._looked_s < _ASK_S:
            return
        self._looked_s = now_s
        if not self._answers(self._raylet):
            self._gone_since_s = now_s
            raise WorkerError(
                f"Ray has ended on this machine (node {self._node}), and with it the actors of "
                f"this program. {_GO_ON}"
            )
        if self._answers(self._head):
            self._gone_since_s = math.inf
            return
        if not self.is_gone:
            self._gone_since_s = now_s
            warnings.warn(
                f"The head of the Ray cluster at {self._head} does not answer. Actors that are "
                f"there go on; if it stays away for {self._patience_s:.0f} s, that is an error.",
                FastDataWarning,
                stacklevel=2,
            )
        gone_s = now_s - self._gone_since_s
        if gone_s >= self._patience_s:
            raise WorkerError(
                f"The head of the Ray cluster at {self._head} has not answered for {gone_s:.0f} s, "
                f"and Ray is about to end this program. {_GO_ON}"
            )

    def _answers(self, address: str) -> bool:
        return address not in self._watched or _answers(address)


def _answers(address: str) -> bool:
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=_ANSWER_S).close()
    except (OSError, ValueError):
        return False
    return True


# -- where actors go -------------------------------------------------------------------------------


def placed_by_user(options: Mapping[str, object]) -> bool:
    """Return whether the options of actors restrict the nodes on which they may run."""
    return not _PLACING.isdisjoint(options)


def has_free(nodes: Sequence[Node], needs: Mapping[str, float]) -> bool:
    """Return whether some node has the free CPUs, and other resources, that an actor needs."""
    return any(_fits({**node.has, "CPU": node.free_cpus}, needs) for node in nodes)


def share_of_rank(
    nodes: Sequence[Node], needs: Mapping[str, float], training: Training
) -> int | None:
    """Return how many actors with these needs each rank may have; None: as many as it wants.

    If one rank took all CPUs, it would wait in its first step for a rank that waits for CPUs.
    """
    if training.ranks == 1:
        return None
    fits = sum(_fits(_left(node, training), needs) for node in nodes)
    taken = (training.ranks - training.ranks_here) * training.held_cpus / _cpus(needs)
    return max(0, fits - math.ceil(taken)) // training.ranks


def place(
    nodes: Sequence[Node],
    *,
    missing: int,
    needs: Mapping[str, float],
    training: Training,
    by_user: bool = False,
    held: int = 0,
    first: bool = False,
    others: bool = False,
) -> list[Where]:
    """Return the places for missing actors; fewer than asked for if a rank may not have them.

    Args:
        nodes: The nodes that are alive.
        missing: Number of actors that are asked for.
        needs: Resources that each actor takes, by their names in Ray: ``{"CPU": 1}``.
        training: The ranks of the training.
        by_user: The user's options decide the nodes.
        held: Number of actors of all loaders of this process that have a CPU.
        first: This loader has no actor yet: it gets one in any case.
        others: Other loaders, which do not read at the same time, have actors: a loader for
            validation would wait for ever for a CPU that the training's loader holds.
    """
    share = share_of_rank(nodes, needs, training)
    budget = missing if share is None else min(missing, max(0, share - held))
    if by_user:
        places: list[Where] = ["options"] * budget
        # Whether other resources of these options are free is not known.
        able = int(sum(node.free_cpus for node in nodes) / _cpus(needs)) if others else budget
    else:
        far = sum(_fits({"CPU": node.free_cpus}, needs) for node in nodes if not node.is_own)
        near = sum(_near(node, nodes, needs, training, held) for node in nodes if node.is_own)
        places = ["elsewhere"] * min(budget, far)
        places += ["here"] * min(budget - len(places), near)
        able = len(places)
        # The rest wait there until a CPU is free, or a node joins.
        places += ["elsewhere"] * (budget - len(places))
    if others:
        return places[: min(able, budget)] + ["shared"] * (missing - min(able, budget))
    return places or (["shared"] if first else [])


def placed(
    options: Mapping[str, Any], where: Where, nodes: Sequence[Node], own: str
) -> dict[str, Any]:
    """Return the options of an actor at a place; ``own`` is the id of the training's node."""
    found = dict(options)
    if where == "shared":
        found["num_cpus"] = 0
        farther = any(node.cpus and not node.is_own for node in nodes)
        where = "elsewhere" if farther else "here"
    if where != "options" and not placed_by_user(options):
        found["label_selector"] = {"ray.io/node-id": own if where == "here" else f"!{own}"}
    return found


def most_under_way(store_bytes: int, batch_bytes: int, sharers: int) -> int:
    """Return how many batches one of ``sharers`` loaders may have in an object store.

    Together they take a quarter of the store; but each has two batches, if half of the store holds
    these, and one at least.
    """
    each_bytes = max(1, batch_bytes) * max(1, sharers)
    quarter = store_bytes // 4 // each_bytes
    return max(quarter, min(2, store_bytes // 2 // each_bytes), 1)


def _cpus(needs: Mapping[str, float]) -> float:
    return needs.get("CPU", 0.0) or 1e-3


def _fits(has: Mapping[str, float], needs: Mapping[str, float]) -> int:
    """Return how many actors fit resources; without needs, each counts as a thousandth of a CPU."""
    asked = {name: each for name, each in needs.items() if each > 0 and name in has}
    missing = any(each > 0 and name not in has for name, each in needs.items())
    if missing or not asked:
        return 0 if missing else int(has.get("CPU", 0.0) / _cpus(needs))
    return min(math.floor(max(0.0, has[name]) / each + 1e-6) for name, each in asked.items())


def _left(node: Node, training: Training) -> Mapping[str, float]:
    """Return the resources of a node that actors may have."""
    if node.is_own:
        return {**node.has, "CPU": max(0.0, node.cpus - training.kept_cpus)}
    return node.has


def _near(
    own: Node, nodes: Sequence[Node], needs: Mapping[str, float], training: Training, held: int
) -> int:
    """Return how many actors the training's own node may take now."""
    known = training.ranks_here * training.held_cpus  # not counted as free by Ray
    near = _fits({"CPU": own.free_cpus - (training.kept_cpus - known)}, needs)
    if near or held or training.ranks > 1:
        return near
    anywhere = sum(_fits(_left(node, training), needs) for node in nodes)
    return 0 if anywhere else min(1, _fits({"CPU": own.free_cpus}, needs))
