"""Datasets whose randomness is keyed by sample: (seed, epoch, index) and nothing else.

Albumentations 2.0.8 hands every worker process the same generator, so workers draw the same
stream and epochs repeat. Here each sample's transforms are seeded before they run, which makes
the draws independent of the number of workers, the batch size and the resume point.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from itertools import count
from typing import TYPE_CHECKING, Any, Final, Protocol, TypeGuard

from torch.utils.data import Dataset, IterableDataset, StackDataset, Subset, get_worker_info

from lightning_fastdata.batches.libraries import tell_epoch
from lightning_fastdata.errors import BatchError
from lightning_fastdata.randomness.seeds import EpochCell, reseed
from lightning_fastdata.sources.source import read_ahead, reads_ahead
from lightning_fastdata.tree import (
    find_composes,
    find_instances,
    has_method,
    held,
    held_by,
    loaded_classes,
)
from lightning_fastdata.types import Repeated, SampleKey, reading_for, repeats, unmarked

if TYPE_CHECKING:
    from lightning_fastdata.augment import WorkerTransform
    from lightning_fastdata.types import Batch


_END: Final = object()


class ReadsTogether(Protocol):
    """A dataset that reads several samples in one call."""

    def __getitems__(self, indices: Sequence[Any], /) -> list[Batch]: ...


class _Keying:
    """Seeds the Albumentations pipelines of a dataset and runs our own transform after it."""

    def __init__(
        self,
        dataset: Dataset[Any],
        seed: int,
        epoch: EpochCell,
        transform: Callable[[Batch, SampleKey], Batch] | None,
        draws_below: bool,
    ) -> None:
        self.dataset = dataset
        self.seed = seed
        self.epoch = epoch
        self.transform = transform
        self._composes: Sequence[Any] | None = None
        self._found_in_epoch = 0
        self._draws_below = draws_below

    def key(self, index: int) -> SampleKey:
        return SampleKey(self.seed, self.epoch.get(), index)

    def seed_for(self, key: SampleKey) -> None:
        # Found on first use, because a worker process holds its own copies of the pipelines, and
        # in each epoch, because a callback may have given the dataset others.
        if self._composes is None or key.epoch != self._found_in_epoch:
            self._composes = find_composes(self.dataset)
            self._found_in_epoch = key.epoch
        if self._composes:
            reseed(self._composes, key)

    def reading(self, key: SampleKey) -> AbstractContextManager[None]:
        added = (key.index % 2**80 + 1) << 64
        return reading_for(key.epoch, added) if self._draws_below else nullcontext()

    def finish(self, sample: Batch, key: SampleKey) -> Batch:
        return sample if self.transform is None else self.transform(sample, key)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_composes": None}


class _Stand:
    """Stands for a dataset, whose attributes are read through it."""

    def __init__(self, keying: _Keying) -> None:
        self._keying = keying

    def set_epoch(self, epoch: int) -> None:
        """Draw for this epoch from now on, counted from 0."""
        self._keying.epoch.set(epoch)
        tell_epoch(self._keying.dataset, epoch)

    def __getattr__(self, name: str) -> object:
        if name.startswith("__") or name == "_keying":
            raise AttributeError(name)
        return getattr(self._keying.dataset, name)


class KeyedDataset(_Stand, Dataset[Any]):
    """A map-style dataset, each of whose samples is drawn under its own key."""

    def __len__(self) -> int:
        return len(self._keying.dataset)  # type: ignore[arg-type]

    def __getitem__(self, index: object) -> Batch:
        keying = self._keying
        key = keying.key(_as_int(index))
        keying.seed_for(key)
        with keying.reading(key):
            return keying.finish(read_item(keying.dataset, index), key)

    @property
    def can_read_ahead(self) -> bool:
        """Whether the dataset can begin to read samples before they are asked for."""
        return reads_ahead(self._keying.dataset)

    def read_ahead(self, indices: Sequence[int]) -> None:
        """Have the dataset begin to read samples, if it can."""
        read_ahead(self._keying.dataset, unmarked(indices))

    @property
    def __getitems__(self) -> Callable[[Sequence[int]], list[Any]] | None:
        """Function that reads several samples; torch's fetcher takes None for "one at a time"."""
        return self._fetch if fetches_in_batches(self._keying.dataset) else None

    def _fetch(self, indices: Sequence[int]) -> list[Batch]:
        keying = self._keying
        keys = [keying.key(_as_int(index)) for index in indices]
        # One call draws for all its samples, so its first key has to stand for them.
        keying.seed_for(keys[0])
        asked = unmarked(indices)
        with keying.reading(keys[0]):
            samples: list[Batch] = keying.dataset.__getitems__(asked)  # type: ignore[attr-defined]
        if keying.transform is None:
            return samples
        if not isinstance(samples, Sequence) or len(samples) != len(keys):
            raise BatchError(
                f"{type(keying.dataset).__name__}.__getitems__ returned "
                f"{type(samples).__name__} for {len(keys)} indices; a transform of single samples "
                "needs a list of that many samples."
            )
        return [keying.finish(sample, key) for sample, key in zip(samples, keys, strict=True)]


class KeyedIterableDataset(_Stand, IterableDataset[Any]):
    """An iterable dataset whose i-th sample in worker w has the key index ``i * workers + w``."""

    def __iter__(self) -> Iterator[Any]:
        return self.over(iter(self._keying.dataset))

    def over(self, samples: Iterator[Any], *, first: int = 0) -> Iterator[Any]:
        """Yield the samples of a pass over the stream, of which ``first`` were read before."""
        keying = self._keying
        info = get_worker_info()
        worker, workers = (info.id, info.num_workers) if info is not None else (0, 1)
        keying.seed_for(keying.key(first * workers + worker))
        for position in count(first):
            # Not by a ``for`` loop: a stream that is its own iterator begins anew if asked for one.
            sample = next(samples, _END)
            if sample is _END:
                return
            key = keying.key(position * workers + worker)
            yield keying.finish(sample, key)
            keying.seed_for(key._replace(index=key.index + workers))


def keyed(
    dataset: Dataset[Any],
    *,
    seed: int,
    epoch: EpochCell,
    transform: WorkerTransform | None,
    always: bool = False,
) -> Dataset[Any]:
    """Return the dataset with keyed randomness, or the dataset itself if it has none to key.

    ``always``: also then, so that what it wraps is told of samples that come again.
    """
    below = not isinstance(dataset, IterableDataset) and draws_by_itself(dataset, below=True)
    if transform is None and not (always or below) and not find_composes(dataset):
        return dataset
    keying = _Keying(dataset, seed, epoch, transform, below)
    if isinstance(dataset, IterableDataset):
        return KeyedIterableDataset(keying)
    return KeyedDataset(keying)


def own_dataset(dataset: object) -> object:
    """Return the user's dataset, where one with keyed randomness stands for it."""
    return dataset._keying.dataset if isinstance(dataset, _Stand) else dataset


def fetches_in_batches(dataset: object) -> TypeGuard[ReadsTogether]:
    """Return whether the dataset answers ``__getitems__`` itself, also below torch's wrappers.

    A ``Subset`` and a ``StackDataset`` have that method whatever they hold; without one below they
    would read sample by sample under the key of the first.
    """
    if type(dataset) is Subset:
        return fetches_in_batches(dataset.dataset)
    if type(dataset) is StackDataset:
        parts = dataset.datasets
        values = parts.values() if isinstance(parts, dict) else parts
        return any(fetches_in_batches(part) for part in values)
    if isinstance(dataset, KeyedDataset):
        return dataset.__getitems__ is not None
    if has_method(dataset, "__getitems__") or callable(held(dataset, "__getitems__")):
        return True
    # Torch asks a wrapper that passes attributes on, and so reads what that holds. Another one is
    # not asked here, as it may open something to answer.
    passes_on = has_method(dataset, "__getattr__")
    if passes_on and any(has_method(part, "__getitems__") for part in held_by(dataset).values()):
        return callable(getattr(dataset, "__getitems__", None))
    return False


def read_item(dataset: Any, index: Any) -> Any:
    """Return a sample of a dataset that gets indices as they were given, but for one of ours."""
    if isinstance(dataset, KeyedDataset):
        return dataset[index]
    if type(index) is not Repeated:
        return dataset[unmarked(index)]
    with reading_for(None, repeats(index)):
        return dataset[index.given]


def asked_together(dataset: object, indices: Any) -> Any:
    """Return indices as a dataset is asked for them in one call."""
    return indices if isinstance(dataset, KeyedDataset) else unmarked(indices)


def draws_by_itself(dataset: object, *, below: bool = False) -> bool:
    """Return whether a dataset (``below``: not it but one that it holds) draws by its own keys."""
    kinds = loaded_classes("lightning_fastdata.ext.images.folder", "FastImageFolder")
    return bool(find_instances(dataset, kinds)) and not (below and isinstance(dataset, kinds))


def reads_together(dataset: Dataset[Any]) -> bool:
    """Return whether a dataset reads the samples of a batch together: batches are not divided."""
    return fetches_in_batches(dataset) or reads_ahead(dataset)


def _as_int(index: Any) -> int:
    try:
        return int(index) + repeats(index)
    except (TypeError, ValueError):
        # Samplers may yield anything the dataset understands; equal keys still draw equal numbers.
        return zlib.crc32(repr(index).encode())
