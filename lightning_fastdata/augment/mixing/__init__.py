"""MixUp, CutMix, Mosaic and RandomErasing on whole batches, keyed by sample."""

from __future__ import annotations

from lightning_fastdata.augment.mixing.blend import CutMix, MixUp, RandomErasing
from lightning_fastdata.augment.mixing.mosaic import Mosaic
from lightning_fastdata.augment.mixing.step import OneOfMixes
from lightning_fastdata.augment.mixing.transform import MixedTransform, mixed

__all__ = ["CutMix", "MixUp", "MixedTransform", "Mosaic", "OneOfMixes", "RandomErasing", "mixed"]
