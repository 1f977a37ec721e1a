"""What one thread of a side process does with the tasks it takes."""

from __future__ import annotations

import os
import time
import traceback
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any, Final, TypeAlias

from lightning_fastdata.batches.collate import collate_samples
from lightning_fastdata.batches.layout import MisfitError, layout_of
from lightning_fastdata.batches.packed import pack, write_leaves
from lightning_fastdata.batches.slots import create_shared_memory, map_shared_memory
from lightning_fastdata.executors.fetch import write_image_of
from lightning_fastdata.executors.stream_fetch import END_OF_STREAM, fetcher_of
from lightning_fastdata.stamps.batch_stamps import TaskWatch

if TYPE_CHECKING:
    from lightning_fastdata.executors.pool.child import Side

_Reply: TypeAlias = tuple[tuple[Any, ...], tuple[int, ...]]
"""A message without its number, and open files that go with it."""
MARK_WORDS: Final = 3
"""int64 numbers per thread in the progress memory: the batch and the position it works on, and the
task it took last. Tasks are counted from 1; what the first thread has there before it takes one
says how far the process has got."""
STARTING: Final = -2
INITIALISING: Final = -1
"""It shows its stacks when it is asked."""
WAITING: Final = 0
"""It takes tasks."""


def report_of(error: BaseException, where: str) -> tuple[type, str]:
    """Return what the training process is told of an error."""
    return type(error), f"{where}.\n{''.join(traceback.format_exception(error))}"


class Work:
    """One thread of a side process."""

    def __init__(self, side: Side, number: int) -> None:
        self.side = side
        self.number = number
        self.mark_at = number * MARK_WORDS
        alone = len(side.marks) == MARK_WORDS + 1
        self.fetcher: Any = fetcher_of(side.plan, keyed=alone)
        self.stamps = TaskWatch(side.number, number, side.operations, side.lines, alone=alone)

    def do(self, task: tuple[Any, ...]) -> None:
        """Do a task, and say so."""
        number, kind, generation, batch, epoch, start, indices, rows, slot = task
        began = time.monotonic_ns()
        self.fetcher.stamps = self.stamps if self.side.stamped else None
        if self.side.stamped:
            self.stamps.begin()
        work: Callable[[], _Reply]
        if kind == "rows":
            work = partial(self._rows, batch, epoch, start, indices, rows, slot)
        elif kind == "first":
            work = partial(self._first, batch, epoch, start, indices)
        else:
            work = partial(self._whole, batch, epoch, indices, slot)
        reply: tuple[Any, ...]
        files: tuple[int, ...] = ()
        where = f"in set_epoch({epoch})"
        try:
            wanted = self.side.begin_epoch(self.fetcher.dataset, generation, epoch)
            where = ""
            if not wanted:
                self.side.kept.pop((batch, start), None)
            reply, files = self.fetcher.attempt(work) if wanted else (("stale",), ())
        except MisfitError:
            reply = ("misfit",)
        except BaseException as error:  # sys.exit(), too, is the fault of one sample
            at = max(self.fetcher.position, 0)
            where = where or self.fetcher.where(indices)
            reply = ("error", start + at, *report_of(error, where))
        self._mark(-1, -1)
        spent = time.monotonic_ns() - began
        stamps = self.stamps.end() if self.fetcher.stamps is not None else None
        if reply[0] == "layout":
            self.side.asked.append((batch, start))
        try:
            self.side.say((reply[0], number, spent, stamps, *reply[1:]), files)
        except Exception as error:  # something in it cannot be pickled, and nothing was said
            if reply[0] == "layout":
                self.side.asked.pop()
            text = report_of(error, self.fetcher.where(indices))[1]
            if reply[0] == "error":
                text = reply[-1]
            at = start + max(self.fetcher.position, 0)
            self.side.say(("error", number, spent, stamps, at, RuntimeError, text))
        for descriptor in files:
            os.close(descriptor)

    def _mark(self, batch: int, position: int) -> None:
        self.side.marks[self.mark_at + 1] = position
        self.side.marks[self.mark_at] = batch

    def _first(self, batch: int, epoch: int, start: int, indices: Any) -> _Reply:
        self.fetcher.position = 0
        self._mark(batch, start)
        sample = self.fetcher.sample(indices[0], epoch)
        self.fetcher.position = -1
        layout = layout_of(sample, collate_samples)
        if layout is not None:
            self.side.kept[batch, start] = sample
        return ("layout", layout), ()

    def _rows(
        self, batch: int, epoch: int, start: int, indices: Any, rows: int, slot: int
    ) -> _Reply:
        layout = self.side.layout
        if layout is None:
            raise MisfitError
        memory = self.side.maps[slot]
        fetcher, kept, stamps = self.fetcher, self.side.kept, self.fetcher.stamps
        write_image = write_image_of(fetcher.dataset, layout, memory, rows, epoch)
        writers = layout.writers(memory, rows, start, start + len(indices))
        self._mark(batch, start)
        marks, position_at = self.side.marks, self.mark_at + 1
        at_once = 1 if write_image is not None else layout.rows_at_once
        for row in range(0, len(indices), at_once):
            samples = []
            for offset, index in enumerate(indices[row : row + at_once], row):
                fetcher.position = offset
                marks[position_at] = start + offset
                sample = kept.pop((batch, start + offset), kept) if kept else kept
                if sample is not kept:
                    samples.append(sample)
                elif write_image is None:
                    samples.append(fetcher.sample(index, epoch))
                else:
                    began_ns = time.monotonic_ns()
                    write_image(index, start + offset)
                    if stamps is not None:
                        stamps.read(index, began_ns)
            if samples:
                began_ns = time.monotonic_ns()
                layout.write(samples, writers, row)
                if stamps is not None:
                    stamps.collated(began_ns)
        return ("rows",), ()

    def _whole(self, batch: int, epoch: int, indices: Any, slot: int | None) -> _Reply:
        self._mark(batch, 0)
        result = self.fetcher.batch(indices, epoch, lambda at: self._mark(batch, at))
        if result is END_OF_STREAM:
            return ("end",), ()
        began_ns = time.monotonic_ns()
        reply = self._packed(result, slot)
        if self.fetcher.stamps is not None:
            self.fetcher.stamps.collated(began_ns)
        return reply

    def _packed(self, result: Any, slot: int | None) -> _Reply:
        packed, leaves = pack(result)
        if not packed.size_bytes:
            write_leaves(packed, leaves, bytearray(1))
            return ("whole", packed, None), ()
        mapping = self.side.maps.get(slot) if slot is not None else None
        if mapping is not None and len(mapping) >= packed.size_bytes:
            write_leaves(packed, leaves, mapping)
            return ("whole", packed, slot), ()
        descriptor = create_shared_memory(packed.size_bytes)
        write_leaves(packed, leaves, map_shared_memory(descriptor))
        return ("whole", packed, None), (descriptor,)
