"""The executor ``"ray"``: what the actors of a loader have to do, seen from the training process.

It is the executor of side processes with another crew: which batch is under way, in which order
they leave, what is done again and what is given up is decided by the same code.

An actor is given two batches at most, so that the next one waits there while a batch is made. Ray
retries nothing: what is lost with an actor or its node is handed back, and asked for again.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from lightning_fastdata.batches.memory import create_shared_memory, map_shared_memory
from lightning_fastdata.errors import FastDataWarning, WorkerError
from lightning_fastdata.executors.pool import protocol
from lightning_fastdata.executors.pool.crew import Answer, Loss
from lightning_fastdata.executors.pool.scheduler import PoolExecutor
from lightning_fastdata.executors.pool.watches import Hang
from lightning_fastdata.ext.ray.actor import Call, Reader, stamped
from lightning_fastdata.ext.ray.actors import Actors
from lightning_fastdata.ext.ray.cluster import ClusterWatch, connect, offers, read_free_cpus
from lightning_fastdata.host import clock

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from lightning_fastdata.batches.staged import PinThread
    from lightning_fastdata.executors.fetch import FetchPlan
    from lightning_fastdata.executors.pool.crew import ChildProcess, Task
    from lightning_fastdata.executors.pool.watches import CrewTrial
    from lightning_fastdata.ext.ray.actor import Made

_LOOK_S: Final = 0.25
_LATE: Final = 3.0
"""A batch that takes so many times the usual is asked of an idle actor, too."""
_HANG_S: Final = 60.0
_HANG_TASKS: Final = 20
_DEATHS_IN_A_ROW: Final = 20


class RayCrew:
    """So many actors; the crew of a :class:`~..pool.scheduler.PoolExecutor`.

    Raises:
        OptionsError: Ray is not installed.
        WorkerError: The cluster cannot be reached.
        DatasetError: The dataset cannot be pickled.
    """

    def __init__(self, plan: FetchPlan, *, actors: int, options: Mapping[str, Any]) -> None:
        self._ray = connect()
        self._plan = plan
        self._actors = Actors(self._ray, plan, actors, options)
        self._watch = ClusterWatch(partial(read_free_cpus, self._ray))
        self.children: dict[int, ChildProcess] = {}
        """None: actors are no processes of ours."""
        self.owing: list[ChildProcess] = []
        self.respawned = 0
        self._tasks: dict[int, Task] = {}
        self._count = 0
        self._doubtful: dict[int, int] = {}
        """Batches during which an actor died, and the sample of each to be read alone next."""
        self._task_s = self._longest_s = 0.0
        self._died_in_a_row = 0

    @property
    def wanted(self) -> int:
        """Actors that are wanted."""
        return self._actors.wanted

    @wanted.setter
    def wanted(self, actors: int) -> None:
        self._actors.wanted = actors

    @property
    def under_way(self) -> int:
        """Tasks that were given and not answered."""
        return len(self._tasks)

    def start_epoch(self, generation: int, epoch: int) -> None:  # noqa: ARG002
        """Have all actors that are wanted."""
        self._doubtful.clear()
        self._actors.hire_missing()

    def resize(self, processes: int) -> None:
        """Have so many actors from now on; those too many finish what they have."""
        self._actors.resize(processes)

    def configure(self, setting: protocol.Setting) -> None:
        """Take stamps from now on, or no more; other settings are of memory that is shared."""
        if isinstance(setting, protocol.SetStamps):
            self._actors.stamped = setting.wanted

    def go_on(self, number: int, rest: Task | None) -> None:
        """Never called: no actor reads a part of a batch."""

    def close(self) -> None:
        """End all actors."""
        self._actors.close()
        self._actors.wanted = 0
        self._tasks.clear()

    def ask_states(self, generation: int, within_s: float) -> None:
        """Do nothing: actors are kept as they are."""

    def give(self, task: Task) -> bool:
        """Have an actor make a batch; False if all have enough to do, or memory runs short."""
        free = self._actors.with_room()
        if not free:
            return False
        self._count += 1
        self._tasks[self._count] = task
        self._ask(min(free, key=lambda reader: len(reader.calls)), self._count)
        return True

    def wait(self, until: float | None) -> Iterator[Answer | Loss] | None:
        """Wait for events and return them; None if there is none until then (``monotonic``).

        Raises:
            WorkerError: No actor can be had, or they die before they have made a batch.
            Exception: Whatever ``worker_init_fn`` or unpickling the dataset raised.
        """
        while True:
            try:
                moved, events = self._look(until)
            except OSError:  # of the object store
                self._actors.check_cluster()
                raise
            if moved or events:  # an actor that has become free can be given something
                return iter(events)
            if until is not None and clock.monotonic() >= until:
                return None

    # What is asked for

    def _ask(self, reader: Reader, number: int) -> None:
        """Ask an actor for a batch, or for the next of its samples to be read alone."""
        task = self._tasks[number]
        request, alone = task.request(), None
        if task.batch.batched and len(task.indices) > 1:
            alone = self._doubtful.get(task.batch.number)
        if alone is not None:
            request = request._replace(start=alone, indices=task.indices[alone : alone + 1])
        asked_ns = clock.monotonic_ns()
        ref = reader.actor.make.remote(request, number, self._actors.stamped)
        if not reader.calls:
            reader.since_s = clock.monotonic()
            reader.compared_s = reader.since_s if self._actors.stamped else reader.compared_s
        reader.calls.append(Call(ref, number, alone, asked_ns))

    def _ask_twice(self) -> None:
        """Ask an idle actor for the batch that is needed first, if another one is late with it.

        Whichever answer comes first counts; both have the same content.
        """
        idle = next(
            (each for each in self._actors.with_room() if not each.calls),
            None,
        )
        if idle is None or not self._task_s:
            return
        now_s = clock.monotonic()
        asked = [(each, call) for each in self._actors.ready for call in each.calls]
        for number in sorted(self._tasks, key=lambda number: self._tasks[number].batch.number):
            calls = [(each, call) for each, call in asked if call.task == number]
            if len(calls) == 1 and calls[0][1].alone is None:
                reader, call = calls[0]
                late = now_s - reader.since_s > _LATE * self._task_s
                if late or reader.calls[0] is not call:
                    self._ask(idle, number)
                    return

    # What comes back

    def _look(self, until: float | None) -> tuple[bool, list[Answer | Loss]]:
        """Wait a moment; return whether anything has come, and what of it is for others."""
        self._actors.look_at_cluster()
        left_s = _LOOK_S if until is None else min(_LOOK_S, max(0.0, until - clock.monotonic()))
        ref = self._first_answer(0.0)  # what has come while nobody looked is not late
        if ref is None:
            self._ask_twice()
            ref = self._first_answer(left_s)
        if ref is None:
            self._actors.check_presence()
            return False, list(self._kill_hung())
        if ref in self._actors.coming:
            self._actors.welcome(ref)
            return True, []
        asked = [(each, call) for each in self._actors.ready for call in each.calls]
        return True, list(self._receive(*next(each for each in asked if each[1].ref == ref)))

    def _first_answer(self, wait_s: float) -> Any:
        """Return what Ray knows an answer by that has come; None: there is none within a time."""
        refs = [call.ref for each in self._actors.ready for call in each.calls]
        refs += self._actors.coming
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
        except RayTaskError as error:  # what it made cannot be handed over
            failure = protocol.TaskError(0, RuntimeError, f"({reader}) in handing over.\n{error}")
            ended = protocol.TaskEnded(call.task, 0, None, (), failure)
        except RayError as error:
            yield from self._lose(reader, error)
            return
        reader.calls.remove(call)
        reader.since_s = clock.monotonic()
        self._actors.dismiss_idle()
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
        self._actors.batch_bytes = max(
            self._actors.batch_bytes, 1 if memory is None else memory.size
        )
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

    # What is lost

    def _lose(self, reader: Reader, error: BaseException) -> Iterator[Loss]:
        """Let another actor take the place of one that is gone, and hand back what it had to do."""
        self._actors.ready.remove(reader)
        self._actors.kill(reader)
        self.respawned += 1
        self._plan.faults.deaths += 1
        self._died_in_a_row += 1
        self._actors.check_cluster()
        if self._died_in_a_row > _DEATHS_IN_A_ROW + 2 * self.wanted:
            raise WorkerError(
                f"{self._died_in_a_row} actors died one after the other, and no batch was made "
                f"meanwhile. The last one: {error} {offers(self._ray)}."
            ) from error
        elsewhere = {call.task for each in self._actors.ready for call in each.calls}
        lost = [call for call in reader.calls if call.task in self._tasks.keys() - elsewhere]
        suspect = None
        if lost and lost[0] is reader.calls[0]:
            batch = self._tasks[lost[0].task].batch
            if lost[0].alone is not None or not batch.batched or len(batch.indices) == 1:
                suspect = batch.number, lost[0].alone or 0
            elif batch.indices:
                # Which sample it was, if any, shows when each is read alone.
                self._doubtful[batch.number] = 0
        yield Loss(reader, [self._tasks.pop(call.task) for call in lost], suspect)

    def _kill_hung(self) -> Iterator[Loss]:
        """Kill actors that get nowhere with what they do."""
        given, now_s = self._plan.timeout_s, clock.monotonic()
        limit_s = max(_HANG_S, _HANG_TASKS * self._longest_s) if given is None else given
        for reader in [each for each in self._actors.ready if each.calls and limit_s]:
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


class RayExecutor(PoolExecutor):
    """Fetches batches in so many ``actors`` of a Ray cluster.

    ``options``: Of the actors, as ``ray.remote`` takes them, in place of our own.

    Raises:
        OptionsError: Ray is not installed.
        WorkerError: No cluster can be reached, or the dataset cannot be sent to it.
    """

    def __init__(
        self,
        plan: FetchPlan,
        *,
        actors: int,
        options: Mapping[str, Any],
        pin_thread: PinThread | None = None,
        trial: CrewTrial | None = None,
    ) -> None:
        self._whole, self._options = plan, options
        # Memory of this machine can only be written here: samples travel as whole batches. Actors
        # that get nowhere are the crew's to find.
        plan = replace(plan, default_collation=False, timeout_s=0)
        super().__init__(plan, processes=actors, pin_thread=pin_thread, trial=trial)

    def _start_crew(self, processes: int) -> RayCrew:
        return RayCrew(self._whole, actors=processes, options=self._options)
