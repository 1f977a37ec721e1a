"""A PyTorch Lightning DataModule and callback that keep the GPU fed and show where steps wait.

The public names are loaded on first use, so that importing the package stays light. Errors are in
``lightning_fastdata.errors``; more datasets, caches and samplers in ``lightning_fastdata.data``.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lightning_fastdata.augment.mixing import CutMix, MixUp
    from lightning_fastdata.augment.registry import register
    from lightning_fastdata.augment.transform import BatchTransform, as_batch_transform
    from lightning_fastdata.batches.bad_samples import BadSamples
    from lightning_fastdata.caches.cached import CachedDataset
    from lightning_fastdata.device.prefetch import prefetch
    from lightning_fastdata.errors import FastDataError, FastDataWarning
    from lightning_fastdata.images.folder import FastImageFolder
    from lightning_fastdata.insight.report.run_report import RunReport
    from lightning_fastdata.insight.step_timer import StepTimer
    from lightning_fastdata.loading.loader import FastDataLoader
    from lightning_fastdata.order.buckets import BucketBatchSampler
    from lightning_fastdata.order.mixture import Mixture
    from lightning_fastdata.order.packing import pack
    from lightning_fastdata.planning.options import LoaderOptions
    from lightning_fastdata.plugin.bindings import DataThroughputCallback, FastDataModule
    from lightning_fastdata.sources.shared import share
    from lightning_fastdata.types import SampleKey

__version__ = "0.1.0"

_HOME = {
    "BadSamples": "batches.bad_samples",
    "BatchTransform": "augment.transform",
    "BucketBatchSampler": "order.buckets",
    "CachedDataset": "caches.cached",
    "CutMix": "augment.mixing",
    "DataThroughputCallback": "plugin.bindings",
    "FastDataError": "errors",
    "FastDataLoader": "loading.loader",
    "FastDataModule": "plugin.bindings",
    "FastDataWarning": "errors",
    "FastImageFolder": "images.folder",
    "LoaderOptions": "planning.options",
    "MixUp": "augment.mixing",
    "Mixture": "order.mixture",
    "RunReport": "insight.report.run_report",
    "SampleKey": "types",
    "StepTimer": "insight.step_timer",
    "as_batch_transform": "augment.transform",
    "pack": "order.packing",
    "prefetch": "device.prefetch",
    "register": "augment.registry",
    "share": "sources.shared",
}

# Written out, as type checkers read it.
__all__ = [
    "BadSamples",
    "BatchTransform",
    "BucketBatchSampler",
    "CachedDataset",
    "CutMix",
    "DataThroughputCallback",
    "FastDataError",
    "FastDataLoader",
    "FastDataModule",
    "FastDataWarning",
    "FastImageFolder",
    "LoaderOptions",
    "MixUp",
    "Mixture",
    "RunReport",
    "SampleKey",
    "StepTimer",
    "as_batch_transform",
    "pack",
    "prefetch",
    "register",
    "share",
]

_MOVED = {
    "data": "BlockShuffleSampler CachedSource ColumnDataset EpochOrder PackedDataset PackedStrings "
    "SharedSampler TokenWindows cache_images decode_crop",
    "errors": "BatchError BatchSizeError DatasetError MissingPackageError OptionsError "
    "TransformError VersionError WorkerError",
}
"""Names that stood here once, and may still be imported from here."""

# Type checkers would take any name for one of the package's.
if not TYPE_CHECKING:

    def __getattr__(name: str) -> Any:
        moved = (room for room, names in _MOVED.items() if name in names.split())
        home = _HOME.get(name) or next(moved, None)
        if home is None:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        from lightning_fastdata.host.machine import check_versions

        check_versions()
        value = getattr(import_module(f"{__name__}.{home}"), name)
        if name in _HOME:
            globals()[name] = value
        return value


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOME])
