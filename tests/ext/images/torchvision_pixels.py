"""What torchvision makes of a file, and how far other pixels are from it."""

from __future__ import annotations

import math

import numpy as np
from torchvision.datasets.folder import pil_loader
from torchvision.transforms.v2 import functional


def torchvision_sample(path, placement, size, reference="pil"):
    """Return ``[size, size, 3]`` as torchvision makes it of a PIL image or a uint8 tensor."""
    image = pil_loader(path)
    if reference == "tensor":
        image = functional.pil_to_tensor(image)
    box = placement.box
    image = functional.crop(image, box.top, box.left, box.height, box.width)
    image = functional.resize(image, [placement.height, placement.width], antialias=True)
    image = functional.crop(image, placement.top, placement.left, size, size)
    if placement.flip:
        image = functional.horizontal_flip(image)
    return image.permute(1, 2, 0).numpy() if reference == "tensor" else np.array(image)


def psnr_db(ours, theirs):
    """Return the peak signal-to-noise ratio of two uint8 pictures in dB, infinite if equal."""
    error = float(np.mean((ours.astype(np.float64) - theirs) ** 2))
    return math.inf if error == 0 else 10 * math.log10(255**2 / error)
