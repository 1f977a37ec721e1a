"""Operations that move pixels: symmetries, crops and pads, resizes, affine warps.

Resizes and warps compute as OpenCV does. OpenCV 4 warps in integers, at positions on a grid of 1/32
pixel; OpenCV 5 warps in floats.
"""

# ruff: noqa: ARG001 - all operations share one signature

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, lru_cache, partial
from typing import Final

import numpy as np
import torch
from torch import Tensor

from lightning_fastdata.augment.ops.operation import (
    Arrays,
    DeviceOp,
    DType,
    Encoded,
    Shape,
    Transform,
    Values,
    as_channels_last,
    channels,
)

CONSTANT, REPLICATE, REFLECT, WRAP, REFLECT_101 = range(5)
MODES: Final = frozenset({CONSTANT, REPLICATE, REFLECT, WRAP, REFLECT_101})
"""OpenCV's ``BORDER_*`` numbers that have a device form."""

_OPENCV_CHANNELS: Final = 4
NEAREST: Final = 0
LINEAR: Final = 1
KNOWN: Final = frozenset({NEAREST, LINEAR})
"""OpenCV's ``INTER_*`` numbers for which resizes and warps have a device form."""
_RESIZE_BITS: Final = 11
"""OpenCV resizes uint8 pixels with integer weights of this many bits."""


def fold(index: Tensor, length: int, mode: int) -> Tensor:
    """Map positions outside ``0 .. length - 1`` to inside, by OpenCV's ``borderInterpolate``.

    For CONSTANT the nearest position inside is returned; the caller overwrites such pixels.
    """
    if mode == WRAP:
        return index.remainder(length)
    if mode == REFLECT:
        around = index.remainder(2 * length)
        return torch.minimum(around, 2 * length - 1 - around)
    if mode == REFLECT_101 and length > 1:
        around = index.remainder(2 * length - 2)
        return torch.minimum(around, 2 * length - 2 - around)
    return index.clamp(0, length - 1)


def gather(batch: Tensor, y: Tensor, x: Tensor) -> Tensor:
    """Return the pixels ``batch[i, y[i], x[i]]``, ``[n, ..., C]``, of a batch ``[n, H, W, C]``.

    Rows and columns are inside the image, integers ``[n, ...]`` that broadcast with each other.
    """
    n, height, width, count = batch.shape
    first = torch.arange(n, device=batch.device).view(n, *[1] * (y.ndim - 1)) * (height * width)
    flat = first + y * width + x
    return batch.reshape(-1, count).index_select(0, flat.reshape(-1)).view(*flat.shape, count)


def read(batch: Tensor, y: Tensor, x: Tensor, mode: int, fill: Tensor) -> Tensor:
    """Return pixels of ``[n, H, W, C]`` at any rows ``[n, a, b]`` and columns, by a border mode.

    ``fill`` is the value outside the image for CONSTANT, ``[n, C]``, in the dtype of ``batch``.
    """
    _, height, width, _ = batch.shape
    pixels = gather(batch, fold(y, height, mode), fold(x, width, mode))
    if mode != CONSTANT:
        return pixels
    inside = (y >= 0) & (y < height) & (x >= 0) & (x < width)
    return torch.where(inside.unsqueeze(-1), pixels, fill[:, None, None, :])


def _encode_fill(fill: object, count: int) -> np.ndarray | None:
    """Return OpenCV's border value, float32 ``[count]``, or None if it has no device form.

    Albumentations takes a float for every channel. OpenCV takes an integer for the first channel,
    and 0 for the others.
    """
    if fill is not None and not isinstance(fill, int | float):
        fill = tuple(np.asarray(fill).ravel().tolist())
    return _border_value(fill, count)


# Cached, as each sample has the same fill; typed, as floats and integers make different values.
@lru_cache(maxsize=64, typed=True)
def _border_value(fill: float | tuple[float, ...] | None, count: int) -> np.ndarray | None:
    if fill is None or isinstance(fill, float):
        return np.full(count, fill or 0.0, np.float32)
    given = np.atleast_1d(np.asarray(fill, np.float32))
    if given.size > _OPENCV_CHANNELS:
        return None  # OpenCV refuses it.
    four = np.zeros(_OPENCV_CHANNELS, np.float32)
    four[: given.size] = given
    return four[_places(count)]


def _places(count: int) -> list[int]:
    """Return for each of ``count`` channels which number of a border value it has.

    Albumentations calls OpenCV for four channels at a time; of two that are left, for each alone.
    """
    places = [channel % _OPENCV_CHANNELS for channel in range(count)]
    if count > _OPENCV_CHANNELS and count % _OPENCV_CHANNELS == 2:
        places[-1] = 0
    return places


def encode_fills(transform: Transform, shape: Shape) -> Values | None:
    """Return the fill of images and of masks, one number per channel, or None.

    Masks may have more channels than the image beside them, so their fill has four numbers.
    """
    image = _encode_fill(transform.fill, channels(shape))
    mask = _encode_fill(transform.fill_mask, _OPENCV_CHANNELS)
    return None if image is None or mask is None else {"fill": image, "fill_mask": mask}


_LIMITED: Final = (torch.uint8, torch.int8, torch.int16)
"""Dtypes in which OpenCV takes the nearest number for a fill that they do not have."""


def fill_like(batch: Tensor, arrays: Arrays, name: str) -> Tensor:
    """Return the fill ``[n, C]`` in the dtype of ``batch`` ``[n, H, W, C]``, rounded if needed."""
    fill, count = arrays[name], batch.shape[-1]
    if count > fill.shape[-1]:
        fill = torch.stack([fill[:, place % fill.shape[-1]] for place in _places(count)], 1)
    fill = fill[:, :count]
    if batch.dtype in _LIMITED:
        limits = torch.iinfo(batch.dtype)
        fill = fill.clamp(limits.min, limits.max)
    return (fill if batch.is_floating_point() else fill.round()).to(batch.dtype)


TRANSPOSES: Final = 4
_SYMMETRIES: Final = {"e": 0, "h": 1, "v": 2, "r180": 3, "t": 4, "r270": 5, "r90": 6, "hvt": 7}
"""Symmetry of the square -> the sum of 4: rows become columns, then 1: left and right change
places, 2: top and bottom."""
_FLIPS: Final = {"HorizontalFlip": "h", "VerticalFlip": "v", "Transpose": "t"}


def _moves(transform: Transform, params: Values) -> int:
    """Return the number of the symmetry that was drawn."""
    name = type(transform).__name__
    if name in ("NoOp", "RandomRotate90"):
        element = ("e", "r90", "r180", "r270")[int(params.get("factor", 0)) % 4]
    else:
        element = _FLIPS.get(name) or str(params["group_element"])
    return _SYMMETRIES[element]


def _encode_symmetry(transform: Transform, params: Values, shape: Shape, dtype: DType) -> Encoded:
    return Encoded((("moves", _moves(transform, params)),), {})


def _symmetry(batch: Tensor, static: Values, arrays: Arrays) -> Tensor:
    moves = static["moves"]
    moved = batch.transpose(1, 2) if moves & TRANSPOSES else batch
    axes = [axis for axis, bit in ((1, 2), (2, 1)) if moves & bit]
    return moved.flip(axes) if axes else moved


def _symmetry_shape(transform: Transform, params: Values, shape: Shape) -> Shape:
    turned = _moves(transform, params) & TRANSPOSES
    return (shape[1], shape[0], *shape[2:]) if turned else shape


def _window(transform: Transform, params: Values, shape: Shape) -> tuple[int, int, int, int]:
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
    transform: Transform, params: Values, shape: Shape, dtype: DType
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
    # Samples whose border is never read share one launch.
    border = REPLICATE if inside else int(transform.border_mode)
    arrays = {"corner": corner} if inside else {"corner": corner, **fills}
    return Encoded((("size", (height, width)), ("border", border)), arrays)


def _cut(fill_name: str, batch: Tensor, static: Values, arrays: Arrays) -> Tensor:
    images = as_channels_last(batch)
    height, width = static["size"]
    top, left = arrays["corner"].long()[:, :, None].unbind(1)
    y = top + torch.arange(height, device=batch.device)
    x = left + torch.arange(width, device=batch.device)
    # Without a fill, no pixel outside is read.
    no_fill = images.new_zeros(len(images), images.shape[-1])
    fill = fill_like(images, arrays, fill_name) if fill_name in arrays else no_fill
    cut = read(images, y[:, :, None], x[:, None, :], static["border"], fill)
    return cut.view(*cut.shape[:3], *batch.shape[3:])


def _window_shape(transform: Transform, params: Values, shape: Shape) -> Shape:
    return (*_window(transform, params, shape)[2:], *shape[2:])


def _resized_size(transform: Transform) -> tuple[int, int]:
    resizes = type(transform).__name__ == "Resize"
    height, width = (transform.height, transform.width) if resizes else transform.size
    return int(height), int(width)


def _encode_resize(
    transform: Transform, params: Values, shape: Shape, dtype: DType
) -> Encoded | None:
    box = params.get("crop_coords", (0, 0, shape[1], shape[0]))
    left, top, right, bottom = box
    height, width = size = _resized_size(transform)
    if not (0 <= left < right <= shape[1] and 0 <= top < bottom <= shape[0]):
        return None
    smaller = height < bottom - top or width < right - left
    kinds = transform.interpolation, transform.mask_interpolation
    if not KNOWN.issuperset(kinds) or (smaller and transform.area_for_downscale is not None):
        return None
    if transform.area_for_downscale == "image_mask" and "crop_coords" in params:
        return None  # Masks of a crop are then always resized by areas.
    # Source pixels per output pixel. OpenCV takes the reciprocal of a quotient, and the last bit
    # decides which pixel is read at whole steps.
    steps = 1.0 / (height / (bottom - top)), 1.0 / (width / (right - left))
    arrays = {"box": np.array(box, np.int32), "step": np.array(steps)}
    static = (
        ("size", size),
        ("interpolation", int(transform.interpolation)),
        ("mask_interpolation", int(transform.mask_interpolation)),
    )
    return Encoded(static, arrays)


def _nearest(first: Tensor, last: Tensor, step: Tensor, out: int) -> Tensor:
    length = (last - first).double()[:, None]
    grid = torch.arange(out, device=first.device, dtype=torch.float64)
    index = (grid * step[:, None]).floor().minimum(length - 1)
    return index.long() + first[:, None]


def _linear(first: Tensor, last: Tensor, step: Tensor, out: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return the two source positions and the weight of the second, each ``[n, out]``."""
    length = (last - first).double()[:, None]
    grid = torch.arange(out, device=first.device, dtype=torch.float64)
    position = ((grid + 0.5) * step[:, None] - 0.5).float()
    low = position.floor()
    weight = position - low
    edge = length.long() - 1
    below = low.long().clamp(min=0).minimum(edge)
    above = (low.long() + 1).clamp(min=0).minimum(edge)
    return below + first[:, None], above + first[:, None], weight


def _corners(
    images: Tensor, rows: Sequence[Tensor], columns: Sequence[Tensor]
) -> tuple[list[Tensor], Tensor, Tensor]:
    """Return the four pixels around positions, and the weights of the right and the lower ones."""
    (y0, y1, down), (x0, x1, across) = rows, columns
    # OpenCV clamps columns by dropping the weight, rows by reading the edge row twice.
    across = torch.where(x0 == x1, 0.0, across)
    corners = [gather(images, y[:, :, None], x[:, None, :]) for y in (y0, y1) for x in (x0, x1)]
    return corners, across[:, None, :, None], down[:, :, None, None]


def _resample(setting: str, batch: Tensor, static: Values, arrays: Arrays) -> Tensor:
    images = as_channels_last(batch)
    height, width = static["size"]
    left, top, right, bottom = arrays["box"].long().unbind(1)
    down, across = arrays["step"].unbind(1)
    if static[setting] == NEAREST:
        y = _nearest(top, bottom, down, height)
        x = _nearest(left, right, across, width)
        out = gather(images, y[:, :, None], x[:, None, :])
    else:
        rows = _linear(top, bottom, down, height)
        columns = _linear(left, right, across, width)
        corners, *weights = _corners(images, rows, columns)
        out = _blend(corners, *weights)
        if images.dtype == torch.uint8 and images.shape[-1] == 2:
            # OpenCV halves two channels in another way than one, three or four.
            halved = (bottom - top == 2 * height) & (right - left == 2 * width)
            mean = torch.stack(corners).float().mean(0)
            out = torch.where(halved[:, None, None, None], mean.round().byte(), out)
    return out.view(*out.shape[:3], *batch.shape[3:])


def _blend(corners: list[Tensor], across: Tensor, down: Tensor) -> Tensor:
    """Return the mean of the pixels above left, above right, below left and below right.

    ``across`` and ``down`` are the weights of the right and lower pixels, float32 in [0, 1].
    """
    dtype = corners[0].dtype
    if dtype == torch.uint8:
        one = 1 << _RESIZE_BITS
        right, left = (across * one).round().int(), ((1 - across) * one).round().int()
        below, above = (down * one).round().int(), ((1 - down) * one).round().int()
        upper = (corners[0].int() * left + corners[1].int() * right) >> 4
        lower = (corners[2].int() * left + corners[3].int() * right) >> 4
        return ((((upper * above) >> 16) + ((lower * below) >> 16) + 2) >> 2).to(torch.uint8)
    upper = corners[0] * (1 - across) + corners[1] * across
    lower = corners[2] * (1 - across) + corners[3] * across
    mixed = upper * (1 - down) + lower * down
    # OpenCV rounds masks of other integers with halves to even.
    return (mixed if dtype.is_floating_point else mixed.round()).to(dtype)


_STILL_ON_CELLS: Final = (torch.int8, torch.int16, torch.int32, torch.int64, torch.float64)
_FAR: Final = 1 << 20
"""Limit of positions in pixels before they become integers; no image is this wide."""
_IDENTITY: Final = np.eye(3)
_BITS: Final = 5
CELLS: Final = 1 << _BITS
"""Number of positions per pixel and axis on the grid at which OpenCV 4 reads."""
_AFFINE: Final = 1024
"""Parts of a pixel in which OpenCV adds up the rows and columns of an affine warp."""
_FAR_CELLS: Final = 1 << 15
"""Limit of positions in pixels: OpenCV 4 keeps them in 16 bits."""
_WARP_BITS: Final = 15


@dataclass(frozen=True, slots=True)
class Loop:
    """How OpenCV 5 goes through the columns of a row of a warp: in vectors, then one by one."""

    vector_columns: int
    """Number of columns in a vector; 1: no column is left behind the last vector."""
    rounds_once: bool
    """Whether product and sum are rounded once behind the last vector, too, as within vectors."""

    def scalar_from(self, width: int) -> int:
        """Return the first column of a row that is behind the last vector, or the width."""
        return width - width % self.vector_columns


_LOOPS: Final = (Loop(1, True), *(Loop(2**n, once) for n in range(2, 7) for once in (True, False)))
"""Loops that compilers may make: vectors of 128 bits have 8 columns, those of 256 bits 16."""


@cache
def on_cells() -> bool:
    """Return whether the installed OpenCV rounds positions to 1/32 pixel; tried with a third."""
    import cv2

    ramp = np.arange(64, dtype=np.float32).reshape(1, 64)
    third = np.array([[1, 0, -1 / 3], [0, 1, 0]])
    return bool(abs(cv2.warpAffine(ramp, third, (64, 1))[0, 32] - (32 + 1 / 3)) > 1e-3)


def invert(matrix: np.ndarray) -> np.ndarray:
    """Return the inverse of an affine 3x3 matrix, float64, in the order of OpenCV's operations."""
    # Plain numbers, not arrays, for speed: this runs for each sample.
    (a, b, c), (d, e, f), _ = np.asarray(matrix, np.float64).tolist()
    by = 1 / (a * e - b * d)
    a, b, d, e = e * by, b * -by, d * -by, a * by
    return np.array([[a, b, -a * c - b * f], [d, e, -d * c - e * f], [0, 0, 1]])


def cells_of_matrix(
    inverse: Tensor, size: tuple[int, int], *, nearest: bool
) -> tuple[Tensor, Tensor]:
    """Return the rows and columns that output pixels come from, int64 ``[n, height, width]``.

    ``inverse``: float64 matrices ``[n, 3, 3]``. Units are pixels if ``nearest``, else 1/32 pixels.
    """
    y = torch.arange(size[0], device=inverse.device, dtype=inverse.dtype)[:, None]
    x = torch.arange(size[1], device=inverse.device, dtype=inverse.dtype)[None, :]
    m = inverse[:, :, :, None, None]
    # Half of what the shift below cuts off.
    half = _AFFINE // 2 if nearest else _AFFINE // CELLS // 2
    shift = 10 if nearest else 10 - _BITS

    def line(row: int) -> Tensor:
        start = ((m[:, row, 1] * y + m[:, row, 2]) * _AFFINE).round()
        found = start + half + (m[:, row, 0] * x * _AFFINE).round()
        return found.clamp(-_FAR_CELLS * _AFFINE, _FAR_CELLS * _AFFINE).long() >> shift

    return line(1), line(0)


def sample_cells(
    images: Tensor, rows: Tensor, columns: Tensor, interpolation: int, mode: int, fill: Tensor
) -> Tensor:
    """Return the values ``[n, h, w, C]`` at positions in 1/32 pixels; for NEAREST, in whole pixels.

    ``rows`` and ``columns`` are int64 ``[n, h, w]``, also outside the image.
    """
    if interpolation == NEAREST:
        return read(images, rows, columns, mode, fill)
    y, x = rows >> _BITS, columns >> _BITS
    part = (rows & (CELLS - 1)) * CELLS + (columns & (CELLS - 1))
    # OpenCV averages other integers in float32.
    whole = images.dtype == torch.uint8
    table = _weights(whole, images.device)
    sums = torch.float64 if images.dtype == torch.float64 else table.dtype
    total = torch.zeros((), dtype=sums, device=images.device)
    for tap in range(4):
        pixels = read(images, y + tap // 2, x + tap % 2, mode, fill)
        weight = table[tap].index_select(0, part.view(-1)).view(part.shape)
        total = total + pixels.to(sums) * weight.unsqueeze(-1)
    if images.is_floating_point():
        return total.to(images.dtype)
    rounded = (total + (1 << (_WARP_BITS - 1))) >> _WARP_BITS if whole else total.round()
    limits = torch.iinfo(images.dtype)
    return rounded.clamp(limits.min, limits.max).to(images.dtype)


@cache
def _weights(whole: bool, device: torch.device) -> Tensor:
    """Return the weights of the four neighbours for each position in a pixel, ``[4, 1024]``."""
    part = np.arange(CELLS, dtype=np.float32) / np.float32(CELLS)
    line = np.stack([1 - part, part], -1)
    table = (line[:, None, :, None] * line[None, :, None, :]).reshape(-1, 4).T
    if whole:
        table = np.rint(table * (1 << _WARP_BITS)).astype(np.int32)
    return torch.from_numpy(table.copy()).to(device)


@cache
def loop() -> Loop:
    """Return how the installed OpenCV goes through a row; it is found by a warp of a ramp.

    A ramp that is read linearly gives the position at which it is read, to the last bit.
    """
    import cv2

    if on_cells():
        return _LOOPS[0]
    height, width = size = 16, 63
    ramp = np.tile(np.arange(128, dtype=np.float32), (height, 1))
    inverse = np.array([[0.7, 0.3, 10.1], [0, 1, 0], [0, 0, 1]])
    flags = cv2.INTER_LINEAR | cv2.WARP_INVERSE_MAP
    seen = torch.from_numpy(cv2.warpAffine(ramp, inverse[:2], (width, height), flags=flags))
    one = torch.from_numpy(inverse.astype(np.float32))[None]

    def misses(known: Loop) -> int:
        how = (known.scalar_from(width), known.rounds_once)
        return int((_positions(one, size, *how)[1][0] != seen).sum())

    return min(_LOOPS, key=misses)


@cache
def blends_alike() -> bool:
    """Return whether the installed OpenCV blends neighbours in noise of bytes as the device does.

    On CPUs that multiply and add in two instructions it may be a level off in some pixels.
    """
    import cv2

    if on_cells():
        return True
    size = 64, 96
    noise = np.random.default_rng(0).integers(0, 256, (*size, 3), np.uint8)
    matrix = np.array([[0.8, 0.3, 2.6], [-0.3, 0.9, 4.7], [0, 0, 1]])
    wanted = cv2.warpAffine(noise, matrix[:2], size[::-1], flags=cv2.INTER_LINEAR)
    inverse = torch.from_numpy(invert(matrix).astype(np.float32))[None]
    columns = loop().scalar_from(size[1]), loop().rounds_once
    where = _positions(inverse, size, *columns)
    black = torch.zeros(1, 3)
    found = sample(torch.from_numpy(noise)[None], *where, LINEAR, cv2.BORDER_CONSTANT, black)[0]
    return bool((found.numpy() == wanted).all())


def _warped_shape(transform: Transform, params: Values, shape: Shape) -> Shape:
    size = params.get("output_shape", shape[:2])
    return round(float(size[0])), round(float(size[1])), *shape[2:]


def _is_close(matrix: np.ndarray) -> bool:
    """Return whether a matrix is near the identity, as the slower ``np.allclose`` says it."""
    return all(
        abs(value - (row == column)) <= 1e-8 + 1e-5 * (row == column)
        for row, values in enumerate(matrix.tolist())
        for column, value in enumerate(values)
    )


def _encode_warp(
    transform: Transform, params: Values, shape: Shape, dtype: DType
) -> Encoded | None:
    fills = encode_fills(transform, shape)
    kinds = transform.interpolation, transform.mask_interpolation
    if fills is None or not KNOWN.issuperset(kinds) or transform.border_mode not in MODES:
        return None
    matrix = np.asarray(params["matrix"], np.float64)
    # Albumentations returns the image itself if the matrix is close to the identity.
    matrix = _IDENTITY if _is_close(matrix) else matrix
    (a, b, _), (d, e, _), _ = matrix.tolist()
    singular = abs(a * e - b * d) < 1e-12
    crops = type(transform).__name__ == "Rotate" and transform.crop_border
    if singular or crops:
        return None
    exact = invert(matrix)
    size = _warped_shape(transform, params, shape)[:2]
    static = (
        ("interpolation", int(transform.interpolation)),
        ("mask_interpolation", int(transform.mask_interpolation)),
        ("border", int(transform.border_mode)),
        ("cells", on_cells()),
        ("size", size),
        ("scalar_from", loop().scalar_from(size[1])),
        ("rounds_once", loop().rounds_once),
    )
    return Encoded(static, {"inverse": exact.astype(np.float32), "exact": exact, **fills})


def _positions(
    inverse: Tensor, size: tuple[int, int], scalar_from: int, rounds_once: bool
) -> tuple[Tensor, Tensor]:
    """Return where each output pixel comes from: rows and columns, float32 ``[n, height, width]``.

    The columns are ``m00 x + (m01 y + m02)`` in float32, the first product and sum rounded once,
    as in the vectors of OpenCV 5 on CPUs that multiply and add in one instruction. Behind the last
    vector, from the column ``scalar_from`` on, they are ``(m00 x + m01 y) + m02``; there the first
    product and sum are rounded once only if ``rounds_once``.
    """
    y = torch.arange(size[0], device=inverse.device, dtype=inverse.dtype)[:, None]
    x = torch.arange(size[1], device=inverse.device, dtype=torch.float64)[None, :]
    m = inverse[:, :, :, None, None]

    def line(row: int) -> Tensor:
        across, down, start = m[:, row].unbind(1)
        # The product of two float32 numbers is exact in float64.
        found = (across.double() * x + (down * y + start).double()).float()
        if scalar_from < size[1]:
            products = across.double() * x[:, scalar_from:]
            products = products if rounds_once else products.float().double()
            found[..., scalar_from:] = (products + (down * y).double()).float() + start
        return torch.nan_to_num(found, nan=0.0).clamp(-_FAR, _FAR)

    return line(1), line(0)


def sample(
    images: Tensor,
    rows: Tensor,
    columns: Tensor,
    interpolation: int,
    mode: int,
    fill: Tensor,
) -> Tensor:
    """Return the values ``[n, h, w, C]`` between the pixels, as OpenCV 5 does: without a grid.

    ``rows`` and ``columns`` are float positions in pixels, also outside the image.
    """
    if interpolation == NEAREST:
        return read(images, rows.round().long(), columns.round().long(), mode, fill)
    y, x = rows.floor(), columns.floor()
    down, across = (rows - y).unsqueeze(-1), (columns - x).unsqueeze(-1)
    y, x = y.long(), x.long()

    def tap(dy: int, dx: int) -> Tensor:
        return read(images, y + dy, x + dx, mode, fill).float()

    upper = torch.lerp(tap(0, 0), tap(0, 1), across)
    lower = torch.lerp(tap(1, 0), tap(1, 1), across)
    out = torch.lerp(upper, lower, down)
    return (out if images.is_floating_point() else out.round()).to(images.dtype)


def _warp(setting: str, fill_name: str, batch: Tensor, static: Values, arrays: Arrays) -> Tensor:
    images = as_channels_last(batch)
    fill = fill_like(images, arrays, fill_name)
    size, kind = static["size"], static[setting]
    # OpenCV 5, too, warps these dtypes, and images of two channels, as OpenCV 4 does.
    still_on_cells = images.dtype in _STILL_ON_CELLS or images.shape[-1] == 2
    if static["cells"] or still_on_cells:
        places = cells_of_matrix(arrays["exact"], size, nearest=kind == NEAREST)
        out = sample_cells(images, *places, kind, static["border"], fill)
    else:
        how = static["scalar_from"], static["rounds_once"]
        places = _positions(arrays["inverse"], size, *how)
        out = sample(images, *places, kind, static["border"], fill)
    return out.view(*out.shape[:3], *batch.shape[3:])


OPS = (
    *(
        DeviceOp(name, _encode_symmetry, _symmetry, _symmetry, out_shape=_symmetry_shape)
        for name in ("NoOp", *_FLIPS, "RandomRotate90", "D4")
    ),
    *(
        DeviceOp(
            name,
            _encode_window,
            partial(_cut, "fill"),
            partial(_cut, "fill_mask"),
            out_shape=_window_shape,
        )
        for name in ("RandomCrop", "CenterCrop", "PadIfNeeded")
    ),
    *(
        DeviceOp(
            name,
            _encode_resize,
            partial(_resample, "interpolation"),
            partial(_resample, "mask_interpolation"),
            out_shape=lambda transform, _params, shape: (*_resized_size(transform), *shape[2:]),
        )
        for name in ("Resize", "RandomResizedCrop", "RandomSizedCrop")
    ),
    *(
        DeviceOp(
            name,
            _encode_warp,
            partial(_warp, "interpolation", "fill"),
            partial(_warp, "mask_interpolation", "fill_mask"),
            out_shape=_warped_shape,
        )
        for name in ("Affine", "Rotate", "ShiftScaleRotate")
    ),
)
"""Device forms that move pixels. Symmetries, windows and reading the nearest pixel are exact for
every dtype. A linear resize of uint8 is exact, or off by one level in a few pixels if it enlarges;
one of float32 agrees to 1e-5. A linear warp of uint8 is exact with OpenCV 4, and at most a level
off with OpenCV 5."""
