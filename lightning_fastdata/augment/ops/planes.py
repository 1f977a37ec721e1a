"""Planes ``[n, C, H, W]``, read and summed up with the roundings of torch's operators.

``torch.compile`` joins products with sums, and makes a ``grid_sample`` of its own, which would now
and then take the next pixel. Compiled, the steps here are written such that it cannot.
"""

from __future__ import annotations

from itertools import product
from typing import TYPE_CHECKING

import torch
from torch.compiler import is_compiling
from torch.nn.functional import conv2d, grid_sample

if TYPE_CHECKING:
    from torch import Tensor


def multiply_add(values: Tensor, shares: Tensor, others: Tensor) -> Tensor:
    """Return ``values + shares * others``, rounded once, as ``Tensor.add(alpha=)`` does it."""
    if values.device.type != "cpu" or not shares.is_floating_point():
        return torch.addcmul(values, others, shares)
    return (values.double() + shares.double() * others.double()).float()


def places_of(batch: Tensor, matrix: Tensor, top: int, left: int) -> Tensor:
    """Return places ``[n, H, W, 2]``: the column, the row and one of each pixel, times a matrix.

    Rows begin at ``top``, columns at ``left``, and both count halves of pixels.
    """
    height, width = batch.shape[-2:]
    # Products of doubles are exact, and rounded where they become floats.
    kind = torch.float64 if is_compiling() else torch.float32
    down = torch.arange(top, top + 2 * height - 1, 2, dtype=kind, device=batch.device)
    across = torch.arange(left, left + 2 * width - 1, 2, dtype=kind, device=batch.device)
    if batch.is_cpu and not is_compiling():  # as torchvision, to the last bit
        rows, columns = torch.meshgrid(down, across, indexing="ij")
        base = torch.stack([columns, rows, torch.ones_like(rows)], -1).view(1, -1, 3)
        return base.expand(len(batch), -1, -1).bmm(matrix).view(-1, height, width, 2)
    # On a device a product of matrices would have the precision that a setting of the user's says.
    by_column, by_row, moved = (one[:, None, None] for one in matrix.unbind(1))
    columns, rows = across[:, None] * by_column, down[:, None, None] * by_row
    return (columns.float() + rows.float()).add_(moved)


def sampled(planes: Tensor, places: Tensor, mode: str) -> Tensor:
    """Return planes of floats at places ``[n, H, W, 2]`` from -1 to 1, zeros outside.

    ``mode``: ``"nearest"`` or ``"bilinear"``, as of ``grid_sample``.
    """
    if not is_compiling():
        return grid_sample(planes, places, mode=mode, padding_mode="zeros", align_corners=False)
    (count, height, width), less = planes.shape[1:], planes.new_full((), -1.0)
    each = places[:, None].expand(-1, count, -1, -1, -1)  # all channels alike: in one kernel
    column, row = (
        multiply_add(less, less.new_full((), size), at + 1.0) * 0.5
        for size, at in zip((width, height), each.unbind(-1), strict=True)
    )

    def at(y: Tensor, x: Tensor) -> Tensor:
        inside = (y >= 0) & (y < height) & (x >= 0) & (x < width)
        y, x = (torch.where(inside, one, 0.0).long() for one in (y, x))  # what is no number, too
        found = planes.flatten(2).gather(-1, (y * width + x).flatten(2))
        return torch.where(inside, found.view(inside.shape), 0.0)

    if mode == "nearest":
        return at(row.round(), column.round())
    top, left = row.floor(), column.floor()
    below, right = row - top, column - left
    upper = (1.0 - right) * at(top, left) + right * at(top, left + 1)
    lower = (1.0 - right) * at(top + 1, left) + right * at(top + 1, left + 1)
    return (1.0 - below) * upper + below * lower


def correlated(planes: Tensor, kernels: Tensor) -> Tensor:
    """Return planes of floats, each correlated with its kernel, without their borders."""
    if is_compiling():  # a convolution would be compiled for each number of samples
        (rows, columns), (height, width) = kernels.shape[-2:], planes.shape[-2:]
        height, width = height - rows + 1, width - columns + 1
        total = torch.zeros_like(planes[..., :height, :width])
        for i, j in product(range(rows), range(columns)):
            values = planes[..., i : i + height, j : j + width]
            total = total + values * kernels[..., i : i + 1, j : j + 1]
        return total
    weights = kernels.flatten(0, 1).unsqueeze(1)
    flat = planes.reshape(1, -1, *planes.shape[-2:])
    made = conv2d(flat, weights, groups=len(weights))
    return made.view(*planes.shape[:2], *made.shape[-2:])
