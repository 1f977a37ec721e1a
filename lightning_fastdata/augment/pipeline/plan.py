"""Where each operation of an Albumentations pipeline runs, and why; decided before any sample.

The rules, in order:

1. Everything up to and including the operation that makes the image size the same for all samples
   (``Resize``, ``RandomResizedCrop``, ...) runs in the worker: dataset images may vary in size.
   A pipeline without such an operation can only be collated when the dataset's images already have
   one size, so nothing is held back for it.
2. All of a pipeline runs in the worker where an operation changes the dtype of some samples only
   (``ToFloat(p=0.5)``): a batch is one tensor.
3. An operation without a device form runs in the worker on real pixels, and so do the ones before
   it, but only in samples that drew it. A form is for certain dtypes: colours and blurs for uint8
   alone.
4. An operation that changes the shape or dtype of an image runs on the device only when every
   sample takes it and no later operation may ask for real pixels: a batch must stay one tensor.
5. An operation whose pixels may be a level off runs in the worker where one after it makes more of
   that (``HueSaturationValue``, ...), or may, as it is registered. So the bound of whole pipelines
   is that of their operations, see :mod:`~lightning_fastdata.augment.pipeline.bounds`.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, TypeAlias

import numpy as np

from lightning_fastdata.augment.pipeline.bounds import may_differ, why_amplifies
from lightning_fastdata.augment.pipeline.dtypes import (
    BYTES,
    CHANGES_DTYPE_OR_LAYOUT,
    DType,
    changes_form,
    follow_dtypes,
    takes_dtype,
)
from lightning_fastdata.augment.pipeline.tree import (
    CHANGES_SIZE,
    Leaf,
    Size,
    follow_sizes,
    followers,
    is_albumentations,
    last_opaque,
    list_leaves,
    size_after,
)
from lightning_fastdata.tree import held

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from lightning_fastdata.augment.ops.operation import DeviceOp
    from lightning_fastdata.augment.pipeline.tree import Node

Where: TypeAlias = Literal["worker", "device", "either"]


@dataclass(frozen=True, slots=True, kw_only=True)
class OpPlacement:
    """Where one operation runs."""

    name: str
    """Class name of the transform."""
    where: Where
    """``worker``: through its own library on the CPU. ``device``: on the batch. ``either``: on the
    device, except in samples in which a later operation needs real pixels."""
    why: str
    """The reason, in a few words."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Placements:
    """Where every operation of one pipeline runs, whatever library it is of."""

    placements: tuple[OpPlacement, ...]
    """One per leaf transform, in the order in which they are written."""

    @property
    def defers(self) -> bool:
        """Whether any operation may run on the device."""
        return any(placement.where != "worker" for placement in self.placements)

    @property
    def rows(self) -> list[tuple[str, str, str]]:
        """Operation, place and reason of each."""
        return [(placed.name, placed.where, placed.why) for placed in self.placements]


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan(Placements):
    """Where every operation of an Albumentations pipeline runs."""

    conditional: tuple[bool, ...]
    """Per leaf: whether some samples may go without it on the device, where those that do not go
    without have to keep their form."""
    sees_pixels: tuple[bool, ...]
    """Per leaf: whether its sampler must be given the real image."""
    opaque_until: int
    """Number of the last leaf that must run unobserved, because something calls its transforms in
    its own way; -1 for none."""


def analyse(
    compose: Node,
    ops: Mapping[str, DeviceOp],
    *,
    size: tuple[int, int] | None = None,
    refusal: str | None = None,
    channels: int | None = 3,
    dtype: DType = BYTES,
) -> Plan:
    """Decide where each operation of a pipeline runs, of whose images size and dtype are known.

    ``size``: ``(height, width)`` when all have it. ``channels``: None for images ``[H, W]``.
    ``refusal``: a reason to run everything in the worker.
    """
    leaves = list_leaves(compose)
    before = follow_dtypes(leaves, dtype)
    refusal = refusal or _refusal(leaves)
    if refusal is None and before is None:
        refusal = "the pipeline may change the dtype of some samples only, and a batch has one"
    opaque = last_opaque(compose)
    forms = [device_form(leaf.transform, ops) for leaf in leaves]
    keeps = {op.owner for op in forms if op is not None and op.owner is not None}
    static_from, sizes = follow_sizes(compose, Size(size, size), keeps)
    boundary = max(static_from, opaque)
    placed: list[OpPlacement] = []
    sees = [_reads_pixels(leaf.transform, op) for leaf, op in zip(leaves, forms, strict=True)]
    barrier_after: str | None = None
    behind = followers(compose)
    for index in range(len(leaves) - 1, -1, -1):
        leaf = leaves[index]
        name = type(leaf.transform).__name__
        op = forms[index]
        why_worker = refusal
        if why_worker is None and index <= boundary:
            why_worker = _why_before(index, opaque)
        given = dtype if before is None else before[index]
        why_worker = why_worker or _why_worker(leaf, op, sizes[index], given, barrier_after)
        if why_worker is None:
            others = _on_device(behind[index], placed, len(leaves))
            after = [(leaves[other].transform, forms[other]) for other in others]
            why_worker = _why_amplified(leaf, given, after)
        if why_worker is None and op is not None:
            # What the worker has done by then, or may do for some samples, leaves one form.
            earlier = leaves[boundary + 1 : index]
            size_here = sizes[index].exact or (64, 64)
            if not _has_form(earlier, leaf, ops, size_here, channels, given):
                why_worker = "no device form for its settings, or for the images it is given"
        where, why = _where(name, why_worker, barrier_after, sees=sees[index])
        placed.append(OpPlacement(name=name, where=where, why=why))
        sees[index] |= where == "worker"
        barrier_after = name if sees[index] else barrier_after
    return Plan(
        placements=tuple(reversed(placed)),
        conditional=tuple(leaf.conditional for leaf in leaves),
        sees_pixels=tuple(sees),
        opaque_until=opaque,
    )


def device_form(transform: Node, ops: Mapping[str, DeviceOp]) -> DeviceOp | None:
    """Return the device form of a transform; a user's subclass never inherits one."""
    kind = type(transform)
    own = next((op for op in ops.values() if op.owner is kind), None)
    return ops.get(kind.__name__) if own is None and is_albumentations(transform) else own


def _where(
    name: str, why_worker: str | None, barrier_after: str | None, *, sees: bool
) -> tuple[Where, str]:
    """Return where an operation runs, and why.

    ``barrier_after`` is the next operation that may need real pixels. Its sampler may need the
    image (``sees``).
    """
    if why_worker is not None:
        return "worker", why_worker
    unless = f", unless {barrier_after} was drawn after it" if barrier_after is not None else ""
    if sees:
        return "either", f"needs the pixels to draw ({name}), then on the batch"
    return ("either" if unless else "device"), f"on the batch{unless}"


def _why_worker(
    leaf: Leaf,
    op: DeviceOp | None,
    before: Size,
    given: DType,
    barrier_after: str | None,
) -> str | None:
    if op is None:
        return "no device form"
    if not takes_dtype(op, given):
        return f"no device form for images of {given}"
    if op.owner is not None:
        return None
    # Images of an unknown but common size are taken to be any, so not square.
    one_size = before.exact or (64, 48)
    made = size_after(leaf.transform, Size(one_size, one_size)).exact
    if made is None:
        return "its output size differs between samples"
    crops = held(leaf.transform, "size") is not None
    if crops and leaf.transform.area_for_downscale is not None and made != one_size:
        return "makes some samples smaller, by areas, which has no device form"
    if not changes_form(leaf.transform):
        return None
    if leaf.conditional:
        return "changes the shape or dtype of some samples only"
    if barrier_after is not None:
        return f"changes the shape or dtype, and {barrier_after} after it may need the pixels"
    if before.exact is None and type(leaf.transform).__name__ in CHANGES_SIZE:
        return "the size of images before it is not known"
    return None


def _on_device(leaves: Iterable[int], placed: list[OpPlacement], count: int) -> list[int]:
    """Return those leaves that are not known to run in the worker; the last are placed first."""
    known = {count - 1 - number: place.where for number, place in enumerate(placed)}
    return [leaf for leaf in sorted(leaves) if known.get(leaf) != "worker"]


def _why_amplified(
    leaf: Leaf, given: DType, after: list[tuple[Node, DeviceOp | None]]
) -> str | None:
    """Return why an operation may not be off at all: one of those after it makes more of that."""
    if given != BYTES or not may_differ(leaf.transform):
        return None
    for other, op in after:
        if op is not None and (how := why_amplifies(other, op)) is not None:
            return f"equal in the worker alone, and {type(other).__name__} after it {how}"
    return None


def _refusal(leaves: list[Leaf]) -> str | None:
    if len({id(leaf.transform) for leaf in leaves}) < len(leaves):
        return "the same transform object appears twice in the pipeline"
    if any(held(leaf.transform, "replay_mode") for leaf in leaves):
        return "the pipeline replays what another one has drawn"
    return None


def _why_before(index: int, opaque: int) -> str:
    """Return why a leaf that comes before something runs in the worker."""
    if index <= opaque:
        return "a container around or after it calls its transforms in its own way"
    return "up to the operation that makes the image size the same for all samples"


def _reads_pixels(transform: Node, op: DeviceOp | None) -> bool:
    if op is not None and op.owner is not None:
        return op.reads_pixels
    if not is_albumentations(transform):
        return True
    name = type(transform).__name__
    return name == "RandomBrightnessContrast" and not transform.brightness_by_max


def _has_form(
    before: list[Leaf],
    leaf: Leaf,
    ops: Mapping[str, DeviceOp],
    size: tuple[int, int],
    channels: int | None,
    given: DType,
) -> bool:
    """Whether an operation has a device form for its settings, which is tried out.

    Parameters without a form send one sample to the CPU. Behind a change of shape or dtype that
    would leave images of two forms in one batch, so all that are drawn here need one, else any.
    """
    op = device_form(leaf.transform, ops)
    if op is None or type(leaf.transform).__name__ in CHANGES_DTYPE_OR_LAYOUT:
        return True
    changes = [other.transform for other in before if changes_form(other.transform)]
    for other in changes:
        channels = held(other, "num_output_channels") or channels
    shape = size if channels is None else (*size, channels)
    transform = copy.deepcopy(leaf.transform)
    try:
        found = (_encodes(transform, op, np.zeros(shape, given)) for _ in range(4))
        return all(found) if changes else any(found)
    except Exception:
        # It refuses images of this size or kind, in whatever way (a division by the size of a tiny
        # one, too): Albumentations will say so, to a real one.
        return True


def _encodes(transform: Node, op: DeviceOp, image: np.ndarray) -> bool:
    data = {"image": image}
    params = transform.update_transform_params(transform.get_params(), data)
    sampler = transform.get_params_dependent_on_data
    params.update(sampler(params=params, data=data))
    return op.encode(transform, params, image.shape, image.dtype) is not None
