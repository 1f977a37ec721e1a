"""A PyTorch Lightning DataModule and callback that keep the GPU fed and show where steps wait.

The public names are loaded on first use, so that importing the package stays light.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lightning_fastdata.augment.mixing import CutMix as CutMix
    from lightning_fastdata.augment.mixing import MixUp as MixUp
    from lightning_fastdata.augment.registry import register as register
    from lightning_fastdata.augment.transform import BatchTransform as BatchTransform
    from lightning_fastdata.augment.transform import as_batch_transform as as_batch_transform
    from lightning_fastdata.batches.bad_samples import BadSamples as BadSamples
    from lightning_fastdata.caches.cached import CachedDataset as CachedDataset
    from lightning_fastdata.caches.cached import CachedSource as CachedSource
    from lightning_fastdata.caches.image_cache import cache_images as cache_images
    from lightning_fastdata.device.prefetch import prefetch as prefetch
    from lightning_fastdata.errors import BatchError as BatchError
    from lightning_fastdata.errors import BatchSizeError as BatchSizeError
    from lightning_fastdata.errors import DatasetError as DatasetError
    from lightning_fastdata.errors import FastDataError as FastDataError
    from lightning_fastdata.errors import FastDataWarning as FastDataWarning
    from lightning_fastdata.errors import MissingPackageError as MissingPackageError
    from lightning_fastdata.errors import OptionsError as OptionsError
    from lightning_fastdata.errors import TransformError as TransformError
    from lightning_fastdata.errors import VersionError as VersionError
    from lightning_fastdata.errors import WorkerError as WorkerError
    from lightning_fastdata.executors.gather.columns import ColumnDataset as ColumnDataset
    from lightning_fastdata.executors.gather.columns import TokenWindows as TokenWindows
    from lightning_fastdata.images.folder import FastImageFolder as FastImageFolder
    from lightning_fastdata.images.packed import PackedStrings as PackedStrings
    from lightning_fastdata.images.reading import decode_crop as decode_crop
    from lightning_fastdata.insight.report.run_report import RunReport as RunReport
    from lightning_fastdata.insight.step_timer import StepTimer as StepTimer
    from lightning_fastdata.loading.loader import FastDataLoader as FastDataLoader
    from lightning_fastdata.order.block_shuffle import (
        BlockShuffleSampler as BlockShuffleSampler,
    )
    from lightning_fastdata.order.buckets import BucketBatchSampler as BucketBatchSampler
    from lightning_fastdata.order.epoch_order import EpochOrder as EpochOrder
    from lightning_fastdata.order.mixture import Mixture as Mixture
    from lightning_fastdata.order.packing import PackedDataset as PackedDataset
    from lightning_fastdata.order.packing import pack as pack
    from lightning_fastdata.order.ranks import SharedSampler as SharedSampler
    from lightning_fastdata.planning.options import LoaderOptions as LoaderOptions
    from lightning_fastdata.plugin.bindings import DataThroughputCallback as DataThroughputCallback
    from lightning_fastdata.plugin.bindings import FastDataModule as FastDataModule
    from lightning_fastdata.sources.shared import share as share
    from lightning_fastdata.types import SampleKey as SampleKey

__version__ = "0.1.0"

_HOME = {
    "BadSamples": "batches.bad_samples",
    "BatchError": "errors",
    "BatchSizeError": "errors",
    "BatchTransform": "augment.transform",
    "BlockShuffleSampler": "order.block_shuffle",
    "BucketBatchSampler": "order.buckets",
    "CachedDataset": "caches.cached",
    "CachedSource": "caches.cached",
    "ColumnDataset": "executors.gather.columns",
    "CutMix": "augment.mixing",
    "DataThroughputCallback": "plugin.bindings",
    "DatasetError": "errors",
    "EpochOrder": "order.epoch_order",
    "FastDataError": "errors",
    "FastDataLoader": "loading.loader",
    "FastDataModule": "plugin.bindings",
    "FastDataWarning": "errors",
    "FastImageFolder": "images.folder",
    "LoaderOptions": "planning.options",
    "MissingPackageError": "errors",
    "MixUp": "augment.mixing",
    "Mixture": "order.mixture",
    "OptionsError": "errors",
    "PackedDataset": "order.packing",
    "PackedStrings": "images.packed",
    "RunReport": "insight.report.run_report",
    "SampleKey": "types",
    "SharedSampler": "order.ranks",
    "StepTimer": "insight.step_timer",
    "TokenWindows": "executors.gather.columns",
    "TransformError": "errors",
    "VersionError": "errors",
    "WorkerError": "errors",
    "as_batch_transform": "augment.transform",
    "cache_images": "caches.image_cache",
    "decode_crop": "images.reading",
    "pack": "order.packing",
    "prefetch": "device.prefetch",
    "register": "augment.registry",
    "share": "sources.shared",
}

# Written out, as type checkers read it.
__all__ = [
    "BadSamples",
    "BatchError",
    "BatchSizeError",
    "BatchTransform",
    "BlockShuffleSampler",
    "BucketBatchSampler",
    "CachedDataset",
    "CachedSource",
    "ColumnDataset",
    "CutMix",
    "DataThroughputCallback",
    "DatasetError",
    "EpochOrder",
    "FastDataError",
    "FastDataLoader",
    "FastDataModule",
    "FastDataWarning",
    "FastImageFolder",
    "LoaderOptions",
    "MissingPackageError",
    "MixUp",
    "Mixture",
    "OptionsError",
    "PackedDataset",
    "PackedStrings",
    "RunReport",
    "SampleKey",
    "SharedSampler",
    "StepTimer",
    "TokenWindows",
    "TransformError",
    "VersionError",
    "WorkerError",
    "as_batch_transform",
    "cache_images",
    "decode_crop",
    "pack",
    "prefetch",
    "register",
    "share",
]

# Type checkers would take any name for one of the package's.
if not TYPE_CHECKING:

    def __getattr__(name: str) -> Any:
        if name not in _HOME:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        from lightning_fastdata.host.machine import check_versions

        check_versions()
        value = getattr(import_module(f"{__name__}.{_HOME[name]}"), name)
        globals()[name] = value
        return value


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOME])
