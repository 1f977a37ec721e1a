"""Albumentations transforms in the form that runs on a batch on the device."""

from __future__ import annotations

from types import MappingProxyType
from typing import TYPE_CHECKING, Final

from lightning_fastdata.augment.ops import (
    blur,
    color,
    distortion,
    downscale,
    dropout,
    elastic,
    histogram,
    index,
    lens,
    noise,
    output,
    principal,
    rank,
    resample,
    sensor,
    sharpen,
    table,
    tiles,
    warp,
)

if TYPE_CHECKING:
    from collections.abc import Mapping

    from lightning_fastdata.augment.ops.operation import DeviceOp

_FAMILIES = (
    *(index, resample, warp, table, color, blur, dropout, output),
    *(downscale, histogram, lens, principal, rank, sharpen),
    *(distortion, elastic, noise, sensor, tiles),
)

DEVICE_OPS: Final[Mapping[str, DeviceOp]] = MappingProxyType(
    {op.name: op for family in _FAMILIES for op in family.OPS}
)
"""Every transform with a device form, by the name of its class in Albumentations."""
