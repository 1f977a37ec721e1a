"""What the command line does with a data module that a user names."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

from lightning_fastdata.caches.cached import CachedDataset, CachedSource
from lightning_fastdata.caches.forecast import forecast_caches
from lightning_fastdata.caches.image_cache import cache_of
from lightning_fastdata.errors import DatasetError, OptionsError
from lightning_fastdata.host import clock
from lightning_fastdata.host.machine import import_by_name
from lightning_fastdata.loading.loader import FastDataLoader
from lightning_fastdata.plugin.data.time_travel import TimeTravel
from lightning_fastdata.plugin.seams.loaders import flattened
from lightning_fastdata.sources.dataset import SourceDataset
from lightning_fastdata.tree import name_of

if TYPE_CHECKING:
    from torch.utils.data import Dataset

    from lightning_fastdata.executors.ray.cluster_seen import ClusterOffer
    from lightning_fastdata.plugin.contracts import DataModule

_ROWS: Final = 32
_TOLD_EVERY_S: Final = 5.0


def open_datamodule(spec: str, hyperparameters: Mapping[str, object]) -> Any:
    """Return the data module that a user named as ``MODULE:NAME``; nothing else is imported.

    Raises:
        OptionsError: The text does not name one.
    """
    module_name, _, name = spec.rpartition(":")
    if not module_name or not name:
        raise OptionsError(
            f"{spec!r} does not say where the data module is. Write MODULE:NAME, for example "
            "train:Data for `class Data(FastDataModule)` in train.py."
        )
    found = vars(import_by_name(module_name, "the data module"))
    if name not in found:
        raise OptionsError(f"{module_name} has no {name!r}.")
    return _made(found[name], hyperparameters)


def _made(found: object, hyperparameters: Mapping[str, Any]) -> TimeTravel:
    """Return a data module, with its datasets, from what a user named.

    Args:
        found: A data module, a function that returns one, or a class.
        hyperparameters: What the class is made with, of what it takes.

    Raises:
        OptionsError: It is none of these, or cannot be made.
    """
    given: Mapping[str, Any] = {}
    if isinstance(found, type):
        taken = inspect.signature(found).parameters
        several = any(one.kind is one.VAR_KEYWORD for one in taken.values())
        given = {n: v for n, v in hyperparameters.items() if several or n in taken}
    made: Any = found
    if callable(found) and not isinstance(found, TimeTravel):
        try:
            made = found(**given)
        except TypeError as error:
            raise OptionsError(
                f"{name_of(found)} cannot be called with "
                f"{', '.join(given) or 'no arguments'}: {error}. Name a function without arguments "
                "that returns the data module of the run."
            ) from error
    if not isinstance(made, TimeTravel):
        raise OptionsError(
            f"{made!r:.200} is no FastDataModule. Name one, its class, or a function that returns "
            "it."
        )
    made.prepare_data()  # type: ignore[attr-defined]  # Lightning's, as its trainer calls it
    made.setup("fit")  # type: ignore[attr-defined]
    return made


def plan_actors(
    spec: str, offer: ClusterOffer, step_ms: float, tell: Callable[[str], object]
) -> None:
    """Say how many actors of a cluster would feed the training loaders of a data module.

    Args:
        spec: Names the data module.
        offer: What the cluster has.
        step_ms: What a training step takes besides waiting for its batch.
        tell: Is given texts to be printed.
    """
    from lightning_fastdata.insight.remote_plan import CORES, plan_remote

    mb_per_s, latency_ms = offer.slowest_link
    room = max(1, offer.room)
    cores = sorted({room, *(each for each in CORES if each < room)})
    for loader in flattened(open_datamodule(spec, {}).train_dataloader()):
        if isinstance(loader, FastDataLoader):
            plan = plan_remote(
                loader, step_ms=step_ms, cores=cores, mb_per_s=mb_per_s, latency_ms=latency_ms
            )
            tell(f"\n{spec}, {type(loader.dataset).__name__}\n{plan.text()}\n{plan.advice(room)}")


def forecast(module: DataModule, tell: Callable[[str], object]) -> None:
    """Say what keeping the samples of training and validation would cost and gain.

    Args:
        module: Whose datasets.
        tell: Is given lines to be printed.
    """
    module.cache = None
    for stage, loaders in (
        ("training", module.train_dataloader()),
        ("validation", module.val_dataloader()),
    ):
        for loader in flattened(loaders):
            if not isinstance(loader, FastDataLoader):
                continue
            tell(f"{stage}: {type(loader.dataset).__name__}")
            try:
                lines = [str(each) for each in forecast_caches(loader.dataset)]
            except DatasetError as error:
                lines = [str(error)]
            for line in lines or ["too few samples to measure"]:
                tell(f"  {line}")


def fill_caches(module: DataModule, folder: str, tell: Callable[[str], object]) -> None:
    """Make all samples of the training and validation datasets, and keep them.

    Args:
        module: Whose datasets.
        folder: As of ``FastDataModule(cache=...)``.
        tell: Is given lines to be printed.
    """
    module.cache = folder
    for loaders in (module.train_dataloader(), module.val_dataloader()):
        for loader in flattened(loaders):
            cache = cache_of(loader.dataset) if isinstance(loader, FastDataLoader) else None
            if isinstance(cache, CachedDataset):
                _fill(cache, cache, type(cache.dataset).__name__, tell)
            elif cache is not None:
                records = SourceDataset(cache, _undecoded)
                _fill(cache, records, type(cache.source).__name__, tell)


def _fill(
    cache: CachedDataset | CachedSource,
    dataset: Dataset[Any],
    name: str,
    tell: Callable[[str], object],
) -> None:
    count = len(cache)
    began_s = told_s = clock.monotonic()
    done = 0
    for rows in FastDataLoader(dataset, _ROWS, collate_fn=_count):
        done += rows
        if clock.monotonic() - told_s > _TOLD_EVERY_S:
            told_s = clock.monotonic()
            tell(f"{name}: {done} of {count} samples")
    cache.flush()
    took_s = clock.monotonic() - began_s
    tell(f"{name}: {count} samples in {took_s:.1f} s")
    tell(cache.explain())


def _undecoded(record: Any, _index: int) -> Any:
    return record


def _count(samples: Sequence[Any]) -> int:
    return len(samples)
