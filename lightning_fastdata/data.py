"""Datasets, caches, samplers and orders, besides those that the package names itself."""

from __future__ import annotations

from lightning_fastdata.caches.cached import CachedSource
from lightning_fastdata.caches.image_cache import cache_images
from lightning_fastdata.executors.gather.columns import ColumnDataset, TokenWindows
from lightning_fastdata.images.packed import PackedStrings
from lightning_fastdata.images.reading import decode_crop
from lightning_fastdata.order.block_shuffle import BlockShuffleSampler
from lightning_fastdata.order.epoch_order import EpochOrder
from lightning_fastdata.order.packing import PackedDataset
from lightning_fastdata.order.ranks import SharedSampler

__all__ = [
    "BlockShuffleSampler",
    "CachedSource",
    "ColumnDataset",
    "EpochOrder",
    "PackedDataset",
    "PackedStrings",
    "SharedSampler",
    "TokenWindows",
    "cache_images",
    "decode_crop",
]
