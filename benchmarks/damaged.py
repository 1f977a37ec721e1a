"""What readers of images make of a thousand damaged files, and what our checks cost.

    python benchmarks/damaged.py

Right is what is equal to Pillow's pixels (within 3 of 255, as decoders differ) of a file that
libjpeg has nothing to say against, and of the undamaged file where the picture must not have
changed. Files are read in a process with 6 GB of address space beyond what it has.
"""

from __future__ import annotations

import io
import os
import resource
import statistics
import sys
import time
from collections import Counter
from pathlib import Path

import cv2
import numpy as np
import simplejpeg
import torch
from PIL import Image
from torchvision.io import ImageReadMode, decode_image

from lightning_fastdata.ext.images import decoders
from lightning_fastdata.ext.images.decoders import MAX_PIXELS, choose_decoder

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
from resilience.damaged_images import DamagedImage, damaged_images

OUTCOMES = ("error", "right", "wrong")


def ours(name):
    decoder = choose_decoder(name)

    def read(data):
        height, width = decoder.size(data)
        if height * width > MAX_PIXELS:
            raise ValueError("as open_image says")
        return decoder.decode(data)

    return read


def pillow(data):
    with Image.open(io.BytesIO(data)) as image:
        if image.mode == "I;16":
            return np.repeat((np.asarray(image) >> 8).astype(np.uint8)[..., None], 3, axis=2)
        return np.asarray(image.convert("RGB"))


def opencv(data):
    image = cv2.imdecode(
        np.frombuffer(data, np.uint8), cv2.IMREAD_COLOR | cv2.IMREAD_IGNORE_ORIENTATION
    )
    if image is None:
        raise ValueError("not decoded")
    return image[..., ::-1]


def torchvision(data):
    encoded = torch.frombuffer(bytearray(data), dtype=torch.uint8)
    return decode_image(encoded, mode=ImageReadMode.RGB).permute(1, 2, 0).numpy()


READERS = {
    **{f"ours, {name}": ours(name) for name in ("simplejpeg", "pillow")},
    "Pillow": pillow,
    "cv2.imdecode": opencv,
    "torchvision.io.decode_image": torchvision,
}


def outcome(read, image: DamagedImage) -> str:
    try:
        pixels = read(image.data)
    except Exception:
        return "error"
    try:
        if image.data[:2] == b"\xff\xd8":
            simplejpeg.decode_jpeg(image.data, colorspace="GRAY")
        wanted = pillow(image.undamaged if image.truth == "whole" else image.data)
    except Exception:
        return "wrong"
    same = pixels.shape == wanted.shape and np.abs(pixels.astype(int) - wanted).max() <= 3
    return "right" if same and image.truth != "error" else "wrong"


def outcomes(read, images: list[DamagedImage]) -> list[str]:
    """Return what became of each file; a process that crashes is followed by another."""
    found: list[str] = []
    while len(found) < len(images):
        ours, theirs = os.pipe()
        pid = os.fork()
        if pid == 0:
            pages = int(Path("/proc/self/statm").read_text().split()[0])
            limit = pages * resource.getpagesize() + (6 << 30)
            resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
            os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # what libraries print
            for image in images[len(found) :]:
                os.write(theirs, bytes([OUTCOMES.index(outcome(read, image))]))
            os._exit(0)
        os.close(theirs)
        with open(ours, "rb") as file:
            found += [OUTCOMES[number] for number in file.read()]
        if os.waitpid(pid, 0)[1]:
            found.append("crash")
    return found


def microseconds(check, data: bytes) -> float:
    times = []
    for _ in range(100):
        began = time.perf_counter()
        check(data)
        times.append(time.perf_counter() - began)
    return statistics.median(times) * 1e6


def main() -> None:
    cv2.setNumThreads(1)
    torch.set_num_threads(1)
    images = damaged_images()
    print(f"{len(images)} files\n\n| | error | right | wrong | crash |")
    print("| --- | --- | --- | --- | --- |")
    for name, read in READERS.items():
        found = Counter(outcomes(read, images))
        cells = (str(found[one]) for one in (*OUTCOMES, "crash"))
        print(f"| {name} | {' | '.join(cells)} |", flush=True)
    photograph = Image.open(io.BytesIO(images[0].undamaged)).resize((500, 400))
    kinds = {
        "JPEG": {"format": "JPEG", "quality": 90},
        "progressive JPEG": {"format": "JPEG", "quality": 90, "progressive": True},
        "PNG": {"format": "PNG"},
    }
    print("\n| 500 x 400, us | check | takes |\n| --- | --- | --- |")
    for kind, options in kinds.items():
        file = io.BytesIO()
        photograph.save(file, **options)
        data = file.getvalue()
        checks = [decoders.check_jpeg_scans, decoders.check_jpeg_codes]
        for check in [decoders.check_png] if kind == "PNG" else checks:
            took = microseconds(check, data)
            print(f"| {kind}, {len(data):,} bytes | {check.__name__} | {took:.0f} |")
        print(f"| | decode, Pillow | {microseconds(pillow, data):.0f} |")


if __name__ == "__main__":
    main()
