"""Loaders that a user has: taken apart into a dataset and what decides its batches."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING, Any, Final

from torch.utils.data import (
    DataLoader,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    default_collate,
    default_convert,
)

from lightning_fastdata.errors import DatasetError, OptionsError
from lightning_fastdata.loading.loader import FastDataLoader
from lightning_fastdata.planning.options import LoaderOptions
from lightning_fastdata.plugin.seams.internals import combined_mode
from lightning_fastdata.torch_internals import MAKES_BATCHES

if TYPE_CHECKING:
    from collections.abc import Callable

    from lightning_fastdata.types import Stage

_LOOKED_AT: Final = 64
_WORKERS: Final = ("num_workers", "prefetch_factor", "persistent_workers")


@dataclass(frozen=True, slots=True, eq=False)
class GivenLoader:
    """What a DataLoader says of its batches."""

    dataset: Any
    """What it reads."""
    arguments: Mapping[str, Any]
    """Of ``make_loader``, except for the batch size."""
    batch_size: int | None
    """Samples in a batch; None where that is the batch sampler's, or samples come as they are."""
    base: int | None = None
    """The data module's ``batch_size`` for which this one holds."""

    def rows(self, batch_size: int) -> int | None:
        """Return the samples in a batch when the data module has another ``batch_size``."""
        if self.batch_size is None or self.base is None:
            return self.batch_size
        return max(1, round(self.batch_size * batch_size / self.base))

    def arguments_for(self, batch_size: int) -> dict[str, Any]:
        """Return the arguments of ``make_loader``; see :meth:`rows`."""
        if "batch_sampler" in self.arguments:
            return dict(self.arguments)
        return {**self.arguments, "batch_size": self.rows(batch_size)}


def taken_apart(
    item: Any, batch_size: int, options: LoaderOptions | None = None
) -> tuple[Any, dict[str, Any]]:
    """Return the dataset of an item that a dataset method returned, and what else is known of it.

    Args:
        item: A dataset, or a :class:`GivenLoader`.
        batch_size: Of the data module.
        options: Of the stage. What the user set there wins over the loader.
    """
    if not isinstance(item, GivenLoader):
        return item, {}
    known = item.arguments_for(batch_size)
    if options is not None:
        default = LoaderOptions()
        chosen = {
            f.name for f in fields(options) if getattr(options, f.name) != getattr(default, f.name)
        }
        known = {n: v for n, v in known.items() if {"timeout": "timeout_s"}.get(n, n) not in chosen}
    return item.dataset, known


def refuse_loaders(datasets: Any, name: str, stage: Stage) -> None:
    """Raise DatasetError if what a dataset method returned is a DataLoader, or holds one."""
    items = [datasets]
    if isinstance(datasets, Mapping | list | tuple):
        several = datasets.values() if isinstance(datasets, Mapping) else datasets
        items = list(islice(several, _LOOKED_AT))
    first = next((item for item in items if isinstance(item, DataLoader)), None)
    if first is not None:
        raise DatasetError(
            f"{name} returned a {type(first).__name__}. Return its dataset, or make the data "
            f"module by FastDataModule.from_loaders({stage}=...). To use the loader as it is, "
            f"return it from {stage}_dataloader()."
        )


def given_loaders(
    loaders: Any, name: str, *, keep_workers: bool
) -> tuple[Any, Callable[[Any], Any] | None]:
    """Take loaders apart.

    Args:
        loaders: A DataLoader, a list or dict of them, or Lightning's CombinedLoader of these.
        name: How messages call them.
        keep_workers: Keep their workers and pinning, instead of choosing them.

    Returns:
        A :class:`GivenLoader` for each, in the same form, and what combines the loaders made of
        them; None: Lightning does.

    Raises:
        OptionsError: One of them cannot be taken apart.
    """
    combine = None
    mode = combined_mode(loaders)
    if mode is not None:
        kind: Any = type(loaders)
        combine = partial(kind, mode=mode)
        loaders = loaders.iterables
    given: Any
    if isinstance(loaders, Mapping):
        given = {key: _given(loaders[key], f"{name}[{key!r}]", keep_workers) for key in loaders}
    elif isinstance(loaders, list | tuple):
        given = [_given(one, f"{name}[{at}]", keep_workers) for at, one in enumerate(loaders)]
    else:
        given = _given(loaders, name, keep_workers)
    return given, combine


def _given(loader: Any, name: str, keep_workers: bool) -> GivenLoader:
    kind = type(loader).__name__
    if not isinstance(loader, DataLoader):
        raise OptionsError(
            f"{name} is of type {kind}; from_loaders() takes torch DataLoaders, a list or a dict "
            "of them. Give datasets to from_datasets(). A loader of another kind stays as it is if "
            "a subclass returns it from train_dataloader(), val_dataloader(), ..."
        )
    ours = isinstance(loader, FastDataLoader)
    own = [n for n in MAKES_BATCHES if getattr(type(loader), n) is not getattr(DataLoader, n)]
    if own and not ours:
        raise OptionsError(
            f"{name} is a {kind}, which makes its batches in its own way ({own[0]}). Give its "
            "dataset to from_datasets(), or have a subclass return it from train_dataloader(), "
            "val_dataloader(), ..., which leaves it as it is."
        )
    if isinstance(loader, FastDataLoader) and (loader.transform or loader.device_resident):
        raise OptionsError(
            f"{name} is a FastDataLoader with transform or device_resident. Give the transform to "
            "the data module as augment=, and use make_loader(..., device_resident=True)."
        )
    arguments = _order(loader) | _workers(loader, keep_workers)
    collated = default_collate if _makes_batches(loader) else default_convert
    if loader.collate_fn is not collated:
        arguments["collate_fn"] = loader.collate_fn
    if loader.worker_init_fn is not None:
        arguments["worker_init_fn"] = loader.worker_init_fn
    if loader.generator is not None:
        # Torch draws a seed from it in each epoch, unless the workers stay, and often the order.
        arguments["generator"] = loader.generator
        arguments["persistent_workers"] = loader.persistent_workers
    if loader.drop_last:
        arguments["drop_last"] = True
    if isinstance(loader, FastDataLoader):
        arguments["seed"] = loader.seed
    return GivenLoader(loader.dataset, arguments, loader.batch_size)


def _makes_batches(loader: DataLoader[Any]) -> bool:
    return loader.batch_size is not None or loader.batch_sampler is not None


def _order(loader: DataLoader[Any]) -> dict[str, Any]:
    """Return which samples come in which order; a plain shuffle is that of the data module."""
    if isinstance(loader.dataset, IterableDataset):
        return {}
    if loader.batch_size is None and loader.batch_sampler is not None:
        return {"batch_sampler": loader.batch_sampler}
    sampler: Any = loader.sampler
    data: Any = loader.dataset
    if getattr(sampler, "data_source", None) is not data:
        return {"sampler": sampler}
    if type(sampler) is SequentialSampler:
        return {"shuffle": False}
    if (
        type(sampler) is RandomSampler
        and sampler.generator is None
        and not sampler.replacement
        and sampler.num_samples == len(sampler.data_source)
    ):
        return {"shuffle": True}
    return {"sampler": sampler}


def _workers(loader: DataLoader[Any], keep: bool) -> dict[str, Any]:
    taken: dict[str, Any] = {}
    if loader.multiprocessing_context is not None:
        taken["multiprocessing_context"] = loader.multiprocessing_context.get_start_method()
    if loader.timeout:
        taken["timeout"] = loader.timeout
    if not loader.in_order:
        taken["in_order"] = False
    # Which batches a stream gives depends on how many workers share it out.
    if keep or (isinstance(loader.dataset, IterableDataset) and loader.num_workers):
        names = _WORKERS if loader.num_workers else _WORKERS[:1]
        taken |= {name: getattr(loader, name) for name in names}
    if keep:
        taken["pin_memory"] = loader.pin_memory
    return taken
