"""What runs inside a side process: it takes tasks, does them, and reads what it is sent."""

from __future__ import annotations

import faulthandler
import multiprocessing
import os
import random
import select
import signal
import socket
import sys
import traceback
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from mmap import mmap
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import torch

from lightning_fastdata.batches.bad_samples import NO_SAMPLES, SKIPPED
from lightning_fastdata.batches.collate import collate_samples, for_writing, use_own_memory
from lightning_fastdata.batches.keyed import own_dataset
from lightning_fastdata.batches.libraries import tell_epoch, tell_rank
from lightning_fastdata.batches.memory import (
    MisfitError,
    SampleLayout,
    create_shared_memory,
    decodes_in_place,
    layout_of,
    map_shared_memory,
    pack,
    write_leaves,
)
from lightning_fastdata.caches.cached import rest_on_parent
from lightning_fastdata.executors.fetch import Fetcher, FetchPlan
from lightning_fastdata.executors.inline import END_OF_STREAM, StreamFetcher, fetcher_of
from lightning_fastdata.executors.pool import protocol
from lightning_fastdata.executors.pool.beside import Waker
from lightning_fastdata.executors.pool.protocol import Wire, number_in, read_packet, request_in
from lightning_fastdata.host import clock
from lightning_fastdata.host.memory import keep_freed_memory
from lightning_fastdata.host.system_calls import OpenFile, die_with, open_anew, pass_over_interrupts
from lightning_fastdata.randomness.seeds import keep_own_epochs
from lightning_fastdata.sources.files import ListedFiles
from lightning_fastdata.stamps.batch_stamps import TaskWatch
from lightning_fastdata.stamps.lines import LineWatch
from lightning_fastdata.torch_internals import set_worker_info
from lightning_fastdata.types import SampleKey, repeats

_BEGAN_WITHIN_S = 0.05
"""CPU seconds for noting what is read as an epoch begins; its first batch waits for that."""
_Outcome: TypeAlias = tuple[protocol.TaskResult, tuple[int, ...]]
"""How a task ended, and descriptors of open files that go with it."""


class Inherited(NamedTuple):
    """What a fork copied into this process; empty if it was started otherwise."""

    wires: tuple[int, ...] = ()
    """Descriptors to close: the queue, wires of siblings, and the parent's end of the own wire."""
    files: tuple[OpenFile, ...] = ()
    """Files that the training process may read, with their positions when it was forked."""


def child_main(
    end: socket.socket,
    plan: FetchPlan,
    number: int,
    processes: int,
    inherited: Inherited,
    parent: int,
    epoch: int | None,
) -> None:
    """Fetch what the training process asks for until it closes the wire.

    The arguments are those of :class:`.ChildProcess`. ``parent`` is the id of the process that this
    one ends with; 0: it ends with the wire only.
    """
    open_anew(inherited.files)
    for descriptor in inherited.wires:
        os.close(descriptor)
    pass_over_interrupts()
    # A fork copies the handler of the training process, and Lightning's tells the other ranks.
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    die_with(parent)
    wire = Wire(end)
    first = wire.receive()
    if first is None:
        return
    progress_memory, stacks, bell, *queue = first[1]
    faulthandler.register(signal.SIGUSR1, file=stacks, all_threads=True, chain=False)
    plan = prepare_process(plan, number, processes)
    progress = protocol.ProgressMemory.mapped(progress_memory)
    progress.state = protocol.State.INITIALISING
    runner = TaskRunner(wire, plan, number, progress, epoch, forked=bool(inherited.wires))
    runner.waker = Waker()
    child = Child(runner, bell, *queue)
    if plan.worker_init_fn is not None:
        try:
            plan.worker_init_fn(number)
        except Exception as error:
            with suppress(OSError):  # another worker has told of its own, and the loader is closed
                text = f"in worker_init_fn({number})"
                wire.send(protocol.InitFailed(*describe_error(error, text)))
            return
    child.run()


def prepare_process(plan: FetchPlan, number: int, processes: int) -> FetchPlan:
    """Set this process up as one of ``processes`` that read a plan; return the plan it reads by."""
    tell_rank(plan.rank)
    torch.set_num_threads(1)
    cv2 = sys.modules.get("cv2")
    if cv2 is not None:
        cv2.setNumThreads(0)
    seed = plan.base_seed + number
    random.seed(seed)
    torch.default_generator.manual_seed(seed)
    # As torch seeds NumPy in its workers.
    words = [number, plan.base_seed & 0xFFFFFFFF, plan.base_seed >> 32, 0]
    np.random.seed(np.random.SeedSequence(words).generate_state(4))
    shown: Any = own_dataset(plan.dataset)
    set_worker_info(number=number, workers=processes, seed=seed, dataset=shown)
    use_own_memory()
    keep_freed_memory()
    keep_own_epochs()
    return replace(plan, collate_fn=for_writing(plan.collate_fn))


class Child:
    """A side process: it takes tasks and does them one after the other."""

    def __init__(
        self, runner: TaskRunner, bell: int, queue: int | None = None, queue_bell: int = -1
    ) -> None:
        self.runner = runner
        self.wire = runner.wire
        self.sent: deque[bytes] = deque()
        """Packets of tasks that came over the wire."""
        self.queue, self._queue_bell = queue, queue_bell
        self.closed = False
        self.files = ListedFiles(runner.plan.dataset)
        self.poller = select.epoll()
        self.poller.register(self.wire.fileno(), select.EPOLLRDHUP)
        # Bells ring for good: what counts is that they were rung again.
        rung = select.EPOLLIN | select.EPOLLET
        self.poller.register(bell, rung)
        if queue is not None:  # for each task one of the processes is woken
            self.poller.register(queue_bell, rung | select.EPOLLEXCLUSIVE)
        self._training = -1
        parent = multiprocessing.parent_process()
        # When the training process is killed, a fork of it may still hold its end of the wire.
        with suppress(OSError):  # a kernel or container that has no such descriptors
            if parent is not None and parent.pid is not None:
                self._training = os.pidfd_open(parent.pid)
                self.poller.register(self._training, select.EPOLLIN)

    def run(self) -> None:
        """Work until the training process closes the wire."""
        self.runner.progress.state = protocol.State.WAITING
        fetcher = self.runner.fetcher
        while (task := self._next_task()) is not None:
            if isinstance(fetcher, Fetcher) and fetcher.reads_ahead:
                fetcher.coming = self._coming()
            self.files.begin(task[1].indices)
            self.runner.do(*task)

    def _coming(self) -> Sequence[Any]:
        """Return the indices of the task after the present one, if that has come."""
        if not self.sent:
            return ()
        try:
            coming: Sequence[Any] = request_in(self.sent[0]).indices
        except Exception:  # the error is told when the task is taken
            return ()
        return coming

    def _next_task(self) -> tuple[int, protocol.TaskRequest] | None:
        """Wait for the next task, noted as taken; None when there will be no more."""
        runner = self.runner
        while True:
            self._read_wire(wait=runner.awaits_rest)
            if self.closed:
                return None
            if runner.awaits_rest:
                continue
            packet = self.sent.popleft() if self.sent else None
            if packet is None and self.queue is not None:
                packet = read_packet(self.queue)
            if packet is None:
                if self._training in dict(self.poller.poll()):
                    return None
                continue
            number, failure = number_in(packet), None
            try:
                task = request_in(packet)
            except Exception as error:
                failure = protocol.TaskError(0, *describe_error(error, "in unpickling indices"))
            runner.progress.state = number
            if failure is not None:
                runner.send(protocol.TaskEnded(number, 0, None, (), failure))
                continue
            # What the task needs was sent before it was queued, but may still be on its way.
            self._read_wire()
            while self._lacks(task) and not self.closed:
                self._read_wire(wait=True)
            return number, task

    def _lacks(self, task: protocol.TaskRequest) -> bool:
        return (task.kind == "rows" and self.runner.layout is None) or (
            task.slot is not None and task.slot not in self.runner.maps
        )

    def _read_wire(self, *, wait: bool = False) -> None:
        """Take in what the training process has sent on the wire."""
        while not self.closed:
            try:
                received = self.wire.receive(wait=wait)
            except BlockingIOError:
                return
            except OSError:
                received = None
            if received is None:
                self.closed = True
                return
            wait = False
            self._handle(*received)

    def _handle(self, message: protocol.ToChild, descriptors: list[int]) -> None:
        runner = self.runner
        match message:
            case protocol.GiveTask(packet):
                self.sent.append(packet)
            case protocol.GoOn(rest):
                runner.awaits_rest = False
                if rest is None:
                    runner.kept = None
                else:
                    self.sent.appendleft(rest)
            case protocol.MapSlot(number):
                runner.maps[number] = map_shared_memory(descriptors[0])
                os.close(descriptors[0])
            case protocol.DropSlot(number):
                runner.maps.pop(number, None)
            case protocol.SetLayout(layout):
                runner.layout = layout
            case protocol.SetStamps(wanted):
                runner.stamped = wanted
            case protocol.AskTaken(inquiry):
                # The training process cannot read this from the memory later: by then an answer may
                # be on its way, and the next task noted.
                runner.send(protocol.TaskTaken(inquiry, runner.progress.state))
            case protocol.AskState(within_s):
                runner.send(runner.state(within_s))
            case protocol.Retire():
                if self.queue is not None:
                    self.poller.unregister(self._queue_bell)
                    self.queue = None
                runner.send(protocol.Retired())


def describe_error(error: BaseException, where: str) -> tuple[type[BaseException], str]:
    """Return the class of an error, and where it was raised with its traceback."""
    return type(error), f"{where}.\n{''.join(traceback.format_exception(error))}"


def _write_image_of(
    dataset: Any, layout: SampleLayout, memory: mmap, rows: int, epoch: int
) -> Callable[[int, int], None] | None:
    """Return what decodes the sample of an index into a row of the batch, if that is possible.

    ``memory`` holds a batch of ``rows`` samples.
    """
    if not decodes_in_place(dataset):
        return None
    if [field.shape for field in layout.fields] != [dataset.sample_shape, ()]:
        return None
    images, targets = (tensor.numpy() for tensor in layout.tensors(memory, rows))
    seed, length = dataset.seed, len(dataset)

    def write(row: int, index: int) -> None:
        key = SampleKey(seed, epoch, int(index) % length + repeats(index))
        targets[row] = dataset.write_into(index, images[row], key=key)

    return write


class _FirstSample(NamedTuple):
    """A sample that was read to find its layout, and is not written yet."""

    batch: int
    start: int
    """Position of the sample in the batch, at which its task starts."""
    sample: object


@dataclass(eq=False)
class TaskRunner:
    """Does the tasks of a side process, one after the other."""

    wire: Wire
    plan: FetchPlan
    number: int
    """Number of the process."""
    progress: protocol.ProgressMemory
    epoch: int | None
    """Epoch that ``set_epoch`` of the dataset was called with last; None: it is called here."""
    forked: bool
    """Whether this is a copy of the training process, with everything at the same addresses."""
    stamped: bool = False
    waker: Waker | None = None
    """What keeps this process its share of the CPUs; None: nothing has to."""
    layout: SampleLayout | None = None
    maps: dict[int, mmap] = field(default_factory=dict)
    kept: _FirstSample | None = None
    awaits_rest: bool = False
    """Whether the last task read a first sample only. A message on the rest is on its way then, and
    goes before all other tasks."""

    def __post_init__(self) -> None:
        rest_on_parent(self.plan.dataset)
        self.fetcher = fetcher_of(self.plan)
        self._watch = TaskWatch(self.number, LineWatch(), alone=True)
        self._note_state()

    def send(self, message: protocol.FromChild, files: tuple[int, ...] = ()) -> None:
        """Send a message to the training process, and end if that is gone."""
        try:
            self.wire.send(message, files)
        except OSError:
            os._exit(0)

    def do(self, number: int, task: protocol.TaskRequest) -> None:
        """Do a task, and send how it ended."""
        fetcher = self.fetcher
        began_ns = clock.monotonic_ns()
        fetcher.stamps = self._watch if self.stamped else None
        if fetcher.stamps is not None:
            self._watch.begin()
        result: protocol.TaskResult
        fetcher.faults.clear()
        files: tuple[int, ...] = ()
        where = f"in set_epoch({task.epoch})"
        try:
            if task.generation < self.progress.generation:
                self.kept = None
                result = protocol.OldEpoch()
            else:
                if task.epoch != self.epoch:
                    tell_epoch(self.plan.dataset, task.epoch)
                    self.epoch = task.epoch
                    self._note_state()
                where = ""
                result, files = fetcher.attempt(partial(self._fetch, task))
        except MisfitError:
            result = protocol.Misfit()
        except BaseException as error:  # sys.exit(), too, is the fault of one sample
            report = describe_error(error, where or fetcher.where(task.indices))
            result = protocol.TaskError(self._position(task), *report)
        self.progress.read(-1, -1)
        spent_ns = clock.monotonic_ns() - began_ns
        stamps = None
        if fetcher.stamps is not None:
            stamps = self._watch.end()._replace(drew=fetcher.draws)
        faults = tuple(
            fault._replace(position=task.start + fault.position) for fault in fetcher.faults
        )
        try:
            self.send(protocol.TaskEnded(number, spent_ns, stamps, faults, result), files)
            self.awaits_rest = isinstance(result, protocol.FirstSample)
        except Exception as error:  # something in it cannot be pickled, and nothing was sent
            text = describe_error(error, fetcher.where(task.indices))[1]
            if isinstance(result, protocol.TaskError):
                text = result.text
            failure = protocol.TaskError(self._position(task), RuntimeError, text)
            self.send(protocol.TaskEnded(number, spent_ns, stamps, faults, failure))
        for descriptor in files:
            os.close(descriptor)

    def state(self, within_s: float) -> protocol.StateTold:
        """Return the state of what is read, found within ``within_s`` CPU seconds."""
        now = self._digest(within_s)
        if self.forked:
            return protocol.StateTold(now, same=False)
        return protocol.StateTold(None, same=now is not None and now == self._began)

    def _note_state(self) -> None:
        """Note the state of what is read as an epoch begins, where others cannot tell."""
        self._began = None if self.forked else self._digest(_BEGAN_WITHIN_S)

    def _digest(self, within_s: float) -> bytes | None:
        """Return a digest of what is read now; None: it cannot be, or is not, compared."""
        now = self.plan.state(within_s)
        return None if now is None else now.own

    def _position(self, task: protocol.TaskRequest) -> int:
        """Return the position in the batch of the sample that is being read."""
        return task.start + max(int(self.fetcher.position), 0)

    def _fetch(self, task: protocol.TaskRequest) -> _Outcome:
        steps = {"first": self._first, "rows": self._rows, "whole": self._whole}
        self.fetcher.faults.clear()  # those of an attempt before
        self.progress.read(task.batch, task.start)
        return steps[task.kind](task)

    @property
    def _by_index(self) -> Fetcher:
        """The fetcher of single samples; no task of a stream asks for them."""
        assert isinstance(self.fetcher, Fetcher)
        return self.fetcher

    def _first(self, task: protocol.TaskRequest) -> _Outcome:
        fetcher = self._by_index
        fetcher.position = 0
        sample = fetcher.sample(task.indices[0], task.epoch)
        skipped = sample is SKIPPED
        if skipped:
            sample = fetcher.another(task.indices[0], task.epoch)
        fetcher.position = -1
        layout = layout_of(sample, collate_samples)
        if layout is not None and not skipped:
            self.kept = _FirstSample(task.batch, task.start, sample)
        return protocol.FirstSample(layout), ()

    def _rows(self, task: protocol.TaskRequest) -> _Outcome:
        _, _, batch, epoch, start, indices, rows, slot = task
        layout = self.layout
        if layout is None or slot is None:
            raise MisfitError
        memory = self.maps[slot]
        fetcher, stamps = self._by_index, self.fetcher.stamps
        kept, self.kept = self.kept, None
        has_first = kept is not None and (kept.batch, kept.start) == (batch, start)
        write_image = _write_image_of(fetcher.dataset, layout, memory, rows, epoch)
        writers = layout.writers(memory, rows, start, start + len(indices))
        alone = write_image is not None or fetcher.plan.guard.policy == "skip"
        at_once = 1 if alone else layout.rows_at_once
        for row in range(0, len(indices), at_once):
            samples = []
            for offset, index in enumerate(indices[row : row + at_once], row):
                fetcher.position = offset
                self._reads(batch, start + offset)
                if has_first and kept is not None:
                    samples.append(kept.sample)
                    has_first, kept = False, None
                elif write_image is None:
                    sample = fetcher.sample(index, epoch)
                    if sample is not SKIPPED:
                        samples.append(sample)
                else:
                    began_ns = clock.monotonic_ns()
                    try:
                        write_image(start + offset, index)
                        failed = None
                    except Exception as error:
                        failed = error
                    if failed is not None:
                        write = partial(write_image, start + offset)
                        fetcher.rescued(failed, write, index, epoch)
                    if stamps is not None:
                        stamps.read(index, began_ns)
            if samples:
                began_ns = clock.monotonic_ns()
                layout.write(samples, writers, row)
                if stamps is not None:
                    stamps.collated(began_ns)
        return protocol.RowsWritten(), ()

    def _reads(self, batch: int, position: int) -> None:
        """Note which sample is being read."""
        self.progress.read(batch, position)
        if self.waker is not None and clock.monotonic_ns() >= self.waker.due_ns:
            self.waker.mark()
            self.progress.starved = self.waker.waits

    def _whole(self, task: protocol.TaskRequest) -> _Outcome:
        mark = partial(self._reads, task.batch)
        fetcher = self.fetcher
        result = fetcher.batch(task.indices, task.epoch, mark)
        if isinstance(fetcher, StreamFetcher) and result is END_OF_STREAM:
            return protocol.StreamEnd(), ()
        if result is NO_SAMPLES:
            return protocol.NothingLeft(), ()
        began_ns = clock.monotonic_ns()
        collated, files = self._packed(result, task.slot)
        if fetcher.stamps is not None:
            fetcher.stamps.collated(began_ns)
        if isinstance(fetcher, StreamFetcher):
            collated = collated._replace(note=fetcher.told())
        return collated, files

    def _packed(
        self, result: object, slot: int | None
    ) -> tuple[protocol.Collated, tuple[int, ...]]:
        packed, leaves = pack(result)
        mapping = None if slot is None else self.maps.get(slot)
        descriptors: tuple[int, ...] = ()
        memory: mmap | bytearray = bytearray(1)
        if packed.size_bytes:
            if mapping is None or len(mapping) < packed.size_bytes:
                descriptors = (create_shared_memory(packed.size_bytes),)
                mapping = map_shared_memory(descriptors[0])
            memory = mapping
        write_leaves(packed, leaves, memory)
        return protocol.Collated(packed), descriptors
