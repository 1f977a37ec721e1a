"""Which transfer hooks a user wrote, and whose Lightning calls."""

from __future__ import annotations

from collections.abc import Callable, Collection
from functools import cache
from typing import TYPE_CHECKING, Any

from lightning_fastdata.plugin.seams.for_one_run import replace_for_one_run
from lightning_fastdata.plugin.seams.internals import hook_selector

if TYPE_CHECKING:
    from lightning.pytorch import Trainer

HOOKS = ("on_before_batch_transfer", "transfer_batch_to_device", "on_after_batch_transfer")


def overridden_hook(owner: object, name: str) -> Callable[..., Any] | None:
    """Return the bound transfer hook that a user wrote on this object, or None.

    Lightning declares all three hooks in a class named ``DataHooks``; a hook that resolves to any
    other class, or to the instance, was written by somebody.

    Args:
        owner: A LightningModule or LightningDataModule, or None.
        name: One of :data:`HOOKS`.
    """
    if owner is None:
        return None
    if name in vars(owner):
        return getattr(owner, name)  # type: ignore[no-any-return]
    # mypy does not see that classes can be hashed.
    written = _written_in_class(type(owner), name)  # type: ignore[arg-type]
    return getattr(owner, name) if written else None


@cache
def _written_in_class(cls: type[Any], name: str) -> bool:
    definer = next((base for base in cls.__mro__ if name in vars(base)), None)
    return definer is not None and definer.__name__ != "DataHooks"


def hook_against_device(data: Any, module: object) -> str | None:
    """Return why a user's hook would not get the batches it always got, or None if none is there.

    Args:
        data: The data module. Of its hooks those are right that call ``super()``.
        module: The LightningModule, or None. Its ``on_after_batch_transfer`` comes after ours.
    """
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


def choose_own_hooks(datamodule: Any, trainer: Trainer, names: Collection[str]) -> None:
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
        self, datamodule: Any, names: frozenset[str], ask: Callable[[str], object]
    ) -> None:
        self.datamodule = datamodule
        self.names = names
        self.ask = ask

    def __call__(self, hook_name: str) -> object:
        return self.datamodule if hook_name in self.names else self.ask(hook_name)
