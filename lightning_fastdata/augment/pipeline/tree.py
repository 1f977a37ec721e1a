"""The tree of an Albumentations pipeline: its leaves, its containers, whose classes they are."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterator

SEQUENCES: Final = frozenset({"Compose", "ReplayCompose", "Sequential"})
"""Containers that call all their children in the order written."""
GROUPS: Final = frozenset({"OneOf", "SomeOf", "RandomOrder", "OneOrOther"})
"""Containers that choose or reorder their children for each sample."""


class Leaf(NamedTuple):
    """A transform in the tree of a pipeline."""

    transform: Any
    """The Albumentations transform."""
    conditional: bool
    """Whether some samples skip it: ``p < 1``, or a choice above it."""
    last_in_group: int
    """Number of the last leaf of the outermost group whose order or choice is random."""


def is_container(node: Any) -> bool:
    """Whether a node of the tree holds other transforms."""
    # Not told by an attribute `transforms`: ColorJitter has one too, a list of functions.
    import albumentations

    return isinstance(node, albumentations.BaseCompose)


def is_albumentations(node: Any) -> bool:
    """Whether the class of a node is Albumentations' own, not a subclass written by a user."""
    return type(node).__module__.split(".")[0] == "albumentations"


def is_albumentations_pipeline(transform: Any) -> bool:
    """Whether an object is a transform of Albumentations or derives from one; never imports it."""
    modules = {cls.__module__.split(".")[0] for cls in type(transform).__mro__}
    return "albumentations" in modules


def list_leaves(compose: Any) -> list[Leaf]:
    """Return the transforms of a pipeline in the order in which they are written."""
    return list(_leaves(compose, conditional=False, group_end=None, first=0))


def _leaves(node: Any, *, conditional: bool, group_end: int | None, first: int) -> Iterator[Leaf]:
    conditional = conditional or node.p < 1
    if not is_container(node):
        yield Leaf(node, conditional, first if group_end is None else group_end)
        return
    if not in_sequence(node):
        conditional = True
        group_end = first + count_leaves(node) - 1 if group_end is None else group_end
    for child in node.transforms:
        yield from _leaves(child, conditional=conditional, group_end=group_end, first=first)
        first += count_leaves(child)


def list_nodes(compose: Any) -> list[Any]:
    """Return a pipeline, every container in it and every transform."""
    inner = compose.transforms if is_container(compose) else ()
    return [compose, *(found for node in inner for found in list_nodes(node))]


def count_leaves(node: Any) -> int:
    """Return how many transforms a node holds."""
    return sum(map(count_leaves, node.transforms)) if is_container(node) else 1


def keeps_params(compose: Any) -> bool:
    """Whether a pipeline returns the parameters that it drew: ``ReplayCompose`` and the like."""
    return bool(getattr(compose, "save_applied_params", False)) or any(
        getattr(leaf.transform, "deterministic", False) for leaf in list_leaves(compose)
    )


def in_sequence(node: Any) -> bool:
    """Whether a node calls all its children in the order written."""
    return is_albumentations(node) and type(node).__name__ in SEQUENCES


def last_opaque(compose: Any) -> int:
    """Return the last leaf that must run unobserved, or -1."""
    last = -1
    first = 0
    for node, group_end, end in _nodes(compose, group_end=None, first=first):
        name = type(node).__name__
        known = is_albumentations(node) and (name in SEQUENCES or name in GROUPS)
        plain = not is_container(node) and _plain_call(node)
        if not (known or plain):
            last = max(last, end if group_end is None else group_end)
    return last


def _nodes(
    node: Any, *, group_end: int | None, first: int
) -> Iterator[tuple[Any, int | None, int]]:
    end = first + count_leaves(node) - 1
    yield node, group_end, end
    if is_container(node):
        if not in_sequence(node) and group_end is None:
            group_end = end
        for child in node.transforms:
            yield from _nodes(child, group_end=group_end, first=first)
            first += count_leaves(child)


def _plain_call(transform: Any) -> bool:
    """Whether calling a transform goes through Albumentations' own ``__call__``."""
    owner = next(cls for cls in type(transform).__mro__ if "__call__" in vars(cls))
    return owner.__module__.split(".")[0] == "albumentations"
