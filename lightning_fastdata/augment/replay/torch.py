"""Carry out the program of a batch on whatever device the batch is on, with torch and kernels."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import nullcontext
from typing import Any, Final

import torch

from lightning_fastdata.augment.fields import describe
from lightning_fastdata.augment.ops.operation import DeviceOp
from lightning_fastdata.augment.replay.program import Draws, Program, ProgramStep
from lightning_fastdata.augment.replay.warm_up import has_kernels
from lightning_fastdata.errors import BatchError, TransformError
from lightning_fastdata.types import Batch

_WITHOUT_FLOAT64: Final = frozenset({"mps"})
"""Types of devices without float64, which positions need to be exact; the CPU computes for them."""


def replay(
    program: Program,
    blob: torch.Tensor,
    batch: torch.Tensor,
    ops: Mapping[str, DeviceOp],
    *,
    kernels: bool | None = None,
) -> torch.Tensor:
    """Return a batch of images or masks after all steps of its program.

    Args:
        program: what to do.
        blob: the arrays of the program, on the device of ``batch``.
        batch: images or masks, as the operations take them; never written to. Images ``[n, H, W]``
            are taken for images of one channel, and come out without it.
        ops: device forms by name.
        kernels: whether kernels carry out the program's runs that take the batch; None: on CUDA,
            if Triton works. On the CPU that needs Triton's interpreter (``TRITON_INTERPRET=1``
            before its import).

    Raises:
        TransformError: a step would give some samples another shape or dtype than the others.
    """
    device, kind = batch.device, batch.device.type
    add_channel = program.role == "image" and batch.ndim == 3
    batch = batch.unsqueeze(-1) if add_channel else batch
    if kind in _WITHOUT_FLOAT64:
        blob, batch = blob.cpu(), batch.cpu()
    # Matrix products in half precision would make other pixels.
    half = torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind)
    with torch.autocast(kind, enabled=False) if half else nullcontext():
        runs = {run.first: run for run in program.runs}
        if runs and not (has_kernels(batch.device) if kernels is None else kernels):
            runs = {}
        made = _run_all(program, runs, blob, batch, ops).to(device)
    drop = add_channel and not program.makes_tensor and made.shape[-1] == 1
    return made.squeeze(-1) if drop else made


def _run_all(
    program: Program,
    runs: Mapping[int, Any],
    blob: torch.Tensor,
    batch: torch.Tensor,
    ops: Mapping[str, DeviceOp],
) -> torch.Tensor:
    current, owned, number = batch, False, 0
    while number < len(program.steps):
        run = runs.get(number)
        if run is not None and (run.idle or run.takes(current)):
            number = run.last + 1
            if not run.idle:
                current, owned = run(blob, current), True
            continue
        current, owned = _run_step(program.steps[number], program, blob, current, ops, owned=owned)
        number += 1
    return current


def checked_rows(value: Batch, draws: Draws, location: object) -> torch.Tensor:
    """Return a field of a batch; raise BatchError if it has not the samples that were drawn for."""
    if isinstance(value, torch.Tensor) and len(value) == draws.samples:
        return value
    raise BatchError(
        f"The field {location!r} should be a tensor of {draws.samples} samples, as many as were "
        f"drawn for, but is {describe(value)}. A collate_fn must stack the images of a batch in "
        "order, and keep them at their place."
    )


def _run_step(
    step: ProgramStep,
    program: Program,
    blob: torch.Tensor,
    current: torch.Tensor,
    ops: Mapping[str, DeviceOp],
    *,
    owned: bool,
) -> tuple[torch.Tensor, bool]:
    op = ops[step.name]
    run = op.image if program.role == "image" else op.mask
    if run is None:
        return current, owned
    results: list[tuple[torch.Tensor, torch.Tensor]] = []
    for part in step.parts:
        arrays = {name: slot.view(blob) for name, slot in part.arrays.items()}
        if part.rows is None:
            out = run(current, dict(part.static), arrays)
            storages = {one.untyped_storage().data_ptr() for one in (out, current)}
            return out, owned or len(storages) == 2
        rows = part.rows.view(blob)
        results.append((rows, run(current.index_select(0, rows), dict(part.static), arrays)))
    forms = {(out.shape[1:], out.dtype) for _, out in results}
    if forms == {(current.shape[1:], current.dtype)}:
        target = current if owned else current.clone()
    elif len(forms) == 1 and sum(len(rows) for rows, _ in results) == len(current):
        first = results[0][1]
        target = first.new_empty((len(current), *first.shape[1:]))
    else:
        raise TransformError(
            f"{step.name} would turn some images of the batch into another shape or dtype than "
            f"the others: {sorted(map(str, forms))} beside {current.dtype} "
            f"{tuple(current.shape[1:])}. Apply it to every image (p=1), or use "
            "augment_on='cpu'."
        )
    for rows, out in results:
        target.index_copy_(0, rows, out)
    return target, True
