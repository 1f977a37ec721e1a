"""The batch-size guard on a Lightning trainer: two training steps before the fit, then a decision.

Made to be called from ``Callback.on_fit_start``: the model is on the device, its optimizers exist,
and no batch has been trained on. The same functions serve ``lightning.pytorch`` and
``pytorch_lightning``: nothing of either is imported here.
"""

from __future__ import annotations

import gc
import inspect
import logging
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.distributed import ReduceOp

from lightning_fastdata.errors import BatchSizeError, FastDataWarning, OptionsError
from lightning_fastdata.plugin.guard.prediction import (
    GuardDecision,
    GuardPolicy,
    MemoryReader,
    Probe,
    decide,
    is_out_of_memory,
    probe_sizes,
    reserve_bytes,
    skipped,
)
from lightning_fastdata.plugin.guard.replay import NORMALISED, rows_of, samples_of, why_not_tried
from lightning_fastdata.plugin.guard.snapshots import Undo, snapshot, snapshot_random_states
from lightning_fastdata.plugin.seams.hooks import overridden_hook
from lightning_fastdata.plugin.seams.internals import attributes_of, forget_training_loader
from lightning_fastdata.plugin.seams.trainer import unseen_steps
from lightning_fastdata.torch_internals import may_have_compiled

if TYPE_CHECKING:
    from lightning.pytorch import LightningDataModule, LightningModule, Trainer

    from lightning_fastdata.plugin.contracts import DataModule
    from lightning_fastdata.types import Batch

_LOG = logging.getLogger(__name__)
_STEPS = 2  # the second one has the optimizer's state and the gradients of the first in memory
_READ_ROWS = 8  # samples that larger batches are made of
_NO_MEMORY = 2**62  # in the place of a peak
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
) -> GuardDecision:
    """Return what to do about the batch size, from training steps on a few rows.

    Sizes are doubled while the next one is predicted to fit, until the chosen one has been run;
    ranks agree on each. Each is tried in two real training steps: precision plugin, transfer hooks,
    ``training_step``, backward, gradient clipping, optimizer step. Callbacks, loggers and the
    profiler do not see them, ``self.log`` does nothing, and modules are in the train or eval mode
    in which training will find them. Afterwards all is as it was: parameters, buffers, metric
    states, modes, plain attributes and containers of the modules, optimizers, schedulers, gradient
    scaler, gradients (none), and the random states of Python, numpy and torch; the copies are kept
    in host memory. Not undone: what a step does to other objects, and to the world outside.

    The decision is ``skipped``, with the reason, where steps cannot be tried or undone safely.
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
    """
    asked = batch_size or 0
    accumulate_now = trainer.accumulate_grad_batches
    if why := _why_not(trainer, pl_module, asked, policy):
        return skipped(asked, accumulate_now, why)
    largest = asked if dataset_rows is None else max(1, min(asked, dataset_rows))
    restore_random = snapshot_random_states()
    try:
        with unseen_steps(trainer, pl_module):
            restore = snapshot(
                pl_module,
                *trainer.strategy.optimizers,
                *(config.scheduler for config in trainer.lr_scheduler_configs),
                getattr(trainer.precision_plugin, "scaler", None),
            )
            measure = partial(
                _measure,
                trainer,
                pl_module,
                batch_of=_Repeated(batch_of, min(_READ_ROWS, largest)),
                reader=reader,
                restore=restore,
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
                policy=policy,
                accumulate_now=accumulate_now,
                dataset_rows=dataset_rows,
            )
            probes = probe_sizes(
                largest,
                partial(_measured_by_all, trainer, measure),
                lambda probes: _to_run(decided(probes), largest),
            )
    except _NoLossError:
        return skipped(asked, accumulate_now, "training_step returned no loss")
    finally:
        restore_random()
        if may_have_compiled():
            # else a compiled module has seen two sizes and compiles for any size from now on
            torch.compiler.reset()
    decision = decided(probes)
    if decision.batch_size != asked and any(
        isinstance(module, NORMALISED) and module.training for module in pl_module.modules()
    ):
        note = f"Batch normalisation now averages over {decision.batch_size} rows."
        return replace(decision, reason=f"{decision.reason} {note}")
    return decision


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
    error, peak = None, _NO_MEMORY
    try:
        found = measure(rows).peak_bytes
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
    return Probe(rows, None if peak == _NO_MEMORY else peak)


class _Repeated:
    """Gives batches of any size: the samples of a small one, again and again.

    Reading thousands of samples takes longer than training on them. A batch whose samples cannot be
    told apart is read at each size.
    """

    def __init__(self, batch_of: Callable[[int], Batch], rows: int) -> None:
        self._batch_of, self._rows = batch_of, rows
        self._few: Batch | None = None
        self._known: int | None = None

    def __call__(self, rows: int) -> Batch:
        if self._few is None:
            self._few = self._batch_of(self._rows)
            self._known = rows_of(self._few)
        if self._known != self._rows:
            return self._batch_of(rows)
        return samples_of(self._few, [i % self._rows for i in range(rows)], self._rows)


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
    if decision.action in ("accumulate", "reduce"):
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


class _NoLossError(Exception):
    """``training_step`` returned None, so that there is no backward pass to measure."""


def _measure(
    trainer: Trainer,
    pl_module: LightningModule,
    rows: int,
    *,
    batch_of: Callable[[int], Batch],
    reader: MemoryReader,
    restore: Undo,
) -> Probe:
    """Return the peak of training steps on that many rows; everything is restored and freed."""
    batch = batch_of(rows)
    reader.reset_peak()
    try:
        for _ in range(_STEPS):
            _training_step(trainer, pl_module, batch)
        return Probe(rows, reader.peak_bytes())
    except Exception as error:
        if is_out_of_memory(error):
            return Probe(rows, None)
        error.add_note(
            f"Raised in a training step on {rows} rows that the batch-size guard tried before the "
            "fit. If training itself would not raise it, set the guard's policy to 'off'."
        )
        raise
    finally:
        restore()
        gc.collect()
        reader.reset_peak()


def _training_step(trainer: Trainer, pl_module: LightningModule, batch: Batch) -> None:
    """Do what the fit loop does with the first batch, in its order."""
    strategy = trainer.strategy
    optimizer = strategy.optimizers[0]
    datamodule: Any = attributes_of(trainer).datamodule
    owned = overridden_hook(datamodule, "on_before_batch_transfer") is not None
    owner = datamodule if owned else pl_module
    batch = owner.on_before_batch_transfer(trainer.precision_plugin.convert_input(batch), 0)
    batch = strategy.batch_to_device(batch, dataloader_idx=0)
    wanted = inspect.signature(pl_module.training_step).parameters.values()
    with_index = len(wanted) > 1 or any(own.kind is own.VAR_POSITIONAL for own in wanted)

    scaler = getattr(trainer.precision_plugin, "scaler", None)
    if scaler is not None and scaler.is_enabled():
        # At its usual first scale gradients often overflow; the optimizer step, and the state that
        # it allocates, would then be left out.
        scaler.load_state_dict({**scaler.state_dict(), "scale": 1.0})

    def step() -> Any:
        arguments = (batch, 0) if with_index else (batch,)
        if trainer.world_size == 1:
            return strategy.training_step(*arguments)
        # Not through the wrapper of DistributedDataParallel, whose collectives would wait for a
        # rank that has run out of memory. Backward, it leaves gradients alone for the same reason.
        with trainer.precision_plugin.train_step_context():
            return pl_module.training_step(*arguments)

    @torch.enable_grad()
    def closure() -> Any:
        output = step()
        loss = output.get("loss") if isinstance(output, Mapping) else output
        if loss is None:
            raise _NoLossError
        pl_module.optimizer_zero_grad(trainer.current_epoch, 0, optimizer)
        strategy.backward(loss / trainer.accumulate_grad_batches, optimizer)
        return loss.detach()

    # through `optimizers()`, because its `step` goes by the strategy and the precision plugin
    stepped: Any = pl_module.optimizers()
    pl_module.optimizer_step(trainer.current_epoch, 0, stepped, closure)
