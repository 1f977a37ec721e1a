"""What one thread of a side process does with the tasks it takes."""

from __future__ import annotations

import os
import threading
import traceback
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from mmap import mmap
from typing import TypeAlias

from lightning_fastdata.batches.bad_samples import NO_SAMPLES, SKIPPED
from lightning_fastdata.batches.collate import collate_samples
from lightning_fastdata.batches.layout import (
    MisfitError,
    SampleLayout,
    decodes_in_place,
    layout_of,
)
from lightning_fastdata.batches.libraries import tell_epoch
from lightning_fastdata.batches.packed import pack, write_leaves
from lightning_fastdata.batches.slots import create_shared_memory, map_shared_memory
from lightning_fastdata.executors.fetch import Fetcher, FetchPlan
from lightning_fastdata.executors.inline import END_OF_STREAM, StreamFetcher, fetcher_of
from lightning_fastdata.executors.pool import protocol
from lightning_fastdata.executors.pool.wire import Wire
from lightning_fastdata.host import clock
from lightning_fastdata.stamps.batch_stamps import TaskWatch
from lightning_fastdata.stamps.lines import LineWatch
from lightning_fastdata.stamps.operations import OperationWatch
from lightning_fastdata.types import SampleKey

_Outcome: TypeAlias = tuple[protocol.TaskResult, tuple[int, ...]]
"""How a task ended, and open files that go with it."""


def describe_error(error: BaseException, where: str) -> tuple[type[BaseException], str]:
    """Return the class of an error, and where it was raised with its traceback."""
    return type(error), f"{where}.\n{''.join(traceback.format_exception(error))}"


def _write_image_of(
    dataset: object, layout: SampleLayout, memory: mmap, rows: int, epoch: int
) -> Callable[[int, int], None] | None:
    """Return what decodes sample ``index`` straight into a row of the batch, if that is possible.

    ``memory`` is that of a batch of ``rows`` samples.
    """
    if not decodes_in_place(dataset):
        return None
    if [field.shape for field in layout.fields] != [dataset.sample_shape, ()]:
        return None
    images, targets = (tensor.numpy() for tensor in layout.tensors(memory, rows))
    seed, length = dataset.seed, len(dataset)

    def write(index: int, row: int) -> None:
        key = SampleKey(seed, epoch, int(index) % length)
        targets[row] = dataset.write_into(index, images[row], key=key)

    return write


def _at_row(write_image: Callable[[int, int], None], row: int, index: int) -> None:
    write_image(index, row)


@dataclass(eq=False)
class SharedState:
    """What the threads of a side process share."""

    wire: Wire
    plan: FetchPlan
    number: int
    """Of the process."""
    progress: protocol.ProgressMemory
    epoch: int | None
    """The one that ``set_epoch`` of the dataset was called with; None: it is called here."""
    stamped: bool = False
    layout: SampleLayout | None = None
    maps: dict[int, mmap] = field(default_factory=dict)
    first_samples: dict[tuple[int, int], object] = field(default_factory=dict)
    """By batch and position: read to find their layout, and not yet written."""
    awaiting_rest: deque[tuple[int, int]] = field(default_factory=deque)
    """Parts of batches, likewise, of which only the first sample was read. What is to become of the
    rest is on its way, and goes before what waits in the queue."""

    def __post_init__(self) -> None:
        self.operations = OperationWatch(self.plan.dataset)
        self.lines = LineWatch()
        self._epoch_lock = threading.Lock()

    def begin_epoch(self, generation: int, epoch: int) -> bool:
        """Tell the dataset the epoch of a task; False if the task is one of an epoch that is over.

        Tasks of an older epoch that other threads took before do not turn it back.
        """
        with self._epoch_lock:
            if generation < self.progress.generation:
                return False
            if epoch != self.epoch:
                tell_epoch(self.plan.dataset, epoch)
                self.epoch = epoch
            return True

    def send(self, message: protocol.FromChild, files: tuple[int, ...] = ()) -> None:
        """Send a message to the training process, and end if that is gone."""
        try:
            self.wire.send(message, files)
        except OSError:
            os._exit(0)


class TaskThread:
    """One thread of a side process."""

    def __init__(self, shared: SharedState, number: int) -> None:
        self.shared = shared
        self.number = number
        alone = shared.progress.threads == 1
        self.fetcher: Fetcher | StreamFetcher = fetcher_of(shared.plan, keyed=alone)
        self.stamps = TaskWatch(shared.number, number, shared.operations, shared.lines, alone=alone)

    def do(self, number: int, task: protocol.TaskRequest) -> None:
        """Do a task, and send how it ended."""
        shared, fetcher = self.shared, self.fetcher
        began_ns = clock.monotonic_ns()
        fetcher.stamps = self.stamps if shared.stamped else None
        if fetcher.stamps is not None:
            self.stamps.begin()
        result: protocol.TaskResult
        fetcher.faults.clear()
        files: tuple[int, ...] = ()
        where = f"in set_epoch({task.epoch})"
        try:
            wanted = shared.begin_epoch(task.generation, task.epoch)
            where = ""
            if wanted:
                result, files = fetcher.attempt(partial(self._fetch, task))
            else:
                shared.first_samples.pop((task.batch, task.start), None)
                result = protocol.OldEpoch()
        except MisfitError:
            result = protocol.Misfit()
        except BaseException as error:  # sys.exit(), too, is the fault of one sample
            report = describe_error(error, where or fetcher.where(task.indices))
            result = protocol.TaskError(self._position(task), *report)
        shared.progress.read(self.number, -1, -1)
        spent_ns = clock.monotonic_ns() - began_ns
        stamps = self.stamps.end() if fetcher.stamps is not None else None
        awaits_rest = isinstance(result, protocol.FirstSample)
        if awaits_rest:
            shared.awaiting_rest.append((task.batch, task.start))
        faults = tuple(
            fault._replace(position=task.start + fault.position) for fault in fetcher.faults
        )
        try:
            shared.send(protocol.TaskEnded(number, spent_ns, stamps, faults, result), files)
        except Exception as error:  # something in it cannot be pickled, and nothing was sent
            if awaits_rest:
                shared.awaiting_rest.pop()
            text = describe_error(error, fetcher.where(task.indices))[1]
            if isinstance(result, protocol.TaskError):
                text = result.text
            failure = protocol.TaskError(self._position(task), RuntimeError, text)
            shared.send(protocol.TaskEnded(number, spent_ns, stamps, faults, failure))
        for descriptor in files:
            os.close(descriptor)

    def _position(self, task: protocol.TaskRequest) -> int:
        """Return the position in the batch of the sample that is being read."""
        return task.start + max(int(self.fetcher.position), 0)

    def _fetch(self, task: protocol.TaskRequest) -> _Outcome:
        steps = {"first": self._first, "rows": self._rows, "whole": self._whole}
        self.fetcher.faults.clear()  # of an attempt before
        self.shared.progress.read(self.number, task.batch, task.start)
        return steps[task.kind](task)

    @property
    def _by_index(self) -> Fetcher:
        """What reads single samples: no task of a stream asks for them."""
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
            self.shared.first_samples[task.batch, task.start] = sample
        return protocol.FirstSample(layout), ()

    def _rows(self, task: protocol.TaskRequest) -> _Outcome:
        _, _, batch, epoch, start, indices, rows, slot = task
        layout = self.shared.layout
        if layout is None or slot is None:
            raise MisfitError
        memory = self.shared.maps[slot]
        fetcher, kept, stamps = self._by_index, self.shared.first_samples, self.fetcher.stamps
        write_image = _write_image_of(fetcher.dataset, layout, memory, rows, epoch)
        writers = layout.writers(memory, rows, start, start + len(indices))
        # As ProgressMemory.read(), without a call for each sample.
        words, position_at = self.shared.progress.words, self.number * protocol.THREAD_WORDS + 1
        alone = write_image is not None or fetcher.plan.guard.policy == "skip"
        at_once = 1 if alone else layout.rows_at_once
        for row in range(0, len(indices), at_once):
            samples = []
            for offset, index in enumerate(indices[row : row + at_once], row):
                fetcher.position = offset
                words[position_at] = start + offset
                sample = kept.pop((batch, start + offset), kept) if kept else kept
                if sample is not kept:
                    samples.append(sample)
                elif write_image is None:
                    sample = fetcher.sample(index, epoch)
                    if sample is not SKIPPED:
                        samples.append(sample)
                else:
                    began_ns = clock.monotonic_ns()
                    try:
                        write_image(index, start + offset)
                        failed = None
                    except Exception as error:
                        failed = error
                    if failed is not None:
                        write = partial(_at_row, write_image, start + offset)
                        fetcher.rescued(failed, write, index, epoch)
                    if stamps is not None:
                        stamps.read(index, began_ns)
            if samples:
                began_ns = clock.monotonic_ns()
                layout.write(samples, writers, row)
                if stamps is not None:
                    stamps.collated(began_ns)
        return protocol.RowsWritten(), ()

    def _whole(self, task: protocol.TaskRequest) -> _Outcome:
        mark = partial(self.shared.progress.read, self.number, task.batch)
        fetcher = self.fetcher
        result = fetcher.batch(task.indices, task.epoch, mark)
        if isinstance(fetcher, StreamFetcher) and result is END_OF_STREAM:
            return protocol.StreamEnd(fetcher.told()), ()
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
        mapping = None if slot is None else self.shared.maps.get(slot)
        descriptors: tuple[int, ...] = ()
        memory: mmap | bytearray = bytearray(1)
        if packed.size_bytes:
            if mapping is None or len(mapping) < packed.size_bytes:
                descriptors = (create_shared_memory(packed.size_bytes),)
                mapping = map_shared_memory(descriptors[0])
            memory = mapping
        write_leaves(packed, leaves, memory)
        return protocol.Collated(packed), descriptors
