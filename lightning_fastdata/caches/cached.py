"""A dataset whose samples, or a source whose records, are made or read once and kept here."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Final

from torch.utils.data import Dataset

from lightning_fastdata.caches.fixed_part import (
    FixedPart,
    find_fixed_part,
    part_of,
    same_parts,
    tried_indices,
)
from lightning_fastdata.caches.folders import CacheFolder, Kept, hold, open_or_make
from lightning_fastdata.caches.sample_file import SampleFile
from lightning_fastdata.caches.sample_form import taken_apart
from lightning_fastdata.errors import DatasetError
from lightning_fastdata.randomness.global_generators import kept_random_state
from lightning_fastdata.sources.source import Raw, Source, read_ahead, reads_ahead
from lightning_fastdata.types import Batch, MapDataset

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

_FORMS_TRIED: Final = 16
"""Samples whose forms decide whether all are rows of columns."""


class CachedDataset(Kept, Dataset[Any]):
    """A map-style dataset that keeps what another one returns, and makes each sample once.

    Samples are written as they are first read, by whichever worker or rank reads them, and are
    found again by later epochs, other ranks and later runs. What is kept is what always comes to
    the same: the samples themselves, or, where a torchvision ``Compose`` in the dataset's
    ``transform`` draws at random, what its steps before that return; the rest runs each time.
    Order, draws and content are those of the dataset without a cache.

    A cache belongs to one state of the dataset: what it holds, the source of its class and of the
    functions that it holds, and size and time of the files that it names. Another state has another
    folder. A change in a function that this code calls, elsewhere, is not seen: give another
    ``key``, or delete the folder. Some samples are compared with the dataset when a run opens a
    cache, and each is held against its checksum when it is first read. A process may be killed at
    any time: a sample is in the cache whole or not at all.

    Args:
        dataset: Has a length, and samples of tensors, NumPy arrays and scalars, PIL images,
            numbers, strings, bytes and None, in tuples, lists and dicts.
        folder: ``"disk"``: below ``$LIGHTNING_FASTDATA_CACHE`` or ``~/.cache/lightning_fastdata``.
            ``"ram"``: in the memory of this machine, for all its ranks, until the last of them
            ends (Linux). Or a folder, in which each dataset gets one of its own.
        transform: Called with each sample that is returned; not cached. It may draw at random.
        max_bytes: What the samples may take. Those that find no room are made each time. Default:
            half of the disk that is free, a quarter of the memory.
        key: By which the cache is found, in place of the dataset's state: change it when the
            samples change.
        always_same: The dataset always returns the same samples, though it seems to draw.

    Raises:
        OptionsError: An argument has an impossible value, there is no such memory, or the folder of
            the cache belongs to another user, is a link, or cannot be written to.
        DatasetError: The dataset has no length, cannot be recognised in another run, or draws at
            random; or what is in the folder is damaged.

    Example:
        >>> data = CachedDataset(ImageFolder("photos", Resize(256)), "disk")  # doctest: +SKIP
    """

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
        super().__init__(dataset, folder, max_bytes=max_bytes, key=key)
        self.dataset = dataset
        self.transform = transform
        self._always_same = always_same
        self._part: FixedPart | None = None
        self._columns: list[NDArray[Any]] | None = None

    def __getitem__(self, index: int) -> Batch:
        """Return a sample, from the cache or made now.

        Raises:
            IndexError: There is no such sample.
            DatasetError: The cache is of other samples, or cannot be read.
        """
        number = int(index)
        if not -self._length <= number < self._length:
            raise IndexError(f"There is no sample {index}: the dataset has {self._length}.")
        number %= self._length
        opened = self._opened()
        if opened is None:
            sample = self.dataset[number]
        else:
            file, part = opened
            there, sample = file.read(number)
            if not there:
                sample = self._make(file, part, number)
            if part.rest is not None:
                sample = part.rest(sample)
        return sample if self.transform is None else self.transform(sample)

    def _make(self, file: SampleFile, part: FixedPart, number: int) -> Batch:
        # What is left of the sample is to draw the same, whether this was made now or not.
        with kept_random_state():
            sample = part.dataset[number]
        self._keep(file, number, sample)
        return sample

    def _fill(self, indices: Sequence[int]) -> list[bool]:
        opened = self._opened()
        if opened is None:
            return []
        file, part = opened
        for index in indices:
            if not file.has(index):
                self._make(file, part, index)
        return [file.has(index) for index in indices]

    @property
    def can_read_ahead(self) -> bool:
        """Whether the dataset can begin to read samples before they are asked for."""
        return reads_ahead(self.dataset)

    def read_ahead(self, indices: Sequence[int]) -> None:
        """Have the dataset begin to read samples that are not in the cache."""
        opened = self._opened()
        if opened is None:
            read_ahead(self.dataset, indices)
        else:
            file, part = opened
            read_ahead(part.dataset, [index for index in indices if not file.has(index)])

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_part": None, "_columns": None}

    @property
    def owner(self) -> MapDataset:
        """The dataset whose samples are kept."""
        return self.dataset

    def _let_go(self) -> None:
        super()._let_go()
        self._part = self._columns = None

    def __repr__(self) -> str:
        return f"CachedDataset({self.dataset!r}, {str(self.folder)!r})"

    def explain(self) -> str:
        """Return what is kept and where, as text."""
        file = self._seen()
        if file is None:
            return f"cache: {self.folder}, {'not used' if self._given_up else 'empty yet'}"
        said = file.manifest.get("kept", "samples")
        used_mb = file.used_bytes() / 1e6
        return f"cache: {self.folder}, {file.stored()} of {self._length}, {used_mb:.0f} MB: {said}"

    def row_of(self, index: int) -> NDArray[np.uint8] | None:
        """Return the bytes of a sample that is one array, where they are in the file.

        None unless the sample is kept as it is returned, and was read in this run before.
        """
        opened = self._opened()
        if opened is None or opened[1].rest is not None or self.transform is not None:
            return None
        return opened[0].first_leaf(index)

    def columns(self) -> list[NDArray[Any]] | None:
        """Return the leaves of the samples as memory maps ``[samples, ...]``, in order.

        None unless all samples are kept as they are returned, whole, in one form of numbers alone.
        """
        file = None if self.transform is not None else self._seen()
        if file is None or file.manifest.get("steps") is not None:
            return None
        if self._columns is None:
            # Kept, because pages of a new map would have to be found again.
            columns = file.columns()
            if columns is not None and self._opened() is not None:  # which compares some
                self._columns = columns
        return self._columns

    def form(self) -> dict[str, Any] | None:
        """Return the form of all samples in the cache; None: they differ, or there is none yet."""
        file = self._seen()
        return None if file is None else file.form

    def _existing(self) -> SampleFile | None:
        if self._file is None:
            self._file = super()._existing()
        return self._file

    def _opened(self) -> tuple[SampleFile, FixedPart] | None:
        """Return the cache and what is kept in it; it is made if it is not there.

        None if it is optional and cannot be used.
        """
        if self._file is not None and self._part is not None:
            return self._file, self._part
        if not self._given_up:
            try:
                return self._open()
            except Exception as error:  # of the system, the cache, or the samples to compare
                self._go_without(error)
        return None

    def _open(self) -> tuple[SampleFile, FixedPart]:
        if not self._in_memory:
            hold(self.folder)
        with kept_random_state():
            file = self._file = open_or_make(self.folder, self._existing, self._create)
        part = part_of(self.dataset, file.manifest.get("steps"))
        if self._length not in self._known:
            self._compare(file, part)
            self._known.add(self._length)
        self._file, self._part = file, part
        return file, part

    def _create(self) -> SampleFile:
        part = find_fixed_part(self.dataset, always_same=self._always_same)
        tried = tried_indices(self._length, _FORMS_TRIED) if self._length else []
        forms = [taken_apart(part.dataset[index])[0] for index in tried]
        same = bool(forms) and all(form == forms[0] for form in forms)
        return self._new_file(
            form=forms[0] if same else None,
            about={"steps": part.steps, "kept": part.said, "dataset": type(self.dataset).__name__},
        )

    def _compare(self, file: SampleFile, part: FixedPart) -> None:
        """Compare some samples of the cache with the dataset."""
        for index in tried_indices(self._length) if self._length else []:
            there, kept = file.read(index)
            if not there:
                continue
            with kept_random_state():
                made = part.dataset[index]
            if not same_parts(taken_apart(kept), taken_apart(made)):
                raise DatasetError(
                    f"The cache {self.folder} does not hold what {type(self.dataset).__name__} "
                    f"returns now: sample {index} differs. Delete the folder, and it is made "
                    "again; if you gave it a key, give another one when the samples change."
                )


class CachedSource(Kept):
    """A source that keeps its records on this machine: of object storage, or a slow file system.

    Records are written as they are first read, by whichever worker or rank reads them, and are
    found again by later epochs, other ranks and later runs. Nothing is thrown out to make room: a
    shuffled epoch reads each record once, so one that was thrown out for another is missed as
    often. Records beyond ``max_bytes`` are read from where they are. What nothing has read for 30
    days is removed as a whole.

    A cache belongs to one state of the source: the source of its class, the names of its records,
    and what a listing said of objects or the system of files. Some are compared with the source
    when a run opens a cache, and each is held against its checksum when it is first read.

    Args:
        source: Of records that are bytes, or dicts of bytes, arrays, numbers and strings.
        folder: ``"disk"``, ``"ram"`` or a folder; as for :class:`CachedDataset`.
        max_bytes: What the records may take. Default: half of the disk that is free, a quarter of
            the memory.
        key: As for :class:`CachedDataset`.

    Raises:
        OptionsError: As of :class:`CachedDataset`.
        DatasetError: The source cannot be recognised in another run; or what is in the folder is
            damaged.

    Example:
        >>> photos = ObjectSource("s3://bucket/photos")  # doctest: +SKIP
        >>> SourceDataset(CachedSource(photos), decode)  # doctest: +SKIP
    """

    def __init__(
        self,
        source: Source,
        folder: CacheFolder = "disk",
        *,
        max_bytes: int | None = None,
        key: str | None = None,
    ) -> None:
        super().__init__(source, folder, max_bytes=max_bytes, key=key)
        self.source = source
        self.parallel_reads = source.parallel_reads
        self._opening = threading.Lock()

    def get_bytes(self, indices: Sequence[int]) -> list[Raw]:
        """Return records, from the cache where they are there.

        Raises:
            DatasetError: The cache is of other records, or cannot be read.
        """
        file = self._opened()
        if file is None:
            return self._read(indices)
        found = {
            index: record for index in indices for there, record in [file.read(index)] if there
        }
        missing = [index for index in dict.fromkeys(indices) if index not in found]
        if missing:
            for index, record in zip(missing, self._read(missing), strict=True):
                self._keep(file, index, record)
                found[index] = record
        return [found[index] for index in indices]

    def _fill(self, indices: Sequence[int]) -> list[bool]:
        file = self._opened()
        if file is None:
            return []
        self.get_bytes([index for index in indices if not file.has(index)])
        return [file.has(index) for index in indices]

    @property
    def owner(self) -> Source:
        """The source whose records are kept."""
        return self.source

    def name_of(self, index: int) -> str:
        """Return what the source calls a record."""
        return self.source.name_of(index)

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_opening": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, _opening=threading.Lock())

    def __repr__(self) -> str:
        return f"CachedSource({self.source!r}, {str(self.folder)!r})"

    # What follows reads nothing from the source, which this process perhaps must not: see
    # ObjectSource.

    def explain(self) -> str:
        """Return what is kept and where, as text."""
        return (
            f"cache: {self.folder}, {self.stored} of {self._length}, {self.stored_bytes / 1e6:.0f} "
            f"MB: records of {type(self.source).__name__}"
        )

    def _opened(self) -> SampleFile | None:
        """Return the cache; it is made if it is not there. None: it is optional, and not usable."""
        if self._file is not None:
            return self._file
        with self._opening:  # reads come in several threads
            if self._file is None and not self._given_up:
                try:
                    self._file = self._open()
                except Exception as error:  # of the system, the cache, or the source to compare
                    self._go_without(error)
        return self._file

    def _open(self) -> SampleFile:
        if not self._in_memory:
            hold(self.folder)
        file = open_or_make(self.folder, self._existing, self._create)
        if self._length not in self._known:
            self._compare(file)
            self._known.add(self._length)
        return file

    def _create(self) -> SampleFile:
        about = {"kept": "records", "source": type(self.source).__name__}
        return self._new_file(form=None, about=about)

    def _read(self, indices: Sequence[int]) -> list[Any]:
        """Return records of the source, in the form in which the cache returns them."""
        records = self.source.get_bytes(indices)
        return [bytes(each) if isinstance(each, memoryview) else each for each in records]

    def _compare(self, file: SampleFile) -> None:
        """Compare some records of the cache with the source."""
        for index in tried_indices(self._length) if self._length else []:
            there, kept = file.read(index)
            if there and not same_parts(taken_apart(kept), taken_apart(*self._read([index]))):
                raise DatasetError(
                    f"The cache {self.folder} does not hold what {self.name_of(index)} is now. "
                    "Delete the folder, and it is made again; if you gave it a key, give another "
                    "one when the records change."
                )
