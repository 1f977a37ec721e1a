"""A file is read and checked, or the error names it and says what to do."""

from __future__ import annotations

import io
import struct

import pytest
from misses import each
from PIL import Image

from lightning_fastdata.errors import DatasetError
from lightning_fastdata.images.decoders import choose_decoder
from lightning_fastdata.images.reading import open_image

NAMES = ["simplejpeg", "pillow"]


DECODERS = [choose_decoder(name) for name in NAMES]


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
