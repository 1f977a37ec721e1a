"""The pictures of a folder, kept in a form that is quicker to read than their files."""

from __future__ import annotations

import shutil
import warnings
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Literal, TypeAlias, get_args

import numpy as np
from torch.utils.data import Dataset, Subset

from lightning_fastdata.caches.cached import CachedDataset, CachedSource
from lightning_fastdata.caches.fixed_part import tried_indices
from lightning_fastdata.caches.folders import (
    CacheFolder,
    cache_path,
    cache_root,
    choosing,
    is_memory,
    make_folder,
)
from lightning_fastdata.errors import FastDataWarning, OptionsError
from lightning_fastdata.host.memory import read_host_memory
from lightning_fastdata.images.folder import FastImageFolder
from lightning_fastdata.images.stored import (
    FORMS,
    StoredForm,
    encoded,
    open_stored,
    shrunk,
    size_of_shrunk,
    stored_bytes,
)
from lightning_fastdata.sources.dataset import SourceDataset

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from numpy.typing import NDArray

    from lightning_fastdata.images.reading import ImageFiles
    from lightning_fastdata.images.resized_crop import Picture

ImageForm: TypeAlias = StoredForm | Literal["auto"]

_MEASURED: Final = 32
"""Pictures whose sizes stand for all."""
_SHARE_OF_MEMORY = _SHARE_OF_DISK = 2
"""What the pictures may take of what is free, so that other programs have the rest."""


def cache_images(
    dataset: FastImageFolder,
    folder: CacheFolder = "disk",
    *,
    form: ImageForm = "auto",
    max_bytes: int | None = None,
    key: str | None = None,
) -> FastImageFolder:
    """Return an image folder that keeps its pictures and draws its crops from these.

    Files are decoded once, by whichever worker or rank reads them first; later epochs, other ranks
    and later runs cut their crops out of what is kept. Order, draws and options are those of the
    dataset. It works best with ``shorter_side``: pictures of 256 pixels take a fraction of the room
    of whole ones. How the cache is found, checked and shared: :class:`CachedDataset`.

    Args:
        dataset: Whose pictures.
        folder: ``"disk"``, ``"ram"`` or a folder; as for :class:`CachedDataset`.
        form: ``"rgb"``: pixels, exactly those without a cache. ``"yuv"``: half the room, colours at
            half the resolution (38 to 40 dB). ``"jpeg"``: quality 90, a twelfth of the room (35 to
            38 dB). ``"auto"``: a form that is there already, otherwise the first of these
            that fits half of the free memory and of the free disk; with whole pictures
            (``shorter_side=None``), ``"rgb"`` or none.
        max_bytes: What the pictures may take; others are read from their files. Default: half of
            the disk that is free, a quarter of the memory.
        key: As for :class:`CachedDataset`.

    Raises:
        OptionsError: An argument has an impossible value.
        DatasetError: A file cannot be read.

    Warns:
        FastDataWarning: With ``"auto"``, no form fits; the dataset is returned as it is.

    Example:
        >>> photos = FastImageFolder("photos", size=224, shorter_side=256)  # doctest: +SKIP
        >>> FastDataLoader(cache_images(photos), 64, shuffle=True)  # doctest: +SKIP
    """
    if form not in get_args(StoredForm) and form != "auto":
        raise OptionsError(f"form is {form!r}; choose one of auto, {', '.join(FORMS)}.")
    with choosing(folder):
        chosen = form if form != "auto" else _choose(dataset, folder, max_bytes, key)
        if chosen is None:
            return dataset
        pictures = _Pictures(dataset.files, dataset.shorter_side, chosen)
        # So that other ranks, which may see less room, find it and take the same.
        make_folder(cache_path(pictures, folder, _key(key, chosen)))
        return dataset.reading_from(ImageCache(pictures, folder, max_bytes, _key(key, chosen)))


def with_cache(dataset: Dataset[Any], folder: CacheFolder) -> Dataset[Any]:
    """Return a dataset that keeps what takes longest to get.

    The pictures of an image folder whose crops are random; the records of a source that answers
    late; of any other dataset, its samples.
    """
    if cache_of(dataset) is not None:
        return dataset
    inner = dataset.dataset if type(dataset) is Subset else dataset
    cached: Dataset[Any]
    if isinstance(inner, FastImageFolder) and inner.rule.draws:
        cached = cache_images(inner, folder)
    elif type(inner) is SourceDataset and inner.source.parallel_reads > 1:
        source = CachedSource(inner.source, folder)
        cached = SourceDataset(source, inner.decode, timeout_s=inner.timeout_s)
    else:
        return CachedDataset(dataset, folder)
    return Subset(cached, dataset.indices) if type(dataset) is Subset else cached


def cache_of(dataset: object) -> CachedDataset | CachedSource | None:
    """Return the cache that a dataset reads from, if it has one."""
    if isinstance(dataset, CachedDataset):
        return dataset
    inner = dataset.dataset if type(dataset) is Subset else dataset
    held: object = None
    if isinstance(inner, FastImageFolder):
        held = inner.pictures
    elif isinstance(inner, SourceDataset):
        held = inner.source
    return held if isinstance(held, ImageCache | CachedSource) else None


class ImageCache(CachedDataset):
    """The pictures of a folder in one form, as rows of bytes; made by :func:`cache_images`."""

    def __init__(
        self, pictures: _Pictures, folder: CacheFolder, max_bytes: int | None, key: str | None
    ) -> None:
        super().__init__(pictures, folder, max_bytes=max_bytes, key=key, always_same=True)
        self._said = f"pictures as {pictures.form}"
        if pictures.shorter_side is not None:
            self._said += f", shorter side {pictures.shorter_side}"

    def open(self, index: int) -> Picture:
        """Return a picture; it is made and kept if it was not."""
        row = self.row_of(index)
        return open_stored(self[index] if row is None else row, f"{self.folder}, picture {index}")

    def explain(self) -> str:
        """Return what is kept and where, as text."""
        return super().explain().partition(": samples")[0] + f": {self._said}"


class _Pictures(Dataset["NDArray[np.uint8]"]):
    """Pictures in a form, each one row of bytes."""

    def __init__(self, files: ImageFiles, shorter_side: int | None, form: StoredForm) -> None:
        self.samples = files.paths  # by this name their sizes and times become part of the identity
        self.files = files
        self.shorter_side = shorter_side
        self.form = form

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> NDArray[np.uint8]:
        return encoded(shrunk(self.files.open(index), self.shorter_side), self.form)


@dataclass(frozen=True, slots=True)
class Room:
    """What there is for pictures."""

    disk_bytes: float
    """That they may take, where they are kept."""
    memory_bytes: float
    """That they may take of the memory, from which they are read again and again."""


def choose_form(needed_bytes: Mapping[StoredForm, float], room: Room) -> StoredForm | None:
    """Return the quickest form to read that fits; None: none does.

    Pictures that do not fit the memory come from the disk in each epoch: pixels are then ten times
    as much to read as files.
    """
    least = min(room.disk_bytes, room.memory_bytes)
    return next((form for form in FORMS if needed_bytes.get(form, float("inf")) <= least), None)


def _choose(
    dataset: FastImageFolder, folder: CacheFolder, max_bytes: int | None, key: str | None
) -> StoredForm | None:
    exact = dataset.shorter_side is None
    allowed = FORMS[:1] if exact else FORMS
    for form in allowed:
        pictures = _Pictures(dataset.files, dataset.shorter_side, form)
        if cache_path(pictures, folder, _key(key, form)).is_dir():
            return form
    needed = {form: _needed_bytes(dataset, form) for form in allowed}
    room = _room(folder, max_bytes)
    chosen = choose_form(needed, room)
    if chosen is None:
        smallest = allowed[-1]
        advice = "Give shorter_side=256" if exact else "Give more room, or a form"
        warnings.warn(
            f"The pictures of {dataset.root} are not kept: as {smallest} they would take "
            f"{needed[smallest] / 1e9:.3g} GB, and there are {room.disk_bytes / 1e9:.3g} GB of "
            f"disk and {room.memory_bytes / 1e9:.3g} GB of memory for them. {advice}.",
            FastDataWarning,
            stacklevel=4,
        )
    return chosen


def _needed_bytes(dataset: FastImageFolder, form: StoredForm) -> float:
    indices = tried_indices(len(dataset), _MEASURED) if len(dataset) else []
    sizes = []
    for index in indices:
        image = dataset.files.open(index)
        height, width = size_of_shrunk(image.height, image.width, dataset.shorter_side)
        sizes.append(stored_bytes(height, width, form))
    return float(np.mean(sizes)) * len(dataset) if sizes else 0.0


def _room(folder: CacheFolder, max_bytes: int | None) -> Room:
    memory = read_host_memory().available_bytes / _SHARE_OF_MEMORY
    if is_memory(folder):
        return Room(max_bytes or memory / 2, memory)
    return Room(max_bytes or _free_bytes(cache_root(folder)) / _SHARE_OF_DISK, memory)


def _free_bytes(folder: Path) -> int:
    return shutil.disk_usage(folder).free


def _key(key: str | None, form: StoredForm) -> str | None:
    return None if key is None else f"{key}-{form}"
