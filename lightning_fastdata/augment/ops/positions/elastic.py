"""ElasticTransform: every output pixel is read from a position that a smooth field gives.

The worker sends a seed and the few settings that determine the field; the device computes it.
"""

# ruff: noqa: ARG001 - all operations share one signature

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from lightning_fastdata.augment.ops.operation import (
    Arrays,
    DeviceOp,
    DType,
    Encoded,
    Run,
    Shape,
    Transform,
    Values,
    as_channels_last,
)
from lightning_fastdata.augment.ops.positions import warp
from lightning_fastdata.augment.ops.positions.index import fill_like
from lightning_fastdata.augment.ops.splitmix import normal, peek_seed


def _draws_there(transform: Transform) -> bool:
    return bool(transform.noise_distribution == "gaussian")


def _draw(transform: Transform, params: Values, data: Values) -> Values | None:
    how = warp.encode_sampling(transform, data["image"].shape, extends=False)
    if how is None or not _draws_there(transform):
        return None
    generator = transform.random_generator
    seed = peek_seed(generator)
    shape = (1 if transform.same_dxdy else 2, *map(int, params["shape"][:2]))
    # How many words these take depends on the words, so that they have to be drawn. To smooth them
    # and to move the image by them is what takes long.
    generator.standard_normal(shape, dtype=np.float32)
    return {"elastic_seed": seed}


def _encode(transform: Transform, params: Values, shape: Shape, dtype: DType) -> Encoded | None:
    how = warp.encode_sampling(transform, shape, extends=False)
    if how is None:
        return None
    if "map_x" in params:
        # Boxes or keypoints are moved by this very field.
        field = {"rows": params["map_y"], "columns": params["map_x"]}
        return Encoded(how.static, {**field, **how.arrays})
    radius = 8 if transform.approximate else round(transform.sigma * 8 + 1) // 2
    numbers = (("sigma", float(transform.sigma)), ("alpha", float(transform.alpha)))
    own = (("same", bool(transform.same_dxdy)), ("radius", radius), *numbers)
    return Encoded((*how.static, *own), {"seed": params["elastic_seed"], **how.arrays})


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
    noise = normal(seed, fields * height * width)
    largest = noise.abs().amax(1, keepdim=True)
    noise = noise / torch.where(largest > 1e-6, largest, 1.0)
    # Albumentations smooths both fields in one image, one below the other.
    rows = smoothing(fields * height, static["sigma"], static["radius"], seed.device)
    columns = smoothing(width, static["sigma"], static["radius"], seed.device)
    smooth: Tensor = rows @ noise.double().view(-1, fields * height, width) @ columns.mT
    return smooth.float().mul(float(static["alpha"])).view(-1, fields, height, width)


def _field(static: Values, arrays: Arrays, size: tuple[int, int]) -> tuple[Tensor, Tensor]:
    """Return the rows and columns that pixels are read from, float32 ``[n, H, W]``."""
    if "rows" in arrays:
        return arrays["rows"], arrays["columns"]
    moves = displacements(static, arrays["seed"], size)
    y = torch.arange(size[0], device=moves.device, dtype=torch.float32)[:, None]
    x = torch.arange(size[1], device=moves.device, dtype=torch.float32)
    return y + moves[:, -1], x + moves[:, 0]


def _remap(setting: str, fill_name: str) -> Run:
    def run(batch: Tensor, static: Values, arrays: Arrays) -> Tensor:
        images = as_channels_last(batch)
        where = _field(static, arrays, (images.shape[1], images.shape[2]))
        rows, columns = map(warp.clamped, where)
        fill = fill_like(images, arrays, fill_name)
        cells = static["cells"] or warp.still_on_cells(images)
        how = static[setting], static["border"], fill
        out = warp.sample(images, rows, columns, *how, on_cells=cells)
        return out.reshape(batch.shape)

    return run


OPS = (
    DeviceOp(
        "ElasticTransform",
        _encode,
        _remap("interpolation", "fill"),
        _remap("mask_interpolation", "fill_mask"),
        draw=_draw,
        draws_pixels=_draws_there,
    ),
)
"""The distribution of Albumentations' fields; its own field, at most one level off with OpenCV 5,
where there are boxes or keypoints, or where its noise is uniform."""
