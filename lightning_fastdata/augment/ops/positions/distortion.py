"""Distortions: every output pixel is read from a position that a smooth field gives.

The worker sends the few numbers that determine the field; the device computes it.
"""

# ruff: noqa: ARG001 - all operations share one signature

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import TypeAlias

import numpy as np
import torch
from torch import Tensor

from lightning_fastdata.augment.ops.operation import (
    Arrays,
    DeviceOp,
    Draw,
    DType,
    Encode,
    Encoded,
    Run,
    Shape,
    Transform,
    Values,
    always,
    as_channels_last,
    never,
)
from lightning_fastdata.augment.ops.positions import warp
from lightning_fastdata.augment.ops.positions.index import fill_like
from lightning_fastdata.augment.ops.positions.resize import CUBIC
from lightning_fastdata.augment.ops.splitmix import normal, peek_seed, skip_doubles, uniform

Size: TypeAlias = tuple[int, int]
Field: TypeAlias = tuple[Tensor, Tensor]
"""The rows and columns that pixels are read from, float32 ``[n, H, W]``."""
MakeField: TypeAlias = Callable[[Values, Arrays, Size], Field]


def _encoded(
    transform: Transform, shape: Shape, arrays: Mapping[str, np.ndarray], own: warp.Settings = ()
) -> Encoded | None:
    how = warp.encode_sampling(transform, shape, extends=False)
    return None if how is None else Encoded((*how.static, *own), {**arrays, **how.arrays})


def _drawn(key: str, make: Callable[[Transform, Size], np.ndarray]) -> Draw:
    """Return a ``draw`` that draws nothing for images without a device form."""

    def draw(transform: Transform, params: Values, data: Values) -> Values | None:
        if warp.encode_sampling(transform, data["image"].shape, extends=False) is None:
            return None
        height, width = params["shape"][:2]
        return {key: make(transform, (int(height), int(width)))}

    return draw


def _encode_grid(
    transform: Transform, params: Values, shape: Shape, dtype: DType
) -> Encoded | None:
    # The field is a meshgrid: one column for each x, one row for each y.
    lines = {"rows": params["map_y"][:, 0], "columns": params["map_x"][0]}
    lines = {name: at.astype(np.float32) for name, at in lines.items()}
    return _encoded(transform, shape, lines)


def _grid_field(static: Values, arrays: Arrays, size: Size) -> Field:
    rows, columns = arrays["rows"][:, :, None], arrays["columns"][:, None, :]
    return rows.expand(-1, *size), columns.expand(-1, *size)


def _draw_lens(transform: Transform, size: Size) -> np.ndarray:
    return np.array([transform.py_random.uniform(*transform.distort_limit)], np.float64)


def _encode_lens(
    transform: Transform, params: Values, shape: Shape, dtype: DType
) -> Encoded | None:
    if "lens" not in params:
        return None
    return _encoded(transform, shape, {"lens": params["lens"]}, (("mode", transform.mode),))


def _lens_field(static: Values, arrays: Arrays, size: Size) -> Field:
    height, width = size
    strength = arrays["lens"][:, :, None]
    y = torch.arange(height, device=strength.device)[:, None]
    x = torch.arange(width, device=strength.device)[None, :]
    if static["mode"] == "camera":
        # OpenCV puts the image's centre between the pixels, in front of a camera whose principal
        # point is half a pixel further.
        strength = strength.float().double()
        rows, columns = _bent(y - (height - 1) / 2, x - (width - 1) / 2, strength, strength, size)
        return rows.float(), columns.float()
    y, x = y.float() - height / 2, x.float() - width / 2
    farthest = math.hypot(height / 2, width / 2)
    factor = 1 + strength.float() * ((y * y + x * x) / farthest**2)
    return y * factor + height / 2, x * factor + width / 2


def _bent(y: Tensor, x: Tensor, first: Tensor, second: Tensor, size: Size) -> Field:
    """Return what OpenCV's ``initUndistortRectifyMap`` makes of positions, float64.

    A point at distance r from the middle, as a part of the size of the image, moves to
    ``r (1 + k1 r^2 + k2 r^4)``, with ``first`` k1 and ``second`` k2.
    """
    height, width = size
    # By tensors: CUDA would multiply by the reciprocal of a number.
    y = y.double() / torch.full_like(y, height, dtype=torch.float64)
    x = x.double() / torch.full_like(x, width, dtype=torch.float64)
    square = x * x + y * y
    bend = 1 + (second * square + first) * square
    return y * bend * height + height / 2, x * bend * width + width / 2


def _draw_elastic(transform: Transform, params: Values, data: Values) -> Values | None:
    if warp.encode_sampling(transform, data["image"].shape, extends=False) is None:
        return None
    generator = transform.random_generator
    seed = peek_seed(generator)
    shape = (1 if transform.same_dxdy else 2, *map(int, params["shape"][:2]))
    if transform.noise_distribution == "gaussian":
        # How many words these take depends on the words, so that they have to be drawn. To smooth
        # them and to move the image by them is what takes long.
        generator.standard_normal(shape, dtype=np.float32)
    else:
        skip_doubles(generator, math.prod(shape))
    return {"elastic_seed": seed}


def _encode_elastic(
    transform: Transform, params: Values, shape: Shape, dtype: DType
) -> Encoded | None:
    if "map_x" in params:
        # Boxes or keypoints are moved by this very field.
        return _encoded(transform, shape, {"rows": params["map_y"], "columns": params["map_x"]})
    radius = 8 if transform.approximate else round(transform.sigma * 8 + 1) // 2
    numbers = (("sigma", float(transform.sigma)), ("alpha", float(transform.alpha)))
    noise = (("noise", transform.noise_distribution), ("same", bool(transform.same_dxdy)))
    own = (*noise, ("radius", radius), *numbers)
    return _encoded(transform, shape, {"seed": params["elastic_seed"]}, own)


def smoothing(length: int, sigma: float, radius: int, device: torch.device) -> Tensor:
    """Return the matrix that smooths ``length`` values with a Gaussian; the edge values go on.

    ``sigma`` is in pixels, and the Gaussian is cut after ``radius`` pixels. float64 ``[length,
    length]``: a matrix product of float32 may be one of TF32, if the user allows that.
    """
    offset = torch.arange(-radius, radius + 1, device=device, dtype=torch.float64)
    weights = (offset * offset * (-0.5 / sigma**2)).exp()
    # No cumsum: of floats torch refuses it on CUDA where algorithms have to be deterministic.
    ends = torch.arange(2 * radius + 2, device=device)[:, None]
    below = weights.where(ends > ends[:-1, 0], 0).sum(1) / weights.sum()
    at = torch.arange(length, device=device)
    # An edge pixel has its own weight, and the weights of everything beyond it.
    first = torch.where(at == 0, -radius - length, at) - at[:, None]
    behind = torch.where(at == length - 1, radius + length, at) - at[:, None] + 1
    share = below[(behind + radius).clamp(0, 2 * radius + 1)]
    return share - below[(first + radius).clamp(0, 2 * radius + 1)]


def displacements(static: Values, seed: Tensor, size: tuple[int, int]) -> Tensor:
    """Return the displacements along x and y: ``[n, 2, H, W]``, or ``[n, 1, H, W]`` for both."""
    height, width = size
    fields = 1 if static["same"] else 2
    count = fields * height * width
    if static["noise"] == "gaussian":
        noise = normal(seed, count)
        largest = noise.abs().amax(1, keepdim=True)
        noise = noise / torch.where(largest > 1e-6, largest, 1.0)
    else:
        noise = uniform(seed, count) * 2 - 1
    # Albumentations smooths both fields in one image, one below the other.
    rows = smoothing(fields * height, static["sigma"], static["radius"], seed.device)
    columns = smoothing(width, static["sigma"], static["radius"], seed.device)
    smooth: Tensor = rows @ noise.double().view(-1, fields * height, width) @ columns.mT
    return smooth.float().mul(float(static["alpha"])).view(-1, fields, height, width)


def _elastic_field(static: Values, arrays: Arrays, size: Size) -> Field:
    if "rows" in arrays:
        return arrays["rows"], arrays["columns"]
    moves = displacements(static, arrays["seed"], size)
    y = torch.arange(size[0], device=moves.device, dtype=torch.float32)[:, None]
    x = torch.arange(size[1], device=moves.device, dtype=torch.float32)
    return y + moves[:, -1], x + moves[:, 0]


def _remap(field: MakeField, setting: str, fill_name: str) -> Run:
    def run(batch: Tensor, static: Values, arrays: Arrays) -> Tensor:
        images = as_channels_last(batch)
        where = field(static, arrays, (images.shape[1], images.shape[2]))
        rows, columns = map(warp.clamped, where)
        fill = fill_like(images, arrays, fill_name)
        kind, mode = static[setting], static["border"]
        cells = static["cells"] or (kind != CUBIC and warp.still_on_cells(images))
        out = warp.sample(images, rows, columns, kind, mode, fill, on_cells=cells)
        return out.reshape(batch.shape)

    return run


def _op(
    name: str, encode: Encode, field: MakeField, draw: Draw | None = None, *, random: bool = False
) -> DeviceOp:
    return DeviceOp(
        name,
        encode,
        _remap(field, "interpolation", "fill"),
        _remap(field, "mask_interpolation", "fill_mask"),
        draw=draw,
        draws_pixels=always if random else never,
    )


OPS = (
    _op("GridDistortion", _encode_grid, _grid_field),
    _op("OpticalDistortion", _encode_lens, _lens_field, _drawn("lens", _draw_lens)),
    _op("ElasticTransform", _encode_elastic, _elastic_field, _draw_elastic, random=True),
)
"""With OpenCV 5, at most one level off on uint8: the field is Albumentations' own but for the
rounding of its float32 operations, and exactly its own for GridDistortion. Where such a difference
meets an edge at half a pixel, nearest reads the neighbour. ElasticTransform has the distribution of
Albumentations' fields, and its own field where there are boxes or keypoints."""
