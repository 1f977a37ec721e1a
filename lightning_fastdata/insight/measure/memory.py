"""Looks at the memory of a training's processes, now and then."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from lightning_fastdata.host.memory import read_host_memory
from lightning_fastdata.host.usage import (
    Pages,
    read_alone,
    read_batch_files,
    read_mapped_bytes,
    read_own_bytes,
    read_pages,
)
from lightning_fastdata.insight.measure.few import Few
from lightning_fastdata.insight.model.memory import Growth, MemorySeen
from lightning_fastdata.sources.attributes import HeldObjects, held_objects


class MemoryMeter:
    """What processes took when they were first seen, and what they have come to take.

    Args:
        own_bytes: Of a process, memory that belongs to no file; in some 15 us.
        pages: Of a process; in some 10 ms.
        left_bytes: What the machine or the container has left.
        batch_files: Batches in shared memory that processes have, by file.
        mapped_bytes: Of files, in this process.
        alone: Which part of some addresses no other process has; in some 0.3 ms.
    """

    def __init__(
        self,
        own_bytes: Callable[[int], int | None] = read_own_bytes,
        pages: Callable[[int], Pages | None] = read_pages,
        left_bytes: Callable[[], int] = lambda: read_host_memory().available_bytes,
        batch_files: Callable[[Iterable[int]], Mapping[Any, int]] = read_batch_files,
        mapped_bytes: Callable[[], int] = read_mapped_bytes,
        alone: Callable[[int, Sequence[int]], float | None] = read_alone,
    ) -> None:
        self._own_bytes, self._pages, self._left_bytes = own_bytes, pages, left_bytes
        self._batch_files, self._files_first = batch_files, batch_files([os.getpid()])
        self._alone, self._parts = alone, dict[str, float]()
        self._shared = 0
        self._mapped = mapped_bytes()
        """Of libraries, as workers are not asked yet: what they have in common counts once."""
        self._first: dict[int, int] = {}
        self._here: int | None = None
        """What this process took when workers were first seen: with that they began."""
        self._read: dict[int, Pages] = {}
        self._growth = Few[Growth]()
        self._elements: dict[str, int] = {}
        self._most = self._now = 0
        self._crew = frozenset[int]()
        """The workers that were there at first: others may be of another loader, or come later."""
        self._kept, self._joined = True, False

    def look(self, workers: Sequence[int], *, step: int, epoch: int) -> None:
        """See how large the workers are, or this process if there are none."""
        if workers:
            self._crew = self._crew or frozenset(workers)
            self._kept &= self._crew <= set(workers)
            self._joined |= not self._crew >= set(workers)
            self._now, self._most = len(workers), max(self._most, len(workers))
        if workers and self._here is None:
            self._here = self._own_bytes(os.getpid())
        processes = workers or ([] if self._most else [os.getpid()])
        sizes = {each: self._own_bytes(each) for each in processes}
        known = {each: size for each, size in sizes.items() if size is not None}
        grown = {each: size - self._first.setdefault(each, size) for each, size in known.items()}
        if grown:
            crew = [size for each, size in grown.items() if each in self._crew]
            of_first = sum(crew) // len(crew) if crew else None
            self._growth.add(Growth(step, epoch, sum(grown.values()) // len(grown), of_first))

    def read(self, workers: Sequence[int]) -> int | None:
        """Look at the pages of all processes; return what they take together, if it is known."""
        read = {each: self._pages(each) for each in (os.getpid(), *workers)}
        now = {each: pages for each, pages in read.items() if pages is not None}
        files = self._batch_files(read)
        self._shared = sum(files[each] for each in files.keys() - self._files_first.keys())
        self._read = now if workers or not self._most else {**self._read, **now}
        return sum(pages.pss_bytes for pages in now.values()) if now else None

    @property
    def copied_bytes(self) -> int:
        """Of a worker, the mean: what it had in common with this process, and has of its own."""
        of = []
        for process in self._read.keys() & self._first.keys() - {os.getpid()}:
            pages, first = self._read[process], self._first[process]
            began = first if self._here is None else min(first, self._here)
            of.append(pages.own_bytes - max(0, pages.anonymous_bytes - began))
        return max(0, sum(of) // len(of)) if of else 0

    def _own_parts(self, objects: Sequence[HeldObjects]) -> dict[str, float]:
        """Return of which part of each object workers have pages of their own.

        Of one worker that is not known: what this process writes to leaves the worker alone.
        """
        workers = [each for each in self._read if each in self._first and each != os.getpid()]
        for held in objects if len(workers) > 1 else ():
            parts = [self._alone(each, held.places) for each in workers]
            known = [part for part in parts if part is not None]
            if known:
                self._parts[held.name] = sum(known) / len(known)
        return dict(self._parts)

    def seen(self, dataset: object, *, forked: bool) -> MemorySeen:
        """Return what was seen so far of a training that reads a dataset."""
        objects = held_objects(dataset)
        self._elements = self._elements or {held.name: held.elements for held in objects}
        growing = (
            held.name
            for held in objects
            if held.elements > self._elements.get(held.name, 0)
            or (self._most and not held.elements)
        )
        return MemorySeen(
            workers=self._now,
            forked=forked,
            copied_bytes=self.copied_bytes,
            own_parts=self._own_parts(objects),
            growth=tuple(self._growth),
            kept=self._kept,
            joined=self._joined,
            shared_bytes=self._shared,
            file_bytes=max(0, sum(each.file_bytes for each in self._read.values()) - self._mapped),
            objects=objects,
            growing=next(growing, ""),
            left_bytes=self._left_bytes(),
        )
