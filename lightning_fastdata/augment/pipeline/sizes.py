"""Image sizes that follow from a pipeline alone, before any image is seen."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, NamedTuple

from lightning_fastdata.augment.pipeline.tree import (
    GROUPS,
    count_leaves,
    in_sequence,
    is_albumentations,
    is_container,
)

if TYPE_CHECKING:
    from collections.abc import Collection

    from lightning_fastdata.augment.pipeline.tree import Leaf

_FIXED_BY_HEIGHT_WIDTH: Final = frozenset(
    {
        "AtLeastOneBBoxRandomCrop",
        "CenterCrop",
        "CropNonEmptyMaskIfExists",
        "RandomCrop",
        "RandomSizedBBoxSafeCrop",
        "Resize",
    }
)
_FIXED_BY_SIZE: Final = frozenset({"RandomResizedCrop", "RandomSizedCrop"})
SWAPS_AXES: Final = frozenset({"D4", "RandomRotate90", "SquareSymmetry", "Transpose"})
"""Transforms that turn some images on their side."""
_SIZE_VARIES: Final = frozenset(
    {
        "BBoxSafeRandomCrop",
        "Crop",
        "Lambda",
        "Mosaic",
        "Pad",
        "RandomCropFromBorders",
        "RandomCropNearBBox",
        "RandomScale",
        "SmallestMaxSize",
    }
)
CHANGES_SIZE: Final = (
    _FIXED_BY_HEIGHT_WIDTH | _FIXED_BY_SIZE | {"Crop", "LongestMaxSize", "Pad", "PadIfNeeded"}
)
"""Transforms whose output size usually differs from their input size."""
_FITS_IN_ITS_INPUT: Final = frozenset({"SafeRotate"})
"""Says ``fit_output``, and means that its output fits in the size of its input."""
_ONE_CHILD: Final = frozenset({"OneOf", "OneOrOther"})


class Size(NamedTuple):
    """What is known of the size of all images at one point of a pipeline."""

    exact: tuple[int, int] | None = None
    """``(height, width)`` when all images have it; None when sizes may differ or are unknown."""
    at_most: tuple[int, int] | None = None
    """Upper bounds of height and width, or None."""


class Sizes(NamedTuple):
    """How the size develops along a pipeline."""

    boundary: int
    """Number of the last leaf of the operation that makes the size static, or -1 for none."""
    before: tuple[Size, ...]
    """Per leaf: what is known of its input."""


def follow_sizes(compose: Any, size: Size, keeps: Collection[type] = ()) -> Sizes:
    """Follow what is known of the image size through a pipeline that is given ``size``.

    Args:
        compose: the pipeline.
        size: what is known of its input.
        keeps: classes that keep the size, whatever else would be thought of them.
    """
    boundary = -1
    sizes: list[Size] = []

    def walk(node: Any, before: Size) -> Size:
        nonlocal boundary
        if is_container(node) and in_sequence(node) and node.p >= 1:
            for child in node.transforms:
                before = walk(child, before)
            return before
        sizes.extend([before] * count_leaves(node))
        after = _node_size(node, before, keeps)
        if before.exact is None and after.exact is not None:
            boundary = len(sizes) - 1
        return after

    walk(compose, size)
    return Sizes(boundary, tuple(sizes))


def _node_size(node: Any, before: Size, keeps: Collection[type]) -> Size:
    if not is_container(node):
        after = size_after(node, before, keeps)
    elif in_sequence(node):
        after = before
        for child in node.transforms:
            after = _node_size(child, after, keeps)
    elif is_albumentations(node) and type(node).__name__ in GROUPS:
        pick_one = type(node).__name__ in _ONE_CHILD
        sizes = [
            size_after(child, before, keeps)
            if pick_one and not is_container(child)
            else _node_size(child, before, keeps)
            for child in node.transforms
        ]
        if not pick_one:
            sizes.append(before)
        after = _join(sizes)
    else:
        after = before
    applied = node.p >= 1 or type(node).__name__ == "OneOrOther"
    return after if applied else _join([before, after])


def _join(sizes: list[Size]) -> Size:
    exact = sizes[0].exact if all(size.exact == sizes[0].exact for size in sizes) else None
    bounds = [size.at_most for size in sizes]
    known = [bound for bound in bounds if bound is not None]
    if len(known) < len(bounds):
        return Size(exact, None)
    return Size(exact, (max(h for h, _ in known), max(w for _, w in known)))


def size_after(transform: Any, before: Size, keeps: Collection[type] = ()) -> Size:
    """Return what is known of the image size after a transform was applied."""
    name = type(transform).__name__
    if type(transform) in keeps:
        return before
    if not is_albumentations(transform):
        import albumentations

        return before if isinstance(transform, albumentations.ImageOnlyTransform) else Size()
    if name in _FIXED_BY_HEIGHT_WIDTH:
        return _exactly(transform.height, transform.width)
    if name in _FIXED_BY_SIZE:
        return _exactly(*transform.size)
    if name == "LongestMaxSize":
        longest = transform.max_size
        return Size(None, (longest, longest)) if isinstance(longest, int) else Size()
    if name == "PadIfNeeded":
        return _padded(transform, before)
    if name == "Crop" and before.exact is not None:
        inside = transform.y_max <= before.exact[0] and transform.x_max <= before.exact[1]
        return _exactly(*_cut(transform)) if inside or transform.pad_if_needed else Size()
    if name == "Pad" and before.exact is not None:
        down, across = _padding(transform.padding)
        return _exactly(before.exact[0] + down, before.exact[1] + across)
    if name in SWAPS_AXES:
        square = before.exact is not None and before.exact[0] == before.exact[1]
        return before if square else Size()
    if name in _FITS_IN_ITS_INPUT:
        return before
    varies = (
        name in _SIZE_VARIES
        or getattr(transform, "fit_output", False)
        or getattr(transform, "crop_border", False)
        or not getattr(transform, "keep_size", True)
    )
    return Size() if varies else before


def _exactly(height: int, width: int) -> Size:
    return Size((height, width), (height, width))


def _cut(transform: Any) -> tuple[int, int]:
    return transform.y_max - transform.y_min, transform.x_max - transform.x_min


def _padding(padding: Any) -> tuple[int, int]:
    """Return the rows and columns that ``A.Pad`` adds: per side, per axis, or per edge."""
    if isinstance(padding, int):
        return 2 * padding, 2 * padding
    if len(padding) == 2:
        return 2 * padding[1], 2 * padding[0]
    left, top, right, bottom = padding
    return top + bottom, left + right


def _padded_length(length: int, least: int | None, divisor: int | None) -> int:
    """Return the length of an axis that is padded to a length, or to a multiple of one."""
    if least is not None:
        return max(least, length)
    return length + -length % divisor if divisor else length


def _padded(transform: Any, before: Size) -> Size:
    least = (transform.min_height, transform.min_width)
    divisors = (transform.pad_height_divisor, transform.pad_width_divisor)
    if before.exact is not None:
        height, width = map(_padded_length, before.exact, least, divisors)
        return _exactly(height, width)
    if None in least:
        return Size()
    if (
        before.at_most is not None
        and before.at_most[0] <= least[0]
        and before.at_most[1] <= least[1]
    ):
        return _exactly(*least)
    return Size()


def some_are_padded(leaves: list[Leaf]) -> bool:
    """Return whether images of one size may have two, if it is small."""
    return any(
        leaf.conditional and type(leaf.transform).__name__ == "PadIfNeeded" for leaf in leaves
    )
