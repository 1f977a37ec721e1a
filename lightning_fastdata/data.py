"""Datasets, caches, samplers and orders, besides those that the package names itself."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from lightning_fastdata.executors.columns import ColumnDataset, TokenWindows
from lightning_fastdata.order.block_shuffle import BlockShuffleSampler
from lightning_fastdata.order.epoch_order import EpochOrder
from lightning_fastdata.order.packing import PackedDataset
from lightning_fastdata.order.ranks import SharedSampler
from lightning_fastdata.registry import from_ext
from lightning_fastdata.sources.packed import PackedStrings

if TYPE_CHECKING:
    from lightning_fastdata.ext.images.folder import cache_images
    from lightning_fastdata.ext.images.reading import decode_crop

__all__ = [
    "BlockShuffleSampler",
    "ColumnDataset",
    "EpochOrder",
    "PackedDataset",
    "PackedStrings",
    "SharedSampler",
    "TokenWindows",
    "cache_images",
    "decode_crop",
]

# Type checkers would take any name for one of the package's.
if not TYPE_CHECKING:

    def __getattr__(name: str) -> Any:
        if name not in __all__:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        return from_ext(name)
