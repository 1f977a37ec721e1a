"""Whether samples are kept: what ``FastDataModule(cache=...)`` comes to for one dataset."""

from __future__ import annotations

import math
import multiprocessing
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from lightning_fastdata.caches.cached_source import CachedSource
from lightning_fastdata.caches.folders import CacheFolder, cache_root, room_bytes
from lightning_fastdata.caches.forecast import forecast_time, why_not
from lightning_fastdata.caches.image_cache import cache_of, with_cache
from lightning_fastdata.errors import DatasetError
from lightning_fastdata.host.memory import read_host_memory
from lightning_fastdata.planning.facts.probe_process import Tell, try_apart

if TYPE_CHECKING:
    from lightning.pytorch import Trainer
    from torch.utils.data import Dataset

    from lightning_fastdata.caches.forecast import Forecast

_DEADLINE_S: Final = 30.0


def kept(
    dataset: Dataset[Any], folder: CacheFolder, trainer: Trainer | None
) -> tuple[Dataset[Any], str | None]:
    """Return the dataset with a cache, and what was decided, if there was anything to decide.

    ``"auto"`` is ``"disk"`` where an earlier run has begun the cache, or where some samples, read
    in a process that is thrown away, show that it pays in the epochs of the training: see
    :func:`why_not`. Ranks decide for themselves; their samples are the same in any case.
    """
    if folder != "auto":
        return with_cache(dataset, folder), None
    pays, reason = _decision(dataset, _epochs_left(trainer))
    found = with_cache(dataset, "disk") if pays else dataset
    return found, f"samples are {'' if pays else 'not '}kept (cache='auto'): {reason}"


def _decision(dataset: Dataset[Any], epochs: float) -> tuple[bool, str]:
    """Return whether samples are to be kept, and why."""
    try:
        cache = cache_of(with_cache(dataset, "disk"))
    except DatasetError as error:
        return False, str(error)
    if cache is None:
        return False, "there is no room"
    if cache.stored:
        return True, f"an earlier run has kept {cache.stored} of {len(cache)}"
    if len(cache) < 2:
        return False, "there are too few"
    with tempfile.TemporaryDirectory() as folder:
        method = multiprocessing.get_start_method()
        found = try_apart(_measure, dataset, folder, start_method=method, deadline_s=_DEADLINE_S)
    forecast: Forecast | None = found.values.get("forecast")
    if forecast is None:
        failure = found.failure
        if failure is not None and isinstance(failure.error, DatasetError):
            return False, str(failure.error)
        return False, f"a process that tried it {'failed' if failure is None else failure.what}"
    # Records from afar come quicker from a disk, too; what is made of them is not kept.
    from_afar = isinstance(cache, CachedSource)
    reason = why_not(
        forecast,
        disk_bytes=room_bytes(_existing(cache_root("disk")), in_memory=False),
        memory_bytes=math.inf if from_afar else read_host_memory().available_bytes / 2,
        epochs=epochs,
    )
    return reason is None, reason or str(forecast)


def _existing(folder: Path) -> Path:
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    return folder


def _measure(dataset: Dataset[Any], folder: str, tell: Tell) -> None:
    tell("forecast", forecast_time(dataset, folder))


def _epochs_left(trainer: Trainer | None) -> float:
    most = None if trainer is None else trainer.max_epochs
    if trainer is None or most is None or most < 0:
        return math.inf
    return most - trainer.current_epoch
