"""Small types that every room shares."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Protocol, TypeAlias, runtime_checkable

if TYPE_CHECKING:
    from typing_extensions import TypeVar

    Batch_co = TypeVar("Batch_co", covariant=True, default=Any)
else:
    from typing import TypeVar

    # Python 3.13 is the first whose own have a default.
    Batch_co = TypeVar("Batch_co", covariant=True)

Batch: TypeAlias = Any
"""Any nesting of tuples, lists, dicts, named tuples and dataclasses whose leaves may be tensors."""

B = TypeVar("B")
"""The type of a batch, for what hands batches on."""

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


def has_own_order(dataset: object) -> bool:
    """Return whether a dataset is to be read in its own order, which each epoch has another of."""
    return bool(getattr(type(dataset), "has_own_order", False))


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
