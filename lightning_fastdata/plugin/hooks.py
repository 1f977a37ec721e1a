"""Which transfer hooks a user wrote."""

from __future__ import annotations

from collections.abc import Callable
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
    for cls in type(owner).__mro__:
        if name in vars(cls):
            return None if cls.__name__ == "DataHooks" else getattr(owner, name)
    return None
