"""Which hooks somebody wrote, and whose transfer hooks Lightning calls."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from lightning_fastdata.plugin.seams.for_one_run import replace_for_one_run
from lightning_fastdata.plugin.seams.internals import hook_selector

if TYPE_CHECKING:
    from collections.abc import Callable, Collection

    from lightning.pytorch import Trainer

    from lightning_fastdata.plugin.contracts import DataModule

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
