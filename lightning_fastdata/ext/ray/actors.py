"""The actors of one loader: how they come, where they are, and how they go."""

from __future__ import annotations

import contextlib
import os
import warnings
import weakref
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

from lightning_fastdata.batches.bad_samples import FaultLog
from lightning_fastdata.errors import DatasetError, FastDataWarning, WorkerError, as_error
from lightning_fastdata.ext.ray.actor import Place, Reader, ReadingActor
from lightning_fastdata.ext.ray.cluster import (
    HeadWatch,
    connect,
    offers,
    own_share,
    read_nodes,
    read_training,
)
from lightning_fastdata.ext.ray.placement import (
    Node,
    Where,
    has_free,
    most_under_way,
    place,
    placed,
    placed_by_user,
    share_in_words,
    share_of_rank,
)
from lightning_fastdata.host import clock
from lightning_fastdata.host.cpu import adopted, name_of_machine
from lightning_fastdata.stamps.batch_stamps import ClockOffset

if TYPE_CHECKING:
    from lightning_fastdata.executors.fetch import FetchPlan
    from lightning_fastdata.executors.pool import protocol

_OPTIONS: Final = {
    "scheduling_strategy": "SPREAD",
    "max_restarts": 0,
    "max_task_retries": 0,
}
_HIRE_S: Final = 0.5
"""How often nodes are looked at while actors are missing."""
_TOLD_S: Final = 30.0
_STARTED_S: Final = 120.0
"""The same where CPUs are free, so that it is the start that takes long."""
_GIVEN_UP_S: Final = 600.0
"""Without an actor. A cluster that grows takes minutes."""
_PINGS: Final = 3
_DEATHS_AT_START: Final = 3
_MOST_ACTORS: Final = 64
_all: weakref.WeakSet[Actors] = weakref.WeakSet()
"""Those of all loaders of this program."""
_told: set[str] = set()
"""What this program has said once."""


class Actors:
    """So many ``wanted`` actors that read for a plan.

    Raises:
        DatasetError: The dataset cannot be pickled.
    """

    def __init__(self, ray: Any, plan: FetchPlan, wanted: int, options: Mapping[str, Any]) -> None:
        self.ray = ray
        self.wanted = wanted
        self.ready: list[Reader] = []
        self.coming: dict[Any, Reader] = {}
        """By what Ray knows their first answer by."""
        self._plan = plan
        self._options = options
        self._needs = {"CPU": float(self._options["num_cpus"])}
        self._needs |= self._options.get("resources", {})
        self.training = read_training(ray)
        self._class = ray.remote(ReadingActor)
        self._pickled = ray.put(_pickled(plan))
        self._node = ray.get_runtime_context().get_node_id()
        self._cluster = HeadWatch(ray)
        self.store_bytes = next(each.store_bytes for each in read_nodes(ray) if each.is_own)
        """Size of the object store where this program runs."""
        self.batch_bytes = 0
        """Size of the largest batch so far."""
        self.stamped = False
        """Their batches are asked for with stamps."""
        self._hired_s = 0.0
        self._died_starting = 0
        self._none_since_s: float | None = None
        self._told = False
        self.close = weakref.finalize(
            self, _kill_all, ray, self.ready, self.coming, self._cluster, os.getpid()
        )
        _all.add(self)

    @property
    def staying(self) -> list[Reader]:
        """Those that are ready, without those that are to go."""
        return [reader for reader in self.ready if reader.number < self.wanted]

    @property
    def loaders(self) -> int:
        """Loaders of this program that have actors."""
        return max(1, sum(1 for each in _all if each.ready or each.coming))

    def with_room(self) -> list[Reader]:
        """Return those that may be given another batch, as far as memory allows it.

        How large batches are is not known before the first one has come.
        """
        free = [
            each
            for each in self.staying
            if each.has_room(stamped=self.stamped) and (self.batch_bytes or not each.calls)
        ]
        if not free:
            return []
        loaders, under_way = self.loaders, Counter[str]()
        for each in self.ready:
            under_way[each.node] += len(each.calls)
        here = most_under_way(
            self.store_bytes, self.batch_bytes, loaders * self.training.ranks_here
        )
        if under_way.total() >= here:
            return []
        sharers = loaders * self.training.ranks
        return [
            each
            for each in free
            if under_way[each.node] < most_under_way(each.store_bytes, self.batch_bytes, sharers)
        ]

    def look_at_cluster(self) -> None:
        """Replace actors that are missing, if that is due, and look whether the cluster is there.

        Raises:
            WorkerError: It is gone, and this program about to be ended.
        """
        if clock.monotonic() - self._hired_s >= _HIRE_S:
            self.hire_missing()
        self._cluster.look()

    def hire_missing(self) -> None:
        """Ask for the actors that are wanted and not there."""
        there = {each.number for each in (*self.ready, *self.coming.values())}
        missing = sorted(set(range(self.wanted)) - there)
        if not missing or self._cluster.is_gone:
            return
        self._hired_s = clock.monotonic()
        readers = [(each, one) for each in _all for one in (*each.ready, *each.coming.values())]
        nodes = read_nodes(self.ray)
        places = place(
            nodes,
            missing=len(missing),
            needs=self._needs,
            training=self.training,
            by_user=placed_by_user(self._options),
            held=sum(reader.has_cpu for _, reader in readers),
            first=not there,
            others=any(owner is not self for owner, _ in readers),
        )
        for number, where in zip(missing, places, strict=False):
            self._hire(number, where, nodes)
        share = share_of_rank(nodes, self._needs, self.training)
        first = self.training.rank == 0 and "share" not in _told
        if len(places) < len(missing) and share is not None and first:
            _told.add("share")
            text = share_in_words(share, self.wanted, self.training)
            warnings.warn(f"{text} {offers(self.ray)}.", FastDataWarning, stacklevel=2)

    def _hire(self, number: int, where: Where, nodes: list[Node]) -> None:
        options = {**_OPTIONS, **placed(self._options, where, nodes, self._node)}
        actor = self._class.options(**options).remote()
        asked = number, self.wanted, self._plan.base_seed, self.store_bytes
        ref = actor.begin.remote([self._pickled], *asked)
        self.coming[ref] = Reader(number, actor, has_cpu=options["num_cpus"] > 0)

    def welcome(self, ref: Any) -> None:
        """Take in an actor that has answered, or has died.

        Raises:
            WorkerError: They die before they do anything.
            Exception: Whatever ``worker_init_fn`` or unpickling the dataset raised.
        """
        from ray.exceptions import RayError

        reader = self.coming.pop(ref)
        try:
            begun: Place | protocol.InitFailed = self.ray.get(ref)
            if isinstance(begun, Place) and begun.node != self._node:
                self._compare_clocks(reader)
        except RayError as error:
            self.kill(reader)
            self.check_cluster()
            self._died_starting += 1
            if self._died_starting >= _DEATHS_AT_START and not self.ready:
                raise WorkerError(
                    f"Actors die before they have read a sample, {self._died_starting} so far; the "
                    f"last one: {error} Each node needs this package and what the dataset imports; "
                    "or name them in ray.init(runtime_env=...)."
                ) from error
            return
        if not isinstance(begun, Place):
            self.kill(reader)
            raise as_error(begun.kind, reader.number, begun.text)
        self._died_starting = 0
        reader.place = begun
        if begun.machine == name_of_machine() is not None:
            adopted.add(begun.process)
        self.ready.append(reader)

    def _compare_clocks(self, reader: Reader) -> None:
        """Ask an actor a few times for its clock; each of its batches tells more."""
        reader.clock, reader.compared_s = ClockOffset(), clock.monotonic()
        for _ in range(_PINGS):
            asked_ns = clock.monotonic_ns()
            there_ns: int = self.ray.get(reader.actor.clock_ns.remote())
            reader.clock.note(asked_ns, there_ns, there_ns, clock.monotonic_ns())

    def resize(self, wanted: int) -> None:
        """Be so many from now on; those too many finish what they have."""
        self.wanted = wanted
        for ref, reader in list(self.coming.items()):
            if reader.number >= wanted:
                del self.coming[ref]
                self.kill(reader)
        self.dismiss_idle()
        self.hire_missing()

    def dismiss_idle(self) -> None:
        """End those that are to go and have nothing to do."""
        for reader in [each for each in self.ready if each.number >= self.wanted]:
            if not reader.calls:
                self.ready.remove(reader)
                self.kill(reader)

    def kill(self, reader: Reader) -> None:
        """End an actor, whatever it does."""
        _kill(self.ray, reader)

    def check_presence(self) -> None:
        """Tell if there is none for long.

        Raises:
            WorkerError: There is none for too long.
        """
        now_s = clock.monotonic()
        if self.ready or not self.wanted:
            self._none_since_s = None
            return
        self._none_since_s = self._none_since_s or now_s
        none_s = now_s - self._none_since_s
        if none_s < (_GIVEN_UP_S if self._told else _TOLD_S):
            return
        nodes = read_nodes(self.ray)
        if none_s < _STARTED_S and has_free(nodes, self._needs):
            return
        text = (
            f"No actor has started for {none_s:.0f} s. {self.wanted} are wanted, each with "
            f"{self._options}. {offers(self.ray)}. Ask for fewer, or add nodes."
        )
        if self._told:
            raise WorkerError(text)
        self._told = True
        warnings.warn(
            f"{text} One starts without a CPU of its own meanwhile.", FastDataWarning, stacklevel=2
        )
        waiting = next((ref for ref, each in self.coming.items() if each.has_cpu), None)
        if waiting is not None:
            reader = self.coming.pop(waiting)
            self.kill(reader)
            self._hire(reader.number, "shared", nodes)

    def check_cluster(self) -> None:
        """Look at once whether the cluster is there, as something of it has died.

        Raises:
            WorkerError: It is gone.
        """
        self._cluster.look(now=True)


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
    left = min(total, free + each * sum(len(one.ready) for one in _all)) - own_share(ray)
    return max(1, min(_MOST_ACTORS, int(left / each / ranks) if each else _MOST_ACTORS))


def _pickled(plan: FetchPlan) -> bytes:
    """Return a plan as actors get it: a copy of their own, whose arrays may be written to."""
    from ray import cloudpickle

    try:
        pickled: bytes = cloudpickle.dumps(replace(plan, context=None, faults=FaultLog()))
    except Exception as error:
        raise DatasetError(
            f"{type(plan.dataset).__name__} cannot be sent to actors, as pickling it, its collate "
            f"function or worker_init_fn raised {type(error).__name__}: {error}. Open files, "
            "connections and locks on first use in __getitem__, and not in __init__."
        ) from error
    return pickled


def _kill(ray: Any, reader: Reader) -> None:
    if reader.place is not None:
        adopted.discard(reader.place.process)
    with contextlib.suppress(Exception):  # it is gone already
        ray.kill(reader.actor)


def _kill_all(
    ray: Any, ready: list[Reader], coming: dict[Any, Reader], cluster: HeadWatch, owner: int
) -> None:
    """End actors, if this is the process of id ``owner`` and it is still connected."""
    if os.getpid() != owner or not ray.is_initialized():
        return
    for reader in (*ready, *coming.values()):
        if not cluster.is_gone:  # Ray would wait for its head
            _kill(ray, reader)
    ready.clear()
    coming.clear()
