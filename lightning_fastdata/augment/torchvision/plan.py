"""What a v2 pipeline is made of, and where each transform of it runs; decided before any sample.

A pipeline is cut in two. The worker runs, on pixels, everything up to the last transform that

1. makes the image size the same for all samples (``RandomResizedCrop``, ``CenterCrop``, ...), as
   images of a dataset may vary in size. Without such a transform they can only be collated if they
   have one size already, so that nothing is kept in the worker for this reason;
2. is not torchvision's own, draws numbers for pixels, or makes each image another size;
3. changes the size, channels or dtype of some images only: a batch is one tensor;
4. makes a dtype that torch hardly computes with: ``uint16``, ``uint32``, ``uint64``.

A ``RandomOrder`` runs as a whole on one side of the cut. What comes after the cut is noted for the
device.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Final, Literal, NamedTuple, TypeAlias

import torch
from torch import nn
from torchvision.transforms import v2
from torchvision.tv_tensors import Mask

from lightning_fastdata.augment.stage_transform import OpPlacement, Placements, Where
from lightning_fastdata.tree import name_of

MIXES: Final = (v2.CutMix, v2.MixUp)
"""Transforms of whole batches."""
_V1: Final = frozenset({"torchvision.transforms.autoaugment", "torchvision.transforms.transforms"})
_V2: Final = "torchvision.transforms.v2"
Kind: TypeAlias = Literal["noted", "policy", "types", "targets", "masks", "pixels"]
"""How the recorder treats a transform. ``noted``: it is noted for the batch. ``policy``: the
operations that it chooses are noted. ``types``: it changes the type of a tensor. ``targets``: it
leaves pixels alone. ``masks``: it needs the pixels of masks alone. ``pixels``: it needs pixels."""

DTYPES: Final = {
    "image": frozenset({torch.uint8, torch.float32}),
    "mask": frozenset({torch.uint8, torch.bool, torch.int32, torch.int64, torch.float32}),
}
"""Dtypes of images and masks that have forms for batches."""
_STORED: Final = frozenset({torch.uint16, torch.uint32, torch.uint64})
"""Dtypes whose rows torch cannot write into a batch nor, before 2.11, take out of one."""
LEAVE_MASKS: Final = frozenset(
    {
        *("ColorJitter", "GaussianBlur", "Normalize", "RandomAdjustSharpness"),
        *("RandomAutocontrast", "RandomChannelPermutation", "RandomEqualize", "RandomErasing"),
        *("RandomGrayscale", "RandomInvert", "RandomPhotometricDistort", "RandomPosterize"),
        "RandomSolarize",
    }
)
"""Transforms that pass masks through as they are."""
_WARP: Final = frozenset(
    {
        *("RandomAffine", "RandomHorizontalFlip", "RandomPerspective", "RandomRotation"),
        "RandomVerticalFlip",
    }
)
_FIX_SIZE: Final = frozenset({"CenterCrop", "RandomCrop", "RandomResizedCrop"})
_RESIZE: Final = _FIX_SIZE | {"Pad", "Resize"}
_CHANGE_FORM: Final = _RESIZE | {"ConvertImageDtype", "Grayscale", "RGB", "ToDtype"}
"""Transforms that turn all images of one form (size, channels, dtype) into one other form."""
_POLICIES: Final = frozenset({"AutoAugment", "RandAugment", "TrivialAugmentWide"})
FROM_PIL: Final = frozenset({"ToImage", "PILToTensor", "ToTensor"})
"""Transforms that make tensors of PIL images."""
_TARGETS: Final = frozenset(
    {
        *("ClampBoundingBoxes", "ClampKeyPoints", "ConvertBoundingBoxFormat", "SetClampingMode"),
        "SetKeyPointsClampingMode",
    }
)
_MASKS: Final = frozenset({"SanitizeBoundingBoxes", "SanitizeKeyPoints"})
_VARY_SIZE: Final = frozenset(
    {
        *("FiveCrop", "RandomIoUCrop", "RandomResize", "RandomShortestSize", "RandomZoomOut"),
        *("ScaleJitter", "TenCrop"),
    }
)
ANY_LAYOUT: Final = FROM_PIL | {
    *("ConvertImageDtype", "GaussianNoise", "Identity", "RandomInvert", "RandomPosterize"),
    *("RandomSolarize", "ToDtype", "ToPureTensor"),
}
"""Transforms that treat each number of an image alike, wherever the channels are."""
NEED_BOXES: Final = frozenset({*_TARGETS, *_MASKS, "RandomIoUCrop"})
"""Transforms that make no sense without boxes or keypoints."""
MOVES: Final = _WARP | _RESIZE | _VARY_SIZE | {"ElasticTransform"}
"""Transforms that move the pixels of an image."""

NEARLY: Final = frozenset({"RandomResizedCrop", "Resize"})
"""Transforms whose form for batches may differ from torchvision in the last bit of floats."""
_ROUND: Final = _POLICIES | {"RandomEqualize", "RandomPosterize", "RandomSolarize"}
"""Transforms that may turn a float's last bit into a level, as casts to shorter dtypes do."""

_KINDS: Final[dict[str, Kind]] = {
    **dict.fromkeys(LEAVE_MASKS | _WARP | _CHANGE_FORM, "noted"),
    **dict.fromkeys(_POLICIES, "policy"),
    **dict.fromkeys({*FROM_PIL, "ToPureTensor"}, "types"),
    **dict.fromkeys({*_TARGETS, "Identity"}, "targets"),
    **dict.fromkeys(_MASKS, "masks"),
}
POLICY_METHOD: Final = "_apply_image_or_video_transform"
"""Method that policies call for each operation they chose; without it, they run in the worker."""
METHODS: Final[dict[Kind, str]] = {"noted": "transform", "policy": POLICY_METHOD}
"""Name of the method of a transform whose calls are noted, by kind."""
_PIL_LANCZOS: Final = 1


class Leaf(NamedTuple):
    """One transform of a pipeline that is no container."""

    number: int
    """Position in the order in which transforms are written, from 0."""
    transform: Any
    """A ``v2.Transform``, or any callable."""
    conditional: bool
    """Whether some samples may go without it, or take it in another order."""
    last: int
    """Highest number of a transform that may run before it; its own, outside a ``RandomOrder``."""

    @property
    def name(self) -> str:
        """Name of the transform in messages and reports."""
        return name_of(self.transform)


def is_v2(transform: object) -> bool:
    """Return whether this is a torchvision v2 pipeline, or a single transform of v2.

    An ``nn.Sequential`` is one if all its parts are. A transform that mixes samples is none.
    """
    if type(transform) is nn.Sequential:
        return len(transform) > 0 and all(map(is_v2, transform))
    return isinstance(transform, v2.Transform) and not isinstance(transform, MIXES)


def is_v1(transform: object) -> bool:
    """Return whether this is a pipeline or a transform of torchvision's first interface."""
    if type(transform) is nn.Sequential:
        return len(transform) > 0 and all(map(is_v1, transform))
    return type(transform).__module__ in _V1


def is_own(transform: object) -> bool:
    """Return whether a transform is torchvision's v2 itself, and not of a class derived from it."""
    return type(transform).__module__.startswith(f"{_V2}.")


def children_of(transform: Any) -> Sequence[Any] | None:
    """Return what a container of torchvision or torch holds; None: it is no container."""
    kind = type(transform)
    if kind in {v2.Compose, v2.RandomApply, v2.RandomChoice, v2.RandomOrder}:
        held: Sequence[Any] = transform.transforms
        return list(held)
    return list(transform) if kind is nn.Sequential else None


def with_children(transform: Any, children: Sequence[Any]) -> Any:
    """Return a container like another one, with other children."""
    kind = type(transform)
    if kind is nn.Sequential:
        return kind(*children)
    twin = kind(children)
    if hasattr(transform, "p"):
        twin.p = transform.p
    return twin


def as_it_is(transform: Any, made: dict[int, Any] | None = None) -> Any:
    """Return a copy of a pipeline which later changes of its transforms do not reach.

    Functions, and what a transform of the user's holds in an attribute, are shared. ``made``: the
    copies so far, as a transform may stand in several places.
    """
    made, inside = {} if made is None else made, children_of(transform)
    if inside is not None:
        return with_children(transform, [as_it_is(child, made) for child in inside])
    twin = made.get(id(transform), transform)
    if twin is transform and isinstance(transform, v2.Transform):
        with suppress(Exception):  # what cannot be copied is shared
            twin = made[id(transform)] = copy.copy(transform)
            own = vars(transform).items() if is_own(transform) else ()
            held = {name: copy.copy(one) for name, one in own if isinstance(one, list | dict)}
            vars(twin).update(held)
    return twin


def leaves_of(transform: Any, number: int = 0, *, conditional: bool = False) -> list[Leaf]:
    """Return the transforms of a pipeline in the order in which they are written, numbered.

    A transform that stands in several places is listed for each of them.
    """
    inside = children_of(transform)
    if inside is None:
        # What an attribute of that name means to a transform of the user's, nobody knows.
        conditional = conditional or (is_own(transform) and getattr(transform, "p", 1) != 1)
        return [Leaf(number, transform, conditional, number)]
    always, found = type(transform) in {v2.Compose, nn.Sequential}, list[Leaf]()
    for child in inside:
        found += leaves_of(child, number + len(found), conditional=conditional or not always)
    any_order = type(transform) is v2.RandomOrder
    return [leaf._replace(last=found[-1].number) if any_order else leaf for leaf in found]


def kind_of(transform: Any) -> Kind:
    """Return how the recorder treats a transform."""
    return "pixels" if why_pixels(transform) else _KINDS[type(transform).__name__]


def why_pixels(transform: Any) -> str | None:
    """Return why a transform needs the pixels of each sample, as it is set; None: it does not."""
    name = type(transform).__name__
    if not is_own(transform):
        return "not torchvision's v2: runs by itself on each sample"
    if varies_size(transform):
        return "makes each image another size"
    mode = getattr(transform, "interpolation", None)
    if "lanczos" in str(getattr(mode, "value", mode)).lower() or mode == _PIL_LANCZOS:
        return "torchvision's Lanczos filter is for CPUs"
    if name not in _KINDS or (name in _POLICIES and not hasattr(transform, POLICY_METHOD)):
        return "no form for batches: runs by itself on each sample"
    return None


def varies_size(transform: Any) -> bool:
    """Return whether a transform may give images of one size several sizes."""
    known = is_own(transform) and type(transform).__name__ not in _VARY_SIZE
    return not known or getattr(transform, "expand", False)


def fixes_size(transform: Any) -> bool:
    """Return whether images of any size have one size behind a transform."""
    name = type(transform).__name__
    whole = name == "Resize" and transform.size is not None and len(transform.size) == 2
    return is_own(transform) and (whole or name in _FIX_SIZE)


def rounds(transform: Any) -> bool:
    """Return whether a transform may make a visible difference of the last bit of a float."""
    kinds = _dtypes_of(transform).items()
    made = {one for kind, one in kinds if kind is not Mask and isinstance(one, torch.dtype)}
    coarse = made - {torch.float32, torch.float64}
    return is_own(transform) and (bool(coarse) or type(transform).__name__ in _ROUND)


def _dtypes_of(transform: Any) -> dict[Any, Any]:
    """Return the dtypes that a transform makes, by the type of tensor."""
    given = getattr(transform, "dtype", None)
    return given if isinstance(given, dict) else {None: given}


def changes_form(transform: Any) -> bool:
    """Return whether a transform may change the size, channels or dtype of images."""
    return not is_own(transform) or type(transform).__name__ in _CHANGE_FORM


def may_draw(leaf: Leaf) -> bool:
    """Return whether a transform may treat two samples in different ways."""
    transform = leaf.transform
    if type(transform) in {v2.Identity, nn.Identity}:
        return False
    if leaf.conditional or kind_of(transform) not in {"noted", "types", "targets"}:
        return True
    base = v2.Transform.make_params
    alike = type(transform).__name__ == "RandomGrayscale"  # its parameters are the form
    return not alike and getattr(type(transform), "make_params", base) is not base


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan(Placements):
    """Where every transform of one pipeline runs."""

    leaves: tuple[Leaf, ...]
    boundary: int
    """Number of the last transform that runs before anything is noted; -1: there is none."""


def make_plan(pipeline: Any, *, one_size: bool = False, pil: bool = False) -> Plan:
    """Decide where each transform of a pipeline runs.

    ``one_size``: whether all images are known to have one size; ``pil``: whether they are PIL's.
    """
    leaves = leaves_of(pipeline)
    sized = -1 if one_size else _one_size_from(leaves)
    makers = (leaf.number for leaf in leaves if type(leaf.transform).__name__ in FROM_PIL)
    tensors = next(makers, len(leaves)) if pil else -1
    own = [_why_in_worker(leaf, sized, tensors) for leaf in leaves]
    boundary = max((leaf.last for leaf, why in zip(leaves, own, strict=True) if why), default=-1)
    needs = max((number for number, why in enumerate(own) if why), default=-1)
    placed = []
    for leaf, needed in zip(leaves, own, strict=True):
        before = None
        if leaf.number < sized:
            before = f"before {leaves[sized].name}, which makes the images one size"
        elif leaf.number < needs:
            before = f"{leaves[needs].name} behind it needs pixels"
        elif leaf.number <= boundary:
            before = f"{leaves[needs].name} may come behind it, and needs pixels"
        why = needed or before
        if why is None and kind_of(leaf.transform) in {"types", "targets", "masks"}:
            why = "changes no pixels of images"
        where: Where = "device" if why is None else "worker"
        placed.append(OpPlacement(leaf.name, where, why or "on the batch"))
    return Plan(leaves=tuple(leaves), placements=tuple(placed), boundary=boundary)


def _one_size_from(leaves: Sequence[Leaf]) -> int:
    """Return the number of the transform behind which images have one size, or -1."""
    boundary, one_size = -1, False
    for leaf in leaves:
        before, transform = one_size, leaf.transform
        varies = varies_size(transform) or (leaf.conditional and changes_form(transform))
        one_size = (before and not varies) or (not leaf.conditional and fixes_size(transform))
        boundary = leaf.number if one_size and not before else boundary
    return boundary


def _why_in_worker(leaf: Leaf, sized: int, tensors: int) -> str | None:
    if leaf.number < tensors:
        return "takes PIL images"
    if leaf.number == sized:
        return "makes the images one size"
    if leaf.conditional and kind_of(leaf.transform) == "noted" and changes_form(leaf.transform):
        return "changes the form of some images only"
    why = why_pixels(leaf.transform)
    if why is None and not _STORED.isdisjoint(_dtypes_of(leaf.transform).values()):
        return "makes a dtype that torch hardly computes with"
    return why
