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
    joint_warp,
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

REPLAYED_OPS: Final[Mapping[str, DeviceOp]] = MappingProxyType(
    {**DEVICE_OPS, joint_warp.NAME: joint_warp.JOINT_WARP}
)
"""The same, and what is made of several of them; everything that a program can name."""
