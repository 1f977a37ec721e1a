"""Image files to uint8 RGB pixels: read, checked, and decoded as far as that is needed.

Pillow and simplejpeg, which decodes JPEG faster, decode a baseline or progressive JPEG to the same
pixels (they wrap the same libjpeg-turbo), so the choice is about what they refuse and can skip:

============ ====== ====== ===== ==============================================================
decoder      strict scaled parts comes with
============ ====== ====== ===== ==============================================================
simplejpeg   yes    yes    yes   ``lightning-fastdata[images]``
pillow       no     yes    no    ``lightning-fastdata[images]``, torchvision
============ ====== ====== ===== ==============================================================

A *strict* library refuses a JPEG whose entropy-coded data is garbled. Pillow would return grey or
shifted pixels for it, as torchvision's ``ImageFolder`` does, so simplejpeg reads the codes first
(``check_jpeg_codes``). Both refuse a truncated file.
*Scaled*: decoding a picture at a half, a quarter or an eighth costs less. *Parts*: decoding a part
of a picture costs less, if TurboJPEG 3 is installed.
Pillow reads other formats and CMYK JPEG whatever decoder is chosen, so that palettes, alpha and
CMYK mean what they mean to ``ImageFolder``.
"""

from __future__ import annotations

import ctypes
import functools
import importlib.util
import io
import operator
import os
import stat
import struct
import sys
import threading
import warnings
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Final, Literal, NamedTuple, TypeAlias, get_args

import numpy as np
from numpy.typing import NDArray

from lightning_fastdata.errors import (
    DatasetError,
    FastDataWarning,
    OptionsError,
    check,
    check_among,
    require,
)

if TYPE_CHECKING:
    from PIL import Image
    from PIL.ImageFile import ImageFile

Pixels: TypeAlias = NDArray[np.uint8]
"""Pixels ``[height, width, 3]`` of red, green and blue, uint8."""

Scale: TypeAlias = Literal[1, 2, 4, 8]
"""Divisor of height and width. libjpeg has others (8/7, 4/3, 8/5, ...), all slower than 1."""

DecoderName: TypeAlias = Literal["auto", "simplejpeg", "pillow"]

MAX_PIXELS = 178_956_970
"""Number of pixels above which a file is refused by default, as by Pillow: 537 MB of RGB."""

_FRAMES: Final = frozenset(range(0xC0, 0xD0)) - {0xC4, 0xC8, 0xCC}
_SCAN, _END = 0xDA, 0xD9
_IN_A_SCAN: Final = frozenset((0x00, *range(0xD0, 0xD8)))
"""Bytes that may follow 0xFF within a scan: a stuffed zero, or a restart marker."""
_ALL: Final = (1 << 64) - 1
_CHUNK: Final = struct.Struct(">I4s")
_PALETTE: Final = 3
_DECOMPRESS: Final = 1
_STOP_ON_WARNING, _SUBSAMPLING, _WIDTH, _HEIGHT, _COLOURS = 0, 4, 5, 6, 8
"""Numbers of TurboJPEG's parameters (``enum TJPARAM``)."""
_RGB: Final = 0
_DECODABLE_COLOURS: Final = (0, 1, 2)
"""Colour spaces that simplejpeg converts to RGB, too (``enum TJCS``): RGB, YCbCr and grey."""
_BLOCK_WIDTHS: Final = (8, 16, 16, 8, 8, 32, 8)
"""Width in pixels of a block of all channels, by ``enum TJSAMP``: 4:4:4, 4:2:2, 4:2:0, grey, 4:4:0,
4:1:1, 4:4:1."""
_TINY: Final = 8
_END_OF_IMAGE: Final = b"\xff\xd9"
_NO_WAIT: Final = 0 if sys.platform == "win32" else os.O_NONBLOCK
"""Flag of ``os.open`` without which opening a named pipe would wait for its other end."""
_BYTES_BESIDE_PIXELS: Final = 64 << 20
_BYTES_PER_PIXEL: Final = 8
"""Bytes of an uncompressed pixel of 16-bit colour with alpha."""


class Box(NamedTuple):
    """A rectangle of pixels."""

    top: int
    left: int
    height: int
    width: int


class Decoder:
    """Pillow: every format; scaled decode through ``Image.draft``.

    Subclasses decode JPEG with another library. Stateless: any number of threads may share one.
    Both methods raise ``ValueError`` with the reason if the data is damaged or not an image.
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
            if is_jpeg(data):
                check_jpeg_codes(data)
            elif image.format == "PNG":
                check_png(data)
            elif image.format == "TIFF":
                check_tiles(image)
            full = image.width
            if scale > 1 and image.format in ("JPEG", "MPO"):
                image.draft(None, (max(1, image.width // scale), max(1, image.height // scale)))
            left = scale // max(1, round(full / image.width))
            rgb = _to_rgb(image)
            return np.array(rgb.reduce(left) if left > 1 else rgb)

    def _decode_jpeg(self, data: bytes, scale: Scale) -> Pixels | None:  # noqa: ARG002
        """Return the pixels of a JPEG; None: Pillow has to decode the data."""
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
        # simplejpeg takes the smallest scale that is no smaller than this: the one asked for.
        return self._decode(
            data, min_height=-(-height // scale), min_width=-(-width // scale), min_factor=scale
        )

    def _read_header(self, data: bytes) -> tuple[int, int, str] | None:
        """Return height, width and colour space; None: Pillow has to judge the data."""
        if not is_jpeg(data):
            return None
        try:
            return self._header(data)[:3]
        except (KeyError, ValueError):
            # Damaged data, or a rare subsampling for which simplejpeg has no name (a KeyError for
            # 4:4:1) or that TurboJPEG refuses: Pillow decodes it, or says what is wrong.
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
    check_among("decoder", name, get_args(DecoderName))
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

    Pillow's parsers raise errors of many classes: OSError, SyntaxError, struct.error, zlib.error,
    EOFError, IndexError, DecompressionBombError and more. So all are caught.
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
    """Refuse images that must not be loaded; only the header has been read so far."""
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


def _to_rgb(image: ImageFile) -> Image.Image:
    """Convert as ``ImageFolder`` does, except where that would clip the picture to white."""
    from PIL import Image

    if image.mode.startswith("I;16") or (image.mode == "I" and image.format in ("PNG", "PPM")):
        # Pillow would clip 16 bits at 255. OpenCV keeps the high byte, as Pillow itself does for
        # 16-bit colour.
        return Image.fromarray((np.asarray(image) >> 8).astype(np.uint8)).convert("RGB")
    if image.mode in ("I", "F"):
        raise ValueError(
            f"its pixels are of mode {image.mode!r}, whose range no file states; "
            "save it with 8 or 16 bits per channel"
        )
    return image.convert("RGB")


# -- whether a picture is complete, where the library that decodes it would not say so -------------
#
# Decoders return what they can read of some damaged files: grey or shifted blocks of a JPEG, its
# first and coarse scans, rows of a PNG whose checksum is wrong. Each function here raises
# ``ValueError`` with the reason for such a file, and returns None for a whole one.


def check_jpeg_scans(data: bytes) -> None:
    """Refuse a JPEG that ends before all scans of its picture, as a cut download may.

    Decoders accept such a file: its first scans are a picture, in less detail or without colours.
    Most files have one scan, and only their header is looked at (10 us).
    """
    missing: dict[int, int] = {}  # by component, a bit for each coefficient
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
    """Remove from ``missing`` the coefficients that this scan completes to their last bit."""
    band = at + 5 + 2 * data[at + 4]
    if data[band + 2] & 15 == 0:
        still = ~(_ALL >> 63 - min(data[band + 1], 63)) | (1 << min(data[band], 63)) - 1
        for component in _components(data, at + 4, 2):
            missing[component] = missing.get(component, 0) & still


def _next_marker(data: bytes, at: int, marker: int) -> int:
    """Return the place of the next marker: after the segment of this one, and its scan if any."""
    at += 2 + (data[at + 2] << 8 | data[at + 3]) if marker != 0xFF else 1
    while True:
        at = data.find(b"\xff", at)
        if at < 0:
            raise IndexError
        if marker != _SCAN or data[at + 1] not in _IN_A_SCAN:
            return at
        at += 2


def check_jpeg_codes(data: bytes) -> None:
    """Refuse a JPEG whose entropy-coded data is garbled, or incomplete.

    simplejpeg reads all codes and computes the picture at an eighth, in half the time of decoding.
    Only libraries that are not strict themselves need this.
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

    Pillow does not check the checksums of pixels. This takes 0.05 ms for 181 kB, decoding 6.6 ms.
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
    # Pillow gives the size after turning the picture, but tiles as they are stored.
    short, long = sorted((right, bottom))
    if reach and (short < min(image.size) or long < max(image.size)):
        raise ValueError(
            f"its data ends at {right} x {bottom} pixels, and it says that it has "
            f"{image.width} x {image.height}"
        )


# -- a part of a JPEG: TurboJPEG 3, called through ctypes ------------------------------------------
#
# No Python binding has ``tj3SetCroppingRegion``, so this is a minimal layer over the library. Rows
# below the crop are not read at all, in rows above it only the codes are read, and colours are
# computed within the crop. The library comes with ``pip install lightning-fastdata[jpeg]``, or with
# the system or conda (libjpeg-turbo 3 or newer). It is used only if it decodes parts of a test
# picture to the very pixels of simplejpeg; where it is missing, pictures are decoded whole.
#
# The rest of a picture is not looked at, so that damage there is not found.


class _Region(ctypes.Structure):
    _fields_ = (("x", ctypes.c_int), ("y", ctypes.c_int), ("w", ctypes.c_int), ("h", ctypes.c_int))


class _Fraction(ctypes.Structure):
    _fields_ = (("numerator", ctypes.c_int), ("denominator", ctypes.c_int))


class RegionDecoder:
    """Decodes parts of JPEG pictures with one library; any number of threads may share one."""

    def __init__(self, library: ctypes.CDLL) -> None:
        handle, number, size = ctypes.c_void_p, ctypes.c_int, ctypes.c_size_t
        self._tj = library
        for name, arguments, result in (
            ("tj3Init", [number], handle),
            ("tj3Destroy", [handle], None),
            ("tj3Set", [handle, number, number], number),
            ("tj3Get", [handle, number], number),
            ("tj3DecompressHeader", [handle, ctypes.c_char_p, size], number),
            ("tj3SetScalingFactor", [handle, _Fraction], number),
            ("tj3SetCroppingRegion", [handle, _Region], number),
            ("tj3Decompress8", [handle, ctypes.c_char_p, size, handle, number, number], number),
        ):
            function = getattr(library, name)
            function.argtypes, function.restype = arguments, result
        self._of_thread = _OfThread(library)

    def decode(self, data: bytes, box: Box, scale: Scale = 1) -> Pixels | None:
        """Return the pixels of a part, ``[height, width, 3]`` uint8 RGB; maybe a view.

        They equal the same part of the whole picture. None: the data is no JPEG that this library
        can decode, ends early, or is damaged where it was read; it has to be decoded whole.
        ``box`` is within the picture decoded at 1/``scale``.
        """
        if not data.endswith(_END_OF_IMAGE):
            return None
        tj, handle = self._tj, self._of_thread.handle.address
        if tj.tj3DecompressHeader(handle, data, len(data)) != 0:
            return None
        kind = tj.tj3Get(handle, _SUBSAMPLING)
        if tj.tj3Get(handle, _COLOURS) not in _DECODABLE_COLOURS or not 0 <= kind < len(
            _BLOCK_WIDTHS
        ):
            return None
        height, width = tj.tj3Get(handle, _HEIGHT), tj.tj3Get(handle, _WIDTH)
        if scale > 1 and max(height, width) <= _TINY:
            return None  # simplejpeg takes another scale, which gives the same size
        width = -(-width // scale)
        start, stop = _span(box.left, box.width, -(-_BLOCK_WIDTHS[kind] // scale), width)
        out: Pixels = np.empty((box.height, stop - start, 3), np.uint8)
        region = _Region(start, box.top, out.shape[1], box.height)
        if tj.tj3SetScalingFactor(handle, _Fraction(1, scale)) or tj.tj3SetCroppingRegion(
            handle, region
        ):
            return None
        if tj.tj3Decompress8(handle, data, len(data), out.ctypes.data, out.strides[0], _RGB):
            return None
        left = box.left - start
        return out[:, left : left + box.width]


class _OfThread(threading.local):
    def __init__(self, library: ctypes.CDLL) -> None:  # called in each thread
        self.handle = _Handle(library)


class _Handle:
    """A decompressor of TurboJPEG, which belongs to one thread; freed with it."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._tj = library
        self.address: int = library.tj3Init(_DECOMPRESS)
        if not self.address:
            raise MemoryError("TurboJPEG has no memory for a decompressor.")
        library.tj3Set(self.address, _STOP_ON_WARNING, 1)

    def __del__(self) -> None:
        if self.address:
            self._tj.tj3Destroy(self.address)


def _span(left: int, width: int, block: int, whole: int) -> tuple[int, int]:
    """Return the columns to decode: whole blocks, and one more on either side.

    Colours of lower resolution are blended with their neighbours, which the library does not do
    across the edge of what it decodes.
    """
    start = max(0, left // block - 1) * block
    stop = (-(-(left + width) // block) + 1) * block
    return start, min(whole, stop)


@functools.cache
def region_decoder() -> RegionDecoder | None:
    """Return this process's decoder of parts; None: no installed library can decode parts."""
    for path in _libraries():
        try:
            decoder = RegionDecoder(ctypes.CDLL(path))
        except (OSError, AttributeError):
            continue  # the library is missing, or older than TurboJPEG 3
        if _agrees(decoder):
            return decoder
    return None


def _libraries() -> Iterator[str]:
    """Yield paths of TurboJPEG: beside the module ``turbojpeg``, in conda, in the system."""
    try:
        module = importlib.util.find_spec("turbojpeg")
    except (ImportError, ValueError):
        module = None
    if module is not None and module.origin is not None:
        beside = Path(module.origin).parent
        for pattern in ("turbojpeg.libs/*turbojpeg*", ".dylibs/*turbojpeg*"):
            yield from map(str, sorted(beside.glob(pattern)))
    name = {"darwin": "libturbojpeg.dylib", "win32": "turbojpeg.dll"}.get(
        sys.platform, "libturbojpeg.so.0"
    )
    yield str(Path(sys.prefix) / "lib" / name)
    yield name


def _agrees(decoder: RegionDecoder) -> bool:
    """Return whether a decoder makes the same pixels of parts of a picture as simplejpeg."""
    import simplejpeg

    rows, columns = np.mgrid[:67, :101]
    waves = [np.sin(rows / (3 + k)) * np.cos(columns / (5 - k)) for k in range(3)]
    picture = np.ascontiguousarray(127 + 120 * np.stack(waves, axis=-1)).astype(np.uint8)
    for subsampling in ("444", "420"):
        data = simplejpeg.encode_jpeg(picture, quality=90, colorsubsampling=subsampling)
        tried: tuple[tuple[Scale, Box], ...] = ((1, Box(21, 37, 30, 41)), (2, Box(9, 11, 17, 23)))
        for scale, box in tried:
            whole = simplejpeg.decode_jpeg(
                data, min_height=-(-67 // scale), min_width=-(-101 // scale), min_factor=scale
            )
            top, left, height, width = box
            part = decoder.decode(data, box, scale)
            wanted = whole[top : top + height, left : left + width]
            if part is None or not np.array_equal(part, wanted):
                return False
    return True


# -- one image file: its header is checked, and as much of it decoded as is needed -----------------


@dataclass(frozen=True, slots=True)
class EncodedImage:
    """One image file in memory: its header is read and checked, its pixels are not decoded."""

    path: str
    data: bytes
    height: int
    """Height in pixels, as the picture is stored."""
    width: int
    """Width in pixels, as the picture is stored."""
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

    def part(self, box: Box, scale: Scale = 1, *, whole: bool = False) -> Pixels:
        """Return ``decode(scale=scale)`` within ``box``, decoding less than that where possible.

        Damage outside the box may then stay unseen; with ``whole`` the picture is decoded whole.

        Raises:
            DatasetError: If the data is damaged where it was read.
        """
        top, left, height, width = box
        rows, columns = -(-self.height // scale), -(-self.width // scale)
        if (height < rows or width < columns) and self.scalable and not whole:
            parts = region_decoder() if self.decoder.name == "simplejpeg" else None
            pixels = None if parts is None else parts.decode(self.data, box, scale)
            if pixels is not None:
                return pixels
        return self.decode(scale=scale)[top : top + height, left : left + width]


@dataclass(frozen=True, slots=True)
class StoredPicture:
    """A picture whose pixels are already decoded."""

    pixels: Pixels
    """The pixels of the picture; they may be read-only."""

    @property
    def height(self) -> int:
        """Height in pixels."""
        return len(self.pixels)

    @property
    def width(self) -> int:
        """Width in pixels."""
        return int(self.pixels.shape[1])

    @property
    def scalable(self) -> bool:
        """Whether decoding at a scale above 1 is cheaper than decoding fully."""
        return False

    def part(self, box: Box, _scale: Scale = 1, *, whole: bool = False) -> Pixels:  # noqa: ARG002
        """Return a view of the pixels within ``box``; the scale is always 1."""
        top, left, height, width = box
        return self.pixels[top : top + height, left : left + width]


Picture: TypeAlias = "EncodedImage | StoredPicture"
"""A picture whose size is known, and whose pixels can be had in part."""


@dataclass(frozen=True, slots=True)
class ImageFiles:
    """Image files by number, all opened in the same way."""

    paths: Sequence[str]
    decoder_name: DecoderName
    max_pixels: int

    def open(self, index: int) -> EncodedImage:
        """Read a file and its header; raises as :func:`open_image`."""
        decoder = choose_decoder(self.decoder_name)
        return open_image(self.paths[index], decoder=decoder, max_pixels=self.max_pixels)


def open_image(path: str, *, decoder: Decoder, max_pixels: int = MAX_PIXELS) -> EncodedImage:
    """Read a file and its header.

    Pixels are taken as they are stored, as torchvision's ``ImageFolder`` does: EXIF orientation is
    not applied. (A TIFF is always turned: Pillow does it while it loads.)

    Raises:
        DatasetError: If the file cannot be read (the ``OSError`` is the cause), is damaged or not
            an image, or has more than ``max_pixels`` pixels, height x width, or more bytes than
            that many pixels have uncompressed.
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
    return _with_header(path, data, decoder, max_pixels)


def _with_header(path: str, data: bytes, decoder: Decoder, max_pixels: int) -> EncodedImage:
    """Check the header of an image file that was read, and return the image."""
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
    data: bytes | bytearray | memoryview,
    box: tuple[int, int, int, int],
    *,
    decoder: DecoderName = "auto",
) -> Pixels:
    """Return the pixels of an encoded image within a box, ``[height, width, 3]`` uint8 RGB.

    They equal those of the whole picture, as it is stored (EXIF orientation is not applied). Of a
    JPEG only what the box needs is decoded, if a library for that is installed (``pip install
    lightning-fastdata[jpeg]``); damage outside the box then stays unseen.

    Args:
        data: A file of any format that Pillow reads: bytes, or any buffer of them.
        box: ``(top, left, height, width)`` in pixels.
        decoder: As for :class:`~lightning_fastdata.FastImageFolder`; Pillow decodes no parts.

    Raises:
        OptionsError: If the data is no buffer of bytes, or the box is empty, reaches beyond the
            picture, or is no four whole numbers.
        MissingPackageError: If Pillow is not installed (``lightning-fastdata[images]``).
        DatasetError: If the data is damaged where it was read, or no image.

    Example:
        >>> from pathlib import Path
        >>> crop = decode_crop(Path("photo.jpg").read_bytes(), (0, 0, 224, 224))  # doctest: +SKIP
    """
    try:
        encoded = data if isinstance(data, bytes) else bytes(memoryview(data))
    except TypeError as error:
        raise OptionsError(
            f"data is {type(data).__name__}, and no bytes of an image file. Read the file, or give "
            "the record of a source."
        ) from error
    image = _with_header("in memory", encoded, choose_decoder(decoder), MAX_PIXELS)
    try:
        top, left, height, width = whole = tuple(map(int, box))
        fine = all(map(operator.eq, whole, box))
    except (TypeError, ValueError, OverflowError):
        fine = False
    check("box", box, fine, "(top, left, height, width), whole numbers of pixels")
    inside = top >= 0 and left >= 0 and height > 0 and width > 0
    if not inside or top + height > image.height or left + width > image.width:
        raise OptionsError(
            f"The box (top, left, height, width) = {whole} is not within the picture of "
            f"{image.height} x {image.width} pixels (height x width)."
        )
    return image.part(Box(top, left, height, width))


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
