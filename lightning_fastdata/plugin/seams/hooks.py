"""Which hooks users wrote, whose transfer hooks Lightning calls, and augmentation in one."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import TYPE_CHECKING, Any, Final

from lightning_fastdata.batches.moving import batch_samples
from lightning_fastdata.plugin.seams.internals import (
    attributes_of,
    hook_selector,
    replace_for_one_run,
)
from lightning_fastdata.types import SampleKey

if TYPE_CHECKING:
    from lightning.pytorch import LightningModule, Trainer

    from lightning_fastdata.augment.contract import StageTransform
    from lightning_fastdata.plugin.contracts import DataModule
    from lightning_fastdata.types import Batch


HOOKS = ("on_before_batch_transfer", "transfer_batch_to_device", "on_after_batch_transfer")
PACKAGES: Final = ("lightning.pytorch.", "pytorch_lightning.")
"""How the modules of Lightning's two packages begin."""
_BASES: Final = frozenset({"Callback", "DataHooks", "LightningModule", "ModelHooks"})
"""Classes of Lightning in which hooks are declared, so that it finds one wherever it asks."""


def overridden_hook(owner: object, name: str) -> Callable[..., Any] | None:
    """Return the bound hook that somebody wrote on this object or in its class, or None.

    Args:
        owner: A LightningModule, a LightningDataModule or a callback; or None.
        name: Of the hook.
    """
    if owner is None:
        return None
    if name in vars(owner):
        return getattr(owner, name)  # type: ignore[no-any-return]
    # Asked anew each time: in a notebook a class gets hooks between two fits.
    return getattr(owner, name) if _written_in_class(type(owner), name) else None


def _written_in_class(cls: type[Any], name: str) -> bool:
    definer = next((base for base in cls.__mro__ if name in vars(base)), None)
    if definer is None or definer.__name__ not in _BASES:
        return definer is not None
    return not definer.__module__.startswith(PACKAGES)


def hook_against_device(data: DataModule) -> str | None:
    """Return why a user's hook would not get the batches it always got, or None if none is there.

    Of a data module's own hooks those are right that call ``super()``. The LightningModule's
    ``on_after_batch_transfer`` comes after ours.
    """
    module = None if data.trainer is None else data.trainer.lightning_module
    for name in HOOKS:
        code = getattr(getattr(type(data), name), "__code__", None)
        if name in data.written_hooks() and "super" not in getattr(code, "co_names", ()):
            return f"{type(data).__name__}.{name} does not call super(), which has them computed"
    for name in HOOKS[:2]:
        if overridden_hook(module, name) is not None:
            return (
                f"{type(module).__name__}.{name} would get the images before they are augmented; "
                "on_after_batch_transfer gets them afterwards"
            )
    return None


def choose_own_hooks(datamodule: object, trainer: Trainer, names: Collection[str]) -> None:
    """Have Lightning call transfer hooks of a data module, in one run, without its warning.

    Lightning calls the data module's hook and warns that the LightningModule's is not called. Ours
    calls it, so that the warning would be false.

    Args:
        datamodule: Whose hooks are called. Lightning would choose it, too: it overrides them.
        trainer: At the beginning of its run.
        names: Of :data:`HOOKS`; of any other hook Lightning itself says what is to be said.
    """
    selector = hook_selector(trainer)
    if selector is not None:
        chooses = _ChoosesOwn(datamodule, frozenset(names), selector.get_instance)
        replace_for_one_run(trainer, selector, "get_instance", chooses)


class _ChoosesOwn:
    """A hook selector's ``get_instance``, which knows whose some of the hooks are."""

    def __init__(
        self, datamodule: object, names: frozenset[str], ask: Callable[[str], object]
    ) -> None:
        self.datamodule = datamodule
        self.names = names
        self.ask = ask

    def __call__(self, hook_name: str) -> object:
        return self.datamodule if hook_name in self.names else self.ask(hook_name)


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
