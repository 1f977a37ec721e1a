"""Kernels compiled before the training, so that none has to be in the middle of an epoch.

What a batch draws decides which kernels it needs: how a run reads its pixels, and how it writes
them. What they can be follows from the plan of a pipeline, and each of them is launched once, on an
image of a few pixels.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, Final, NamedTuple, TypeAlias

import numpy as np
import torch

from lightning_fastdata.augment.pipeline.plan import Plan, device_form
from lightning_fastdata.augment.pipeline.tree import Size, follow_sizes, list_leaves
from lightning_fastdata.augment.replay import instructions
from lightning_fastdata.augment.replay.instructions import fused_form
from lightning_fastdata.augment.replay.program import Packer
from lightning_fastdata.augment.replay.runs import Ending, FusedRun, Geometry, Reading
from lightning_fastdata.augment.replay.triton import (
    INTEGERS,
    Launch,
    has_kernels,
    prepare,
    run_fused,
)
from lightning_fastdata.tree import leaves

if TYPE_CHECKING:
    from albumentations import BaseCompose

    from lightning_fastdata.augment.ops.operation import DeviceOp, Fused, Role
    from lightning_fastdata.types import Batch

_Forms: TypeAlias = "list[Fused | None]"
"""What the operations that may run on the device are within runs, in order."""

_ALIGNED, _ODD = (4, 4), (5, 5)
"""Heights and widths: kernels are compiled for counts of pixels that are multiples of 16, and for
others."""
_READS: Final[Mapping[Fused, Geometry]] = {
    "resize": "resize",
    "window": "window",
    instructions.warp: "warp",
    instructions.warp_mask: "warp",
    instructions.correlation: "filter",
    instructions.median: "filter",
}
_CASTS: Final = frozenset({"normalize", "to float"})
_BY_NAME: Final = {str(dtype).removeprefix("torch."): dtype for dtype in INTEGERS}


class Variant(NamedTuple):
    """A run that has those kernels compiled which other batches may need, and what it runs on."""

    run: FusedRun
    blob: torch.Tensor
    batch: torch.Tensor
    out_dtype: torch.dtype | None
    channels_last: bool

    @property
    def form(self) -> tuple[object, ...]:
        """What decides which kernels it needs."""
        return self.run, self.batch.dtype, self.out_dtype, self.channels_last

    def launches(self) -> list[Launch]:
        """Return what it launches."""
        form = {"out_dtype": self.out_dtype, "channels_last": self.channels_last}
        return prepare(self.run, self.blob, self.batch, **form)[1]  # type: ignore[arg-type]

    def launch(self, device: torch.device) -> None:
        """Have its kernels launched, and compiled if they are not."""
        run, blob, batch, *form = self
        run_fused(run, blob.to(device), batch.to(device), *form)  # type: ignore[arg-type]


def kernels_of(
    device: torch.device,
    compose: BaseCompose,
    plan: Plan,
    ops: Mapping[str, DeviceOp],
    sample: Batch,
    *,
    out_dtype: torch.dtype | None = None,
    channels_last: bool = False,
) -> tuple[Variant, ...]:
    """Return :func:`variants` for a dataset with such a sample; none where nothing is fused."""
    if not has_kernels(device):
        return ()
    masks = mask_dtypes(sample)
    return variants(
        compose, plan, ops, masks=masks, out_dtype=out_dtype, channels_last=channels_last
    )


def variants(
    compose: BaseCompose,
    plan: Plan,
    ops: Mapping[str, DeviceOp],
    *,
    masks: Collection[torch.dtype] = (),
    out_dtype: torch.dtype | None = None,
    channels_last: bool = False,
) -> tuple[Variant, ...]:
    """Return runs that need all kernels which batches of a pipeline may need; some may need none.

    ``masks`` are the dtypes of the masks that it is given; ``out_dtype`` and ``channels_last`` as
    :func:`~lightning_fastdata.augment.replay.triton.run_fused` takes them, for images.
    """
    before = follow_sizes(compose, Size()).before
    known = before[-1].exact if before else None
    shape = _ALIGNED if known is None or known[0] * known[1] % 16 == 0 else _ODD
    roles: list[tuple[Role, torch.dtype]] = [("image", torch.uint8)]
    roles += [("mask", dtype) for dtype in masks]
    made = []
    for role, dtype in roles:
        forms = _forms(compose, plan, ops, role)
        geometries: dict[Geometry, None] = {"none": None}
        geometries |= {_READS[one]: None for one in forms if one and one in _READS}
        changes_form = not _CASTS.isdisjoint(forms) or "channels first" in forms
        batch = torch.zeros((1, *shape, 3) if role == "image" else (1, *shape), dtype=dtype)
        for geometry, (cast, planes) in itertools.product(geometries, _endings(forms)):
            last = planes or cast is not None or not changes_form
            out = out_dtype if last and role == "image" else None
            run, blob = _run(role, forms, geometry, cast, shape, planes=planes)
            made.append(Variant(run, blob, batch, out, last and channels_last))
    return tuple(made)


def mask_dtypes(sample: Batch) -> tuple[torch.dtype, ...]:
    """Return the dtypes that masks of a sample may have: those of its integers ``[H, W]``."""
    arrays = [leaf for leaf in leaves(sample) if isinstance(leaf, np.ndarray | torch.Tensor)]
    names = [str(one.dtype).removeprefix("torch.") for one in arrays if one.ndim == 2]
    return tuple(dict.fromkeys(_BY_NAME[name] for name in names if name in _BY_NAME))


def _forms(compose: BaseCompose, plan: Plan, ops: Mapping[str, DeviceOp], role: Role) -> _Forms:
    pairs = zip(list_leaves(compose), plan.placements, strict=True)
    found = [device_form(leaf.transform, ops) for leaf, place in pairs if place.where != "worker"]
    return [fused_form(op, role) for op in found if op is not None]


def _endings(forms: _Forms) -> list[tuple[Fused | None, bool]]:
    """Return how runs may end: the cast, if any, and whether channels come first."""
    if not forms:
        return []
    at = next((place for place, one in enumerate(forms) if one in _CASTS), None)
    cast = None if at is None else forms[at]
    inner, behind = (forms, forms) if at is None else (forms[:at], forms[at + 1 :])
    endings = {(cast, "channels first" in behind)}
    if cast is not None and not {instructions.holes, "channels first"}.issuperset(behind):
        endings.add((cast, False))
    # A run ends before a step that no run takes, before a second reading, and a second contrast.
    if any(one is None or one in _READS or one is instructions.jitter for one in inner):
        endings.add((None, False))
    return sorted(endings, key=str)


def _run(
    role: Role,
    forms: _Forms,
    geometry: Geometry,
    cast: Fused | None,
    shape: tuple[int, int],
    *,
    planes: bool,
) -> tuple[FusedRun, torch.Tensor]:
    packer, image = Packer(), role == "image"
    code = packer.add(np.zeros((1, 1, instructions.WIDTH), np.int32))
    where = {"window": [[0, 0]], "resize": [[0, 0, *reversed(shape)]]}.get(geometry)
    across = image and geometry == "filter" and instructions.correlation in forms
    ones = packer.add(np.ones((1, 3), np.float32))
    run = FusedRun(
        first=0,
        last=0,
        code=code,
        role=role,
        reading=Reading(
            geometry, shape, None if where is None else packer.add(np.array(where, np.int32))
        ),
        ending=Ending(
            normalize=(ones, ones) if cast == "normalize" else None,
            limit=ones if cast == "to float" else None,
            channels_first=planes,
        ),
        contrasts=image and instructions.jitter in forms,
        both_axes=packer.add(np.zeros(1, np.int32)) if across else None,
    )
    packer.add(np.zeros(16, np.float64))  # where instructions that say nothing may look
    return run, packer.blob()
