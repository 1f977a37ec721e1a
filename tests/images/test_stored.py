"""Pictures that are kept: a part is the part of the whole, pixels stay what they were."""

from __future__ import annotations

import io

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st
from misses import each
from PIL import Image
from thoroughness import max_examples
from torchvision.transforms.v2 import functional

from lightning_fastdata.images import Box
from lightning_fastdata.images.decoders import choose_decoder
from lightning_fastdata.images.reading import open_image
from lightning_fastdata.images.stored import as_row, open_stored, shrunk


def smooth(height, width, seed=0):
    """Pixels like a photograph's: neighbours are alike."""
    order = np.random.default_rng(seed)
    small = order.integers(0, 256, (-(-height // 16) + 1, -(-width // 16) + 1, 3), np.uint8)
    picture = Image.fromarray(small).resize((width, height), Image.Resampling.BICUBIC)
    return np.array(picture)


def psnr(ours, theirs):
    error = np.mean((ours.astype(float) - theirs) ** 2)
    return np.inf if error == 0 else 10 * np.log10(255**2 / error)


@st.composite
def pictures_and_boxes(draw):
    height, width = draw(st.integers(1, 70)), draw(st.integers(1, 70))
    top, left = draw(st.integers(0, height - 1)), draw(st.integers(0, width - 1))
    box = Box(top, left, draw(st.integers(1, height - top)), draw(st.integers(1, width - left)))
    return smooth(height, width, draw(st.integers(0, 9))), box


@max_examples(60)
@given(pictures_and_boxes(), st.integers(0, 20))
def test_a_part_is_the_part_of_the_whole(drawn, after):
    pixels, box = drawn
    row = np.concatenate([as_row(pixels), np.zeros(after, np.uint8)])
    picture = open_stored(row)
    assert (picture.height, picture.width) == pixels.shape[:2]
    top, left, height, width = box
    part = picture.decode_part(box)
    assert part.shape == (height, width, 3)
    assert np.array_equal(part, picture.decode()[top : top + height, left : left + width])
    assert np.array_equal(picture.decode(), pixels)


@each(("size", "side", "wanted"), [
    ((375, 500), 256, (256, 341)),
    ((500, 375), 256, (341, 256)),
    ((200, 300), 256, (200, 300)),
    ((375, 500), None, (375, 500)),
])  # fmt: skip
def test_pictures_are_shrunk_as_torchvision_does(tmp_path, size, side, wanted):
    pixels = smooth(*size)
    path = tmp_path / "one.png"
    Image.fromarray(pixels).save(path)
    found = shrunk(open_image(str(path), decoder=choose_decoder("auto")), side)
    assert found.shape[:2] == wanted
    tensor = torch.from_numpy(pixels).permute(2, 0, 1)
    theirs = tensor if side is None or min(size) < side else functional.resize(tensor, side)
    assert np.array_equal(found, theirs.permute(1, 2, 0).numpy())


def test_a_large_jpeg_is_decoded_at_a_lower_scale(tmp_path):
    pixels = smooth(1100, 1500)
    data = io.BytesIO()
    Image.fromarray(pixels).save(data, "JPEG", quality=95)
    (tmp_path / "one.jpg").write_bytes(data.getvalue())
    found = shrunk(open_image(str(tmp_path / "one.jpg"), decoder=choose_decoder("auto")), 256)
    tensor = torch.from_numpy(pixels).permute(2, 0, 1)
    exact = functional.resize(tensor, 256).permute(1, 2, 0).numpy()
    assert found.shape == exact.shape
    assert psnr(found, exact) > 35
