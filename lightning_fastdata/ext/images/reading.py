"""One image file: read it, check its header, then decode as much of it as is needed."""

from __future__ import annotations

import os
import stat
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from lightning_fastdata.errors import DatasetError, OptionsError
from lightning_fastdata.ext.images import Box
from lightning_fastdata.ext.images.decoders import choose_decoder, is_jpeg

if TYPE_CHECKING:
    from collections.abc import Sequence

    from lightning_fastdata.ext.images import Pixels, Scale
    from lightning_fastdata.ext.images.decoders import Decoder, DecoderName

MAX_PIXELS = 178_956_970
"""Pixels above which a file is refused by default: where Pillow refuses, 537 MB RGB."""

_NO_WAIT: Final = 0 if sys.platform == "win32" else os.O_NONBLOCK
"""Opening a named pipe would wait for its other end."""
_IN_MEMORY: Final = "in memory"
_BYTES_BESIDE_PIXELS: Final = 64 << 20
_BYTES_PER_PIXEL: Final = 8
"""Of 16-bit colour with alpha, uncompressed."""


@dataclass(frozen=True, slots=True)
class EncodedImage:
    """One image file in memory: its header is read and checked, its pixels are not decoded."""

    path: str
    data: bytes
    height: int
    """In pixels, as it is stored."""
    width: int
    """In pixels, as it is stored."""
    decoder: Decoder

    @property
    def scalable(self) -> bool:
        """Whether decoding at a scale above 1 is cheaper than decoding fully."""
        return is_jpeg(self.data)

    def decode(self, *, scale: Scale = 1) -> Pixels:
        """Return the pixels, ``[ceil(height/scale), ceil(width/scale), 3]`` uint8 RGB.

        Raises:
            DatasetError: If the data is damaged.
        """
        try:
            return self.decoder.decode(self.data, scale=scale)
        except ValueError as error:
            raise _damaged(self.path, self.decoder, error) from error

    def decode_part(self, box: Box, scale: Scale = 1) -> Pixels:
        """Return ``decode(scale=scale)`` within ``box``, decoding less than that where possible.

        Damage outside the box may stay unseen.

        Raises:
            DatasetError: If the data is damaged where it was read.
        """
        top, left, height, width = box
        rows, columns = -(-self.height // scale), -(-self.width // scale)
        if height < rows or width < columns:
            pixels = self.decoder.decode_part(self.data, box, scale=scale)
            if pixels is not None:
                return pixels
        return self.decode(scale=scale)[top : top + height, left : left + width]


@dataclass(frozen=True, slots=True)
class ImageFiles:
    """Image files by number, all opened in the same way."""

    paths: Sequence[str]
    decoder_name: DecoderName
    max_pixels: int

    def open(self, index: int) -> EncodedImage:
        """Read a file and its header; raises as :func:`open_image`."""
        return open_image(
            self.paths[index],
            decoder=choose_decoder(self.decoder_name),
            max_pixels=self.max_pixels,
        )


def open_image(
    path: str,
    *,
    decoder: Decoder,
    max_pixels: int = MAX_PIXELS,
) -> EncodedImage:
    """Read a file and its header.

    Pixels are those that are stored, as in torchvision's ``ImageFolder``: EXIF orientation is not
    applied. (A TIFF is always turned: Pillow does it while it loads.)

    Raises:
        DatasetError: If the file cannot be read (the ``OSError`` is its cause), is damaged or not
            an image, or has more than ``max_pixels`` pixels, height x width, or more bytes than
            those would have uncompressed.
    """
    try:
        # A Path costs 3 us per sample.
        with open(path, "rb", buffering=0, opener=_open_at_once) as file:
            _check_file(path, os.fstat(file.fileno()), max_pixels)
            data = file.read()
    except OSError as error:
        raise DatasetError(
            f"Cannot read the image {path}: {error.strerror or error}. Check that the file is "
            "there and may be read."
        ) from error
    return _opened(path, data, decoder, max_pixels)


def _opened(path: str, data: bytes, decoder: Decoder, max_pixels: int) -> EncodedImage:
    """Check the header of an image that was read."""
    try:
        height, width = decoder.size(data)
    except ValueError as error:
        raise _damaged(path, decoder, error) from error
    if height * width > max_pixels:
        raise DatasetError(
            f"The image {path} says that it has {width} x {height} = {height * width:,} pixels, "
            f"and max_pixels is {max_pixels:,}: it may be a decompression bomb. "
            "Raise max_pixels if you trust it, or remove the file."
        )
    return EncodedImage(path, data, height, width, decoder)


def decode_crop(
    data: bytes, box: tuple[int, int, int, int], *, decoder: DecoderName = "auto"
) -> Pixels:
    """Return the pixels of an encoded image within a box, ``[height, width, 3]`` uint8 RGB.

    They are those of the whole picture, as it is stored (EXIF orientation is not applied). Of a
    JPEG only what the box needs is decoded, if a library for that is there (``pip install
    lightning-fastdata[jpeg]``); damage outside the box then stays unseen.

    Args:
        data: A file of any format that Pillow reads.
        box: ``(top, left, height, width)`` in pixels.
        decoder: As for :class:`~lightning_fastdata.FastImageFolder`; parts are simplejpeg's.

    Raises:
        OptionsError: If the box is empty or reaches beyond the picture.
        MissingPackageError: If Pillow is not installed (``lightning-fastdata[images]``).
        DatasetError: If the data is damaged where it was read, or no image.

    Example:
        >>> from pathlib import Path
        >>> crop = decode_crop(Path("photo.jpg").read_bytes(), (0, 0, 224, 224))  # doctest: +SKIP
    """
    image = _opened(_IN_MEMORY, data, choose_decoder(decoder), MAX_PIXELS)
    top, left, height, width = (int(side) for side in box)
    inside = top >= 0 and left >= 0 and height > 0 and width > 0
    if not inside or top + height > image.height or left + width > image.width:
        raise OptionsError(
            f"The box (top, left, height, width) = {tuple(box)} is not within the picture of "
            f"{image.height} x {image.width} pixels (height x width)."
        )
    return image.decode_part(Box(top, left, height, width))


def _open_at_once(path: str, flags: int) -> int:
    return os.open(path, flags | _NO_WAIT)


def _check_file(path: str, status: os.stat_result, max_pixels: int) -> None:
    if not stat.S_ISREG(status.st_mode):
        raise DatasetError(
            f"{path} is not a regular file (mode {stat.filemode(status.st_mode)}), so it is no "
            "image. Remove it; is_valid_file can leave it out."
        )
    limit = _BYTES_PER_PIXEL * max_pixels + _BYTES_BESIDE_PIXELS
    if status.st_size > limit:
        raise DatasetError(
            f"The image {path} has {status.st_size:,} bytes, more than {max_pixels:,} pixels "
            f"(max_pixels) have uncompressed ({limit:,}). Raise max_pixels if you trust it, or "
            "remove the file."
        )


def _damaged(path: str, decoder: Decoder, error: ValueError) -> DatasetError:
    return DatasetError(
        f"Cannot decode the image {path} ({decoder.name}): {error}. "
        "Replace the file or remove it; is_valid_file can leave it out."
    )
