"""The executor ``"ray"``: the actors of a loader and their work, seen from the training process.

It is the executor of side processes with another crew: the same code decides which batches are
under way, in which order they are delivered, and which are made again or given up.

An actor is given two batches at most, so that the next one waits there while a batch is made. Ray
retries nothing: batches lost with an actor or its node are handed back, and asked for again.
"""

from __future__ import annotations

import contextlib
import os
import warnings
import weakref
from collections import Counter, deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from lightning_fastdata.batches.bad_samples import FaultLog
from lightning_fastdata.batches.memory import create_shared_memory, map_shared_memory
from lightning_fastdata.errors import DatasetError, FastDataWarning, WorkerError, as_error
from lightning_fastdata.executors.pool import protocol
from lightning_fastdata.executors.pool.crew import Answer, Loss
from lightning_fastdata.executors.pool.scheduler import PoolExecutor
from lightning_fastdata.executors.pool.watches import Hang
from lightning_fastdata.executors.ray import options_of_actors
from lightning_fastdata.ext.ray import cluster
from lightning_fastdata.ext.ray.actor import Made, Place, ReadingActor
from lightning_fastdata.host import clock
from lightning_fastdata.host.cpu import adopted, name_of_machine
from lightning_fastdata.stamps.batch_stamps import ClockOffset, Way

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from lightning_fastdata.executors.fetch import FetchPlan
    from lightning_fastdata.executors.kinds import AnyExecutor, Resources
    from lightning_fastdata.executors.pool.crew import ChildProcess, Task
    from lightning_fastdata.stamps.batch_stamps import TaskStamps

_OPTIONS: Final = {
    "scheduling_strategy": "SPREAD",
    "max_restarts": 0,
    "max_task_retries": 0,
}
_BATCHES_AT_ONCE: Final = 2
"""Most batches that an actor is given at once."""
_COMPARED_S: Final = 60.0
"""Seconds for which a comparison of an actor's clock with ours is exact enough."""
_HIRE_S: Final = 0.5
"""Seconds between two looks at the nodes while actors are missing."""
_TOLD_S: Final = 30.0
"""Seconds without any actor after which a warning is given."""
_STARTED_S: Final = 120.0
"""Seconds without any actor before a warning, if CPUs are free and only the start takes long."""
_GIVEN_UP_S: Final = 600.0
"""Seconds without any actor after which it is an error; a cluster that grows takes minutes."""
_PINGS: Final = 3
_DEATHS_AT_START: Final = 3
_MOST_ACTORS: Final = 64
_all: weakref.WeakSet[RayCrew] = weakref.WeakSet()
"""Crews of all loaders of this program."""
_told: set[str] = set()
"""Keys of the warnings that this program has given already."""
_LOOK_S: Final = 0.25
_LATE: Final = 3.0
"""Multiple of the usual time after which a batch is late, and also asked of an idle actor."""
_HANG_S: Final = 60.0
_HANG_TASKS: Final = 20
_DEATHS_IN_A_ROW: Final = 20


@dataclass(slots=True, eq=False)
class Call:
    """A batch, or one sample of it, that an actor was asked for."""

    ref: Any
    """Ray's reference of the answer."""
    task: int
    """Number of the task."""
    alone: int | None
    """Position in the batch of a sample that is read on trial; None: the whole batch is read."""
    asked_ns: int
    """Time at which the actor was asked, by our clock, in ns."""


@dataclass(slots=True, eq=False)
class Reader:
    """An actor, as the training process sees it."""

    number: int
    actor: Any
    """Ray's handle of the actor."""
    has_cpu: bool = True
    """Whether it has a CPU of its own; False: it shares one."""
    place: Place = field(default_factory=Place)
    """Where it runs; empty until it is ready."""
    clock: ClockOffset | None = None
    """Offset of its clock, on another node; None: it runs on this node, with our clock."""
    compared_s: float = 0.0
    """Time at which it was last idle and asked for a stamped batch, which shows its clock best."""
    calls: deque[Call] = field(default_factory=deque)
    """Calls under way, in the order in which it does them."""
    since_s: float = 0.0
    """Time at which it began with the first of its calls, as far as is known here."""
    hang: Hang | None = None
    """Details of the hang for which it was killed; None: it did not hang."""
    exitcode: int | None = None
    """Exit code of the actor; it is always None, as Ray does not tell it."""

    def has_room(self, *, stamped: bool) -> bool:
        """Return whether it may be given a batch now.

        While stamps are taken, an actor on another node is left idle once a minute: the next call
        then shows its clock.
        """
        fresh = clock.monotonic() - self.compared_s < _COMPARED_S
        return len(self.calls) < (
            _BATCHES_AT_ONCE if fresh or not stamped or self.clock is None else 1
        )

    def __str__(self) -> str:
        where = f" on {self.place.address}" if self.place.address else ""
        return f"actor {self.number}{where}"


def stamped(
    stamps: TaskStamps,
    reader: Reader,
    call: Call,
    got_ns: tuple[int, int],
    free_cpus: float | None,
) -> TaskStamps:
    """Return the stamps of a batch that has just landed, by our clock, with its way.

    ``stamps`` are by the clock of its actor; ``got_ns`` has the times at which fetching its answer
    began and ended.
    """
    began_ns, ended_ns = stamps.began_ns, stamps.ended_ns
    if reader.clock is not None:
        times = call.asked_ns, began_ns, ended_ns, got_ns[1]
        reader.clock.note(*times)
        began_ns, ended_ns = reader.clock.aligned(*times)
    landed_ns = clock.monotonic_ns()
    way = Way(taken_ns=landed_ns - got_ns[0], landed_ns=landed_ns, free_cpus=free_cpus)
    return stamps._replace(began_ns=began_ns, ended_ns=ended_ns, way=way)


class RayCrew:
    """A number of actors; the crew of a :class:`~..pool.scheduler.PoolExecutor`.

    Raises:
        OptionsError: Ray is not installed.
        WorkerError: The cluster cannot be reached.
        DatasetError: The dataset cannot be pickled.
    """

    def __init__(self, plan: FetchPlan, *, actors: int, options: Mapping[str, Any]) -> None:
        ray = self._ray = cluster.connect()
        self.wanted = actors
        self.ready: list[Reader] = []
        self.coming: dict[Any, Reader] = {}
        """Actors that are not ready yet, by Ray's reference of their first answer."""
        self._plan, self._options = plan, options
        self._needs = {"CPU": float(options["num_cpus"]), **options.get("resources", {})}
        self._training = cluster.read_training(ray)
        self._class = ray.remote(ReadingActor)
        self._pickled = ray.put(_pickled(plan))
        self._node = ray.get_runtime_context().get_node_id()
        self._head = cluster.HeadWatch(ray)
        self._store_bytes = next(
            each.store_bytes for each in cluster.read_nodes(ray) if each.is_own
        )
        """Size of the object store of this program's node, in bytes."""
        self._batch_bytes = 0
        """Size of the largest batch so far, in bytes; 0: none has come yet."""
        self._stamped = False
        """Whether batches are asked for with stamps."""
        self._hired_s = 0.0
        self._died_starting = 0
        self._none_since_s: float | None = None
        self._told = False
        self._watch = cluster.ClusterWatch(partial(cluster.read_free_cpus, ray))
        self.children: dict[int, ChildProcess] = {}
        """Child processes by number; this is always empty, as actors are none."""
        self.owing: list[ChildProcess] = []
        self._tasks: dict[int, Task] = {}
        self._count = 0
        self._doubtful: dict[int, int] = {}
        """Next sample to read alone, of each batch during which an actor died; by batch number."""
        self._task_s = self._longest_s = 0.0
        self._died_in_a_row = 0
        self._end_all = weakref.finalize(
            self, _kill_all, ray, self.ready, self.coming, self._head, os.getpid()
        )
        _all.add(self)

    @property
    def under_way(self) -> int:
        """Number of tasks that were given and not answered yet."""
        return len(self._tasks)

    def start_epoch(self, generation: int, epoch: int) -> None:  # noqa: ARG002
        """Begin an epoch: ask for the actors that are missing."""
        self._doubtful.clear()
        self._hire_missing()

    def configure(self, setting: protocol.Setting) -> None:
        """Start or stop taking stamps; other settings are about shared memory, and are ignored."""
        if isinstance(setting, protocol.SetStamps):
            self._stamped = setting.wanted

    def go_on(self, number: int, rest: Task | None) -> None:
        """Never called: no actor reads a part of a batch."""

    def close(self) -> None:
        """End all actors."""
        self._end_all()
        self.wanted = 0
        self._tasks.clear()

    def ask_states(self, generation: int, within_s: float) -> None:
        """Do nothing: actors are kept as they are."""

    def give(self, task: Task) -> bool:
        """Have an actor make a batch; False: all have enough to do, or memory runs short."""
        free = self._with_room()
        if not free:
            return False
        self._count += 1
        self._tasks[self._count] = task
        self._ask(min(free, key=lambda reader: len(reader.calls)), self._count)
        return True

    def wait(self, until: float | None) -> Iterator[Answer | Loss] | None:
        """Wait for events and return them; None: there is none until a time (``monotonic``).

        Raises:
            WorkerError: No actor starts, or actors die before they have made a batch.
            Exception: Whatever ``worker_init_fn`` or unpickling the dataset raised.
        """
        while True:
            try:
                moved, events = self._look(until)
            except OSError:  # raised by the object store
                self._head.look(now=True)
                raise
            if moved or events:  # an actor that has become free can be given something
                return iter(events)
            if until is not None and clock.monotonic() >= until:
                return None

    # Requests

    def _ask(self, reader: Reader, number: int) -> None:
        """Ask an actor for a batch, or for the next sample of it that is to be read alone."""
        task = self._tasks[number]
        request, alone = task.request(), None
        if task.batch.batched and len(task.indices) > 1:
            alone = self._doubtful.get(task.batch.number)
        if alone is not None:
            request = request._replace(start=alone, indices=task.indices[alone : alone + 1])
        asked_ns = clock.monotonic_ns()
        ref = reader.actor.make.remote(request, number, self._stamped)
        if not reader.calls:
            reader.since_s = clock.monotonic()
            reader.compared_s = reader.since_s if self._stamped else reader.compared_s
        reader.calls.append(Call(ref, number, alone, asked_ns))

    def _ask_twice(self) -> None:
        """Ask an idle actor for the batch that is needed first, if another actor is late with it.

        The answer that comes first counts; both have the same content.
        """
        idle = next((each for each in self._with_room() if not each.calls), None)
        if idle is None or not self._task_s:
            return
        now_s = clock.monotonic()
        asked = [(each, call) for each in self.ready for call in each.calls]
        for number in sorted(self._tasks, key=lambda number: self._tasks[number].batch.number):
            calls = [(each, call) for each, call in asked if call.task == number]
            if len(calls) == 1 and calls[0][1].alone is None:
                reader, call = calls[0]
                late = now_s - reader.since_s > _LATE * self._task_s
                if late or reader.calls[0] is not call:
                    self._ask(idle, number)
                    return

    # Answers

    def _look(self, until: float | None) -> tuple[bool, list[Answer | Loss]]:
        """Wait a moment; return whether anything has come, and the events for the executor."""
        if clock.monotonic() - self._hired_s >= _HIRE_S:
            self._hire_missing()
        self._head.look()
        left_s = _LOOK_S if until is None else min(_LOOK_S, max(0.0, until - clock.monotonic()))
        ref = self._first_answer(0.0)  # an answer that came while nobody looked is not late
        if ref is None:
            self._ask_twice()
            ref = self._first_answer(left_s)
        if ref is None:
            self._check_presence()
            return False, list(self._kill_hung())
        if ref in self.coming:
            self._welcome(ref)
            return True, []
        asked = [(each, call) for each in self.ready for call in each.calls]
        return True, list(self._receive(*next(each for each in asked if each[1].ref == ref)))

    def _first_answer(self, wait_s: float) -> Any:
        """Return Ray's reference of an answer that has come; None: none came within ``wait_s``."""
        refs = [call.ref for each in self.ready for call in each.calls]
        refs += self.coming
        if not refs:
            clock.sleep(wait_s)
            return None
        ready, _ = self._ray.wait(refs, num_returns=1, timeout=wait_s)
        return ready[0] if ready else None

    def _receive(self, reader: Reader, call: Call) -> Iterator[Answer | Loss]:
        from ray.exceptions import RayError, RayTaskError

        memory: NDArray[np.uint8] | None = None
        try:
            taking_ns = clock.monotonic_ns()
            made: Made = self._ray.get(call.ref)
            got_ns = taking_ns, clock.monotonic_ns()
            ended, memory = made
        except RayTaskError as error:  # the batch that it made cannot be handed over
            failure = protocol.TaskError(0, RuntimeError, f"({reader}) in handing over.\n{error}")
            ended = protocol.TaskEnded(call.task, 0, None, (), failure)
        except RayError as error:
            yield from self._lose(reader, error)
            return
        reader.calls.remove(call)
        reader.since_s = clock.monotonic()
        self._dismiss_idle()
        task = self._tasks.get(call.task)
        if task is None:
            return  # another actor was faster
        if call.alone is not None:
            self._go_on_alone(reader, call.alone, call.task, task)
            return
        del self._tasks[call.task]
        self._doubtful.pop(task.batch.number, None)
        self._died_in_a_row = 0
        spent_s = ended.spent_ns / 1e9
        self._task_s = 0.9 * self._task_s + 0.1 * spent_s if self._task_s else spent_s
        self._longest_s = max(self._longest_s, spent_s)
        self._batch_bytes = max(self._batch_bytes, 1 if memory is None else memory.size)
        files = [] if memory is None else self._take_in(task, memory)
        if ended.stamps is not None:
            stamps = stamped(ended.stamps, reader, call, got_ns, self._watch.news())
            ended = ended._replace(stamps=stamps)
        yield Answer(reader, task, ended, files)

    def _take_in(self, task: Task, memory: NDArray[np.uint8]) -> list[int]:
        """Copy a batch into its slot, or into a file of its own if it has none that fits."""
        slot, files = task.batch.slot, list[int]()
        if slot is not None and slot.size_bytes >= memory.size:
            mapping = slot.mapping
        else:
            files = [create_shared_memory(memory.size)]
            mapping = map_shared_memory(files[0])
        np.copyto(np.frombuffer(mapping, np.uint8, memory.size), memory)
        return files

    def _go_on_alone(self, reader: Reader, at: int, number: int, task: Task) -> None:
        """Have the next sample of a doubtful batch read alone, and then the batch as a whole."""
        if at + 1 < len(task.indices):
            self._doubtful[task.batch.number] = at + 1
        else:
            self._doubtful.pop(task.batch.number, None)
        self._ask(reader, number)

    # Losses

    def _lose(self, reader: Reader, error: BaseException) -> Iterator[Loss]:
        """Let another actor take the place of one that is gone, and hand back its tasks."""
        self.ready.remove(reader)
        _kill(self._ray, reader)
        self._plan.faults.deaths += 1
        self._died_in_a_row += 1
        self._head.look(now=True)
        if self._died_in_a_row > _DEATHS_IN_A_ROW + 2 * self.wanted:
            raise WorkerError(
                f"{self._died_in_a_row} actors died one after the other, and no batch was made "
                f"meanwhile. The last one: {error} {cluster.offers(self._ray)}."
            ) from error
        elsewhere = {call.task for each in self.ready for call in each.calls}
        lost = [call for call in reader.calls if call.task in self._tasks.keys() - elsewhere]
        suspect = None
        if lost and lost[0] is reader.calls[0]:
            batch = self._tasks[lost[0].task].batch
            if lost[0].alone is not None or not batch.batched or len(batch.indices) == 1:
                suspect = batch.number, lost[0].alone or 0
            elif batch.indices:
                # Reading each sample alone shows which one it was, if any.
                self._doubtful[batch.number] = 0
        yield Loss(reader, [self._tasks.pop(call.task) for call in lost], suspect)

    def _kill_hung(self) -> Iterator[Loss]:
        """Kill actors that take too long for their batch."""
        given, now_s = self._plan.timeout_s, clock.monotonic()
        limit_s = max(_HANG_S, _HANG_TASKS * self._longest_s) if given is None else given
        for reader in [each for each in self.ready if each.calls and limit_s]:
            if now_s - reader.since_s > limit_s:
                task = self._tasks.get(reader.calls[0].task)
                what = "what nobody needs any more" if task is None else f"{task.indices!r:.400}"
                reader.hang = Hang(None, limit_s, f"{reader}; `ray stack` shows the stacks there.")
                warnings.warn(
                    f"An {reader} has got nowhere for {limit_s:g} s with samples {what}, and is "
                    "replaced; they are read once more. If they only take long, raise "
                    "timeout; 0 waits for ever.",
                    FastDataWarning,
                    stacklevel=2,
                )
                yield from self._lose(reader, WorkerError(f"It hung for {limit_s:g} s."))

    # The actors

    def _with_room(self) -> list[Reader]:
        """Return the actors that may be given another batch, as far as memory allows it.

        Until the first batch has come, its size is not known, and each actor gets only one.
        """
        free = [
            each
            for each in self.ready
            if each.number < self.wanted  # the others will be dismissed
            and each.has_room(stamped=self._stamped)
            and (self._batch_bytes or not each.calls)
        ]
        if not free:
            return []
        loaders = max(1, sum(1 for each in _all if each.ready or each.coming))
        under_way = Counter[str]()
        for each in self.ready:
            under_way[each.place.node] += len(each.calls)
        here = cluster.most_under_way(
            self._store_bytes, self._batch_bytes, loaders * self._training.ranks_here
        )
        if under_way.total() >= here:
            return []
        sharers = loaders * self._training.ranks
        return [
            each
            for each in free
            if under_way[each.place.node]
            < cluster.most_under_way(each.place.store_bytes, self._batch_bytes, sharers)
        ]

    def _hire_missing(self) -> None:
        """Ask for the actors that are wanted and missing."""
        there = {each.number for each in (*self.ready, *self.coming.values())}
        missing = sorted(set(range(self.wanted)) - there)
        if not missing or self._head.is_gone:
            return
        self._hired_s = clock.monotonic()
        readers = [(each, one) for each in _all for one in (*each.ready, *each.coming.values())]
        nodes = cluster.read_nodes(self._ray)
        places = cluster.place(
            nodes,
            missing=len(missing),
            needs=self._needs,
            training=self._training,
            by_user=cluster.placed_by_user(self._options),
            held=sum(reader.has_cpu for _, reader in readers),
            first=not there,
            others=any(owner is not self for owner, _ in readers),
        )
        for number, where in zip(missing, places, strict=False):
            self._hire(number, where, nodes)
        share = cluster.share_of_rank(nodes, self._needs, self._training)
        first = self._training.rank == 0 and "share" not in _told
        if len(places) < len(missing) and share is not None and first:
            _told.add("share")
            have = share or "one, without a CPU of its own,"
            warnings.warn(
                f"{self._training.ranks} ranks want {self.wanted} actors each; beside the CPU that "
                f"each keeps to train, the cluster has CPUs for {share} each. Until there are "
                f"more, {have} read{'s' * (share < 2)} for each. Add nodes, or ask for fewer. "
                f"{cluster.offers(self._ray)}.",
                FastDataWarning,
                stacklevel=2,
            )

    def _hire(self, number: int, where: cluster.Where, nodes: list[cluster.Node]) -> None:
        options = {**_OPTIONS, **cluster.placed(self._options, where, nodes, self._node)}
        actor = self._class.options(**options).remote()
        asked = number, self.wanted, self._plan.base_seed, self._store_bytes
        ref = actor.begin.remote([self._pickled], *asked)
        self.coming[ref] = Reader(number, actor, has_cpu=options["num_cpus"] > 0)

    def _welcome(self, ref: Any) -> None:
        """Take in an actor that has given its first answer, or drop one that has died.

        Raises:
            WorkerError: Actors die again and again before they have read anything.
            Exception: Whatever ``worker_init_fn`` or unpickling the dataset raised.
        """
        from ray.exceptions import RayError

        reader = self.coming.pop(ref)
        try:
            begun: Place | protocol.InitFailed = self._ray.get(ref)
            if isinstance(begun, Place) and begun.node != self._node:
                self._compare_clocks(reader)
        except RayError as error:
            _kill(self._ray, reader)
            self._head.look(now=True)
            self._died_starting += 1
            if self._died_starting >= _DEATHS_AT_START and not self.ready:
                raise WorkerError(
                    f"Actors die before they have read a sample, {self._died_starting} so far; the "
                    f"last one: {error} Each node needs this package and what the dataset imports; "
                    "or name them in ray.init(runtime_env=...)."
                ) from error
            return
        if not isinstance(begun, Place):
            _kill(self._ray, reader)
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
            there_ns: int = self._ray.get(reader.actor.clock_ns.remote())
            reader.clock.note(asked_ns, there_ns, there_ns, clock.monotonic_ns())

    def resize(self, processes: int) -> None:
        """Have ``processes`` actors from now on; surplus ones finish the batches they have."""
        self.wanted = processes
        for ref, reader in list(self.coming.items()):
            if reader.number >= processes:
                del self.coming[ref]
                _kill(self._ray, reader)
        self._dismiss_idle()
        self._hire_missing()

    def _dismiss_idle(self) -> None:
        """End surplus actors that have nothing to do."""
        for reader in [each for each in self.ready if each.number >= self.wanted]:
            if not reader.calls:
                self.ready.remove(reader)
                _kill(self._ray, reader)

    def _check_presence(self) -> None:
        """Warn if there was no actor for long.

        Raises:
            WorkerError: There was none for too long.
        """
        now_s = clock.monotonic()
        if self.ready or not self.wanted:
            self._none_since_s = None
            return
        self._none_since_s = self._none_since_s or now_s
        none_s = now_s - self._none_since_s
        if none_s < (_GIVEN_UP_S if self._told else _TOLD_S):
            return
        nodes = cluster.read_nodes(self._ray)
        if none_s < _STARTED_S and cluster.has_free(nodes, self._needs):
            return
        text = (
            f"No actor has started for {none_s:.0f} s. {self.wanted} are wanted, each with "
            f"{self._options}. {cluster.offers(self._ray)}. Ask for fewer, or add nodes."
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
            _kill(self._ray, reader)
            self._hire(reader.number, "shared", nodes)


def room_for_actors(executor: AnyExecutor, ranks: int = 1) -> int:
    """Return how many actors each of ``ranks`` ranks can have now, at least 1.

    Raises:
        OptionsError: Ray is not installed.
        WorkerError: No cluster can be reached or started.
    """
    ray = cluster.connect()
    each = float(options_of_actors(executor)["num_cpus"])
    total = float(ray.cluster_resources().get("CPU", 0.0))
    free = sum(node.free_cpus for node in cluster.read_nodes(ray))
    left = min(total, free + each * sum(len(one.ready) for one in _all)) - cluster.own_share(ray)
    return max(1, min(_MOST_ACTORS, int(left / each / ranks) if each else _MOST_ACTORS))


def _pickled(plan: FetchPlan) -> bytes:
    """Return the pickle of a plan for actors: each gets a copy, whose arrays it may write to."""
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
    adopted.discard(reader.place.process)
    with contextlib.suppress(Exception):  # the actor is gone already
        ray.kill(reader.actor)


def _kill_all(
    ray: Any, ready: list[Reader], coming: dict[Any, Reader], head: cluster.HeadWatch, owner: int
) -> None:
    """End actors, if this is the process of id ``owner`` and it is still connected."""
    if os.getpid() != owner or not ray.is_initialized():
        return
    for reader in (*ready, *coming.values()):
        if not head.is_gone:  # else Ray would wait for it
            _kill(ray, reader)
    ready.clear()
    coming.clear()


class RayExecutor(PoolExecutor):
    """Fetches batches in actors of a Ray cluster.

    Raises:
        OptionsError: Ray is not installed.
        WorkerError: No cluster can be reached, or the dataset cannot be sent to it.
    """

    def __init__(self, plan: FetchPlan, given: Resources) -> None:
        self._whole, self._options = plan, options_of_actors(given.executor)
        # Shared memory can only be written on this machine, so actors send whole batches. The crew
        # itself finds actors that hang.
        plan = replace(plan, default_collation=False, timeout_s=0)
        super().__init__(plan, given)

    def _start_crew(self, processes: int) -> RayCrew:
        return RayCrew(self._whole, actors=processes, options=self._options)
