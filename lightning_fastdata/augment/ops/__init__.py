"""Albumentations transforms in the form that runs on a batch on the device."""

from __future__ import annotations

from types import MappingProxyType
from typing import TYPE_CHECKING, Final

from lightning_fastdata.augment.ops import geometry, values

if TYPE_CHECKING:
    from collections.abc import Mapping

    from lightning_fastdata.augment.ops.operation import DeviceOp

DEVICE_OPS: Final[Mapping[str, DeviceOp]] = MappingProxyType(
    {op.name: op for op in (*geometry.OPS, *values.OPS)}
)
"""Every transform with a device form, by the name of its class in Albumentations."""


def with_registered(registered: Mapping[str, DeviceOp]) -> Mapping[str, DeviceOp]:
    """Return device forms by name, with those that were registered for a pipeline's classes."""
    return {**DEVICE_OPS, **registered}
