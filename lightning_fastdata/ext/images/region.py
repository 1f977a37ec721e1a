"""Decoding only the part of a JPEG that a crop needs: TurboJPEG 3, called through ctypes.

No Python binding reaches ``tj3SetCroppingRegion``, so this is the smallest layer over the library:
rows below the crop are not read at all, of rows above it the codes alone, and colours are computed
within the crop. The library comes with ``pip install lightning-fastdata[jpeg]``, or with the system
or conda (libjpeg-turbo 3 or newer). It is used after it has decoded parts of a test picture to the
very pixels that simplejpeg has there; where it is missing, pictures are decoded whole.

A part is a fixed block of work: what lies outside is not looked at, so neither is damage there.
"""

from __future__ import annotations

import ctypes
import functools
import importlib.util
import sys
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Final

import numpy as np

from lightning_fastdata.ext.images import Box

if TYPE_CHECKING:
    from collections.abc import Iterator

    from lightning_fastdata.ext.images import Pixels, Scale

_DECOMPRESS: Final = 1
_STOP_ON_WARNING, _SUBSAMPLING, _WIDTH, _HEIGHT, _COLOURS = 0, 4, 5, 6, 8
"""Numbers of parameters (``enum TJPARAM``)."""
_RGB: Final = 0
_DECODABLE_COLOURS: Final = (0, 1, 2)
"""RGB, YCbCr and grey (``enum TJCS``): what simplejpeg converts to RGB, too."""
_BLOCK_WIDTHS: Final = (8, 16, 16, 8, 8, 32, 8)
"""Pixels that a block of all channels is wide, by ``enum TJSAMP``: 4:4:4, 4:2:2, 4:2:0, grey,
4:4:0, 4:1:1, 4:4:1."""
_TINY: Final = 8
_END_OF_IMAGE: Final = b"\xff\xd9"


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

        They equal the same part of the whole picture. None if this library cannot say: the data
        is no such JPEG, ends early, or is damaged where it was read; decode it whole then.
        ``box`` is within the picture that is decoded at 1/``scale``.
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
            return None  # simplejpeg takes another scale, as that gives the same size
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
    """Return this process's decoder of parts; None if there is no library that can do it."""
    for path in _libraries():
        try:
            decoder = RegionDecoder(ctypes.CDLL(path))
        except (OSError, AttributeError):
            continue  # not there, or older than TurboJPEG 3
        if _agrees(decoder):
            return decoder
    return None


def _libraries() -> Iterator[str]:
    """Yield where TurboJPEG may be: beside the wheel ``turbojpeg``, in conda, in the system."""
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
    """Return whether parts of a picture are the pixels that simplejpeg has there."""
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
