"""A dataset read with the pixels of its own pipelines deferred to the device.

The dataset stays as it is. While it reads a sample, its pipelines are hooked into: they draw, do
what cannot be deferred, and return a :class:`DeferredTensor` where ``ToTensorV2`` would return
a tensor. Pipelines that end otherwise return NumPy arrays, which need their values; they run as
always.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from lightning_fastdata.augment.pipeline.fields import describe
from lightning_fastdata.augment.pipeline.plan import Plan, analyse
from lightning_fastdata.augment.pipeline.tree import is_container, list_leaves
from lightning_fastdata.augment.pipeline.trial import refusal
from lightning_fastdata.augment.record.deferred import DeferredTensor, Waiting
from lightning_fastdata.augment.record.pipeline_recorder import PipelineRecorder, Turn, Watch
from lightning_fastdata.augment.record.tail import TailStep, carry_out, operands
from lightning_fastdata.augment.record.worker import device_ops
from lightning_fastdata.augment.replay.program import Draws, compile_tapes
from lightning_fastdata.augment.replay.torch import replay_image
from lightning_fastdata.augment.stage_transform import plain_tensors
from lightning_fastdata.errors import BatchError
from lightning_fastdata.randomness.search import find_composes
from lightning_fastdata.tree import Path, replace_leaves, spelled

if TYPE_CHECKING:
    import numpy as np

    from lightning_fastdata.augment.ops.operation import DeviceOp
    from lightning_fastdata.augment.pipeline.tree import Node
    from lightning_fastdata.augment.stage_transform import PlaceSwitch
    from lightning_fastdata.types import Batch

_PIXELS = "pixels"


class PipelinePlace(NamedTuple):
    """One pipeline of a dataset, and where it runs."""

    compose: Node
    """The pipeline."""
    plan: Plan
    """Where its operations run."""
    why_not: str | None
    """Why none of it is deferred to the device; None if some of it is."""


def place_pipelines(
    composes: Iterable[Node], registered: Mapping[str, DeviceOp] | None = None
) -> tuple[PipelinePlace, ...]:
    """Return which pipelines of a dataset can be deferred to the device.

    ``registered`` are device forms of classes that are not Albumentations' own.
    """
    places = []
    for compose in composes:
        plan = analyse(compose, device_ops(None, registered), refusal=refusal())
        places.append(PipelinePlace(compose, plan, _why_not(compose, plan)))
    return tuple(places)


def _why_not(compose: Node, plan: Plan) -> str | None:
    if not is_container(compose):
        return "a single transform, not a Compose"
    if refusal() is not None:
        return refusal()
    last = list_leaves(compose)[-1:]
    if not last or type(last[0].transform).__name__ != "ToTensorV2":
        return "it does not end in ToTensorV2, so the dataset gets NumPy arrays from it"
    if plan.placements[-1].where == "worker":
        return f"its ToTensorV2 has to run in the worker: {plan.placements[-1].why}"
    return None


class Part(NamedTuple):
    """Images of a batch that one program finishes."""

    paths: tuple[Path, ...]
    """Where they are: the path of the tensor that holds them all, or one for each image."""
    stacked: tuple[int, ...]
    """Lengths of the dimensions in front of the images' in the tensor that holds them all; ``()``:
    each is a tensor of its own."""
    draws: Draws
    """What was drawn for them, in order."""
    tail: tuple[TailStep, ...]
    """What is done to each of them behind its pipeline."""

    @property
    def field(self) -> str:
        """How one would write it in Python; ``[*]`` stands for the place of an image."""
        return spelled(self.paths[0]) if self.stacked else f"{spelled(self.paths[0][:-1])}[*]"

    def finish(self, pixels: torch.Tensor, ops: Mapping[str, DeviceOp]) -> torch.Tensor:
        """Return the images ``[n, ...]`` that become of the pixels that they start from."""
        value = replay_image(self.draws.programs[_PIXELS], self.draws.blob, pixels, ops)
        numbers = {name: slot.view(self.draws.blob) for name, slot in self.draws.beside.items()}
        return carry_out(self.tail, value, numbers)


class DatasetDraws:
    """What a batch still has to go through on the device; pinned and moved with the batch."""

    __slots__ = ("parts", "registered")

    def __init__(
        self, parts: Sequence[Part], registered: Mapping[str, DeviceOp] | None = None
    ) -> None:
        self.parts = tuple(parts)
        self.registered = registered
        """Device forms of classes that are not Albumentations' own."""

    def pin_memory(self, device: str | None = None) -> DatasetDraws:
        """Return the same draws in page-locked memory."""
        parts = [part._replace(draws=part.draws.pin_memory(device)) for part in self.parts]
        return DatasetDraws(parts, self.registered)

    def to(self, device: torch.device | str, non_blocking: bool = False) -> DatasetDraws:
        """Return the same draws on a device."""
        parts = [part._replace(draws=part.draws.to(device, non_blocking)) for part in self.parts]
        return DatasetDraws(parts, self.registered)

    def tensors(self) -> list[torch.Tensor]:
        """Return the tensors that were moved."""
        return [part.draws.blob for part in self.parts]

    @property
    def fields(self) -> tuple[str, ...]:
        """The fields of a batch that are computed, as one would write them in Python."""
        return tuple(dict.fromkeys(part.field for part in self.parts))

    def apply(self, batch: Batch) -> Batch:
        """Return the batch, which is on the device, as the dataset's pipelines would have made it.

        Raises:
            BatchError: A hook has changed a field that waits, or its place.
        """
        wanted = {path for part in self.parts for path in part.paths}
        found: dict[Path, object] = {}
        replace_leaves(batch, found.setdefault)
        ops = device_ops(None, self.registered)
        done: dict[Path, torch.Tensor] = {}
        with plain_tensors():
            for part in self.parts:
                tensors = list(self._checked(part, found))
                if part.stacked:
                    value = part.finish(tensors[0], ops)
                    done[part.paths[0]] = value.view(*part.stacked, *value.shape[1:])
                else:
                    images = part.finish(torch.stack(tensors), ops).unbind()
                    done.update(zip(part.paths, images, strict=True))
            return replace_leaves(batch, lambda path, leaf: done[path] if path in wanted else leaf)

    @staticmethod
    def _checked(part: Part, found: Mapping[Path, object]) -> Iterator[torch.Tensor]:
        for path in part.paths:
            if path not in found:
                raise BatchError(
                    f"The batch has no field {spelled(path)} any more, which waits for the "
                    "dataset's pipeline on the device. Change batches in on_after_batch_transfer, "
                    "or set augment_on='cpu'."
                )
            leaf = found[path]
            if not isinstance(leaf, torch.Tensor) or (
                part.stacked and len(leaf) != part.draws.samples
            ):
                many = f"{part.draws.samples} images that wait" if part.stacked else "an image that"
                raise BatchError(
                    f"The field {spelled(path)} should be a tensor of {many} "
                    f"{'' if part.stacked else 'waits '}for the dataset's pipeline on the device, "
                    f"but is {describe(leaf)}. "
                    "Change batches in on_after_batch_transfer, or set augment_on='cpu'."
                )
            yield leaf


class DatasetRecording:
    """What surrounds the reading of a dataset in the process that reads it; picklable.

    The switch says for each epoch whether anything is deferred to the device; None: always.
    """

    def __init__(
        self,
        switch: PlaceSwitch | None = None,
        registered: Mapping[str, DeviceOp] | None = None,
        watch: Watch | None = None,
    ) -> None:
        self.switch = switch
        self._registered = registered
        self._recorders: list[PipelineRecorder] | None = None
        self._found_in_epoch = 0
        self._turn = Turn(watch)

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_recorders": None}

    @contextmanager
    def reading(self, dataset: object, epoch: int = 0) -> Iterator[None]:
        """Have the dataset's pipelines leave to the device what they can, while in the block."""
        if self.switch is not None and self.switch.place(epoch) == "workers":
            yield
            return
        # A callback may have given the dataset other pipelines, or others transforms to these.
        if self._recorders is None or epoch != self._found_in_epoch:
            self._found_in_epoch = epoch
            self._recorders = [
                PipelineRecorder(place.compose, place.plan, self._ops, self._turn)
                for place in place_pipelines(find_composes(dataset), self._registered)
                if place.why_not is None
            ]
        self._turn.begin()
        for recorder in self._recorders:
            recorder.hook()
        try:
            yield
        finally:
            # Pipelines may share transforms, so that the last hook goes first.
            for recorder in reversed(self._recorders):
                recorder.unhook()

    def take(
        self, batch: Batch, collate: Callable[[list[Any]], Any]
    ) -> tuple[Batch, DatasetDraws | None]:
        """Take what waits out of a collated batch.

        Returns:
            The batch with the pixels that its fields start from, uint8 ``[n, H, W, C]`` mostly,
            and what was drawn for them; None if nothing waits.
        """
        parts: list[Part] = []
        alone: dict[tuple[object, ...], list[tuple[Path, DeferredTensor]]] = {}

        def taken(path: Path, leaf: Batch) -> Batch:
            if not isinstance(leaf, DeferredTensor):
                return leaf
            if leaf.is_computed:
                return leaf.computed()
            if not leaf.stacked:
                alone.setdefault(_kind(leaf), []).append((path, leaf))
                return _own(leaf.waiting[0].pixels)
            parts.append(self._part((path,), leaf.stacked, leaf.waiting, leaf.tail))
            return collate([_own(waiting.pixels) for waiting in leaf.waiting])

        batch = replace_leaves(batch, taken)
        for images in alone.values():
            paths, leaves = zip(*images, strict=True)
            waiting = tuple(leaf.waiting[0] for leaf in leaves)
            parts.append(self._part(paths, (), waiting, leaves[0].tail))
        return batch, DatasetDraws(parts, self._registered) if parts else None

    def _part(
        self,
        paths: tuple[Path, ...],
        stacked: tuple[int, ...],
        waiting: Sequence[Waiting],
        tail: tuple[TailStep, ...],
    ) -> Part:
        tapes = [{_PIXELS: one.track} for one in waiting]
        return Part(paths, stacked, compile_tapes(tapes, self._ops, operands(tail)), tail)

    @property
    def _ops(self) -> Mapping[str, DeviceOp]:
        return device_ops(None, self._registered)


def _kind(image: DeferredTensor) -> tuple[object, ...]:
    """Return what images have in common that one program can finish."""
    waiting = image.waiting[0]
    begins = waiting.pipeline, waiting.pixels.shape, waiting.pixels.dtype
    return *begins, tuple(image.shape), image.dtype, image.tail


def _own(pixels: np.ndarray) -> torch.Tensor:
    # A pipeline may hand back the dataset's own read-only array (a memory map).
    return torch.from_numpy(pixels if pixels.flags.writeable else pixels.copy())
