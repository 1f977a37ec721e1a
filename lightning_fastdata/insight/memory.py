"""What takes the host memory of a training: seen now and then, told apart by cause, and said."""

from __future__ import annotations

import os
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import groupby, pairwise
from math import ceil, prod
from statistics import fmean
from typing import TYPE_CHECKING, Any, Final, Literal, NamedTuple, TypeAlias

from lightning_fastdata.host import memory
from lightning_fastdata.host.memory import Few, Pages, read_host_memory, size_text
from lightning_fastdata.insight.model.finding import Advice, Finding, Rule
from lightning_fastdata.sources.attributes import HeldObjects, held_objects

if TYPE_CHECKING:
    from lightning_fastdata.insight.model.evidence import Evidence

MemoryCause: TypeAlias = Literal["copied", "leak", "cache", "ahead", "page cache"]

_LEAST_BYTES: Final = 64 * 2**20
"""Of all workers together: less is no finding. A forked worker copies 10 to 40 MiB of what Python
itself and torch hold, whatever the dataset is."""
_USUAL_BYTES: Final = 24 * 2**20
_COPIED_PART: Final = 0.2
"""Of the objects of a dataset, what has to be copied before they are blamed."""
_STEADY: Final = 0.5
_FEWEST: Final = 9
_EARLY: Final = 0.25
"""Of an epoch, from when a process is first seen."""
_TELLING: Final = 0.8
"""If a cache grew by more than this in the last epoch, of the first, it would look as a leak."""
_NEARLY: Final = 0.9
_CODES: Final[dict[MemoryCause, str]] = {"copied": "FD334", "leak": "FD335", "cache": "FD336"}
_REMEDIES: Final[dict[MemoryCause, str]] = {
    "copied": "from lightning_fastdata import share; dataset = share(dataset)",
    "leak": "look for what each sample adds to: a list of the dataset, a log, a global; "
    "workers that are not kept give it back after each epoch",
    "cache": "a bound for it (functools.lru_cache(maxsize=...)), or one for all workers: "
    "CachedDataset(dataset)",
}


class Look(NamedTuple):
    """How large processes were at some moment: the workers, or this process if there are none."""

    step: int
    epoch: int
    sizes: Mapping[int, int]
    """Process -> bytes of its memory that belongs to no file."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MemorySeen:
    """What was seen of the memory of a training's processes, as far as it is not of a device."""

    workers: int = 0
    forked: bool = True
    """Workers began with the pages of this process; if not, each was sent a copy of the dataset."""
    copied_bytes: int = 0
    """Of a worker, the mean: pages that it had in common with this process, and has of its own."""
    own_parts: Mapping[str, float] = field(default_factory=dict)
    """Name of an object -> the part of it that is in such pages, 0 to 1; empty: not known."""
    looks: tuple[Look, ...] = ()
    """In the order of time."""
    shared_bytes: int = 0
    """Memory of several processes that is no file's: batches on their way."""
    file_bytes: int = 0
    """Pages of files that processes have mapped, and this one had not at the beginning."""
    objects: tuple[HeldObjects, ...] = ()
    """Of the dataset, the largest first."""
    left_bytes: int | None = None
    """What the machine or the container has left."""


class MemoryUse(NamedTuple):
    """One cause, and what it takes in all processes together."""

    cause: MemoryCause
    size_bytes: int
    objects: HeldObjects | None = None


class MemoryMeter:
    """What processes took when they were first seen, and what they have come to take.

    Args:
        readers: A module ``host.memory``: what reads a process's own bytes (in some 15 us), pages
            (10 ms), batches in shared memory, and which part of addresses it has alone (0.3 ms).
    """

    def __init__(self, readers: Any = memory) -> None:
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

    def read(self, workers: Sequence[int]) -> None:
        """Look at the pages of all processes."""
        read = {each: self._readers.read_pages(each) for each in (os.getpid(), *workers)}
        now = {each: pages for each, pages in read.items() if pages is not None}
        files = self._readers.read_batch_files(read)
        self._shared = sum(files[each] for each in files.keys() - self._files_first.keys())
        self._read = now if workers or not self._workers else {**self._read, **now}

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
        return MemorySeen(
            workers=self._workers,
            forked=forked,
            copied_bytes=self.copied_bytes,
            own_parts=self._own_parts(objects),
            looks=tuple(self._looks),
            shared_bytes=self._shared,
            file_bytes=max(0, sum(each.file_bytes for each in self._read.values()) - self._mapped),
            objects=objects,
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


def memory_uses(seen: MemorySeen) -> tuple[MemoryUse, ...]:
    """Return what takes memory, the most first; empty: nothing that is worth a word."""
    count = max(1, seen.workers)
    found = []
    for held in seen.objects:
        size = count * _copied(seen, held)
        if size:
            found.append(MemoryUse("copied", size, held))
            break  # how the others are read, their sum does not say
    if seen.looks:
        cause: MemoryCause = "leak" if leaks(seen.looks) else "cache"
        found.append(MemoryUse(cause, int(count * _grown(seen.looks))))
    found += [MemoryUse("ahead", seen.shared_bytes), MemoryUse("page cache", seen.file_bytes)]
    large = [use for use in found if use.size_bytes >= _LEAST_BYTES]
    return tuple(sorted(large, key=lambda use: -use.size_bytes))


def _copied(seen: MemorySeen, held: HeldObjects) -> int:
    """Return the bytes of an object that each worker has copied; 0: it has not read so much."""
    if seen.workers and not seen.forked:
        return held.size_bytes
    part, most = seen.own_parts.get(held.name), held.counted_bytes
    if part is None:  # then the sum has to do, which may be of anything else
        enough = seen.copied_bytes - _USUAL_BYTES >= _COPIED_PART * most
        return min(seen.copied_bytes, most) if enough else 0
    return min(seen.copied_bytes, int(part * most)) if part >= _COPIED_PART else 0


def _grown(looks: Sequence[Look]) -> float:
    """Return by how much the processes of the last look have grown: the mean of them.

    What each takes early is of buffers and libraries, and does not count.
    """
    early = ceil(_EARLY * max(Counter(look.epoch for look in looks).values()))
    each = ([look.sizes[of] for look in looks if of in look.sizes] for of in looks[-1].sizes)
    return fmean(sizes[-1] - sizes[min(early, len(sizes) - 1)] for sizes in each)


def leaks(looks: Sequence[Look]) -> bool | None:
    """Return whether memory grows for ever, and not as a cache that each worker fills.

    A cache of one worker is full after an epoch; of several, each meets a sample that it has not
    read before ever more rarely: of the first epoch's growth (1 - 1/workers)**n is left after n
    more. None, it is not known: within one epoch the two look the same, and so they do in workers
    that come anew in each. Of the last epoch those count that have read in one before.
    """
    epochs = [_read(list(of)) for _, of in groupby(looks, key=lambda look: look.epoch)]
    *before, (parts, grown) = [epoch for epoch in epochs if any(epoch[0].values())] or [({}, {})]
    unread = {each: prod(1 - of.get(each, 0) for of, _ in before) for each in parts}
    old = [each for each in parts if parts[each] and unread[each] < 1]
    if len(looks) < _FEWEST or not old:
        return None
    first = sum(before[0][1].values()) / sum(before[0][0].values())
    last = sum(grown[each] for each in old) / sum(parts[each] for each in old)
    left = fmean(unread[each] for each in old)
    if first <= 0 or left > _TELLING:
        return None
    # In the middle between a cache's growth and a leak's.
    return last >= first * max(_STEADY, (1 + left) / 2)


def _read(looks: Sequence[Look]) -> tuple[dict[int, float], dict[int, float]]:
    """Return, by process, which part of an epoch each has read, and its growth in bytes a step."""
    parts, grown = defaultdict[int, float](float), defaultdict[int, float](float)
    steps = max(1, looks[-1].step - looks[0].step)
    for before, after in pairwise(looks):
        for process in before.sizes.keys() & after.sizes.keys():
            parts[process] += (after.step - before.step) / len(after.sizes) / steps
            grown[process] += (after.sizes[process] - before.sizes[process]) / steps
    return parts, grown


def memory_text(seen: MemorySeen, use: MemoryUse) -> str:
    """Return in words what takes memory."""
    several = f"each of {seen.workers} workers" if seen.workers > 1 else "the worker"
    where = several if seen.workers else "the training process"
    count, held = max(1, seen.workers), use.objects
    whole, each = size_text(use.size_bytes), size_text(use.size_bytes // count)
    if held is not None:
        size = size_text(held.size_bytes)
        how = "by reference counting" if seen.forked else "as workers are not forked"
        so_far = " so far" if use.size_bytes < _NEARLY * count * held.counted_bytes else ""
        return f"{held.name} ({held.kind}, {size}) is copied in {where} {how}: {whole}{so_far}"
    or_leak = "; whether it leaks is not known" if leaks(seen.looks) is None else ""
    return {
        "leak": f"{where} has grown by {each}, and grows on from epoch to epoch: {whole}",
        "cache": f"{where} keeps {each} more than soon after the start, as in a cache, or as "
        f"malloc keeps what was freed: {whole}{or_leak}",
        "ahead": f"{whole} are batches ahead, in memory that processes share: they get no more",
        "page cache": f"{whole} are pages of files, which the system gives back when memory runs "
        "short",
    }[use.cause]


def memory_notes(seen: MemorySeen | None) -> tuple[str, ...]:
    """Return what takes memory and is nothing to act upon, a sentence each."""
    seen = seen or MemorySeen()
    uses = [use for use in memory_uses(seen) if _finding(seen, use) is None]
    return tuple(f"Memory: {memory_text(seen, use)}." for use in uses)


def _finding(seen: MemorySeen, use: MemoryUse) -> Finding | None:
    more = use.size_bytes  # what has grown by that may do so once more
    if use.objects is not None:  # what is copied now is copied as a whole in the end
        more = seen.workers * use.objects.counted_bytes - use.size_bytes
    short = seen.left_bytes is not None and more > seen.left_bytes
    if use.cause not in _CODES or (use.cause == "cache" and not short):
        return None
    return Finding(
        code=_CODES[use.cause],
        severity="high" if short else "moderate",
        cause=memory_text(seen, use),
        remedy="",
        advice=(Advice(text=_REMEDIES[use.cause], for_speed=False),),
    )


def _find(e: Evidence, cause: MemoryCause) -> Finding | None:
    seen = e.memory or MemorySeen()
    return next((_finding(seen, use) for use in memory_uses(seen) if use.cause == cause), None)


RULES: Final = (
    Rule("FD334", "workers copy what the dataset holds", partial(_find, cause="copied")),
    Rule("FD335", "memory grows for ever", partial(_find, cause="leak")),
    Rule("FD336", "each worker fills a cache", partial(_find, cause="cache")),
)
