"""Several geometric operations of one sample in a single resampling.

Positions go back from the output through a chain of stages. Each stage is a 3x3 matrix and the
rectangle of the image that it leads to. On its way through the chain a position meets the borders
of the intermediate images, as it would if these were made; only the first image is read.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import torch

from lightning_fastdata.augment import fusion
from lightning_fastdata.augment.ops.border import (
    CONSTANT,
    REFLECT,
    REFLECT_101,
    REPLICATE,
    WRAP,
    as_channels_last,
    fill_like,
    gather,
)
from lightning_fastdata.augment.ops.operation import DeviceOp, Encoded
from lightning_fastdata.augment.ops.resample import NEAREST
from lightning_fastdata.augment.ops.warp import FAR

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from lightning_fastdata.augment.fusion import Instruction
    from lightning_fastdata.augment.ops.operation import Run

NAME: Final = "JointWarp"
"""How programs call it. No transform of Albumentations has this name."""
EVERYWHERE: Final = (-FAR, -FAR, FAR, FAR)
"""A rectangle that holds nothing back."""
IDLE: Final = (*(1, 0, 0), *(0, 1, 0), *(0, 0, 1), *EVERYWHERE, *EVERYWHERE)
"""A stage that does nothing."""


def fold_between(
    at: torch.Tensor, first: torch.Tensor, last: torch.Tensor, mode: int
) -> torch.Tensor:
    """Map positions outside ``first .. last`` to inside, by OpenCV's ``borderInterpolate``.

    Args:
        at: positions along one axis, integer; or float, then between pixels as well.
        first: position of the first pixel; broadcasts with ``at``.
        last: position of the last pixel.
        mode: ``BORDER_*``; for CONSTANT the nearest pixel is returned. WRAP between the last and
            the first pixel is one of the two.
    """
    if mode in {REFLECT, REFLECT_101, WRAP}:
        length = last - first + 1
        offset = at - first
        if mode == WRAP:
            offset = offset.remainder(length)
        elif mode == REFLECT:
            around = offset.remainder(2 * length)
            offset = torch.minimum(around, 2 * length - 1 - around)
        else:
            period = (2 * length - 2).clamp(min=1)
            around = offset.remainder(period)
            offset = torch.minimum(around, period - around)
        # What lies inside stays what it is, to the last bit.
        at = torch.where((at >= first) & (at <= last), at, offset + first)
    return at.maximum(first).minimum(last)


def _back(
    matrix: torch.Tensor, x: torch.Tensor, y: torch.Tensor, *, projective: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return where positions come from, in the arithmetic of a single warp."""
    m = matrix[:, :, :, None, None]

    def line(row: int) -> torch.Tensor:
        start = m[:, row, 1] * y + m[:, row, 2]
        # The product of two float32 numbers is exact in float64.
        return (m[:, row, 0].double() * x.double() + start.double()).float()

    columns, rows = line(0), line(1)
    if projective:
        depth = line(2)
        columns, rows = columns / depth, rows / depth
    return torch.nan_to_num(columns, nan=0.0), torch.nan_to_num(rows, nan=0.0)


def _limits(rectangles: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Return left, top, right and bottom, each ``[n, 1, 1]``."""
    return rectangles[:, :, None, None].unbind(1)


def _inside(
    at: torch.Tensor, first: torch.Tensor, last: torch.Tensor, *, nearest: bool
) -> torch.Tensor:
    """Return how much of an image with a constant border counts at a position, 0..1.

    Linear interpolation between the last pixel and the border falls from 1 to 0 within a pixel.
    """
    if nearest:
        at = at.round()
        return ((at >= first) & (at <= last)).float()
    return (torch.minimum(at - first, last - at) + 1).clamp(0, 1)


def in_order(steps: Sequence[tuple[str, Encoded]]) -> Encoded:
    """Return operations that are carried out one after the other, as one.

    Args:
        steps: names and parameters.
    """
    static = tuple((name, encoded.static) for name, encoded in steps)
    arrays = {
        f"{number} {name}": array
        for number, (_, encoded) in enumerate(steps)
        for name, array in encoded.arrays.items()
    }
    return Encoded((("in order", static),), arrays)


def _run(is_image: bool) -> Run:
    def run(
        batch: torch.Tensor, static: Mapping[str, Any], arrays: Mapping[str, torch.Tensor]
    ) -> torch.Tensor:
        from lightning_fastdata.augment.ops import REPLAYED_OPS

        if "in order" not in static:
            return _joint_warp(batch, static, arrays)
        for number, (name, settings) in enumerate(static["in order"]):
            own = {
                key.partition(" ")[2]: array
                for key, array in arrays.items()
                if key.startswith(f"{number} ")
            }
            step = REPLAYED_OPS[name].image if is_image else REPLAYED_OPS[name].mask
            batch = batch if step is None else step(batch, dict(settings), own)
        return batch

    return run


def _joint_warp(
    batch: torch.Tensor, static: Mapping[str, Any], arrays: Mapping[str, torch.Tensor]
) -> torch.Tensor:
    images = as_channels_last(batch)
    nearest, mode = static["interpolation"] == NEAREST, static["border"]
    height, width = static["size"]
    chain, device = arrays["chain"], batch.device
    y: torch.Tensor = torch.arange(height, device=device, dtype=torch.float32)[None, :, None]
    x: torch.Tensor = torch.arange(width, device=device, dtype=torch.float32)[None, None, :]
    seen: torch.Tensor | None = None
    for number, stage in enumerate(chain.unbind(1)):
        matrix = stage[:, :9].reshape(-1, 3, 3)
        x, y = _back(matrix, x, y, projective=static["projective"])
        left, top, right, bottom = _limits(stage[:, 13:])
        x, y = x.maximum(left).minimum(right), y.maximum(top).minimum(bottom)
        left, top, right, bottom = _limits(stage[:, 9:13])
        if number == chain.shape[1] - 1:
            break  # The border of the image itself is met where its pixels are read.
        if mode == CONSTANT:
            across = _inside(x, left, right, nearest=nearest)
            here = across * _inside(y, top, bottom, nearest=nearest)
            seen = here if seen is None else seen * here
        x, y = fold_between(x, left, right, mode), fold_between(y, top, bottom, mode)
    fill = fill_like(images, arrays, "fill")[:, None, None, :]
    limits = left.long(), top.long(), right.long(), bottom.long()
    out = _sample(images, x, y, limits, fill, mode=mode, nearest=nearest, seen=seen)
    return out.view(*out.shape[:3], *batch.shape[3:])


def _sample(
    images: torch.Tensor,
    x: torch.Tensor,
    y: torch.Tensor,
    limits: tuple[torch.Tensor, ...],
    fill: torch.Tensor,
    *,
    mode: int,
    nearest: bool,
    seen: torch.Tensor | None,
) -> torch.Tensor:
    left, top, right, bottom = limits

    def read(rows: torch.Tensor, columns: torch.Tensor) -> torch.Tensor:
        pixels = gather(
            images, fold_between(rows, top, bottom, mode), fold_between(columns, left, right, mode)
        )
        if mode != CONSTANT:
            return pixels
        inside = (rows >= top) & (rows <= bottom) & (columns >= left) & (columns <= right)
        return torch.where(inside.unsqueeze(-1), pixels, fill)

    if nearest:
        out = read(y.round().long(), x.round().long())
        return out if seen is None else torch.where(seen.unsqueeze(-1) > 0, out, fill)
    low_y, low_x = y.floor(), x.floor()
    down, across = (y - low_y).unsqueeze(-1), (x - low_x).unsqueeze(-1)
    row, column = low_y.long(), low_x.long()
    left_top, right_top, left_bottom, right_bottom = (
        read(row + dy, column + dx).float() for dy in (0, 1) for dx in (0, 1)
    )
    upper = torch.lerp(left_top, right_top, across)
    lower = torch.lerp(left_bottom, right_bottom, across)
    out = torch.lerp(upper, lower, down)
    if seen is not None:
        out = torch.lerp(fill.float().expand_as(out), out, seen.unsqueeze(-1))
    return (out if images.is_floating_point() else out.round()).to(images.dtype)


def _instructions(encoded: Encoded, offsets: Mapping[str, int]) -> list[Instruction] | None:
    """Return the reading of a chain that ends at a whole image, or None."""
    static = dict(encoded.static)
    if "in order" in static or len(encoded.arrays["fill"]) != fusion.CHANNELS:
        return None
    chain = encoded.arrays["chain"].tolist()
    idle = next(number for number, stage in enumerate(chain) if stage != [*IDLE])
    between = len(chain) - 1 - idle
    height, width = static["source"]
    reads_all = chain[-1][9:] == [0, 0, width - 1, height - 1, *EVERYWHERE]
    if not reads_all or (between and static["border"] not in {CONSTANT, REPLICATE}):
        return None
    stage = offsets["chain"] + 4 * len(IDLE) * idle
    return [fusion.warp_reading(static, stage, offsets["fill"], between=between)]


def _never(*_: object) -> None:
    """Joint warps are made of other operations, never of a transform."""


JOINT_WARP: Final = DeviceOp(
    name=NAME, encode=_never, image=_run(True), mask=_run(False), fused=_instructions
)
"""Either operations in order (:func:`in_order`), or one resampling.

One stage alone is equal to the warp that it was made of.

Its settings are ``size``, ``source`` (the size of the image that is read), ``interpolation``,
``border`` and ``projective``; its arrays are ``fill``, float32 ``[channels]``, and ``chain``,
float32 ``[stages, 17]``, from the output to the image. A stage is a matrix, row by row, from the
centres of output pixels ``(x, y, 1)`` to those of input pixels; then the left, top, right and
bottom pixel of the image that it leads to; then those of a rectangle that positions are held in
before they meet the border."""
