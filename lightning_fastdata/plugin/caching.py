"""Whether the samples of a dataset are kept: as the user says, or where that pays."""

from __future__ import annotations

import math
import multiprocessing
import tempfile
import warnings
from typing import TYPE_CHECKING, Any, Final

from lightning_fastdata.caches.cached import CachedDataset, cache_of, with_cache
from lightning_fastdata.caches.folders import CacheFolder, made_by_one, room_bytes
from lightning_fastdata.caches.gain import CacheGain, measure_gain
from lightning_fastdata.errors import DatasetError, FastDataWarning, OptionsError
from lightning_fastdata.host.memory import read_host_memory
from lightning_fastdata.planning.facts.probe_process import Tell, try_apart

if TYPE_CHECKING:
    from lightning.pytorch import Trainer
    from torch.utils.data import Dataset


_DEADLINE_S: Final = 30.0


def kept(
    dataset: Dataset[Any], folder: CacheFolder, trainer: Trainer | None
) -> tuple[Dataset[Any], str | None]:
    """Return the dataset with a cache, and what was decided, if there was anything to decide.

    ``"auto"`` is ``"disk"`` where an earlier run has begun the cache, or where some samples, read
    in a process that is thrown away, show that it pays in the epochs of the training: see
    :meth:`CacheGain.why_not`. Ranks decide for themselves; their samples are the same in any case.
    What keeps a cache from being used is said, and ends no training.
    """
    if folder != "auto":
        dataset = with_cache(dataset, folder)
        cache = cache_of(dataset)
        if cache is not None and trainer is not None:
            cache.ranks = trainer.num_devices  # of which Lightning's launcher sets no variable
        return dataset, None
    try:
        cached, reason = _decision(dataset, _epochs_left(trainer))
    except (DatasetError, OptionsError, OSError) as error:  # of the place, or what is there
        cached, reason = None, str(error)
        warnings.warn(f"No samples are kept (cache='auto'): {error}", FastDataWarning, stacklevel=2)
    said = f"samples are {'not ' if cached is None else ''}kept (cache='auto'): {reason}"
    return dataset if cached is None else cached, said


def _decision(dataset: Dataset[Any], epochs: float) -> tuple[Dataset[Any] | None, str]:
    """Return the dataset with a cache, or None if samples are not to be kept; and why."""
    try:
        cached = with_cache(dataset, "disk")
    except DatasetError as error:
        return None, str(error)
    cache = cache_of(cached)
    assert cache is not None  # which with_cache() has made
    cache.optional = cached is not dataset
    reason = f"an earlier run has kept {cache.stored} of {len(cache)}"
    if not cache.stored:
        pays, reason = _gain(dataset, cache, epochs)
        if not pays:
            return None, reason
    with made_by_one(cache.folder):  # which fails where nothing can be written
        return cached, reason


def _gain(dataset: Dataset[Any], cache: CachedDataset, epochs: float) -> tuple[bool, str]:
    if len(cache) < 2:
        return False, "there are too few"
    with tempfile.TemporaryDirectory() as folder:
        method = multiprocessing.get_start_method()
        found = try_apart(_measure, dataset, folder, start_method=method, deadline_s=_DEADLINE_S)
    gain: CacheGain | None = found.values.get("gain")
    if gain is None:
        failure = found.failure
        if failure is not None and isinstance(failure.error, DatasetError):
            return False, str(failure.error)
        return False, f"a process that tried it {'failed' if failure is None else failure.what}"
    reason = gain.why_not(
        disk_bytes=room_bytes(cache.folder, cache.ranks),
        memory_bytes=read_host_memory().available_bytes / 2,
        epochs=epochs,
    )
    return reason is None, reason or str(gain)


def _measure(dataset: Dataset[Any], folder: str, tell: Tell) -> None:
    tell("gain", measure_gain(dataset, folder))


def _epochs_left(trainer: Trainer | None) -> float:
    most = None if trainer is None else trainer.max_epochs
    if trainer is None or most is None or most < 0:
        return math.inf
    return most - trainer.current_epoch
