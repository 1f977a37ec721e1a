"""Real photographs from the wheels of scikit-learn and scikit-image, as the tests need them."""

from __future__ import annotations

import io
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

# What imports them takes long, and has nothing of theirs but files.
SKIMAGE, SKLEARN = (Path(find_spec(name).origin).parent for name in ("skimage", "sklearn"))
PHOTOS = {
    "china": SKLEARN / "datasets/images/china.jpg",
    "flower": SKLEARN / "datasets/images/flower.jpg",
    "rocket": SKIMAGE / "data/rocket.jpg",
    "retina": SKIMAGE / "data/retina.jpg",
    "coffee": SKIMAGE / "data/coffee.png",
}


@pytest.fixture(scope="session")
def photos():
    """Name to path of five photographs: four JPEG files from 640x427 to 1411x1411, and a PNG."""
    return PHOTOS


@pytest.fixture(scope="session")
def china():
    with Image.open(PHOTOS["china"]) as image:
        return image.convert("RGB")


@pytest.fixture(scope="session")
def encode():
    """Save a PIL image into bytes."""

    def encode(image, **options):
        file = io.BytesIO()
        image.save(file, **options)
        return file.getvalue()

    return encode


@pytest.fixture(scope="session")
def jpegs(china, encode):
    """Name to bytes: JPEGs of every colour space, subsampling and coding that Pillow can write."""
    odd = china.crop((0, 0, 333, 257))
    return {
        "420": encode(odd, format="JPEG", quality=92, subsampling="4:2:0"),
        "444": encode(odd, format="JPEG", quality=92, subsampling="4:4:4"),
        "422": encode(odd, format="JPEG", quality=60, subsampling="4:2:2"),
        "grey": encode(odd.convert("L"), format="JPEG"),
        "progressive": encode(odd, format="JPEG", progressive=True),
        "rgb": encode(odd, format="JPEG", keep_rgb=True),
        "cmyk": encode(odd.convert("CMYK"), format="JPEG"),
        "restart": encode(odd, format="JPEG", restart_marker_blocks=2),
        "tiny": encode(odd.resize((3, 5)), format="JPEG"),
    }


@pytest.fixture(scope="session")
def as_image_folder_loads():
    """What ``ImageFolder`` makes of encoded bytes: Pillow, converted to RGB."""

    def load(data):
        with Image.open(io.BytesIO(data)) as image:
            return np.array(image.convert("RGB"))

    return load


@pytest.fixture
def folder(tmp_path, photos, china, encode):
    """An image folder with three classes, nested files, and files that are no images."""
    for name in ("b_cats", "a_dogs", "Z"):
        (tmp_path / name).mkdir()
    (tmp_path / "a_dogs" / "deep" / "er").mkdir(parents=True)
    for name, path in photos.items():
        (tmp_path / "a_dogs" / f"{name}{path.suffix}").write_bytes(path.read_bytes())
    for angle in range(0, 50, 10):
        data = encode(china.rotate(angle), format="JPEG", quality=85)
        (tmp_path / "b_cats" / f"{angle}.JPG").write_bytes(data)
    (tmp_path / "a_dogs" / "deep" / "er" / "grüße.jpeg").write_bytes(
        encode(china.convert("L"), format="JPEG")
    )
    (tmp_path / "Z" / "one.png").write_bytes(encode(china.convert("P"), format="PNG"))
    (tmp_path / "Z" / "notes.txt").write_text("not an image")
    (tmp_path / "stray.jpg").write_bytes(b"not in a class")
    return tmp_path
