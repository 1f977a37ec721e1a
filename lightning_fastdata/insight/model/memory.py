"""What was seen of the memory of a training's processes, and what it tells: pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
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


class Growth(NamedTuple):
    """What a process, or the mean of the workers, took at some moment."""

    step: int
    epoch: int
    grown_bytes: int
    """More than when it was first looked at, of memory that belongs to no file."""
    of_first_bytes: int | None = None
    """The same of those workers alone that were there at first; None: they are not known apart."""


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
    growth: tuple[Growth, ...] = ()
    """Of a worker, or of this process if it reads: in the order of time."""
    kept: bool = True
    """Workers of the beginning were there in all epochs."""
    joined: bool = False
    """Others have come, which may have taken a part of their work."""
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
    if seen.growth and not _settles(seen.growth):
        cause: MemoryCause = "leak" if leaks(seen.growth, count, kept=seen.kept) else "cache"
        found.append(MemoryUse(cause, count * seen.growth[-1].grown_bytes))
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


def _settles(growth: Sequence[Growth]) -> bool:
    """Return whether memory was taken soon after the beginning, as buffers and libraries are."""
    first = [each for each in growth if each.epoch == growth[0].epoch]
    soon = first[int(_SOON * len(first))].grown_bytes
    return len(first) >= _FEWEST and soon >= _ALL * growth[-1].grown_bytes


def leaks(growth: Sequence[Growth], workers: int, *, kept: bool = True) -> bool | None:
    """Return whether memory grows for ever, and not as a cache that each worker fills.

    A cache of one worker is full after an epoch; of ``workers``, each meets a sample that it has
    not read before ever more rarely: of the first epoch's growth (1 - 1/workers)**n is left after n
    more. Within one epoch the two look the same: None, it is not known.
    """
    epochs = sorted({each.epoch for each in growth})
    if len(growth) < _FEWEST or len(epochs) < 2 or not kept:
        return None
    ends = epochs[0], epochs[-1]
    first, last = (_rate([one for one in growth if one.epoch == epoch]) for epoch in ends)
    left = (1 - 1 / workers) ** (epochs[-1] - epochs[0])
    if first <= 0 or left > _TELLING:
        return None
    # In the middle between a cache's growth and a leak's.
    return last >= first * max(_STEADY, (1 + left) / 2)


def _rate(readings: Sequence[Growth]) -> float:
    steps = readings[-1].step - readings[0].step
    first, last = (
        each.grown_bytes if each.of_first_bytes is None else each.of_first_bytes
        for each in (readings[0], readings[-1])
    )
    return (last - first) / steps if steps else 0.0
