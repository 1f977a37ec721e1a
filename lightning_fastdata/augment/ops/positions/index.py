"""Operations that move pixels without changing them: flips, quarter turns, crops, padding."""

# ruff: noqa: ARG001 - all operations share one signature

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from lightning_fastdata.augment.ops.operation import DeviceOp, Encoded
from lightning_fastdata.augment.ops.positions.border import (
    MODES,
    REPLICATE,
    as_channels_last,
    encode_fills,
    fill_like,
    read,
)
from lightning_fastdata.augment.replay import instructions

if TYPE_CHECKING:
    from collections.abc import Mapping

    from lightning_fastdata.augment.ops.operation import Shape

_SYMMETRIES = {
    "e": (False, 0),
    "r90": (False, 1),
    "r180": (False, 2),
    "r270": (False, 3),
    "t": (True, 0),
    "h": (True, 3),
    "hvt": (True, 2),
    "v": (True, 1),
}
"""Albumentations' names of the eight symmetries, as a transposition before quarter turns."""


_ELEMENTS = {
    "HorizontalFlip": "h",
    "TimeReverse": "h",
    "VerticalFlip": "v",
    "Transpose": "t",
    "NoOp": "e",
}
"""The symmetries that transforms are called by."""


def _moves(transform: Any, params: Mapping[str, Any]) -> tuple[bool, int]:
    """Return whether an image is transposed, and by how many quarter turns it is turned then."""
    name = type(transform).__name__
    if name == "RandomRotate90":
        return False, int(params["factor"]) % 4
    return _SYMMETRIES[_ELEMENTS.get(name) or str(params["group_element"])]


@cache
def _encoded(transposed: bool, turns: int) -> Encoded:
    return Encoded((("transposed", transposed), ("turns", turns)), {})


def _encode_symmetry(
    transform: Any, params: Mapping[str, Any], shape: Shape, dtype: np.dtype[Any]
) -> Encoded:
    return _encoded(*_moves(transform, params))


def _symmetry(
    batch: torch.Tensor, static: Mapping[str, Any], arrays: Mapping[str, torch.Tensor]
) -> torch.Tensor:
    moved = batch.transpose(1, 2) if static["transposed"] else batch
    return torch.rot90(moved, static["turns"], (1, 2)) if static["turns"] else moved


def _symmetry_shape(transform: Any, params: Mapping[str, Any], shape: Shape) -> Shape:
    transposed, turns = _moves(transform, params)
    return (shape[1], shape[0], *shape[2:]) if transposed != (turns % 2 == 1) else shape


def _window(transform: Any, params: Mapping[str, Any], shape: Shape) -> tuple[int, int, int, int]:
    """Return ``top, left, height, width`` of the output in the input; it may reach outside."""
    if "crop_coords" not in params:
        height = shape[0] + int(params["pad_top"]) + int(params["pad_bottom"])
        width = shape[1] + int(params["pad_left"]) + int(params["pad_right"])
        return -int(params["pad_top"]), -int(params["pad_left"]), height, width
    x_min, y_min, x_max, y_max = (int(value) for value in params["crop_coords"])
    pads = params.get("pad_params") or {"pad_top": 0, "pad_left": 0}
    top, left = y_min - int(pads["pad_top"]), x_min - int(pads["pad_left"])
    return top, left, y_max - y_min, x_max - x_min


def _encode_window(
    transform: Any, params: Mapping[str, Any], shape: Shape, dtype: np.dtype[Any]
) -> Encoded | None:
    top, left, height, width = _window(transform, params, shape)
    corner = np.array([top, left], np.int32)
    inside = top >= 0 and left >= 0 and top + height <= shape[0] and left + width <= shape[1]
    pads = "crop_coords" not in params or params.get("pad_params") is not None
    if height <= 0 or width <= 0 or not (inside or pads):
        return None  # Albumentations raises its own error.
    fills = encode_fills(transform, shape) if pads else {}
    if fills is None or (pads and transform.border_mode not in MODES):
        return None
    if inside:
        # The border is never read, so samples that need none can share one launch.
        return Encoded((("size", (height, width)), ("border", REPLICATE)), {"corner": corner})
    static = (("size", (height, width)), ("border", int(transform.border_mode)))
    return Encoded(static, {"corner": corner, **fills})


def _cut(fill_name: str) -> Any:
    def run(
        batch: torch.Tensor, static: Mapping[str, Any], arrays: Mapping[str, torch.Tensor]
    ) -> torch.Tensor:
        images = as_channels_last(batch)
        height, width = static["size"]
        top, left = arrays["corner"].long().unbind(1)
        y = top[:, None] + torch.arange(height, device=batch.device)
        x = left[:, None] + torch.arange(width, device=batch.device)
        if fill_name in arrays:
            fill = fill_like(images, arrays, fill_name)
        else:
            fill = images.new_zeros(len(images), images.shape[-1])
        cut = read(images, y[:, :, None], x[:, None, :], static["border"], fill)
        return cut.view(*cut.shape[:3], *batch.shape[3:])

    return run


def _window_shape(transform: Any, params: Mapping[str, Any], shape: Shape) -> Shape:
    return (*_window(transform, params, shape)[2:], *shape[2:])


OPS = (
    *(
        DeviceOp(
            name=name,
            encode=_encode_symmetry,
            image=_symmetry,
            mask=_symmetry,
            out_shape=_symmetry_shape,
            fused=instructions.mirror,
        )
        for name in (
            "NoOp",
            "HorizontalFlip",
            "TimeReverse",
            "VerticalFlip",
            "Transpose",
            "RandomRotate90",
            "D4",
            "SquareSymmetry",
        )
    ),
    *(
        DeviceOp(
            name=name,
            encode=_encode_window,
            image=_cut("fill"),
            mask=_cut("fill_mask"),
            out_shape=_window_shape,
            fused="window",
        )
        for name in ("RandomCrop", "CenterCrop", "Crop", "Pad", "PadIfNeeded")
    ),
)
"""Exact for every dtype."""
