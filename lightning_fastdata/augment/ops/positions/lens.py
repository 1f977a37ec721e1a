"""Aberrations of a lens: each color is bent on its own."""

# ruff: noqa: ARG001 - all operations share one signature

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from lightning_fastdata.augment.ops.operation import DeviceOp, Encoded
from lightning_fastdata.augment.ops.positions.border import REPLICATE, channels
from lightning_fastdata.augment.ops.positions.cells import on_cells
from lightning_fastdata.augment.ops.positions.warp import FAR, WARPED, sample
from lightning_fastdata.augment.ops.table import via_bytes

if TYPE_CHECKING:
    from collections.abc import Mapping

    from lightning_fastdata.augment.ops.operation import Shape


def _encode(
    transform: Any, params: Mapping[str, Any], shape: Shape, dtype: np.dtype[Any]
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


def _bent(lens: torch.Tensor, height: int, width: int) -> tuple[torch.Tensor, torch.Tensor]:
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


def _run(
    images: torch.Tensor, static: Mapping[str, Any], arrays: Mapping[str, torch.Tensor]
) -> torch.Tensor:
    def change(as_bytes: torch.Tensor) -> torch.Tensor:
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


OPS = (DeviceOp(name="ChromaticAberration", encode=_encode, image=_run),)
"""On uint8 at most one level off. A float32 image goes through uint8, as in Albumentations."""
