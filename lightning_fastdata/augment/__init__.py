"""The user's own Albumentations pipeline, its pixels on the device.

Other rooms import these names, and nothing inside. They are loaded on first use, so that importing
the package stays light.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from lightning_fastdata.augment.dataset_pipelines import DatasetDraws as DatasetDraws
    from lightning_fastdata.augment.dataset_pipelines import DatasetRecording as DatasetRecording
    from lightning_fastdata.augment.dataset_pipelines import PipelinePlace as PipelinePlace
    from lightning_fastdata.augment.dataset_pipelines import explain_pipelines as explain_pipelines
    from lightning_fastdata.augment.dataset_pipelines import place_pipelines as place_pipelines
    from lightning_fastdata.augment.dataset_pipelines import redrawn_of as redrawn_of
    from lightning_fastdata.augment.ops.operation import DeviceOp as DeviceOp
    from lightning_fastdata.augment.pipeline.bounds import is_equal as is_equal
    from lightning_fastdata.augment.pipeline.tree import drawn_words as drawn_words
    from lightning_fastdata.augment.pipeline.tree import list_nodes as list_nodes
    from lightning_fastdata.augment.pipeline.trial import Tried as Tried
    from lightning_fastdata.augment.pipeline.trial import try_operations as try_operations
    from lightning_fastdata.augment.pipeline.unkeyed import warn_of_unkeyed as warn_of_unkeyed
    from lightning_fastdata.augment.record.deferred import DeferredTensor as DeferredTensor
    from lightning_fastdata.augment.record.deferred import Waiting as Waiting
    from lightning_fastdata.augment.record.deferred import stack_deferred as stack_deferred
    from lightning_fastdata.augment.record.pipeline_recorder import Watch as Watch
    from lightning_fastdata.augment.record.worker import device_ops as device_ops
    from lightning_fastdata.augment.registry import register as register
    from lightning_fastdata.augment.registry import registered_forms as registered_forms
    from lightning_fastdata.augment.replay.program import Draws as Draws
    from lightning_fastdata.augment.replay.triton import has_kernels as has_kernels
    from lightning_fastdata.augment.replay.warm_up import Variant as Variant
    from lightning_fastdata.augment.replay.warm_up import mask_dtypes as mask_dtypes
    from lightning_fastdata.augment.replay.warm_up import variants as variants
    from lightning_fastdata.augment.show.grid import Normalized as Normalized
    from lightning_fastdata.augment.show.grid import batch_grid as batch_grid
    from lightning_fastdata.augment.show.grid import find_images as find_images
    from lightning_fastdata.augment.show.grid import find_normalized as find_normalized
    from lightning_fastdata.augment.show.pictures import import_by_name as import_by_name
    from lightning_fastdata.augment.show.pictures import show_pipeline as show_pipeline
    from lightning_fastdata.augment.stage_transform import Place as Place
    from lightning_fastdata.augment.stage_transform import PlaceSwitch as PlaceSwitch
    from lightning_fastdata.augment.stage_transform import StageTransform as StageTransform
    from lightning_fastdata.augment.stage_transform import SuitsSamples as SuitsSamples
    from lightning_fastdata.augment.stage_transform import SwitchedTransform as SwitchedTransform
    from lightning_fastdata.augment.stage_transform import TellsDraws as TellsDraws
    from lightning_fastdata.augment.stage_transform import WorkerTransform as WorkerTransform
    from lightning_fastdata.augment.stage_transform import leaves_to_device as leaves_to_device
    from lightning_fastdata.augment.stage_transform import redrawn_on_device as redrawn_on_device
    from lightning_fastdata.augment.transform import BatchTransform as BatchTransform
    from lightning_fastdata.augment.transform import as_batch_transform as as_batch_transform

_HOME = {
    "BatchTransform": "transform",
    "DatasetDraws": "dataset_pipelines",
    "DatasetRecording": "dataset_pipelines",
    "DeferredTensor": "record.deferred",
    "DeviceOp": "ops.operation",
    "Draws": "replay.program",
    "Normalized": "show.grid",
    "PipelinePlace": "dataset_pipelines",
    "Place": "stage_transform",
    "PlaceSwitch": "stage_transform",
    "StageTransform": "stage_transform",
    "SuitsSamples": "stage_transform",
    "SwitchedTransform": "stage_transform",
    "TellsDraws": "stage_transform",
    "Tried": "pipeline.trial",
    "Variant": "replay.warm_up",
    "Waiting": "record.deferred",
    "Watch": "record.pipeline_recorder",
    "WorkerTransform": "stage_transform",
    "as_batch_transform": "transform",
    "batch_grid": "show.grid",
    "device_ops": "record.worker",
    "drawn_words": "pipeline.tree",
    "explain_pipelines": "dataset_pipelines",
    "find_images": "show.grid",
    "find_normalized": "show.grid",
    "has_kernels": "replay.triton",
    "import_by_name": "show.pictures",
    "is_equal": "pipeline.bounds",
    "leaves_to_device": "stage_transform",
    "list_nodes": "pipeline.tree",
    "mask_dtypes": "replay.warm_up",
    "place_pipelines": "dataset_pipelines",
    "redrawn_of": "dataset_pipelines",
    "redrawn_on_device": "stage_transform",
    "register": "registry",
    "registered_forms": "registry",
    "show_pipeline": "show.pictures",
    "stack_deferred": "record.deferred",
    "try_operations": "pipeline.trial",
    "variants": "replay.warm_up",
    "warn_of_unkeyed": "pipeline.unkeyed",
}

__all__ = sorted(_HOME)  # noqa: PLE0605


# Type checkers would take any name for one of the package's.
if not TYPE_CHECKING:

    def __getattr__(name: str) -> object:
        if name not in _HOME:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        value = globals()[name] = getattr(import_module(f"{__name__}.{_HOME[name]}"), name)
        return value
