"""Elastic deformation: every pixel is displaced by smoothed noise, which the device draws."""

# ruff: noqa: ARG001 - all operations share one signature

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from lightning_fastdata.augment.ops.operation import DeviceOp, Encoded
from lightning_fastdata.augment.ops.positions.distortion import encoded, remap, settings
from lightning_fastdata.augment.ops.splitmix import normal, take_seed, uniform

if TYPE_CHECKING:
    from collections.abc import Mapping

    import numpy as np

    from lightning_fastdata.augment.ops.operation import Shape


def _draw(
    transform: Any, params: Mapping[str, Any], data: Mapping[str, Any]
) -> dict[str, Any] | None:
    if settings(transform, data["image"].shape) is None:
        return None
    return {"elastic_seed": take_seed(transform.random_generator)}


def _encode(
    transform: Any, params: Mapping[str, Any], shape: Shape, dtype: np.dtype[Any]
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


def smoothing(length: int, sigma: float, radius: int, device: torch.device) -> torch.Tensor:
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


def displacements(
    static: Mapping[str, Any], seed: torch.Tensor, size: tuple[int, int]
) -> torch.Tensor:
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
    smooth: torch.Tensor = rows @ noise.double().view(-1, fields * height, width) @ columns.mT
    return smooth.float().mul(float(static["alpha"])).view(-1, fields, height, width)


def _field(
    static: Mapping[str, Any], arrays: Mapping[str, torch.Tensor], size: tuple[int, int]
) -> tuple[torch.Tensor, torch.Tensor]:
    if "rows" in arrays:
        return arrays["rows"], arrays["columns"]
    moves = displacements(static, arrays["seed"], size)
    y = torch.arange(size[0], device=moves.device, dtype=torch.float32)[:, None]
    x = torch.arange(size[1], device=moves.device, dtype=torch.float32)
    return y + moves[:, -1], x + moves[:, 0]


OPS = (
    DeviceOp(
        name="ElasticTransform",
        encode=_encode,
        image=remap(_field, "interpolation", "fill"),
        mask=remap(_field, "mask_interpolation", "fill_mask"),
        draw=_draw,
        draws_pixels=lambda _transform: True,
    ),
)
"""The distribution of Albumentations' fields; its own field where there are boxes or keypoints."""
