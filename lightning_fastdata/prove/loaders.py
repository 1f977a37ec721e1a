"""Loaders with one thing changed, in the same order of samples, and parts of an epoch of them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from copy import copy
from itertools import islice
from typing import Any

import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    IterableDataset,
    RandomSampler,
    Sampler,
    default_collate,
    default_convert,
)

from lightning_fastdata.caches.cached import CachedDataset
from lightning_fastdata.loading.loader import FastDataLoader
from lightning_fastdata.loading.source import setup_of
from lightning_fastdata.order.samplers import is_drawn_at_start
from lightning_fastdata.prove.remedies import Change, Reader
from lightning_fastdata.sources.shared import share
from lightning_fastdata.torch_internals import MAKES_BATCHES
from lightning_fastdata.tree import leaves, replace_leaves
from lightning_fastdata.types import Batch


def reader_of(loader: object) -> Reader:
    """Return whose loader it is, which decides how it can be changed."""
    if isinstance(loader, FastDataLoader):
        return "ours"
    if not isinstance(loader, DataLoader):
        return "other"
    own = [n for n in MAKES_BATCHES if getattr(type(loader), n) is not getattr(DataLoader, n)]
    return "other" if own else "torch"


def is_stream(loader: object) -> bool:
    """Return whether a loader reads an iterable dataset, which has no index."""
    return isinstance(loader, DataLoader) and isinstance(loader.dataset, IterableDataset)


def batches_in(loader: object) -> int | None:
    """Return the batches of an epoch; None: that is not known."""
    try:
        return len(loader)  # type: ignore[arg-type]
    except (TypeError, NotImplementedError):
        return None


def batches_ahead(loader: object) -> int:
    """Return how many batches a loader makes before they are asked for; 0: that is not known."""
    if not isinstance(loader, DataLoader):
        return 0
    if isinstance(loader, FastDataLoader):
        setup = setup_of(loader, cpus=1.0, step_cpus=1.0)
        if setup is not None:
            return setup.look_ahead
    return loader.num_workers * (loader.prefetch_factor or 2)


def can_be_cut(loader: object) -> bool:
    """Return whether a part of an epoch can be read as an epoch of its own."""
    made = isinstance(loader, DataLoader) and loader.batch_sampler is not None
    return reader_of(loader) == "torch" and made and not is_stream(loader)


def what_is_read(loader: object) -> tuple[object, ...]:
    """Return what decides the samples of a loader, apart from a sampler that is torch's own."""
    if not isinstance(loader, DataLoader):
        return (loader,)
    source = loader.sampler if loader.batch_sampler is None else loader.batch_sampler
    order = () if is_stream(loader) or is_drawn_at_start(source) else (source,)
    return (loader.dataset, loader.collate_fn, *order)


class Pieces:
    """The batches of a sampler, of which each part of an epoch takes the next few."""

    def __init__(self, batch_sampler: Iterable[Any]) -> None:
        self._sampler = batch_sampler
        self._batches: Iterator[Any] = iter(())

    def take(self, count: int) -> list[Any]:
        """Return so many batches of indices; behind the last one the sampler begins again."""
        taken = list(islice(self._batches, count))
        while len(taken) < count:
            self._batches = iter(self._sampler)
            more = list(islice(self._batches, count - len(taken)))
            if not more:
                break
            taken += more
        return taken


class Cut(Sampler[Any]):
    """A batch sampler of one part after the other; ``again``: of the same part each time."""

    def __init__(self, pieces: Pieces, count: int, *, again: bool = False) -> None:
        self._pieces, self._count, self._again = pieces, count, again
        self._kept: list[Any] = []

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[Any]:
        # Taken when the first one is asked for: torch begins an iteration twice.
        taken = self._kept or self._pieces.take(self._count)
        self._kept = taken if self._again else []
        yield from taken


def remade(loader: DataLoader[Any], change: Change, cut: Cut | None = None) -> DataLoader[Any]:
    """Return a loader of the same batches, or those of a part of an epoch, with a change."""
    workers = loader.num_workers if change.num_workers is None else change.num_workers
    given: dict[str, Any] = {
        "worker_init_fn": loader.worker_init_fn,
        "generator": loader.generator,
        **({"timeout": loader.timeout} if loader.timeout else {}),
        "in_order": loader.in_order,
        "pin_memory": loader.pin_memory,
        **_order(loader, cut, keyed=change.fast),
    }
    if loader.collate_fn not in (default_collate, default_convert):
        given["collate_fn"] = loader.collate_fn
    dataset: Any = share(copy(loader.dataset)) if change.share else loader.dataset
    if change.cache:
        dataset = CachedDataset(dataset, change.cache)
    if change.fast:
        return FastDataLoader(dataset, num_workers="auto", **given)
    given |= {"num_workers": workers}
    if workers:
        given["persistent_workers"] = loader.persistent_workers or change.persistent_workers
        given["multiprocessing_context"] = loader.multiprocessing_context
        given["prefetch_factor"] = loader.prefetch_factor
    return DataLoader(dataset, **given)


def _order(loader: DataLoader[Any], cut: Cut | None, *, keyed: bool) -> dict[str, Any]:
    if cut is not None:
        return {"batch_sampler": cut}
    batches = loader.batch_sampler
    if batches is not None and type(batches) is not BatchSampler:
        return {"batch_sampler": batches}
    own: dict[str, Any] = {"batch_size": loader.batch_size}
    if isinstance(loader.dataset, IterableDataset):
        return own | {"drop_last": loader.drop_last}
    own |= {"drop_last": loader.drop_last} if loader.batch_size is not None else {}
    if keyed and is_shuffled(loader):
        return own | {"shuffle": True}
    return own | {"sampler": loader.sampler}


def is_shuffled(loader: DataLoader[Any]) -> bool:
    """Return whether a loader was made with ``shuffle=True``, as far as it can be told."""
    sampler: object = loader.sampler
    if type(sampler) is not RandomSampler or sampler.replacement:
        return False
    source: object = sampler.data_source
    return source is loader.dataset and sampler.num_samples == len(sampler.data_source)


def copied(batch: Batch) -> Batch:
    """Return a batch with tensors of its own."""
    return replace_leaves(
        batch, lambda _, leaf: leaf.clone() if isinstance(leaf, torch.Tensor) else leaf
    )


def tensors_in(batch: Batch) -> list[torch.Tensor]:
    """Return the tensors of a batch."""
    return [leaf for leaf in leaves(batch) if isinstance(leaf, torch.Tensor)]


def close(loader: object) -> None:
    """Let go of the workers that a loader has kept."""
    ending: Callable[[], object] | None = getattr(loader, "close", None)
    if isinstance(loader, FastDataLoader) and ending is not None:
        ending()
    elif isinstance(loader, DataLoader):
        loader._iterator = None
