"""What a cache would cost and gain, measured on a few samples before it is made."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sized
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Final, cast

from torch.utils.data import Dataset, Subset

from lightning_fastdata.caches.fixed_part import tried_indices
from lightning_fastdata.caches.image_cache import cache_images, cache_of, with_cache
from lightning_fastdata.errors import DatasetError
from lightning_fastdata.host import clock
from lightning_fastdata.images.folder import FastImageFolder
from lightning_fastdata.images.stored import FORMS
from lightning_fastdata.order.epoch_order import dataset_length
from lightning_fastdata.randomness.global_generators import kept_random_state

_MEASURED: Final = 32
_ROUNDS: Final = 3
"""The quickest of which counts, as other programs only ever add time."""
_FEWEST: Final = 4
_READS_OF_EACH: Final = 5  # of a sample that is measured, about
_GAIN: Final = 2.0
"""So many times as quick has a kept sample to be, for a cache that nobody has asked for by name."""


@dataclass(frozen=True, slots=True)
class Forecast:
    """What keeping the samples of a dataset would mean."""

    kept: str
    """In words."""
    total_bytes: float
    """Of all samples."""
    made_ms: float
    """For a sample as it is."""
    first_ms: float
    """For a sample that is also kept."""
    later_ms: float
    """For a sample that was kept."""
    of: str = "CPU time"
    """What the milliseconds are of; ``"time"`` has waits in it."""

    @property
    def paid_back_epochs(self) -> float | None:
        """After how many epochs keeping has cost less than it saved; None: never."""
        saved_ms = self.made_ms - self.later_ms
        if saved_ms <= 0:
            return None
        return 1 + max(0.0, self.first_ms - self.made_ms) / saved_ms

    def __str__(self) -> str:
        after = self.paid_back_epochs
        back = "never paid back" if after is None else f"paid back after {after:.1f} epochs"
        return (
            f"{self.kept}: {self.total_bytes / 1e9:.3g} GB, {self.made_ms:.3g} -> "
            f"{self.later_ms:.3g} ms of {self.of} a sample, {back}"
        )


def forecast_caches(dataset: Dataset[Any]) -> list[Forecast]:
    """Measure what each form of a cache would cost and gain, on 32 samples in a folder that goes.

    Raises:
        DatasetError: The dataset cannot be cached.
    """
    count = dataset_length(dataset)
    if count is None:
        raise DatasetError(f"{type(dataset).__name__} has no length, so that it cannot be cached.")
    if count < 2:
        return []
    indices = tried_indices(count, _MEASURED)
    inner = dataset.dataset if type(dataset) is Subset else dataset
    ways: list[Callable[[str], Dataset[Any]]] = [partial(with_cache, Subset(dataset, indices))]
    numbers = list(range(len(indices)))
    if isinstance(inner, FastImageFolder) and inner.rule.draws:
        forms = FORMS[:1] if inner.shorter_side is None else FORMS
        ways = [partial(cache_images, inner, form=form) for form in forms]
        numbers = [dataset.indices[i] for i in indices] if type(dataset) is Subset else indices
    found = []
    with kept_random_state():
        made_ms = min(_each_ms(dataset, indices) for _ in range(_ROUNDS))
        for way in ways:
            with tempfile.TemporaryDirectory() as folder:
                cached = way(folder)
                found.append(_forecast(cached, numbers, made_ms, count))
    return found


def forecast_time(dataset: Dataset[Any], folder: str, *, budget_s: float = 2.0) -> Forecast:
    """Measure what :func:`with_cache` would cost and gain: time, in which waits count.

    Args:
        dataset: Has two samples or more.
        folder: For the cache of 4 to 32 samples.
        budget_s: What measuring may take, about, where 4 samples take less.

    Raises:
        DatasetError: The dataset cannot be cached.
    """
    count, clock_s = len(cast("Sized", dataset)), clock.monotonic
    with kept_random_state():
        _each_ms(dataset, [0], clock_s)  # opens what is opened once
        one_s = _each_ms(dataset, [0], clock_s) / 1000
        fitting = int(budget_s / max(one_s * _READS_OF_EACH, 1e-9))
        indices = tried_indices(count, min(_MEASURED, max(_FEWEST, fitting), count))
        made_ms = min(_each_ms(dataset, indices, clock_s) for _ in range(2))
        cached = with_cache(Subset(dataset, indices), folder)
        if cache_of(cached) is None:  # it has said why
            raise DatasetError(f"There is no room for the pictures of {type(dataset).__name__}.")
        found = _forecast(cached, list(range(len(indices))), made_ms, count, clock_s)
    return replace(found, of="time")


def why_not(
    forecast: Forecast, *, disk_bytes: float, memory_bytes: float, epochs: float
) -> str | None:
    """Return why a cache is not worth it; None: it is.

    Args:
        forecast: What it costs and gains.
        disk_bytes: That it may take.
        memory_bytes: That can hold what is read again and again; beyond, each epoch reads the disk.
        epochs: That are to come, infinity if that is not known.
    """
    f, gigabytes = forecast, forecast.total_bytes / 1e9
    if f.made_ms < _GAIN * f.later_ms:
        return f"a kept sample takes {f.later_ms:.3g} ms, and {f.made_ms:.3g} if it is made"
    for free_bytes, what in ((disk_bytes, "disk"), (memory_bytes, "memory")):
        if f.total_bytes > free_bytes:
            return f"{gigabytes:.3g} GB, for which {free_bytes / 1e9:.3g} GB of {what} may be used"
    after = f.paid_back_epochs
    if after is None or after >= epochs:  # even is no gain, and one epoch reads no kept sample
        return f"{f}, of {epochs:g}"
    return None


def _forecast(
    cached: Dataset[Any],
    numbers: list[int],
    made_ms: float,
    count: int,
    clock_s: Callable[[], float] = clock.process_time,
) -> Forecast:
    """Fill a new cache, read it, and return what that took."""
    _each_ms(cached, numbers[:1], clock_s)  # which looks for what can be kept
    first_ms = _each_ms(cached, numbers[1:], clock_s)
    later_ms = min(_each_ms(cached, numbers, clock_s) for _ in range(_ROUNDS))
    cache = cache_of(cached)
    assert cache is not None
    said = cache.explain().rpartition(": ")[2]
    total = cache.stored_bytes / max(1, cache.stored) * count
    return Forecast(said, total, made_ms, first_ms, later_ms)


def _each_ms(
    dataset: Dataset[Any], indices: list[int], clock_s: Callable[[], float] = clock.process_time
) -> float:
    """Return the time of a sample; by default the CPU's, in any thread of this process."""
    began_s = clock_s()
    for index in indices:
        dataset[index]
    return 1000 * (clock_s() - began_s) / max(1, len(indices))
