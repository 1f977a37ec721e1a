"""The callback through which a FastDataModule checks its batch size before training.

Nothing is predicted: ``halved`` or ``doubled`` -> training steps that are tried before a fit and
undone -> ``Probe`` -> ``GuardDecision``. When a fit starts, the model is on the device, its
optimizers exist, and no batch has been trained on. The same functions serve ``lightning.pytorch``
and ``pytorch_lightning``: nothing of either is imported here.
"""
# ruff: noqa: ARG002  # hooks are called with all that Lightning has

from __future__ import annotations

import gc
import inspect
import logging
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Final, Literal, NamedTuple, TypeAlias

import torch
from torch import nn
from torch.utils.data import IterableDataset

from lightning_fastdata.device.backend import (
    MemoryReader,
    is_out_of_memory,
    memory_reader,
    synchronize,
)
from lightning_fastdata.errors import BatchSizeError, DatasetError, FastDataWarning
from lightning_fastdata.executors.kinds import kind_of
from lightning_fastdata.host import clock
from lightning_fastdata.host.memory import read_host_memory, reserve_bytes, size_text
from lightning_fastdata.order.epoch_order import dataset_length
from lightning_fastdata.plugin import seams
from lightning_fastdata.plugin.datasets import (
    GivenLoader,
    datasets_of,
    in_form_of,
    named,
    taken_apart,
)
from lightning_fastdata.plugin.guard import parts
from lightning_fastdata.plugin.guard.snapshots import NoRoomError, Snapshot
from lightning_fastdata.randomness.global_generators import snapshot_random_states
from lightning_fastdata.torch_internals import not_compiled

if TYPE_CHECKING:
    from lightning.pytorch import Callback, LightningModule, Trainer

    from lightning_fastdata.plugin.module import DataModule
    from lightning_fastdata.types import Batch

_LOG = logging.getLogger(__name__)

GuardPolicy: TypeAlias = Literal["accumulate", "raise", "warn", "off"]
"""What to do with a batch that does not fit.

``warn`` trains on it in parts and tells. ``accumulate`` tries before the training what fits, loads
smaller batches and accumulates gradients over more of them. ``raise`` ends the training. ``off``
leaves the error as it is.
"""

_FIRST: Final = 4
_NEARLY: Final = 0.95  # share of the most rows a second
_FEWEST_RATES: Final = 3
_NO_FASTER: Final = 1.05  # times as many rows a second are not worth twice the batch
_NO_MEMORY: Final = 2**62  # stands for a peak where memory ran out
_COPY_SHARE: Final = 2  # half of the free host memory may be taken by a copy
_STEPS_OF_EPOCH: Final = 10  # least steps of a rank in an epoch, where the batch size is chosen
_READ: Final = 32  # samples that are read; batches of any size are made of them
_TRIED: Final = 3
"""Number of training steps at each size: the second one has the optimizer's state and the gradients
of the first in memory, and loads no kernels any more."""

_CHANGES: Final = ("accumulate", "chosen")
_NO_GPU: Final = (
    'batch_size="auto" fills the memory of a GPU, and the training is on {1}: batches have '
    "{0.batch_size} samples. Set a batch size."
)
_TOO_LARGE: Final = (
    "Memory ran out in the trainer's stage {stage}. Batches of a training step on one device are "
    "taken in parts by themselves; elsewhere set a smaller batch_size, of validation, too."
)


class GuardHooks:
    """Chooses a batch size that fits, and has batches that do not fit taken in parts.

    A FastDataModule adds it to a trainer on CUDA; it does nothing for other data modules.

    Args:
        reader: Reads the device's memory. Default: that of the trainer's device; where that does
            not tell, nothing is tried.
        clock_s: Returns seconds from any start.
    """

    def __init__(
        self,
        reader: MemoryReader | None = None,
        clock_s: Callable[[], float] = clock.monotonic,
    ) -> None:
        super().__init__()
        self.reader, self.clock = reader, clock_s
        self.decision: GuardDecision | None = None
        self.parts: parts.RunsInParts | None = None
        """Takes batches in parts where they do not fit; None: that cannot be done, or not yet."""
        self._resumed: dict[str, int] | None = None
        self._undo: Callable[[], None] | None = None

    def state_dict(self) -> dict[str, int]:
        """Return the sizes that were changed, so that a resumed run trains with the same."""
        decision = self.decision
        if decision is None or decision.action not in _CHANGES:
            return {}
        return {
            "batch_size": decision.batch_size,
            "accumulate_grad_batches": decision.accumulate_grad_batches,
        }

    def load_state_dict(self, state_dict: dict[str, int]) -> None:
        """Take the sizes of the run that is resumed."""
        self._resumed = dict(state_dict) or None

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Choose a batch size, where that is asked for, and have what does not fit taken in parts.

        Raises:
            BatchSizeError: Not even one sample fits.
        """
        datamodule = seams.own_datamodule(trainer)
        if datamodule is None or datamodule.guard == "off":
            return
        device = trainer.strategy.root_device
        if self._resumed is not None:
            before = partial(_as_before, self._resumed, datamodule.batch_size)
            self._choose(trainer, datamodule, before)
        elif datamodule.chooses_batch_size or datamodule.guard == "accumulate":
            reader = self.reader or memory_reader(device)
            if reader is not None:
                tries = TriedSteps(trainer, pl_module, datamodule, reader, self.clock)
                self._choose(trainer, datamodule, tries.decide)
            elif datamodule.chooses_batch_size:
                warnings.warn(_NO_GPU.format(datamodule, device), FastDataWarning, stacklevel=2)
        else:
            why = f'guard="{datamodule.guard}" tries nothing before the fit'
            accumulate = trainer.accumulate_grad_batches
            self.decision = skipped(datamodule.batch_size, accumulate, why)
            datamodule.notes.clear()
        if datamodule.guard != "raise":
            move = parts.ArrivesInParts(trainer, trainer.strategy.batch_to_device, datamodule)
            seams.replace_for_one_run(trainer, trainer.strategy, "batch_to_device", move)
        if parts.can_be_in_parts(trainer, pl_module):
            optimization: Any = trainer.fit_loop.epoch_loop.automatic_optimization
            self.parts = parts.RunsInParts(trainer, pl_module, optimization.run, datamodule)
            seams.replace_for_one_run(trainer, optimization, "run", self.parts)

    def _choose(
        self, trainer: Trainer, datamodule: DataModule, decide: Callable[[], GuardDecision]
    ) -> None:
        """Decide on the batch size, and apply what was decided."""
        sizes = datamodule.batch_size, trainer.accumulate_grad_batches
        self._undo = partial(_set_sizes, trainer, datamodule, *sizes)
        self.decision = decision = decide()
        if decision.action == "raise":
            raise BatchSizeError(decision.reason)
        if decision.action in _CHANGES:
            _set_sizes(trainer, datamodule, decision.batch_size, decision.accumulate_grad_batches)
            # It may exist already, if `configure_optimizers` used `estimated_stepping_batches`.
            seams.forget_training_loader(trainer)
        datamodule.notes[:] = [decision.reason]
        _LOG.info(decision.reason)

    def on_before_backward(
        self, trainer: Trainer, pl_module: LightningModule, loss: object
    ) -> None:
        """Note that the training step has come to its end."""
        if self.parts is not None:
            self.parts.has_logged = True

    def on_before_optimizer_step(
        self, trainer: Trainer, pl_module: LightningModule, optimizer: object
    ) -> None:
        """Note that from now on the parameters change."""
        if self.parts is not None:
            self.parts.is_stepping = True

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Give the data module and the trainer back the sizes that the user asked for."""
        self._restore_sizes()

    def on_exception(
        self, trainer: Trainer, pl_module: LightningModule, exception: BaseException
    ) -> None:
        """Give the sizes back after an exception, too, when Lightning calls no teardown."""
        if is_out_of_memory(exception):
            exception.add_note(_TOO_LARGE.format(stage=trainer.state.stage))
        self._restore_sizes()

    def _restore_sizes(self) -> None:
        undo, self._undo, self._resumed = self._undo, None, None
        if undo is not None:
            undo()


def _as_before(sizes: dict[str, int], batch_size: int) -> GuardDecision:
    """Return the decision for the sizes of the resumed run, whose place is counted in batches.

    ``batch_size``: that of the data module.
    """
    size = sizes["batch_size"]
    reason = f"The run is resumed with the batch size of {size} that its guard chose instead of "
    reason += f"{batch_size}."
    return GuardDecision(size, sizes["accumulate_grad_batches"], "accumulate", reason)


def _set_sizes(trainer: Trainer, datamodule: DataModule, batch_size: int, accumulate: int) -> None:
    datamodule.batch_size, trainer.accumulate_grad_batches = batch_size, accumulate


def attach_guard(trainer: Trainer, guard: type[Callback], *, always: bool) -> None:
    """Add the guard to a trainer that runs on CUDA, or ``always``, unless it has one.

    It comes first, to decide before another callback looks at the batch size.
    """
    callbacks = seams.attributes_of(trainer).callbacks
    known = any(isinstance(own, guard) for own in callbacks)
    # Some strategies have no device before they launch.
    kinds = {kind.__name__ for kind in type(trainer.accelerator).__mro__}
    if (always or "CUDAAccelerator" in kinds) and not known:
        callbacks.insert(0, guard())


# -- what is decided ------------------------------------------------------------------------------


class Probe(NamedTuple):
    """What training steps at one batch size took."""

    rows: int
    """Number of rows of the batch."""
    peak_bytes: int | None
    """Most bytes of memory held during the steps; None: the device ran out of memory."""
    budget_bytes: int
    """Bytes that the steps may take: free memory less the reserve."""
    step_s: float = 0.0
    """Seconds of a training step, without the transfer of its batch."""

    @property
    def fits(self) -> bool:
        """Whether the steps ran, and left the reserve alone."""
        return self.peak_bytes is not None and self.peak_bytes <= self.budget_bytes


@dataclass(frozen=True, slots=True)
class GuardDecision:
    """What the guard decided about the batch size of a training, and why."""

    batch_size: int
    """Number of rows per batch to load."""
    accumulate_grad_batches: int
    """Number of batches to accumulate gradients over before each optimizer step."""
    action: Literal["keep", "accumulate", "chosen", "raise", "skipped"]
    """``keep``: the asked size fits. ``accumulate``: it does not, so smaller batches are loaded.
    ``chosen``: no size was asked for. ``raise``: no row fits. ``skipped``: nothing was tried."""
    reason: str
    """The decision and its cause as sentences for a person."""
    probes: tuple[Probe, ...] = ()
    """Probes that the decision rests on."""


def halved(rows: int, measure: Callable[[int], Probe]) -> tuple[Probe, ...]:
    """Return probes of a size, of half of it and so on, down to one that fits or to one row."""
    probes = [measure(rows)]
    while not probes[-1].fits and probes[-1].rows > 1:
        probes.append(measure(-(-probes[-1].rows // 2)))
    return tuple(probes)


def doubled(most: int, measure: Callable[[int], Probe]) -> tuple[Probe, ...]:
    """Return probes of 4 rows, of 8 and so on, up to ``most``, while it fits and gets faster.

    It ends where two doublings together brought less than 5 % more rows a second. Where 4 rows do
    not fit, fewer are tried.
    """
    probes = halved(min(_FIRST, most), measure)
    while probes[-1].fits and _FIRST <= probes[-1].rows < most and not _is_past_knee(probes):
        probes = (*probes, measure(min(2 * probes[-1].rows, most)))
    return probes


def accumulated(asked: int, probes: Sequence[Probe], accumulate_now: int) -> GuardDecision:
    """Return what to do about batches of ``asked`` rows, by the probes of :func:`halved`.

    ``accumulate_now`` is how many batches gradients are accumulated over already. The first probe
    has fewer rows than were asked for where the dataset has no more.
    """
    full, last = probes[0], probes[-1]
    if full.fits:
        room = size_text(full.budget_bytes)
        reason = f"{_needed(full)}, {room} may be used: the batch size stays."
        return GuardDecision(asked, accumulate_now, "keep", reason)
    if not last.fits:
        return _nothing_fits(full, accumulate_now)
    batches = accumulate_now * -(-full.rows // last.rows)
    before, after = full.rows * accumulate_now, last.rows * batches
    seen = f"still sees {after}" if after == before else f"sees {after} instead of {before}"
    reason = f"{_too_large(full)}: the loader now gives {last.rows} samples at a time and "
    reason += f"gradients accumulate over {batches} batches. Each optimizer step {seen} samples."
    return GuardDecision(last.rows, batches, "accumulate", reason)


def chosen(probes: Sequence[Probe], accumulate_now: int) -> GuardDecision:
    """Return the decision where no batch size was asked for, by the probes of :func:`doubled`.

    The smallest size is chosen that trains 95 % of the most rows a second: a larger one takes
    memory, and optimizer steps from each epoch, for nothing.
    """
    fitting = [probe for probe in probes if probe.fits]
    if not fitting:
        return _nothing_fits(probes[-1], accumulate_now)
    rates = _rows_per_s(fitting)
    best = max(rates.values())
    found = next(probe for probe in fitting if rates[probe.rows] >= _NEARLY * best)
    tried = ", ".join(f"{rows}: {rate:.4g}" for rows, rate in rates.items())
    reason = (
        f'batch_size="auto": {found.rows} samples at a time, which takes '
        f"{size_text(found.peak_bytes or 0)} of the {size_text(found.budget_bytes)} that may be "
        f"used and trains {rates[found.rows] / best:.0%} of the most samples a second. Samples a "
        f"second that were measured, by batch size: {tried}."
    )
    return GuardDecision(found.rows, accumulate_now, "chosen", reason)


def skipped(asked: int, accumulate_now: int, why: str) -> GuardDecision:
    """Return the decision to leave everything as it is because nothing could be measured."""
    reason = f"The batch size was not checked against the GPU's memory: {why}."
    return GuardDecision(asked, accumulate_now, "skipped", reason)


def _nothing_fits(probe: Probe, accumulate_now: int) -> GuardDecision:
    reason = (
        f"{_too_large(probe)}, and not even one sample fits. Free memory on the device, use a "
        "smaller model or smaller samples, or set guard to 'off' to try nevertheless."
    )
    return GuardDecision(1, accumulate_now, "raise", reason)


def _is_past_knee(probes: Sequence[Probe]) -> bool:
    rates = list(_rows_per_s(probes).values())
    enough = len(rates) >= _FEWEST_RATES
    return enough and max(rates[-2:]) <= _NO_FASTER * max(rates[:-2])


def _rows_per_s(probes: Sequence[Probe]) -> dict[int, float]:
    # A clock may be too coarse for the fastest of steps.
    return {probe.rows: probe.rows / max(probe.step_s, 1e-9) for probe in probes}


def _needed(probe: Probe) -> str:
    """Return in words how much memory training steps take."""
    rows, peak = probe.rows, probe.peak_bytes
    memory = "more GPU memory than there is" if peak is None else f"{size_text(peak)} of GPU memory"
    return f"A training step on {rows} sample{'' if rows == 1 else 's'} needs {memory}"


def _too_large(probe: Probe) -> str:
    return f"{_needed(probe)}, but {size_text(probe.budget_bytes)} may be used"


# -- steps that are tried --------------------------------------------------------------------------


class TriedSteps:
    """Tries training steps on batches of any size, on all ranks, and undoes them.

    Each size is tried in three real training steps: precision plugin, transfer hooks,
    ``training_step``, backward, gradient clipping, optimizer step. Callbacks, loggers and the
    profiler do not see them, ``self.log`` does nothing, and modules are in the train or eval mode
    in which training will find them. Afterwards all is as it was: parameters, buffers, metric
    states, modes, plain attributes and containers of the modules, optimizers, schedulers, gradient
    scaler, gradients (none), and the random states of Python, numpy and torch. Values are copied to
    host memory once, and put back once: the steps have a learning rate of 0. They are not compiled.
    Not undone: what a step does to other objects, and to the world outside.

    The trainer has set up its strategy for a fit; ``clock_s`` gives seconds.
    """

    def __init__(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        datamodule: DataModule,
        reader: MemoryReader,
        clock_s: Callable[[], float],
    ) -> None:
        self.trainer, self.pl_module, self.datamodule = trainer, pl_module, datamodule
        self.reader, self.clock_s = reader, clock_s
        self._free_bytes = self._few_rows = 0
        self._few: Batch | None = None
        """Small batch, of whose samples batches of other sizes are made; None: not read yet."""
        self._ahead: list[Batch] = []

    def decide(self) -> GuardDecision:
        """Return which batch size to train with; nothing is applied yet.

        The asked size is tried, then half of it and so on until one fits; where none was asked for,
        sizes are doubled. Ranks agree on each.

        The decision is ``skipped``, with the reason, where steps cannot be tried or undone safely,
        or the copy of the model would take more than half of the free host memory of a rank. What a
        training step raises goes through, out of memory excepted.
        """
        trainer, datamodule = self.trainer, self.datamodule
        asked, accumulate_now = datamodule.batch_size, trainer.accumulate_grad_batches
        rows = _rows_to_train_on(datamodule)
        why = _why_not(trainer, self.pl_module)
        if rows is None or why is not None:
            return skipped(asked, accumulate_now, why or _NO_OTHER_SIZE)
        auto = datamodule.chooses_batch_size
        most = max(1, rows // (_STEPS_OF_EPOCH * trainer.world_size) if auto else min(asked, rows))
        restore_random = snapshot_random_states()
        try:
            with (
                seams.unseen_steps(trainer, self.pl_module),
                not_compiled(),
                self._remembered() as before,
            ):
                gc.collect()
                self.reader.reset_peak()
                self._free_bytes = self.reader.free_bytes()
                self._few_rows = min(_READ, most)
                probes = (doubled if auto else halved)(most, partial(self._probe, before))
        except DatasetError as error:  # the training may use other keys, and reports it otherwise
            why = f"no batch could be made of the first samples: {error}"
            return skipped(asked, accumulate_now, why)
        except NoRoomError as needed:
            why = (
                f"a copy of the model takes {size_text(needed.args[0])} of host memory, which is "
                "more than half of what is free there for each process"
            )
            return skipped(asked, accumulate_now, why)
        finally:
            restore_random()
        decide = chosen if auto else partial(accumulated, asked)
        decision = replace(decide(probes, accumulate_now), probes=probes)
        if decision.action != "accumulate" or not parts.normalises(self.pl_module):
            return decision
        note = f"Batch normalisation now averages over {decision.batch_size} samples."
        return replace(decision, reason=f"{decision.reason} {note}")

    def _remembered(self) -> Snapshot:
        """Return what puts back all that steps change.

        Raises:
            NoRoomError: On some rank host memory has no room for it.
        """
        trainer = self.trainer
        schedulers = [config.scheduler for config in trainer.lr_scheduler_configs]
        scaler = seams.loss_scaler(trainer)
        changed = (self.pl_module, *trainer.strategy.optimizers, *schedulers, scaler)
        room = read_host_memory().available_bytes // (_COPY_SHARE * trainer.num_devices)
        snapshot, lacking = None, 0
        try:
            snapshot = Snapshot(*changed, room_bytes=room)
        except NoRoomError as needed:
            lacking = needed.args[0]
        lacking = seams.of_ranks(trainer, lacking)  # or those with room would wait for the others
        if snapshot is None or lacking:
            raise NoRoomError(lacking)
        return snapshot

    def _probe(self, before: Snapshot, rows: int) -> Probe:
        """Return the most that steps on that many rows take on any rank; what they made is freed.

        Raises:
            Exception: Whatever a step raised, but for a lack of memory.
            RuntimeError: A step failed on another rank, for another reason.
        """
        error, peak, step_s = None, _NO_MEMORY, 0.0
        try:
            peak, step_s = self._tried(rows)
        except Exception as raised:
            if not is_out_of_memory(raised):
                error = raised
        finally:
            self._ahead.clear()
            before.let_go()
            gc.collect()
            self.reader.reset_peak()
        failed = seams.of_ranks(self.trainer, int(error is not None))
        if error is not None:
            error.add_note(
                f"Raised in a training step on {rows} samples that the batch-size guard tried "
                "before the fit. If training itself would not raise it, set guard='off'."
            )
            raise error
        if failed:
            raise RuntimeError(
                f"A training step on {rows} samples that the batch-size guard tried failed on "
                "another rank, whose error says why."
            )
        peak = seams.of_ranks(self.trainer, peak)
        step_s = seams.of_ranks(self.trainer, int(step_s * 1e9)) / 1e9
        # Read again each time: kernels loaded by the first step take memory outside of torch's
        # allocator, and so may other processes.
        free = min(self._free_bytes, self.reader.free_bytes())
        budget = -seams.of_ranks(self.trainer, reserve_bytes(self.reader.total_bytes()) - free)
        return Probe(rows, None if peak == _NO_MEMORY else peak, budget, step_s)

    def _tried(self, rows: int) -> tuple[int, float]:
        """Return the peak in bytes of some steps, and the seconds that one of them took."""
        batch = self._batch(rows)
        self.reader.reset_peak()
        first_s, *others_s = [self._trained_s(batch) for _ in range(_TRIED)]
        return self.reader.peak_bytes(), min(others_s, default=first_s)

    def _batch(self, rows: int) -> Batch:
        """Return a batch of any size, which repeats the samples of a small one.

        Reading thousands of samples takes longer than training on them. A batch whose samples
        cannot be told apart is read at each size.
        """
        few = self._few_rows
        if self._few is None:
            self._few = _training_batch(self.datamodule, few)
        if parts.rows_of(self._few) != few:
            return _training_batch(self.datamodule, rows)
        return parts.samples_of(self._few, [i % few for i in range(rows)], few)

    def _moved(self, batch: Batch) -> Batch:
        batch = self.trainer.precision_plugin.convert_input(batch)
        batch = self.datamodule.on_before_batch_transfer(batch, 0)
        return self.trainer.strategy.batch_to_device(batch, dataloader_idx=0)

    def _trained_s(self, batch: Batch) -> float:
        """Do what the fit loop does with its first batch, in its order; return how long it took."""
        trainer, pl_module = self.trainer, self.pl_module
        strategy = trainer.strategy
        optimizer = strategy.optimizers[0]
        self._ahead = [
            self._moved(batch)
            for _ in range(self.datamodule._prefetching.batches_ahead(self.datamodule))
        ]
        batch = self._moved(batch)
        for group in optimizer.param_groups:
            if isinstance(group.get("lr"), int | float | torch.Tensor):
                group["lr"] = 0.0 * group["lr"]  # the parameters stay as they are
        scaler = seams.loss_scaler(trainer)
        if scaler is not None and scaler.is_enabled():
            # At its usual first scale gradients often overflow; the optimizer step, and the state
            # that it allocates, would then be left out.
            scaler.load_state_dict({**scaler.state_dict(), "scale": 1.0})

        @torch.enable_grad()
        def closure() -> object:
            # Not through the wrapper of DistributedDataParallel, whose collectives would wait for a
            # rank that has run out of memory. As it is not called, it leaves gradients alone in
            # backward, too.
            with trainer.precision_plugin.train_step_context():
                output = pl_module.training_step(*_arguments(pl_module.training_step, batch))
            loss = output.get("loss") if isinstance(output, Mapping) else output
            pl_module.optimizer_zero_grad(trainer.current_epoch, 0, optimizer)
            if loss is None:
                return None
            strategy.backward(loss / trainer.accumulate_grad_batches, optimizer)
            return loss.detach()

        began_s = self._now_s()
        # through `optimizers()`, because its `step` goes by the strategy and the precision plugin
        stepped: Any = pl_module.optimizers()
        pl_module.optimizer_step(trainer.current_epoch, 0, stepped, closure)
        return self._now_s() - began_s

    def _now_s(self) -> float:
        synchronize(self.trainer.strategy.root_device)
        return self.clock_s()


def _arguments(step: Callable[..., Any], batch: Batch) -> tuple[Any, ...]:
    wanted = inspect.signature(step).parameters.values()
    with_index = len(wanted) > 1 or any(own.kind is own.VAR_POSITIONAL for own in wanted)
    return (batch, 0) if with_index else (batch,)


_NO_OTHER_SIZE: Final = (
    "the training data is a stream, has a batch sampler of its own, or comes from the module's own "
    "train_dataloader(), so that no batch of another size can be made"
)


def _why_not(trainer: Trainer, pl_module: LightningModule) -> str | None:
    """Return why training steps cannot be tried and undone here, or None if they can."""
    callbacks = seams.attributes_of(trainer).callbacks
    kinds = {kind.__name__ for own in callbacks for kind in type(own).__mro__}
    strategies = parts.strategies_of(trainer)
    known = {"SingleDeviceStrategy", "DDPStrategy"}.intersection(strategies)
    together = any(isinstance(module, nn.SyncBatchNorm) for module in pl_module.modules())
    tensors = (*pl_module.parameters(), *pl_module.buffers())
    reasons = {
        "the resumed run would lose its place in the data": trainer.ckpt_path is not None,
        "lazy layers get their shape from the first batch": any(map(nn.parameter.is_lazy, tensors)),
        "GradientAccumulationScheduler sets the accumulation itself": (
            "GradientAccumulationScheduler" in kinds
        ),
        f"{strategies[0]} shares the model out among devices": not known,
        "SyncBatchNorm waits for all ranks": together and trainer.world_size > 1,
    }
    return parts.first_that_holds(reasons) or parts.why_not_stepped(trainer, pl_module)


def _rows_to_train_on(datamodule: DataModule) -> int | None:
    """Return the samples of the longest dataset; None if one is a stream, or there is none."""
    known = [dataset for _, dataset in named(datasets_of(datamodule, "train"), "")]
    if any(isinstance(item, GivenLoader) and item.batch_size is None for item in known):
        return None
    known = [taken_apart(item, 1)[0] for item in known]
    lengths = [None if isinstance(d, IterableDataset) else dataset_length(d) for d in known]
    return None if None in lengths else max((n for n in lengths if n is not None), default=None)


def _training_batch(datamodule: DataModule, rows: int) -> Batch:
    """Return a batch of training, in host memory."""
    datasets = datasets_of(datamodule, "train")
    batches = [_spread_rows(datamodule, each, rows) for _, each in named(datasets, "")]
    return in_form_of(datasets, batches)


def _spread_rows(datamodule: DataModule, dataset: Any, rows: int) -> Batch:
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
    # Steps are tried on its batch several times.
    loader.training = replace(loader.training, ahead=None)
    if kind_of(loader.executor).caller_reads:
        loader.executor = "workers"
    try:
        return next(iter(loader))
    finally:
        loader.close()


class _OfEachRank(list[int]):
    """Rows that each rank reads for itself: they are not shared out, as those of an epoch are."""

    rank, num_replicas = 0, 2  # as a sampler has them that shares itself out
