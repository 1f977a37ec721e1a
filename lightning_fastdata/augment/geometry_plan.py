"""Which geometric operations of a pipeline will be joined, told before any sample is drawn."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from lightning_fastdata.augment.geometry import MODES, GeometryMode
from lightning_fastdata.augment.geometry_moves import kind_of
from lightning_fastdata.augment.ops.resample import CUBIC
from lightning_fastdata.augment.tree import (
    count_leaves,
    is_albumentations,
    is_container,
    list_leaves,
)
from lightning_fastdata.errors import OptionsError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from lightning_fastdata.augment.plan import Plan

_PICKS_ONE: Final = frozenset({"OneOf", "OneOrOther"})


def checked(geometry: str) -> GeometryMode:
    """Return the mode.

    Raises:
        OptionsError: there is no such mode.
    """
    for mode in MODES:
        if geometry == mode:
            return mode
    raise OptionsError(
        f"geometry={geometry!r} is not known. Use 'exact' for the pixels of Albumentations, or "
        "'fused' to join geometric operations to one resampling."
    )


def explain_joins(plan: Plan, compose: Any) -> Plan:
    """Return the same plan with ``joined with ...`` in the reasons of operations that will be.

    Args:
        plan: of the pipeline.
        compose: the pipeline.
    """
    transforms = [leaf.transform for leaf in list_leaves(compose)]
    apart = set(_alternatives(compose, first=0))
    placements = list(plan.placements)
    for members, between in _rows(plan, transforms):
        for index in members:
            others = [
                other
                for other in members
                if other != index
                and (min(index, other), max(index, other)) not in apart
                and _fit(transforms[index], transforms[other])
            ]
            if not _worth(transforms, [index, *others]):
                continue
            names = ", ".join(dict.fromkeys(type(transforms[one]).__name__ for one in others))
            unless = f", unless {' or '.join(between)} is drawn between" if between else ""
            why = f"{placements[index].why}; joined with {names}{unless}"
            placements[index] = replace(placements[index], why=why)
    return replace(plan, placements=tuple(placements))


def _rows(plan: Plan, transforms: Sequence[Any]) -> Iterator[tuple[list[int], list[str]]]:
    """Yield rows of geometric operations on the device, and what may be drawn between them."""
    members: list[int] = []
    between: list[str] = []
    waiting: list[str] = []
    for index, place in enumerate(plan.placements):
        if place.where != "worker" and kind_of(place.name) is not None:
            between += waiting if members else []
            members.append(index)
            waiting = []
        elif plan.conditional[index]:
            waiting.append(type(transforms[index]).__name__)
        else:
            yield members, between
            members, between, waiting = [], [], []
    yield members, between


def _worth(transforms: Sequence[Any], members: Sequence[int]) -> bool:
    kinds = [kind_of(type(transforms[one]).__name__) for one in members]
    return len(kinds) > 1 and ("warp" in kinds or kinds.count("resize") > 1)


def _fit(one: Any, other: Any) -> bool:
    kinds = [getattr(each, "interpolation", None) for each in (one, other)]
    if CUBIC in kinds or (None not in kinds and kinds[0] != kinds[1]):
        return False
    borders = [_border(each) for each in (one, other)]
    return None in borders or borders[0] == borders[1]


def _border(transform: Any) -> object:
    """Return what a transform reads outside; None if nothing."""
    mode = getattr(transform, "border_mode", None)
    crops = "crop" in type(transform).__name__.lower()
    if mode is None or (crops and not getattr(transform, "pad_if_needed", False)):
        return None
    fill = np.unique(np.asarray(transform.fill, np.float32)).tolist() if mode == 0 else None
    return mode, str(fill)


def _alternatives(node: Any, *, first: int) -> Iterator[tuple[int, int]]:
    """Yield pairs of leaves, by their numbers, that no sample draws both of."""
    if not is_container(node):
        return
    spans = []
    for child in node.transforms:
        yield from _alternatives(child, first=first)
        spans.append(range(first, first + count_leaves(child)))
        first += count_leaves(child)
    if is_albumentations(node) and type(node).__name__ in _PICKS_ONE:
        for place, span in enumerate(spans):
            for later in spans[place + 1 :]:
                yield from ((one, other) for one in span for other in later)
