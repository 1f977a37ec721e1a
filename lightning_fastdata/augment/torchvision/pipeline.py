"""What a torchvision v2 pipeline is, and the transforms that it is made of."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Final, NamedTuple

from torch import nn
from torchvision.transforms import v2

from lightning_fastdata.tree import name_of

MIXES: Final = (v2.CutMix, v2.MixUp)
"""Transforms of whole batches."""
_V1: Final = frozenset({"torchvision.transforms.autoaugment", "torchvision.transforms.transforms"})
_V2: Final = "torchvision.transforms.v2"


class Leaf(NamedTuple):
    """One transform of a pipeline, that is no container."""

    number: int
    """Its place in the order in which they are written."""
    transform: Any
    """A ``v2.Transform``, or any callable."""
    conditional: bool
    """Whether some samples may go without it, or take it in another order."""
    last: int
    """Number of the last one that may come before it: in a ``RandomOrder`` any of the others."""

    @property
    def name(self) -> str:
        """What messages and reports call it."""
        return name_of(self.transform)


def is_v2(transform: object) -> bool:
    """Return whether this is a torchvision v2 pipeline, or a single transform of v2.

    An ``nn.Sequential`` is one if all that it holds is. What mixes the samples of a batch is none.
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
    """Return a container like another one that holds something else."""
    kind = type(transform)
    if kind is nn.Sequential:
        return kind(*children)
    twin = kind(children)
    if hasattr(transform, "p"):
        twin.p = transform.p
    return twin


def leaves_of(transform: Any) -> list[Leaf]:
    """Return the transforms of a pipeline in the order in which they are written.

    One that stands in several places is listed for each.
    """
    return list(_walk(transform, 0, conditional=False))


def _walk(transform: Any, number: int, *, conditional: bool) -> Iterator[Leaf]:
    inside = children_of(transform)
    if inside is None:
        yield Leaf(number, transform, conditional or getattr(transform, "p", 1) != 1, number)
        return
    always, found = type(transform) in {v2.Compose, nn.Sequential}, list[Leaf]()
    for child in inside:
        found += _walk(child, number + len(found), conditional=conditional or not always)
    any_order = type(transform) is v2.RandomOrder
    yield from (leaf._replace(last=found[-1].number) if any_order else leaf for leaf in found)
