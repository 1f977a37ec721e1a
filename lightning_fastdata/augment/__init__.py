"""The user's own Albumentations pipeline, its pixels on the device."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lightning_fastdata.augment.registry import register as register

__all__ = ["register"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from lightning_fastdata.augment.registry import register

    return register
