"""Findings about the memory of workers: copies of a dataset's objects, leaks, caches."""

from __future__ import annotations

from functools import partial
from typing import Final

from lightning_fastdata.host.memory import size_text
from lightning_fastdata.insight.model.evidence import Evidence
from lightning_fastdata.insight.model.finding import Advice, Finding, Rule
from lightning_fastdata.insight.model.memory import MemoryCause, MemorySeen, MemoryUse, memory_uses

_CODES: Final[dict[MemoryCause, str]] = {"copied": "FD334", "leak": "FD335", "cache": "FD336"}
_NEARLY: Final = 0.9
_REMEDIES: Final[dict[MemoryCause, str]] = {
    "copied": "from lightning_fastdata import share; dataset = share(dataset)",
    "leak": "look for what each sample adds to: a list of the dataset, a log, a global; "
    "persistent_workers=False gives it back after each epoch",
    "cache": "a bound for it (functools.lru_cache(maxsize=...)), or one for all workers: "
    "CachedDataset(dataset)",
}


def memory_text(seen: MemorySeen, use: MemoryUse) -> str:
    """Return in words what takes memory."""
    where = "the training process"
    if seen.workers:
        where = f"each of {seen.workers} workers" if seen.workers > 1 else "the worker"
    whole, each, held = size_text(use.size_bytes), size_text(use.each_bytes), use.objects
    within = f", {seen.growing} perhaps" if seen.growing else ""
    if use.cause == "copied" and held is not None:
        size = size_text(held.size_bytes)
        how = "by reference counting" if seen.forked else "as workers are not forked"
        so_far = " so far" if use.each_bytes < _NEARLY * held.counted_bytes else ""
        return f"{held.name} ({held.kind}, {size}) is copied in {where} {how}: {whole}{so_far}"
    if use.cause == "leak":
        return f"{where} has grown by {each}, and grows on from epoch to epoch{within}: {whole}"
    if use.cause == "cache":
        return f"{where} keeps {each} of what it has read, as in a cache{within}: {whole}"
    if use.cause == "ahead":
        return f"{whole} are batches ahead, in memory that processes share: they get no more"
    return f"{whole} are pages of files, which the system gives back when memory runs short"


def memory_notes(seen: MemorySeen | None) -> tuple[str, ...]:
    """Return what takes memory and is nothing to act upon, a sentence each."""
    uses = () if seen is None else memory_uses(seen)
    return tuple(
        f"Memory: {memory_text(seen, use)}." for use in uses if seen and use.cause not in _CODES
    )


def _find(e: Evidence, cause: MemoryCause) -> Finding | None:
    seen = e.memory
    use = next((one for one in memory_uses(seen) if one.cause == cause), None) if seen else None
    if seen is None or use is None:
        return None
    # What is copied now is copied as a whole in the end.
    more = seen.workers * use.objects.counted_bytes - use.size_bytes if use.objects else 0
    if cause == "cache":
        more = use.size_bytes
    short = seen.left_bytes is not None and more > seen.left_bytes
    if cause == "cache" and not short:
        return Finding(code=_CODES[cause], severity="fine", cause=memory_text(seen, use), remedy="")
    return Finding(
        code=_CODES[cause],
        severity="high" if short else "moderate",
        cause=memory_text(seen, use),
        remedy="",
        leave_alone="",
        advice=(Advice(text=_REMEDIES[cause], for_speed=False),),
    )


def _rule(cause: MemoryCause, title: str) -> Rule:
    # What memory takes says nothing of what time goes into.
    return Rule(_CODES[cause], title, partial(_find, cause=cause), replaces=frozenset())


RULES: Final = (
    _rule("copied", "workers copy what the dataset holds"),
    _rule("leak", "memory grows for ever"),
    _rule("cache", "each worker fills a cache"),
)
