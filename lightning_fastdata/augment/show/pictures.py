"""A picture of what a pipeline makes of an image here, beside what Albumentations makes of it."""

from __future__ import annotations

import copy
import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np
import torch

from lightning_fastdata.augment.mixing.transform import MixedTransform
from lightning_fastdata.augment.pipeline.bounds import levels_per_unit
from lightning_fastdata.augment.pipeline.plan import redrawn
from lightning_fastdata.augment.pipeline.tree import list_leaves
from lightning_fastdata.augment.show.grid import draw_page, normalized_by, three_channels, to_levels
from lightning_fastdata.augment.transform import BatchTransform, as_batch_transform
from lightning_fastdata.errors import DatasetError, OptionsError, TransformError, require
from lightning_fastdata.host.machine import import_by_name
from lightning_fastdata.types import SampleKey

if TYPE_CHECKING:
    from collections.abc import Sequence

    from PIL.Image import Image

    from lightning_fastdata.augment.pipeline.tree import Node

DIFFERENCE_GAIN: Final = 100
"""Brightness of one level in the picture of the differences."""
_MASK_MODES: Final = frozenset({"L", "P", "I", "I;16"})
_HEADS: Final = ("original", "Albumentations", "ours", f"difference, times {DIFFERENCE_GAIN}")


class ShownPipeline(NamedTuple):
    """Several draws of a pipeline, as a picture and in words."""

    page: Image
    captions: list[str]
    """One for each draw, and a note on operations that draw numbers of their own."""
    explained: str
    """Where each operation runs, and why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ShownDraw:
    """One draw of a pipeline, both ways, as pictures: uint8 ``[H, W, 3]``."""

    theirs: np.ndarray
    ours: np.ndarray
    difference: np.ndarray
    """Absolute difference, times ``DIFFERENCE_GAIN``."""
    largest: float
    """Largest difference of two values in levels; 255 span the range of an image."""
    equal: float
    """Share of equal values, 0..1."""
    on_device: tuple[str, ...]
    """Operations that were deferred to the device, in order."""
    own_numbers: tuple[str, ...] = ()
    """Those of them that draw numbers of their own for every pixel there."""
    masks: tuple[np.ndarray, np.ndarray] | None = None
    """Albumentations' mask and ours, ``[H, W]``; None: there is none."""

    def caption(self) -> str:
        """Return the draw in one line."""
        device = ", ".join(self.on_device) or "nothing"
        share = 1.0 if self.masks is None else float((self.masks[0] == self.masks[1]).mean())
        equal = "equal" if share == 1 else f"{share:.4%} equal"
        mask = "" if self.masks is None else f"; mask {equal}"
        return f"{self._compared()}{mask}; on device: {device}"

    def _compared(self) -> str:
        if self.largest == 0:
            return "equal"
        if self.own_numbers:
            return f"other pixels: {', '.join(self.own_numbers)} drew its own numbers"
        levels = "1 level" if self.largest == 1 else f"{self.largest:.3g} levels"
        return f"at most {levels} off, {self.equal:.4%} equal"


def show_pipeline(
    spec: str, image: str | Path, mask: str | Path | None = None, *, seed: int = 0, draws: int = 4
) -> ShownPipeline:
    """Return draws of a pipeline on an image file, as :func:`load_pipeline` finds it.

    Raises:
        DatasetError: a file is missing or no image, or the mask has another size than the image.
        TransformError: there is no such pipeline, or it raised.
        OptionsError: ``draws`` is below 1.
    """
    require("PIL", extra="images", what="A picture of a pipeline")
    pipeline = load_pipeline(spec)
    original = _read(image, "image", frozenset({"RGB"}), "RGB")
    drawn_on = None if mask is None else read_mask(mask, original.shape[:2])
    shown = show_draws(pipeline, original, mask=drawn_on, seed=seed, draws=draws)
    own = ", ".join(own_ways(pipeline))
    note = f"The same distribution, not the same pixels: {own}." if own else ""
    captions = [f"draw {number}: {one.caption()}" for number, one in enumerate(shown)]
    return ShownPipeline(
        page=draw_grid(original, shown, mask=drawn_on, note=note),
        captions=[*captions, note] if note else captions,
        explained=as_batch_transform(pipeline).explain(),
    )


def load_pipeline(spec: str) -> Node:
    """Return the pipeline that ``package.module:name`` or ``file.py:name`` names.

    Of ``mixed(...)`` it is the pipeline before the mixing, which needs more than one image.

    Raises:
        TransformError: there is no such module or name, or it is no ``A.Compose``.
    """
    os.environ.setdefault("NO_ALBUMENTATIONS_UPDATE", "1")
    module_name, _, name = spec.rpartition(":")
    if not module_name or not name:
        raise TransformError(
            f"{spec!r} does not say where the pipeline is. Write MODULE:NAME, for example "
            "train:augment for `augment = A.Compose([...])` in train.py."
        )
    require("albumentations", extra="augment", what="A pipeline")
    import albumentations

    found: object = import_by_name(module_name, "the pipeline")
    for part in name.split("."):
        if not hasattr(found, part):
            have = [k for k, v in vars(found).items() if isinstance(v, albumentations.Compose)]
            held = ", ".join(have) or "no A.Compose"
            raise TransformError(f"{module_name} has no {name!r}. It holds: {held}.")
        found = getattr(found, part)
    if isinstance(found, MixedTransform) and found.pipeline is not None:
        return found.pipeline
    known = albumentations.Compose | albumentations.BasicTransform | BatchTransform
    if not isinstance(found, known):
        raise TransformError(
            f"{spec} is {type(found).__name__}, not an albumentations Compose. Name a variable "
            "that holds the pipeline itself; a function that makes it is not called."
        )
    return found


def _read(path: str | Path, what: str, modes: frozenset[str], other: str) -> np.ndarray:
    """Return an image file in one of these modes of PIL, else converted to the other."""
    from PIL import Image, UnidentifiedImageError

    try:
        with Image.open(path) as image:
            return np.array(image if image.mode in modes else image.convert(other))
    except UnidentifiedImageError as error:
        raise DatasetError(f"{path} is not an image that Pillow can read.") from error
    except MemoryError:
        raise
    except Exception as error:  # Pillow's parsers let through what they met
        raise DatasetError(f"The {what} {path} cannot be read: {error}.") from error


def read_mask(path: str | Path, size: tuple[int, ...]) -> np.ndarray:
    """Return an image file as a mask: its gray values or numbers of colours, ``[H, W]``.

    Raises:
        DatasetError: there is no such file, it is no image, or it has another size.
    """
    mask = _read(path, "mask", _MASK_MODES, "L")
    if mask.shape != size:
        raise DatasetError(
            f"The mask {path} has {mask.shape[0]} x {mask.shape[1]} pixels, and the image "
            f"{size[0]} x {size[1]}. Give the image that it belongs to with --image."
        )
    return mask


def show_draws(
    compose: Node,
    image: np.ndarray,
    *,
    mask: np.ndarray | None = None,
    seed: int = 0,
    draws: int = 4,
) -> tuple[ShownDraw, ...]:
    """Draw a pipeline several times for one image, and carry each draw out both ways.

    Args:
        compose: an ``A.Compose``, or a single transform.
        image: uint8 or float32 ``[H, W, C]``.
        mask: its mask, ``[H, W]`` of any integer dtype; None: no mask.
        seed: draw ``i`` is what a run of this seed makes of sample 0 in epoch ``i``.
        draws: how many.

    Raises:
        OptionsError: ``draws`` is below 1.
        TransformError: the pipeline needs more than that (a mask, metadata), or raised.
    """
    if draws < 1:
        raise OptionsError(f"draws is {draws}; ask for at least 1.")
    transform = _pipeline_transform(compose)
    unit = levels_per_unit(transform.compose, image.dtype)
    own = own_ways(compose)
    given = {"image": image} if mask is None else {"image": image, "mask": mask}
    shown = []
    for draw in range(draws):
        both, names = _both_ways(transform, given, SampleKey(seed, draw, 0))
        theirs, ours = (one["image"] for one in both)
        gap = np.abs(theirs.astype(np.float64) - ours) * unit
        gap[gap < 1e-3] = 0
        pictures = [as_picture(values, transform.compose) for values in (theirs, ours)]
        levels = np.abs(pictures[0].astype(np.int32) - pictures[1]) * DIFFERENCE_GAIN
        shown.append(
            ShownDraw(
                theirs=pictures[0],
                ours=pictures[1],
                difference=levels.clip(0, 255).astype(np.uint8),
                largest=float(gap.max(initial=0)),
                equal=float((gap == 0).mean()),
                on_device=names,
                own_numbers=tuple(dict.fromkeys(name for name in names if name in own)),
                masks=None if mask is None else (both[0]["mask"], both[1]["mask"]),
            )
        )
    return tuple(shown)


def _pipeline_transform(compose: Node) -> BatchTransform:
    transform = as_batch_transform(compose)
    if not isinstance(transform, BatchTransform):
        raise TransformError(f"{compose!r} is not an albumentations Compose.")
    return transform


def own_ways(compose: Node) -> tuple[str, ...]:
    """Return the operations whose pixels on the device have only the same distribution."""
    transform = _pipeline_transform(compose)
    return redrawn(transform.compose, transform.plan, transform.ops)


def _both_ways(
    transform: BatchTransform, given: dict[str, np.ndarray], key: SampleKey
) -> tuple[tuple[dict[str, np.ndarray], dict[str, np.ndarray]], tuple[str, ...]]:
    """Return what Albumentations makes of an image and its mask, what we do, and on the device."""
    whole, part = (transform.in_worker(on_device=on_device) for on_device in (False, True))
    nothing: dict[str, list[object]] = {
        name: []
        for processor in transform.compose.processors.values()
        for name in (processor.default_data_name, *(processor.params.label_fields or ()))
    }
    try:
        theirs, _ = whole(copy.deepcopy({**given, **nothing}), key)
        sample, tape = part(copy.deepcopy({**given, **nothing}), key)
    except Exception as error:
        # Whatever a transform of the user's raises is about the image that it was shown.
        needs = "" if "mask" in given else " If it needs a mask, give one with --mask."
        raise TransformError(
            f"The pipeline raised {type(error).__name__} on this image: {error}.{needs} Else show "
            "a pipeline that can do with an image, or a larger image with --image."
        ) from error
    batch = {name: torch.as_tensor(np.asarray(sample[name])).unsqueeze(0) for name in given}
    done = transform.apply(batch, part.collate([tape]))
    ops = tape["image"].ops if tape is not None and "image" in tape else ()
    ours = {name: done[name][0].cpu().numpy() for name in given}
    return ({name: np.asarray(theirs[name]) for name in given}, ours), tuple(op.name for op in ops)


def as_picture(values: np.ndarray, compose: Node) -> np.ndarray:
    """Return what a pipeline yields as a picture that people can look at: uint8 ``[H, W, 3]``.

    ``ToTensorV2`` and ``Normalize`` are undone. Of more than three channels the first are shown.
    """
    names = {type(leaf.transform).__name__: leaf.transform for leaf in list_leaves(compose)}
    picture = values.transpose(1, 2, 0) if "ToTensorV2" in names else values
    picture = picture[..., None] if picture.ndim == 2 else picture
    if picture.dtype != np.uint8 and "Normalize" in names:
        way = normalized_by(names["Normalize"])
        low, high = picture.min(), picture.max()
        picture = (picture - low) / max(high - low, 1e-6) if way is None else way.undone(picture)
    return three_channels(picture if picture.dtype == np.uint8 else to_levels(picture))


def draw_grid(
    original: np.ndarray,
    shown: Sequence[ShownDraw],
    *,
    mask: np.ndarray | None = None,
    note: str = "",
) -> Image:
    """Return a picture with one row per draw: original, Albumentations', ours, and difference.

    The original is uint8 or float32 in [0, 1] ``[H, W, C]``. Masks are drawn as outlines, and the
    note below all rows.
    """
    original = three_channels(original if original.dtype == np.uint8 else to_levels(original))
    rows = []
    for one in shown:
        theirs, ours = one.masks or (None, None)
        rows.append(
            [(original, mask), (one.theirs, theirs), (one.ours, ours), (one.difference, None)]
        )
    captions = [f"{number}: {one.caption()}" for number, one in enumerate(shown)]
    return draw_page(_HEADS, rows, captions, note)
