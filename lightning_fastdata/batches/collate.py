"""Samples to one batch: torch's own collation, and dataclasses besides."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from copy import copy
from dataclasses import fields, is_dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Final, Self, TypeAlias

import numpy as np
import torch
from torch.utils.data import default_collate

from lightning_fastdata.augment import DeferredTensor
from lightning_fastdata.batches.packed import LateStack, is_plain
from lightning_fastdata.batches.staged import StagedBatch
from lightning_fastdata.batches.uncollatable import advice, is_note
from lightning_fastdata.errors import BatchError, OptionsError
from lightning_fastdata.torch_internals import collate, collate_tensor_fn, default_collate_fn_map
from lightning_fastdata.tree import is_named_tuple

if TYPE_CHECKING:
    from lightning_fastdata.augment import DatasetDraws, DatasetRecording, WorkerTransform
    from lightning_fastdata.types import Batch, Stage

_Collate: TypeAlias = "Callable[[Any], Batch]"
CollateMap: TypeAlias = "dict[type | tuple[type, ...], Callable[..., Any]]"
"""Torch's table of what collates the values of a class."""
_KNOWN: Final = frozenset(
    {torch.Tensor, DeferredTensor, LateStack, np.ndarray, np.memmap, int, float, bool, str, bytes}
)
"""Types whose collation, as part of a sample or of a batch, runs no code of the user's."""
_IMAGE_DIMENSIONS: Final = 3


def collate_samples(samples: Sequence[Any]) -> Batch:
    """Return the samples, at least one, as a batch: ``default_collate``, and dataclasses besides.

    What an Albumentations pipeline has written down of its draws (``applied_transforms``,
    ``replay``) differs from sample to sample, and is a list in the batch.

    Raises:
        BatchError: The samples cannot be stacked, for example because their shapes differ.
    """
    return _collate_samples(samples, _collate)


def _collate_samples(samples: Sequence[Any], collate_fields: _Collate) -> Batch:
    try:
        return _collate_but_notes(samples, collate_fields)
    except (TypeError, RuntimeError, ValueError, KeyError) as error:
        raise BatchError(
            f"These {len(samples)} samples cannot be made into one batch: "
            f"{str(error).rstrip('.')}. {advice(samples)}"
        ) from error


def collate_privately(samples: Batch) -> Batch:
    """Return what ``default_collate`` returns in the training process.

    In a worker torch collates into new shared memory for each batch, which costs a page fault for
    every 4 KiB, and refuses types that it promotes elsewhere.
    """
    return collate(samples, collate_fn_map={**default_collate_fn_map, torch.Tensor: _stack})


def _stack(samples: Batch, *, collate_fn_map: CollateMap | None = None) -> Batch:
    if samples[0].is_nested or samples[0].layout is not torch.strided:
        return collate_tensor_fn(samples, collate_fn_map=collate_fn_map)
    return torch.stack(samples)


def in_own_side_process() -> None:
    """Have this process collate into its own memory, since torch will not move its batches."""
    global _default  # noqa: PLW0603  # a property of the process
    _default = collate_privately


_default: _Collate = default_collate


def for_writing(collate_fn: _Collate) -> _Collate:
    """Return what collates likewise for :func:`~lightning_fastdata.batches.packed.pack` alone.

    Where all of a collation is ours, so that no code reads the batch before it is packed, stacks
    are left for then (:class:`~lightning_fastdata.batches.packed.LateStack`).
    """
    if collate_fn is default_collate:
        return partial(_collate_late, otherwise=collate_privately)
    if collate_fn is collate_samples:
        fields_late = partial(_collate_late, otherwise=_collate)
        return partial(_collate_samples, collate_fields=fields_late)
    if isinstance(collate_fn, _HandsOn):
        return collate_fn.for_writing()
    return collate_fn


def _collate_late(samples: Sequence[Any], otherwise: _Collate) -> Batch:
    if not _runs_no_user_code(samples[0]):
        return otherwise(samples)
    return collate(samples, collate_fn_map={**default_collate_fn_map, torch.Tensor: _stack_late})


def _runs_no_user_code(value: object) -> bool:
    """Whether a sample becomes part of a batch, or a batch is rebuilt, without the user's code."""
    if type(value) is dict:
        return all(map(_runs_no_user_code, value.values()))
    if type(value) is list or type(value) is tuple:
        return all(map(_runs_no_user_code, value))
    return type(value) in _KNOWN or isinstance(value, np.generic)


def _stack_late(samples: Batch, *, collate_fn_map: CollateMap | None = None) -> Batch:
    first = samples[0]
    late = all(
        type(sample) is torch.Tensor
        and is_plain(sample)
        and sample.dtype == first.dtype
        and sample.shape == first.shape
        # Of more dimensions, torch keeps channels that come last in memory.
        and (sample.dim() <= _IMAGE_DIMENSIONS or sample.is_contiguous())
        and not sample.requires_grad
        for sample in samples
    )
    return LateStack(samples) if late else _stack(samples, collate_fn_map=collate_fn_map)


def _collate_but_notes(samples: Sequence[Any], collate_fields: _Collate) -> Batch:
    first = samples[0]
    notes = [key for key in first if is_note(key, first[key])] if type(first) is dict else []
    if not notes:
        return collate_fields(samples)
    rest = [{key: value for key, value in s.items() if key not in notes} for s in samples]
    return {**collate_fields(rest), **{key: [s[key] for s in samples] for key in notes}}


def _collate(samples: Sequence[Any]) -> Batch:
    first = samples[0]
    if not _holds_dataclass(first):
        return _default(list(samples))
    if is_dataclass(first) and not isinstance(first, type):
        columns = {f.name: _collate([getattr(s, f.name) for s in samples]) for f in fields(first)}
        return type(first)(**columns)
    if isinstance(first, Mapping):
        return {key: _collate([s[key] for s in samples]) for key in first}
    columns_ = [_collate(column) for column in zip(*samples, strict=True)]
    return type(first)(*columns_) if is_named_tuple(first) else columns_


def _holds_dataclass(sample: object) -> bool:
    if type(sample) in _KNOWN:  # asked of each batch, and most samples are made of these
        return False
    if is_dataclass(sample):
        return True
    if isinstance(sample, Mapping):
        return any(_holds_dataclass(value) for value in sample.values())
    return isinstance(sample, list | tuple) and any(_holds_dataclass(value) for value in sample)


class _HandsOn(ABC):
    """Hands most batches on as ``collate_fn`` makes them."""

    def __init__(self, collate_fn: _Collate) -> None:
        self.collate_fn = collate_fn
        self._collate_handed_on = collate_fn

    @abstractmethod
    def __call__(self, samples: Batch) -> Batch:
        """Return the batch of samples, or of what stands in their place."""

    def for_writing(self) -> Self:
        """Return the same for batches that are packed next; see :func:`for_writing`."""
        late = copy(self)
        late._collate_handed_on = for_writing(self.collate_fn)
        return late


class StagingCollate(_HandsOn):
    """Collates samples and, beside them, what was drawn for their transform on the device."""

    def __init__(
        self,
        collate_fn: _Collate,
        transform: WorkerTransform | None,
        stage: Stage,
    ) -> None:
        super().__init__(collate_fn)
        self.transform = transform
        self.stage = stage

    def __call__(self, samples: list[Any]) -> StagedBatch:
        """Return the staged batch of samples, or of ``(sample, tape)`` pairs."""
        if self.transform is None:
            return StagedBatch(self._collate_handed_on(samples), None, self.stage)
        drawn = [tape for _sample, tape in samples]
        samples = [sample for sample, _tape in samples]
        draws = self.transform.collate(drawn)
        if draws is None:
            batch = self.transform.finish(self.collate_fn(samples), drawn)
        else:
            batch = self._collate_handed_on(samples)
        return StagedBatch(batch, draws, self.stage)


class RecordedCollate(_HandsOn):
    """Collates samples, and what their dataset's own pipelines have deferred to the device."""

    def __init__(
        self,
        collate_fn: _Collate,
        recording: DatasetRecording,
        stage: Stage,
    ) -> None:
        super().__init__(collate_fn)
        self.recording = recording
        self.stage = stage
        self._collate_pixels: _Collate = collate_samples

    def __call__(self, samples: list[Any]) -> StagedBatch:
        """Return the staged batch of samples."""
        batch, draws = self.taken(self.collated(samples))
        return StagedBatch(batch, draws, self.stage)

    def collated(self, samples: list[Any]) -> Batch:
        """Return the batch, in which what is deferred to the device still waits."""
        # Also where the user's collation calls torch's: in each process that collates.
        default_collate_fn_map.setdefault(DeferredTensor, DeferredTensor.collate)
        return self._collate_handed_on(samples)

    def taken(self, batch: Batch) -> tuple[Batch, DatasetDraws | None]:
        """Return a batch with the pixels that its fields start from, and what waits for them."""
        collate_pixels = self._collate_pixels if _runs_no_user_code(batch) else collate_samples
        return self.recording.take(batch, collate_pixels)

    def for_writing(self) -> Self:
        """Return the same for batches that are packed next; see :func:`for_writing`."""
        late = super().for_writing()
        late._collate_pixels = for_writing(collate_samples)
        return late


class FirstOfPairs(_HandsOn):
    """Collates the samples of ``(sample, tape)`` pairs, where nothing is deferred to a device.

    Raises:
        OptionsError: The transform needs batches, and the loader makes none.
    """

    def __init__(self, collate_fn: _Collate, transform: WorkerTransform, *, single: bool) -> None:
        if single and transform.needs_batches:
            raise OptionsError(
                "The transform mixes the samples of a batch or converts whole batches (out=, "
                "channels_last=), but batch_size=None makes no batches. Set batch_size, or do it "
                "where the batches are made."
            )
        super().__init__(collate_fn)
        self.transform = transform
        self.single = single

    def __call__(self, pairs: Sequence[Any]) -> Batch:
        """Return the batch of the samples, or what becomes of the single one."""
        if self.single:
            return self.collate_fn(pairs[0])
        samples = [sample for sample, _tape in pairs]
        if not self.transform.needs_batches:
            return self._collate_handed_on(samples)
        return self.transform.finish(self.collate_fn(samples), [tape for _sample, tape in pairs])


def spreading(collate_fn: _Collate, worker_part: WorkerTransform | None) -> _Collate:
    """Return what collates the samples that a transform makes.

    Where ``repeats`` of the transform's part in the worker is above 1, that returns a list of
    samples for each sample of the dataset.
    """
    several = worker_part is not None and worker_part.repeats > 1
    return SpreadCollate(collate_fn) if several else collate_fn


class SpreadCollate:
    """Collates lists of samples as if each of their samples had come by itself; picklable."""

    def __init__(self, collate_fn: _Collate) -> None:
        self.collate_fn = collate_fn

    def __call__(self, lists: list[list[Any]]) -> Batch:
        """Return the batch of the samples of all lists, in their order."""
        return self.collate_fn([sample for samples in lists for sample in samples])
