"""What was seen of the memory of a training's processes, and what it tells: pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
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
_TELLING: Final = 0.8
"""If a cache grew by more than this in the last epoch, of the first, it would look as a leak."""


class Growth(NamedTuple):
    """What a process, or the mean of the workers, took at some moment."""

    step: int
    epoch: int
    grown_bytes: int
    """More than when it was first looked at, of memory that belongs to no file."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MemorySeen:
    """What was seen of the memory of a training's processes, as far as it is not of a device."""

    workers: int = 0
    forked: bool = True
    """Workers began with the pages of this process; if not, each was sent a copy of the dataset."""
    copied_bytes: int = 0
    """Of a worker, the mean: pages that it had in common with this process, and has of its own."""
    growth: tuple[Growth, ...] = ()
    """Of a worker, or of this process if it reads: in the order of time."""
    kept: bool = True
    """Workers were the same in all epochs."""
    shared_bytes: int = 0
    """Memory of several processes that is no file's: batches on their way."""
    file_bytes: int = 0
    """Pages of files that processes have mapped since they were first looked at."""
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
        sent = bool(seen.workers) and not seen.forked
        beyond = seen.copied_bytes - _USUAL_BYTES
        if sent or beyond >= _COPIED_PART * held.counted_bytes > 0:
            each = held.size_bytes if sent else min(seen.copied_bytes, held.counted_bytes)
            found.append(MemoryUse("copied", count * each, held))
            break  # how the others are read, their sum does not say
    if seen.growth:
        cause: MemoryCause = "leak" if leaks(seen.growth, count, kept=seen.kept) else "cache"
        found.append(MemoryUse(cause, count * seen.growth[-1].grown_bytes))
    found.append(MemoryUse("ahead", seen.shared_bytes))
    found.append(MemoryUse("page cache", seen.file_bytes))
    large = [use for use in found if use.size_bytes >= _LEAST_BYTES]
    return tuple(sorted(large, key=lambda use: -use.size_bytes))


def leaks(growth: Sequence[Growth], workers: int, *, kept: bool = True) -> bool:
    """Return whether memory grows for ever, and not as a cache that each worker fills.

    A cache of one worker is full after an epoch; of ``workers``, each meets a sample that it has
    not read before ever more rarely: of the first epoch's growth (1 - 1/workers)**n is left after n
    more. Within one epoch the two look the same, and it is called a cache.
    """
    epochs = sorted({each.epoch for each in growth})
    if len(growth) < _FEWEST or len(epochs) < 2 or not kept:
        return False
    ends = epochs[0], epochs[-1]
    first, last = (_rate([one for one in growth if one.epoch == epoch]) for epoch in ends)
    left = (1 - 1 / workers) ** (epochs[-1] - epochs[0])
    if first <= 0 or left > _TELLING:
        return False
    # In the middle between a cache's growth and a leak's.
    return last >= first * max(_STEADY, (1 + left) / 2)


def _rate(readings: Sequence[Growth]) -> float:
    steps = readings[-1].step - readings[0].step
    return (readings[-1].grown_bytes - readings[0].grown_bytes) / steps if steps else 0.0
