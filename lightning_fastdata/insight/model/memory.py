"""What was seen of the memory of a training's processes, and what it tells: pure."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby, pairwise
from math import prod
from statistics import fmean
from typing import TYPE_CHECKING, Final, Literal, NamedTuple, TypeAlias

if TYPE_CHECKING:
    from lightning_fastdata.sources.attributes import HeldObjects

MemoryCause: TypeAlias = Literal["copied", "leak", "cache", "ahead", "page cache"]

_LEAST_BYTES: Final = 64 * 2**20
"""Of all workers together: less is no finding. A forked worker copies 10 to 40 MiB of what Python
itself and torch hold, whatever the dataset is."""
_USUAL_BYTES: Final = 24 * 2**20
_COPIED_PART: Final = 0.2
"""Of the objects of a dataset, what has to be copied before they are blamed."""
_STEADY: Final = 0.5
_FEWEST: Final = 9
_SOON: Final = 0.25
"""Of the first epoch: what has been taken by then, and little more later, are buffers."""
_ALL: Final = 0.8
_TELLING: Final = 0.8
"""If a cache grew by more than this in the last epoch, of the first, it would look as a leak."""


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
    growing: str = ""
    """A container of the dataset that was empty at first, or has grown; empty: none is known."""
    left_bytes: int | None = None
    """What the machine or the container has left."""


class MemoryUse(NamedTuple):
    """One cause, and what it takes in all processes together."""

    cause: MemoryCause
    size_bytes: int
    objects: HeldObjects | None = None


def memory_uses(seen: MemorySeen) -> tuple[MemoryUse, ...]:
    """Return what takes memory, the most first; empty: nothing that is worth a word."""
    count = max(1, seen.workers)
    found = []
    for held in seen.objects:
        size = count * _copied(seen, held)
        if size:
            found.append(MemoryUse("copied", size, held))
            break  # how the others are read, their sum does not say
    grown = _grown(seen.looks)
    if grown and not _settles(seen.looks, grown):
        cause: MemoryCause = "leak" if leaks(seen.looks) else "cache"
        found.append(MemoryUse(cause, int(count * grown[-1])))
    found.append(MemoryUse("ahead", seen.shared_bytes))
    found.append(MemoryUse("page cache", seen.file_bytes))
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


def _grown(looks: Sequence[Look]) -> list[float]:
    """Return by how much the processes of each look had grown since they were first seen: means."""
    first: dict[int, int] = {}
    return [
        fmean(size - first.setdefault(process, size) for process, size in look.sizes.items())
        for look in looks
    ]


def _settles(looks: Sequence[Look], grown: Sequence[float]) -> bool:
    """Return whether memory was taken soon after the beginning, as buffers and libraries are."""
    count = sum(look.epoch == looks[0].epoch for look in looks)
    return count >= _FEWEST and grown[int(_SOON * count)] >= _ALL * max(grown)


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
