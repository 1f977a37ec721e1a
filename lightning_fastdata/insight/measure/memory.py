"""Looks at the memory of a training's processes, now and then."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any, Final, TypeVar

from lightning_fastdata.host import usage
from lightning_fastdata.host.memory import read_host_memory
from lightning_fastdata.host.usage import Pages
from lightning_fastdata.insight.model.memory import Look, MemorySeen
from lightning_fastdata.sources.attributes import HeldObjects, held_objects

T = TypeVar("T")

_MOST: Final = 300


class Few(list[T]):
    """At most 300 of the readings that were added, as far from each other at all times."""

    _each, _added = 1, 0

    def add(self, reading: T) -> None:
        """Keep a reading, if it is its turn."""
        if self._added % self._each == 0:
            self.append(reading)
        self._added += 1
        if len(self) > _MOST:
            del self[1::2]
            self._each *= 2


class MemoryMeter:
    """What processes took when they were first seen, and what they have come to take.

    Args:
        readers: A module ``host.usage``: what reads a process's own bytes (in some 15 us), pages
            (10 ms), batches in shared memory, and which part of addresses it has alone (0.3 ms).
    """

    def __init__(self, readers: Any = usage) -> None:
        self._readers, self._files_first = readers, readers.read_batch_files([os.getpid()])
        self._parts: dict[str, float] = {}
        self._shared = 0
        self._mapped = readers.read_mapped_bytes()
        """Of libraries, as workers are not asked yet: what they have in common counts once."""
        self._first: dict[int, int] = {}
        """Worker -> what it took when it was first seen, or this process when any was, if less."""
        self._here: int | None = None
        self._read: dict[int, Pages] = {}
        self._looks = Few[Look]()
        self._elements: dict[str, int] = {}
        self._workers = 0

    def look(self, workers: Sequence[int], *, step: int, epoch: int) -> None:
        """See how large the workers are, or this process if there never were any."""
        self._workers = len(workers) or self._workers
        processes = workers or ([] if self._workers else [os.getpid()])
        sizes = {each: self._readers.read_own_bytes(each) for each in processes}
        known = {each: size for each, size in sizes.items() if size is not None}
        if workers and self._here is None:  # with that they began
            self._here = self._readers.read_own_bytes(os.getpid())
        for worker in known if workers else ():
            self._first.setdefault(worker, min(known[worker], self._here or known[worker]))
        if known:
            self._looks.add(Look(step, epoch, known))

    def read(self, workers: Sequence[int]) -> int | None:
        """Look at the pages of all processes; return what they take together, if it is known."""
        read = {each: self._readers.read_pages(each) for each in (os.getpid(), *workers)}
        now = {each: pages for each, pages in read.items() if pages is not None}
        files = self._readers.read_batch_files(read)
        self._shared = sum(files[each] for each in files.keys() - self._files_first.keys())
        self._read = now if workers or not self._workers else {**self._read, **now}
        return sum(pages.pss_bytes for pages in now.values()) if now else None

    @property
    def copied_bytes(self) -> int:
        """Of a worker, the mean: what it had in common with this process, and has of its own."""
        read = [
            (self._read[each], first) for each, first in self._first.items() if each in self._read
        ]
        of = [pages.own_bytes - max(0, pages.anonymous_bytes - first) for pages, first in read]
        return max(0, sum(of) // len(of)) if of else 0

    def seen(self, dataset: object, *, forked: bool) -> MemorySeen:
        """Return what was seen so far of a training that reads a dataset."""
        objects = held_objects(dataset)
        self._elements = self._elements or {held.name: held.elements for held in objects}
        growing = (
            held.name
            for held in objects
            if held.elements > self._elements.get(held.name, 0)
            or (self._workers and not held.elements)
        )
        return MemorySeen(
            workers=self._workers,
            forked=forked,
            copied_bytes=self.copied_bytes,
            own_parts=self._own_parts(objects),
            looks=tuple(self._looks),
            shared_bytes=self._shared,
            file_bytes=max(0, sum(each.file_bytes for each in self._read.values()) - self._mapped),
            objects=objects,
            growing=next(growing, ""),
            left_bytes=read_host_memory().available_bytes,
        )

    def _own_parts(self, objects: Sequence[HeldObjects]) -> dict[str, float]:
        """Return of which part of each object workers have pages of their own.

        Of one worker that is not known: what this process writes to leaves the worker alone.
        """
        workers = self._read.keys() & self._first.keys()
        for held in objects if len(workers) > 1 else ():
            parts = [self._readers.read_alone(each, held.places) for each in workers]
            known = [part for part in parts if part is not None]
            if known:
                self._parts[held.name] = sum(known) / len(known)
        return dict(self._parts)
