"""How far each operation's pixels on the device are from Albumentations' own, on real images.

    python benchmarks/parity.py [--draws 2] [--write docs/parity.md]

Prints a table, or writes the page with it. The tests measure with the same functions.
"""

from __future__ import annotations

import argparse
import copy
import importlib.metadata
import os
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import torch

from demo.photos import PHOTOGRAPHS, open_photograph
from lightning_fastdata.augment.albumentations.plan import analyse, list_leaves
from lightning_fastdata.augment.albumentations.tape import Recorder, refusal
from lightning_fastdata.augment.ops import DEVICE_OPS
from lightning_fastdata.augment.replay.program import compile_tapes
from lightning_fastdata.augment.replay.torch import replay
from lightning_fastdata.augment.stage_transform import plain_tensors
from lightning_fastdata.errors import TransformError
from lightning_fastdata.randomness.seeds import reseeder
from lightning_fastdata.types import SampleKey

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

_SAME: Final = 1e-3
"""Levels: values that are closer are equal. float32 sums differ in the last bits."""
_EXAMPLES: Final[dict[str, tuple[dict[str, Any], ...]]] = {
    "Affine": (
        {"scale": (0.7, 1.3), "rotate": (-40, 40), "shear": (-9, 9)},
        {"rotate": (-40, 40), "interpolation": 0},
        {"rotate": (-40, 40), "border_mode": 4},
    ),
    "CenterCrop": ({"height": 96, "width": 128},),
    "ColorJitter": ({}, {"hue": 0}),
    "Normalize": ({},),
    "PadIfNeeded": (
        {"min_height": 256, "min_width": 256, "border_mode": 4},
        {
            "min_height": None,
            "min_width": None,
            "pad_height_divisor": 64,
            "pad_width_divisor": 96,
        },
    ),
    "RandomBrightnessContrast": ({}, {"brightness_by_max": False}),
    "RandomCrop": ({"height": 96, "width": 128},),
    "RandomResizedCrop": ({"size": (128, 128)},),
    "RandomSizedCrop": ({"min_max_height": (60, 120), "size": (128, 128)},),
    "Resize": (
        {"height": 120, "width": 100},
        {"height": 300, "width": 260},
        {"height": 120, "width": 100, "interpolation": 0},
    ),
}
"""Arguments that an operation is measured with; the default ones where nothing is said."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PixelParity:
    """How far two sets of images are apart, in levels: 255 of them span the range of an image."""

    largest: float
    """Largest difference of two values; 0 if all are equal to a thousandth of a level."""
    mean: float
    """Mean absolute difference."""
    equal: float
    """Share of values that are equal to a thousandth of a level, 0..1."""
    on_device: float
    """Share of the images that the device form worked on, 0..1; Albumentations itself makes the
    others, which are equal for that reason."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OperationParity:
    """One operation with certain arguments, against Albumentations."""

    name: str
    """Class name of the transform."""
    arguments: str
    """What it was called with beside ``p=1``, as text; empty for the defaults."""
    where: str
    """``device`` or ``worker``, for images of one size."""
    from_bytes: PixelParity
    """On uint8 images."""
    from_floats: PixelParity
    """On float32 images in [0, 1]."""


def examples() -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the name and the arguments of every operation with a device form, once or more."""
    for name in sorted(DEVICE_OPS):
        for arguments in _EXAMPLES.get(name, ({},)):
            yield name, arguments


def make_example(name: str, arguments: dict[str, Any]) -> Any:
    """Return a transform of Albumentations that is always applied."""
    os.environ.setdefault("NO_ALBUMENTATIONS_UPDATE", "1")
    import albumentations

    with warnings.catch_warnings():
        # Some say that they are slow, or have got a new name.
        warnings.simplefilter("ignore", UserWarning)
        return getattr(albumentations, name)(**arguments, p=1)


def operation_parity(
    name: str, arguments: dict[str, Any], images: Sequence[np.ndarray], *, draws: int = 2
) -> OperationParity:
    """Compare one operation with Albumentations.

    Args:
        name: class name of the transform.
        arguments: what to call it with.
        images: uint8 ``[H, W, 3]``, all of one size.
        draws: how often each image is transformed.
    """
    transform = make_example(name, arguments)
    floats = [(image / 255).astype(np.float32) for image in images]
    plan = analyse(_compose(transform), DEVICE_OPS, size=images[0].shape[:2], refusal=refusal())
    return OperationParity(
        name=name,
        arguments=", ".join(f"{key}={value!r}" for key, value in arguments.items()),
        where="worker" if plan.placements[0].where == "worker" else "device",
        from_bytes=pixel_parity(transform, images, draws=draws),
        from_floats=pixel_parity(transform, floats, draws=draws),
    )


def levels_per_unit(compose, dtype) -> float | np.ndarray:
    """Return how many of 255 levels a difference of 1 in the output of a pipeline is.

    A number, or an array that can be multiplied with an output image.
    """
    unit: float | np.ndarray = 1.0 if dtype == np.uint8 else 255.0
    first = False
    for transform in (leaf.transform for leaf in list_leaves(compose)):
        name = type(transform).__name__
        first |= name == "ToTensorV2"
        if name == "Normalize" and transform.normalization == "standard":
            unit = 255.0 * np.asarray(transform.std, np.float64)
        else:
            unit = {"ToFloat": 255.0, "FromFloat": 1.0}.get(name, unit)
    return unit[:, None, None] if first and isinstance(unit, np.ndarray) and unit.ndim else unit


def pixel_parity(compose: Any, images: Sequence[np.ndarray], *, draws: int = 1) -> PixelParity:
    """Compare what a pipeline makes of images here with what the device forms make of them.

    Args:
        compose: an ``A.Compose`` or a single transform.
        images: uint8 or float32 ``[H, W, C]``, all of one size and dtype.
        draws: how often each image is transformed.

    Raises:
        TransformError: the two differ in shape or dtype.
    """
    compose = _compose(compose)
    unit = levels_per_unit(compose, images[0].dtype)
    largest = total = 0.0
    values = equal = on_device = 0
    for draw in range(draws):
        wanted, got, deferred = both_ways(compose, images, SampleKey(0, draw, 0))
        on_device += deferred
        for want, image in zip(wanted, got, strict=True):
            if want.shape != image.shape or want.dtype != image.dtype:
                raise TransformError(
                    f"The device form gives {image.dtype} {image.shape} where Albumentations gives "
                    f"{want.dtype} {want.shape}."
                )
            gap = np.abs(want.astype(np.float64) - image) * unit
            gap[gap < _SAME] = 0
            largest = max(largest, float(gap.max(initial=0)))
            total += float(gap.sum())
            equal += int((gap == 0).sum())
            values += gap.size
    return PixelParity(
        largest=largest,
        mean=total / max(values, 1),
        equal=equal / max(values, 1),
        on_device=on_device / (draws * len(images)),
    )


def both_ways(
    compose: Any, images: Sequence[np.ndarray], key: SampleKey
) -> tuple[list[np.ndarray], list[np.ndarray], int]:
    """Return the images by Albumentations alone and by device forms, with the same draws.

    Image ``i`` draws with ``key.index + i``. The third value is how many images the device forms
    worked on. The rest of the batch is Albumentations' own.
    """
    size = (int(images[0].shape[0]), int(images[0].shape[1]))
    compose = copy.deepcopy(compose)
    plan = analyse(compose, DEVICE_OPS, size=size, refusal=refusal(), dtype=images[0].dtype)
    recorder = Recorder(compose, plan, DEVICE_OPS)
    wanted, left, tapes = [], [], []
    for row, image in enumerate(images):
        own = key._replace(index=key.index + row)
        # Copies: Albumentations writes to a gray image that it equalizes.
        reseeder(compose)(own)
        wanted.append(np.asarray(compose(image=image.copy())["image"]))
        reseeder(recorder.compose)(own)
        result, tape = recorder({"image": image.copy()})
        left.append(torch.from_numpy(np.array(result["image"])))
        tapes.append(tape)
    deferred = sum(bool("image" in tape and tape["image"].ops) for tape in tapes)
    if not deferred:
        return wanted, [image.numpy() for image in left], 0
    draws = compile_tapes(tapes)
    with plain_tensors():
        batch = torch.stack(left)
        grayscale = batch.ndim == 3
        batch = replay(
            draws.programs["image"],
            draws.blob,
            batch.unsqueeze(-1) if grayscale else batch,
            DEVICE_OPS,
        )
    return wanted, list(batch.numpy()), deferred


def _compose(transform: Any) -> Any:
    import albumentations

    is_compose = isinstance(transform, albumentations.Compose)
    return transform if is_compose else albumentations.Compose([transform])


SIDE_PX: Final = 160
"""Height and width of the images that operations are compared on; square for quarter turns."""
_ABSTRACT: Final = frozenset({"BasicTransform", "DualTransform", "ImageOnlyTransform"})
_NAME_COLUMNS: Final = 48

_HEAD: Final = """\
# How far each operation is from Albumentations

Written by `python benchmarks/parity.py --write docs/parity.md`, with
{versions}.
Other versions of OpenCV may round differently: run it on your machine without `--write`.

Each operation ran {draws} times on {pictures} photographs of {side} x {side} pixels, with the same
draws by Albumentations and by the form that runs on the batch, here on the CPU. Differences are in
levels, of which 255 span the range of an image, for float32 too. *Equal* is the share of values
less than a thousandth of a level apart.

*Runs on* is meant for images of one size. In a pipeline it depends on the neighbours: what comes
before the operation that makes all images one size stays in the worker, and so does what is not
equal before an operation [that amplifies](augmentation.md#what-amplifies), which bounds whole
pipelines. `print(data.explain())` tells.

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
    wide = squares(images, SIDE_PX)
    for name, arguments in examples():
        yield operation_parity(name, arguments, wide, draws=draws)


def table_row(found: OperationParity) -> tuple[str, ...]:
    """Return the cells of one operation: name, arguments, place, and three for each dtype."""
    cells = [_cells(one) for one in (found.from_bytes, found.from_floats)]
    return (found.name, found.arguments, found.where, *cells[0], *cells[1])


def _cells(parity: PixelParity) -> tuple[str, str, str]:
    if parity.on_device == 0:
        return "CPU", "", ""
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


def main() -> None:
    """Measure every operation on the demo's photographs."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--draws", type=int, default=2, help="of each photograph per operation")
    parser.add_argument("--write", type=Path, help="file for the page; else it is printed plainly")
    options = parser.parse_args()
    photographs = [np.asarray(open_photograph(name)) for name in PHOTOGRAPHS]
    rows = list(measure_all(photographs, draws=options.draws))
    if options.write is None:
        print("\n".join(plain(rows)))
        return
    page = markdown(
        rows,
        versions=read_pixel_versions(),
        others=without_device_form(),
        pictures=len(photographs),
        draws=options.draws,
    )
    # What parity_v2.py has written there stays.
    old = options.write.read_text() if options.write.exists() else ""
    _, heading, rest = old.partition("\n## torchvision v2\n")
    options.write.write_text(page + heading + rest)


if __name__ == "__main__":
    main()
