"""The actors of one loader: how they come, where they are, and how they go."""

from __future__ import annotations

import contextlib
import os
import time
import warnings
import weakref
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Final

from lightning_fastdata.errors import DatasetError, FastDataWarning, WorkerError, as_error
from lightning_fastdata.executors.fault_log import FaultLog
from lightning_fastdata.executors.ray.actor import Place, ReadingActor
from lightning_fastdata.executors.ray.cluster import free_cpus, offers
from lightning_fastdata.host.usage import adopted, name_of_machine
from lightning_fastdata.stamps.travel import ClockOffset

if TYPE_CHECKING:
    from lightning_fastdata.executors.fetch import FetchPlan
    from lightning_fastdata.executors.pool import protocol
    from lightning_fastdata.executors.pool.process import Hang

_OPTIONS: Final = {
    "num_cpus": 1,
    "scheduling_strategy": "SPREAD",
    "max_restarts": 0,
    "max_task_retries": 0,
}
_TOLD_S: Final = 30.0
_GIVEN_UP_S: Final = 600.0
"""Without an actor. A cluster that grows takes minutes."""
_PINGS: Final = 3
EACH: Final = 2
"""Batches that an actor is given at once."""
_COMPARED_S: Final = 60.0
"""So long what is known of a clock is exact enough."""
_DEATHS_AT_START: Final = 3
_all: weakref.WeakSet[Actors] = weakref.WeakSet()
"""Those of all loaders of this program."""


@dataclass(slots=True, eq=False)
class Call:
    """A batch, or one sample of it, that an actor was asked for."""

    ref: Any
    """What Ray knows the answer by."""
    task: int
    """Number of the task."""
    alone: int | None
    """Position in the batch of a sample that is read on trial; None: the batch itself."""
    asked_ns: int
    """When it was."""


@dataclass(slots=True, eq=False)
class Reader:
    """An actor, as it is seen from here."""

    number: int
    actor: Any
    """Ray's handle."""
    place: Place | None = None
    """None until it is ready."""
    clock: ClockOffset | None = None
    """Of another node; None: it has ours."""
    compared_s: float = 0.0
    """When it was last asked with nothing to do, for a batch with stamps: its clock shows best."""
    calls: deque[Call] = field(default_factory=deque)
    """In the order in which it does them."""
    since_s: float = 0.0
    """When it began with the first of them, as far as is known here."""
    hang: Hang | None = None
    """Why it was killed."""
    exitcode: int | None = None
    """Not told by Ray."""

    def has_room(self, *, stamped: bool) -> bool:
        """Return whether it may be given a batch now.

        While stamps are taken it runs out of work once a minute, so that asking it for more shows
        its clock.
        """
        fresh = time.monotonic() - self.compared_s < _COMPARED_S
        return len(self.calls) < (EACH if fresh or not stamped or self.clock is None else 1)

    def __str__(self) -> str:
        where = "" if self.place is None else f" on {self.place.address}"
        return f"actor {self.number}{where}"


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
        self._options = {**_OPTIONS, **options}
        self._class = ray.remote(ReadingActor)
        self._pickled = ray.put(_pickled(plan))
        self._node = ray.get_runtime_context().get_node_id()
        self._died_starting = 0
        self._none_since_s: float | None = None
        self._told = False
        self.close = weakref.finalize(self, _kill_all, ray, self.ready, self.coming, os.getpid())
        _all.add(self)

    @property
    def staying(self) -> list[Reader]:
        """Those that are ready, without those that are to go."""
        return [reader for reader in self.ready if reader.number < self.wanted]

    def hire_missing(self) -> None:
        """Ask for the actors that are wanted and not there.

        One that validates would wait for ever for a CPU that one that trains holds, and both never
        read at once: it shares that CPU.
        """
        there = {each.number for each in (*self.ready, *self.coming.values())}
        missing = sorted(set(range(self.wanted)) - there)
        if not missing:
            return
        options, each_cpus = self._options, self._options["num_cpus"]
        others = any(other.ready or other.coming for other in _all if other is not self)
        free = free_cpus(self.ray) if others else None
        for number in missing:
            if free is not None:
                if free < each_cpus:
                    options = {**options, "num_cpus": 0}
                free -= each_cpus
            actor = self._class.options(**options).remote()
            ref = actor.begin.remote([self._pickled], number, self.wanted, self._plan.base_seed)
            self.coming[ref] = Reader(number, actor)

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
        reader.clock, reader.compared_s = ClockOffset(), time.monotonic()
        for _ in range(_PINGS):
            asked_ns = time.monotonic_ns()
            there_ns: int = self.ray.get(reader.actor.clock_ns.remote())
            reader.clock.note(asked_ns, there_ns, there_ns, time.monotonic_ns())

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
        now_s = time.monotonic()
        if self.ready or not self.wanted:
            self._none_since_s = None
            return
        self._none_since_s = self._none_since_s or now_s
        none_s = now_s - self._none_since_s
        if none_s < (_GIVEN_UP_S if self._told else _TOLD_S):
            return
        text = (
            f"No actor has started for {none_s:.0f} s. {self.wanted} are wanted, each with "
            f"{self._options}. {offers(self.ray)}. Ask for fewer, or add nodes."
        )
        if self._told:
            raise WorkerError(text)
        self._told = True
        warnings.warn(text, FastDataWarning, stacklevel=2)


def actors_here() -> int:
    """Return how many actors of the loaders of this program read, or may."""
    return sum(len(each.ready) for each in _all)


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


def _kill_all(ray: Any, ready: list[Reader], coming: dict[Any, Reader], owner: int) -> None:
    """End actors, if this is the process of id ``owner`` and it is still connected."""
    if os.getpid() != owner or not ray.is_initialized():
        return
    for reader in (*ready, *coming.values()):
        _kill(ray, reader)
    ready.clear()
    coming.clear()
