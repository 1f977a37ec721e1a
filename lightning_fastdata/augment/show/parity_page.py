"""The page that says, for every operation, where it runs and how far its pixels are off."""

from __future__ import annotations

import importlib.metadata
from typing import TYPE_CHECKING, Final

import numpy as np

from lightning_fastdata.augment.ops import DEVICE_OPS
from lightning_fastdata.augment.show.parity import examples, operation_parity

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from lightning_fastdata.augment.show.parity import OperationParity, PixelParity

SIDE_PX: Final = 160
"""Height and width of the images that operations are compared on; square for quarter turns."""
_SLOW_SIDE_PX: Final = 48
_SLOW: Final = frozenset({"PiecewiseAffine"})
"""Albumentations computes their field in a Python loop over the pixels."""
_OF_GRAY: Final = frozenset({"ToRGB"})
"""Take images of one channel."""

_ABSTRACT: Final = frozenset({"BasicTransform", "DualTransform", "ImageOnlyTransform"})
_NAME_COLUMNS: Final = 48

_HEAD: Final = """\
# How far each operation is from Albumentations

Written by `fastdata augment-parity --markdown docs/parity.md`, with
{versions}.
Other versions of OpenCV may round differently: run it on your machine without `--markdown`.

Each operation ran {draws} times on {pictures} photographs of {side} x {side} pixels, with the same
draws by Albumentations and by the form that runs on the batch, here on the CPU. Differences are in
levels, of which 255 span the range of an image, for float32 too. *Equal* is the share of values
less than a thousandth of a level apart. An operation that is "drawn there" keeps the distribution
of Albumentations' result and not its pixels; how that is checked is in
[augmentation.md](augmentation.md#the-same-distribution).

*Runs on* is meant for images of one size. In a pipeline it depends on the neighbours: what comes
before the operation that makes all images one size stays in the worker. `print(data.explain())`
tells.

| operation | arguments | runs on | uint8: max | mean | equal | float32: max | mean | equal |
| --- | --- | --- | --- | --- | --- | --- | --- | --- |
"""
_TAIL: Final = """
"CPU" means that Albumentations itself makes such images, which are equal for that reason.

Not listed, and always in the worker: {others}.
"""


def read_pixel_versions() -> dict[str, str]:
    """Return the versions of the libraries that decide about pixels."""
    names = ("albumentations", "albucore", "numpy", "torch")
    found = {name: importlib.metadata.version(name) for name in names}
    import cv2

    return {"OpenCV": cv2.__version__, **found}


def squares(images: Sequence[np.ndarray], side: int) -> list[np.ndarray]:
    """Return a square cut from the middle of each image ``[H, W, C]``."""
    found = []
    for image in images:
        top, left = (image.shape[0] - side) // 2, (image.shape[1] - side) // 2
        found.append(np.ascontiguousarray(image[top : top + side, left : left + side]))
    return found


def measure_all(images: Sequence[np.ndarray], *, draws: int = 2) -> Iterator[OperationParity]:
    """Yield the parity of every operation with a device form, in alphabetical order.

    Args:
        images: uint8 ``[H, W, 3]``, no side shorter than ``SIDE_PX``.
        draws: how often each image is transformed.
    """
    wide, small = squares(images, SIDE_PX), squares(images[:2], _SLOW_SIDE_PX)
    for name, arguments in examples():
        shown = small if name in _SLOW else wide
        if name in _OF_GRAY:
            shown = [image[..., :1] for image in shown]
        yield operation_parity(name, arguments, shown, draws=draws)


def table_row(found: OperationParity) -> tuple[str, ...]:
    """Return the cells of one operation: name, arguments, place, and three for each dtype."""
    cells = [_cells(one, found.same_law) for one in (found.from_bytes, found.from_floats)]
    return (found.name, found.arguments, found.where, *cells[0], *cells[1])


def _cells(parity: PixelParity, same_law: bool) -> tuple[str, str, str]:
    if parity.on_device == 0:
        return "CPU", "", ""
    if same_law:
        return "drawn there", "", ""
    if parity.largest == 0:
        return "0", "0", "100 %"
    # Rounded down: only what is equal is called so.
    share = f"{np.floor(parity.equal * 1e6) / 1e4:.4f} %"
    return f"{parity.largest:.2g}", f"{parity.mean:.1g}", share


def markdown(
    rows: Sequence[OperationParity],
    *,
    versions: Mapping[str, str],
    others: Sequence[str],
    pictures: int,
    draws: int,
) -> str:
    """Return the page.

    Args:
        rows: what was measured.
        versions: package name -> version of what it was measured with.
        others: transforms of Albumentations without a device form.
        pictures: photographs per draw.
        draws: draws per photograph.
    """
    head = _HEAD.format(
        versions=", ".join(f"{name} {version}" for name, version in versions.items()),
        draws=draws,
        pictures=pictures,
        side=SIDE_PX,
    )
    lines = []
    for row in rows:
        name, arguments, *cells = table_row(row)
        spoken = f"`{arguments}`" if arguments else ""
        lines.append("| " + " | ".join([f"`{name}`", spoken, *cells]) + " |")
    tail = _TAIL.format(others=", ".join(f"`{name}`" for name in others))
    return head + "\n".join(lines) + "\n" + tail


def without_device_form() -> list[str]:
    """Return the names of Albumentations' transforms that always run in the worker."""
    import albumentations

    for_volumes = {"CubicSymmetry"}
    return sorted(
        name
        for name, one in vars(albumentations).items()
        if isinstance(one, type)
        and issubclass(one, albumentations.BasicTransform)
        and not {name, one.__name__} & {*DEVICE_OPS, *_ABSTRACT, *for_volumes}
        and "3D" not in name
    )


def plain(rows: Sequence[OperationParity]) -> Iterator[str]:
    """Yield the table as lines of text in columns."""
    heads = ("operation", "runs on", "uint8: max", "mean", "equal", "float32: max", "mean", "equal")
    table: list[tuple[str, ...]] = [heads]
    for row in rows:
        name, arguments, *cells = table_row(row)
        table.append((f"{name}({arguments})"[:_NAME_COLUMNS], *cells))
    widths = [max(len(line[column]) for line in table) for column in range(len(heads))]
    for line in table:
        cells = [cell.rjust(width) for cell, width in zip(line[1:], widths[1:], strict=True)]
        yield "  ".join([line[0].ljust(widths[0]), *cells]).rstrip()
