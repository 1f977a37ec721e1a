"""Small types that every room shares."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import (
    TYPE_CHECKING,
    Any,
    Generic,
    Literal,
    NamedTuple,
    Protocol,
    Self,
    SupportsInt,
    TypeAlias,
    runtime_checkable,
)

if TYPE_CHECKING:
    from typing_extensions import TypeVar

    Batch_co = TypeVar("Batch_co", covariant=True, default=Any)
else:
    from typing import TypeVar

    # TypeVars of Python before 3.13 have no default.
    Batch_co = TypeVar("Batch_co", covariant=True)

Batch: TypeAlias = Any
"""Any nesting of tuples, lists, dicts, named tuples and dataclasses whose leaves may be tensors."""

B = TypeVar("B")
"""Type of a batch, for functions that pass batches on."""

Stage: TypeAlias = Literal["train", "val", "test", "predict"]
"""Stage that a loader or a transform is for. Lightning's sanity check counts as ``val``."""

PixelPlace: TypeAlias = Literal["device", "workers"]
"""Where pixels are computed. ``"workers"``: all operations there, by Albumentations; ``"device"``:
operations that have a device form run on the device."""

Shuffle: TypeAlias = bool | Literal["blocks"]
"""Whether samples are shuffled; "blocks": a few blocks at a time, as BlockShuffleSampler does."""

STAGES: tuple[Stage, ...] = ("train", "val", "test", "predict")

STAGE_WORDS: Mapping[str, str] = {
    "train": "training",
    "val": "validation",
    "test": "test",
    "predict": "prediction",
}
"""Word for each stage in a sentence."""


@runtime_checkable
class SetsEpoch(Protocol):
    """A loader, sampler or dataset whose order or draws depend on the epoch."""

    def set_epoch(self, epoch: int) -> object:
        """Set the number of the epoch that comes next, counted from 0."""


def has_own_order(dataset: object) -> bool:
    """Return whether a dataset has an order of its own, different in each epoch: do not shuffle."""
    return bool(getattr(type(dataset), "has_own_order", False))


@runtime_checkable
class MapDataset(Protocol):
    """A dataset with samples by index, and a length."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: Any, /) -> Batch: ...


class AroundLoader(Generic[Batch_co]):
    """An object in the place of a loader: it has the loader's length and attributes."""

    loader: Iterable[Batch_co]

    def __len__(self) -> int:
        """Return the number of batches of the loader; a TypeError if it has no length."""
        return len(self.loader)  # type: ignore[arg-type]

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name == "loader":
            raise AttributeError(name)
        return getattr(self.loader, name)


READ_FOR: ContextVar[tuple[int | None, int]] = ContextVar("READ_FOR", default=(None, 0))
"""Epoch of the sample that is read (None: the one that was told), and what it adds to indices, in
the keys of what draws by keys of its own: below a wrapper that gets another index."""


class Repeated(int):
    """Index of a sample that came before in its epoch, so that it draws otherwise this time."""

    given: SupportsInt
    """The index as the sampler gave it, for the dataset: a tensor, an enumeration's member, ..."""
    times: int
    """Number of times that it came before, from 1 on; a pass over the data counts as ``2**24``."""

    def __new__(cls, index: SupportsInt, times: int) -> Self:
        """Return an index that came ``times`` before."""
        repeated = super().__new__(cls, index)
        repeated.given, repeated.times = index, times
        return repeated

    def __reduce__(self) -> tuple[Any, ...]:
        return Repeated, (self.given, self.times)


def unmarked(index: Any) -> Any:
    """Return an index as a dataset gets it; several, if it is a list or tuple of them."""
    if type(index) in (list, tuple):
        kinds = set(map(type, index))  # most are plain numbers, of which there are many
        marked = not kinds.isdisjoint((Repeated, list, tuple))
        return type(index)(map(unmarked, index) if marked else index)
    return index.given if type(index) is Repeated else index


@contextmanager
def reading_for(epoch: int | None, added: int) -> Iterator[None]:
    """Set :data:`READ_FOR` in the block."""
    token = READ_FOR.set((epoch, added))
    try:
        yield
    finally:
        READ_FOR.reset(token)


def repeats(index: object) -> int:
    """Return what the times that an index came before add to it in the key of its draws."""
    return index.times << 40 if type(index) is Repeated else 0


class SampleKey(NamedTuple):
    """The key of one sample: its randomness depends on these three numbers and nothing else."""

    seed: int
    """Seed of the run."""
    epoch: int
    """Epoch in which the sample is drawn, counted from 0."""
    index: int  # type: ignore[assignment]  # the field's name matters more than tuple.index
    """Position of the sample in the dataset, or in the stream of an iterable dataset; where it came
    ``n`` times before in the epoch, plus ``n * 2**40`` (see :class:`Repeated`)."""
