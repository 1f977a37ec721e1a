"""Where each transform of a v2 pipeline runs, and why; decided before any sample.

A pipeline is cut in two. In the worker, on pixels, runs all up to the last transform that

1. makes the image size the same for all samples (``RandomResizedCrop``, ``CenterCrop``, ...), as
   images of a dataset may vary in size. Without such a transform they can only be collated if they
   have one size already, so that nothing is held back for it;
2. is not torchvision's own, draws numbers for pixels, or makes each image another size;
3. changes the size, channels or dtype of some images only: a batch is one tensor;
4. makes a dtype that forms for batches are not for, before others.

A ``RandomOrder`` runs as a whole on one side. What comes behind it is noted for the device.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from lightning_fastdata.augment.pipeline.plan import OpPlacement, Placements
from lightning_fastdata.augment.torchvision.forms import has_form
from lightning_fastdata.augment.torchvision.kinds import (
    FROM_PIL,
    METHODS,
    NEARLY,
    changes_form,
    draws_parameters,
    fixes_size,
    kind_of,
    makes_other_dtype,
    varies_size,
    why_pixels,
)
from lightning_fastdata.augment.torchvision.pipeline import Leaf, leaves_of

if TYPE_CHECKING:
    from collections.abc import Sequence

_ALONE: Final = (
    "torchvision's own kernel on samples with equal parameters: up to a call for each sample"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan(Placements):
    """Where every transform of one pipeline runs."""

    leaves: tuple[Leaf, ...]
    boundary: int
    """Number of the last one that runs before anything is noted, or -1."""


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
    sized = -1 if one_size else _one_size_from(leaves)
    makers = (leaf.number for leaf in leaves if type(leaf.transform).__name__ in FROM_PIL)
    tensors = next(makers, len(leaves)) if pil else -1
    noted = max((leaf.number for leaf in leaves if kind_of(leaf.transform) in METHODS), default=-1)
    own = [refusal or _why_in_worker(leaf, sized, tensors, noted) for leaf in leaves]
    boundary = max((leaf.last for leaf, why in zip(leaves, own, strict=True) if why), default=-1)
    needs = max((number for number, why in enumerate(own) if why), default=-1)
    placed = []
    for leaf, why in zip(leaves, own, strict=True):
        before = None
        if leaf.number < sized:
            before = f"before {leaves[sized].name}, which makes the images one size"
        elif leaf.number < needs:
            before = f"{leaves[needs].name} behind it needs pixels"
        elif leaf.number <= boundary:
            before = f"{leaves[needs].name} may come behind it, and needs pixels"
        placed.append(_place(leaf, why or before))
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


def _why_in_worker(leaf: Leaf, sized: int, tensors: int, noted: int) -> str | None:
    if leaf.number < tensors:
        return "takes PIL images"
    if leaf.number == sized:
        return "makes the images one size"
    if leaf.conditional and kind_of(leaf.transform) == "noted" and changes_form(leaf.transform):
        return "changes the form of some images only"
    if leaf.number < noted and makes_other_dtype(leaf.transform):
        return "makes a dtype that others behind it have no forms for"
    return why_pixels(leaf.transform)


def _place(leaf: Leaf, why: str | None) -> OpPlacement:
    if why is None and kind_of(leaf.transform) in {"types", "targets", "masks"}:
        why = "changes no pixels of images"
    if why is None:
        return OpPlacement(name=leaf.name, where="device", why=_how_on_batch(leaf.transform))
    return OpPlacement(name=leaf.name, where="worker", why=why)


def _how_on_batch(transform: Any) -> str:
    """Return how a transform is carried out on a batch, and what that costs."""
    if has_form(transform):
        floats = "; of floats that are rounded behind it, up to a call for each"
        return "one call for all samples" + floats * (type(transform).__name__ in NEARLY)
    if kind_of(transform) == "policy":
        return "for each operation, a call for all samples or for each group of equal parameters"
    if draws_parameters(transform):
        return _ALONE
    return "torchvision's own kernel, one call for all samples"
