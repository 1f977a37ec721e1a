"""The code that runs in an actor.

An actor makes whole batches, whose content follows from their keys alone. It keeps no state that
batches depend on, so that another actor can make those that are lost with it.
"""

from __future__ import annotations

import os
import pickle
import socket
from dataclasses import replace
from functools import partial
from typing import Any, Final, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from lightning_fastdata.batches.bad_samples import NO_SAMPLES
from lightning_fastdata.batches.libraries import tell_epoch
from lightning_fastdata.batches.memory import pack, write_leaves
from lightning_fastdata.errors import BatchError
from lightning_fastdata.executors.fetch import Fetcher, FetchPlan
from lightning_fastdata.executors.pool import protocol
from lightning_fastdata.executors.pool.child import describe_error, prepare_process
from lightning_fastdata.ext.ray.cluster import read_nodes
from lightning_fastdata.host import clock
from lightning_fastdata.host.cpu import name_of_machine
from lightning_fastdata.stamps.batch_stamps import TaskWatch
from lightning_fastdata.stamps.lines import LineWatch

Made: TypeAlias = tuple[protocol.TaskEnded, NDArray[np.uint8] | None]
"""How a task ended, and the memory of its batch, if it has any."""
_TOO_LARGE: Final = (
    "The batch has {:.1f} MiB, and the object store of the node that makes it, or of the one that "
    "trains, {:.1f} MiB: it does not fit. Make batches smaller (batch_size; images as uint8), or "
    "the store larger (`ray start --object-store-memory BYTES`, ray.init(object_store_memory=...))."
)


class Place(NamedTuple):
    """Where an actor runs."""

    node: str = ""
    """Id of its node in the cluster."""
    address: str = ""
    """Host name of its machine, for people."""
    machine: str | None = None
    """Result of :func:`.name_of_machine` there; None: not known."""
    process: int = 0
    """Number of its process on that machine."""
    store_bytes: int = 0
    """Size of the object store of its node, in bytes."""


class ReadingActor:
    """Makes batches, one after the other; each actor of Ray is an object of this class."""

    def begin(
        self, plan: list[Any], number: int, actors: int, base_seed: int, store_bytes: int
    ) -> Place | protocol.InitFailed:
        """Get ready to read for a plan, as one of several actors.

        Args:
            plan: The reference of the pickled plan, in a list, so that Ray does not resolve it.
            number: Number of this actor, counted from 0.
            actors: Number of actors.
            base_seed: Base seed to use in place of the plan's.
            store_bytes: Size of the object store of the training's node, in bytes.
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
        """Return the time of the stamps' clock, of which each machine has its own."""
        return clock.monotonic_ns()

    def make(self, task: protocol.TaskRequest, number: int, stamped: bool) -> Made:
        """Read and collate a whole batch, and return how the task of this number ended."""
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
        except BaseException as error:  # also sys.exit(), which a sample's code may call
            report = self._told(error, where or fetcher.where(task.indices))
            result = protocol.TaskError(max(fetcher.position, 0), *report)
        spent_ns = clock.monotonic_ns() - began_ns
        stamps = self._watch.end()._replace(drew=fetcher.draws) if stamped else None
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
        except Exception:  # a class that cannot be pickled
            kind = RuntimeError
        return kind, text
