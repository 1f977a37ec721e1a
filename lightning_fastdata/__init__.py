"""A PyTorch Lightning DataModule and callback that keep the GPU fed and show where steps wait.

The public names are loaded on first use, so that importing the package stays light. Errors are in
``lightning_fastdata.errors``; more datasets, caches and samplers in ``lightning_fastdata.data``.
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
    from lightning_fastdata.device.prefetch import prefetch as prefetch
    from lightning_fastdata.errors import FastDataError as FastDataError
    from lightning_fastdata.errors import FastDataWarning as FastDataWarning
    from lightning_fastdata.ext.images.folder import FastImageFolder as FastImageFolder
    from lightning_fastdata.insight.report import RunReport as RunReport
    from lightning_fastdata.loading.loader import FastDataLoader as FastDataLoader
    from lightning_fastdata.loading.options import LoaderOptions as LoaderOptions
    from lightning_fastdata.order.lengths import BucketBatchSampler as BucketBatchSampler
    from lightning_fastdata.order.lengths import pack as pack
    from lightning_fastdata.order.mixture import Mixture as Mixture
    from lightning_fastdata.plugin.bindings import DataThroughputCallback as DataThroughputCallback
    from lightning_fastdata.plugin.bindings import FastDataModule as FastDataModule
    from lightning_fastdata.sources.shared import share as share
    from lightning_fastdata.step_timer import StepTimer as StepTimer
    from lightning_fastdata.types import SampleKey as SampleKey

__version__ = "0.1.0"

_HOME = {
    "BadSamples": "batches.bad_samples",
    "BatchTransform": "augment.transform",
    "BucketBatchSampler": "order.lengths",
    "CachedDataset": "caches.cached",
    "CutMix": "augment.mixing",
    "DataThroughputCallback": "plugin.bindings",
    "FastDataError": "errors",
    "FastDataLoader": "loading.loader",
    "FastDataModule": "plugin.bindings",
    "FastDataWarning": "errors",
    "FastImageFolder": "ext.images.folder",
    "LoaderOptions": "loading.options",
    "MixUp": "augment.mixing",
    "Mixture": "order.mixture",
    "RunReport": "insight.report",
    "SampleKey": "types",
    "StepTimer": "step_timer",
    "as_batch_transform": "augment.transform",
    "pack": "order.lengths",
    "prefetch": "device.prefetch",
    "register": "augment.registry",
    "share": "sources.shared",
}

__all__ = sorted(_HOME)  # noqa: PLE0605

_MOVED = {
    "data": "BlockShuffleSampler ColumnDataset EpochOrder PackedDataset PackedStrings "
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
