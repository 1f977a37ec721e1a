"""How far torch's workers may be ahead: what fits into memory and among the open files."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from lightning_fastdata.host.memory import BatchMemory, HostMemory
    from lightning_fastdata.planning.options import LoaderOptions

_LOOK_AHEAD_BATCHES: Final = 8
"""Batches the workers may be ahead together; enough to cover one slow batch."""


def auto_prefetch(options: LoaderOptions, workers: int) -> tuple[int, str]:
    """Return the batches each worker is ahead, and why."""
    if options.prefetch_factor != "auto":
        return options.prefetch_factor, "set by you"
    prefetch = max(2, min(4, math.ceil(_LOOK_AHEAD_BATCHES / max(1, workers))))
    return prefetch, f"{workers * prefetch} batches ahead in all, to cover a slow one"


def fit(
    workers: int, prefetch: int, batch_bytes: int, place: BatchMemory, options: LoaderOptions
) -> tuple[int, int]:
    """Return the workers and prefetch that fit into a place, lowering only what is open."""

    # Fewer batches ahead cost less speed than fewer workers.
    def fits() -> bool:
        return place.holds(held_batches(workers, prefetch) * batch_bytes)

    while options.prefetch_factor == "auto" and prefetch > 1 and not fits():
        prefetch -= 1
    while options.num_workers == "auto" and workers > 0 and not fits():
        workers -= 1
    return workers, prefetch


def held_batches(workers: int, prefetch: int) -> int:
    """Return the batches in memory at once, at most."""
    # Each worker fills one batch while its finished ones wait.
    return workers * (prefetch + 1)


def memory_message(
    wanted: tuple[int, int], fitting: tuple[int, int], batch_bytes: int, place: BatchMemory
) -> str:
    """Tell that batches did not fit, what was lowered, and how to get more room."""
    held_bytes = held_batches(*wanted) * batch_bytes
    fits = place.holds(held_batches(*fitting) * batch_bytes)
    return (
        f"num_workers={wanted[0]} with prefetch_factor={wanted[1]} holds up to "
        f"{held_batches(*wanted)} batches of {_size(batch_bytes)}, {_size(held_bytes)} in all, "
        f"but only 1/{place.parts} of the {_size(place.free_bytes)} free in {place.place} is for "
        f"them. Now num_workers={fitting[0]}, prefetch_factor={fitting[1]}"
        f"{'' if fits else ', which may still fail'}. {place.remedy_for(held_bytes)}"
    )


def open_files_message(open_files: int, memory: HostMemory, options: LoaderOptions) -> str:
    """Tell that batches on their way take many open files, and what to do."""
    took = options.sharing_strategy == "auto"
    result = 'so sharing_strategy is "file_system"' if took else "and opening one more may fail"
    return (
        f"Batches on their way take up to {open_files} open files, more than half of the "
        f"{memory.open_files_soft} this process may have, {result}. Run `ulimit -n "
        f"{open_files * 2 + 1}` before the program (hard limit: {memory.open_files_hard})."
    )


def _size(count_bytes: int) -> str:
    return f"{count_bytes / 2**20:,.1f} MiB"
