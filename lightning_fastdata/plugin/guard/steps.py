"""The batch-size guard on a Lightning trainer: steps of growing batches before the fit, a decision.

Made to be called from ``Callback.on_fit_start``: the model is on the device, its optimizers exist,
and no batch has been trained on. The same functions serve ``lightning.pytorch`` and
``pytorch_lightning``: nothing of either is imported here.
"""

from __future__ import annotations

import gc
import logging
import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.distributed import ReduceOp

from lightning_fastdata.errors import BatchSizeError, FastDataWarning, OptionsError
from lightning_fastdata.host.memory import read_host_memory, reserve_bytes, size_text
from lightning_fastdata.plugin.guard.prediction import (
    GuardDecision,
    GuardPolicy,
    Probe,
    at_knee,
    decide,
    is_past_knee,
    probe_sizes,
    skipped,
)
from lightning_fastdata.plugin.guard.replay import NORMALISED, why_not_tried
from lightning_fastdata.plugin.guard.snapshots import (
    NoRoomError,
    Snapshot,
    snapshot_random_states,
)
from lightning_fastdata.plugin.guard.tried_steps import NoLossError, Repeated, TriedSteps
from lightning_fastdata.plugin.seams.hooks import overridden_hook
from lightning_fastdata.plugin.seams.internals import attributes_of, forget_training_loader
from lightning_fastdata.plugin.seams.trainer import loss_scaler, unseen_steps
from lightning_fastdata.torch_internals import not_compiled

if TYPE_CHECKING:
    from lightning.pytorch import LightningDataModule, LightningModule, Trainer

    from lightning_fastdata.device.backend import MemoryReader
    from lightning_fastdata.plugin.contracts import DataModule
    from lightning_fastdata.types import Batch

_LOG = logging.getLogger(__name__)
_NO_MEMORY = 2**62  # in the place of a peak
_COPY_SHARE = 2  # of free host memory, a half
_SMALLEST = 3  # at one or two rows there is nothing to extrapolate from


def run_guard(
    trainer: Trainer,
    pl_module: LightningModule,
    *,
    batch_of: Callable[[int], Batch],
    batch_size: int | None,
    policy: GuardPolicy,
    reader: MemoryReader,
    dataset_rows: int | None = None,
    clock: Callable[[], float] | None = None,
    read_rows: int = 8,
    batches_ahead: int = 0,
    host_bytes: Callable[[], int] = lambda: read_host_memory().available_bytes,
) -> GuardDecision:
    """Return what to do about the batch size, from steps on batches of growing sizes.

    Sizes are doubled while the next one is predicted to fit, until the chosen one has been run;
    ranks agree on each. Each is tried in two real training steps: precision plugin, transfer hooks,
    ``training_step``, backward, gradient clipping, optimizer step.
    Callbacks, loggers and the profiler do not see them, ``self.log`` does nothing, and modules are
    in the train or eval mode in which training will find them. Afterwards all is as it was:
    parameters, buffers, metric states, modes, plain attributes and containers of the modules,
    optimizers, schedulers, gradient scaler, gradients (none), and the random states of Python,
    numpy and torch. Values are copied to host memory once, and put back once: the steps have a
    learning rate of 0. They are not compiled. Not undone: what a step does to other objects, and to
    the world outside.

    The decision is ``skipped``, with the reason, where steps cannot be tried or undone safely, or
    the copy would take more than half of the free host memory of a rank.
    Nothing is applied yet, see :func:`apply_decision`. What a training step raises goes through,
    out of memory excepted.

    Args:
        trainer: It has set up its strategy for a fit.
        pl_module: The module it trains.
        batch_of: Gives a batch with that many rows, on the CPU, as the loader delivers it.
        batch_size: Rows that the user asked for; None if the loader does not batch.
        policy: What to do if they do not fit.
        reader: Of the device that the module is on.
        dataset_rows: Rows of the training dataset, if known: no batch has more.
        clock: Seconds from any start. With it the size is chosen: the smallest one up to
            ``batch_size`` that trains nearly as many rows a second as any that fits.
        read_rows: Samples that are read, of which larger batches are made.
        batches_ahead: Batches that are on the device beside the one that is trained on.
        host_bytes: Returns the free memory of the host.
    """
    asked = batch_size or 0
    accumulate_now = trainer.accumulate_grad_batches
    if why := _why_not(trainer, pl_module, asked, policy):
        return skipped(asked, accumulate_now, why)
    largest = asked if dataset_rows is None else max(1, min(asked, dataset_rows))
    restore_random = snapshot_random_states()
    room = host_bytes() // (_COPY_SHARE * trainer.num_devices)
    roots = (
        pl_module,
        *trainer.strategy.optimizers,
        *(config.scheduler for config in trainer.lr_scheduler_configs),
        loss_scaler(trainer),
    )
    try:
        with (
            unseen_steps(trainer, pl_module),
            not_compiled(),
            Snapshot(*roots, room_bytes=room) as before,
        ):
            tried = TriedSteps(
                trainer,
                pl_module,
                batch_of=Repeated(batch_of, min(read_rows, largest)),
                reader=reader,
                let_go=before.let_go,
                clock=clock,
                batches_ahead=batches_ahead,
            )
            gc.collect()
            reader.reset_peak()
            free_before = reader.free_bytes()
            # Read again each time: kernels loaded by the first step take memory outside of torch's
            # allocator, and so may other processes.
            decided = partial(
                _decided,
                trainer,
                reader=reader,
                free_before=free_before,
                asked=asked,
                policy=policy if clock is None else "reduce",
                accumulate_now=accumulate_now,
                dataset_rows=dataset_rows,
            )

            def to_run(probes: Sequence[Probe]) -> int | None:
                return None if is_past_knee(probes) else _to_run(decided(probes), largest)

            probes = probe_sizes(largest, partial(_measured_by_all, trainer, tried), to_run)
    except NoLossError:
        return skipped(asked, accumulate_now, "training_step returned no loss")
    except NoRoomError as needed:
        why = (
            f"a copy of the model takes {size_text(needed.args[0])} of host memory, and "
            f"{size_text(room)} may be used"
        )
        return skipped(asked, accumulate_now, why)
    finally:
        restore_random()
    decision = decided(probes) if clock is None else at_knee(decided(probes), probes)
    notes = [decision.reason]
    if (
        clock is None
        and decision.batch_size != asked
        and any(
            isinstance(module, NORMALISED) and module.training for module in pl_module.modules()
        )
    ):
        notes.append(f"Batch normalisation now averages over {decision.batch_size} rows.")
    return replace(decision, probes=probes, reason=" ".join(notes))


def _decided(
    trainer: Trainer,
    probes: Sequence[Probe],
    *,
    reader: MemoryReader,
    free_before: int,
    **asked: Any,
) -> GuardDecision:
    """Return the decision by the probes so far and the memory that is free now, on all ranks."""
    free = min(free_before, reader.free_bytes())
    budget = _of_ranks(trainer, free - reserve_bytes(reader.total_bytes()), smallest=True)
    return decide(probes=probes, budget_bytes=budget, **asked)


def _to_run(decision: GuardDecision, largest: int) -> int | None:
    """Return the size that has to run before it is trained with; None: nothing was chosen."""
    chosen = decision.action in ("keep", "accumulate", "reduce")
    return min(decision.batch_size, largest) if chosen else None


def _of_ranks(trainer: Trainer, value: int, *, smallest: bool = False) -> int:
    """Return the largest of what all ranks give here, or the smallest."""
    if trainer.world_size == 1:
        return value
    operation = ReduceOp.MIN if smallest else ReduceOp.MAX
    shared = torch.tensor(value, dtype=torch.int64, device=trainer.strategy.root_device)
    torch.distributed.all_reduce(shared, op=operation)
    return int(shared)


def _measured_by_all(trainer: Trainer, measure: Callable[[int], Probe], rows: int) -> Probe:
    """Return the most that a step on that many rows takes on any rank.

    Raises:
        RuntimeError: It failed on another rank, for another reason than memory.
    """
    if trainer.world_size == 1:
        return measure(rows)
    error, peak, step_s = None, _NO_MEMORY, None
    try:
        _, found, step_s = measure(rows)
        peak = _NO_MEMORY if found is None else found
    except Exception as raised:
        error = raised
    failed = _of_ranks(trainer, int(error is not None))
    if error is not None:
        raise error
    if failed:
        raise RuntimeError(
            f"A training step on {rows} rows that the batch-size guard tried failed on another "
            "rank, whose error says why."
        )
    peak = _of_ranks(trainer, peak)
    slowest_s = _of_ranks(trainer, int((step_s or 0.0) * 1e9)) / 1e9
    return Probe(rows, None if peak == _NO_MEMORY else peak, slowest_s or None)


def apply_decision(
    decision: GuardDecision, trainer: Trainer, datamodule: DataModule | LightningDataModule
) -> str:
    """Set the batch size and the accumulation that were decided, and return the reason.

    A training loader that the trainer has built already (``configure_optimizers`` asked for
    ``trainer.estimated_stepping_batches``) is asked for again.

    Raises:
        BatchSizeError: The batch does not fit and may not be changed.
        OptionsError: The batch size is to be changed, but the data module has no ``batch_size``.
    """
    if decision.action == "raise":
        raise BatchSizeError(decision.reason)
    if decision.action == "warn":
        warnings.warn(decision.reason, FastDataWarning, stacklevel=2)
    if decision.action in ("accumulate", "reduce", "chosen"):
        if not hasattr(datamodule, "batch_size"):
            raise OptionsError(
                f"The batch-size guard cannot set {type(datamodule).__name__}.batch_size to "
                f"{decision.batch_size}: there is no such attribute. Read the batch size of your "
                "loaders from `self.batch_size`, or set the guard's policy to 'raise'."
            )
        datamodule.batch_size = decision.batch_size
        trainer.accumulate_grad_batches = decision.accumulate_grad_batches
        forget_training_loader(trainer)
    _LOG.info(decision.reason)
    return decision.reason


def _why_not(
    trainer: Trainer, pl_module: LightningModule, batch_size: int, policy: GuardPolicy
) -> str | None:
    """Return why training steps cannot be tried and undone here, or None if they can."""
    attributes = attributes_of(trainer)
    callbacks = {kind.__name__ for own in attributes.callbacks for kind in type(own).__mro__}
    scheduled = policy == "accumulate" and "GradientAccumulationScheduler" in callbacks
    tensors = (*pl_module.parameters(), *pl_module.buffers())
    reasons = {
        "the guard is off": policy == "off",
        "the loader does not batch by itself": batch_size < 1,
        f"below a batch size of {batch_size} there is little to measure": batch_size < _SMALLEST,
        "fast_dev_run is on": bool(attributes.fast_dev_run),
        "the resumed run would lose its place in the data": trainer.ckpt_path is not None,
        "training_step is not written": overridden_hook(pl_module, "training_step") is None,
        "lazy layers get their shape from the first batch": any(map(nn.parameter.is_lazy, tensors)),
        "GradientAccumulationScheduler sets the accumulation itself": scheduled,
    }
    why = next((why for why, holds in reasons.items() if holds), None)
    return why or why_not_tried(trainer, pl_module)
