"""What an executor fetches, and how one batch is fetched in one process."""

from __future__ import annotations

import hashlib
import random
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import torch

from lightning_fastdata.batches.keyed import fetches_in_batches
from lightning_fastdata.images.folder import FastImageFolder
from lightning_fastdata.randomness.generators import GENERATORS, DrawWatch, kept_random_state
from lightning_fastdata.types import SampleKey

if TYPE_CHECKING:
    from lightning_fastdata.batches.layout import SampleLayout
    from lightning_fastdata.randomness.generators import OwnGenerators
    from lightning_fastdata.stamps.batch_stamps import TaskWatch
    from lightning_fastdata.types import Batch

_Fetched = TypeVar("_Fetched")
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
    own: OwnGenerators | None = None
    """The generators that the dataset holds itself, to be keyed likewise; None: left alone."""
    base_seed: int = 0
    """Each side process seeds its generators from this and its number when it starts."""
    worker_init_fn: Callable[[int], None] | None = None
    """Called in each side process with its number."""
    timeout_s: float = 0
    """Seconds to wait for one batch; 0 waits as long as there is progress."""
    stall_timeout_s: float | None = None
    """Seconds to wait without progress, where ``timeout_s`` is 0; 0: for ever; None: as the tasks
    show."""
    in_order: bool = True
    """Deliver in the plan's order; False: as they are ready."""
    context: Any = None
    """How side processes start: a ``multiprocessing`` context, its name, or None for Python's."""
    look_ahead: int = 8
    """Batches under way at once."""
    memory_limit_bytes: int = 2**31
    """What the slots may take together."""
    sharing_strategy: str | None = None
    """How torch shares the memory of tensors in side processes; None: as it is by default. What is
    delivered does not rest on it, but samples may."""
    niceness: int = 5
    """How much side processes give way to the training process, 0 to 19."""

    def with_other_draws(self) -> FetchPlan:
        """Return the plan for a process in another's place, which is not to draw the same again."""
        return replace(self, base_seed=(self.base_seed + 2**32) % 2**63)


class _DrewError(Exception):
    """Ends an attempt that has drawn without a key."""


class Fetcher:
    """Reads samples and batches of a plan in the calling thread.

    Each sample's draws from the global generators have a key of their own. A generator is seeded
    only once a fetch has been seen to draw from it: that fetch is done again, and in it and every
    one after it the generator is seeded for each sample.

    Args:
        plan: What to fetch.
        keyed: Whether the global generators are this thread's to seed.
        guest: They belong to the calling program, which is to find them as they were.
    """

    def __init__(self, plan: FetchPlan, *, keyed: bool = True, guest: bool = False) -> None:
        self.plan = plan
        self.dataset = plan.dataset
        self.keyed = keyed and plan.seed is not None
        self.guest = guest
        self.drawn: tuple[str, ...] = ()
        """The global generators that a fetch has drawn from."""
        self.position = 0
        """Which sample of the batch is being read; that of an error when one is raised."""
        self.stamps: TaskWatch | None = None
        """Where the times of samples and collation are noted."""
        self._watch = DrawWatch() if self.keyed else None
        self._own = plan.own if self.keyed else None
        self._own_draws = bool(self._own)
        self._looked = False
        self._epoch: int | None = None

    def attempt(self, fetch: Callable[[], _Fetched]) -> _Fetched:
        """Return what ``fetch`` does, whose draws are those of the keys of its samples.

        Args:
            fetch: Calls :meth:`sample` and :meth:`collate`; called again if it is the first one to
                draw from a generator.
        """
        if self._own is not None and self._own_draws and self.guest:
            with self._own.kept():
                return self._attempt(fetch)
        return self._attempt(fetch)

    def _attempt(self, fetch: Callable[[], _Fetched]) -> _Fetched:
        watch = self._watch
        if watch is None:
            return fetch()
        with ExitStack() as kept:
            if self.guest:
                watch.begin()
                if self.drawn:
                    kept.enter_context(kept_random_state(self.drawn))
            while True:
                try:
                    result = fetch()
                except Exception:
                    drawn = watch.drawn()
                    if not drawn:
                        raise
                else:
                    drawn = watch.drawn()
                    if not drawn:
                        return result
                watch.restore()
                watch.leave(drawn)
                self.drawn = (*self.drawn, *drawn)
                if self.guest:
                    kept.enter_context(kept_random_state(drawn))
                if self.stamps is not None:
                    self.stamps.begin()

    def sample(self, index: Any, epoch: int) -> Any:
        """Return ``dataset[index]``, drawn under its own key."""
        if self.stamps is None and self._needs_nothing(epoch):
            return self.dataset[index]
        began_ns = time.monotonic_ns()
        self._key(epoch, index)
        sample = self.dataset[index]
        if self._own is not None and epoch != self._epoch and self._made_generators(epoch):
            self._key(epoch, index)
            sample = self.dataset[index]
        if self.stamps is not None:
            self.stamps.read(index, began_ns)
        if not self._looked:
            # Most datasets that draw do so for each sample: one is done again, not a whole batch.
            self._looked = True
            if self._watch is not None and self._watch.drew():
                raise _DrewError
        return sample

    def _needs_nothing(self, epoch: int) -> bool:
        """Return whether samples of an epoch draw from no generator that is known."""
        if not self._looked or self.drawn:
            return False
        return self._own is None or (not self._own_draws and epoch == self._epoch)

    def _made_generators(self, epoch: int) -> bool:
        """Return whether there are new ones, which some datasets make when they first read."""
        self._epoch = epoch
        made = self._own is not None and self._own.look_again()
        self._own_draws |= made
        return made

    def batch(self, indices: Any, epoch: int, mark: Callable[[int], None] | None = None) -> Batch:
        """Return the collated batch of the indices."""
        self.position = 0
        if not self.plan.batched:
            return self.plan.collate_fn(self.sample(indices, epoch))
        if fetches_in_batches(self.dataset):
            first = indices[0] if len(indices) else None
            self._key(epoch, first)
            began_ns = time.monotonic_ns()
            samples = self.dataset.__getitems__(indices)
            if self._own is not None and epoch != self._epoch and self._made_generators(epoch):
                self._key(epoch, first)
                samples = self.dataset.__getitems__(indices)
            if self.stamps is not None:
                self.stamps.read(first, began_ns, len(indices))
        else:
            samples = []
            for position, index in enumerate(indices):
                self.position = position
                if mark is not None:
                    mark(position)
                samples.append(self.sample(index, epoch))
        self.position = -1
        if self.stamps is not None:
            self.stamps.all_read()
        return self.collate(samples, indices, epoch)

    def collate(self, samples: Sequence[Any], indices: Any, epoch: int) -> Batch:
        """Return the batch of samples."""
        if not self.plan.default_collation and len(indices):
            self._key(epoch, (_COLLATION, indices[0]))
        began_ns = time.monotonic_ns()
        batch = self.plan.collate_fn(samples)
        if self.stamps is not None:
            self.stamps.collated(began_ns)
        return batch

    def _key(self, epoch: int, index: object) -> None:
        if self.plan.seed is None:
            return
        if self._own is not None and self._own_draws:
            self._own.key(self.plan.seed, epoch, index)
        if self.drawn:
            seed_global_generators(self.plan.seed, epoch, index, self.drawn)

    def where(self, indices: Any) -> str:
        """Return what was being done, for the text of an error."""
        if self.position < 0:
            return "in collate_fn"
        index = indices[self.position] if self.plan.batched else indices
        return f"while reading sample {index!r} of the dataset"

    def asks(self, batches: Iterable[Any]) -> Iterator[Any]:
        """Begin an epoch, and return what :meth:`batch` is to be called with."""
        return iter(batches)

    def drop(self) -> None:
        """Let go of what an epoch holds: nothing, where samples are read by index."""

    def note(self, indices: Any) -> str | None:
        """Return what to add to an error that the caller sees as it was raised."""
        if not self.plan.batched or self.position < 0:
            return None
        return f"While reading sample {indices[self.position]!r} of the dataset."


def decodes_in_place(dataset: Any) -> bool:
    """Return whether samples are those of :class:`FastImageFolder`, unchanged by a subclass."""
    kind = type(dataset)
    ours = FastImageFolder
    return isinstance(dataset, ours) and kind.__getitem__ is ours.__getitem__


def write_image_of(
    dataset: Any, layout: SampleLayout, memory: Any, rows: int, epoch: int
) -> Callable[[Any, int], None] | None:
    """Return what decodes sample ``index`` straight into a row of the batch, if that is possible.

    Args:
        dataset: The dataset.
        layout: Of its samples.
        memory: Of the batch.
        rows: Samples in the batch.
        epoch: Part of the key of the sample's randomness.
    """
    if not decodes_in_place(dataset):
        return None
    if [field.shape for field in layout.fields] != [dataset.sample_shape, ()]:
        return None
    images, targets = (tensor.numpy() for tensor in layout.tensors(memory, rows))
    seed, length = dataset.seed, len(dataset)

    def write(index: Any, row: int) -> None:
        key = SampleKey(seed, epoch, int(index) % length)
        targets[row] = dataset.write_into(index, images[row], key=key)

    return write


def seed_global_generators(
    seed: int, epoch: int, index: object, names: Collection[str] = GENERATORS
) -> None:
    """Seed ``random``, ``numpy.random`` and torch's CPU generator, or some of them, for a sample.

    What one of them draws does not depend on which others are seeded.
    """
    text = f"{seed},{epoch},{index}".encode()
    digest = hashlib.blake2b(text, digest_size=20).digest()
    if "random" in names:
        random.seed(int.from_bytes(digest[:8], "little"))
    if "numpy" in names:
        np.random.seed(int.from_bytes(digest[8:12], "little"))
    if "torch" in names:
        # torch.manual_seed would also seed, and here queue up, all accelerators.
        torch.default_generator.manual_seed(int.from_bytes(digest[12:], "little", signed=True))
