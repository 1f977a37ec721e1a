"""What a side process does with the tasks it takes."""

from __future__ import annotations

import os
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from mmap import mmap
from typing import NamedTuple, TypeAlias

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
from lightning_fastdata.types import SampleKey

_BEGAN_WITHIN_S = 0.05
"""As the first batch of the epoch waits for it."""
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


class _FirstSample(NamedTuple):
    """A sample that was read to find its layout, and is not written yet."""

    batch: int
    start: int
    """Its position in the batch, which is that of its task."""
    sample: object


@dataclass(eq=False)
class TaskRunner:
    """Does the tasks of a side process, one after the other."""

    wire: Wire
    plan: FetchPlan
    number: int
    """Of the process."""
    progress: protocol.ProgressMemory
    epoch: int | None
    """The one that ``set_epoch`` of the dataset was called with; None: it is called here."""
    forked: bool
    """It is a copy of the training process, where all lies at the same addresses."""
    stamped: bool = False
    layout: SampleLayout | None = None
    maps: dict[int, mmap] = field(default_factory=dict)
    kept: _FirstSample | None = None
    awaits_rest: bool = False
    """The last task read a first sample only. What is to become of the rest is on its way, and goes
    before all other tasks."""

    def __post_init__(self) -> None:
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
        stamps = self._watch.end() if fetcher.stamps is not None else None
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
        """Return what is read, as it is here after all that was read, within so many seconds."""
        now = self._digest(within_s)
        if self.forked:
            return protocol.StateTold(now, same=False)
        return protocol.StateTold(None, same=now is not None and now == self._began)

    def _note_state(self) -> None:
        """Note what is read as an epoch begins, where the training process cannot tell."""
        self._began = None if self.forked else self._digest(_BEGAN_WITHIN_S)

    def _digest(self, within_s: float) -> bytes | None:
        """Return what is read, as it is now; None: it cannot be compared, or nobody asks."""
        now = self.plan.state(within_s)
        return None if now is None else now.own

    def _position(self, task: protocol.TaskRequest) -> int:
        """Return the position in the batch of the sample that is being read."""
        return task.start + max(int(self.fetcher.position), 0)

    def _fetch(self, task: protocol.TaskRequest) -> _Outcome:
        steps = {"first": self._first, "rows": self._rows, "whole": self._whole}
        self.fetcher.faults.clear()  # of an attempt before
        self.progress.read(task.batch, task.start)
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
        words = self.progress.words
        alone = write_image is not None or fetcher.plan.guard.policy == "skip"
        at_once = 1 if alone else layout.rows_at_once
        for row in range(0, len(indices), at_once):
            samples = []
            for offset, index in enumerate(indices[row : row + at_once], row):
                fetcher.position = offset
                words[1] = start + offset  # as ProgressMemory.read(), without a call for each
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
        mark = partial(self.progress.read, task.batch)
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
