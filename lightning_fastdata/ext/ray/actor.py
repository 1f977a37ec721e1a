"""An actor from both ends: what runs in it, and how the training process sees it.

It makes whole batches, whose content follows from their keys alone. It keeps nothing that a batch
rests on, so that what is lost with it is asked of another one.
"""

from __future__ import annotations

import os
import pickle
import socket
from collections import deque
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeAlias

import numpy as np

from lightning_fastdata.batches.bad_samples import NO_SAMPLES
from lightning_fastdata.batches.libraries import tell_epoch
from lightning_fastdata.batches.packed import pack, write_leaves
from lightning_fastdata.errors import BatchError
from lightning_fastdata.executors.fetch import Fetcher, FetchPlan
from lightning_fastdata.executors.pool import protocol
from lightning_fastdata.executors.pool.child import describe_error, prepare_process
from lightning_fastdata.ext.ray.cluster import read_nodes
from lightning_fastdata.host import clock
from lightning_fastdata.host.cpu import name_of_machine
from lightning_fastdata.stamps.batch_stamps import ClockOffset, TaskWatch, Way
from lightning_fastdata.stamps.lines import LineWatch

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from lightning_fastdata.executors.pool.process import Hang
    from lightning_fastdata.stamps.batch_stamps import TaskStamps

Made: TypeAlias = "tuple[protocol.TaskEnded, NDArray[np.uint8] | None]"
"""How a task ended, and the memory of its batch, if it has any."""


_TOO_LARGE: Final = (
    "The batch has {:.1f} MiB, and the object store of the node that makes it, or of the one that "
    "trains, {:.1f} MiB: it does not fit. Make batches smaller (batch_size; images as uint8), or "
    "the store larger (`ray start --object-store-memory BYTES`, ray.init(object_store_memory=...))."
)
BATCHES_AT_ONCE: Final = 2
"""Batches that an actor is given at once."""
_COMPARED_S: Final = 60.0
"""So long what is known of a clock is exact enough."""


class Place(NamedTuple):
    """Where an actor runs."""

    node: str
    """Id of the node in its cluster."""
    address: str
    """Name of the machine, for people."""
    machine: str | None
    """Of :func:`.name_of_machine`."""
    process: int
    """Number of its process there."""
    store_bytes: int
    """Size of the object store of its node."""


class ReadingActor:
    """Makes batches, one after the other; an actor of Ray is one of these."""

    def begin(
        self, plan: list[Any], number: int, actors: int, base_seed: int, store_bytes: int
    ) -> Place | protocol.InitFailed:
        """Get ready to read for a plan, as one of so many.

        Args:
            plan: The reference of the pickled plan; in a list, so that Ray hands it over as it is.
            number: Of this actor, counted from 0.
            actors: How many there are.
            base_seed: Takes the place of the plan's.
            store_bytes: Size of the object store where the training runs.
        """
        import ray
        from ray import cloudpickle

        self._cloudpickle = cloudpickle
        self._number = number
        self._where = f"on {socket.gethostname()} "
        step = "in unpickling the dataset and its collate function"
        try:
            given: FetchPlan = pickle.loads(ray.get(plan[0]))
            given = prepare_process(replace(given, base_seed=base_seed), number, actors)
            if given.worker_init_fn is not None:
                step = f"in worker_init_fn({number})"
                given.worker_init_fn(number)
        except Exception as error:
            return protocol.InitFailed(*self._told(error, step))
        self._fetcher = Fetcher(given)
        self._epoch: int | None = None
        self._watch = TaskWatch(number, LineWatch())
        own = next(node for node in read_nodes(ray) if node.is_own)
        self._store_bytes = min(own.store_bytes, store_bytes)
        return Place(own.id, socket.gethostname(), name_of_machine(), os.getpid(), own.store_bytes)

    def clock_ns(self) -> int:
        """Return the clock of the stamps, which each machine has of its own."""
        return clock.monotonic_ns()

    def make(self, task: protocol.TaskRequest, number: int, stamped: bool) -> Made:
        """Return how a task with this number ended, which is to read and collate a whole batch."""
        fetcher, began_ns = self._fetcher, clock.monotonic_ns()
        fetcher.stamps = self._watch if stamped else None
        fetcher.faults.clear()
        if stamped:
            self._watch.begin()
        result: protocol.TaskResult
        memory, where = None, f"in set_epoch({task.epoch})"
        try:
            if task.epoch != self._epoch:
                tell_epoch(fetcher.dataset, task.epoch)
                self._epoch = task.epoch
            where = ""
            batch = fetcher.attempt(partial(fetcher.batch, task.indices, task.epoch))
            result, memory = self._packed(batch)
        except BaseException as error:  # sys.exit(), too, is the fault of one sample
            report = self._told(error, where or fetcher.where(task.indices))
            result = protocol.TaskError(max(fetcher.position, 0), *report)
        spent_ns = clock.monotonic_ns() - began_ns
        stamps = self._watch.end() if stamped else None
        return protocol.TaskEnded(number, spent_ns, stamps, tuple(fetcher.faults), result), memory

    def _packed(self, batch: object) -> tuple[protocol.TaskResult, NDArray[np.uint8] | None]:
        if batch is NO_SAMPLES:
            return protocol.NothingLeft(), None
        began_ns = clock.monotonic_ns()
        packed, leaves = pack(batch, self._cloudpickle.Pickler)
        if packed.size_bytes > self._store_bytes:
            raise BatchError(
                _TOO_LARGE.format(packed.size_bytes / 2**20, self._store_bytes / 2**20)
            )
        memory = np.empty(max(1, packed.size_bytes), np.uint8)
        write_leaves(packed, leaves, memory)
        if self._fetcher.stamps is not None:
            self._fetcher.stamps.collated(began_ns)
        return protocol.Collated(packed), memory if packed.size_bytes else None

    def _told(self, error: BaseException, where: str) -> tuple[type[BaseException], str]:
        kind, text = describe_error(error, self._where + where)
        try:
            self._cloudpickle.dumps(kind)
        except Exception:  # a class that cannot travel
            kind = RuntimeError
        return kind, text


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
    has_cpu: bool = True
    """False: it shares that of another one."""
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
        fresh = clock.monotonic() - self.compared_s < _COMPARED_S
        return len(self.calls) < (
            BATCHES_AT_ONCE if fresh or not stamped or self.clock is None else 1
        )

    @property
    def node(self) -> str:
        """Id of its node; empty until it is ready."""
        return "" if self.place is None else self.place.node

    @property
    def store_bytes(self) -> int:
        """Size of the object store of its node; 0 until it is ready."""
        return 0 if self.place is None else self.place.store_bytes

    def __str__(self) -> str:
        where = "" if self.place is None else f" on {self.place.address}"
        return f"actor {self.number}{where}"


def stamped(
    stamps: TaskStamps,
    reader: Reader,
    call: Call,
    got_ns: tuple[int, int],
    free_cpus: float | None,
) -> TaskStamps:
    """Return the stamps of a batch that has just landed, by our clock, with its way.

    ``stamps`` are by the clock of its actor; ``got_ns`` says when its answer began to be taken, and
    was here.
    """
    began_ns, ended_ns, uncertain_ns = stamps.began_ns, stamps.ended_ns, 0
    if reader.clock is not None:
        times = call.asked_ns, began_ns, ended_ns, got_ns[1]
        reader.clock.note(*times)
        began_ns, ended_ns = reader.clock.aligned(*times)
        uncertain_ns = reader.clock.uncertain_ns
    place, landed_ns = reader.place, clock.monotonic_ns()
    way = Way(
        node="" if place is None else f"{place.address}/{place.node[:8]}",
        taken_ns=landed_ns - got_ns[0],
        landed_ns=landed_ns,
        uncertain_ns=uncertain_ns,
        free_cpus=free_cpus,
    )
    return stamps._replace(began_ns=began_ns, ended_ns=ended_ns, way=way)
