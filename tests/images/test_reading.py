"""A file is read, checked and turned as asked, or the error names it and says what to do."""

from __future__ import annotations

import io
import struct

import numpy as np
import pytest
from misses import each
from PIL import Image, ImageOps

from lightning_fastdata.errors import DatasetError
from lightning_fastdata.images.decoders import choose_decoder
from lightning_fastdata.images.reading import exif_orientation, open_image

NAMES = ["simplejpeg", "pillow"]


DECODERS = [choose_decoder(name) for name in NAMES]


def with_orientation(image, orientation, encode, kind):
    exif = Image.Exif()
    exif[0x0112] = orientation
    return encode(image, format=kind, exif=exif.tobytes())


@each("decoder", DECODERS)
@each("orientation", range(1, 9))
@each("kind", ["JPEG", "PNG", "WEBP", "TIFF"])
def test_exif_turns_the_picture_only_when_asked(
    decoder, orientation, kind, china, encode, tmp_path
):
    path = tmp_path / "photo"
    path.write_bytes(with_orientation(china.crop((0, 0, 95, 61)), orientation, encode, kind))
    with Image.open(path) as image:
        stored = np.array(image.convert("RGB"))
        upright = np.array(ImageOps.exif_transpose(image).convert("RGB"))
    plain = open_image(str(path), decoder=decoder)
    np.testing.assert_array_equal(plain.decode(), stored)
    assert (plain.height, plain.width) == stored.shape[:2]
    turned = open_image(str(path), decoder=decoder, apply_exif_orientation=True)
    np.testing.assert_array_equal(turned.decode(), upright)
    assert (turned.height, turned.width) == upright.shape[:2]


@each("decoder", DECODERS)
@each("orientation", range(1, 9))
def test_a_scaled_decode_is_turned_too(decoder, orientation, china, encode, tmp_path):
    path = tmp_path / "photo.jpg"
    path.write_bytes(with_orientation(china, orientation, encode, "JPEG"))
    image = open_image(str(path), decoder=decoder, apply_exif_orientation=True)
    with Image.open(path) as whole:
        small = np.array(ImageOps.exif_transpose(whole).reduce(4), dtype=float)
    assert np.abs(image.decode(scale=4) - small).mean() < 6


@each("orientation", [0, 9, 65535])
def test_an_impossible_orientation_counts_as_upright(orientation, china, encode):
    data = with_orientation(china.crop((0, 0, 8, 8)), orientation, encode, "JPEG")
    assert exif_orientation(data) == 1


def test_broken_exif_counts_as_upright(china, encode):
    data = with_orientation(china.crop((0, 0, 8, 8)), 6, encode, "JPEG")
    at = data.index(b"Exif\0\0") + 6
    assert exif_orientation(data) == 6
    assert exif_orientation(data[:at] + b"\xff" * 8 + data[at + 8 :]) == 1


@each("decoder", DECODERS)
@each("damage", ["truncated", "empty", "text"])
def test_a_damaged_file_is_named_with_its_reason_and_a_remedy(decoder, damage, jpegs, tmp_path):
    whole = jpegs["420"]
    data = {"truncated": whole[: len(whole) // 2], "empty": b"", "text": b"hello" * 99}[damage]
    path = tmp_path / "broken.jpg"
    path.write_bytes(data)
    with pytest.raises(DatasetError, match=r"broken\.jpg.*(Replace|remove)") as caught:
        open_image(str(path), decoder=decoder).decode()
    assert isinstance(caught.value.__cause__, ValueError)


@each("decoder", DECODERS)
def test_a_missing_file_is_named_and_its_cause_kept(decoder, tmp_path):
    with pytest.raises(DatasetError, match=r"gone\.jpg") as caught:
        open_image(str(tmp_path / "gone.jpg"), decoder=decoder)
    assert isinstance(caught.value.__cause__, FileNotFoundError)


@each("decoder", DECODERS)
def test_a_jpeg_that_claims_to_be_huge_is_refused_before_decoding(decoder, jpegs, tmp_path):
    data = bytearray(jpegs["444"])
    frame = data.index(b"\xff\xc0")
    data[frame + 5 : frame + 9] = struct.pack(">HH", 60_000, 60_000)
    path = tmp_path / "bomb.jpg"
    path.write_bytes(bytes(data))
    with pytest.raises(DatasetError, match=r"bomb\.jpg.*(3,600,000,000|3600000000).*(bomb|limit)"):
        open_image(str(path), decoder=decoder)


@each("decoder", DECODERS)
def test_a_small_png_of_many_pixels_is_refused_by_the_limit_given(decoder, tmp_path):
    path = tmp_path / "bomb.png"
    file = io.BytesIO()
    Image.new("1", (9000, 9000)).save(file, "PNG")
    path.write_bytes(file.getvalue())
    assert path.stat().st_size < 20_000
    with pytest.raises(DatasetError, match=r"bomb\.png.*81,000,000.*max_pixels is 80,000,000"):
        open_image(str(path), decoder=decoder, max_pixels=80_000_000)
    assert open_image(str(path), decoder=decoder, max_pixels=81_000_000).height == 9000
