"""What a transform of v2 is to images, and to a batch of them: by the name of its class."""

from __future__ import annotations

from typing import Any, Final, Literal, TypeAlias

import torch
from torchvision.transforms import v2
from torchvision.tv_tensors import Mask

from lightning_fastdata.augment.torchvision.pipeline import Leaf, is_own

Kind: TypeAlias = Literal["noted", "policy", "types", "targets", "masks", "pixels"]
"""What a transform is to the recorder. ``noted``: it is written down for the batch. ``policy``: so
are the operations that it chooses. ``types``: it changes the type of a tensor. ``targets``: it
leaves pixels alone. ``masks``: so it does, but for masks. ``pixels``: it needs them."""

DTYPES: Final = {
    "image": frozenset({torch.uint8, torch.float32}),
    "mask": frozenset({torch.uint8, torch.bool, torch.int32, torch.int64, torch.float32}),
}
"""What forms for batches are for."""
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
"""Transforms after which all images of one form have one other form."""
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
NEED_BOXES: Final = frozenset({*_TARGETS, *_MASKS, "RandomIoUCrop"})
"""Transforms that make no sense without boxes or keypoints."""
MOVES: Final = _WARP | _RESIZE | _VARY_SIZE | {"ElasticTransform"}
"""Transforms that move the pixels of an image."""

NEARLY: Final = frozenset({"RandomResizedCrop", "Resize"})
"""Transforms whose form for batches has not always torchvision's last bit of floats."""
_ROUND: Final = _POLICIES | {"RandomEqualize", "RandomPosterize", "RandomSolarize"}
"""Transforms that show it; so do those to whole numbers."""

_KINDS: Final[dict[str, Kind]] = {
    **dict.fromkeys(LEAVE_MASKS | _WARP | _CHANGE_FORM, "noted"),
    **dict.fromkeys(_POLICIES, "policy"),
    **dict.fromkeys({*FROM_PIL, "ToPureTensor"}, "types"),
    **dict.fromkeys({*_TARGETS, "Identity"}, "targets"),
    **dict.fromkeys(_MASKS, "masks"),
}
POLICY_METHOD: Final = "_apply_image_or_video_transform"
"""What a policy calls with each operation that it has chosen; without it, it runs in the worker."""
METHODS: Final[dict[Kind, str]] = {"noted": "transform", "policy": POLICY_METHOD}
"""What is noted of a transform: the calls of this method."""
_PIL_LANCZOS: Final = 1


def kind_of(transform: Any) -> Kind:
    """Return what a transform is to the recorder."""
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
    """Return whether a transform may show the last bit of a float: by levels, or whole numbers."""
    images = (dtype for kind, dtype in _dtypes_of(transform).items() if kind is not Mask)
    whole = any(isinstance(one, torch.dtype) and not one.is_floating_point for one in images)
    return is_own(transform) and (whole or type(transform).__name__ in _ROUND)


def makes_other_dtype(transform: Any) -> bool:
    """Return whether images or masks may have a dtype behind a transform that has no forms."""
    return is_own(transform) and any(
        isinstance(dtype, torch.dtype) and dtype not in DTYPES["mask" if kind is Mask else "image"]
        for kind, dtype in _dtypes_of(transform).items()
    )


def _dtypes_of(transform: Any) -> dict[Any, Any]:
    """Return which dtypes a transform makes, by the type of what it makes."""
    kinds = getattr(transform, "dtype", None)
    return kinds if isinstance(kinds, dict) else {None: kinds}


def changes_form(transform: Any) -> bool:
    """Return whether a transform may change the size, channels or dtype of images."""
    return not is_own(transform) or type(transform).__name__ in _CHANGE_FORM


def may_draw(leaf: Leaf) -> bool:
    """Return whether a transform may do one thing to a sample and another to the next one."""
    known = kind_of(leaf.transform) in {"noted", "types", "targets"}
    return leaf.conditional or not known or draws_parameters(leaf.transform)


def draws_parameters(transform: Any) -> bool:
    """Return whether samples that take a transform may have parameters of their own."""
    base = v2.Transform.make_params
    alike = type(transform).__name__ == "RandomGrayscale"  # whose parameters are the image's form
    return not alike and getattr(type(transform), "make_params", base) is not base
