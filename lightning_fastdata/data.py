"""Datasets, caches, samplers and orders, besides those that the package itself exports."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from lightning_fastdata.batches.collate import ListsOf
from lightning_fastdata.executors.columns import ColumnDataset, TokenWindows
from lightning_fastdata.order.epoch_order import EpochOrder
from lightning_fastdata.order.lengths import PackedDataset
from lightning_fastdata.order.samplers import BlockShuffleSampler, SharedSampler
from lightning_fastdata.registry import from_ext
from lightning_fastdata.sources.files import PackedStrings

if TYPE_CHECKING:
    from lightning_fastdata.ext.images.decoders import decode_crop
    from lightning_fastdata.ext.images.folder import cache_images

__all__ = [
    "BlockShuffleSampler",
    "ColumnDataset",
    "EpochOrder",
    "ListsOf",
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
