"""A folder of images as a dataset of samples of one size, ready for a batch slot."""

from __future__ import annotations

import copy
import operator
import os
from collections.abc import Callable, Sequence
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data import Dataset

from lightning_fastdata.caches.cached import CachedDataset
from lightning_fastdata.caches.folders import CacheFolder
from lightning_fastdata.errors import (
    BatchError,
    DatasetError,
    OptionsError,
    check,
    check_callable,
    checked_seed,
    is_number,
    is_whole,
    require,
)
from lightning_fastdata.ext.images.decoders import (
    MAX_PIXELS,
    Decoder,
    DecoderName,
    ImageFiles,
    Picture,
    Pixels,
    StoredPicture,
    choose_decoder,
)
from lightning_fastdata.ext.images.resized_crop import (
    Crop,
    CropRule,
    Placement,
    Resample,
    keyed_uniform,
    normalising_tables,
    plan_resample,
    render,
    settle_resample,
    shrunk,
)
from lightning_fastdata.host.system_calls import SharedFlags
from lightning_fastdata.order.epoch_order import Counted
from lightning_fastdata.randomness.seeds import EpochCell
from lightning_fastdata.sources.files import PackedStrings
from lightning_fastdata.types import READ_FOR, SampleKey

_HEAD_BYTES: Final = 8
"""Number of bytes of height and width, 4 each, with which a kept picture begins."""

_OTHER_PIXELS: Final = (
    "Random crops of kept pictures have other pixels than those of the files, where they shrink a "
    "JPEG to half its size or less: a file is then decoded at a reduced scale, and a kept picture "
    'is not. resample="exact" gives the same pixels with a cache and without one.'
)


_IMAGE_FOLDERS: Final = ("transform", "target_transform", "transforms", "loader")
"""Attributes of torchvision's ``ImageFolder`` that have no effect here."""


class FolderError(DatasetError, FileNotFoundError):
    """An image folder is missing, or has no classes or no files.

    Also a ``FileNotFoundError``, which is what torchvision's ``ImageFolder`` raises.
    """


class FastImageFolder(Dataset[tuple[torch.Tensor, int]]):
    """Images in one folder per class, decoded, cropped and resized to uint8 ``[size, size, 3]``.

    Classes, their numbers and the order of the samples are those of torchvision's ``ImageFolder``.
    ``dataset[i]`` is ``(image, target)``: a contiguous uint8 tensor, height x width x RGB, and the
    class number. Height first and channels last is how images are decoded and how the transforms
    on the device want them; a model that wants float channels first gets it there
    (``images.permute(0, 3, 1, 2).float().div(255)``, or ``ToTensorV2`` on the device). Where there
    is no such device, with ``normalize`` the process that decodes a picture also makes normalised
    float32 ``[3, size, size]`` of it, four times as many bytes, straight into the batch.

    The random part of a sample depends on (``seed``, epoch, index) and nothing else: not on the
    worker, the thread, the batch size or what was read before. :meth:`set_epoch` says which epoch
    it is, also to the worker processes of torch's ``DataLoader``, persistent or not; without a call
    every epoch draws the same crops. Below another dataset, loaders of this package add their own
    epoch and index to that. :meth:`write_into` takes another key.

    Any number of threads may read from one instance. OpenCV and torch may use threads of their own
    for a single picture; in side processes set both to one (``cv2.setNumThreads(0)``,
    ``torch.set_num_threads(1)``), as torch's ``DataLoader`` does for torch.

    Args:
        root: Folder with one sub-folder per class.
        size: Height and width of a sample in pixels.
        crop: ``"random_resized"`` for training: a box of random area and shape. ``"center"`` for
            validation: shorter side to ``resize``, then the centre. ``"stretch"``: the whole
            picture, whatever its shape.
        scale: Smallest and largest area of a random box, as a share of the picture's area.
        ratio: Smallest and largest width / height of a random box.
        horizontal_flip: Probability of mirroring left to right. Default: never.
        resize: Length of the shorter side before the centre is cut; None: 8/7 of ``size`` (256 for
            224).
        shorter_side: Length in pixels to which the shorter side of pictures is shrunk, antialiased,
            before anything is cut out; smaller pictures stay. That costs time unless the pictures
            are kept: :func:`~lightning_fastdata.data.cache_images`. None: pictures as they are.
        normalize: True: float32 samples ``(value / 255 - mean) / std``, channels first, with
            ImageNet's means and deviations; or ``(mean, std)``, three numbers each. Default: uint8.
        resample: ``"auto"``: fast for random crops, exactly torchvision's antialiased resize for
            the others; ``"exact"``: that for all.
        seed: Seed of the random crops and flips.
        decoder: ``"auto"`` takes simplejpeg, or else pillow; :attr:`decoder` says which.
        max_pixels: Height x width above which a file is refused before it is decoded.
        check_files: Random crops of a JPEG decode no more of it than they need, if a library for
            that is installed (``pip install lightning-fastdata[jpeg]``), to the same pixels. True:
            the first read of a file decodes it whole, which finds damage anywhere in it; forked
            processes share which files were read. False: each read decodes only what it needs, so
            that damage outside the crops stays unseen.
        is_valid_file: Which paths belong to the dataset; None: ``ImageFolder``'s extensions.
        allow_empty: Whether a class may have no files.

    Raises:
        OptionsError: If an option has an impossible value, or a subclass has a ``find_classes`` or
            ``make_dataset``, which ``ImageFolder`` would call.
        MissingPackageError: If a package of ``lightning-fastdata[images]`` is not installed.
        FolderError: If there are no classes or a class has no files; it is both a
            ``DatasetError`` and a ``FileNotFoundError``.

    Example:
        >>> train = FastImageFolder("photos/train", size=224, horizontal_flip=0.5)  # doctest: +SKIP
        >>> val = FastImageFolder("photos/val", size=224, crop="center")  # doctest: +SKIP
    """

    def __init__(
        self,
        root: str | os.PathLike[str],
        *,
        size: int,
        crop: Crop = "random_resized",
        scale: tuple[float, float] = (0.08, 1.0),
        ratio: tuple[float, float] = (3 / 4, 4 / 3),
        horizontal_flip: float = 0.0,
        resize: int | None = None,
        shorter_side: int | None = None,
        normalize: bool | tuple[Sequence[float], Sequence[float]] = False,
        resample: Resample = "auto",
        seed: int = 0,
        decoder: DecoderName = "auto",
        max_pixels: int = MAX_PIXELS,
        check_files: bool = True,
        is_valid_file: Callable[[str], bool] | None = None,
        allow_empty: bool = False,
    ) -> None:
        for package in ("torchvision", "cv2"):
            require(package, extra="images", what="FastImageFolder")
        for name in ("find_classes", "make_dataset"):
            if hasattr(self, name):
                raise OptionsError(
                    f"{type(self).__name__}.{name} would not be called: FastImageFolder finds "
                    "classes and files by itself, as ImageFolder does. Use torchvision's "
                    "ImageFolder, or is_valid_file= to leave files out."
                )
        self.rule = CropRule(size, crop, scale, ratio, horizontal_flip, resize)
        least = self.rule.shorter_side if crop == "center" else 1
        fine = shorter_side is None or is_whole(shorter_side, least)
        check("shorter_side", shorter_side, fine, f"None and whole numbers from {least}")
        check("max_pixels", max_pixels, is_number(max_pixels, above=0), "numbers above 0")
        for name, value in (("check_files", check_files), ("allow_empty", allow_empty)):
            check(name, value, isinstance(value, bool | np.bool_), "True and False")
        check_callable("is_valid_file", is_valid_file, "a path and returns whether it is a sample")
        check("root", root, isinstance(root, str | os.PathLike), "paths")
        self.shorter_side = shorter_side
        self._tables = None if normalize is False else normalising_tables(normalize)
        self.resample = settle_resample(resample, crop)
        self.root = os.path.expanduser(os.fsdecode(root))  # noqa: PTH111  # as ImageFolder spells it
        self.seed = checked_seed(seed)
        self._epoch = EpochCell()
        choose_decoder(decoder)  # a missing decoder is an error now, not in a worker
        self.classes, self.class_to_idx, samples = _find_files(
            self.root, is_valid_file=is_valid_file, allow_empty=allow_empty
        )
        self._paths = PackedStrings(path for path, _ in samples)
        self.files = ImageFiles(self._paths, decoder, max_pixels)
        self._targets = np.array([target for _, target in samples], np.int32)
        self._samples: list[tuple[str, int]] | None = None
        # Files that were decoded whole, so that none is damaged anywhere; None: none is checked.
        self._whole = SharedFlags(len(samples)) if check_files else None
        self.pictures: ImageCache | None = None
        """Cache that keeps the pictures; None: they are read from their files."""

    @property
    def decoder(self) -> Decoder:
        """The decoder in use in this process; ``decoder.name`` names it."""
        return choose_decoder(self.files.decoder_name)

    @property
    def sample_shape(self) -> tuple[int, int, int]:
        """Shape of one sample: ``(size, size, 3)``, or ``(3, size, size)`` with ``normalize``."""
        size = self.rule.size
        return (size, size, 3) if self._tables is None else (3, size, size)

    @property
    def sample_dtype(self) -> np.dtype[Any]:
        """uint8, or float32 with ``normalize``."""
        return np.dtype(np.uint8 if self._tables is None else np.float32)

    @property
    def samples(self) -> list[tuple[str, int]]:
        """``(path, class number)`` of every sample, as ``ImageFolder`` has it.

        Unpacked on first use and kept; changing the list does not change the dataset (pass
        ``is_valid_file`` to leave files out).
        """
        if self._samples is None:
            self._samples = list(zip(self._paths, self._targets.tolist(), strict=True))
        return self._samples

    @property
    def imgs(self) -> list[tuple[str, int]]:
        """The same list as :attr:`samples`."""
        return self.samples

    @property
    def targets(self) -> list[int]:
        """Class number of every sample."""
        targets: list[int] = self._targets.tolist()
        return targets

    def path_of(self, index: int) -> str:
        """Return the path of one sample's file, without unpacking all of them."""
        return self._paths[index]

    def set_epoch(self, epoch: int) -> None:
        """Draw the random crops and flips of this epoch (counted from 0) from now on."""
        self._epoch.set(epoch)
        self._epoch.counted = isinstance(epoch, Counted)

    @property
    def epoch(self) -> int:
        """The epoch whose random crops and flips are drawn."""
        return (Counted if self._epoch.counted else int)(self._epoch.get())

    def __len__(self) -> int:
        return len(self._targets)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        """Return ``(image, target)``: uint8 ``[size, size, 3]`` and the class number.

        With ``normalize`` the image is float32 ``[3, size, size]``.

        Raises:
            DatasetError: If the file cannot be read or decoded; the message names it.
            IndexError: If there is no such sample.
        """
        out = np.empty(self.sample_shape, self.sample_dtype)
        target = self.write_into(index, out)
        return torch.from_numpy(out), target

    def write_into(self, index: int, out: NDArray[Any], *, key: SampleKey | None = None) -> int:
        """Write sample ``index`` into ``out`` and return its class number.

        Args:
            index: Number of the sample; a negative one counts from the end.
            out: Array of :attr:`sample_shape` and :attr:`sample_dtype`, C-contiguous, writable: one
                row of a batch, say. Its contents are undefined if an error is raised.
            key: The key on which the random part depends; None: this dataset's seed and epoch, and
                ``index``.

        Raises:
            DatasetError: If the file cannot be read or decoded; the message names it.
            BatchError: If ``out`` has another shape, dtype or layout.
            IndexError: If there is no such sample.
        """
        count = len(self._targets)
        if not -count <= index < count:
            raise IndexError(f"There is no sample {index}: the dataset has {count}.")
        index, (epoch, added) = operator.index(index) % count, READ_FOR.get()
        epoch = self.epoch if epoch is None else epoch
        self._check_out(out)
        image = self._open(index)
        uniform = keyed_uniform(key or SampleKey(self.seed, epoch, index + added))
        placement = self.rule.place(image.height, image.width, uniform)
        plan = plan_resample(placement, self.resample, scalable=image.scalable)
        if self.pictures is not None:
            self.pictures.tell_of_scale(index, placement, self.resample)
        unchecked = self._whole is not None and index not in self._whole
        size = self.rule.size
        pixels: Pixels = out if self._tables is None else np.empty((size, size, 3), np.uint8)
        render(image, placement, plan, pixels, whole=unchecked)
        if self._whole is not None:
            self._whole.add(index)
        if self._tables is not None:
            import cv2

            for plane, table, floats in zip(cv2.split(pixels), self._tables, out, strict=True):
                cv2.LUT(plane, table, dst=floats)
        return int(self._targets[index])

    def keeping_pictures(self, folder: CacheFolder) -> FastImageFolder | None:
        """Return this dataset with a cache of its pictures; None: its samples are never random."""
        return cache_images(self, folder) if self.rule.draws else None

    def _open(self, index: int) -> Picture:
        if self.pictures is not None:
            return self.pictures.open(index)
        image = self.files.open(index)
        if self.shorter_side is None:
            return image
        return StoredPicture(shrunk(image, self.shorter_side))

    def __setattr__(self, name: str, value: object) -> None:
        reads = type(self).__getitem__ is FastImageFolder.__getitem__
        if reads and name in _IMAGE_FOLDERS and value is not None:
            raise OptionsError(
                f"FastImageFolder calls no {name}, which ImageFolder does. Give a pipeline to "
                "FastDataModule(augment=...), or call it in a dataset around this one."
            )
        super().__setattr__(name, value)

    def __getstate__(self) -> dict[str, Any]:
        # The unpacked list would be expensive to send to workers.
        return {**self.__dict__, "_samples": None}

    def __repr__(self) -> str:
        return (
            f"FastImageFolder({self.root!r}, {len(self)} images, {len(self.classes)} classes, "
            f"size={self.rule.size}, crop={self.rule.crop!r}, dtype={self.sample_dtype}, "
            f"resample={self.resample!r}, decoder={self.decoder.name!r})"
        )

    def _check_out(self, out: NDArray[Any]) -> None:
        right = out.shape == self.sample_shape and out.dtype == self.sample_dtype
        if not (right and out.flags.c_contiguous and out.flags.writeable):
            raise BatchError(
                f"write_into needs a writable, C-contiguous {self.sample_dtype} array of shape "
                f"{self.sample_shape}; it got {out.dtype} {out.shape} with strides {out.strides}, "
                f"writable: {out.flags.writeable}."
            )


def cache_images(
    dataset: FastImageFolder,
    folder: CacheFolder = "disk",
    *,
    max_bytes: int | None = None,
    key: str | None = None,
) -> FastImageFolder:
    """Return an image folder that keeps its decoded pictures and cuts its crops out of them.

    Files are decoded once, by whichever worker or rank reads them first; later epochs, other ranks
    and later runs cut their crops out of the kept pictures. Order, draws and options are those
    of the dataset. The pixels are those without a cache; but crops that shrink a JPEG to half its
    size or less are sharper, as a file is then decoded at a reduced scale. A warning says so;
    ``resample="exact"`` gives the same pixels in any case. A cache works best with
    ``shorter_side``: pictures of 256 pixels take a fraction of the room of whole ones, 3 bytes a
    pixel. Pictures that do not fit the memory are read from the disk in each epoch, which is no
    gain over files. :class:`CachedDataset` says how a cache is found, checked and shared.

    Args:
        dataset: The image folder whose pictures are kept.
        folder: ``"disk"``, ``"ram"`` or a folder; as for :class:`CachedDataset`.
        max_bytes: Most bytes that the pictures may take; others are read from their files. Default:
            as for :class:`CachedDataset`.
        key: As for :class:`CachedDataset`.

    Raises:
        OptionsError: An argument has an impossible value, or ``dataset`` is no FastImageFolder.

    Example:
        >>> photos = FastImageFolder("photos", size=224, shorter_side=256)  # doctest: +SKIP
        >>> FastDataLoader(cache_images(photos), 64, shuffle=True)  # doctest: +SKIP
    """
    if not isinstance(dataset, FastImageFolder):
        raise OptionsError(
            f"cache_images() keeps the pictures of a FastImageFolder, and this is a "
            f"{type(dataset).__name__}. CachedDataset() keeps the samples of any dataset."
        )
    pictures = _Pictures(dataset.files, dataset.shorter_side)
    twin = copy.copy(dataset)
    twin.pictures, twin._whole = ImageCache(pictures, folder, max_bytes, key), None
    return twin


class ImageCache(CachedDataset):
    """The pictures of a folder, each one row of bytes; made by :func:`cache_images`.

    A row has height and width, and then the pixels; no more of it is read than a crop needs.
    """

    def __init__(
        self, pictures: _Pictures, folder: CacheFolder, max_bytes: int | None, key: str | None
    ) -> None:
        super().__init__(pictures, folder, max_bytes=max_bytes, key=key, always_same=True)
        self._said = "pictures"
        if pictures.shorter_side is not None:
            self._said += f", shorter side {pictures.shorter_side}"

    def open(self, index: int) -> Picture:
        """Return a picture; it is decoded and kept if it is not kept yet."""
        row = self.row_of(index)
        row = self[index] if row is None else row
        height, width = row[:_HEAD_BYTES].view("<u4").tolist()
        data = row[_HEAD_BYTES : _HEAD_BYTES + 3 * height * width]  # more may follow in the file
        return StoredPicture(data.reshape(height, width, 3))

    def tell_of_scale(self, index: int, placement: Placement, resample: Resample) -> None:
        """Warn once if a crop of the file itself would be decoded at a reduced scale."""
        pictures: _Pictures = self.dataset  # type: ignore[assignment]
        whole = pictures.shorter_side is None
        if not whole or plan_resample(placement, resample, scalable=True).scale == 1:
            return
        if pictures.samples[index].lower().endswith((".jpg", ".jpeg")):
            self._tell_once("other pixels", _OTHER_PIXELS)


class _Pictures(Dataset[NDArray[np.uint8]]):
    """Decoded pictures, each as one row of bytes: height and width, then pixels."""

    def __init__(self, files: ImageFiles, shorter_side: int | None) -> None:
        self.samples = files.paths  # so named, a cache finds the files, and checks their times
        self.files = files
        self.shorter_side = shorter_side

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> NDArray[np.uint8]:
        pixels = shrunk(self.files.open(index), self.shorter_side)
        head = np.array(pixels.shape[:2], "<u4")
        return np.concatenate([head.view(np.uint8), pixels.reshape(-1)])


def _find_files(
    root: str, *, is_valid_file: Callable[[str], bool] | None, allow_empty: bool
) -> tuple[list[str], dict[str, int], list[tuple[str, int]]]:
    """Return classes, their numbers and all samples, found by torchvision's own functions."""
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
            f"{root!r} cannot be used as an image folder: {str(error).rstrip('. ')}. "
            f"Put the images of each class into a folder of its own, {root}/<class>/<image>.jpg, "
            "or allow classes without images with allow_empty=True."
        ) from error
    return classes, class_to_idx, samples
