"""Findings about the memory of workers: copies of a dataset's objects, leaks, caches."""

from __future__ import annotations

from functools import partial
from typing import Final

from lightning_fastdata.host.memory import size_text
from lightning_fastdata.insight.model.evidence import Evidence
from lightning_fastdata.insight.model.finding import Advice, Finding, Rule
from lightning_fastdata.insight.model.memory import (
    MemoryCause,
    MemorySeen,
    MemoryUse,
    leaks,
    memory_uses,
)

_CODES: Final[dict[MemoryCause, str]] = {"copied": "FD334", "leak": "FD335", "cache": "FD336"}
_NEARLY: Final = 0.9
_REMEDIES: Final[dict[MemoryCause, str]] = {
    "copied": "from lightning_fastdata import share; dataset = share(dataset)",
    "leak": "look for what each sample adds to: a list of the dataset, a log, a global; "
    "workers that are not kept give it back after each epoch",
    "cache": "a bound for it (functools.lru_cache(maxsize=...)), or one for all workers: "
    "CachedDataset(dataset)",
}


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
    perhaps = f", {seen.growing} perhaps" if seen.growing else ""
    or_malloc = "" if seen.growing else ", or as malloc keeps what was freed"
    or_leak = "; whether it leaks is not known" if leaks(seen.looks) is None else ""
    return {
        "leak": f"{where} has grown by {each}, and grows on from epoch to epoch{perhaps}: {whole}",
        "cache": f"{where} keeps {each} more than at first, as in a cache{perhaps}{or_malloc}: "
        f"{whole}{or_leak}",
        "ahead": f"{whole} are batches ahead, in memory that processes share: they get no more",
        "page cache": f"{whole} are pages of files, which the system gives back when memory runs "
        "short",
    }[use.cause]


def memory_notes(seen: MemorySeen | None) -> tuple[str, ...]:
    """Return what takes memory and is nothing to act upon, a sentence each."""
    if seen is None:
        return ()
    uses = [use for use in memory_uses(seen) if _finding(seen, use) is None]
    return tuple(f"Memory: {memory_text(seen, use)}." for use in uses)


def _finding(seen: MemorySeen, use: MemoryUse) -> Finding | None:
    # What is copied now is copied as a whole in the end, and a cache of half of it is full of all.
    whole = use.size_bytes if use.objects is None else seen.workers * use.objects.counted_bytes
    more = use.size_bytes if use.cause == "cache" else whole - use.size_bytes
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
    if e.memory is None:
        return None
    uses = memory_uses(e.memory)
    return next((_finding(e.memory, use) for use in uses if use.cause == cause), None)


RULES: Final = (
    Rule("FD334", "workers copy what the dataset holds", partial(_find, cause="copied")),
    Rule("FD335", "memory grows for ever", partial(_find, cause="leak")),
    Rule("FD336", "each worker fills a cache", partial(_find, cause="cache")),
)
