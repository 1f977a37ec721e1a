"""Distortions: every output pixel is read from a position that a smooth field gives.

The worker sends the few numbers that determine the field; it is computed on the device.
"""

# ruff: noqa: ARG001 - all operations share one signature

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, Final, TypeAlias

import numpy as np
import torch
from torch import Tensor

from lightning_fastdata.augment.ops.operation import (
    Arrays,
    DeviceOp,
    Draw,
    Drawn,
    DType,
    Encode,
    Encoded,
    Params,
    Shape,
    Static,
    Transform,
    always,
    as_channels_last,
    channels,
)
from lightning_fastdata.augment.ops.positions.cells import on_cells
from lightning_fastdata.augment.ops.positions.index import MODES, REPLICATE, encode_fills, fill_like
from lightning_fastdata.augment.ops.positions.resize import CUBIC
from lightning_fastdata.augment.ops.positions.warp import FAR, WARPED, sample, still_on_cells
from lightning_fastdata.augment.ops.splitmix import normal, take_seed, uniform
from lightning_fastdata.augment.ops.table import via_bytes

Size: TypeAlias = tuple[int, int]
Field: TypeAlias = Callable[[Static, Arrays, Size], tuple[Tensor, Tensor]]

_NOWHERE: Final = 1e15
"""Control points that fill up an array are so far away that they have no weight."""


def settings(transform: Transform, shape: Shape) -> tuple[tuple[str, Any], ...] | None:
    """Return the settings of a distortion that a launch shares, or None: no device form."""
    kinds = {transform.interpolation, transform.mask_interpolation}
    fills = encode_fills(transform, shape, extends=False)
    if fills is None or not kinds <= WARPED or transform.border_mode not in MODES:
        return None
    return (
        ("interpolation", int(transform.interpolation)),
        ("mask_interpolation", int(transform.mask_interpolation)),
        ("border", int(transform.border_mode)),
        ("cells", on_cells()),
    )


def encoded(
    transform: Transform, shape: Shape, arrays: Mapping[str, np.ndarray], *own: tuple[str, Any]
) -> Encoded | None:
    """Return a distortion with its own settings and arrays, or None: no device form."""
    shared = settings(transform, shape)
    if shared is None:
        return None
    fills = encode_fills(transform, shape, extends=False) or {}
    return Encoded((*shared, *own), {**arrays, **fills})


def _drawn(make: Callable[[Any, Size], dict[str, Any]]) -> Draw:
    """Return a ``draw`` that draws nothing for images without a device form."""

    def draw(transform: Transform, params: Params, data: Params) -> Drawn | None:
        if settings(transform, data["image"].shape) is None:
            return None
        height, width = params["shape"][:2]
        return make(transform, (int(height), int(width)))

    return draw


def _encode_grid(
    transform: Transform, params: Params, shape: Shape, dtype: DType
) -> Encoded | None:
    # The field is a meshgrid: one column for each x, one row for each y.
    rows, columns = params["map_y"][:, 0], params["map_x"][0]
    arrays = {"rows": rows.astype(np.float32), "columns": columns.astype(np.float32)}
    return encoded(transform, shape, arrays)


def _grid_field(static: Static, arrays: Arrays, size: Size) -> tuple[Tensor, Tensor]:
    n = len(arrays["rows"])
    rows, columns = arrays["rows"][:, :, None], arrays["columns"][:, None, :]
    return rows.expand(n, *size), columns.expand(n, *size)


def _draw_lens(transform: Transform, size: Size) -> dict[str, Any]:
    return {"lens": transform.py_random.uniform(*transform.distort_limit)}


def _encode_lens(
    transform: Transform, params: Params, shape: Shape, dtype: DType
) -> Encoded | None:
    if "lens" not in params:
        return None
    lens = np.array([params["lens"]], np.float64)
    return encoded(transform, shape, {"lens": lens}, ("mode", transform.mode))


def _lens_field(static: Static, arrays: Arrays, size: Size) -> tuple[Tensor, Tensor]:
    height, width = size
    strength = arrays["lens"][:, :, None]
    y = torch.arange(height, device=strength.device)[:, None]
    x = torch.arange(width, device=strength.device)[None, :]
    if static["mode"] == "camera":
        # OpenCV's initUndistortRectifyMap, which puts the image's centre between the pixels, in
        # front of a camera whose principal point is half a pixel further.
        strength = strength.float().double()
        y = (y - (height - 1) / 2).double() / torch.full_like(y, height).double()
        x = (x - (width - 1) / 2).double() / torch.full_like(x, width).double()
        square = y * y + x * x
        factor = (strength * square + strength) * square + 1
        rows = y * factor * height + height / 2
        return rows.float(), (x * factor * width + width / 2).float()
    y, x = y.float() - height / 2, x.float() - width / 2
    farthest = math.hypot(height / 2, width / 2)
    factor = 1 + strength.float() * ((y * y + x * x) / farthest**2)
    return y * factor + height / 2, x * factor + width / 2


def _draw_piecewise(transform: Transform, size: Size) -> dict[str, Any]:
    rows = max(2, transform.py_random.randint(*transform.nb_rows))
    columns = max(2, transform.py_random.randint(*transform.nb_cols))
    scale = transform.py_random.uniform(*transform.scale)
    last = np.array([size[0] - 1, size[1] - 1], np.float32)
    y = np.linspace(0, last[0], rows, dtype=np.float32)
    x = np.linspace(0, last[1], columns, dtype=np.float32)
    nodes = np.stack(np.meshgrid(y, x, indexing="ij"), -1)
    spread = scale / 3 if transform.absolute_scale else scale * min(size) / 3
    jitter = transform.random_generator.normal(0, spread, nodes.shape).astype(np.float32)
    moved = np.clip(nodes + jitter, 0, last)
    points = np.concatenate([nodes, moved], -1).reshape(-1, 4).astype(np.float32)
    most = max(2, transform.nb_rows[1]) * max(2, transform.nb_cols[1])
    padded = np.full((most, 4), _NOWHERE, np.float32)
    padded[: len(points)] = points
    padded[len(points) :, 2:] = 0
    return {"points": padded}


def _draw_piecewise_if_moved(transform: Transform, params: Params, data: Params) -> Drawn | None:
    # Without a scale Albumentations itself has no field.
    return None if min(transform.scale) <= 0 else _drawn(_draw_piecewise)(transform, params, data)


def _encode_points(
    transform: Transform, params: Params, shape: Shape, dtype: DType
) -> Encoded | None:
    return encoded(transform, shape, {"points": params["points"]}) if "points" in params else None


def _piecewise_field(static: Static, arrays: Arrays, size: Size) -> tuple[Tensor, Tensor]:
    """Return the mean of the moved nodes, weighted by the inverse square distance to the nodes."""
    points = arrays["points"]
    y = torch.arange(size[0], device=points.device, dtype=torch.float32)
    x = torch.arange(size[1], device=points.device, dtype=torch.float32)
    rows, columns, total = points.new_zeros(3, len(points), *size).unbind(0)
    # Point by point: all at once would take as many images of memory as there are points.
    for point in points.unbind(1):
        node_y, node_x, moved_y, moved_x = point[:, :, None, None].unbind(1)
        down, across = y[:, None] - node_y, x - node_x
        weight = 1 / (across * across + down * down + 1e-8)
        total += weight
        rows += weight * moved_y
        columns += weight * moved_x
    return (rows / total).clamp(0, size[0] - 1), (columns / total).clamp(0, size[1] - 1)


def _draw_spline(transform: Transform, size: Size) -> dict[str, Any]:
    from albumentations.augmentations.geometric import functional

    nodes = functional.generate_control_points(transform.num_control_points)
    scale = transform.py_random.uniform(*transform.scale_range) / 10
    moved = nodes + transform.random_generator.normal(0, scale, nodes.shape)
    bends, affine = functional.compute_tps_weights(nodes, moved)
    flat = np.zeros((len(affine), 4))
    flat[:, 2:] = affine
    # One row per node (x, y, and its weights for both), and three for the affine part.
    return {"spline": np.concatenate([np.hstack([nodes, bends]), flat]).astype(np.float32)}


def _encode_spline(
    transform: Transform, params: Params, shape: Shape, dtype: DType
) -> Encoded | None:
    return encoded(transform, shape, {"spline": params["spline"]}) if "spline" in params else None


def _spline_field(static: Static, arrays: Arrays, size: Size) -> tuple[Tensor, Tensor]:
    """Return the thin plate spline in the image scaled to the unit square."""
    spline = arrays["spline"][:, :, :, None, None]
    device = spline.device
    y = (torch.arange(size[0], device=device).double() / _of(size[0], device)).float()[:, None]
    x = (torch.arange(size[1], device=device).double() / _of(size[1], device)).float()
    one, along_x, along_y = spline[:, -3:, 2:].unbind(1)
    columns = one[:, 0] + along_x[:, 0] * x + along_y[:, 0] * y
    rows = one[:, 1] + along_x[:, 1] * x + along_y[:, 1] * y
    here = x * x + y * y
    for node in spline[:, :-3].unbind(1):
        node_x, node_y, bend_x, bend_y = node.unbind(1)
        square = here + (node_x * node_x + node_y * node_y) - 2 * (x * node_x + y * node_y)
        kernel = torch.where(square > 0, square * (square + 1e-6).log(), 0.0)
        columns = columns + kernel * bend_x
        rows = rows + kernel * bend_y
    return rows * size[0], columns * size[1]


def _of(length: int, device: torch.device) -> Tensor:
    # A tensor, since CUDA would multiply by the reciprocal of a number.
    return torch.full((), length, device=device, dtype=torch.float64)


def remap(field: Field, setting: str, fill_name: str) -> Any:
    """Return what carries out a distortion on a batch.

    Args:
        field: ``(static, arrays, size) -> rows, columns``, float32 ``[n, H, W]``.
        setting: which interpolation.
        fill_name: which fill.
    """

    def run(batch: Tensor, static: Static, arrays: Arrays) -> Tensor:
        images = as_channels_last(batch)
        where = field(static, arrays, (images.shape[1], images.shape[2]))
        rows, columns = (torch.nan_to_num(at, nan=0.0).clamp(-FAR, FAR) for at in where)
        fill = fill_like(images, arrays, fill_name)
        kind, mode = static[setting], static["border"]
        cells = static["cells"] or (kind != CUBIC and still_on_cells(images))
        out = sample(images, rows, columns, kind, mode, fill, cells=cells)
        return out.reshape(batch.shape)

    return run


def _op(name: str, field: Field, encode: Encode, draw: Draw | None = None) -> DeviceOp:
    return DeviceOp(
        name,
        encode,
        remap(field, "interpolation", "fill"),
        mask=remap(field, "mask_interpolation", "fill_mask"),
        draw=draw,
    )


def _draw_elastic(transform: Transform, params: Params, data: Params) -> Drawn | None:
    if settings(transform, data["image"].shape) is None:
        return None
    return {"elastic_seed": take_seed(transform.random_generator)}


def _encode_elastic(
    transform: Transform, params: Params, shape: Shape, dtype: DType
) -> Encoded | None:
    if "map_x" in params:
        # Boxes or keypoints are moved by this very field.
        return encoded(transform, shape, {"rows": params["map_y"], "columns": params["map_x"]})
    radius = 8 if transform.approximate else round(transform.sigma * 8 + 1) // 2
    own = (
        ("noise", transform.noise_distribution),
        ("same", bool(transform.same_dxdy)),
        ("radius", radius),
        ("sigma", float(transform.sigma)),
        ("alpha", float(transform.alpha)),
    )
    return encoded(transform, shape, {"seed": params["elastic_seed"]}, *own)


def smoothing(length: int, sigma: float, radius: int, device: torch.device) -> Tensor:
    """Return the matrix that smooths ``length`` values with a Gaussian; the edge values go on.

    Args:
        length: values along the axis.
        sigma: standard deviation of the Gaussian, in pixels.
        radius: pixels after which it is cut, on either side.
        device: where the matrix is made.

    Returns:
        float64 ``[length, length]``: a matrix product of float32 may be one of TF32, if the user
        allows that.
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


def displacements(static: Static, seed: Tensor, size: tuple[int, int]) -> Tensor:
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


def _elastic_field(static: Static, arrays: Arrays, size: tuple[int, int]) -> tuple[Tensor, Tensor]:
    if "rows" in arrays:
        return arrays["rows"], arrays["columns"]
    moves = displacements(static, arrays["seed"], size)
    y = torch.arange(size[0], device=moves.device, dtype=torch.float32)[:, None]
    x = torch.arange(size[1], device=moves.device, dtype=torch.float32)
    return y + moves[:, -1], x + moves[:, 0]


def _encode_aberration(
    transform: Transform, params: Params, shape: Shape, dtype: DType
) -> Encoded | None:
    if channels(shape) != 3 or transform.interpolation not in WARPED:
        return None
    lens = [
        [params[f"{order}_distortion_{color}"] for order in ("primary", "secondary")]
        for color in ("red", "blue")
    ]
    # Albumentations hands them to OpenCV as float32, which computes in float64.
    rounded = np.array(lens, np.float32).astype(np.float64)
    static = (("interpolation", int(transform.interpolation)), ("cells", on_cells()))
    return Encoded(static, {"lens": rounded})


def _bent(lens: Tensor, height: int, width: int) -> tuple[Tensor, Tensor]:
    """Return the rows and columns that a lens ``[n, 2]`` moves pixels to, float32 ``[n, H, W]``.

    A point at distance r from the middle, as a part of the size of the image, moves to
    ``r (1 + k1 r^2 + k2 r^4)``: OpenCV's ``initUndistortRectifyMap``.
    """
    first, second = lens[:, 0, None, None], lens[:, 1, None, None]
    y = torch.arange(height, device=lens.device, dtype=lens.dtype)[:, None] - height / 2
    x = torch.arange(width, device=lens.device, dtype=lens.dtype)[None, :] - width / 2
    # By tensors: CUDA would multiply by the reciprocal of a number.
    y, x = y / torch.full_like(y, height), x / torch.full_like(x, width)
    square = x * x + y * y
    bend = 1 + (second * square + first) * square
    rows, columns = y * bend * height + height / 2, x * bend * width + width / 2
    return rows.float().clamp(-FAR, FAR), columns.float().clamp(-FAR, FAR)


def _aberration(images: Tensor, static: Static, arrays: Arrays) -> Tensor:
    def change(as_bytes: Tensor) -> Tensor:
        n, height, width, _ = as_bytes.shape
        planes = list(torch.split(as_bytes, 1, -1))
        nothing = as_bytes.new_zeros(n, 1)
        for lens, plane in ((0, 0), (1, 2)):
            rows, columns = _bent(arrays["lens"][:, lens], height, width)
            planes[plane] = sample(
                planes[plane],
                rows,
                columns,
                static["interpolation"],
                REPLICATE,
                nothing,
                cells=static["cells"],
            )
        return torch.cat(planes, -1)

    return via_bytes(images, change)


OPS = (
    _op("GridDistortion", _grid_field, _encode_grid),
    _op("OpticalDistortion", _lens_field, _encode_lens, _drawn(_draw_lens)),
    _op("PiecewiseAffine", _piecewise_field, _encode_points, _draw_piecewise_if_moved),
    _op("ThinPlateSpline", _spline_field, _encode_spline, _drawn(_draw_spline)),
    DeviceOp(
        "ElasticTransform",
        _encode_elastic,
        remap(_elastic_field, "interpolation", "fill"),
        mask=remap(_elastic_field, "mask_interpolation", "fill_mask"),
        draw=_draw_elastic,
        draws_pixels=always,
    ),
    DeviceOp("ChromaticAberration", _encode_aberration, _aberration),
)
"""With OpenCV 5, at most one level off on uint8: the field is Albumentations' own but for the
rounding of its float32 operations, and exactly its own for GridDistortion. Where such a difference
meets an edge at half a pixel, nearest reads the neighbour. ElasticTransform has the distribution of
Albumentations' fields, and its own field where there are boxes or keypoints. ChromaticAberration
takes a float32 image through uint8, as Albumentations does."""
