"""Damaged image files, some hundreds, made from photographs and drawn pictures; the same each time.

    >>> images = damaged_images(seed=0)  # doctest: +SKIP

Every file says what may become of it (``truth``): an error is always fine, and

- ``"whole"``: else the pixels of the file before it was damaged,
- ``"pillow"``: else what Pillow decodes it to: bits were changed, and a file without checksums that
  is still in order is another picture,
- ``"error"``: nothing else, because there is no picture.
"""

from __future__ import annotations

import io
import random
import struct
import zipfile
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Literal

import numpy as np
from PIL import Image

# What imports them takes long, and has nothing of theirs but files.
SKIMAGE, SKLEARN = (Path(find_spec(name).origin).parent for name in ("skimage", "sklearn"))
PHOTOGRAPHS = (
    SKLEARN / "datasets/images/china.jpg",
    SKLEARN / "datasets/images/flower.jpg",
    SKIMAGE / "data/rocket.jpg",
    SKIMAGE / "data/coffee.png",
)
Truth = Literal["whole", "pillow", "error"]
END = b"\xff\xd9"


@dataclass(frozen=True)
class DamagedImage:
    name: str
    """What it was and what was done to it; ends like a file of its kind, not always truly."""
    data: bytes
    truth: Truth
    undamaged: bytes


def damaged_images(seed: int = 0) -> list[DamagedImage]:
    made: list[DamagedImage] = []
    for number, (name, data) in enumerate(sound_images().items()):
        numbers = random.Random(f"{seed}/{number}")
        kind = name.rpartition(".")[2]
        damages = [*_any_kind(data, numbers), *_OF_KIND.get(kind, _nothing)(data, numbers)]
        for how, damaged, truth in damages:
            made.append(DamagedImage(f"{name.replace('.', f'-{how}.')}", damaged, truth, data))
    made += _of_no_picture(sound_images()["png-rgb.png"])
    made += _under_wrong_names(sound_images())
    return made


def sound_images() -> dict[str, bytes]:
    """Return small files of every format and kind that Pillow or a line of ours writes, by name."""
    photographs = [Image.open(path).convert("RGB") for path in PHOTOGRAPHS]
    china, flower, rocket, coffee = (one.resize((136, 104)) for one in photographs)
    drawn = Image.merge("RGB", [Image.linear_gradient("L"), *[Image.radial_gradient("L")] * 2])
    drawn = drawn.resize((136, 104))
    alpha = china.copy()
    alpha.putalpha(Image.linear_gradient("L").resize(china.size))
    deep = np.linspace(0, 65535, 136 * 104).astype(np.uint16).reshape(104, 136)
    colours = np.asarray(coffee)
    exif = Image.Exif()
    exif[0x0112] = 6
    return {
        "jpeg-420.jpg": _encoded(china, format="JPEG", quality=90),
        "jpeg-444.jpg": _encoded(coffee, format="JPEG", quality=75, subsampling="4:4:4"),
        "jpeg-drawn.jpg": _encoded(drawn, format="JPEG", quality=95),
        "jpeg-grey.jpg": _encoded(flower.convert("L"), format="JPEG"),
        "jpeg-cmyk.jpg": _encoded(rocket.convert("CMYK"), format="JPEG"),
        "jpeg-progressive.jpg": _encoded(flower, format="JPEG", progressive=True),
        "jpeg-restart.jpg": _encoded(rocket, format="JPEG", restart_marker_blocks=4),
        "jpeg-exif.jpg": _encoded(china, format="JPEG", exif=exif.tobytes()),
        "jpeg-optimised.jpeg": _encoded(coffee, format="JPEG", quality=40, optimize=True),
        "png-rgb.png": _encoded(china, format="PNG"),
        "png-palette.png": _encoded(flower.quantize(64), format="PNG"),
        "png-alpha.png": _encoded(alpha, format="PNG"),
        "png-grey16.png": _encoded(Image.fromarray(deep), format="PNG"),
        "png-rgb16.png": png(colours.astype(np.uint16) * 257, bits=16),
        "png-interlaced.png": png(np.asarray(rocket), bits=8, interlaced=True),
        "webp-lossy.webp": _encoded(china, format="WEBP", quality=80),
        "webp-lossless.webp": _encoded(drawn, format="WEBP", lossless=True),
        "webp-alpha.webp": _encoded(alpha, format="WEBP"),
        "bmp-rgb.bmp": _encoded(flower.resize((61, 43)), format="BMP"),
        "bmp-palette.bmp": _encoded(coffee.resize((61, 43)).quantize(32), format="BMP"),
        "gif-photo.gif": _encoded(rocket.quantize(128), format="GIF"),
        "gif-frames.gif": _encoded(
            china.quantize(32), format="GIF", save_all=True, append_images=[flower.quantize(32)]
        ),
        "tiff-raw.tif": _encoded(china.resize((61, 43)), format="TIFF"),
        "tiff-lzw.tif": _encoded(coffee, format="TIFF", compression="tiff_lzw"),
        "tiff-deflate.tiff": _encoded(drawn, format="TIFF", compression="tiff_adobe_deflate"),
        "ppm-rgb.ppm": _encoded(flower.resize((61, 43)), format="PPM"),
    }


Damage = tuple[str, bytes, Truth]


def _any_kind(data: bytes, numbers: random.Random) -> Iterator[Damage]:
    for share in (0.02, 0.3, 0.7, 0.97):
        yield f"cut-at-{share}", data[: max(1, int(len(data) * share))], "whole"
    yield "cut-last-byte", data[:-1], "whole"
    yield "trailing-garbage", data + numbers.randbytes(300), "whole"
    half = len(data) // 2
    yield "zeros-at-end", data[:-40] + bytes(40), "pillow"
    yield "zeros-inside", data[:half] + bytes(64) + data[half + 64 :], "pillow"
    yield "bytes-missing", data[:half] + data[half + 23 :], "pillow"
    for number, (low, high) in enumerate(((0, 40), (half, len(data)), (half, len(data)))):
        flipped = bytearray(data)
        flipped[numbers.randrange(low, min(high, len(data)))] ^= 1 << numbers.randrange(8)
        yield f"flipped-{number}", bytes(flipped), "pillow"


def jpeg_segments(data: bytes) -> Iterator[tuple[int, int, int]]:
    """Yield marker, where it begins, and where its segment ends, up to the first scan."""
    at = 2
    while True:
        marker, length = data[at + 1], int.from_bytes(data[at + 2 : at + 4])
        yield marker, at, at + 2 + length
        if marker == 0xDA:
            return
        at += 2 + length


def _jpeg(data: bytes, numbers: random.Random) -> Iterator[Damage]:
    for marker, at, end in jpeg_segments(data):
        yield f"cut-in-{marker:02x}-{at}", data[: (at + end) // 2], "error"
        if marker in (0xC4, 0xDB, 0xC0, 0xC2, 0xDA):
            for claimed in (0, 0xFFFF):
                wrong = data[: at + 2] + struct.pack(">H", claimed) + data[at + 4 :]
                yield f"length-{claimed}-{marker:02x}-{at}", wrong, "pillow"
            flipped = bytearray(data)
            flipped[numbers.randrange(at + 4, end)] ^= 1 << numbers.randrange(8)
            yield f"flip-in-{marker:02x}-{at}", bytes(flipped), "pillow"
        if marker in (0xC0, 0xC2):
            for height, width in ((50_000, 50_000), (0, 0), (0, 136), (104, 0), (1040, 136)):
                size = struct.pack(">HH", height, width)
                yield f"claims-{width}x{height}", data[: at + 5] + size + data[at + 9 :], "error"
            yield "frame-twice", data[:end] + data[at:end] + data[end:], "pillow"
        if marker == 0xC4:
            yield f"no-table-{at}", data[:at] + data[end:], "pillow"
    # The scan of the first, or only, picture begins here.
    begin = end
    inside = begin + (len(data) - begin) // 2
    yield "no-end", data[:-2], "whole"
    yield "nothing-at-end", data[:-40] + bytes(40), "whole"
    yield "cut-and-ended", data[:inside] + END, "whole"
    yield "cut-late-and-ended", data[: int(begin + (len(data) - begin) * 0.96)] + END, "whole"
    yield "end-inside", data[:inside] + END + data[inside:], "whole"
    yield "marker-inside", data[:inside] + b"\xff\xc4" + data[inside + 2 :], "pillow"
    yield "noise-inside", data[:inside] + numbers.randbytes(50) + data[inside + 50 :], "pillow"
    looped = b"Exif\0\0II*\0\x08\0\0\0\x01\0\x12\x01\x03\0\x01\0\0\0\x06\0\0\0\x08\0\0\0"
    application = b"\xff\xe1" + struct.pack(">H", 2 + len(looped)) + looped
    yield "exif-loop", data[:2] + application + data[2:], "whole"
    if scans := _later_scans(data, begin):
        yield "scans-missing", data[: scans[len(scans) // 2]] + END, "whole"
        yield "first-scan-alone", data[: scans[0]] + END, "whole"
    restart = data.find(b"\xff\xd1", begin)
    if restart > 0:
        yield "restart-gone", data[:restart] + data[restart + 2 :], "pillow"
        yield "restart-wrong", data[:restart] + b"\xff\xd5" + data[restart + 2 :], "pillow"


def _later_scans(data: bytes, begin: int) -> list[int]:
    found, at = [], begin
    while (at := data.find(b"\xff", at)) != -1 and at + 1 < len(data):
        if data[at + 1] in (0xC4, 0xDA) and (data[at + 1] == 0xC4 or not found or at > found[-1]):
            found.append(at)
        at += 2
    return found


def png(pixels: np.ndarray, *, bits: int, interlaced: bool = False) -> bytes:
    """Return RGB pixels ``[H, W, 3]`` as a PNG file in a way in which Pillow writes none."""
    height, width = pixels.shape[:2]
    passes = [(0, 0, 1, 1)]
    if interlaced:
        passes = [(0, 0, 8, 8), (0, 4, 8, 8), (4, 0, 8, 4), (0, 2, 4, 4), (2, 0, 4, 2)]
        passes += [(0, 1, 2, 2), (1, 0, 2, 1)]
    rows = b"".join(
        b"\0" + row.astype(f">u{bits // 8}").tobytes()
        for top, left, down, right in passes
        for row in pixels[top::down, left::right]
    )
    header = struct.pack(">IIBBBBB", width, height, bits, 2, 0, 0, interlaced)
    chunks = ((b"IHDR", header), (b"IDAT", zlib.compress(rows)), (b"IEND", b""))
    return b"\x89PNG\r\n\x1a\n" + b"".join(png_chunk(*one) for one in chunks)


def png_chunk(kind: bytes, content: bytes) -> bytes:
    checked = kind + content
    return struct.pack(">I", len(content)) + checked + struct.pack(">I", zlib.crc32(checked))


def _png(data: bytes, numbers: random.Random) -> Iterator[Damage]:
    yield "nothing-at-end", data[:-40] + bytes(40), "whole"
    at = 8
    while at < len(data):
        length, kind = struct.unpack(">I4s", data[at : at + 8])
        content, end, name = data[at + 8 : at + 8 + length], at + 12 + length, kind.decode()
        whole: Truth = "whole"
        yield f"cut-in-{name}-{at}", data[: (at + end) // 2], whole
        yield (
            f"sum-of-{name}-{at}",
            data[: end - 1] + bytes([data[end - 1] ^ 1]) + data[end:],
            whole,
        )
        for claimed in (0x7FFFFFFF, 0xFFFFFFFF, length + 7):
            wrong = data[:at] + struct.pack(">I", claimed) + data[at + 4 :]
            yield f"length-{claimed}-{name}-{at}", wrong, whole
        if kind in (b"IDAT", b"IEND", b"PLTE"):
            yield f"no-{name}-{at}", data[:at] + data[end:], whole
        if kind == b"IHDR":
            for width, height in ((50_000, 50_000), (0, 0), (136, 0), (1 << 31, 1)):
                header = struct.pack(">II", width, height) + content[8:]
                changed = data[:at] + png_chunk(b"IHDR", header) + data[end:]
                yield f"claims-{width}x{height}", changed, "error"
            tall = struct.pack(">II", 136, 1040) + content[8:]
            # Checksums are right: somebody made it so that most of the picture is black.
            yield "claims-taller", data[:at] + png_chunk(b"IHDR", tall) + data[end:], "pillow"
            text = png_chunk(b"zTXt", b"bomb\0\0" + zlib.compress(bytes(8 << 20), 9))
            yield "text-bomb", data[:end] + text + data[end:], whole
        if kind == b"IDAT":
            flipped = bytearray(content)
            flipped[numbers.randrange(len(content))] ^= 1 << numbers.randrange(8)
            signed = png_chunk(b"IDAT", bytes(flipped))
            yield f"signed-flip-{at}", data[:at] + signed + data[end:], whole
            short = png_chunk(b"IDAT", content[: len(content) // 2])
            yield f"signed-short-{at}", data[:at] + short + data[end:], whole
        at = end


def _nothing(data: bytes, numbers: random.Random) -> Iterator[Damage]:
    return iter(())


_OF_KIND: dict[str, Callable[[bytes, random.Random], Iterator[Damage]]] = {
    "jpg": _jpeg,
    "jpeg": _jpeg,
    "png": _png,
}


def _of_no_picture(undamaged: bytes) -> Iterator[DamagedImage]:
    archive = io.BytesIO()
    with zipfile.ZipFile(archive, "w") as file:
        file.writestr("a.txt", "text")
    program = b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n%%EndComments\nshowpage\n%%EOF\n"
    contents = {
        "empty.jpg": b"",
        "empty.png": b"",
        "one-byte.jpg": b"\xff",
        "text.jpg": b"This is no picture.\n" * 40,
        "page.png": b"<!doctype html><html><body>404 Not Found</body></html>",
        "drawing.png": b'<svg xmlns="http://www.w3.org/2000/svg" width="9" height="9"/>',
        "archive.jpg": archive.getvalue(),
        "program.jpg": program,
        "zeros.jpg": bytes(5000),
        "signature.png": b"\x89PNG\r\n\x1a\n",
        "signature.jpg": b"\xff\xd8\xff",
        "no-content.jpg": b"\xff\xd8" + END,
        "fill-bytes.jpg": b"\xff\xd8" + b"\xff" * 9000,
        "pickle.jpg": b"\x80\x04\x95\x0b\x00\x00\x00\x00\x00\x00\x00\x8c\x07builtin.",
        "large-frame.ppm": b"P6 50000 50000 255\n" + bytes(60),
        "no-frame.ppm": b"P6 0 0 255\n",
    }
    for name, data in contents.items():
        yield DamagedImage(f"none-{name}", data, "error", undamaged)


def _under_wrong_names(sound: dict[str, bytes]) -> Iterator[DamagedImage]:
    wrong = (("png-rgb.png", "jpg"), ("jpeg-420.jpg", "png"), ("webp-lossy.webp", "jpg"))
    for name, kind in (*wrong, ("gif-photo.gif", "jpeg"), ("bmp-rgb.bmp", "png")):
        yield DamagedImage(f"misnamed-{name}.{kind}", sound[name], "whole", sound[name])


def _encoded(image: Image.Image, **options: object) -> bytes:
    file = io.BytesIO()
    image.save(file, **options)
    return file.getvalue()
