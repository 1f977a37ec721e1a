"""A part of a JPEG that is decoded alone has the pixels of the same part of the whole picture."""

from __future__ import annotations

import io
from functools import partial

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from misses import each
from PIL import Image
from thoroughness import max_examples

from lightning_fastdata import FastImageFolder
from lightning_fastdata.data import decode_crop
from lightning_fastdata.errors import DatasetError, OptionsError
from lightning_fastdata.ext.images import decoders
from lightning_fastdata.ext.images.decoders import Box, choose_decoder

needs_library = pytest.mark.skipif(
    decoders.region_decoder() is None, reason="TurboJPEG 3 is not installed"
)


@st.composite
def files(draw, photograph):
    """A JPEG of a part of a photograph: any size, subsampling and coding that can be written."""
    height, width = draw(st.integers(1, 90)), draw(st.integers(1, 90))
    top, left = draw(st.integers(0, 300)), draw(st.integers(0, 500))
    picture = photograph.crop((left, top, left + width, top + height))
    quality = draw(st.sampled_from([20, 75, 92, 100]))
    subsampling = draw(st.sampled_from(["4:4:4", "4:2:2", "4:2:0", "440", "411", "grey"]))
    if subsampling in ("440", "411"):
        import simplejpeg

        pixels = np.ascontiguousarray(np.asarray(picture))
        return simplejpeg.encode_jpeg(pixels, quality=quality, colorsubsampling=subsampling)
    options = {"quality": quality, "progressive": draw(st.booleans())}
    if blocks := draw(st.integers(0, 5)):
        options["restart_marker_blocks"] = blocks
    if subsampling == "grey":
        picture = picture.convert("L")
    else:
        options["subsampling"] = subsampling
    file = io.BytesIO()
    picture.save(file, "JPEG", **options)
    return file.getvalue()


@needs_library
@max_examples(150)
@given(data=st.data(), scale=st.sampled_from([1, 1, 2, 4, 8]))
def test_a_part_is_that_part_of_the_whole(china, data, scale):
    file = data.draw(files(china))
    whole = choose_decoder("simplejpeg").decode(file, scale=scale)
    rows, columns = whole.shape[:2]
    height, width = data.draw(st.integers(1, rows)), data.draw(st.integers(1, columns))
    top, left = data.draw(st.integers(0, rows - height)), data.draw(st.integers(0, columns - width))
    part = decoders.region_decoder().decode(file, Box(top, left, height, width), scale)
    if part is None:
        assert scale > 1
        assert max(choose_decoder("simplejpeg").size(file)) <= 8
        return
    np.testing.assert_array_equal(part, whole[top : top + height, left : left + width])


@each("library", ["there", "missing"])
@each("name", ["420", "444", "422", "grey", "progressive", "rgb", "cmyk", "restart", "tiny"])
def test_any_image_can_be_decoded_in_part(jpegs, name, library, as_image_folder_loads, monkeypatch):
    if library == "missing":
        monkeypatch.setattr(decoders, "region_decoder", lambda: None)
    whole = as_image_folder_loads(jpegs[name])
    rows, columns = whole.shape[:2]
    inside = rows // 3, columns // 2, rows // 2, columns // 3
    for top, left, height, width in ((0, 0, 1, 1), inside, (0, 0, rows, columns)):
        wanted = whole[top : top + height, left : left + width]
        part = decode_crop(jpegs[name], (top, left, height, width))
        np.testing.assert_array_equal(part, wanted)


@each("decoder", ["pillow", "simplejpeg"])
def test_what_is_no_jpeg_can_be_decoded_in_part(china, encode, decoder):
    data = encode(china, format="PNG")
    part = decode_crop(data, (100, 50, 30, 20), decoder=decoder)
    np.testing.assert_array_equal(part, np.asarray(china)[100:130, 50:70])


@each("buffer", [memoryview, bytearray, partial(np.frombuffer, dtype=np.uint8)])
@each("decoder", ["pillow", "simplejpeg"])
def test_any_buffer_of_a_file_is_decoded(jpegs, decoder, buffer):
    data, box = jpegs["420"], (100, 50, 30, 20)
    part = decode_crop(buffer(data), box, decoder=decoder)
    np.testing.assert_array_equal(part, decode_crop(data, box, decoder=decoder))


@each("data", [None, "photo.jpg", 5])
def test_what_is_no_file_in_memory_is_named(data):
    with pytest.raises(OptionsError, match=rf"data is {type(data).__name__}, and no bytes"):
        decode_crop(data, (0, 0, 1, 1))


@each("box", [(0, 0, 0, 5), (-1, 0, 5, 5), (250, 0, 8, 5), (0, 330, 5, 4)])
def test_a_box_that_is_not_within_the_picture_is_named(jpegs, box):
    with pytest.raises(OptionsError, match=r"257 x 333 pixels"):
        decode_crop(jpegs["420"], box)


@each("box", [None, (0, 0, 5), (0, 0, 1.5, 5), ("0", 0, 5, 5), (float("nan"), 0, 5, 5)])
def test_what_is_no_box_is_named(jpegs, box):
    with pytest.raises(OptionsError, match=r"^box is .*\(top, left, height, width\)"):
        decode_crop(jpegs["420"], box)


@needs_library
def test_epochs_have_the_same_samples_with_and_without_the_library(folder, monkeypatch):
    def samples():
        dataset = FastImageFolder(folder, size=32, horizontal_flip=0.5)
        for epoch in range(3):
            dataset.set_epoch(epoch)
            yield from (dataset[index][0] for index in range(len(dataset)))

    in_parts = list(samples())
    monkeypatch.setattr(decoders, "region_decoder", lambda: None)
    assert all(map(torch.equal, in_parts, samples()))


def damage_below(data):
    """Garble codes in the last tenth of a JPEG's bytes; its end is left."""
    at = len(data) - len(data) // 10
    return data[:at] + bytes(byte ^ 0x55 for byte in data[at : at + 40]) + data[at + 40 :]


@pytest.fixture
def damaged(tmp_path, china):
    """A folder with one JPEG that is garbled near its lower edge."""
    (tmp_path / "a").mkdir()
    file = io.BytesIO()
    china.save(file, "JPEG", quality=92)
    path = tmp_path / "a" / "x.jpg"
    path.write_bytes(damage_below(file.getvalue()))
    return tmp_path


def test_damage_anywhere_is_found_when_a_file_is_first_read(damaged):
    folder = FastImageFolder(damaged, size=16, scale=(0.01, 0.02))
    for epoch in range(20):
        folder.set_epoch(epoch)
        with pytest.raises(DatasetError, match=r"x\.jpg"):
            folder[0]


@needs_library
def test_unchecked_files_are_right_above_their_damage(damaged, china):
    with Image.open(io.BytesIO((damaged / "a" / "x.jpg").read_bytes())) as image:
        assert image.size == china.size
    folder = FastImageFolder(damaged, size=16, scale=(0.01, 0.02), check_files=False)
    outcomes = set()
    for epoch in range(60):
        folder.set_epoch(epoch)
        try:
            folder[0]
        except DatasetError:
            outcomes.add("error")
        else:
            outcomes.add("sample")
    assert "sample" in outcomes


@needs_library
def test_damage_within_the_part_is_an_error(jpegs):
    data = jpegs["420"]
    middle = len(data) // 2
    garbled = data[:middle] + b"\xff\xd9" + data[middle + 2 :]
    with pytest.raises(DatasetError, match="in memory"):
        decode_crop(garbled, (200, 0, 57, 333))


def test_a_file_that_was_cut_off_is_an_error(jpegs):
    with pytest.raises(DatasetError):
        decode_crop(jpegs["420"][:-500], (0, 0, 10, 10))


@pytest.fixture
def looked_for_anew(monkeypatch):
    """Have the library looked for with what a test changes, and again behind it."""
    before = decoders.region_decoder()
    decoders.region_decoder.cache_clear()
    yield
    monkeypatch.undo()
    decoders.region_decoder.cache_clear()
    assert (decoders.region_decoder() is None) == (before is None)


@pytest.mark.usefixtures("looked_for_anew")
def test_an_older_library_is_not_used(monkeypatch):
    monkeypatch.setattr(decoders, "_libraries", lambda: iter(["libc.so.6", "/nowhere.so"]))
    assert decoders.region_decoder() is None


@pytest.mark.usefixtures("looked_for_anew")
def test_a_library_with_other_pixels_is_not_used(monkeypatch):
    def black(decoder, data, box, *_):
        return np.zeros((box.height, box.width, 3), np.uint8)

    monkeypatch.setattr(decoders.RegionDecoder, "decode", black)
    assert decoders.region_decoder() is None
