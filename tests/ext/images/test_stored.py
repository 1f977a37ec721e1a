"""Pictures are shrunk, before they are kept, as torchvision does."""

from __future__ import annotations

import io

import numpy as np
import torch
from ext.images.torchvision_pixels import psnr_db
from misses import each
from PIL import Image
from torchvision.transforms.v2 import functional

from lightning_fastdata.ext.images.decoders import choose_decoder, open_image
from lightning_fastdata.ext.images.resized_crop import shrunk


def smooth(height, width):
    """Pixels like a photograph's: neighbours are alike."""
    order = np.random.default_rng(0)
    small = order.integers(0, 256, (-(-height // 16) + 1, -(-width // 16) + 1, 3), np.uint8)
    picture = Image.fromarray(small).resize((width, height), Image.Resampling.BICUBIC)
    return np.array(picture)


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
    assert psnr_db(found, exact) > 35
