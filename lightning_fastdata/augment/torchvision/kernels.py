"""Operations of torchvision with parameters of each sample's own, carried out on whole batches.

Each computes what the kernel of ``torchvision.transforms.v2.functional`` computes for one image: in
the same order, with the same roundings. Batches are ``[n, C, H, W]``, of masks also ``[n, H, W]``.
What is computed of a sample's parameters alone comes with them, so that a device is given as few
operators as these roundings need; none of them waits for the host.
"""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, Any, Final

import torch
from torch.nn.functional import conv2d, grid_sample, pad
from torchvision.transforms.v2 import functional

from lightning_fastdata.augment.torchvision.operations import as_type, plain
from lightning_fastdata.device.backend import current_stream, has_streams

if TYPE_CHECKING:
    from torch import Tensor

    from lightning_fastdata.augment.ops.operation import Arrays, Values

_RGB: Final = 3


class _Unchecked(torch.Tensor):
    """Numbers for a kernel that checks the range of one number; they have passed that check."""

    def __le__(self, other: object) -> Any:
        return True

    def __ge__(self, other: object) -> Any:
        return True


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
    """Turn the colours."""
    turns = arrays["factor"].view(-1, 1, 1).as_subclass(_Unchecked)
    return plain(functional.adjust_hue(images, turns))


def sharpness(images: Tensor, static: Values, arrays: Arrays) -> Tensor:  # noqa: ARG001
    """Blend with the smoothed image, except for the outermost pixels."""
    channels, height, width = images.shape[-3:]
    if height <= 2 or width <= 2:
        return images
    sharp = images.to(torch.float32, copy=True)
    kernel = _smoothing(channels, images.device, _stream(images.device))
    smooth = conv2d(sharp, kernel, groups=channels)
    smooth = smooth if images.is_floating_point() else smooth.round_()
    inner = sharp[..., 1:-1, 1:-1]
    smooth.sub_(inner)
    if images.device.type == "cpu":
        inner.copy_(multiply_add(inner, _each(arrays["share"]), smooth))
    else:
        inner.addcmul_(smooth, _each(arrays["share"]))
    return _limited(sharp, images)


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
    kernels = arrays["kernel"].flatten(0, 1).unsqueeze(1)
    down, across = (size // 2 for size in kernels.shape[-2:])
    padded = pad(images.to(kernels.dtype), [across, across, down, down], mode="reflect")
    planes = padded.view(1, len(kernels), *padded.shape[-2:])
    out = conv2d(planes, kernels, groups=len(kernels)).view(images.shape)
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
    base = _base(batch, (1.0 - height) * 0.5, (1.0 - width) * 0.5)
    return _read(batch, base.bmm(arrays["matrix"]), static, arrays)


def perspective(batch: Tensor, static: Values, arrays: Arrays) -> Tensor:
    """Read each pixel at the place that two matrices ``[3, 2]`` say: a point, and its divisors."""
    base = _base(batch, 0.5, 0.5)
    grid = base.bmm(arrays["above"]).div_(base.bmm(arrays["below"])).sub_(1.0)
    return _read(batch, grid, static, arrays)


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


def multiply_add(values: Tensor, shares: Tensor, others: Tensor) -> Tensor:
    """Return ``values + shares * others``, rounded once, as ``Tensor.add(alpha=)`` does it."""
    if values.device.type != "cpu":
        return torch.addcmul(values, others, shares)
    return (values.double() + shares.double() * others.double()).float()


@lru_cache(maxsize=8)
def _smoothing(channels: int, device: torch.device, stream: object) -> Tensor:  # noqa: ARG001
    """Return the kernel that smooths, ``[C, 1, 3, 3]``."""
    kernel = torch.full((channels, 1, 3, 3), 1.0 / 13.0, device=device)
    kernel[..., 1, 1].fill_(5.0 / 13.0)
    return kernel


@lru_cache(maxsize=8)
def _base_grid(
    height: int, width: int, top: float, left: float, device: torch.device,
    stream: object,  # noqa: ARG001
) -> Tensor:  # fmt: skip
    """Return ``[1, H * W, 3]``: column, row and one of each pixel, from ``left`` and ``top`` on."""
    down = torch.linspace(top, top + height - 1.0, height, device=device)
    across = torch.linspace(left, left + width - 1.0, width, device=device)
    rows, columns = torch.meshgrid(down, across, indexing="ij")
    return torch.stack([columns, rows, torch.ones_like(rows)], -1).view(1, -1, 3)


def _base(batch: Tensor, top: float, left: float) -> Tensor:
    """Return the base grid of each sample of a batch, ``[n, H * W, 3]``."""
    base = _base_grid(*batch.shape[-2:], top, left, batch.device, _stream(batch.device))
    return base.expand(len(batch), -1, -1)


def _stream(device: torch.device) -> object:
    """Return where a device computes now: what is kept is in the order of its stream."""
    return current_stream(device) if has_streams(device) else None


def _read(batch: Tensor, grid: Tensor, static: Values, arrays: Arrays) -> Tensor:
    """Return the pixels of a batch at the places of a grid ``[n, H * W, 2]``."""
    planes, mode = batch if batch.ndim == 4 else batch.unsqueeze(1), static["mode"]
    around = arrays.get("fill")
    if around is not None:  # what is read of ones lies inside
        planes = pad(planes, [0, 0, 0, 0, 0, 1], value=1.0)
    places = grid.view(-1, *batch.shape[-2:], 2)
    values = planes.to(grid.dtype)
    values = grid_sample(values, places, mode=mode, padding_mode="zeros", align_corners=False)
    if around is not None:
        values, inside = values[:, :-1], values[:, -1:]
        around = around[:, :, None, None]
        if mode == "nearest":
            values = torch.where(inside < 0.5, around, values)
        elif static["black"]:
            values = values * inside
        else:
            values = (values - around).mul_(inside).add_(around)
    if not batch.is_floating_point() and mode != "nearest":
        values = values.round_()
    return values.to(batch.dtype).view(batch.shape)
