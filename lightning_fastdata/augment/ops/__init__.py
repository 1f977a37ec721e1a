"""Albumentations transforms in the form that runs on a batch on the device."""

from __future__ import annotations

from types import MappingProxyType
from typing import Final

from lightning_fastdata.augment.ops import geometry, values
from lightning_fastdata.augment.ops.operation import DeviceOp

DEVICE_OPS: Final[MappingProxyType[str, DeviceOp]] = MappingProxyType(
    {op.name: op for op in (*geometry.OPS, *values.OPS)}
)
"""Every transform with a device form, by the name of its class in Albumentations."""
