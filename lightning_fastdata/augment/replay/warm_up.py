"""Kernels compiled before the training, so that none has to be in the middle of an epoch.

What a batch draws decides which kernels it needs: how a run reads its pixels, and how it writes
them. What they can be follows from the plan of a pipeline, and each of them is launched once, on an
image of a few pixels.
"""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np
import torch

from lightning_fastdata.augment.pipeline.plan import device_form
from lightning_fastdata.augment.pipeline.sizes import Size, follow_sizes
from lightning_fastdata.augment.pipeline.tree import list_leaves
from lightning_fastdata.augment.replay import instructions
from lightning_fastdata.augment.replay.instructions import fused_form
from lightning_fastdata.augment.replay.program import Packer
from lightning_fastdata.augment.replay.runs import FusedRun, Geometry
from lightning_fastdata.augment.replay.triton import Launch, is_movable, prepare, run_fused
from lightning_fastdata.tree import replace_leaves

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Mapping

    from lightning_fastdata.augment.ops.operation import DeviceOp, Role
    from lightning_fastdata.augment.pipeline.plan import Plan

_REPLICATE: Final = 1
_ALIGNED, _ODD = (4, 4), (5, 5)
"""Heights and widths: kernels are compiled for counts of pixels that are multiples of 16, and for
others."""
_READS: Final[Mapping[Any, Geometry]] = {
    "resize": "resize",
    "window": "window",
    instructions.warp: "warp",
    instructions.warp_mask: "warp",
    instructions.correlation: "filter",
    instructions.median: "filter",
}
_ENDS: Final = {"normalize": "normalized", "to float": "divided"}


class Variant(NamedTuple):
    """A run that has those kernels compiled which other batches may need, and what it runs on."""

    run: FusedRun
    blob: torch.Tensor
    batch: torch.Tensor
    out_dtype: torch.dtype | None
    channels_last: bool

    def launches(self) -> list[Launch]:
        """Return what it launches."""
        form = {"out_dtype": self.out_dtype, "channels_last": self.channels_last}
        return prepare(self.run, self.blob, self.batch, **form)[1]  # type: ignore[arg-type]

    def launch(self, device: torch.device) -> None:
        """Have its kernels launched, and compiled if they are not."""
        run_fused(
            self.run,
            self.blob.to(device),
            self.batch.to(device),
            out_dtype=self.out_dtype,
            channels_last=self.channels_last,
        )


def variants(
    compose: Any,
    plan: Plan,
    ops: Mapping[str, DeviceOp],
    *,
    size: tuple[int, int] | None = None,
    masks: Collection[torch.dtype] = (),
    out_dtype: torch.dtype | None = None,
    channels_last: bool = False,
) -> tuple[Variant, ...]:
    """Return runs that need all kernels which batches of a pipeline may need; some may need none.

    Args:
        compose: The pipeline.
        plan: Where its operations run.
        ops: Device forms by name.
        size: Height and width of the images before it, if they are known to have one.
        masks: Dtypes of the masks that it is given.
        out_dtype: Floating dtype of the images, as :func:`~.replay_triton.run_fused` takes it.
        channels_last: As that takes it.
    """
    before = follow_sizes(compose, Size(size, size)).before
    known = before[-1].exact if before else None
    shape = _ALIGNED if known is None or known[0] * known[1] % 16 == 0 else _ODD
    made = []
    for role, dtype in (("image", torch.uint8), *(("mask", one) for one in masks)):
        forms = _forms(compose, plan, ops, "image" if role == "image" else "mask")
        for ends, planes, contrasts, geometry, across in _runs(forms):
            last = planes or ends != "bytes" or not ({*_ENDS, "channels first"} & {*forms})
            out = out_dtype if last and role == "image" else None
            run, blob = _run(role, geometry, ends, planes, contrasts, across, shape)
            batch = torch.zeros((1, *shape, 3) if role == "image" else (1, *shape), dtype=dtype)
            made.append(Variant(run, blob, batch, out, last and channels_last))
    return tuple(made)


def mask_dtypes(sample: Any) -> tuple[torch.dtype, ...]:
    """Return the dtypes that masks of a sample may have: those of its integers ``[H, W]``.

    Args:
        sample: Dicts, lists, tuples and dataclasses of arrays and tensors; anything else has none.
    """
    found: list[torch.dtype] = []

    def look(_: Any, leaf: Any) -> Any:
        if isinstance(leaf, np.ndarray) and leaf.ndim == 2 and leaf.dtype.kind in "iu":
            found.append(torch.from_numpy(np.empty(0, leaf.dtype)).dtype)
        elif isinstance(leaf, torch.Tensor) and leaf.ndim == 2 and is_movable(leaf[None]):
            found.append(leaf.dtype)
        return leaf

    replace_leaves(sample, look)
    return tuple(dict.fromkeys(one for one in found if is_movable(torch.zeros(1, 1, 1, dtype=one))))


def warm_up(found: Collection[Variant], device: torch.device) -> None:
    """Have kernels compiled for a device, each of them once."""
    for one in found:
        one.launch(device)


def _forms(compose: Any, plan: Plan, ops: Mapping[str, DeviceOp], role: Role) -> list[Any]:
    """Return what the operations that may run on the device are within runs, in order."""
    pairs = zip(list_leaves(compose), plan.placements, strict=True)
    found = [device_form(leaf.transform, ops) for leaf, place in pairs if place.where != "worker"]
    return [fused_form(op, role) for op in found if op is not None]


def _runs(forms: list[Any]) -> Iterator[tuple[str, bool, bool, Geometry, bool]]:
    """Yield how runs may write and read: ends, planes, contrasts, geometry, across."""
    if not forms:
        return
    geometries: list[Geometry] = list(
        dict.fromkeys(["none", *(_READS[one] for one in forms if one in _READS)])
    )
    contrasts = instructions.jitter in forms
    across = instructions.correlation in forms
    cast = next((place for place, one in enumerate(forms) if one in _ENDS), None)
    behind = forms[cast + 1 :] if cast is not None else forms
    ends = "bytes" if cast is None else _ENDS[forms[cast]]
    writes = {(ends, "channels first" in behind)}
    if cast is not None and any(
        one not in (instructions.holes, "channels first") for one in behind
    ):
        writes |= {(ends, False)}
    # A run ends before a step that no run takes, before a second reading, and a second contrast.
    inner = forms[:cast] if cast is not None else forms
    if any(one is None or one in _READS or one is instructions.jitter for one in inner):
        writes |= {("bytes", False)}
    for (end, planes), geometry in itertools.product(sorted(writes), geometries):
        yield end, planes, contrasts, geometry, across and geometry == "filter"


def _run(
    role: str,
    geometry: Geometry,
    ends: str,
    planes: bool,
    contrasts: bool,
    across: bool,
    shape: tuple[int, int],
) -> tuple[FusedRun, torch.Tensor]:
    packer = Packer()
    code = packer.add(np.zeros((1, 1, instructions.WIDTH), np.int32))
    where = None
    if geometry == "window":
        where = packer.add(np.zeros((1, 2), np.int32))
    elif geometry == "resize":
        where = packer.add(np.array([[0, 0, *reversed(shape)]], np.int32))
    ones = packer.add(np.ones((1, 3), np.float32))
    run = FusedRun(
        first=0,
        last=0,
        code=code,
        idle=False,
        role="image" if role == "image" else "mask",
        contrasts=contrasts and role == "image",
        geometry=geometry,
        size=shape,
        where=where,
        border=_REPLICATE,
        fill=None,
        both_axes=packer.add(np.zeros(1, np.int32)) if across and role == "image" else None,
        keeps_size=False,
        square=False,
        normalize=(ones, ones) if ends == "normalized" else None,
        limit=ones if ends == "divided" else None,
        channels_first=planes,
    )
    packer.add(np.zeros(16, np.float64))  # where instructions that say nothing may look
    return run, packer.blob()
