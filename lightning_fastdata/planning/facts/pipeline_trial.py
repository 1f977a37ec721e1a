"""A trial of leaving a dataset's own pipelines to the device: does it pay, and is all the same?"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from enum import Enum
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import torch
import torch.overrides
from torch.utils.data import Dataset, IterableDataset

from lightning_fastdata.augment import (
    DatasetRecording,
    DeferredTensor,
    PipelinePlace,
    Waiting,
    Watch,
    device_ops,
    explain_pipelines,
    is_equal,
    place_pipelines,
    redrawn_of,
    registered_forms,
    try_operations,
)
from lightning_fastdata.batches.collate import RecordedCollate, collate_samples
from lightning_fastdata.batches.keyed import fetches_in_batches, keyed
from lightning_fastdata.order.epoch_order import dataset_length
from lightning_fastdata.planning.facts.probe import spread_indices
from lightning_fastdata.randomness.generators import DrawWatch
from lightning_fastdata.randomness.search import find_composes
from lightning_fastdata.randomness.seeds import EpochCell
from lightning_fastdata.tree import Path, replace_leaves, spelled

if TYPE_CHECKING:
    from lightning_fastdata.augment import DeviceOp, PlaceSwitch
    from lightning_fastdata.types import Batch

IN_WORKERS: Final = "all of it in the workers, by Albumentations itself"
_SAMPLES: Final = 3
# Parts of the range of values. Where operations may be a level off, they make a hundredth of what
# the mean difference may be, a mirror or another draw twenty times as much. Where they are
# equal, the largest difference may be a fortieth of a level.
_CLOSE: Final = 0.01
_ROUNDING: Final = 1e-4


class Trial(NamedTuple):
    """What came of a trial."""

    places: tuple[PipelinePlace, ...]
    """The dataset's pipelines."""
    registered: Mapping[str, DeviceOp]
    """Device forms of their classes that are not Albumentations' own."""
    fields: tuple[str, ...]
    """Fields of a batch that the device would compute; none: the workers do it all."""
    why: str

    def recording(self, switch: PlaceSwitch | None = None) -> DatasetRecording:
        """Return what has the dataset's pipelines recorded; with a switch, in some epochs."""
        return DatasetRecording(switch, self.registered)

    def refused(self, why: str) -> Trial:
        """Return the trial with all of it in the workers, for another reason."""
        return self._replace(fields=(), why=why)

    @property
    def defers(self) -> bool:
        """Whether the device is to compute something."""
        return bool(self.fields)

    def explain(self) -> str:
        """Return what was found, and where each operation runs."""
        if not self.defers:
            return f"{IN_WORKERS}: {self.why}"
        return f"{self.why}\n{explain_pipelines(self.places)}"


def try_recording(
    dataset: Dataset[Any], *, seed: int, collate_fn: Callable[[list[Any]], Any] | None
) -> Trial | None:
    """Read samples as always and once more with their pixels deferred, and compare.

    Each operation that the device would run is tried by itself, too, however seldom it is drawn
    (:mod:`~lightning_fastdata.augment.pipeline.trial`). The dataset and the global random state
    stay as they were, but for what the dataset keeps of samples that it reads. What is deferred is
    computed here, by one thread. None: the dataset holds no pipeline.
    """
    composes = find_composes(dataset)
    registered = registered_forms(*composes)
    places = place_pipelines(composes, registered)
    if not places:
        return None
    refused = Trial(places, registered, (), "").refused
    reasons = [place.why_not for place in places if place.why_not is not None]
    if len(reasons) == len(places):
        return refused(reasons[0])
    if isinstance(dataset, IterableDataset):
        return refused("a stream, of which no sample can be tried without losing it")
    reader = _Reader(dataset, seed, registered, DrawWatch())
    threads = torch.get_num_threads()
    # A few small images; and threads of a process that was forked may wait for ever.
    torch.set_num_threads(1)
    try:
        if reader.keeps_what_it_returns():
            return refused(
                "it keeps what its pipeline returns: read again in the next epoch, a sample ran no "
                "pipeline, so that nothing would be left to the device but once"
            )
        fields, why = _compare(reader, collate_fn or collate_samples, places)
        return Trial(places, registered, fields, why)
    except Exception as error:  # whatever the code around the pipeline raises
        return refused(f"tried out, it ended in {type(error).__name__}: {error}")
    finally:
        reader.state.restore()
        torch.set_num_threads(threads)


class _Reader:
    """Reads the same samples of a dataset again and again, each time with the same draws."""

    def __init__(
        self,
        dataset: Dataset[Any],
        seed: int,
        registered: Mapping[str, DeviceOp],
        state: DrawWatch,
    ) -> None:
        self.dataset, self.seed, self.registered, self.state = dataset, seed, registered, state
        length = dataset_length(dataset) or 1
        self.indices = spread_indices(length, min(length, _SAMPLES))

    def read(
        self, recording: DatasetRecording | None = None, *, epoch: int = 0, most: int = _SAMPLES
    ) -> list[Any]:
        """Return the samples of an epoch, or the first ones of them."""
        cell = EpochCell()
        cell.set(epoch)
        self.state.restore()  # whether it calls a pipeline may be drawn
        twin: Any = keyed(
            self.dataset, seed=self.seed, epoch=cell, transform=None, recording=recording
        )
        indices = self.indices[:most]
        if fetches_in_batches(self.dataset):
            return list(twin.__getitems__(indices))
        return [twin[index] for index in indices]

    def keeps_what_it_returns(self) -> bool:
        """Return whether a sample that is read once more, in another epoch, runs no pipeline."""
        watch = Watch(records=False)
        recording = DatasetRecording(registered=self.registered, watch=watch)
        self.read(recording, most=1)
        first = watch.calls
        self.read(recording, epoch=1, most=1)
        return 0 < first == watch.calls


def _compare(
    reader: _Reader, collate: Callable[[list[Any]], Any], places: tuple[PipelinePlace, ...]
) -> tuple[tuple[str, ...], str]:
    """Return the fields that the device can compute, and why these; none if anything differs."""
    registered, watch = reader.registered, Watch()
    recording = DatasetRecording(registered=registered, watch=watch)
    try:
        plain = collate(reader.read())
    except Exception:  # images of several sizes come in batches of one
        reader.indices = reader.indices[:1]
        plain = collate(reader.read())
    stage = RecordedCollate(collate, recording, "train")
    waiting = stage.collated(reader.read(recording))
    batch, draws = stage.taken(waiting)
    if draws is None:
        return (), _fate(watch.made)
    done, ops = draws.apply(batch), device_ops(None, registered)
    redrawn = redrawn_of(places)
    difference = _find_difference(
        plain, waiting, done, ops, redrawn, again=lambda: collate(reader.read())
    )
    if difference is not None:
        return (), f"tried out, {difference}"
    tried = [
        one
        for place in places
        if place.why_not is None and (given := watch.given.get(id(place.compose))) is not None
        for one in try_operations(place.compose, given, place.plan, ops, seed=reader.seed)
    ]
    fault = next((one for one in tried if one.fault is not None), None)
    if fault is not None:
        return (), f"tried out by itself on the device, {fault.name}: {fault.fault}"
    fields = tuple(dict.fromkeys(part.field for part in draws.parts))
    alone = _many(len({one.name for one in tried}), "operation")
    samples = _many(len(reader.indices), "sample")
    return fields, f"on the device: {', '.join(fields)}; {samples} tried, and {alone} alone"


def _many(count: int, what: str) -> str:
    return f"{count} {what}{'' if count == 1 else 's'}"


def _fate(made: Sequence[Waiting]) -> str:
    """Return why no batch waits for the device, by what became of each tensor, in words."""
    if not made:
        return (
            "no sample that was tried leaves it an image for the device: it is given stacks "
            "(images=, volume=), called in another thread or one transform at a time, or not "
            "called (a dataset may keep what they returned before)"
        )
    use = next((one.use for one in made if one.use is not None), None)
    if use is None:
        return "the batch has no tensor of what it returns in dicts, lists, tuples or dataclasses"
    if use is torch.stack:
        return (
            "the batch stacks what it returns with other tensors, with those of another pipeline, "
            "or not along the first dimension"
        )
    name = torch.overrides.resolve_name(use) or getattr(use, "__name__", str(use))
    return f"the dataset, or the collation, works on what it returns ({name})"


class _Likeness(Enum):
    """How like the plain field one that was deferred has to be."""

    EQUAL = 1  # but for the last bits of floats
    ALIKE = 2  # some values may be a level off
    SAME_LAW = 3  # the device draws other numbers: single values are not compared


def _find_difference(
    plain: Batch,
    waiting: Batch,
    done: Batch,
    ops: Mapping[str, DeviceOp],
    redrawn: Collection[str],
    *,
    again: Callable[[], Batch],
) -> str | None:
    """Return in what a batch differs from the ``plain`` one, in words; None if in nothing.

    What was recorded is ``waiting`` to be computed by Albumentations, and was ``done`` by the
    device forms; of the ``redrawn`` operations a device makes other pixels of the same
    distribution. ``again`` reads the plain batch anew, to see which fields differ each time.
    """
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
