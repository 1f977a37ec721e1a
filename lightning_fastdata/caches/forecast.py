"""What a cache would cost and gain, measured on a few samples before it is made."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

from torch.utils.data import Dataset, Subset

from lightning_fastdata.caches.fixed_part import tried_indices
from lightning_fastdata.caches.image_cache import cache_images, cache_of, with_cache
from lightning_fastdata.errors import DatasetError
from lightning_fastdata.images.folder import FastImageFolder
from lightning_fastdata.images.stored import FORMS
from lightning_fastdata.randomness.generators import kept_random_state

_MEASURED: Final = 32
_ROUNDS: Final = 3
"""The quickest of which counts, as other programs only ever add time."""


@dataclass(frozen=True, slots=True)
class Forecast:
    """What keeping the samples of a dataset would mean."""

    kept: str
    """In words."""
    total_bytes: float
    """Of all samples."""
    made_ms: float
    """CPU time for a sample as it is."""
    first_ms: float
    """CPU time for a sample that is also kept."""
    later_ms: float
    """CPU time for a sample that was kept."""

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
            f"{self.later_ms:.3g} ms of CPU time a sample, {back}"
        )


def forecast_caches(dataset: Dataset[Any]) -> list[Forecast]:
    """Measure what each form of a cache would cost and gain, on 32 samples in a folder that goes.

    Raises:
        DatasetError: The dataset cannot be cached.
    """
    if not hasattr(dataset, "__len__"):
        raise DatasetError(f"{type(dataset).__name__} has no length, so that it cannot be cached.")
    count = len(dataset)
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
        made_ms = min(_cpu_ms(dataset, indices) for _ in range(_ROUNDS))
        for way in ways:
            with tempfile.TemporaryDirectory() as folder:
                cached = way(folder)
                _cpu_ms(cached, numbers[:1])  # which looks for what can be kept
                first_ms = _cpu_ms(cached, numbers[1:])
                later_ms = min(_cpu_ms(cached, numbers) for _ in range(_ROUNDS))
                cache = cache_of(cached)
                assert cache is not None
                said = cache.explain().rpartition(": ")[2]
                total = cache.stored_bytes / max(1, cache.stored) * count
                found.append(Forecast(said, total, made_ms, first_ms, later_ms))
    return found


def _cpu_ms(dataset: Dataset[Any], indices: list[int]) -> float:
    """Return the CPU time of a sample, in any thread of this process."""
    began_s = time.process_time()
    for index in indices:
        dataset[index]
    return 1000 * (time.process_time() - began_s) / max(1, len(indices))
