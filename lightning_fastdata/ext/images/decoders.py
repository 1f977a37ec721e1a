"""Encoded bytes to uint8 RGB pixels: Pillow, and simplejpeg, which decodes JPEG faster.

Both decode a baseline or progressive JPEG to the same pixels (they wrap the same libjpeg-turbo), so
the choice is about what they refuse and what they can skip:

============ ====== ====== ===== ==============================================================
decoder      strict scaled parts comes with
============ ====== ====== ===== ==============================================================
simplejpeg   yes    yes    yes   ``lightning-fastdata[images]``
pillow       no     yes    no    ``lightning-fastdata[images]``, torchvision
============ ====== ====== ===== ==============================================================

A *strict* library refuses a JPEG whose entropy-coded data is garbled. Pillow would return grey or
shifted pixels for it, as torchvision's ``ImageFolder`` does, so simplejpeg reads the codes
before it (``check_jpeg_codes``). Both refuse a truncated file.
*Scaled*: a picture decoded at a half, a quarter or an eighth costs less. *Parts*: so does a part of
one, where TurboJPEG 3 is there (``region``).
What is not a JPEG, and what is a CMYK JPEG, is read by Pillow whatever decoder is chosen, so that
palettes, alpha and CMYK mean what they mean to ``ImageFolder``.
"""

from __future__ import annotations

import functools
import io
import struct
import warnings
import zlib
from contextlib import contextmanager
from typing import TYPE_CHECKING, ClassVar, Final, Literal, TypeAlias, get_args

import numpy as np

from lightning_fastdata.errors import FastDataWarning, OptionsError, require
from lightning_fastdata.ext.images.region import region_decoder

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from PIL import Image
    from PIL.ImageFile import ImageFile

    from lightning_fastdata.ext.images import Box, Pixels, Scale

DecoderName: TypeAlias = Literal["auto", "simplejpeg", "pillow"]

_FRAMES: Final = frozenset(range(0xC0, 0xD0)) - {0xC4, 0xC8, 0xCC}
_SCAN, _END = 0xDA, 0xD9
_IN_A_SCAN: Final = frozenset((0x00, *range(0xD0, 0xD8)))
"""What follows 0xFF within a scan: a stuffed byte, or a restart marker."""
_ALL: Final = (1 << 64) - 1
_CHUNK: Final = struct.Struct(">I4s")
_PALETTE: Final = 3


class Decoder:
    """Pillow: every format; scaled decode through ``Image.draft``.

    Subclasses decode JPEG with another library. Stateless: any number of threads may share one.
    Both functions raise ``ValueError`` with the reason if the data is damaged or not an image.
    """

    name: ClassVar[str] = "pillow"
    """The library that decodes JPEG."""

    def size(self, data: bytes) -> tuple[int, int]:
        """Return ``(height, width)`` in pixels, read from the header; EXIF is not applied."""
        with _opened(data) as image:
            return image.height, image.width

    def decode(self, data: bytes, *, scale: Scale = 1) -> Pixels:
        """Return writable, C-contiguous pixels ``[ceil(height/scale), ceil(width/scale), 3]``.

        A JPEG is reduced inside the inverse DCT where the library can, everything else by the mean
        of ``scale`` x ``scale`` pixels. EXIF orientation is not applied. Grey is repeated over the
        channels, alpha is dropped, 16-bit grey keeps its high byte.
        """
        if is_jpeg(data):
            check_jpeg_scans(data)
        pixels = self._decode_jpeg(data, scale)
        if pixels is not None:
            return pixels
        with _opened(data) as image:
            _check_whole(data, image)
            full = image.width
            if scale > 1 and image.format in ("JPEG", "MPO"):
                image.draft(None, (max(1, image.width // scale), max(1, image.height // scale)))
            left = scale // max(1, round(full / image.width))
            rgb = _to_rgb(image)
            return np.array(rgb.reduce(left) if left > 1 else rgb)

    def decode_part(self, data: bytes, box: Box, *, scale: Scale = 1) -> Pixels | None:  # noqa: ARG002
        """Return what ``decode(data, scale=scale)`` has within ``box``, decoding little else.

        None if that is not possible: of another format or library, and of a file that is damaged
        where it was read. Damage outside the part is not seen.
        """
        return None

    def _decode_jpeg(self, data: bytes, scale: Scale) -> Pixels | None:  # noqa: ARG002
        """Return the pixels; None for what Pillow decodes."""
        return None


class _SimpleJpegDecoder(Decoder):
    """simplejpeg: libjpeg-turbo, strict."""

    name = "simplejpeg"

    def __init__(self) -> None:
        import simplejpeg

        self._header: Callable[..., tuple[int, int, str, str]] = simplejpeg.decode_jpeg_header
        self._decode: Callable[..., Pixels] = simplejpeg.decode_jpeg

    def size(self, data: bytes) -> tuple[int, int]:
        """Return ``(height, width)`` in pixels."""
        header = self._read_header(data)
        return super().size(data) if header is None else header[:2]

    def _decode_jpeg(self, data: bytes, scale: Scale) -> Pixels | None:
        header = self._read_header(data)
        if header is None or header[2] not in ("RGB", "YCbCr", "Gray"):
            return None
        if scale == 1:
            return self._decode(data)
        height, width, _ = header
        # The smallest picture that is no smaller than this is exactly the one asked for.
        return self._decode(
            data, min_height=-(-height // scale), min_width=-(-width // scale), min_factor=scale
        )

    def decode_part(self, data: bytes, box: Box, *, scale: Scale = 1) -> Pixels | None:
        """Return the pixels within ``box``; None if they cannot be had alone."""
        decoder = region_decoder() if is_jpeg(data) else None
        return None if decoder is None else decoder.decode(data, box, scale)

    def _read_header(self, data: bytes) -> tuple[int, int, str] | None:
        """Return height, width and colour space; None for what Pillow has to judge."""
        if not is_jpeg(data):
            return None
        try:
            return self._header(data)[:3]
        except (KeyError, ValueError):
            # Damaged, or one of the rare subsamplings that simplejpeg has no name for (a KeyError
            # for 4:4:1) or TurboJPEG refuses: Pillow decodes it, or says what is wrong.
            return None


@functools.cache
def choose_decoder(name: DecoderName = "auto") -> Decoder:
    """Return the decoder of this name, one per process, or the first that can be loaded here.

    Args:
        name: ``"auto"`` tries simplejpeg and then pillow; the decoder returned
            says in ``name`` which one it is.

    Raises:
        OptionsError: If the name is unknown, or the library named cannot be loaded.
        MissingPackageError: If Pillow, which every decoder needs, is not installed.
    """
    require("PIL", extra="images", what="Decoding images")
    if name not in get_args(DecoderName):
        raise OptionsError(
            f"Unknown decoder {name!r}; choose one of {', '.join(get_args(DecoderName))}."
        )
    try:
        return Decoder() if name == "pillow" else _SimpleJpegDecoder()
    except (ImportError, OSError) as error:
        if name == "auto":
            return Decoder()
        raise OptionsError(
            f"The decoder {name!r} cannot be loaded here: {error}. "
            f'Install the library, or use decoder="auto" to take what is there.'
        ) from error


def is_jpeg(data: bytes) -> bool:
    """Return whether the data starts like a JPEG file."""
    return data[:3] == b"\xff\xd8\xff"


@contextmanager
def _opened(data: bytes) -> Iterator[ImageFile]:
    """Open with Pillow; whatever it raises for bad data becomes a ``ValueError`` with the reason.

    Pillow's parsers let through what they met: OSError, SyntaxError, struct.error, zlib.error,
    EOFError, IndexError, DecompressionBombError and more, hence the wide net.
    """
    from PIL import Image, UnidentifiedImageError

    if not data:
        raise ValueError("the file is empty")
    try:
        with Image.open(io.BytesIO(data)) as image:
            _check_opened(image)
            yield image
    except MemoryError:
        raise
    except UnidentifiedImageError as error:
        start = data[:8].hex(" ")
        raise ValueError(f"it is not an image that Pillow knows (starts with {start})") from error
    except Image.DecompressionBombError as error:
        raise ValueError(f"{error} Pillow's own limit is PIL.Image.MAX_IMAGE_PIXELS.") from error
    except Exception as error:
        raise ValueError(str(error) or type(error).__name__) from error


def _check_opened(image: ImageFile) -> None:
    """Refuse what must not be loaded. Nothing but the header has been read."""
    from PIL import Image

    if image.format == "EPS":
        raise ValueError("it is an EPS file, a program that Ghostscript would run; save it as PNG")
    limit, count = Image.MAX_IMAGE_PIXELS, image.width * image.height
    if limit is not None and count > limit:
        raise ValueError(
            f"it says that it has {image.width} x {image.height} = {count:,} pixels, and "
            f"PIL.Image.MAX_IMAGE_PIXELS is {limit:,}: it may be a decompression bomb. Set that "
            "limit higher if you trust it"
        )
    if count == 0:
        raise ValueError(f"it says that it has {image.width} x {image.height} pixels")


def _check_whole(data: bytes, image: ImageFile) -> None:
    """Refuse what Pillow would load a part of."""
    if is_jpeg(data):
        check_jpeg_codes(data)
    elif image.format == "PNG":
        check_png(data)
    elif image.format == "TIFF":
        check_tiles(image)


def _to_rgb(image: ImageFile) -> Image.Image:
    """Convert as ``ImageFolder`` does, except where that would burn the picture to white."""
    from PIL import Image

    if image.mode.startswith("I;16") or (image.mode == "I" and image.format == "PNG"):
        # Pillow clips 16 bits at 255. The high byte is what OpenCV keeps, and what Pillow itself
        # keeps of 16-bit colour.
        return Image.fromarray((np.asarray(image) >> 8).astype(np.uint8)).convert("RGB")
    if image.mode in ("I", "F"):
        raise ValueError(
            f"its pixels are of mode {image.mode!r}, whose range no file states; "
            "save it with 8 or 16 bits per channel"
        )
    return image.convert("RGB")


# -- whether a picture is all there, where the library that decodes it would not say so ------------
#
# Decoders hand out what they have of some damaged files: grey or shifted blocks of a JPEG, its
# first and coarse scans, rows of a PNG whose checksum is wrong. Each function here raises
# ``ValueError`` with the reason for such a file, and returns None for a whole one.


def check_jpeg_scans(data: bytes) -> None:
    """Refuse a JPEG that ends before all scans of its picture were there, as a cut download may.

    No decoder minds: what came so far is a picture, in less detail or without its colours. Most
    files have one scan, and nothing but their header is looked at (10 us).
    """
    missing: dict[int, int] = {}  # of each component, a bit for each coefficient
    at = 2
    try:
        while (marker := data[at + 1]) != _END:
            if marker in _FRAMES:
                missing = dict.fromkeys(_components(data, at + 9, 3), _ALL)
            elif marker == _SCAN:
                _take_scan(data, at, missing)
                if not any(missing.values()):
                    return
            at = _next_marker(data, at, marker)
    except IndexError:
        pass  # the file ends here
    raise ValueError("it ends before its last scan: the file was cut off, or its header is damaged")


def _components(data: bytes, at: int, step: int) -> bytes:
    """Return the names of the components in a list that begins with their number."""
    return data[at + 1 : at + 1 + step * data[at] : step]


def _take_scan(data: bytes, at: int, missing: dict[int, int]) -> None:
    """Take what this scan brings to its last bit from what is missing of each component."""
    band = at + 5 + 2 * data[at + 4]
    if data[band + 2] & 15 == 0:
        still = ~(_ALL >> 63 - min(data[band + 1], 63)) | (1 << min(data[band], 63)) - 1
        for component in _components(data, at + 4, 2):
            missing[component] = missing.get(component, 0) & still


def _next_marker(data: bytes, at: int, marker: int) -> int:
    """Return where the marker after this one is, behind its segment and its scan, if it is one."""
    at += 2 + (data[at + 2] << 8 | data[at + 3]) if marker != 0xFF else 1
    while True:
        at = data.find(b"\xff", at)
        if at < 0:
            raise IndexError
        if marker != _SCAN or data[at + 1] not in _IN_A_SCAN:
            return at
        at += 2


def check_jpeg_codes(data: bytes) -> None:
    """Refuse a JPEG whose entropy-coded data is garbled, or of which a part is missing.

    simplejpeg reads all codes and computes an eighth of the picture: half the time of decoding.
    Only for libraries that are not strict themselves.
    """
    decode = _strict_decoder()
    if decode is None:
        return
    try:
        decode(data, colorspace="GRAY", min_height=1, min_width=1, min_factor=8)
    except ValueError as error:
        if "subsampling" in str(error):
            raise ValueError(
                "its colours are subsampled in a way that cannot be checked for damage; save it "
                "again with 4:4:4, 4:2:2 or 4:2:0"
            ) from error
        raise


@functools.cache
def _strict_decoder() -> Callable[..., object] | None:
    try:
        import simplejpeg
    except (ImportError, OSError) as error:
        warnings.warn(
            FastDataWarning(
                f"simplejpeg cannot be loaded ({error}), so that damaged JPEG files may come as "
                'grey or shifted pictures. Run `pip install "lightning-fastdata[images]"`.'
            ),
            stacklevel=2,
        )
        return None
    decode: Callable[..., object] = simplejpeg.decode_jpeg
    return decode


def check_png(data: bytes) -> None:
    """Refuse a PNG with a wrong checksum, a missing palette, or no end.

    Pillow does not look at the checksums of pixels. 0.05 ms for 181 kB, where decoding takes 6.6.
    """
    at, kind, palette = 8, b"", data[25:26] != bytes([_PALETTE])
    while kind != b"IEND":
        if at + 12 > len(data):
            raise ValueError("it is truncated: a chunk is missing")
        length, kind = _CHUNK.unpack_from(data, at)
        end = at + 12 + length
        if end > len(data):
            raise ValueError(f"it is truncated inside its chunk {kind!r}")
        if zlib.crc32(memoryview(data)[at + 4 : end - 4]) != int.from_bytes(data[end - 4 : end]):
            raise ValueError(f"the checksum of its chunk {kind!r} is wrong")
        palette |= kind == b"PLTE"
        if kind == b"IDAT" and not palette:
            raise ValueError("its palette is missing")
        at = end


def check_tiles(image: ImageFile) -> None:
    """Refuse an opened, not yet loaded TIFF whose tiles do not reach over the whole picture."""
    reach = [tile[1] for tile in image.tile if tile[1]]
    right, bottom = (max((box[side] for box in reach), default=0) for side in (2, 3))
    # Pillow says the size as it will be turned; tiles are as they are stored.
    short, long = sorted((right, bottom))
    if reach and (short < min(image.size) or long < max(image.size)):
        raise ValueError(
            f"its data ends at {right} x {bottom} pixels, and it says that it has "
            f"{image.width} x {image.height}"
        )
