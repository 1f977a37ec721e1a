"""Which hooks users wrote, which of them Lightning calls, and augmentation in one of them."""

from __future__ import annotations

from collections.abc import Callable, Collection
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from lightning_fastdata.batches.staged import batch_samples
from lightning_fastdata.plugin.placing.shared_draws import told_of_shared_draws
from lightning_fastdata.plugin.seams.internals import (
    attributes_of,
    hook_selector,
    replace_for_one_run,
)
from lightning_fastdata.tree import held
from lightning_fastdata.types import Batch, SampleKey

if TYPE_CHECKING:
    from lightning.pytorch import LightningModule, Trainer

    from lightning_fastdata.augment import StageTransform

HOOKS = ("on_before_batch_transfer", "transfer_batch_to_device", "on_after_batch_transfer")
PACKAGES: Final = ("lightning.pytorch.", "pytorch_lightning.")
"""How the modules of Lightning's two packages begin."""
_BASES: Final = frozenset({"Callback", "DataHooks", "LightningModule", "ModelHooks"})
"""Classes of Lightning in which hooks are declared, so that it finds one wherever it asks."""
_HOOK: Final = HOOKS[2]
_STEPS: Final = "fastdata_steps"
"""Attribute of the function that takes its place: what runs before the hook."""


def package_of(one: object) -> str:
    """Return which of Lightning's packages the class of an object is of; empty: neither."""
    modules = (base.__module__ for base in type(one).__mro__)
    return next((p[:-1] for name in modules for p in PACKAGES if name.startswith(p)), "")


def home_of(package: str) -> str:
    """Return the module that has the data module which a Trainer of a package takes."""
    return "lightning_fastdata" + ".pytorch_lightning" * (package == "pytorch_lightning")


def overridden_hook(owner: object, name: str) -> Callable[..., Any] | None:
    """Return the bound hook that a user wrote on this object or in its class, or None."""
    # Asked anew each time: in a notebook a class gets hooks between two fits.
    if owner is None or not (name in vars(owner) or _written_in_class(type(owner), name)):
        return None
    hook: Callable[..., Any] = getattr(owner, name)
    return hook


def _written_in_class(cls: type[object], name: str) -> bool:
    definer = next((base for base in cls.__mro__ if name in vars(base)), None)
    if definer is None or definer.__name__ not in _BASES:
        return definer is not None
    return not definer.__module__.startswith(PACKAGES)


def choose_own_hooks(datamodule: object, trainer: Trainer, names: Collection[str]) -> None:
    """Have Lightning call transfer hooks of a data module, in one run, without its warning.

    Lightning calls the data module's hook and warns that the LightningModule's is not called. Ours
    calls it, so that the warning would be false.
    """
    selector = hook_selector(trainer)
    if selector is not None:
        chooses = partial(_choose, datamodule, frozenset(names), selector.get_instance)
        replace_for_one_run(trainer, selector, "get_instance", chooses)


def _choose(
    datamodule: object, names: frozenset[str], ask: Callable[[str], object], hook_name: str
) -> object:
    return datamodule if hook_name in names else ask(hook_name)


def augment_foreign_batches(
    trainer: Trainer,
    pl_module: LightningModule,
    transform: StageTransform,
    *,
    seed: int,
    in_transfer: Callable[[], bool],
) -> None:
    """Run a transform on every training batch of a trainer, until its run ends.

    Lightning asks one object for the hook: the data module if it overrides it, else the
    LightningModule. That instance gets an attribute of the hook's name, which runs the transform
    and then what was there before; the class is not touched.

    ``in_transfer`` says whether the trainer is moving a batch of a loader right now: the model
    summary and loggers send an example input through the same hook.
    """
    datamodule = attributes_of(trainer).datamodule
    owner = pl_module if overridden_hook(datamodule, _HOOK) is None else datamodule
    epoch, samples = -1, 0  # of this epoch that were augmented

    def augment(batch: Batch) -> Batch:
        nonlocal epoch, samples
        if batch is None or not trainer.training or not in_transfer():
            return batch
        if trainer.current_epoch != epoch:
            epoch, samples = trainer.current_epoch, 0
        key = SampleKey(seed, epoch, samples)
        samples += batch_samples(batch)
        # Lightning converts to the precision's dtype before the transfer; uint8 images became
        # floating point only now.
        with told_of_shared_draws(transform, batch):
            batch = transform.apply_unprepared(batch, key)
        return trainer.precision_plugin.convert_input(batch)

    earlier = getattr(owner, _HOOK)
    steps: list[Callable[[Batch], Batch]] | None = held(earlier, _STEPS)
    if steps is not None:  # of another callback, which comes first
        steps.append(augment)
        return
    steps = [augment]

    # A plain function without __wrapped__: Lightning compares its code with the default hook's.
    def on_after_batch_transfer(batch: Batch, dataloader_idx: int) -> Batch:
        for step in steps:
            batch = step(batch)
        return earlier(batch, dataloader_idx)

    setattr(on_after_batch_transfer, _STEPS, steps)
    replace_for_one_run(trainer, owner, _HOOK, on_after_batch_transfer)
