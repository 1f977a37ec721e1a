"""The callback through which a FastDataModule checks its batch size before training."""
# ruff: noqa: ARG002  # hooks are called with all that Lightning has

from __future__ import annotations

import logging
import warnings
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from lightning_fastdata.device.backend import is_out_of_memory, memory_reader
from lightning_fastdata.errors import DatasetError, FastDataWarning
from lightning_fastdata.host import clock
from lightning_fastdata.plugin.datasets import datasets_of
from lightning_fastdata.plugin.guard.prediction import skipped
from lightning_fastdata.plugin.guard.replay import ArrivesInParts, RunsInParts, why_not_in_parts
from lightning_fastdata.plugin.guard.steps import (
    apply_decision,
    collates,
    guard_batch,
    guard_rows,
    run_guard,
)
from lightning_fastdata.plugin.seams.internals import attributes_of, replace_for_one_run
from lightning_fastdata.plugin.seams.trainer import has_cuda, own_datamodule

if TYPE_CHECKING:
    from collections.abc import Callable

    from lightning.pytorch import Callback, LightningModule, Trainer

    from lightning_fastdata.device.backend import MemoryReader
    from lightning_fastdata.plugin.guard.prediction import GuardDecision
    from lightning_fastdata.plugin.module import DataModule


log = logging.getLogger(__name__)

_STEPS = 10  # a rank takes in an epoch at least, where the batch size is chosen
_FEW_ROWS = 8  # that batches of any size are made of
_MORE_ROWS = 64  # where they may be of unequal length, which is then that of the longest
_PADDED = (
    "What collate_fn pads was as long as the longest of {} samples from all over the dataset; "
    "longer ones take more."
)
_NO_GPU = (
    'batch_size="auto" fills the memory of a GPU, and the training is on {1}: batches have '
    "{0.batch_size} samples. Set a batch size."
)
_TOO_LARGE = (
    "Memory ran out in the trainer's stage {stage}. Batches of a training step on one device are "
    "taken in parts by themselves; elsewhere set a smaller batch_size, of validation, too."
)


class GuardHooks:
    """Runs the batch-size guard of the trainer's FastDataModule when a fit starts.

    A FastDataModule adds it to a trainer on CUDA; it does nothing for other data modules.

    Args:
        reader: Reads the device's memory. Default: the CUDA device of the trainer; on another
            device nothing is checked.
        clock_s: Seconds from any start, for ``batch_size="auto"``.
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
        if decision is None or decision.action not in ("accumulate", "chosen"):
            return {}
        return {
            "batch_size": decision.batch_size,
            "accumulate_grad_batches": decision.accumulate_grad_batches,
        }

    def load_state_dict(self, state_dict: dict[str, int]) -> None:
        """Take the sizes of the run that is resumed."""
        self._resumed = dict(state_dict) or None

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Try training steps of growing batches, decide, and apply the decision."""
        datamodule, device = own_datamodule(trainer), trainer.strategy.root_device
        if datamodule is None or datamodule.guard == "off":
            return
        reader = self.reader or memory_reader(device)
        if reader is not None:
            sizes = datamodule.batch_size, trainer.accumulate_grad_batches
            self._undo = partial(_set_sizes, trainer, datamodule, *sizes)
            self.decision = self._decided(trainer, pl_module, datamodule, reader)
            datamodule.notes[:] = [apply_decision(self.decision, trainer, datamodule)]
            reader.reset_peak()
        elif datamodule.chooses_batch_size:
            warnings.warn(_NO_GPU.format(datamodule, device), FastDataWarning, stacklevel=2)
        self._catch_what_does_not_fit(trainer, pl_module, datamodule)

    def _catch_what_does_not_fit(
        self, trainer: Trainer, pl_module: LightningModule, datamodule: DataModule
    ) -> None:
        """Have batches on their way, and steps, go on with less memory where it runs out."""
        if datamodule.guard != "raise":
            move = ArrivesInParts(trainer, trainer.strategy.batch_to_device, datamodule)
            replace_for_one_run(trainer, trainer.strategy, "batch_to_device", move)
        if why_not_in_parts(trainer, pl_module) is None:
            optimization: Any = trainer.fit_loop.epoch_loop.automatic_optimization
            self.parts = RunsInParts(trainer, pl_module, optimization.run, datamodule)
            replace_for_one_run(trainer, optimization, "run", self.parts)

    def _decided(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        datamodule: DataModule,
        reader: MemoryReader,
    ) -> GuardDecision:
        asked, accumulate = datamodule.batch_size, trainer.accumulate_grad_batches
        if self._resumed is not None:
            return _as_before(self._resumed, trainer, datamodule)
        rows = guard_rows(datasets_of(datamodule, "train"))
        if rows is None:
            return skipped(
                asked,
                accumulate,
                "the training data is a stream, has a batch sampler of its own, or comes from the "
                "module's own train_dataloader(), so that no batch of another size can be made",
            )
        auto = datamodule.chooses_batch_size
        try:
            decision = run_guard(
                trainer,
                pl_module,
                batch_of=partial(guard_batch, datamodule),
                batch_size=max(1, rows // (_STEPS * trainer.world_size)) if auto else asked,
                policy=datamodule.guard,
                reader=reader,
                dataset_rows=rows,
                clock=self.clock if auto else None,
                read_rows=_MORE_ROWS if collates(datamodule) else _FEW_ROWS,
                batches_ahead=datamodule.batches_ahead(),
            )
        except DatasetError as error:  # the training may read by other keys, and tells else
            why = f"no batch could be made of the first samples: {error}"
            return skipped(asked, accumulate, why)
        if decision.action == "skipped" or not collates(datamodule):
            return decision
        return replace(decision, reason=f"{decision.reason} {_PADDED.format(_MORE_ROWS)}")

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


def _set_sizes(trainer: Trainer, datamodule: DataModule, batch_size: int, accumulate: int) -> None:
    datamodule.batch_size, trainer.accumulate_grad_batches = batch_size, accumulate


def _as_before(sizes: dict[str, int], trainer: Trainer, datamodule: DataModule) -> GuardDecision:
    """Return the decision of the run that is resumed: its place in the data counts its batches."""
    asked = datamodule.batch_size
    same = skipped(asked, trainer.accumulate_grad_batches, "the run is resumed")
    return replace(
        same,
        batch_size=sizes["batch_size"],
        accumulate_grad_batches=sizes["accumulate_grad_batches"],
        action="accumulate",
        reason=f"The run is resumed with the batch size of {sizes['batch_size']} that its guard "
        f"chose instead of {asked}.",
    )


def attach_guard(trainer: Trainer, guard: type[Callback], *, always: bool) -> None:
    """Add the guard to a trainer that runs on CUDA, or ``always``, unless it has one.

    It comes first, to decide before another callback looks at the batch size.
    """
    callbacks = attributes_of(trainer).callbacks
    known = any(isinstance(own, guard) for own in callbacks)
    if (always or has_cuda(trainer)) and not known:
        callbacks.insert(0, guard())
