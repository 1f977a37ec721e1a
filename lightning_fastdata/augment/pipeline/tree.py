"""The tree of an Albumentations pipeline: its leaves, its containers, whose classes they are."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple, TypeAlias

from lightning_fastdata.tree import held

if TYPE_CHECKING:
    from collections.abc import Collection

    from albumentations import BaseCompose, BasicTransform

    Node: TypeAlias = BaseCompose | BasicTransform
    """A container or a transform of a pipeline; a pipeline itself."""

SEQUENCES: Final = frozenset({"Compose", "ReplayCompose", "Sequential"})
"""Containers that call all their children in the order written."""
GROUPS: Final = frozenset({"OneOf", "SomeOf", "RandomOrder", "OneOrOther"})
"""Containers that choose or reorder their children for each sample."""


class Leaf(NamedTuple):
    """A transform in the tree of a pipeline."""

    transform: BasicTransform
    conditional: bool
    """Whether some samples skip it: ``p < 1``, or a choice above it."""


def is_container(node: object) -> bool:
    """Whether a node of the tree holds other transforms."""
    # An attribute `transforms` does not say so: ColorJitter has one too, a list of functions.
    import albumentations

    return isinstance(node, albumentations.BaseCompose)


def is_albumentations(node: Node) -> bool:
    """Whether the class of a node is Albumentations' own, not a subclass written by a user."""
    return type(node).__module__.split(".")[0] == "albumentations"


def list_leaves(node: Node, *, conditional: bool = False) -> list[Leaf]:
    """Return the transforms of a pipeline in the order in which they are written."""
    conditional = conditional or node.p < 1
    if not is_container(node):
        return [Leaf(node, conditional)]
    inside = [(child, conditional or not in_sequence(node)) for child in node.transforms]
    return [leaf for child, skipped in inside for leaf in list_leaves(child, conditional=skipped)]


def list_nodes(compose: Node) -> list[Node]:
    """Return a pipeline, every container in it and every transform."""
    inner = compose.transforms if is_container(compose) else ()
    return [compose, *(found for node in inner for found in list_nodes(node))]


def count_leaves(node: Node) -> int:
    """Return how many transforms a node holds."""
    return len(list_leaves(node))


def followers(compose: Node) -> list[frozenset[int]]:
    """Return, for each transform of a pipeline, the numbers of those that may come after it."""
    after: list[set[int]] = []

    def walk(node: Node) -> range:
        first, parts = len(after), []
        if not is_container(node):
            after.append(set())
        else:
            parts = [walk(child) for child in node.transforms]
        alone = is_albumentations(node) and type(node).__name__ in _ONE_CHILD
        for number, part in enumerate(parts):
            later = [] if alone else parts[number + 1 :] if in_sequence(node) else parts
            again = bool(held(node, "replace"))
            found = {leaf for other in later if again or other != part for leaf in other}
            for leaf in part:
                after[leaf] |= found
        return range(first, len(after))

    walk(compose)
    return list(map(frozenset, after))


def in_sequence(node: Node) -> bool:
    """Whether a node calls all its children in the order written."""
    return is_albumentations(node) and type(node).__name__ in SEQUENCES


def last_opaque(node: Node, *, group_end: int | None = None, first: int = 0) -> int:
    """Return the last leaf that must run unobserved, or -1.

    ``first``: number of the first leaf of the node; ``group_end``: of the last in a group around.
    """
    name, own, end = type(node).__name__, is_albumentations(node), first + count_leaves(node) - 1
    known = own and (name in SEQUENCES or name in GROUPS)
    observed = known or (not is_container(node) and _plain_call(node))
    last = -1 if observed else end if group_end is None else group_end
    if is_container(node):
        group_end = end if group_end is None and not in_sequence(node) else group_end
        for child in node.transforms:
            last = max(last, last_opaque(child, group_end=group_end, first=first))
            first += count_leaves(child)
    return last


def _plain_call(transform: BasicTransform) -> bool:
    """Whether calling a transform goes through Albumentations' own ``__call__``."""
    owner = next(cls for cls in type(transform).__mro__ if "__call__" in vars(cls))
    return owner.__module__.split(".")[0] == "albumentations"


_FIXED_BY_HEIGHT_WIDTH: Final = frozenset(
    {
        *("AtLeastOneBBoxRandomCrop", "CenterCrop", "CropNonEmptyMaskIfExists", "RandomCrop"),
        *("RandomSizedBBoxSafeCrop", "Resize"),
    }
)
_FIXED_BY_SIZE: Final = frozenset({"RandomResizedCrop", "RandomSizedCrop"})
SWAPS_AXES: Final = frozenset({"D4", "RandomRotate90", "SquareSymmetry", "Transpose"})
"""Transforms that turn some images on their side."""
_SIZE_VARIES: Final = frozenset(
    {
        *("BBoxSafeRandomCrop", "Crop", "Lambda", "Mosaic", "Pad", "RandomCropFromBorders"),
        *("RandomCropNearBBox", "RandomScale", "SmallestMaxSize"),
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


def follow_sizes(compose: Node, size: Size, keeps: Collection[type] = ()) -> tuple[int, list[Size]]:
    """Follow what is known of the image size through a pipeline.

    Classes in ``keeps`` keep the size, whatever else would be thought of them.

    Returns:
        The number of the last leaf of the operation that makes the size static, or -1 for none; and
        per leaf what is known of its input.
    """
    boundary = -1
    sizes: list[Size] = []

    def walk(node: Node, before: Size) -> Size:
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
    return boundary, sizes


def _node_size(node: Node, before: Size, keeps: Collection[type]) -> Size:
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
    if None in bounds:
        return Size(exact, None)
    heights, widths = zip(*filter(None, bounds), strict=True)
    return Size(exact, (max(heights), max(widths)))


def size_after(transform: BasicTransform, before: Size, keeps: Collection[type] = ()) -> Size:
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
    if name in SWAPS_AXES:
        square = before.exact is not None and before.exact[0] == before.exact[1]
        return before if square else Size()
    if name in _FITS_IN_ITS_INPUT:
        return before
    settings = vars(transform)
    varies = settings.get("fit_output") or settings.get("crop_border")
    keeps_size = settings.get("keep_size", True) and name not in _SIZE_VARIES
    return before if keeps_size and not varies else Size()


def _exactly(height: int, width: int) -> Size:
    return Size((height, width), (height, width))


def _padded_length(length: int, least: int | None, divisor: int | None) -> int:
    """Return the length of an axis that is padded to a length, or to a multiple of one."""
    if least is not None:
        return max(least, length)
    return length + -length % divisor if divisor else length


def _padded(transform: BasicTransform, before: Size) -> Size:
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
