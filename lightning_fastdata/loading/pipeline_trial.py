"""A trial of leaving a dataset's own pipelines to the device: does it pay, and is all the same?"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from enum import Enum
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import torch
import torch.overrides
from torch.utils.data import Dataset, IterableDataset

from lightning_fastdata.augment.dataset_pipelines import (
    DatasetDraws,
    DatasetRecording,
    PipelinePlace,
    explain_pipelines,
    place_pipelines,
    redrawn_of,
)
from lightning_fastdata.augment.batch_leaves import Path, replace_leaves, spelled
from lightning_fastdata.augment.deferred import Waiting
from lightning_fastdata.augment.registry import registered_forms
from lightning_fastdata.augment.seeds import find_composes
from lightning_fastdata.augment.tree import list_nodes
from lightning_fastdata.epochs import EpochCell
from lightning_fastdata.loading.collate import RecordedCollate, collate_samples
from lightning_fastdata.loading.draws import DrawWatch
from lightning_fastdata.loading.keyed import fetches_in_batches, keyed
from lightning_fastdata.loading.order import dataset_length
from lightning_fastdata.loading.probe import shallow_copy, spread_indices

if TYPE_CHECKING:
    from lightning_fastdata.augment.ops.operation import DeviceOp
    from lightning_fastdata.augment.switching import PlaceSwitch
    from lightning_fastdata.types import Batch

IN_WORKERS: Final = "all of it in the workers, by Albumentations itself"
_SAMPLES: Final = 3
_DRAWN: Final = frozenset({"params", "replay_params", "applied_in_replay", "seed"})
_NESTED: Final = 3
"""Levels of lists and dicts in the settings of transforms."""
_CLOSE: Final = 0.01
"""Part of the range of values that the mean difference may be. Operations that are a level off make
a hundredth of it; a mirror or another draw twenty times as much."""


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
    """The outcome of a trial, for as long as it can be told to hold; holds no dataset alive.

    Args:
        trial: The outcome.
        dataset: What was tried, with ``seed`` and ``collate_fn``, as :func:`try_recording` takes
            them.
        against: Why the outcome was refused; None: it was not.
    """

    def __init__(
        self,
        trial: Trial,
        dataset: Dataset[Any],
        *,
        seed: int,
        collate_fn: Callable[[list[Any]], Any] | None,
        against: str | None = None,
    ) -> None:
        self.trial = trial
        self._dataset: weakref.ref[Dataset[Any]] | None
        try:
            self._dataset = weakref.ref(dataset)
        except TypeError:  # it has slots
            self._dataset = None
        self._rests_on = against, _rests_on(dataset, seed, collate_fn)

    def __getstate__(self) -> dict[str, Any]:
        # In another process the dataset is another one; the outcome is told there, but not used.
        return {"trial": self.trial, "_dataset": None, "_rests_on": None}

    def holds_for(
        self,
        dataset: Dataset[Any],
        *,
        seed: int,
        collate_fn: Callable[[list[Any]], Any] | None,
        against: str | None = None,
    ) -> bool:
        """Return whether a trial would find the same: nothing has changed that it rests on.

        Seen are the settings of pipelines, other pipelines, and what a dataset has of numbers,
        texts and switches. A dataset that counts something is tried again.
        """
        if self._dataset is None or self._dataset() is not dataset:
            return False
        return self._rests_on == (against, _rests_on(dataset, seed, collate_fn))


def _rests_on(
    dataset: Dataset[Any], seed: int, collate_fn: Callable[[list[Any]], Any] | None
) -> tuple[Any, ...]:
    composes = find_composes(dataset)
    nodes = [
        (node, _settings(node, _NESTED)) for compose in composes for node in list_nodes(compose)
    ]
    return seed, collate_fn, _settings(dataset), nodes, registered_forms(*composes)


def _settings(owner: object, depth: int = 0) -> list[str]:
    """Return the plain attributes of a transform or dataset; what is drawn is no setting."""
    told = getattr(owner, "__dict__", {}).items()
    return [
        f"{name}={value!r}"
        for name, value in told
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

    The dataset and the global random state stay as they were. What is left over is computed here.

    Args:
        dataset: A dataset.
        seed: Of the draws.
        collate_fn: The user's; None: the default collation.

    Returns:
        The trial; None if the dataset holds no pipeline.
    """
    registered = registered_forms(*find_composes(dataset))
    places = place_pipelines(dataset, registered)
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
    made: list[Waiting] = []
    recording = DatasetRecording(registered=registered, made=made)
    collate = collate_fn or collate_samples
    stage = RecordedCollate(collate, recording, "train")
    watch = DrawWatch()
    try:
        try:
            plain = collate(_read(dataset, indices, seed, None))
        except Exception:  # images of several sizes come in batches of one
            indices = indices[:1]
            watch.restore()
            plain = collate(_read(dataset, indices, seed, None))
        watch.restore()
        staged = stage(_read(dataset, indices, seed, recording))
        draws = staged.draws
        if not isinstance(draws, DatasetDraws):
            return refused(_fate(made))
        fields = tuple(dict.fromkeys(part.field for part in draws.parts))
        exact = not redrawn_of(places)
        done = draws.apply(staged.batch)
        watch.restore()
        difference = _difference(
            plain,
            done,
            {path for part in draws.parts for path in part.paths},
            exact=exact,
            again=lambda: collate(_read(dataset, indices, seed, None)),
        )
    except Exception as error:  # whatever the code around the pipeline raises
        return refused(f"tried out, it ended in {type(error).__name__}: {error}")
    finally:
        watch.restore()
    if difference is not None:
        return refused(f"tried out, {difference}")
    why = f"on the device: {', '.join(fields)}; {_many(len(indices))} tried"
    return Trial(places, registered, fields, why)


def _read(
    dataset: Dataset[Any], indices: Sequence[int], seed: int, recording: DatasetRecording | None
) -> list[Any]:
    twin = keyed(
        shallow_copy(dataset), seed=seed, epoch=EpochCell(), transform=None, recording=recording
    )
    if fetches_in_batches(dataset):
        return list(twin.__getitems__(list(indices)))  # type: ignore[attr-defined]
    return [twin[index] for index in indices]


def _many(samples: int) -> str:
    return f"{samples} sample{'s' if samples > 1 else ''}"


def _fate(made: Sequence[Waiting]) -> str:
    """Return why no batch waits for the device, by what became of each tensor, in words."""
    if not made:
        return (
            "no sample that was tried leaves it an image for the device: it is given stacks "
            "(images=, volume=), called in another thread or one transform at a time, or not called"
        )
    use = next((one.use for one in made if one.use is not None), None)
    if use is None:
        return (
            "the batch has no tensor of what it returns in dicts, lists, tuples or dataclasses"
        )
    if use is torch.stack:
        return (
            "the batch stacks what it returns with other tensors, with those of another pipeline, "
            "or not along the first dimension"
        )
    name = torch.overrides.resolve_name(use) or getattr(use, "__name__", str(use))
    return f"the dataset, or the collation, works on what it returns ({name})"


def _difference(
    plain: Batch, done: Batch, paths: set[Path], *, exact: bool, again: Callable[[], Batch]
) -> str | None:
    """Return in what a batch differs from the plain one, in words; None if in nothing.

    Args:
        plain: The batch as always.
        done: The one that was computed from what was left over.
        paths: Fields that were left over.
        exact: Their values have to be close, too.
        again: Reads the plain batch once more, to tell fields that are other ones each time.
    """
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
        if path in paths:
            if exact and not _close(one, other):
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


def _close(one: torch.Tensor, other: torch.Tensor) -> bool:
    if one.numel() == 0:
        return True
    one, other = one.double(), other.double()
    return bool((one - other).abs().mean() <= _CLOSE * (one.max() - one.min()).clamp(min=1e-6))
