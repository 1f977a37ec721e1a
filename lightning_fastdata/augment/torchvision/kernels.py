"""Operations of torchvision with parameters of each sample's own, carried out on whole batches.

Each computes what the kernel of ``torchvision.transforms.v2.functional`` computes for one image: in
the same order, with the same roundings. Batches are ``[n, C, H, W]``, of masks also ``[n, H, W]``.
"""

from __future__ import annotations

from math import sqrt
from typing import TYPE_CHECKING, Any, Final

import torch
from torch.nn.functional import conv2d, grid_sample, pad
from torchvision.transforms.v2 import functional

from lightning_fastdata.augment.torchvision.operations import as_type, plain

if TYPE_CHECKING:
    from collections.abc import Sequence

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
    return _limited(_floats(images) * _each(arrays["factor"].float()), images)


def contrast(images: Tensor, static: Values, arrays: Arrays) -> Tensor:  # noqa: ARG001
    """Blend with the mean of the gray image."""
    mean = _gray(images).mean((-3, -2, -1), keepdim=True)
    return _blend(images, mean, arrays["factor"])


def saturation(images: Tensor, static: Values, arrays: Arrays) -> Tensor:  # noqa: ARG001
    """Blend with the gray image."""
    if images.shape[-3] != _RGB:
        return images
    return _blend(images, _gray(images), arrays["factor"])


def hue(images: Tensor, static: Values, arrays: Arrays) -> Tensor:  # noqa: ARG001
    """Turn the colours."""
    turns = arrays["factor"].float().view(-1, 1, 1).as_subclass(_Unchecked)
    return plain(functional.adjust_hue(images, turns))


def sharpness(images: Tensor, static: Values, arrays: Arrays) -> Tensor:  # noqa: ARG001
    """Blend with the smoothed image, except for the outermost pixels."""
    channels, height, width = images.shape[-3:]
    if height <= 2 or width <= 2:
        return images
    sharp = _floats(images).clone()
    a, b = 1.0 / 13.0, 5.0 / 13.0
    kernel = torch.tensor([[a, a, a], [a, b, a], [a, a, a]], device=images.device)
    smooth = conv2d(sharp, kernel.expand(channels, 1, 3, 3), groups=channels)
    smooth = smooth if images.is_floating_point() else smooth.round_()
    inner = sharp[..., 1:-1, 1:-1]
    inner.copy_(_multiply_add(inner, _share(arrays["factor"]), smooth - inner))
    return _limited(sharp, images)


def posterize(images: Tensor, static: Values, arrays: Arrays) -> Tensor:  # noqa: ARG001
    """Keep some bits of each value."""
    bits = _each(arrays["bits"].int())
    if images.is_floating_point():
        levels = torch.ones_like(bits).bitwise_left_shift(bits).to(images.dtype)
        return (images * levels).floor_().clamp_(min=0).minimum(levels - 1) * (1.0 / levels)
    mask = torch.full_like(bits, 255).bitwise_left_shift(8 - bits).bitwise_and(255)
    return images & mask.to(torch.uint8)


def solarize(images: Tensor, static: Values, arrays: Arrays) -> Tensor:  # noqa: ARG001
    """Invert what is at a threshold or above."""
    above = images >= _each(arrays["threshold"].float())
    return torch.where(above, functional.invert(images), images)


def permute(images: Tensor, static: Values, arrays: Arrays) -> Tensor:  # noqa: ARG001
    """Put the channels into another order."""
    rows = torch.arange(len(images), device=images.device)[:, None]
    return images[rows, arrays["order"]]


def blur(images: Tensor, static: Values, arrays: Arrays) -> Tensor:
    """Blur with a Gaussian of a sigma for columns and one for rows."""
    count, channels, height, width = images.shape
    kernels = [_gaussian(size, arrays["sigma"][:, at]) for at, size in enumerate(static["size"])]
    kernel = kernels[1].unsqueeze(-1) * kernels[0].unsqueeze(-2)
    across, down = (size // 2 for size in static["size"])
    padded = pad(_floats(images), [across, across, down, down], mode="reflect")
    out = conv2d(
        padded.view(1, count * channels, *padded.shape[-2:]),
        kernel.repeat_interleave(channels, 0).unsqueeze(1),
        groups=count * channels,
    ).view(count, channels, height, width)
    return out if images.is_floating_point() else out.round_().to(images.dtype)


def erase(images: Tensor, static: Values, arrays: Arrays) -> Tensor:  # noqa: ARG001
    """Write a colour to a rectangle."""
    height, width = images.shape[-2:]
    top, left, rows, columns = arrays["box"].unbind(1)
    inside = _between(height, top, rows)[:, None, :, None]
    inside = inside & _between(width, left, columns)[:, None, None, :]
    return torch.where(inside, arrays["value"].to(images.dtype)[:, :, None, None], images)


def crop(batch: Tensor, static: Values, arrays: Arrays) -> Tensor:
    """Pad, all samples alike, and cut out a window of one size."""
    if static["padding"] is not None:
        how = {"fill": thawed_fill(static["fill"]), "padding_mode": static["mode"]}
        typed = as_type(batch, static["type"])
        batch = plain(functional.pad(typed, list(static["padding"]), **how))
    top, left = arrays["corner"].unbind(1)
    rows, columns = (torch.arange(length, device=batch.device) for length in static["size"])
    at = (top[:, None] + rows)[:, :, None] * batch.shape[-1] + (left[:, None] + columns)[:, None]
    planes = batch.flatten(-2).reshape(len(batch), -1, batch.shape[-2] * batch.shape[-1])
    cut = planes.gather(2, at.flatten(1)[:, None].expand(-1, planes.shape[1], -1))
    return cut.view(*batch.shape[:-2], *static["size"])


def affine(batch: Tensor, static: Values, arrays: Arrays) -> Tensor:
    """Read each pixel at the place that a matrix ``[2, 3]`` says, from the middle of the image."""
    height, width = batch.shape[-2:]
    base = _base_grid(
        torch.linspace((1.0 - width) * 0.5, (width - 1.0) * 0.5, width, device=batch.device),
        torch.linspace((1.0 - height) * 0.5, (height - 1.0) * 0.5, height, device=batch.device),
    )
    half = torch.tensor([0.5 * width, 0.5 * height], device=batch.device)
    matrix = arrays["matrix"].transpose(1, 2) / half
    grid = base.expand(len(batch), -1, -1).bmm(matrix)
    return _read(batch, grid.view(-1, height, width, 2), static)


def perspective(batch: Tensor, static: Values, arrays: Arrays) -> Tensor:
    """Read each pixel at the place that eight coefficients say."""
    height, width = batch.shape[-2:]
    base = _base_grid(
        torch.linspace(0.5, width - 0.5, width, device=batch.device),
        torch.linspace(0.5, height - 0.5, height, device=batch.device),
    ).expand(len(batch), -1, -1)
    numbers = arrays["coefficients"].float()
    half = torch.tensor([0.5 * width, 0.5 * height], device=batch.device)
    above = base.bmm(numbers[:, :6].view(-1, 2, 3).transpose(1, 2) / half)
    below = torch.cat([numbers[:, 6:], torch.ones_like(numbers[:, :1])], 1)
    grid = above.div_(base.bmm(below[:, :, None].expand(-1, -1, 2).contiguous())).sub_(1.0)
    return _read(batch, grid.view(-1, height, width, 2), static)


def thawed_fill(fill: Any) -> Any:
    """Return a fill as torchvision takes it: a number, a list of numbers, or None."""
    return list(fill) if isinstance(fill, tuple) else fill


# -- parts of these --------------------------------------------------------------------------------


def _each(numbers: Tensor) -> Tensor:
    """Return a number for each sample, as it is spread over an image."""
    return numbers.view(-1, 1, 1, 1)


def _floats(images: Tensor) -> Tensor:
    return images if images.is_floating_point() else images.float()


def _limited(values: Tensor, like: Tensor) -> Tensor:
    """Return values in the range of the images that they were made of, and of their dtype."""
    bound = 1.0 if like.is_floating_point() else 255.0
    return values.clamp_(0, bound).to(like.dtype)


def _gray(images: Tensor) -> Tensor:
    gray = functional.rgb_to_grayscale(images) if images.shape[-3] == _RGB else images
    return _floats(gray)


def _share(factor: Tensor) -> Tensor:
    return (1.0 - factor).float()


def _blend(images: Tensor, other: Tensor, factor: Tensor) -> Tensor:
    own = _floats(images) * _each(factor.float())
    return _limited(_multiply_add(own, _share(factor), other), images)


def _multiply_add(values: Tensor, shares: Tensor, others: Tensor) -> Tensor:
    """Return ``values + shares * others``, rounded once, as ``Tensor.add(alpha=)`` does it."""
    shares = _each(shares)
    if values.device.type != "cpu":
        return torch.addcmul(values, others, shares)
    return (values.double() + shares.double() * others.double()).float()


def _gaussian(size: int, sigma: Tensor) -> Tensor:
    limit = (size - 1) / (2.0 * sqrt(2.0))
    steps = torch.linspace(-limit, limit, size, device=sigma.device)
    return torch.softmax((steps / sigma.float()[:, None]).pow(2).neg(), 1)


def _between(length: int, first: Tensor, count: Tensor) -> Tensor:
    """Return for each sample which places of an axis lie in its span, ``[n, length]``."""
    places = torch.arange(length, device=first.device)
    return (places >= first[:, None]) & (places < (first + count)[:, None])


def _base_grid(across: Tensor, down: Tensor) -> Tensor:
    """Return ``[1, H * W, 3]``: column, row and one of each pixel."""
    rows, columns = torch.meshgrid(down, across, indexing="ij")
    return torch.stack([columns, rows, torch.ones_like(rows)], -1).view(1, -1, 3)


def _read(batch: Tensor, grid: Tensor, static: Values) -> Tensor:
    """Return the pixels of a batch at the places of a grid ``[n, H, W, 2]``."""
    planes = batch if batch.ndim == 4 else batch.unsqueeze(1)
    fill: Sequence[float] | float | None = thawed_fill(static["fill"])
    mode, floats = static["mode"], planes.dtype == grid.dtype
    values = planes.to(grid.dtype)
    if fill is not None:
        values = torch.cat([values, torch.ones_like(values[:, :1])], 1)
    values = grid_sample(values, grid, mode=mode, padding_mode="zeros", align_corners=False)
    if fill is not None:
        values, inside = values[:, :-1], values[:, -1:]
        colour = fill if isinstance(fill, list) else [float(fill)]  # type: ignore[arg-type]
        around = torch.tensor(colour, dtype=grid.dtype, device=grid.device).view(1, -1, 1, 1)
        if mode == "nearest":
            values = torch.where(inside < 0.5, around, values)
        else:
            values = (values - around).mul_(inside).add_(around)
    return (values if floats else values.round_()).to(batch.dtype).view(batch.shape)
