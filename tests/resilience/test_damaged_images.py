"""A damaged file is an error that names it, or the right picture: never a part, a crash, a hang."""

from __future__ import annotations

import io
import json
import os
import struct

import numpy as np
import pytest
import simplejpeg
import torch
from PIL import Image
from programs import run_program
from resilience.damaged_images import damaged_images, png_chunk, sound_images
from thoroughness import some

from lightning_fastdata import BadSamples, FastDataLoader, FastImageFolder
from lightning_fastdata.errors import DatasetError
from lightning_fastdata.ext.images.decoders import choose_decoder, open_image

DECODERS = ["simplejpeg", "pillow"]


@pytest.fixture(scope="module")
def damaged():
    return damaged_images()


@pytest.fixture(scope="module")
def files(damaged, tmp_path_factory):
    """Name to path of every damaged file, in a folder of one class."""
    folder = tmp_path_factory.mktemp("damaged") / "class"
    folder.mkdir()
    for image in damaged:
        (folder / image.name).write_bytes(image.data)
    return {image.name: str(folder / image.name) for image in damaged}


def as_pillow_loads(data):
    with Image.open(io.BytesIO(data)) as image:
        if image.mode == "I;16":
            return np.repeat((np.asarray(image) >> 8).astype(np.uint8)[..., None], 3, axis=2)
        return np.asarray(image.convert("RGB"))


def garbled(data):
    """Whether libjpeg has anything to say against a JPEG, whatever it makes of it."""
    if data[:3] != b"\xff\xd8\xff":
        return False
    try:
        simplejpeg.decode_jpeg(data, colorspace="GRAY")
    except ValueError:
        return True
    return False


@pytest.mark.filterwarnings("ignore")  # of Pillow, about odd tags
@pytest.mark.parametrize("name", DECODERS)
def test_each_of_a_thousand_files_is_an_error_that_names_it_or_the_right_picture(
    name, damaged, files
):
    decoder, right = choose_decoder(name), 0
    for image in damaged:
        try:
            pixels = open_image(files[image.name], decoder=decoder).decode()
        except DatasetError as caught:
            reason = str(caught)
            pixels = None
        if pixels is None:
            assert image.name in reason
            continue
        assert image.truth != "error", image.name
        of = image.undamaged if image.truth == "whole" else image.data
        assert not garbled(image.data), image.name
        np.testing.assert_array_equal(pixels, as_pillow_loads(of), err_msg=image.name)
        right += 1
    assert len(damaged) > 900
    assert right > 150


@pytest.mark.parametrize("name", DECODERS)
@pytest.mark.parametrize("scale", [2, 8])
@pytest.mark.filterwarnings("ignore")  # of Pillow, about odd tags
def test_a_damaged_file_is_refused_at_any_scale(name, scale, damaged, files):
    decoder = choose_decoder(name)
    for image in some(damaged, 3):
        outcomes = []
        for at in (1, scale):
            try:
                opened = open_image(files[image.name], decoder=decoder)
                outcomes.append(opened.decode(scale=at).shape)
            except DatasetError:
                outcomes.append(None)
        whole, small = outcomes
        assert (whole is None) == (small is None), image.name
        if whole is not None:
            assert small == (-(-whole[0] // scale), -(-whole[1] // scale), 3)


@pytest.mark.filterwarnings("ignore")  # of Pillow, about odd tags
@pytest.mark.parametrize("executor", ["inline", "workers", "torch"])
def test_a_loader_refuses_the_same_files_and_outlives_all(executor, files, tmp_path):
    root = os.path.dirname(os.path.dirname(next(iter(files.values()))))
    folder = FastImageFolder(root, size=32, crop="stretch", is_valid_file=lambda path: True)
    whole, refused = [], set()
    for index, (path, _) in enumerate(folder.samples):
        try:
            open_image(path, decoder=folder.decoder).decode()
        except DatasetError:
            refused.add(path)
        else:
            whole.append(folder[index][0])
    rule = BadSamples("skip", 1, tmp_path / "bad.jsonl")
    workers = 0 if executor == "inline" else 2
    loader = FastDataLoader(folder, 32, num_workers=workers, executor=executor, on_bad_sample=rule)
    assert torch.equal(torch.cat([images for images, _ in loader]), torch.stack(whole))
    lines = (tmp_path / "bad.jsonl").read_text().splitlines()
    assert {json.loads(line)["path"] for line in lines} == refused


def test_claims_of_size_are_refused_before_memory_is_taken(damaged, files):
    claims = [files[one.name] for one in damaged if "50000" in one.name or "claims" in one.name]
    code = (
        "import resource, sys\n"
        "from lightning_fastdata.errors import DatasetError\n"
        "from lightning_fastdata.ext.images.decoders import choose_decoder\n"
        "from lightning_fastdata.ext.images.decoders import open_image\n"
        "import cv2, simplejpeg, numpy, PIL.Image\n"
        "PIL.Image.init()\n"
        "decoders = [choose_decoder(one) for one in ('simplejpeg', 'pillow')]\n"
        "pages = int(open('/proc/self/statm').read().split()[0])\n"
        "limit = pages * resource.getpagesize() + (256 << 20)\n"
        "resource.setrlimit(resource.RLIMIT_AS, (limit, limit))\n"
        "for decoder in decoders:\n"
        "    for path in sys.argv[1:]:\n"
        "        try: open_image(path, decoder=decoder).decode()\n"
        "        except DatasetError: pass\n"
    )
    done = run_program("-c", code, *claims)
    assert len(claims) > 40
    assert done.returncode == 0, done.stderr


def empty_png(width, height):
    header = struct.pack(">IIBBBBB", width, height, 1, 0, 0, 0, 0)
    chunks = png_chunk(b"IHDR", header), png_chunk(b"IDAT", b""), png_chunk(b"IEND", b"")
    return b"\x89PNG\r\n\x1a\n" + b"".join(chunks)


@pytest.mark.filterwarnings("ignore::PIL.Image.DecompressionBombWarning")
def test_what_pillow_only_warns_of_is_an_error(tmp_path):
    path = tmp_path / "large.png"
    path.write_bytes(empty_png(10_000, 10_000))
    with pytest.raises(DatasetError, match=r"large\.png.*100,000,000.*MAX_IMAGE_PIXELS"):
        open_image(str(path), decoder=choose_decoder())


def test_a_file_of_more_bytes_than_its_pixels_could_have_is_not_read(tmp_path):
    path = tmp_path / "sparse.png"
    with path.open("wb") as file:
        file.truncate(1 << 40)
    with pytest.raises(DatasetError, match=r"sparse\.png has 1,099,511,627,776 bytes"):
        open_image(str(path), decoder=choose_decoder())


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="needs named pipes")
def test_a_named_pipe_or_a_device_is_refused_and_not_waited_for(tmp_path):
    os.mkfifo(tmp_path / "pipe.jpg")
    os.symlink("/dev/zero", tmp_path / "device.jpg")
    for name in ("pipe.jpg", "device.jpg"):
        with pytest.raises(DatasetError, match=rf"{name}.*not a regular file"):
            open_image(str(tmp_path / name), decoder=choose_decoder())


def test_no_program_is_run_for_an_eps_file(tmp_path, monkeypatch, damaged):
    ghostscript = tmp_path / "gs"
    ghostscript.write_text(f"#!/bin/sh\ntouch {tmp_path}/ran\n")
    ghostscript.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    data = next(one.data for one in damaged if one.name == "none-program.jpg")
    for name in DECODERS:
        with pytest.raises(ValueError, match="EPS"):
            choose_decoder(name).decode(data)
    assert not (tmp_path / "ran").exists()


def test_a_folder_has_the_limit_that_it_is_given(files, tmp_path):
    (tmp_path / "root/class").mkdir(parents=True)
    (tmp_path / "root/class/a.jpg").write_bytes(sound_images()["jpeg-420.jpg"])
    assert FastImageFolder(tmp_path / "root", size=8, max_pixels=136 * 104)[0][1] == 0
    with pytest.raises(DatasetError, match=r"a\.jpg.*14,144.*max_pixels is 14,143"):
        FastImageFolder(tmp_path / "root", size=8, max_pixels=136 * 104 - 1)[0]
