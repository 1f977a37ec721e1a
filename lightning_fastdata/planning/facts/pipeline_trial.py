"""A trial of leaving a dataset's own pipelines to the device: does it pay, and is all the same?"""

from __future__ import annotations

import weakref
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
    Tried,
    Waiting,
    Watch,
    device_ops,
    explain_pipelines,
    is_equal,
    list_nodes,
    place_pipelines,
    redrawn_of,
    registered_forms,
    try_operations,
)
from lightning_fastdata.batches.collate import RecordedCollate, collate_samples
from lightning_fastdata.batches.keyed import fetches_in_batches, keyed
from lightning_fastdata.order.epoch_order import dataset_length
from lightning_fastdata.planning.facts.probe import spread_indices
from lightning_fastdata.randomness.global_generators import DrawWatch
from lightning_fastdata.randomness.seeds import find_composes
from lightning_fastdata.randomness.shared_epoch import EpochCell
from lightning_fastdata.tree import Path, replace_leaves, spelled

if TYPE_CHECKING:
    from lightning_fastdata.augment import DeviceOp, PlaceSwitch
    from lightning_fastdata.types import Batch

_CLOSE: Final = 0.01
"""Part of the range of values that the mean difference may be, where operations may be a level off.
These make a hundredth of it; a mirror or another draw twenty times as much."""
_ROUNDING: Final = 1e-4
"""Part of the range of values that the largest difference may be, where operations are equal: a
fortieth of a level."""


class Likeness(Enum):
    """How like the plain field one that was left over has to be."""

    EQUAL = "equal"
    """But for the last bits of floats."""
    ALIKE = "alike"
    """Some values may be a level off."""
    SAME_LAW = "same law"
    """The device draws other numbers: nothing can be said of single values."""


def find_difference(
    plain: Batch,
    waiting: Batch,
    done: Batch,
    ops: Mapping[str, DeviceOp],
    redrawn: Collection[str],
    *,
    again: Callable[[], Batch],
) -> str | None:
    """Return in what a batch differs from the plain one, in words; None if in nothing.

    Args:
        plain: The batch as always.
        waiting: The one that was recorded; what still waits in it is computed by Albumentations.
        done: The same, computed by the device forms.
        ops: Device forms by name.
        redrawn: Names of operations of which a device makes other pixels of the same distribution.
        again: Reads the plain batch once more, to tell fields that are other ones each time.
    """
    left = {
        path: [op.name for one in leaf.waiting for op in one.track.ops]
        for path, leaf in _leaves(waiting).items()
        if isinstance(leaf, DeferredTensor) and not leaf.is_computed
    }
    computed = replace_leaves(
        waiting, lambda _, leaf: leaf.computed() if isinstance(leaf, DeferredTensor) else leaf
    )
    by_device = {path: _likeness(names, ops, redrawn) for path, names in left.items()}
    by_itself = {
        path: by_device[path] if any(ops[name].draw for name in names) else Likeness.EQUAL
        for path, names in left.items()
    }
    return _difference(plain, computed, by_itself, again) or _difference(
        plain, done, by_device, again
    )


def _likeness(
    names: Sequence[str], ops: Mapping[str, DeviceOp], redrawn: Collection[str]
) -> Likeness:
    if any(name in redrawn for name in names):
        return Likeness.SAME_LAW
    equal = all(is_equal(name) and ops[name].owner is None for name in names)
    return Likeness.EQUAL if equal else Likeness.ALIKE


def _difference(
    plain: Batch, done: Batch, left: Mapping[Path, Likeness], again: Callable[[], Batch]
) -> str | None:
    before, after = _leaves(plain), _leaves(done)
    if before.keys() != after.keys():
        return "the batch had another structure"
    changed = []
    for path, one in before.items():
        other = after[path]
        if type(one) is not type(other):
            return f"{spelled(path)} became a {type(other).__name__}"
        if not isinstance(one, torch.Tensor):
            continue
        if (one.shape, one.dtype) != (other.shape, other.dtype):
            return f"{spelled(path)} became {other.dtype} {tuple(other.shape)}"
        if path in left:
            if not _close(one, other, left[path]):
                return f"{spelled(path)} had other values"
        elif not torch.equal(one, other):
            changed.append(path)
    if changed:
        twin = _leaves(again())
        for path in changed:
            if path in twin and _equal(before[path], twin[path]):
                return f"{spelled(path)} had other values"
    return None


def _leaves(batch: Batch) -> dict[Path, Any]:
    found: dict[Path, Any] = {}
    replace_leaves(batch, found.setdefault)
    return found


def _equal(one: torch.Tensor, other: Any) -> bool:
    return isinstance(other, torch.Tensor) and torch.equal(one, other)


def _close(one: torch.Tensor, other: torch.Tensor, likeness: Likeness) -> bool:
    if one.numel() == 0 or likeness is Likeness.SAME_LAW:
        return True
    one, other = one.double(), other.double()
    gap, reach = (one - other).abs(), (one.max() - one.min()).clamp(min=1e-6)
    if likeness is Likeness.ALIKE:
        return bool(gap.mean() <= _CLOSE * reach)
    return bool(gap.max() <= _ROUNDING * torch.maximum(reach, one.abs().max()))


IN_WORKERS: Final = "all of it in the workers, by Albumentations itself"
_SAMPLES: Final = 3
_DRAWN: Final = frozenset({"params", "replay_params", "applied_in_replay", "seed"})
_NESTED: Final = 3
"""Levels of lists and dicts in the settings of transforms."""


class Trial(NamedTuple):
    """What came of it."""

    places: tuple[PipelinePlace, ...]
    """The dataset's pipelines."""
    registered: Mapping[str, DeviceOp]
    """Device forms of their classes that are not Albumentations' own."""
    fields: tuple[str, ...]
    """Fields of a batch that the device would compute; none: the workers do it all."""
    why: str
    """The reason."""

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


class TriedDataset:
    """The outcome of a trial, for as long as it is known to hold; holds no dataset alive.

    Args:
        trial: The outcome.
        dataset: What was tried.
        rests_on: See :func:`rests_on`.
    """

    def __init__(self, trial: Trial, dataset: Dataset[Any], rests_on: tuple[Any, ...]) -> None:
        self.trial = trial
        self._dataset: weakref.ref[Dataset[Any]] | None
        try:
            self._dataset = weakref.ref(dataset)
        except TypeError:  # it has slots
            self._dataset = None
        self._rests_on = rests_on

    def __getstate__(self) -> dict[str, Any]:
        # In another process the dataset is another one; the outcome is shown there, but not used.
        return {"trial": self.trial, "_dataset": None, "_rests_on": None}

    def holds_for(self, dataset: Dataset[Any], rests_on: tuple[Any, ...]) -> bool:
        """Return whether a trial would find the same: nothing has changed that it rests on."""
        if self._dataset is None or self._dataset() is not dataset:
            return False
        return self._rests_on == rests_on


def rests_on(
    dataset: Dataset[Any],
    composes: Sequence[Any],
    *,
    seed: int,
    collate_fn: Callable[[list[Any]], Any] | None,
    against: str | None = None,
) -> tuple[Any, ...]:
    """Return what the outcome of a trial rests on, to be compared with ``==``.

    The settings of pipelines, other pipelines, and what a dataset has of numbers, texts and
    switches. A dataset that counts something is tried again.

    Args:
        dataset: What is tried.
        composes: The pipelines that it holds.
        seed: As :func:`try_recording` takes it.
        collate_fn: Likewise.
        against: Why the outcome is refused; None: it is not.
    """
    nodes = [
        (node, _settings(node, _NESTED)) for compose in composes for node in list_nodes(compose)
    ]
    return against, seed, collate_fn, _settings(dataset), nodes, registered_forms(*composes)


def _settings(owner: object, depth: int = 0) -> list[str]:
    """Return the plain attributes of a transform or dataset; what is drawn is no setting."""
    held = getattr(owner, "__dict__", {}).items()
    return [
        f"{name}={value!r}"
        for name, value in held
        if _is_plain(value, depth) and name not in _DRAWN and not name.startswith("_")
    ]


def _is_plain(value: object, depth: int) -> bool:
    if isinstance(value, Mapping):
        return depth > 0 and all(_is_plain(item, depth - 1) for item in value.values())
    if isinstance(value, list | tuple):
        return depth > 0 and all(_is_plain(item, depth - 1) for item in value)
    return isinstance(value, bool | int | float | str | Enum | None)


def try_recording(
    dataset: Dataset[Any], *, seed: int, collate_fn: Callable[[list[Any]], Any] | None
) -> Trial | None:
    """Read samples as always and once more with their pixels left over, and compare.

    Each operation that would be left to the device is tried by itself, too, however seldom it is
    drawn (:mod:`~lightning_fastdata.augment.pipeline.trial`). The dataset and the global
    random state stay as they were, but for what the dataset keeps of samples that it reads. What is
    left over is computed here, by one thread.

    Args:
        dataset: A dataset.
        seed: Of the draws.
        collate_fn: The user's; None: the default collation.

    Returns:
        The trial; None if the dataset holds no pipeline.
    """
    composes = find_composes(dataset)
    registered = registered_forms(*composes)
    places = place_pipelines(composes, registered)
    if not places:
        return None

    def refused(why: str) -> Trial:
        return Trial(places, registered, (), why)

    reasons = [place.why_not for place in places if place.why_not is not None]
    if len(reasons) == len(places):
        return refused(reasons[0])
    if isinstance(dataset, IterableDataset):
        return refused("a stream, of which no sample can be tried without losing it")
    length = dataset_length(dataset)
    indices = spread_indices(length or 1, min(length or 1, _SAMPLES))
    state, threads = DrawWatch(), torch.get_num_threads()
    # A few small images; and threads of a process that was forked may wait for ever.
    torch.set_num_threads(1)
    try:
        if _keeps_what_it_returns(dataset, indices[0], seed, registered, state):
            return refused(
                "it keeps what its pipeline returns: read again in the next epoch, a sample ran no "
                "pipeline, so that nothing would be left to the device but once"
            )
        state.restore()
        return _tried(dataset, indices, seed, collate_fn, places, registered, state)
    except Exception as error:  # whatever the code around the pipeline raises
        return refused(f"tried out, it ended in {type(error).__name__}: {error}")
    finally:
        state.restore()
        torch.set_num_threads(threads)


def _tried(
    dataset: Dataset[Any],
    indices: Sequence[int],
    seed: int,
    collate_fn: Callable[[list[Any]], Any] | None,
    places: tuple[PipelinePlace, ...],
    registered: Mapping[str, DeviceOp],
    state: DrawWatch,
) -> Trial:
    refused = Trial(places, registered, (), "")
    watch = Watch()
    recording = DatasetRecording(registered=registered, watch=watch)
    collate = collate_fn or collate_samples
    stage = RecordedCollate(collate, recording, "train")
    try:
        plain = collate(_read(dataset, indices, seed, None))
    except Exception:  # images of several sizes come in batches of one
        indices = indices[:1]
        state.restore()
        plain = collate(_read(dataset, indices, seed, None))
    state.restore()
    waiting = stage.collated(_read(dataset, indices, seed, recording))
    batch, draws = stage.taken(waiting)
    if draws is None:
        return refused.refused(_fate(watch.made))
    done = draws.apply(batch)
    state.restore()
    difference = find_difference(
        plain,
        waiting,
        done,
        device_ops(None, registered),
        redrawn_of(places),
        again=lambda: collate(_read(dataset, indices, seed, None)),
    )
    if difference is not None:
        return refused.refused(f"tried out, {difference}")
    tried = [one for place in places for one in _operations_of(place, watch, registered, seed)]
    fault = next((one for one in tried if one.fault is not None), None)
    if fault is not None:
        return refused.refused(f"tried out by itself on the device, {fault.name}: {fault.fault}")
    fields = tuple(dict.fromkeys(part.field for part in draws.parts))
    alone = len({one.name for one in tried})
    many = f"{_many(len(indices), 'sample')} tried, and {_many(alone, 'operation')} alone"
    return Trial(places, registered, fields, f"on the device: {', '.join(fields)}; {many}")


def _operations_of(
    place: PipelinePlace, watch: Watch, registered: Mapping[str, DeviceOp], seed: int
) -> tuple[Tried, ...]:
    given = watch.given.get(id(place.compose))
    if place.why_not is not None or given is None:
        return ()
    ops = device_ops(None, registered)
    return try_operations(place.compose, given, place.plan, ops, seed=seed)


def _keeps_what_it_returns(
    dataset: Dataset[Any],
    index: int,
    seed: int,
    registered: Mapping[str, DeviceOp],
    state: DrawWatch,
) -> bool:
    """Return whether a sample that is read once more, in another epoch, runs no pipeline."""
    watch, epoch = Watch(records=False), EpochCell()
    recording = DatasetRecording(registered=registered, watch=watch)
    twin = keyed(dataset, seed=seed, epoch=epoch, transform=None, recording=recording)
    calls = []
    for number in range(2):
        epoch.set(number)
        state.restore()  # whether it calls a pipeline may be drawn
        before = watch.calls
        _fetch(twin, dataset, [index])
        calls.append(watch.calls - before)
    return calls[0] > 0 and calls[1] == 0


def _read(
    dataset: Dataset[Any], indices: Sequence[int], seed: int, recording: DatasetRecording | None
) -> list[Any]:
    twin = keyed(dataset, seed=seed, epoch=EpochCell(), transform=None, recording=recording)
    return _fetch(twin, dataset, indices)


def _fetch(twin: Dataset[Any], dataset: Dataset[Any], indices: Sequence[int]) -> list[Any]:
    if fetches_in_batches(dataset):
        return list(twin.__getitems__(list(indices)))  # type: ignore[attr-defined]
    return [twin[index] for index in indices]


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
