"""The callback through which a FastDataModule checks its batch size before training."""
# ruff: noqa: ARG002  # hooks are called with all that Lightning has

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from lightning_fastdata.device import MemoryReader, is_out_of_memory, memory_reader
from lightning_fastdata.errors import BatchSizeError, FastDataWarning
from lightning_fastdata.host import clock
from lightning_fastdata.plugin.guard.parts import ArrivesInParts, RunsInParts, why_not_in_parts
from lightning_fastdata.plugin.guard.steps import GuardDecision, run_guard, skipped
from lightning_fastdata.plugin.seams.internals import (
    attributes_of,
    forget_training_loader,
    replace_for_one_run,
)
from lightning_fastdata.plugin.seams.trainer import has_cuda, own_datamodule

if TYPE_CHECKING:
    from lightning.pytorch import Callback, LightningModule, Trainer

    from lightning_fastdata.plugin.module import DataModule

_LOG = logging.getLogger(__name__)

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
        clock_s: Seconds from any start.
    """

    def __init__(
        self,
        reader: MemoryReader | None = None,
        clock_s: Callable[[], float] = clock.monotonic,
    ) -> None:
        super().__init__()
        self.reader, self.clock = reader, clock_s
        self.decision: GuardDecision | None = None
        self.parts: RunsInParts | None = None
        """What takes batches in parts that do not fit; None: they cannot be, or not yet."""
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
        datamodule = own_datamodule(trainer)
        if datamodule is None or datamodule.guard == "off":
            return
        device = trainer.strategy.root_device
        if self._resumed is not None:
            before = partial(_as_before, self._resumed, datamodule.batch_size)
            self._choose(trainer, datamodule, before)
        elif datamodule.chooses_batch_size or datamodule.guard == "accumulate":
            reader = self.reader or memory_reader(device)
            if reader is not None:
                tries = partial(run_guard, trainer, pl_module, datamodule, reader, self.clock)
                self._choose(trainer, datamodule, tries)
            elif datamodule.chooses_batch_size:
                warnings.warn(_NO_GPU.format(datamodule, device), FastDataWarning, stacklevel=2)
        else:
            why = f'guard="{datamodule.guard}" tries nothing before the fit'
            accumulate = trainer.accumulate_grad_batches
            self.decision = skipped(datamodule.batch_size, accumulate, why)
            datamodule.notes.clear()
        if datamodule.guard != "raise":
            move = ArrivesInParts(trainer, trainer.strategy.batch_to_device, datamodule)
            replace_for_one_run(trainer, trainer.strategy, "batch_to_device", move)
        if why_not_in_parts(trainer, pl_module) is None:
            optimization: Any = trainer.fit_loop.epoch_loop.automatic_optimization
            self.parts = RunsInParts(trainer, pl_module, optimization.run, datamodule)
            replace_for_one_run(trainer, optimization, "run", self.parts)

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
            # It may be made already: `configure_optimizers` asked for `estimated_stepping_batches`.
            forget_training_loader(trainer)
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
        """Do the same after an exception, when Lightning calls no teardown."""
        if is_out_of_memory(exception):
            exception.add_note(_TOO_LARGE.format(stage=trainer.state.stage))
        self._restore_sizes()

    def _restore_sizes(self) -> None:
        undo, self._undo, self._resumed = self._undo, None, None
        if undo is not None:
            undo()


def _as_before(sizes: dict[str, int], batch_size: int) -> GuardDecision:
    """Return the sizes of the run that is resumed, of which its place in the data counts batches.

    ``batch_size``: that of the data module.
    """
    return GuardDecision(
        batch_size=sizes["batch_size"],
        accumulate_grad_batches=sizes["accumulate_grad_batches"],
        action="accumulate",
        reason=f"The run is resumed with the batch size of {sizes['batch_size']} that its guard "
        f"chose instead of {batch_size}.",
    )


def _set_sizes(trainer: Trainer, datamodule: DataModule, batch_size: int, accumulate: int) -> None:
    datamodule.batch_size, trainer.accumulate_grad_batches = batch_size, accumulate


def attach_guard(trainer: Trainer, guard: type[Callback], *, always: bool) -> None:
    """Add the guard to a trainer that runs on CUDA, or ``always``, unless it has one.

    It comes first, to decide before another callback looks at the batch size.
    """
    callbacks = attributes_of(trainer).callbacks
    known = any(isinstance(own, guard) for own in callbacks)
    if (always or has_cuda(trainer)) and not known:
        callbacks.insert(0, guard())
