"""A dataset whose samples are made once and kept."""

from __future__ import annotations

import copy
import math
import operator
import os
import random
import warnings
import weakref
from collections.abc import Callable, Iterator, Sequence, Sized
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, Final, TypeVar, cast

import numpy as np
from torch.utils.data import DataLoader, Dataset, Subset

from lightning_fastdata.caches.folders import (
    CacheFolder,
    NamedFile,
    cache_root,
    first_changed,
    identity,
    is_there,
    made_by_one,
    name_of_key,
    named_files,
    parts_of,
    room_bytes,
)
from lightning_fastdata.caches.sample_file import Form, SampleFile, taken_apart
from lightning_fastdata.errors import (
    DatasetError,
    FastDataWarning,
    OptionsError,
    check,
    check_callable,
    is_whole,
)
from lightning_fastdata.fingerprint import Fingerprint, fingerprint
from lightning_fastdata.host import clock
from lightning_fastdata.host.cpu import ranks_on_host
from lightning_fastdata.host.system_calls import SharedFlags
from lightning_fastdata.randomness.global_generators import DrawWatch, kept_random_state
from lightning_fastdata.randomness.seeds import (
    GENERATOR_CLASSES,
    EpochCell,
    own_states,
    seed_generator,
    seed_global_generators,
)
from lightning_fastdata.sources.source import read_ahead, reads_ahead
from lightning_fastdata.tree import datasets_in, find_instances, has_method, held, held_by
from lightning_fastdata.types import Batch, MapDataset, has_own_order

if TYPE_CHECKING:
    from numpy.typing import NDArray

T = TypeVar("T")

_FILES_AT_ONCE: Final = 100
_FILES_WITHIN_S: Final = 0.02
"""Time for which named files are looked at as an epoch begins; 100 of them always are."""
_FORMS_TRIED: Final = 16
"""Number of samples whose forms decide whether all samples are stored as rows of columns."""
_FILLED_AT_ONCE: Final = 32
_TRIED: Final = 8
"""Number of samples that are made twice, to see whether they draw, and compared with a cache."""
_FLAGS: Final = ("compared", "cannot be used", "full", "changed", "other pixels")
"""What is known of a cache as a whole; each has a flag, behind those of the samples."""
_CHANGED: Final = (
    "The program has changed {name}, of which the cache {folder} has samples as they were before. "
    "From here on they are made each time, and none is kept. To keep them, leave the dataset as it "
    "is: what changes can be the transform of a CachedDataset, or a dataset around it."
)
_MEASURED: Final = (4, 32)
"""Fewest and most samples on which the gain of a cache is measured."""
_READS_OF_EACH: Final = 5
"""About how often a sample that is measured is read."""
_BUDGET_S: Final = 2.0
_ROUNDS: Final = 3
"""Number of timed readings; the quickest counts, as other programs can only add time."""
_WORTH: Final = 2.0
"""Least ratio of the times of a made and a kept sample for which ``cache="auto"`` caches."""


class CachedDataset(Dataset[Any]):
    """A map-style dataset that keeps what another one returns, and makes each sample once.

    Samples are written as they are first read, by whichever worker or rank reads them, and are
    found again by later epochs, other ranks and later runs. Order and content are those of the
    dataset without a cache. Code that draws at random cannot be cached: give it as ``transform``.

    A cache belongs to one state of the dataset: what it holds, the source of its class and of the
    functions that it holds, and size and time of the files that it names. Another state has another
    folder. A change elsewhere, in a function that this code calls, is not seen: give another
    ``key``, or delete the folder. A program that changes the dataset reads the changed one, without
    the cache: each process looks for that before its first sample, and the loaders of this package
    with each epoch; torch's ``DataLoader`` and ``cached[i]`` do not see a later change. Some
    samples are compared with the dataset when a run opens a cache, and each is checked against its
    checksum when it is first read. A process may be killed at any time: a sample is in the cache
    whole or not at all.

    Args:
        dataset: A dataset with a length, and samples of tensors, NumPy arrays and scalars, PIL
            images (with their ``info``, such as EXIF), numbers, strings, bytes and None, in tuples,
            lists and dicts.
        folder: ``"disk"``: below ``$LIGHTNING_FASTDATA_CACHE`` or ``~/.cache/lightning_fastdata``.
            ``"ram"``: in the memory of this machine, until the process ends (Linux). Or a folder,
            in which each dataset gets one of its own.
        transform: Called with each sample that is returned; not cached. It may draw at random.
        max_bytes: Most bytes that the samples may take; samples that find no room are made each
            time. Default: as when the cache was made; at first half of the free disk, and with
            ``"ram"`` no more than a quarter of the free memory, shared out among the ranks of a
            host.
        key: Name by which the cache is found, in place of the dataset's state: change it when the
            samples change.
        always_same: Whether the dataset always returns the same samples, though it seems to draw.

    Raises:
        OptionsError: An argument has an impossible value, there is no such memory, or the folder of
            the cache belongs to another user, is a link, or cannot be written to.
        DatasetError: The dataset has no length, cannot be recognised in another run, draws at
            random, or has an order of its own; or what is in the folder is damaged.

    Example:
        >>> photos = ImageFolder("photos", Resize(256))  # doctest: +SKIP
        >>> data = CachedDataset(photos, "disk", transform=v2.RandomCrop(224))  # doctest: +SKIP
    """

    made: ClassVar[bool] = False
    """Whether this process has had a cache: made here, copied or unpickled."""
    _said = "samples as the dataset returns them"
    """Description of what is kept, for :meth:`explain`."""

    def __init__(
        self,
        dataset: Dataset[Any],
        folder: CacheFolder = "disk",
        *,
        transform: Callable[[Any], Any] | None = None,
        max_bytes: int | None = None,
        key: str | None = None,
        always_same: bool = False,
    ) -> None:
        if not isinstance(dataset, MapDataset):
            raise DatasetError(
                f"{type(dataset).__name__} has no length or no samples by index, so that it cannot "
                "be cached. Cache what it reads from."
            )
        most: Any = max_bytes
        if isinstance(most, float) and most.is_integer():
            most = int(most)
        fine = most is None or is_whole(most, 1)
        check("max_bytes", max_bytes, fine, "None, for the default, and whole numbers from 1")
        check_callable("transform", transform, "a sample and returns one")
        ordered = [part for part in datasets_in(dataset) if has_own_order(part)]
        if ordered and not always_same:
            name = type(ordered[0]).__name__
            raise DatasetError(
                f"A {name} has other samples at each index in each epoch, so that they cannot be "
                f"kept. Give a cache to what the {name} is made of: CachedDataset(part)."
            )
        CachedDataset.made = True
        self.dataset = dataset
        self.transform = transform
        root = cache_root(folder)
        files = [*named_files(dataset)]
        known_by = identity if key is None else _identity_if_any
        self._identity = known_by(self.dataset, files)
        """Identity by which the dataset is recognised; None: it has none, only a key is given."""
        self.folder = root / (str(self._identity) if key is None else name_of_key(key))
        self._max_bytes = None if most is None else int(most)
        self._always_same = always_same
        self._length = len(dataset)
        """Length of the dataset when the cache was made, and so of the cache's files."""
        self.ranks = ranks_on_host(os.environ)
        """Training processes on this host, each of which has a cache of its own in memory."""
        self._known = SharedFlags(self._length + len(_FLAGS))
        self._file: SampleFile | None = None
        self._compared = False
        self._columns: list[NDArray[Any]] | None = None
        self._full = False
        self.optional = False
        """Whether a cache that cannot be used raises a warning only, and samples are made."""
        self._given_up = False
        self._attributes = _attributes_of(self.dataset)
        """What identifies each attribute, where the dataset comes to hold an open file, say."""
        self._state = fingerprint(self.dataset, with_globals=False)
        """Fingerprint of the dataset when last found unchanged; None: it cannot be compared."""
        self._files = _shuffled(files)
        """Files that the dataset names, as they were when the cache was made."""
        self._noticed: int | None = None
        """Id of the process that has looked for a change; None: none has."""
        self._there: NDArray[np.bool_] | None = None
        """Mask of samples kept when the dataset was last found unchanged; None: no sample was."""
        is_there(self.folder)  # a folder of another user is refused at once

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int) -> Batch:
        """Return a sample, from the cache or made now.

        Raises:
            IndexError: There is no such sample.
            DatasetError: The cache holds other samples, or cannot be read.
        """
        number = operator.index(index)
        if not 0 <= number < self._length:  # else nobody is asked, as a length may take its time
            length = len(self)
            if not -length <= number < length:
                raise IndexError(f"There is no sample {index}: the dataset has {length}.")
            number %= length
        file = self._opened()
        sample = self.dataset[number] if file is None else self._kept(file, number)
        return sample if self.transform is None else self.transform(sample)

    def _kept(self, file: SampleFile, number: int) -> Batch:
        """Return a sample from the cache; it is made and kept if it was not there."""
        there, sample = file.read(number)
        if there:
            return sample
        own = _generators.get(self, ())
        watch, before = DrawWatch(), own_states(own)
        sample = self.dataset[number]
        if watch.drew() or own_states(own) != before:
            if not self._always_same:  # another one than those that were tried
                return sample
            # The transform draws the same numbers whether the sample is made now or was kept.
            watch.restore()
        self._keep(file, number, sample)
        return sample

    def fill(self, num_workers: int = 0) -> None:
        """Make or read all samples that are not in the cache, and keep them, before a training.

        It ends early where no more samples find room.

        Args:
            num_workers: Processes that make them; 0: this one does.

        Raises:
            OptionsError: ``num_workers`` is no whole number from 0.
        """
        check("num_workers", num_workers, is_whole(num_workers, 0), "whole numbers from 0")
        notice_changes(self)
        untransformed, at_once = copy.copy(self), _FILLED_AT_ONCE
        untransformed.transform, untransformed._noticed = None, os.getpid()
        loader = DataLoader(untransformed, at_once, num_workers=int(num_workers), collate_fn=len)
        for number, count in enumerate(loader):
            file, start = self._seen(), number * at_once
            if file is None or not any(map(file.has, range(start, start + count))):
                break
        self.flush()

    @property
    def can_read_ahead(self) -> bool:
        """Whether the dataset can begin to read samples before they are asked for."""
        return reads_ahead(self.dataset)

    def read_ahead(self, indices: Sequence[int]) -> None:
        """Have the dataset begin to read samples that are not in the cache."""
        file = self._opened()
        missing = [index for index in indices if file is None or not file.has(index)]
        read_ahead(self.dataset, missing)

    def __getstate__(self) -> dict[str, Any]:
        of_this_process = {"_file": None, "_columns": None, "_state": None, "_there": None}
        # Where no state is known, the whole identity is compared, which files belong to.
        unknown: dict[str, Any] = {"_compared": False, "_noticed": None, "_files": []}
        return {**self.__dict__, **of_this_process, **unknown}

    def __setstate__(self, state: dict[str, Any]) -> None:
        CachedDataset.made = True
        self.__dict__.update(state)

    def __repr__(self) -> str:
        return f"CachedDataset({self.dataset!r}, {str(self.folder)!r})"

    @property
    def stored(self) -> int:
        """How many samples are in the cache."""
        file = self._seen()
        return 0 if file is None else file.stored()

    @property
    def stored_bytes(self) -> int:
        """How many bytes the samples in the cache take."""
        file = self._seen()
        return 0 if file is None else file.used_bytes()

    def flush(self) -> None:
        """Wait until the disk has all samples that were written."""
        file = self._seen()
        if file is not None:
            file.flush()

    def explain(self) -> str:
        """Return what is kept and where, as text."""
        file = self._seen()
        if file is None:
            return f"cache: {self.folder}, {'not used' if self._given_up else 'empty yet'}"
        used_mb = file.used_bytes() / 1e6
        kept = f"{file.stored()} of {self._length}, {used_mb:.0f} MB: {self._said}"
        return f"cache: {self.folder}, {kept}"

    def row_of(self, index: int) -> NDArray[np.uint8] | None:
        """Return the bytes of a sample that is one array, as a view of the mapped file.

        None unless there is no transform, and the sample is kept and was read in this run before.
        """
        file = self._opened()
        return None if file is None or self.transform is not None else file.first_leaf(index)

    def columns(self) -> list[NDArray[Any]] | None:
        """Return the leaves of the samples as memory maps ``[samples, ...]``, in order.

        None unless there is no transform, and all samples are kept in one form of numbers alone.
        """
        changed = self.transform is not None or len(self) != self._length
        file = None if changed else self._seen()
        if file is None:
            return None
        if self._columns is None:
            # Kept, because each page of a new map would cost a page fault again.
            columns = file.columns()
            if columns is not None and self._opened() is not None:  # it compares some samples
                self._columns = columns
        return self._columns

    def form(self) -> dict[str, Any] | None:
        """Return the form of all samples in the cache; None: they differ, or there is none yet."""
        file = self._seen()
        return None if file is None else file.form

    # How the cache is found, and when it is no longer used

    def _opened(self) -> SampleFile | None:
        """Return the cache, which is made if it is not there; None: it is no longer used."""
        # Before any sample is read or kept.
        if not (self._given_up or self._noticed == os.getpid()):
            self.notice_change()
        if self._given_up:
            return None
        if not self._compared:
            try:
                self._file = self._open()
            except Exception as error:  # raised by the system, the cache, or a sample's dataset
                self._go_without(error)
                return None
            _generators[self] = find_instances(self.dataset, GENERATOR_CLASSES)
            self._compared = True
        return self._file

    def _open(self) -> SampleFile:
        file = self._existing()
        if file is None:
            with made_by_one(self.folder):
                # Another process may have been there first.
                file = self._existing() or self._create()
        if self._flag("compared") not in self._known:
            self._compare(file)
            self._known.add(self._flag("compared"))
        return file

    def _existing(self) -> SampleFile | None:
        if self._file is None and is_there(self.folder):
            self._file = SampleFile.open(
                self.folder, self._length, self._known, max_bytes=self._max_bytes
            )
        return self._file

    def _seen(self) -> SampleFile | None:
        """Return the cache; None: there is none yet, or it is no longer used."""
        if self._given_up:
            return None
        try:
            return self._existing()
        except (DatasetError, OptionsError) as error:
            self._go_without(error)
            return None

    def _go_without(self, error: Exception) -> None:
        """Raise an error; but if the cache is optional, warn of it and use the cache no longer."""
        if not self.optional:
            raise error
        self._given_up = True
        self._tell_once(
            "cannot be used",
            f"The samples are made each time, as no cache can be used (cache='auto'): {error}",
        )

    def _flag(self, what: str) -> int:
        return self._length + _FLAGS.index(what)

    def _tell_once(self, what: str, text: str) -> None:
        """Warn, unless one of the processes that share this cache object has set the flag."""
        if self._flag(what) not in self._known:
            self._known.add(self._flag(what))
            warnings.warn(text, FastDataWarning, stacklevel=4)

    def _create(self) -> SampleFile:
        def form_of(index: int) -> Form:
            return taken_apart(_read(self.dataset, index))[0]

        with kept_random_state():
            if not self._always_same:
                refuse_drawn(self.dataset)
            forms = list(_tried(self.dataset, form_of, _FORMS_TRIED))
        return SampleFile.create(
            self.folder,
            self._length,
            self._known,
            form=forms[0] if forms and all(form == forms[0] for form in forms) else None,
            max_bytes=self._max_bytes or room_bytes(self.folder, self.ranks),
            dataset=type(self.dataset).__name__,
        )

    def _compare(self, file: SampleFile) -> None:
        """Compare some samples of the cache with the dataset."""

        def look(index: int) -> None:
            there, kept = file.read(index)
            if not there:
                return
            with kept_random_state():
                made = _read(self.dataset, index)
            if taken_apart(kept) != taken_apart(made):
                raise DatasetError(
                    f"The cache {self.folder} does not hold what sample {index} of "
                    f"{type(self.dataset).__name__} is now. Delete the folder, and it is made "
                    "again; if you gave it a key, give another one when the samples change."
                )

        list(_tried(self.dataset, look))

    def _keep(self, file: SampleFile, index: int, sample: object) -> None:
        if self._full:
            return
        try:
            file.write(index, sample)
        except (OSError, DatasetError) as error:
            if isinstance(error, DatasetError) and not self.optional:
                raise
            self._full = True
            said = getattr(error, "strerror", None) or error
            self._tell_once(
                "full",
                f"No more samples are written to the cache {self.folder}: {said}. They are "
                "made each time. Make room there, or give another folder.",
            )

    def notice_change(self, within_s: float = math.inf) -> None:
        """Use the cache no longer, with a warning, if its dataset has changed.

        Samples kept since it was last found unchanged may be of either state, and are removed.

        Args:
            within_s: Most CPU seconds for the comparison; a slower one is given up, as unchanged.
        """
        if self._given_up:
            return
        now = fingerprint(self.dataset, within_s=within_s, with_globals=False)
        if now is None and within_s < math.inf:
            return
        self._noticed = os.getpid()
        file = self._seen()
        there = None if file is None else file.there()
        # Between two steps there is no time for files, beside few that are named alone.
        named = self._files if within_s == math.inf else []
        other = first_changed(named, _FILES_AT_ONCE, _FILES_WITHIN_S)
        as_before = (now is not None and now == self._state) or self._is_recognised(now)
        if as_before and other is None:
            self._state, self._there = now, there
            return
        if file is not None and there is not None:
            before = np.zeros_like(there) if self._there is None else self._there
            file.take_out(np.flatnonzero(there & ~before))
        self._file = self._columns = None
        self._given_up = True
        what = f" ({other} is no longer as it was)" if other is not None else ""
        name = f"{type(self.dataset).__name__}{what}"
        self._tell_once("changed", _CHANGED.format(name=name, folder=self.folder))

    def _is_recognised(self, now: Fingerprint | None) -> bool:
        """Return whether another run would recognise the dataset in its present state.

        The fingerprint also differs if only the epoch, the states of generators or the addresses of
        tensors do: torch moves tensors when workers are spawned.
        """
        files = [*named_files(self.dataset)]
        found = _identity_if_any(self.dataset, files)
        if found is not None and self._identity is not None:
            if found == self._identity:
                self._files = self._files or _shuffled(files)  # a copy knows none at first
            return found == self._identity
        # It holds an open file, say, or has done so. All else is compared.
        if now is not None and self._state is not None:
            return False
        then, attributes = self._attributes, _attributes_of(self.dataset)
        both = [name for name in then if then[name] and attributes.get(name)]
        return all(then[name] == attributes[name] for name in both)


_generators: weakref.WeakKeyDictionary[CachedDataset, tuple[Any, ...]]
_generators = weakref.WeakKeyDictionary()
"""Generators that the dataset of a cache holds, found as this process opened the cache. They are no
attribute, as which they would be found twice by what keys them."""


def caches_in(dataset: object) -> list[CachedDataset]:
    """Return the caches that a dataset holds, inner ones first."""
    found: list[CachedDataset] = []
    if not CachedDataset.made:  # a search takes the longer the more parts the dataset has
        return found
    for cache in find_instances(dataset, (CachedDataset,)):
        found += [*caches_in(cache.dataset), cache]
    return found


def notice_changes(dataset: object) -> None:
    """Stop using the caches of a dataset whose data has changed since they were made.

    Call it in the training process, before workers start or are given an epoch.
    """
    for cache in caches_in(dataset):
        cache.notice_change()


def rest_on_parent(dataset: object) -> None:
    """Have the caches of a dataset look for no change that the training process has looked for.

    Call it in a worker of a loader that did so with :func:`notice_changes` before it started.
    """
    for cache in caches_in(dataset):
        if cache._noticed is not None:  # this process was forked
            cache._noticed = os.getpid()


def was_given_up(dataset: object) -> bool:
    """Return whether a cache of a dataset is no longer used: the data changed, or it cannot be."""
    return any(cache._given_up for cache in caches_in(dataset))


def _shuffled(files: list[NamedFile]) -> list[NamedFile]:
    """Return files in an order of which any beginning comes from all over the dataset."""
    return random.Random(0).sample(files, len(files))


def _identity_if_any(dataset: object, files: Sequence[NamedFile] | None = None) -> str | None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the caller decides whether a key is needed
        try:
            return identity(dataset, files)
        except DatasetError:
            return None


def _attributes_of(dataset: object) -> dict[tuple[int, str], str | None]:
    """Return the identity of each attribute of a dataset and of those in it; None: it has none."""
    parts = [held_by(part) for part in parts_of(dataset)]
    return {
        (number, name): _identity_if_any(value, ())
        for number, attributes in enumerate(parts)
        for name, value in attributes.items()
        if not any(held_by(value) is each for each in parts)
    }


def with_cache(dataset: Dataset[Any], folder: CacheFolder) -> Dataset[Any]:
    """Return a dataset that keeps its samples, or its pictures if it crops images at random.

    A dataset that has a cache is returned as it is.
    """
    if cache_of(dataset) is not None:
        return dataset
    inner = dataset.dataset if type(dataset) is Subset else dataset
    pictures = None
    if has_method(inner, "keeping_pictures"):  # it is a FastImageFolder
        pictures = cast("Any", inner).keeping_pictures(folder)
    if pictures is None:
        return CachedDataset(dataset, folder)
    return Subset(pictures, dataset.indices) if type(dataset) is Subset else pictures


def cache_of(dataset: object) -> CachedDataset | None:
    """Return the cache that a dataset reads from, if it has one."""
    inner = dataset.dataset if type(dataset) is Subset else dataset
    cache = dataset if isinstance(dataset, CachedDataset) else held(inner, "pictures")
    return cache if isinstance(cache, CachedDataset) else None


# -- whether samples are the same each time they are made: only such samples are kept --------------
#
# It is found by trial: samples from all over the dataset are made twice, with other states of the
# generators and in another epoch, while the generators are watched.


def tried_indices(length: int, count: int = _TRIED) -> list[int]:
    """Return indices from all over a dataset, 8 by default."""
    if not length:
        return []
    return sorted({round(i * (length - 1) / max(1, count - 1)) for i in range(count)})


class _UnreadError(Exception):
    """A sample cannot be read; the cause says why."""


def _read(dataset: MapDataset, index: int) -> Any:
    try:
        return dataset[index]
    except Exception as error:  # whatever the dataset raises
        raise _UnreadError from error


def _tried(dataset: MapDataset, look: Callable[[int], T], count: int = _TRIED) -> Iterator[T]:
    """Yield what a function tells of samples from all over a dataset.

    A sample that cannot be read fails where it is asked for, and not here: another is tried.

    Raises:
        DatasetError: No sample that was tried can be read.
    """
    wanted, others = (tried_indices(len(dataset), most) for most in (count, 3 * count))
    failed: dict[int, BaseException | None] = {}
    tried = 0
    for index in dict.fromkeys([*wanted, *others]):
        if tried - len(failed) == len(wanted):
            return
        tried += 1
        try:
            yield look(index)
        except _UnreadError as error:
            failed[index] = error.__cause__
    if failed and tried == len(failed):
        index, cause = next(iter(failed.items()))
        raise DatasetError(
            f"A cache cannot be begun or compared, as none of the samples {[*failed]} of "
            f"{type(dataset).__name__} can be read. Sample {index} raised "
            f"{type(cause).__name__}: {cause}"
        ) from cause


def refuse_drawn(dataset: MapDataset) -> None:
    """Raise DatasetError if samples draw at random, or are not the same twice."""
    if all(_tried(dataset, partial(_is_fixed, dataset))):
        return
    inner = dataset.dataset if type(dataset) is Subset else dataset
    raise DatasetError(
        f"{type(inner).__name__} draws at random, or differs from reading to reading, so that "
        "its samples cannot be kept. Cache a dataset without its random transforms, and give these "
        "to the cache (transform=...), or to the data module (augment=...). If it always returns "
        "the same samples, say so: always_same=True."
    )


def _is_fixed(dataset: MapDataset, index: int) -> bool:
    with kept_random_state():
        watch, before = DrawWatch(), own_states(dataset)
        first = taken_apart(_read(dataset, index))
        if watch.drew() or own_states(dataset) != before:
            return False
        _seed_all(dataset, index)
        with _another_epoch(dataset):
            return taken_apart(_read(dataset, index)) == first


def _seed_all(dataset: object, number: int) -> None:
    seed_global_generators(number, 0, number)
    for place, generator in enumerate(find_instances(dataset, GENERATOR_CLASSES)):
        seed_generator(generator, 1 + number + 1000 * place)


@contextmanager
def _another_epoch(dataset: object) -> Iterator[None]:
    """Have the datasets of this package draw as in another epoch while the block runs."""
    cells = [(cell, cell.get()) for cell in find_instances(dataset, (EpochCell,))]
    try:
        for cell, epoch in cells:
            cell.set(epoch + 1)
        yield
    finally:
        for cell, epoch in cells:
            cell.set(epoch)


# -- the gain of keeping the samples of a dataset, measured on a few of them: for cache="auto" -----


@dataclass(frozen=True, slots=True)
class CacheGain:
    """Costs and gain of keeping the samples of a dataset; the times include waits."""

    kept: str
    """Description of what is kept."""
    total_bytes: float
    """Bytes that all samples take in the cache, estimated."""
    made_ms: float
    """Time to make a sample without a cache, in ms."""
    first_ms: float
    """Time to make and keep a sample, in ms."""
    later_ms: float
    """Time to read a sample that was kept, in ms."""

    def __str__(self) -> str:
        return (
            f"{self.kept}: {self.total_bytes / 1e9:.3g} GB, {self.made_ms:.3g} -> "
            f"{self.later_ms:.3g} ms a sample"
        )

    def why_not(self, *, disk_bytes: float, memory_bytes: float, epochs: float) -> str | None:
        """Return why a cache is not worth it; None: it is.

        Args:
            disk_bytes: Disk space that the cache may take.
            memory_bytes: Memory that can hold the samples between epochs; with more samples, each
                epoch reads the disk.
            epochs: Number of epochs to come, infinity if that is not known.
        """
        if self.made_ms < _WORTH * self.later_ms:
            made, kept = f"{self.made_ms:.3g}", f"{self.later_ms:.3g}"
            return f"a kept sample takes {kept} ms, and {made} if it is made"
        for free_bytes, what in ((disk_bytes, "disk"), (memory_bytes, "memory")):
            if self.total_bytes > free_bytes:
                free = f"{free_bytes / 1e9:.3g} GB of {what}"
                return f"{self.total_bytes / 1e9:.3g} GB, for which {free} may be used"
        saved_ms = (epochs - 1) * (self.made_ms - self.later_ms)
        if not saved_ms > max(0.0, self.first_ms - self.made_ms):  # the first epoch saves nothing
            return f"{self}, which the epochs to come ({epochs:g}) do not pay back"
        return None


def measure_gain(dataset: Dataset[Any], folder: str) -> CacheGain:
    """Measure the costs and the gain of :func:`with_cache` on 4 to 32 samples, in about 2 s.

    Args:
        dataset: A dataset of two samples or more.
        folder: Folder for the cache of these samples.

    Raises:
        DatasetError: The dataset cannot be cached.
    """
    count = len(cast("Sized", dataset))
    with kept_random_state():
        _each_ms(dataset, [0])  # opens files that are opened only once
        one_s = _each_ms(dataset, [0]) / 1000
        fitting = int(_BUDGET_S / max(one_s * _READS_OF_EACH, 1e-9))
        fewest, most = _MEASURED
        indices = tried_indices(count, min(most, max(fewest, fitting), count))
        made_ms = min(_each_ms(dataset, indices) for _ in range(2))
        cached = with_cache(Subset(dataset, indices), folder)
        cache = cache_of(cached)
        assert cache is not None  # with_cache() has made it
        numbers = list(range(len(indices)))
        _each_ms(cached, numbers[:1])  # finds out what can be kept
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
