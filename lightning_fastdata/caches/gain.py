"""What keeping the samples of a dataset gains, measured on a few of them: for ``cache="auto"``."""

from __future__ import annotations

from collections.abc import Sized
from dataclasses import dataclass
from typing import Any, Final, cast

from torch.utils.data import Dataset, Subset

from lightning_fastdata.caches.cached import cache_of, tried_indices, with_cache
from lightning_fastdata.host import clock
from lightning_fastdata.randomness.global_generators import kept_random_state

_MOST: Final = 32
_FEWEST: Final = 4
_READS_OF_EACH: Final = 5  # of a sample that is measured, about
_ROUNDS: Final = 3
"""The quickest of which counts, as other programs only ever add time."""
_WORTH: Final = 2.0
"""So many times as quick has a kept sample to be, for a cache that nobody has asked for by name."""


@dataclass(frozen=True, slots=True)
class CacheGain:
    """What keeping the samples of a dataset costs and gains; the times have waits in them."""

    kept: str
    """What is kept, in words."""
    total_bytes: float
    """What all samples take."""
    made_ms: float
    """The time of a sample without a cache."""
    first_ms: float
    """The time of a sample that is made and kept."""
    later_ms: float
    """The time of a sample that was kept."""

    def __str__(self) -> str:
        return (
            f"{self.kept}: {self.total_bytes / 1e9:.3g} GB, {self.made_ms:.3g} -> "
            f"{self.later_ms:.3g} ms a sample"
        )

    def why_not(self, *, disk_bytes: float, memory_bytes: float, epochs: float) -> str | None:
        """Return why a cache is not worth it; None: it is.

        Args:
            disk_bytes: What the cache may take.
            memory_bytes: What can hold samples that are read again and again; beyond, each epoch
                reads the disk.
            epochs: Those that are to come, infinity if that is not known.
        """
        if self.made_ms < _WORTH * self.later_ms:
            made, kept = f"{self.made_ms:.3g}", f"{self.later_ms:.3g}"
            return f"a kept sample takes {kept} ms, and {made} if it is made"
        for free_bytes, what in ((disk_bytes, "disk"), (memory_bytes, "memory")):
            if self.total_bytes > free_bytes:
                free = f"{free_bytes / 1e9:.3g} GB of {what}"
                return f"{self.total_bytes / 1e9:.3g} GB, for which {free} may be used"
        saved_ms = (epochs - 1) * (self.made_ms - self.later_ms)
        if not saved_ms > max(0.0, self.first_ms - self.made_ms):  # one epoch reads no kept sample
            return f"{self}, which the epochs to come ({epochs:g}) do not pay back"
        return None


def measure_gain(dataset: Dataset[Any], folder: str, *, budget_s: float = 2.0) -> CacheGain:
    """Measure what :func:`with_cache` costs and gains.

    Args:
        dataset: Has two samples or more.
        folder: For the cache of 4 to 32 samples.
        budget_s: What measuring may take, about, where 4 samples take less.

    Raises:
        DatasetError: The dataset cannot be cached.
    """
    count = len(cast("Sized", dataset))
    with kept_random_state():
        _each_ms(dataset, [0])  # opens what is opened once
        one_s = _each_ms(dataset, [0]) / 1000
        fitting = int(budget_s / max(one_s * _READS_OF_EACH, 1e-9))
        indices = tried_indices(count, min(_MOST, max(_FEWEST, fitting), count))
        made_ms = min(_each_ms(dataset, indices) for _ in range(2))
        cached = with_cache(Subset(dataset, indices), folder)
        cache = cache_of(cached)
        assert cache is not None  # which with_cache() has made
        numbers = list(range(len(indices)))
        _each_ms(cached, numbers[:1])  # which looks for what can be kept
        first_ms = _each_ms(cached, numbers[1:])
        later_ms = min(_each_ms(cached, numbers) for _ in range(_ROUNDS))
    kept = cache.explain().rpartition(": ")[2]
    total_bytes = cache.stored_bytes / max(1, cache.stored) * count
    return CacheGain(kept, total_bytes, made_ms, first_ms, later_ms)


def _each_ms(dataset: Dataset[Any], indices: list[int]) -> float:
    began_s = clock.monotonic()
    for index in indices:
        dataset[index]
    return 1000 * (clock.monotonic() - began_s) / max(1, len(indices))
