"""The pipelines that a dataset calls itself: where they run, and whether their pixels may wait."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from enum import Enum
from functools import cached_property
from typing import TYPE_CHECKING, Final

import torch

from lightning_fastdata.augment.dataset_recording import (
    DatasetRecording,
    PipelinePlace,
    place_pipelines,
)
from lightning_fastdata.augment.pipeline.bounds import is_equal
from lightning_fastdata.augment.pipeline.plan import redrawn
from lightning_fastdata.augment.pipeline.tree import drawn_words, list_nodes
from lightning_fastdata.augment.pipeline.trial import Tried, try_operations
from lightning_fastdata.augment.record.deferred import DeferredTensor
from lightning_fastdata.augment.record.pipeline_recorder import Watch
from lightning_fastdata.augment.record.worker import device_ops
from lightning_fastdata.augment.registry import registered_forms
from lightning_fastdata.augment.replay.warm_up import Variant, kernels_of
from lightning_fastdata.augment.stage_transform import table
from lightning_fastdata.tree import Path, replace_leaves, spelled

if TYPE_CHECKING:
    from lightning_fastdata.augment.ops.operation import DeviceOp
    from lightning_fastdata.augment.pipeline.tree import Node
    from lightning_fastdata.augment.stage_transform import PlaceSwitch
    from lightning_fastdata.types import Batch

# Parts of the range of values. Where operations may be a level off, they make a hundredth of what
# the mean difference may be, a mirror or another draw twenty times as much. Where they are
# equal, the largest difference may be a fortieth of a level.
_CLOSE: Final = 0.01
_ROUNDING: Final = 1e-4


class DatasetPipelines:
    """The pipelines that a dataset calls itself, and where they run.

    What is asked of them is found out at the first question; picklable.
    """

    def __init__(self, composes: Iterable[Node]) -> None:
        self._composes = tuple(composes)

    def __bool__(self) -> bool:
        return bool(self._composes)

    @property
    def nodes(self) -> list[Node]:
        """All containers and transforms, in order."""
        return [node for compose in self._composes for node in list_nodes(compose)]

    @cached_property
    def registered(self) -> Mapping[str, DeviceOp]:
        """Device forms of their classes that are not Albumentations' own.

        Raises:
            TransformError: One that was registered with ``table=True`` is not pointwise.
        """
        return registered_forms(*self._composes)

    @cached_property
    def places(self) -> tuple[PipelinePlace, ...]:
        """Where each of them runs."""
        return place_pipelines(self._composes, self.registered)

    @property
    def _deferred(self) -> list[PipelinePlace]:
        return [place for place in self.places if place.why_not is None]

    @property
    def why_not(self) -> str | None:
        """Why nothing of any of them is deferred to the device; None: something is."""
        return None if self._deferred or not self.places else self.places[0].why_not

    def redrawn(self) -> tuple[str, ...]:
        """Return the operations of which a device makes other pixels of the same distribution."""
        names = [name for p in self._deferred for name in redrawn(p.compose, p.plan, device_ops())]
        return tuple(dict.fromkeys(names))

    def explain(self) -> str:
        """Return where each operation runs, and why, as text."""
        parts = []
        for place in self.places:
            if place.why_not is not None:
                parts.append(f"all of it in the workers, by Albumentations itself: {place.why_not}")
            else:
                parts.append(table([(p.name, p.where, p.why) for p in place.plan.placements]))
        return "\n\n".join(parts)

    def drawn_words(self, read: Callable[[], object]) -> tuple[str, ...]:
        """Return which transforms the reading of a sample runs, and what they draw, in words."""
        return drawn_words(self._composes, read)

    def recording(self, switch: PlaceSwitch | None = None) -> DatasetRecording:
        """Return what has them recorded while the dataset reads; with a switch, in some epochs."""
        return DatasetRecording(switch, self.registered)

    def watched(self, *, records: bool = True) -> tuple[DatasetRecording, Watch]:
        """Return :meth:`recording`, and what is seen of the calls; ``records``: as ``Watch``."""
        watch = Watch(records=records)
        return DatasetRecording(None, self.registered, watch), watch

    def try_operations(self, watch: Watch, *, seed: int) -> list[Tried]:
        """Try each operation of the device by itself, on what pipelines were seen to be given."""
        ops = device_ops(None, self.registered)
        return [
            one
            for place in self._deferred
            if (data := watch.given.get(id(place.compose))) is not None
            for one in try_operations(place.compose, data, place.plan, ops, seed=seed)
        ]

    def difference(
        self, plain: Batch, waiting: Batch, done: Batch, *, again: Callable[[], Batch]
    ) -> str | None:
        """Return in what a batch differs from the ``plain`` one, in words; None if in nothing.

        What was recorded is ``waiting`` to be computed by Albumentations, and was ``done`` by the
        device forms. ``again`` reads the plain batch anew, to see which fields differ each time.
        """
        ops, redrawn = device_ops(None, self.registered), self.redrawn()
        by_device, by_itself = {}, {}
        for path, leaf in _leaves(waiting).items():
            if not isinstance(leaf, DeferredTensor) or leaf.is_computed:
                continue
            names = [op.name for one in leaf.waiting for op in one.track.ops]
            if any(name in redrawn for name in names):
                by_device[path] = _Likeness.SAME_LAW
            else:
                equal = all(is_equal(name) and ops[name].owner is None for name in names)
                by_device[path] = _Likeness.EQUAL if equal else _Likeness.ALIKE
            draws = any(ops[name].draw for name in names)
            by_itself[path] = by_device[path] if draws else _Likeness.EQUAL
        computed = replace_leaves(
            waiting, lambda _, leaf: leaf.computed() if isinstance(leaf, DeferredTensor) else leaf
        )
        by_hand = _difference(plain, computed, by_itself, again)
        return by_hand or _difference(plain, done, by_device, again)

    def kernels(self, device: torch.device, sample: Batch) -> tuple[Variant, ...]:
        """Return runs that have each kernel compiled which batches may need on a device."""
        ops = device_ops(None, self.registered)
        each = [kernels_of(device, p.compose, p.plan, ops, sample) for p in self._deferred]
        return tuple(one for variants in each for one in variants)


class _Likeness(Enum):
    """How like the plain field one that was deferred has to be."""

    EQUAL = 1  # but for the last bits of floats
    ALIKE = 2  # some values may be a level off
    SAME_LAW = 3  # the device draws other numbers: single values are not compared


def _difference(
    plain: Batch, done: Batch, deferred: Mapping[Path, _Likeness], again: Callable[[], Batch]
) -> str | None:
    before, after = _leaves(plain), _leaves(done)
    if before.keys() != after.keys():
        return "the batch had another structure"
    changed = {}
    for path, one in before.items():
        other = after[path]
        if type(one) is not type(other):
            return f"{spelled(path)} became a {type(other).__name__}"
        if not (isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor)):
            continue
        if (one.shape, one.dtype) != (other.shape, other.dtype):
            return f"{spelled(path)} became {other.dtype} {tuple(other.shape)}"
        if path in deferred:
            if not _is_close(one, other, deferred[path]):
                return f"{spelled(path)} had other values"
        elif not torch.equal(one, other):
            changed[path] = one
    twins = _leaves(again()) if changed else {}
    for path, one in changed.items():
        twin = twins.get(path)
        if isinstance(twin, torch.Tensor) and torch.equal(one, twin):
            return f"{spelled(path)} had other values"
    return None


def _leaves(batch: Batch) -> dict[Path, object]:
    found: dict[Path, object] = {}
    replace_leaves(batch, found.setdefault)
    return found


def _is_close(one: torch.Tensor, other: torch.Tensor, likeness: _Likeness) -> bool:
    if one.numel() == 0 or likeness is _Likeness.SAME_LAW:
        return True
    one, other = one.double(), other.double()
    gap, reach = (one - other).abs(), (one.max() - one.min()).clamp(min=1e-6)
    if likeness is _Likeness.ALIKE:
        return bool(gap.mean() <= _CLOSE * reach)
    return bool(gap.max() <= _ROUNDING * torch.maximum(reach, one.abs().max()))
