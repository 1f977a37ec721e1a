"""Every decoder gives the pixels that ``ImageFolder`` gives, or says why it cannot."""

from __future__ import annotations

import io

import numpy as np
import pytest
from ext.images.torchvision_pixels import psnr_db
from hypothesis import HealthCheck, assume, given
from hypothesis import strategies as st
from misses import each
from PIL import Image
from programs import run_program
from thoroughness import max_examples

from lightning_fastdata.errors import OptionsError
from lightning_fastdata.ext.images.decoders import choose_decoder

NAMES = ["simplejpeg", "pillow"]
JPEGS = ["420", "444", "422", "grey", "progressive", "rgb", "cmyk", "restart", "tiny"]


DECODERS = [choose_decoder(name) for name in NAMES]


@pytest.fixture(scope="module")
def others(china, encode):
    """Small images in other formats."""
    image = china.crop((200, 100, 264, 148))
    kinds = ("PNG", "GIF", "WEBP", "TIFF", "BMP")
    return {kind: encode(image, format=kind) for kind in kinds}


@each("decoder", DECODERS)
@each("kind", JPEGS)
def test_a_jpeg_of_any_kind_has_the_pixels_of_image_folder(
    decoder, kind, jpegs, as_image_folder_loads
):
    pixels = decoder.decode(jpegs[kind])
    np.testing.assert_array_equal(pixels, as_image_folder_loads(jpegs[kind]))
    assert pixels.dtype == np.uint8
    assert pixels.flags.c_contiguous
    assert pixels.flags.writeable


@each("decoder", DECODERS)
@each("mode", ["RGB", "L", "1", "P", "RGBA", "LA"])
@each("kind", ["PNG", "TIFF", "WEBP", "GIF", "BMP"])
def test_other_formats_in_any_mode_have_the_pixels_of_image_folder(
    decoder, mode, kind, china, encode, as_image_folder_loads
):
    if (kind, mode) in {("BMP", "LA"), ("GIF", "LA")}:
        pytest.skip("Pillow does not write this")
    image = china.crop((100, 50, 191, 121)).convert(mode)
    if mode in ("RGBA", "LA"):
        image.putalpha(Image.linear_gradient("L").resize(image.size))
    data = encode(image, format=kind)
    pixels = decoder.decode(data)
    np.testing.assert_array_equal(pixels, as_image_folder_loads(data))
    assert decoder.size(data) == pixels.shape[:2] == (71, 91)


@each("decoder", DECODERS)
@each("kind", ["PNG", "TIFF", "PPM"])
def test_sixteen_bit_grey_keeps_its_high_byte_instead_of_burning_out(decoder, kind, encode):
    levels = np.arange(65536, dtype=np.uint16).reshape(256, 256)
    pixels = decoder.decode(encode(Image.fromarray(levels), format=kind))
    np.testing.assert_array_equal(pixels, np.repeat((levels >> 8)[..., None], 3, axis=2))


@each("decoder", DECODERS)
def test_pixels_without_a_known_range_are_an_error(decoder, encode):
    data = encode(Image.fromarray(np.ones((4, 4), np.float32)), format="TIFF")
    with pytest.raises(ValueError, match="mode 'F'"):
        decoder.decode(data)


@each("decoder", DECODERS)
@each("kind", JPEGS)
def test_the_size_in_the_header_is_the_size_of_the_pixels(decoder, kind, jpegs):
    assert decoder.size(jpegs[kind]) == decoder.decode(jpegs[kind]).shape[:2]


@each("decoder", DECODERS)
@each("factors", [0x14, 0x31, 0x13, 0x24])
def test_a_rare_subsampling_has_a_size_too(decoder, factors, jpegs):
    data = bytearray(jpegs["444"])
    data[data.index(b"\xff\xc0") + 11] = factors
    assert decoder.size(bytes(data)) == (257, 333)


@each("decoder", DECODERS)
@each("scale", [2, 4, 8])
@each("kind", JPEGS)
def test_a_scaled_jpeg_has_rounded_up_sides_and_looks_like_its_box_average(
    decoder, kind, scale, jpegs, as_image_folder_loads
):
    pixels = decoder.decode(jpegs[kind], scale=scale)
    average = np.array(Image.fromarray(as_image_folder_loads(jpegs[kind])).reduce(scale))
    assert pixels.shape == average.shape
    assert pixels.flags.c_contiguous
    # The DCT's low frequencies are a sharper filter than a box; 4:2:2 and tiny pictures are worst.
    assert psnr_db(pixels, average) > 20


@each("decoder", DECODERS)
@each("scale", [2, 4, 8])
def test_a_scaled_png_is_its_box_average(decoder, scale, china, encode):
    image = china.crop((0, 0, 101, 67))
    pixels = decoder.decode(encode(image, format="PNG"), scale=scale)
    np.testing.assert_array_equal(pixels, np.array(image.reduce(scale)))


@each("decoder", DECODERS)
@given(data=st.data())
@max_examples(150, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_whatever_the_bytes_are_there_are_pixels_or_a_reason(decoder, data, jpegs, others):
    samples = {**jpegs, **others}
    encoded = bytearray(samples[data.draw(st.sampled_from(sorted(samples)))])
    for _ in range(data.draw(st.integers(1, 6))):
        at = data.draw(st.integers(0, len(encoded) - 1))
        encoded[at] = data.draw(st.integers(0, 255))
    scale = data.draw(st.sampled_from([1, 2, 4, 8]))
    try:
        height, width = decoder.size(bytes(encoded))
        assume(height * width < 1_000_000)
        pixels = decoder.decode(bytes(encoded), scale=scale)
    except ValueError as error:
        reason = str(error)
    else:
        reason = "pixels"
        assert pixels.dtype == np.uint8
        assert pixels.shape == (-(-height // scale), -(-width // scale), 3)
    assert reason


def test_auto_takes_simplejpeg_where_it_is_installed():
    assert choose_decoder().name == "simplejpeg"


def test_auto_falls_back_in_order_when_libraries_are_missing():
    code = (
        "import sys\n"
        "for name in sys.argv[1:]: sys.modules[name] = None\n"
        "from lightning_fastdata.ext.images.decoders import choose_decoder\n"
        "sys.stdout.write(choose_decoder().name)\n"
    )
    done = run_program("-c", code, "simplejpeg")
    assert done.stdout == "pillow", done.stderr


def test_an_unknown_decoder_is_refused_by_name():
    with pytest.raises(OptionsError, match=r"'jpegli'.*simplejpeg"):
        choose_decoder("jpegli")


@each("decoder", DECODERS)
def test_the_first_frame_of_an_animation_is_read(decoder, china, encode):
    first = china.crop((0, 0, 64, 48)).convert("P")
    data = encode(first, format="GIF", save_all=True, append_images=[first.rotate(90)])
    with Image.open(io.BytesIO(data)) as image:
        wanted = np.array(image.convert("RGB"))
    np.testing.assert_array_equal(decoder.decode(data), wanted)
