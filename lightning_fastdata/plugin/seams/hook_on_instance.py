"""Augmentation for batches whose loader is not ours, in the hook of whoever owns it."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from lightning_fastdata.batches.moving import batch_samples
from lightning_fastdata.plugin.seams.hooks import overridden_hook
from lightning_fastdata.plugin.seams.trainer_facts import attributes_of
from lightning_fastdata.types import SampleKey

if TYPE_CHECKING:
    from lightning.pytorch import LightningModule, Trainer

    from lightning_fastdata.augment.stage_transform import StageTransform
    from lightning_fastdata.types import Batch

HOOK = "on_after_batch_transfer"


def augment_foreign_batches(
    trainer: Trainer,
    pl_module: LightningModule,
    transform: StageTransform,
    *,
    seed: int,
    in_transfer: Callable[[], bool],
) -> Callable[[], None]:
    """Run a transform on every training batch of a trainer, and return what stops it.

    Lightning asks one object for the hook: the data module if it overrides it, else the
    LightningModule. That instance gets an attribute of the hook's name, which runs the transform
    and then what was there before; the class is not touched.

    Args:
        trainer: The trainer, after its data module is attached.
        pl_module: The module it trains.
        transform: Runs on each training batch, on the batch's device.
        seed: Seed of the draws.
        in_transfer: Whether the trainer is moving a batch of a loader right now. The model summary
            and loggers send an example input through the same hook.
    """
    datamodule = attributes_of(trainer).datamodule
    owner: object = pl_module
    if overridden_hook(datamodule, HOOK) is not None:
        owner = datamodule
    progress = _Progress()

    def augment(batch: Batch) -> Batch:
        if batch is None or not trainer.training or not in_transfer():
            return batch
        key = SampleKey(seed, trainer.current_epoch, progress.samples_before(trainer.current_epoch))
        progress.samples += batch_samples(batch)
        # Lightning converts to the precision's dtype before the transfer; uint8 images became
        # floating point only now.
        return trainer.precision_plugin.convert_input(transform.apply_unprepared(batch, key))

    steps = _steps_before_hook(owner)
    steps.append(augment)

    def stop() -> None:
        if augment in steps:
            steps.remove(augment)
        if not steps:
            _restore_hook(owner)

    return stop


_STEPS = "fastdata_steps"


def _steps_before_hook(owner: object) -> list[Callable[[Batch], Batch]]:
    """Return the functions that run before the owner's hook, installing them if need be."""
    installed: Any = vars(owner).get(HOOK)
    if hasattr(installed, _STEPS):
        return getattr(installed, _STEPS)  # type: ignore[no-any-return]
    earlier = getattr(owner, HOOK)
    steps: list[Callable[[Batch], Batch]] = []

    # A plain function without __wrapped__: Lightning compares its code with the default hook's.
    def on_after_batch_transfer(batch: Batch, dataloader_idx: int) -> Batch:
        for step in steps:
            batch = step(batch)
        return earlier(batch, dataloader_idx)

    setattr(on_after_batch_transfer, _STEPS, steps)
    on_after_batch_transfer.earlier_attribute = installed  # type: ignore[attr-defined]
    vars(owner)[HOOK] = on_after_batch_transfer
    return steps


def _restore_hook(owner: object) -> None:
    installed: Any = vars(owner).get(HOOK)
    if not hasattr(installed, _STEPS):
        return
    if installed.earlier_attribute is None:
        del vars(owner)[HOOK]
    else:
        vars(owner)[HOOK] = installed.earlier_attribute


class _Progress:
    """How many samples of the current epoch were augmented."""

    def __init__(self) -> None:
        self.epoch = -1
        self.samples = 0

    def samples_before(self, epoch: int) -> int:
        if epoch != self.epoch:
            self.epoch, self.samples = epoch, 0
        return self.samples
