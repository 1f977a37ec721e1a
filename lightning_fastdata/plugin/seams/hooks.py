"""Which transfer hooks a user wrote."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable
from functools import cache
from typing import Any

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


def silence_shared_hook_warning(name: str) -> None:
    """Keep Lightning from warning that a LightningModule's transfer hook is not called.

    Lightning calls the data module's hook only and says so, once per process. Ours calls the
    LightningModule's hook too, so that this one message would be false.

    Args:
        name: One of :data:`HOOKS`.
    """
    message = (
        f"You have overridden `{name}` in both `LightningModule` and `LightningDataModule`. "
        "It will use the implementation from `LightningDataModule` instance."
    )
    warnings.filterwarnings("ignore", message=re.escape(message) + "$", category=UserWarning)
