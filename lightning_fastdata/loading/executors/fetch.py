"""What an executor fetches, and how one batch is fetched in one process."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np
import torch
from torch.utils.data import IterableDataset

from lightning_fastdata.images.folder import FastImageFolder
from lightning_fastdata.types import SampleKey

if TYPE_CHECKING:
    from lightning_fastdata.loading.layout import SampleLayout

_COLLATION = -1
"""Stands for the sample index in the randomness of a collate function."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FetchPlan:
    """Everything an executor needs to know before the first epoch."""

    dataset: Any
    """A map-style dataset, or a stream."""
    collate_fn: Callable[[Any], Any]
    """Samples to batch; with ``batched=False`` one sample to what is delivered."""
    default_collation: bool = False
    """``collate_fn`` is torch's default, so that samples may be written in place instead."""
    batched: bool = True
    """The plan's items are lists of indices; False: single indices."""
    drop_last: bool = False
    """Leave out the last batch of a stream if it is not full; of use for streams only."""
    seed: int | None = None
    """Seed of the per-sample randomness of ``random``, ``numpy.random`` and torch; None leaves the
    generators alone."""
    base_seed: int = 0
    """Each side process seeds its generators from this and its number when it starts."""
    worker_init_fn: Callable[[int], None] | None = None
    """Called in each side process with its number."""
    timeout_s: float = 0
    """Seconds to wait for one batch; 0 waits for ever."""
    in_order: bool = True
    """Deliver in the plan's order; False: as they are ready."""
    context: Any = None
    """How side processes start: a ``multiprocessing`` context, its name, or None for Python's."""
    look_ahead: int = 8
    """Batches under way at once."""
    memory_limit_bytes: int = 2**31
    """What the slots may take together."""
    niceness: int = 5
    """How much side processes give way to the training process, 0 to 19."""


class Fetcher:
    """Reads samples and batches of a plan in the calling thread."""

    def __init__(self, plan: FetchPlan, *, keyed: bool = True) -> None:
        self.plan = plan
        self.dataset = plan.dataset
        self.seed = plan.seed if keyed else None
        self.position = 0
        """Which sample of the batch is being read; that of an error when one is raised."""

    def sample(self, index: Any, epoch: int) -> Any:
        """Return ``dataset[index]``, drawn under its own key."""
        if self.seed is not None:
            seed_global_generators(self.seed, epoch, index)
        return self.dataset[index]

    def batch(self, indices: Any, epoch: int, mark: Callable[[int], None] | None = None) -> Any:
        """Return the collated batch of the indices."""
        self.position = 0
        if not self.plan.batched:
            return self.plan.collate_fn(self.sample(indices, epoch))
        many = getattr(self.dataset, "__getitems__", None)
        if many:
            if self.seed is not None and len(indices):
                seed_global_generators(self.seed, epoch, indices[0])
            samples = many(indices)
        else:
            samples = []
            for position, index in enumerate(indices):
                self.position = position
                if mark is not None:
                    mark(position)
                samples.append(self.sample(index, epoch))
        self.position = -1
        return self.collate(samples, indices, epoch)

    def collate(self, samples: Sequence[Any], indices: Any, epoch: int) -> Any:
        """Return the batch of samples."""
        if self.seed is not None and not self.plan.default_collation and len(indices):
            seed_global_generators(self.seed, epoch, (_COLLATION, indices[0]))
        return self.plan.collate_fn(samples)

    def where(self, indices: Any) -> str:
        """Return what was being done, to be said of an error."""
        if self.position < 0:
            return "in collate_fn"
        index = indices[self.position] if self.plan.batched else indices
        return f"while reading sample {index!r} of the dataset"


class StreamAsk(NamedTuple):
    """What takes the place of indices where there are none."""

    generation: int
    """Number of the pass over the stream; a new one starts a new pass."""
    samples: int | None
    """Samples wanted for a batch; None: one sample, as it is."""


END_OF_STREAM: Final = object()
"""What a :class:`StreamFetcher` returns in place of a batch when there is none left."""


class StreamFetcher:
    """Reads batches of a stream, whose samples come one after the other."""

    def __init__(self, plan: FetchPlan) -> None:
        self.plan = plan
        self.dataset = plan.dataset
        self.position = 0
        """0 while a sample is being read, -1 in the collation."""
        self._generation = -1
        self._samples: Iterator[Any] = iter(())
        self._ended = False
        self._read = 0

    def start(self, generation: int) -> None:
        """Begin a pass over the stream; what is left of the one before is dropped."""
        self._generation = generation
        self._ended, self._read, self.position = False, 0, 0
        self._samples = iter(())  # a file or lock that the old pass holds is free for the new one
        self._samples = iter(self.dataset)

    def batch(self, ask: StreamAsk, epoch: int, mark: Callable[[int], None] | None = None) -> Any:  # noqa: ARG002 - as of Fetcher
        """Return the next collated batch, or :data:`END_OF_STREAM`."""
        if ask.generation != self._generation:
            self.start(ask.generation)
        self.position = 0
        samples: list[Any] = []
        wanted = 1 if ask.samples is None else ask.samples
        while len(samples) < wanted and not self._ended:
            sample = next(self._samples, END_OF_STREAM)
            self._ended = sample is END_OF_STREAM
            if not self._ended:
                samples.append(sample)
                self._read += 1
        if not samples or (self._ended and self.plan.drop_last):
            return END_OF_STREAM
        self.position = -1
        return self.plan.collate_fn(samples[0] if ask.samples is None else samples)

    def where(self, ask: StreamAsk) -> str:  # noqa: ARG002 - as of Fetcher
        """Return what was being done, to be said of an error."""
        if self.position < 0:
            return "in collate_fn"
        return f"while reading sample {self._read} of its stream, counted from 0"


def fetcher_of(plan: FetchPlan, *, keyed: bool = True) -> Fetcher | StreamFetcher:
    """Return what reads the dataset of a plan in the calling thread."""
    if isinstance(plan.dataset, IterableDataset):
        return StreamFetcher(plan)
    return Fetcher(plan, keyed=keyed)


def decodes_in_place(dataset: Any) -> bool:
    """Return whether samples are those of :class:`FastImageFolder`, unchanged by a subclass."""
    kind = type(dataset)
    ours = FastImageFolder
    return isinstance(dataset, ours) and kind.__getitem__ is ours.__getitem__


def write_image_of(
    dataset: Any, layout: SampleLayout, writers: list[Any], epoch: int
) -> Callable[[Any, int], None] | None:
    """Return what decodes sample ``index`` straight into a row of the batch, if that is possible.

    Args:
        dataset: The dataset.
        layout: Of its samples.
        writers: The batch of each leaf.
        epoch: Part of the key of the sample's randomness.
    """
    if not decodes_in_place(dataset):
        return None
    if [field.shape for field in layout.fields] != [dataset.sample_shape, ()]:
        return None
    images, targets = writers[0].numpy(), writers[1]
    seed, length = dataset.seed, len(dataset)

    def write(index: Any, row: int) -> None:
        key = SampleKey(seed, epoch, int(index) % length)
        targets[row] = dataset.write_into(index, images[row], key=key)

    return write


def seed_global_generators(seed: int, epoch: int, index: Any) -> None:
    """Seed ``random``, ``numpy.random`` and torch's CPU generator for one sample."""
    text = f"{seed},{epoch},{index}".encode()
    digest = hashlib.blake2b(text, digest_size=20).digest()
    random.seed(int.from_bytes(digest[:8], "little"))
    np.random.seed(int.from_bytes(digest[8:12], "little"))
    # torch.manual_seed would also seed, and here queue up, all accelerators.
    torch.default_generator.manual_seed(int.from_bytes(digest[12:], "little", signed=True))
