"""Which files a dataset has, packed so that a million of them are cheap to hold and to send."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from lightning_fastdata.errors import DatasetError
from lightning_fastdata.images.packed import PackedStrings

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence


class FolderError(DatasetError, FileNotFoundError):
    """An image folder is missing, or has no classes or no files.

    Also a ``FileNotFoundError``, which is what torchvision's ``ImageFolder`` raises.
    """


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PathIndex:
    """Paths and class numbers of all samples: three blocks of memory instead of a list of tuples.

    A list of 1.28 million ``(path, class)`` tuples takes about a second to send to a side process;
    this takes the time of copying its bytes.
    """

    paths: PackedStrings
    """Path of each sample."""
    targets: npt.NDArray[np.int32]
    """Class number of each sample."""

    @classmethod
    def pack(cls, samples: Sequence[tuple[str, int]]) -> PathIndex:
        """Pack ``(path, class)`` pairs."""
        return cls(
            paths=PackedStrings(path for path, _ in samples),
            targets=np.fromiter((target for _, target in samples), np.int32, len(samples)),
        )

    def __len__(self) -> int:
        return len(self.targets)

    def path(self, index: int) -> str:
        """Return the path of sample ``index``, 0 <= index < len."""
        return self.paths[index]

    def samples(self) -> list[tuple[str, int]]:
        """Unpack into ``(path, class)`` pairs."""
        return list(zip(self.paths, self.targets.tolist(), strict=True))


def scan_folder(
    root: str, *, is_valid_file: Callable[[str], bool] | None = None, allow_empty: bool = False
) -> tuple[list[str], dict[str, int], PathIndex]:
    """Find classes and files with torchvision's own functions, so that they are ``ImageFolder``'s.

    Args:
        root: Folder with one sub-folder per class.
        is_valid_file: Which paths belong to the dataset; None: the extensions of ``ImageFolder``.
        allow_empty: Whether a class may have no files.

    Returns:
        Class names, class name to number, and the index of the samples.

    Raises:
        FolderError: If the folder does not exist, has no class folders, or a class has no files.
    """
    from torchvision.datasets.folder import IMG_EXTENSIONS, find_classes, make_dataset

    try:
        classes, class_to_idx = find_classes(root)
        samples = make_dataset(
            root,
            class_to_idx,
            extensions=IMG_EXTENSIONS if is_valid_file is None else None,
            is_valid_file=is_valid_file,
            allow_empty=allow_empty,
        )
    except (FileNotFoundError, NotADirectoryError) as error:
        raise FolderError(
            f"{root!r} cannot be used as an image folder: {error}. "
            f"Put the images of each class into a folder of its own, {root}/<class>/<image>.jpg, "
            "or allow classes without images with allow_empty=True."
        ) from error
    return classes, class_to_idx, PathIndex.pack(samples)
