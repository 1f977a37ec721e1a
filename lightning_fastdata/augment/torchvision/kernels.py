"""Operations of torchvision with parameters of each sample's own, carried out on whole batches.

Each computes what the kernel of ``torchvision.transforms.v2.functional`` computes for one image: in
the same order, with the same roundings. Batches are ``[n, C, H, W]``, of masks also ``[n, H, W]``.
What is computed of a sample's parameters alone comes with them, so that a device is given as few
operators as these roundings need; none of them waits for the host.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import torch
from torch.compiler import is_compiling
from torch.nn.functional import pad
from torchvision.transforms.v2 import functional

from lightning_fastdata.augment.ops.planes import correlated, multiply_add, places_of, sampled
from lightning_fastdata.augment.torchvision.operations import as_type, plain

if TYPE_CHECKING:
    from torch import Tensor

    from lightning_fastdata.augment.ops.operation import Arrays, Values

_RGB: Final = 3


def brightness(images: Tensor, static: Values, arrays: Arrays) -> Tensor:  # noqa: ARG001
    """Multiply by a factor."""
    return _limited(images * _each(arrays["factor"]), images)


def contrast(images: Tensor, static: Values, arrays: Arrays) -> Tensor:  # noqa: ARG001
    """Blend with the mean of the gray image."""
    mean = _gray(images).mean((-3, -2, -1), keepdim=True, dtype=torch.float32)
    return _blend(images, mean, arrays)


def saturation(images: Tensor, static: Values, arrays: Arrays) -> Tensor:  # noqa: ARG001
    """Blend with the gray image."""
    return _blend(images, _gray(images), arrays) if images.shape[-3] == _RGB else images


def hue(images: Tensor, static: Values, arrays: Arrays) -> Tensor:  # noqa: ARG001
    """Turn the colours, in hue, saturation and value."""
    if images.shape[-3] != _RGB:
        return images
    colours = functional.to_dtype(images, torch.float32, scale=True)
    red, green, _ = colours.split(1, -3)
    value, least = colours.amax(-3, keepdim=True), colours.amin(-3, keepdim=True)
    span, gray = value - least, value == least
    saturated = span / value.masked_fill(gray, 1.0)
    by_red, by_green, by_blue = ((value - colours) / span.masked_fill(gray, 1.0)).split(1, -3)
    tint = torch.where(value == green, by_red + 2.0 - by_blue, by_green + 4.0 - by_red)
    tint = torch.where(value == red, by_blue - by_green, tint)
    tint = tint.mul_(1.0 / 6.0).add_(1.0).fmod_(1.0)
    tint = tint.add_(_each(arrays["factor"])).remainder_(1.0).mul_(6.0)
    sixth = tint.floor()
    share, pale = saturated * tint.sub_(sixth), 1.0 - saturated
    falling = (1.0 - share).mul_(value).clamp_(0.0, 1.0)
    rising = (share + pale).mul_(value).clamp_(0.0, 1.0)
    lowest = pale.mul_(value).clamp_(0.0, 1.0)
    # Each colour goes the way of red, a third of the circle later.
    third = torch.arange(0, 6, 2, device=images.device).view(-1, 1, 1)
    way = (sixth - third).remainder_(6.0)
    made = torch.where((way == 2) | (way == 3), lowest, value)
    made = torch.where(way == 1, falling, torch.where(way == 4, rising, made))
    turned: Tensor = functional.to_dtype(made, images.dtype, scale=True)
    return turned


def sharpness(images: Tensor, static: Values, arrays: Arrays) -> Tensor:  # noqa: ARG001
    """Blend with the image that a kernel smooths, except for the outermost pixels."""
    if min(images.shape[-2:]) <= 2:
        return images
    sharp = images.to(arrays["kernel"].dtype)
    smooth = correlated(sharp, arrays["kernel"])
    smooth = smooth if images.is_floating_point() else smooth.round_()
    further = pad(smooth - sharp[..., 1:-1, 1:-1], [1, 1, 1, 1])
    return _limited(multiply_add(sharp, _each(arrays["share"]), further), images)


def posterize(images: Tensor, static: Values, arrays: Arrays) -> Tensor:  # noqa: ARG001
    """Keep some bits of each value."""
    if not images.is_floating_point():
        return images & _each(arrays["mask"])
    # Of a power of two everything here is exact.
    step, lowest, highest = map(_each, arrays["levels"].unbind(1))
    return images.clamp(lowest, highest).floor_divide_(step).mul_(step)


def solarize(images: Tensor, static: Values, arrays: Arrays) -> Tensor:  # noqa: ARG001
    """Invert what is at a threshold or above."""
    above = images >= _each(arrays["threshold"])
    return torch.where(above, functional.invert(images), images)


def permute(images: Tensor, static: Values, arrays: Arrays) -> Tensor:  # noqa: ARG001
    """Put the channels into another order."""
    rows = torch.arange(len(images), device=images.device)[:, None]
    return images[rows, arrays["order"]]


def blur(images: Tensor, static: Values, arrays: Arrays) -> Tensor:  # noqa: ARG001
    """Correlate each channel with a kernel ``[C, rows, columns]``, the borders mirrored."""
    # Compiled, along rows and then along columns, which makes fewer sums.
    kernel, names = arrays["kernel"], ("across", "down") if is_compiling() else ("kernel",)
    down, across = (size // 2 for size in kernel.shape[-2:])
    out = pad(images.to(kernel.dtype), [across, across, down, down], mode="reflect")
    for name in names:
        out = correlated(out, arrays[name])
    return out if images.is_floating_point() else out.round_().to(images.dtype)


def erase(images: Tensor, static: Values, arrays: Arrays) -> Tensor:  # noqa: ARG001
    """Write a colour to a rectangle: what is inside by its row and by its column."""
    inside = arrays["rows"][:, None, :, None] & arrays["columns"][:, None, None, :]
    return torch.where(inside, arrays["value"][:, :, None, None], images)


def crop(batch: Tensor, static: Values, arrays: Arrays) -> Tensor:
    """Pad, all samples alike, and pick rows and columns out."""
    if static["padding"] is not None:
        fill = static["fill"]
        fill = list(fill) if isinstance(fill, tuple) else fill
        typed, padding = as_type(batch, static["type"]), list(static["padding"])
        batch = plain(functional.pad(typed, padding, fill, static["mode"]))
    planes = batch.reshape(-1, *batch.shape[-2:])
    each = torch.arange(len(planes), device=batch.device).view(len(batch), -1, 1, 1)
    made = planes[each, arrays["rows"][:, None, :, None], arrays["columns"][:, None, None, :]]
    return made.view(*batch.shape[:-2], *made.shape[-2:])


def affine(batch: Tensor, static: Values, arrays: Arrays) -> Tensor:
    """Read each pixel at the place that a matrix ``[3, 2]`` says, from the middle of the image."""
    height, width = batch.shape[-2:]
    return _read(batch, places_of(batch, arrays["matrix"], 1 - height, 1 - width), static, arrays)


def perspective(batch: Tensor, static: Values, arrays: Arrays) -> Tensor:
    """Read each pixel at the place that two matrices ``[3, 2]`` say: a point, and its divisors."""
    above, below = (places_of(batch, arrays[name], 1, 1) for name in ("above", "below"))
    if is_compiling():  # which divides floats in its own way
        above, below = above.double(), below.double()
    return _read(batch, above.div_(below).float().sub_(1.0), static, arrays)


def _each(numbers: Tensor) -> Tensor:
    """Return a number for each sample, as it is spread over an image."""
    return numbers.view(-1, 1, 1, 1)


def _limited(values: Tensor, like: Tensor) -> Tensor:
    """Return values in the range of the images that they were made of, and of their dtype."""
    bound = 1.0 if like.is_floating_point() else 255.0
    return values.clamp_(0, bound).to(like.dtype)


def _gray(images: Tensor) -> Tensor:
    """Return the gray image, of bytes the whole levels, as floats if there were colours."""
    if images.shape[-3] != _RGB:
        return images
    red, green, blue = images.unsqueeze(-4).unbind(-3)
    gray: Tensor = red.mul(0.2989).add_(green, alpha=0.587).add_(blue, alpha=0.114)
    return gray if images.is_floating_point() else gray.floor_()


def _blend(images: Tensor, other: Tensor, arrays: Arrays) -> Tensor:
    own = images * _each(arrays["factor"])
    return _limited(multiply_add(own, _each(arrays["share"]), other), images)


def _read(batch: Tensor, places: Tensor, static: Values, arrays: Arrays) -> Tensor:
    """Return the pixels of a batch at places ``[n, H, W, 2]``, from -1 to 1 across the image."""
    planes, mode = batch if batch.ndim == 4 else batch.unsqueeze(1), static["mode"]
    values, around = sampled(planes.to(places.dtype), places, mode), arrays.get("fill")
    if around is not None:
        # Compiled, all channels are computed alike: in one kernel.
        count = planes.shape[1] if is_compiling() else 1
        ones = places.new_ones(1).expand(len(planes), count, *planes.shape[-2:])
        inside, around = sampled(ones, places, mode), around[:, :, None, None]
        if mode == "nearest":
            values = torch.where(inside < 0.5, around, values)
        elif static["black"]:
            values = values * inside
        else:
            values = (values - around).mul_(inside).add_(around)
    if not batch.is_floating_point() and mode != "nearest":
        values = values.round_()
    return values.to(batch.dtype).view(batch.shape)
