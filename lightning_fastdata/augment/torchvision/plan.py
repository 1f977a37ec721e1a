"""Where each transform of a v2 pipeline runs, and why; decided before any sample.

The rules, in order:

1. Everything up to and including the transform that makes the image size the same for all samples
   (``RandomResizedCrop``, ``CenterCrop``, ...) runs in the worker: images of a dataset may vary in
   size. A pipeline without such a transform can only be collated when they have one size already,
   so nothing is held back for it.
2. What is not torchvision's own, draws numbers for pixels, or makes each image another size runs in
   the worker on real pixels, and so does what comes before it, in samples that take it.
3. What changes the size, channels or dtype of an image runs on the device only where every sample
   takes it, and where nothing behind it may need pixels: a batch is one tensor.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Literal, TypeAlias

import torch
from torchvision import tv_tensors
from torchvision.transforms import v2

from lightning_fastdata.augment.pipeline.plan import OpPlacement
from lightning_fastdata.augment.torchvision.pipeline import Leaf, is_own, leaves_of

if TYPE_CHECKING:
    from collections.abc import Sequence

Kind: TypeAlias = Literal["noted", "policy", "types", "targets", "masks", "pixels"]
"""What a transform is to the recorder. ``noted``: it is written down for the batch. ``policy``: so
are the operations that it chooses. ``types``: it changes the type of a tensor. ``targets``: it
leaves pixels alone. ``masks``: so it does, but for masks. ``pixels``: it needs them."""

_KEEP_FORM: Final = frozenset(
    {
        *("ColorJitter", "GaussianBlur", "Normalize", "RandomAdjustSharpness", "RandomAffine"),
        *("RandomAutocontrast", "RandomChannelPermutation", "RandomEqualize", "RandomErasing"),
        *("RandomGrayscale", "RandomHorizontalFlip", "RandomInvert", "RandomPerspective"),
        *("RandomPhotometricDistort", "RandomPosterize", "RandomRotation", "RandomSolarize"),
        "RandomVerticalFlip",
    }
)
_CHANGE_FORM: Final = frozenset(
    {
        *("CenterCrop", "ConvertImageDtype", "Grayscale", "Pad", "RGB", "RandomCrop"),
        *("RandomResizedCrop", "Resize", "ToDtype"),
    }
)
"""Transforms after which all images of one form have one other form."""
SIZE_BY_SIZE: Final = frozenset({"Pad", "Resize"})
"""Those of them after which the size depends on the size before."""
_KEEP_SIZE: Final = frozenset({"ConvertImageDtype", "Grayscale", "RGB", "ToDtype"})
_POLICIES: Final = frozenset({"AutoAugment", "RandAugment", "TrivialAugmentWide"})
_TYPES: Final = frozenset({"ToImage", "ToPureTensor", "PILToTensor", "ToTensor"})
_FROM_PIL: Final = _TYPES - {"ToPureTensor"}
_TARGETS: Final = frozenset(
    {
        *("ClampBoundingBoxes", "ClampKeyPoints", "ConvertBoundingBoxFormat", "Identity"),
        *("SetClampingMode", "SetKeyPointsClampingMode"),
    }
)
_MASKS: Final = frozenset({"SanitizeBoundingBoxes", "SanitizeKeyPoints"})
_VARY_SIZE: Final = frozenset(
    {
        *("FiveCrop", "RandomIoUCrop", "RandomResize", "RandomShortestSize", "RandomZoomOut"),
        *("ScaleJitter", "TenCrop"),
    }
)
_DRAW_PIXELS: Final = frozenset({"ElasticTransform", "GaussianNoise"})
NEED_BOXES: Final = frozenset({*_TARGETS, *_MASKS, "RandomIoUCrop"} - {"Identity"})
"""Transforms that make no sense without boxes or keypoints."""
MOVES: Final = frozenset(
    {
        *("CenterCrop", "ElasticTransform", "FiveCrop", "Pad", "RandomAffine", "RandomCrop"),
        *("RandomHorizontalFlip", "RandomIoUCrop", "RandomPerspective", "RandomResize"),
        *("RandomResizedCrop", "RandomRotation", "RandomShortestSize", "RandomVerticalFlip"),
        *("RandomZoomOut", "Resize", "ScaleJitter", "TenCrop"),
    }
)
"""Transforms that move the pixels of an image."""


LEAVE_MASKS: Final = _KEEP_FORM - MOVES
"""Transforms that pass masks through as they are."""
NEARLY: Final = frozenset({"RandomResizedCrop", "Resize"})
"""Transforms whose form for batches has not always torchvision's last bit of floats."""
_ROUND: Final = _POLICIES | {"RandomEqualize", "RandomPosterize", "RandomSolarize"}
"""Transforms that show it; so do those to whole numbers."""
_ALONE: Final = (
    "torchvision's own kernel on samples with equal parameters: up to a call for each sample"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Where every transform of one pipeline runs."""

    leaves: tuple[Leaf, ...]
    placements: tuple[OpPlacement, ...]
    """One for each of them."""
    boundary: int
    """Number of the last one that runs before anything is noted, or -1."""

    @property
    def defers(self) -> bool:
        """Whether any transform may run on the device."""
        return any(placed.where != "worker" for placed in self.placements)


def kind_of(transform: Any) -> Kind:
    """Return what a transform is to the recorder."""
    name = type(transform).__name__
    if not is_own(transform):
        return "pixels"
    if name in _POLICIES:
        return "policy" if hasattr(transform, POLICY_METHOD) else "pixels"
    if name in _KEEP_FORM or name in _CHANGE_FORM:
        return "pixels" if _why_not(transform) else "noted"
    named: tuple[tuple[frozenset[str], Kind], ...] = (
        (_TYPES, "types"),
        (_TARGETS, "targets"),
        (_MASKS, "masks"),
    )
    return next((kind for names, kind in named if name in names), "pixels")


POLICY_METHOD: Final = "_apply_image_or_video_transform"
"""What a policy calls with each operation that it has chosen; without it, it runs in the worker."""


def make_plan(
    pipeline: Any, *, one_size: bool = False, pil: bool = False, refusal: str | None = None
) -> Plan:
    """Decide where each transform of a pipeline runs.

    Args:
        pipeline: of v2.
        one_size: whether all images are known to have one size.
        pil: whether they are PIL images.
        refusal: a reason to run everything in the worker.
    """
    leaves = leaves_of(pipeline)
    boundary = -1 if one_size else _boundary(leaves)
    until = _tensors_from(leaves) if pil else -1
    placed: list[OpPlacement] = []
    behind: Leaf | None = None
    for leaf in reversed(leaves):
        own = refusal or ("takes PIL images" if leaf.number < until else None)
        own = own or _why_in_worker(leaf, boundary, leaves)
        placed.append(_place(leaf, own or _why_before(leaf, behind), behind))
        if own is not None and (behind is None or behind.conditional):
            behind = leaf
    return Plan(
        leaves=tuple(leaves),
        placements=tuple(reversed(placed)),
        boundary=len(leaves) if refusal else max(boundary, until - 1),
    )


def keeps_size(transform: Any) -> bool:
    """Return whether images have the same height and width behind a transform that is noted."""
    name = type(transform).__name__
    return name in _KEEP_FORM or name in _KEEP_SIZE or name in _POLICIES


def changes_form(transform: Any) -> bool:
    """Return whether a transform may change the size, channels or dtype of images."""
    return not is_own(transform) or type(transform).__name__ in _CHANGE_FORM


def _place(leaf: Leaf, why: str | None, behind: Leaf | None) -> OpPlacement:
    kind = kind_of(leaf.transform)
    if why is None and kind in {"types", "targets", "masks"}:
        return OpPlacement(name=leaf.name, where="worker", why="changes no pixels of images")
    if why is not None:
        return OpPlacement(name=leaf.name, where="worker", why=why)
    why = how_on_batch(leaf.transform)
    if behind is not None:
        return OpPlacement(
            name=leaf.name,
            where="either",
            why=f"{why}; in the worker in samples that take {behind.name}",
        )
    return OpPlacement(name=leaf.name, where="device", why=why)


def rounds(transform: Any) -> bool:
    """Return whether a transform may show the last bit of a float: by levels, or whole numbers."""
    kinds = getattr(transform, "dtype", None)
    by_type = kinds if isinstance(kinds, dict) else {None: kinds}
    images = (kind for name, kind in by_type.items() if name is not tv_tensors.Mask)
    whole = any(isinstance(one, torch.dtype) and not one.is_floating_point for one in images)
    return is_own(transform) and (whole or type(transform).__name__ in _ROUND)


def lacks_form(transform: Any) -> bool:
    """Return whether samples of parameters of their own are transformed one after the other."""
    return kind_of(transform) == "pixels" or how_on_batch(transform) == _ALONE


def how_on_batch(transform: Any) -> str:
    """Return how a transform is carried out on a batch, and what that costs."""
    from lightning_fastdata.augment.torchvision.forms import has_form

    if has_form(transform):
        floats = "; of floats that are rounded behind it, up to a call for each"
        return "one call for all samples" + floats * (type(transform).__name__ in NEARLY)
    if type(transform).__name__ in _POLICIES:
        return "for each operation, a call for all samples or for each group of equal parameters"
    if draws_parameters(transform):
        return _ALONE
    return "torchvision's own kernel, one call for all samples"


def may_draw(leaf: Leaf) -> bool:
    """Return whether a transform may do one thing to a sample and another to the next one."""
    known = kind_of(leaf.transform) in {"noted", "types", "targets"}
    return leaf.conditional or not known or draws_parameters(leaf.transform)


def draws_parameters(transform: Any) -> bool:
    """Return whether samples that take a transform may have parameters of their own."""
    base = v2.Transform.make_params
    alike = type(transform).__name__ == "RandomGrayscale"  # whose parameters are the image's form
    return not alike and getattr(type(transform), "make_params", base) is not base


def _why_in_worker(leaf: Leaf, boundary: int, leaves: Sequence[Leaf]) -> str | None:
    if leaf.number == boundary:
        return "makes the images one size"
    if leaf.number < boundary:
        return f"before {leaves[boundary].name}, which makes the images one size"
    kind = kind_of(leaf.transform)
    if kind == "pixels":
        return _why_pixels(leaf.transform)
    if kind == "noted" and leaf.conditional and changes_form(leaf.transform):
        return "changes the form of some images only"
    return None


def _why_before(leaf: Leaf, behind: Leaf | None) -> str | None:
    """Return why a transform cannot be left to the device for what comes behind it."""
    if behind is None or kind_of(leaf.transform) not in {"noted", "policy"}:
        return None
    if not behind.conditional:
        return f"{behind.name} behind it needs pixels"
    if changes_form(leaf.transform):
        return f"changes the form of images, and {behind.name} behind it needs some of them"
    return None


def _why_pixels(transform: Any) -> str:
    name = type(transform).__name__
    if not is_own(transform):
        return "not torchvision's v2: runs by itself on each sample"
    if name in _VARY_SIZE:
        return "makes each image another size"
    if name in _DRAW_PIXELS:
        return "draws numbers for every pixel"
    return _why_not(transform) or "no form for batches: runs by itself on each sample"


def _why_not(transform: Any) -> str | None:
    """Return why a transform cannot be noted with its settings; None: it can."""
    if type(transform).__name__ == "RandomRotation" and transform.expand:
        return "makes each image another size"
    mode = getattr(transform, "interpolation", None)
    if "lanczos" in str(getattr(mode, "value", mode)).lower() or mode == _PIL_LANCZOS:
        return "torchvision's Lanczos filter is for CPUs"
    return None


_PIL_LANCZOS: Final = 1


def _tensors_from(leaves: Sequence[Leaf]) -> int:
    """Return the number of the transform that makes tensors of PIL images; behind all, if none."""
    made = (leaf.number for leaf in leaves if type(leaf.transform).__name__ in _FROM_PIL)
    return next(made, len(leaves))


def _boundary(leaves: Sequence[Leaf]) -> int:
    boundary, one_size = -1, False
    for leaf in leaves:
        after = one_size and not _varies(leaf)
        if not leaf.conditional and _fixes_size(leaf.transform):
            after = True
        boundary = leaf.number if after and not one_size else boundary
        one_size = after
    return boundary


def _varies(leaf: Leaf) -> bool:
    """Return whether images of one size may have several behind a transform."""
    transform = leaf.transform
    if not is_own(transform):
        return True
    name = type(transform).__name__
    expands = name == "RandomRotation" and transform.expand
    return expands or name in _VARY_SIZE or (leaf.conditional and name in _CHANGE_FORM)


def _fixes_size(transform: Any) -> bool:
    """Return whether images of any size have one size behind a transform."""
    if not is_own(transform):
        return False
    name = type(transform).__name__
    if name == "Resize":
        return transform.size is not None and len(transform.size) == 2
    return name in {"CenterCrop", "RandomCrop", "RandomResizedCrop"}
