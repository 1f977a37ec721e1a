"""The batch-size guard on a Lightning trainer: steps of growing batches before the fit, a decision.

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
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import nn
from torch.utils.data import IterableDataset, default_collate

from lightning_fastdata.device.backend import is_out_of_memory, synchronize
from lightning_fastdata.errors import BatchSizeError, FastDataWarning
from lightning_fastdata.executors.kinds import kind_of
from lightning_fastdata.host.memory import read_host_memory, reserve_bytes, size_text
from lightning_fastdata.order.epoch_order import dataset_length
from lightning_fastdata.plugin.datasets import (
    GivenLoader,
    datasets_of,
    in_form_of,
    named,
    taken_apart,
)
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
from lightning_fastdata.plugin.guard.replay import (
    NORMALISED,
    first_that_holds,
    rows_of,
    samples_of,
    why_not_tried,
)
from lightning_fastdata.plugin.guard.snapshots import (
    NoRoomError,
    Snapshot,
    Undo,
    snapshot_random_states,
)
from lightning_fastdata.plugin.seams.hooks import overridden_hook
from lightning_fastdata.plugin.seams.internals import attributes_of, forget_training_loader
from lightning_fastdata.plugin.seams.trainer import loss_scaler, of_ranks, unseen_steps
from lightning_fastdata.torch_internals import not_compiled

if TYPE_CHECKING:
    from lightning.pytorch import LightningModule, Trainer

    from lightning_fastdata.device.backend import MemoryReader
    from lightning_fastdata.plugin.module import DataModule
    from lightning_fastdata.types import Batch


_LOG = logging.getLogger(__name__)
_NO_MEMORY = 2**62  # in the place of a peak
_COPY_SHARE = 2  # of free host memory, a half
_SMALLEST = 3  # at one or two rows there is nothing to extrapolate from
_TRAINED: Final = 2
"""Training steps of each size: the second one has the optimizer's state and the gradients of the
first in memory."""
_TIMED: Final = 3
"""The same where the time counts: the first ones load kernels and choose algorithms."""


def run_guard(
    trainer: Trainer,
    pl_module: LightningModule,
    *,
    batch_of: Callable[[int], Batch],
    batch_size: int,
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
        batch_size: Rows that the user asked for.
        policy: What to do if they do not fit.
        reader: Of the device that the module is on.
        dataset_rows: Rows of the training dataset, if known: no batch has more.
        clock: Seconds from any start. With it the size is chosen: the smallest one up to
            ``batch_size`` that trains nearly as many rows a second as any that fits.
        read_rows: Samples that are read, of which larger batches are made.
        batches_ahead: Batches that are on the device beside the one that is trained on.
        host_bytes: Returns the free memory of the host.
    """
    asked = batch_size
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
                policy=policy if clock is None else None,
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
    budget = -of_ranks(trainer, reserve_bytes(reader.total_bytes()) - free)
    return decide(probes=probes, budget_bytes=budget, **asked)


def _to_run(decision: GuardDecision, largest: int) -> int | None:
    """Return the size that has to run before it is trained with; None: nothing was chosen."""
    chosen = decision.action in ("keep", "accumulate", "chosen")
    return min(decision.batch_size, largest) if chosen else None


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
    failed = of_ranks(trainer, int(error is not None))
    if error is not None:
        raise error
    if failed:
        raise RuntimeError(
            f"A training step on {rows} rows that the batch-size guard tried failed on another "
            "rank, whose error says why."
        )
    peak = of_ranks(trainer, peak)
    slowest_s = of_ranks(trainer, int((step_s or 0.0) * 1e9)) / 1e9
    return Probe(rows, None if peak == _NO_MEMORY else peak, slowest_s or None)


def apply_decision(decision: GuardDecision, trainer: Trainer, datamodule: DataModule) -> str:
    """Set the batch size and the accumulation that were decided, and return the reason.

    A training loader that the trainer has built already (``configure_optimizers`` asked for
    ``trainer.estimated_stepping_batches``) is asked for again.

    Raises:
        BatchSizeError: The batch does not fit and may not be changed.
    """
    if decision.action == "raise":
        raise BatchSizeError(decision.reason)
    if decision.action == "warn":
        warnings.warn(decision.reason, FastDataWarning, stacklevel=2)
    if decision.action in ("accumulate", "chosen"):
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
        f"below a batch size of {batch_size} there is little to measure": batch_size < _SMALLEST,
        "fast_dev_run is on": bool(attributes.fast_dev_run),
        "the resumed run would lose its place in the data": trainer.ckpt_path is not None,
        "training_step is not written": overridden_hook(pl_module, "training_step") is None,
        "lazy layers get their shape from the first batch": any(map(nn.parameter.is_lazy, tensors)),
        "GradientAccumulationScheduler sets the accumulation itself": scheduled,
    }
    return first_that_holds(reasons) or why_not_tried(trainer, pl_module)


class NoLossError(Exception):
    """``training_step`` returned None, so that there is no backward pass to measure."""


def collates(datamodule: DataModule) -> bool:
    """Return whether training batches are collated by a function of the user's."""
    datasets = [dataset for _, dataset in named(datasets_of(datamodule, "train"), "")]
    own = [taken_apart(each, 1)[1].get("collate_fn", datamodule.collate_fn) for each in datasets]
    return any(each is not None and each is not default_collate for each in own)


def guard_rows(datasets: object) -> int | None:
    """Return the samples of the longest dataset; None if one is a stream, or there is none.

    ``datasets`` are as a data module's method returns them.
    """
    known = [dataset for _, dataset in named(datasets, "")]
    if any(isinstance(item, GivenLoader) and item.batch_size is None for item in known):
        return None
    known = [taken_apart(item, 1)[0] for item in known]
    lengths = [None if isinstance(d, IterableDataset) else dataset_length(d) for d in known]
    return None if None in lengths else max((n for n in lengths if n is not None), default=None)


def guard_batch(datamodule: DataModule, rows: int) -> Batch:
    """Return a batch of training."""
    datasets = datasets_of(datamodule, "train")
    batches = [_first_rows(datamodule, each, rows) for _, each in named(datasets, "")]
    return in_form_of(datasets, batches)


def _first_rows(datamodule: DataModule, dataset: Any, rows: int) -> Batch:
    """Return one batch with that many rows, from all over the dataset.

    Short datasets repeat. The loader is the real one, with its transforms. One worker reads, so
    that nothing of the dataset is opened in the training process before all workers start.
    """
    dataset, known = taken_apart(dataset, rows)
    rows = known.get("batch_size", rows)
    length = len(dataset)
    with warnings.catch_warnings():
        # What there is to say of the dataset is said when its own loader is made.
        warnings.simplefilter("ignore", FastDataWarning)
        loader = datamodule.make_loader(
            dataset,
            stage="train",
            batch_size=rows,
            collate_fn=known.get("collate_fn", datamodule.collate_fn),
            sampler=_OfEachRank(
                i * length // rows if rows < length else i % length for i in range(rows)
            ),
            drop_last=False,
            num_workers=1,
            persistent_workers=False,
        )
    loader.ahead = None  # steps are tried on it several times
    if kind_of(loader.executor).caller_reads:
        loader.executor = "workers"
    try:
        return next(iter(loader))
    finally:
        loader.close()


class _OfEachRank(list[int]):
    """Rows that each rank reads for itself: they are not shared out, as those of an epoch are."""

    rank, num_replicas = 0, 2  # as a sampler has them that splits itself


class Repeated:
    """Gives batches of any size: the samples of a small one, again and again.

    Reading thousands of samples takes longer than training on them. A batch whose samples cannot be
    told apart is read at each size.
    """

    def __init__(self, batch_of: Callable[[int], Batch], rows: int) -> None:
        self._batch_of, self._rows = batch_of, rows
        self._few: Batch | None = None
        self._known: int | None = None

    def __call__(self, rows: int) -> Batch:
        """Return a batch with that many rows."""
        if self._few is None:
            self._few = self._batch_of(self._rows)
            self._known = rows_of(self._few)
        if self._known != self._rows:
            return self._batch_of(rows)
        return samples_of(self._few, [i % self._rows for i in range(rows)], self._rows)


class TriedSteps:
    """Tries steps of any size on a trainer, and undoes them.

    Args:
        trainer: It has set up its strategy for a fit; nobody sees its steps.
        pl_module: The module it trains.
        batch_of: Gives a training batch with that many rows, on the CPU, as the loader does.
        reader: Of the device that the module is on.
        let_go: Undoes what a step does, but for the values of tensors.
        clock: Seconds from any start; None: the time of steps does not count.
        batches_ahead: Batches that are on the device beside the one that is trained on.
    """

    def __init__(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        *,
        batch_of: Callable[[int], Batch],
        reader: MemoryReader,
        let_go: Undo,
        clock: Callable[[], float] | None,
        batches_ahead: int,
    ) -> None:
        self.trainer, self.pl_module = trainer, pl_module
        self.batch_of, self.reader, self.let_go, self.clock = batch_of, reader, let_go, clock
        self.batches_ahead = batches_ahead
        self._ahead: list[Batch] = []

    def __call__(self, rows: int) -> Probe:
        """Return what steps on that many rows took; what they made is freed.

        Raises:
            NoLossError: The training step returned no loss.
            Exception: Whatever it raised, but for a lack of memory.
        """
        batch, times_s = self.batch_of(rows), []
        self.reader.reset_peak()
        try:
            for _ in range(_TRAINED if self.clock is None else _TIMED):
                times_s.append(self._trained_s(batch))
            batch = None
            step_s = None if self.clock is None else min(times_s[1:])
            return Probe(rows, self.reader.peak_bytes(), step_s)
        except Exception as error:
            if is_out_of_memory(error):
                return Probe(rows, None)
            error.add_note(
                f"Raised in a training step on {rows} rows that the batch-size guard tried before "
                "the fit. If training itself would not raise it, set the guard's policy to 'off'."
            )
            raise
        finally:
            self._ahead.clear()
            self.let_go()
            gc.collect()
            self.reader.reset_peak()

    def _moved(self, batch: Batch) -> Batch:
        trainer, pl_module = self.trainer, self.pl_module
        datamodule: Any = attributes_of(trainer).datamodule
        owned = overridden_hook(datamodule, "on_before_batch_transfer") is not None
        owner = datamodule if owned else pl_module
        batch = owner.on_before_batch_transfer(trainer.precision_plugin.convert_input(batch), 0)
        return trainer.strategy.batch_to_device(batch, dataloader_idx=0)

    def _trained_s(self, batch: Batch) -> float:
        """Do what the fit loop does with its first batch, in its order; return how long it took."""
        trainer, pl_module = self.trainer, self.pl_module
        strategy = trainer.strategy
        optimizer = strategy.optimizers[0]
        self._ahead = [self._moved(batch) for _ in range(self.batches_ahead)]
        batch = self._moved(batch)
        for group in optimizer.param_groups:
            if isinstance(group.get("lr"), int | float | torch.Tensor):
                group["lr"] = 0.0 * group["lr"]  # the parameters stay as they are
        scaler = loss_scaler(trainer)
        if scaler is not None and scaler.is_enabled():
            # At its usual first scale gradients often overflow; the optimizer step, and the state
            # that it allocates, would then be left out.
            scaler.load_state_dict({**scaler.state_dict(), "scale": 1.0})

        def step() -> torch.Tensor | Mapping[str, Any] | None:
            arguments = _arguments(pl_module.training_step, batch)
            if trainer.world_size == 1:
                return strategy.training_step(*arguments)
            # Not through the wrapper of DistributedDataParallel, whose collectives would wait for a
            # rank that has run out of memory. Backward, it leaves gradients alone for that, too.
            with trainer.precision_plugin.train_step_context():
                return pl_module.training_step(*arguments)

        @torch.enable_grad()
        def closure() -> object:
            output = step()
            loss = output.get("loss") if isinstance(output, Mapping) else output
            if loss is None:
                raise NoLossError
            pl_module.optimizer_zero_grad(trainer.current_epoch, 0, optimizer)
            strategy.backward(loss / trainer.accumulate_grad_batches, optimizer)
            return loss.detach()

        began_s = self._now_s()
        # through `optimizers()`, because its `step` goes by the strategy and the precision plugin
        stepped: Any = pl_module.optimizers()
        pl_module.optimizer_step(trainer.current_epoch, 0, stepped, closure)
        return self._now_s() - began_s

    def _now_s(self) -> float:
        if self.clock is None:
            return 0.0
        synchronize(self.trainer.strategy.root_device)
        return self.clock()


def _arguments(step: Callable[..., Any], batch: Batch) -> tuple[Any, ...]:
    """Return what a step of a module is called with."""
    wanted = inspect.signature(step).parameters.values()
    with_index = len(wanted) > 1 or any(own.kind is own.VAR_POSITIONAL for own in wanted)
    return (batch, 0) if with_index else (batch,)
