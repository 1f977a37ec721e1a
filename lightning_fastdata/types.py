"""Small types that every room shares."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple, Protocol, TypeAlias, runtime_checkable

Batch: TypeAlias = Any
"""Any nesting of tuples, lists, dicts, named tuples and dataclasses whose leaves may be tensors."""

Stage: TypeAlias = Literal["train", "val", "test", "predict"]
"""What a loader or a transform is for. Lightning's sanity check counts as ``val``."""

PixelPlace: TypeAlias = Literal["device", "workers"]
"""Where pixels are computed. ``"workers"``: all of it, by Albumentations; ``"device"``: there what
has a device form."""

Shuffle: TypeAlias = bool | Literal["blocks"]
"""Whether samples are shuffled; "blocks": a few blocks at a time, as BlockShuffleSampler does."""

STAGES: tuple[Stage, ...] = ("train", "val", "test", "predict")

STAGE_WORDS: Mapping[str, str] = {
    "train": "training",
    "val": "validation",
    "test": "test",
    "predict": "prediction",
}
"""Stage -> what it is called in a sentence."""


@runtime_checkable
class SetsEpoch(Protocol):
    """A loader, sampler or dataset whose order or draws depend on the epoch."""

    def set_epoch(self, epoch: int) -> object:
        """Take the number of the epoch that comes next, counted from 0."""


@runtime_checkable
class StoredInBlocks(Protocol):
    """A dataset or source that says which of its samples are stored, and read, together."""

    def block_starts(self) -> Sequence[int] | None:
        """Return the first sample of each block, increasing from 0; None: it does not say."""


@runtime_checkable
class MapDataset(Protocol):
    """Samples by index, and how many there are."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: Any, /) -> Batch: ...


class SampleKey(NamedTuple):
    """What the randomness of one sample depends on, and nothing else."""

    seed: int
    """Seed of the run."""
    epoch: int
    """Epoch in which the sample is drawn, counted from 0."""
    index: int  # type: ignore[assignment]  # the field's name matters more than tuple.index
    """Position of the sample in the dataset, or in the stream of an iterable dataset."""
