"""The pictures of a folder, kept as pixels."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch.utils.data import Dataset

from lightning_fastdata.caches.cached import CachedDataset
from lightning_fastdata.caches.folders import CacheFolder
from lightning_fastdata.ext.images.folder import FastImageFolder
from lightning_fastdata.ext.images.stored import as_row, open_stored, shrunk

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from lightning_fastdata.ext.images.reading import ImageFiles
    from lightning_fastdata.ext.images.stored import Picture


def cache_images(
    dataset: FastImageFolder,
    folder: CacheFolder = "disk",
    *,
    max_bytes: int | None = None,
    key: str | None = None,
) -> FastImageFolder:
    """Return an image folder that keeps its pictures and draws its crops from these.

    Files are decoded once, by whichever worker or rank reads them first; later epochs, other ranks
    and later runs cut their crops out of what is kept, to exactly the pixels without a cache.
    Order, draws and options are those of the dataset. It works best with ``shorter_side``: pictures
    of 256 pixels take a fraction of the room of whole ones, 3 bytes a pixel. What does not fit the
    memory is read from the disk in each epoch, which is no gain over files. How the cache is found,
    checked and shared: :class:`CachedDataset`.

    Args:
        dataset: Whose pictures.
        folder: ``"disk"``, ``"ram"`` or a folder; as for :class:`CachedDataset`.
        max_bytes: What the pictures may take; others are read from their files. Default: half of
            the disk that is free, a quarter of the memory.
        key: As for :class:`CachedDataset`.

    Raises:
        OptionsError: An argument has an impossible value.

    Example:
        >>> photos = FastImageFolder("photos", size=224, shorter_side=256)  # doctest: +SKIP
        >>> FastDataLoader(cache_images(photos), 64, shuffle=True)  # doctest: +SKIP
    """
    pictures = _Pictures(dataset.files, dataset.shorter_side)
    return dataset.reading_from(ImageCache(pictures, folder, max_bytes, key))


class ImageCache(CachedDataset):
    """The pictures of a folder, as rows of bytes; made by :func:`cache_images`."""

    def __init__(
        self, pictures: _Pictures, folder: CacheFolder, max_bytes: int | None, key: str | None
    ) -> None:
        super().__init__(pictures, folder, max_bytes=max_bytes, key=key, always_same=True)
        self._said = "pictures"
        if pictures.shorter_side is not None:
            self._said += f", shorter side {pictures.shorter_side}"

    def open(self, index: int) -> Picture:
        """Return a picture; it is made and kept if it was not."""
        row = self.row_of(index)
        return open_stored(self[index] if row is None else row)


class _Pictures(Dataset["NDArray[np.uint8]"]):
    """Pictures, each one row of bytes."""

    def __init__(self, files: ImageFiles, shorter_side: int | None) -> None:
        self.samples = files.paths  # by this name their sizes and times become part of the identity
        self.files = files
        self.shorter_side = shorter_side

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> NDArray[np.uint8]:
        return as_row(shrunk(self.files.open(index), self.shorter_side))
