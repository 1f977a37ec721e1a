"""Which part of a picture becomes the sample, and how it is decoded and resized for that."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Literal, NamedTuple, TypeAlias, get_args

import numpy as np

from lightning_fastdata.errors import OptionsError, check, check_among, is_number, is_whole
from lightning_fastdata.ext.images.decoders import Box, EncodedImage, Picture, Pixels, Scale
from lightning_fastdata.types import SampleKey

if TYPE_CHECKING:
    from numpy.typing import NDArray

Crop: TypeAlias = Literal["random_resized", "center", "stretch"]

_MASK = (1 << 64) - 1


class Placement(NamedTuple):
    """How one picture becomes one sample.

    ``box`` (full-size pixels) is cut out of it and resized to ``height`` x ``width``. In the result
    the sample begins at row ``top`` and column ``left``; with ``flip`` it is mirrored.
    """

    box: Box
    height: int
    width: int
    top: int
    left: int
    flip: bool


@dataclass(frozen=True, slots=True)
class CropRule:
    """How samples are cut out of pictures of any size; options of ``FastImageFolder``."""

    size: int
    crop: Crop = "random_resized"
    """The rule of cropping: ``random_resized`` is torchvision's ``RandomResizedCrop(size, scale,
    ratio)``, ``center`` is ``Resize(resize)`` then ``CenterCrop(size)``, ``stretch`` is
    ``Resize((size, size))``."""
    scale: tuple[float, float] = (0.08, 1.0)
    ratio: tuple[float, float] = (3 / 4, 4 / 3)
    horizontal_flip: float = 0.0
    resize: int | None = None

    def __post_init__(self) -> None:
        flip, resize = self.horizontal_flip, self.resize
        check_among("crop", self.crop, get_args(Crop))
        check("size", self.size, is_whole(self.size, 1), "whole numbers of pixels from 1")
        for name, pair in (("scale", self.scale), ("ratio", self.ratio)):
            check(name, pair, _is_range(pair), "pairs (min, max) with 0 < min <= max")
        fine = is_number(flip) and 0 <= flip <= 1
        check("horizontal_flip", flip, fine, "probabilities from 0 to 1")
        fine = resize is None or is_whole(resize)
        check("resize", resize, fine, "None and whole numbers of pixels")
        if resize is not None and resize < self.size:
            raise OptionsError(
                f"resize is {resize}, smaller than size {self.size}: the centre crop would "
                "reach beyond the picture. Give resize >= size."
            )

    @property
    def draws(self) -> bool:
        """Whether two samples of one picture may differ."""
        return self.crop == "random_resized" or self.horizontal_flip > 0

    @property
    def shorter_side(self) -> int:
        """Length of the shorter side before the centre is cut, in pixels."""
        return self.resize or round(self.size * 8 / 7)

    def place(self, height: int, width: int, uniform: Callable[[], float]) -> Placement:
        """Return where the sample of a ``height`` x ``width`` picture comes from.

        ``uniform`` draws from [0, 1), first for the flip, so that the flip does not depend on how
        often a crop had to be drawn.
        """
        flip = self.horizontal_flip > 0 and uniform() < self.horizontal_flip
        size = self.size
        if self.crop == "random_resized":
            box = random_resized_box(height, width, self.scale, self.ratio, uniform)
            return Placement(box, size, size, 0, 0, flip)
        whole = Box(0, 0, height, width)
        if self.crop == "stretch":
            return Placement(whole, size, size, 0, 0, flip)
        rows, columns = shorter_side_to(self.shorter_side, height, width)
        # torchvision rounds half to even here, as Python's round does.
        top, left = round((rows - size) / 2), round((columns - size) / 2)
        return Placement(whole, rows, columns, top, left, flip)


def _is_range(pair: Any) -> bool:
    try:
        low, high = map(float, pair)
    except (TypeError, ValueError):
        return False
    return 0 < low <= high


def keyed_uniform(key: SampleKey) -> Callable[[], float]:
    """Return a source of uniform numbers in [0, 1) that depends on the key and nothing else.

    Only ``random.Random.random`` is used: its sequence for a seed is promised to stay the same in
    later Python versions. Making a source costs 4 us, a tenth of what ``numpy.random`` and its
    checks would take per sample.
    """
    seed = (key.seed & _MASK) << 128 | (key.epoch & _MASK) << 64 | (key.index & _MASK)
    seed |= max(0, key.index >> 64) << 192  # of a sample that comes again
    return random.Random(seed).random


def random_resized_box(
    height: int,
    width: int,
    scale: tuple[float, float],
    ratio: tuple[float, float],
    uniform: Callable[[], float],
) -> Box:
    """Draw a box by the law of torchvision's ``RandomResizedCrop.get_params``.

    The area is uniform in ``scale`` times the picture's; the logarithm of width / height and the
    position are uniform, too. After ten attempts it is the largest centred box of allowed ratio.
    """
    log_low, log_high = math.log(ratio[0]), math.log(ratio[1])
    for _ in range(10):
        area = height * width * (scale[0] + (scale[1] - scale[0]) * uniform())
        aspect = math.exp(log_low + (log_high - log_low) * uniform())
        columns = round(math.sqrt(area * aspect))
        rows = round(math.sqrt(area / aspect))
        if 0 < columns <= width and 0 < rows <= height:
            top = int(uniform() * (height - rows + 1))
            left = int(uniform() * (width - columns + 1))
            return Box(top, left, rows, columns)
    rows, columns = height, width
    if width / height < ratio[0]:
        rows = min(height, max(1, round(width / ratio[0])))
    elif width / height > ratio[1]:
        columns = min(width, max(1, round(height * ratio[1])))
    return Box((height - rows) // 2, (width - columns) // 2, rows, columns)


def shorter_side_to(length: int, height: int, width: int) -> tuple[int, int]:
    """Return ``(height, width)`` after torchvision's ``Resize(length)``."""
    if width <= height:
        return int(length * height / width), length
    return length, int(length * width / height)


Resample: TypeAlias = Literal["auto", "exact"]
"""How pictures are resized. ``auto``: fast for random crops (see :func:`plan_resample`), exact for
all others. ``exact``: decoded fully, with torchvision's antialiased bilinear resize."""

Filter: TypeAlias = Literal["linear", "antialias"]

LINEAR_BELOW = 1.5
"""Downscale factor below which two taps per axis are enough. Against the antialiased resize,
photographs then have 45 dB (median; the sharpest crops 34), and a sample costs a quarter less."""


class ResamplePlan(NamedTuple):
    """The scale at which a picture is decoded, and the filter that resizes the rest."""

    scale: Scale
    filter: Filter


def plan_resample(placement: Placement, resample: Resample, *, scalable: bool) -> ResamplePlan:
    """Choose the scale of decoding and the filter for one sample.

    ``auto`` uses ``linear`` while the box shrinks by less than 1.5 on both axes. Beyond, it decodes
    at the largest divisor, up to 8, that leaves a factor of at least 1 on both axes, and resizes
    the rest with the antialiased filter. OpenCV's ``INTER_AREA`` is no alternative: at
    fractional factors it takes longer than torch's antialiased uint8 kernel (0.9 against 0.4 ms
    for 400 to 224 pixels) and is further from torchvision (42 dB).
    ``scalable``: whether a scaled decode of this file is cheaper than a full one.
    """
    if resample != "auto":
        return ResamplePlan(1, "antialias")
    box = placement.box
    downscales = box.height / placement.height, box.width / placement.width
    if max(downscales) < LINEAR_BELOW:
        return ResamplePlan(1, "linear")
    scales: tuple[Scale, ...] = (8, 4, 2)
    fitting = (scale for scale in scales if scalable and min(downscales) >= scale)
    return ResamplePlan(next(fitting, 1), "antialias")


def settle_resample(resample: Resample, crop: Crop) -> Resample:
    """Return what ``resample`` means for this crop: ``auto`` is ``exact`` unless crops are random.

    A model that is evaluated on pixels resized in another way loses real points of accuracy.
    """
    check_among("resample", resample, get_args(Resample))
    return "exact" if resample == "auto" and crop != "random_resized" else resample


def render(
    image: Picture,
    placement: Placement,
    plan: ResamplePlan,
    out: Pixels,
    *,
    whole: bool = True,
) -> None:
    """Decode, cut, resize and mirror one picture into ``out``, C-contiguous ``[size, size, 3]``.

    With ``whole=False`` no more is decoded than the box needs, so damage outside may stay unseen.

    Raises:
        DatasetError: If the file is damaged.
    """
    pixels = image.part(scaled_box(placement.box, plan.scale), plan.scale, whole=whole)
    _, rows, columns, top, left, flip = placement
    if out.shape[:2] == (rows, columns) and not flip:
        resize(pixels, rows, columns, plan.filter, out)
        return
    resized = resize(pixels, rows, columns, plan.filter)
    sample = resized[top : top + out.shape[0], left : left + out.shape[1]]
    if flip:
        import cv2

        cv2.flip(sample, 1, dst=out)  # 6 us; numpy takes 210 us to copy backwards
    else:
        np.copyto(out, sample)


def scaled_box(box: Box, scale: int) -> Box:
    """Return a box in pixels of the picture decoded at 1/scale, its edges rounded to the nearest.

    The edges move by at most scale/2 full-size pixels, that is half a decoded one.
    """
    if scale == 1:
        return box
    top, left = round(box.top / scale), round(box.left / scale)
    bottom = round((box.top + box.height) / scale)
    right = round((box.left + box.width) / scale)
    return Box(top, left, max(1, bottom - top), max(1, right - left))


def resize(
    pixels: Pixels, height: int, width: int, how: Filter, out: Pixels | None = None
) -> Pixels:
    """Return ``[height, width, 3]`` pixels, in ``out`` if it is given."""
    if how == "antialias":
        import torch
        from torchvision.transforms.v2 import functional

        # Channels last in memory: torch has a uint8 kernel for exactly this, and no float copy is
        # made. It would make planes of a view of a larger picture, and interleaving planes takes
        # as long as the resize; copying the crop takes a twentieth of that.
        # Writable, because torch warns of read-only arrays.
        tensor = torch.from_numpy(np.require(pixels, requirements=("C", "W"))).permute(2, 0, 1)
        resized = functional.resize(tensor, [height, width], antialias=True)
        smooth: Pixels = resized.permute(1, 2, 0).numpy()
        if out is None:
            return smooth
        np.copyto(out, smooth)
        return out
    import cv2

    linear: Pixels = cv2.resize(pixels, (width, height), dst=out, interpolation=cv2.INTER_LINEAR)
    return linear


def shrunk(image: EncodedImage, shorter_side: int | None) -> Pixels:
    """Return a whole picture, its shorter side shrunk to ``shorter_side`` pixels; None: as it is.

    It is decoded at the largest divisor that leaves a factor of at least 1, as in
    :func:`plan_resample`, and the rest is resized with torchvision's antialiased filter.

    Raises:
        DatasetError: If the file is damaged.
    """
    if shorter_side is None or min(image.height, image.width) <= shorter_side:
        return np.ascontiguousarray(image.decode())
    height, width = shorter_side_to(shorter_side, image.height, image.width)
    whole = Placement(Box(0, 0, image.height, image.width), height, width, 0, 0, flip=False)
    plan = plan_resample(whole, "auto", scalable=image.scalable)._replace(filter="antialias")
    out: Pixels = np.empty((height, width, 3), np.uint8)
    render(image, whole, plan, out)
    return out


_IMAGENET: Final = ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
"""ImageNet's means and standard deviations of red, green and blue, for pixels in [0, 1]."""


def normalising_tables(
    normalize: Literal[True] | tuple[Sequence[float], Sequence[float]],
) -> NDArray[np.float32]:
    """Return the normalised value of each of 256 levels in each channel, ``[3, 256]`` float32."""
    try:
        mean, std = _IMAGENET if normalize is True else normalize
        means, stds = (np.array(one, np.float64).reshape(3, 1) for one in (mean, std))
    except (TypeError, ValueError):
        fine = False
    else:
        fine = bool((abs(means) <= 1).all() and np.isfinite(stds).all() and (stds > 0).all())
    if not fine:
        raise OptionsError(
            f"normalize={normalize!r}: it is True, False or (mean, std) with three numbers each, "
            "of pixels in [0, 1] and with deviations above 0."
        )
    tables: NDArray[np.float32] = ((np.arange(256) / 255 - means) / stds).astype(np.float32)
    return tables
