"""Looks at the memory of a training's processes, now and then."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence

from lightning_fastdata.host.memory import read_host_memory
from lightning_fastdata.host.usage import Pages, read_memory_files, read_own_bytes, read_pages
from lightning_fastdata.insight.measure.few import Few
from lightning_fastdata.insight.model.memory import Growth, MemorySeen
from lightning_fastdata.sources.attributes import held_objects


class MemoryMeter:
    """What processes took when they were first seen, and what they have come to take.

    Args:
        own_bytes: Of a process, memory that belongs to no file; in some 15 us.
        pages: Of a process; in some 10 ms.
        left_bytes: What the machine or the container has left.
        memory_files: Of the machine: a batch on its way may be mapped by nobody.
    """

    def __init__(
        self,
        own_bytes: Callable[[int], int | None] = read_own_bytes,
        pages: Callable[[int], Pages | None] = read_pages,
        left_bytes: Callable[[], int] = lambda: read_host_memory().available_bytes,
        memory_files: Callable[[], int] = read_memory_files,
    ) -> None:
        self._own_bytes, self._pages, self._left_bytes = own_bytes, pages, left_bytes
        self._memory_files, self._files_first = memory_files, memory_files()
        self._shared = 0
        self._mapped: int | None = None
        """Of files, when it was first looked at: of libraries, which every program has."""
        self._first: dict[int, int] = {}
        self._here: int | None = None
        """What this process took when workers were first seen: with that they began."""
        self._read: dict[int, Pages] = {}
        self._growth = Few[Growth]()
        self._elements: dict[str, int] = {}
        self._most = self._epoch = 0
        self._kept = True

    def look(self, workers: Sequence[int], *, step: int, epoch: int) -> None:
        """See how large the workers are, or this process if there are none."""
        new = self._first.keys().isdisjoint(workers)
        self._kept &= epoch == self._epoch or not workers or not new
        self._epoch, self._most = epoch, max(self._most, len(workers))
        if workers and self._here is None:
            self._here = self._own_bytes(os.getpid())
        processes = workers or ([] if self._most else [os.getpid()])
        sizes = {each: self._own_bytes(each) for each in processes}
        known = {each: size for each, size in sizes.items() if size is not None}
        grown = [size - self._first.setdefault(each, size) for each, size in known.items()]
        if grown:
            self._growth.add(Growth(step, epoch, sum(grown) // len(grown)))

    def read(self, workers: Sequence[int]) -> int | None:
        """Look at the pages of all processes; return what they take together, if it is known."""
        read = {each: self._pages(each) for each in (os.getpid(), *workers)}
        now = {each: pages for each, pages in read.items() if pages is not None}
        self._shared = max(0, self._memory_files() - self._files_first)
        self._read = now if workers or not self._most else {**self._read, **now}
        if self._mapped is None:
            self._mapped = self._in_files()
        return sum(pages.pss_bytes for pages in now.values()) if now else None

    def _in_files(self) -> int:
        return sum(each.file_bytes for each in self._read.values())

    @property
    def copied_bytes(self) -> int:
        """Of a worker, the mean: what it had in common with this process, and has of its own."""
        of = []
        for process in self._read.keys() & self._first.keys() - {os.getpid()}:
            pages, first = self._read[process], self._first[process]
            began = first if self._here is None else min(first, self._here)
            of.append(pages.own_bytes - max(0, pages.anonymous_bytes - began))
        return max(0, sum(of) // len(of)) if of else 0

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
            workers=self._most,
            forked=forked,
            copied_bytes=self.copied_bytes,
            growth=tuple(self._growth),
            kept=self._kept,
            shared_bytes=self._shared,
            file_bytes=max(0, self._in_files() - (self._mapped or 0)),
            objects=objects,
            growing=next(growing, ""),
            left_bytes=self._left_bytes(),
        )
