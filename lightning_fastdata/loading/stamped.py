"""Stamps from torch's own loader, through what its public arguments allow.

Each worker reads a dataset that notes when each sample was read, and collates into an envelope that
holds the batch and its stamps. The training process takes the batch out again.
"""

from __future__ import annotations

import itertools
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

from torch.utils.data import Dataset, IterableDataset, IterDataPipe, get_worker_info

from lightning_fastdata.batches.keyed import fetches_in_batches, own_dataset
from lightning_fastdata.host import clock
from lightning_fastdata.stamps.batch_stamps import BatchStamps, TaskStamps, TaskWatch, WaitWatch
from lightning_fastdata.stamps.lines import LineWatch
from lightning_fastdata.torch_internals import pinned, set_worker_info
from lightning_fastdata.types import Batch

T = TypeVar("T")


@dataclass(slots=True, eq=False)
class Envelope:
    """A batch on its way from a worker of torch, with the stamps of its one task."""

    batch: Batch
    task: TaskStamps
    pinned_ns: tuple[int, int] | None = None
    unpickled_ns: tuple[int, int] | None = None

    def __reduce__(self) -> tuple[object, ...]:
        # What is pickled between the two times is unpickled between them.
        return _arrived, (_TimeOfUnpickling(), self.batch, self.task, _TimeOfUnpickling())

    def pin_memory(self, device: str | None = None) -> Envelope:
        """Return the same with the batch in page-locked memory; torch's pin thread calls this."""
        began_ns = clock.monotonic_ns()
        batch = pinned(self.batch, device)
        return Envelope(batch, self.task, (began_ns, clock.monotonic_ns()), self.unpickled_ns)


class _TimeOfUnpickling:
    """Unpickles to the CPU time of the thread that does it, in nanoseconds."""

    def __reduce__(self) -> tuple[object, ...]:
        return clock.thread_time_ns, ()


def _arrived(began_ns: int, batch: Batch, task: TaskStamps, ended_ns: int) -> Envelope:
    # Tensors are fetched from the worker, which may be busy: that wait is no unpickling.
    now_ns = clock.monotonic_ns()
    return Envelope(batch, task, unpickled_ns=(now_ns - (ended_ns - began_ns), now_ns))


class ReadingWatch:
    """Takes the stamps of one batch after the other, in whichever thread reads them.

    A task begins with the first sample of a batch and ends when the batch is collated.
    """

    def __init__(self) -> None:
        self.task: TaskWatch | None = None
        """Task that is under way; None: there is none."""
        self._thread: int | None = None
        self._kept: TaskWatch | None = None

    def begin(self) -> TaskWatch:
        """Start a task."""
        # No two processes share a thread number: a forked worker makes its own watch.
        thread = threading.get_native_id()
        if self._kept is None or self._thread != thread:
            info = get_worker_info()
            number = -1 if info is None else info.id
            self._kept = TaskWatch(number, LineWatch(), alone=info is not None)
            self._thread = thread
        self._kept.begin()
        self.task = self._kept
        return self._kept

    def timed(self, read: Callable[[], T], index: object, samples: int = 1) -> T:
        """Return what ``read`` returns: ``samples`` samples, of which ``index`` is the first."""
        task = self.task or self.begin()
        began_ns = clock.monotonic_ns()
        try:
            found = read()
        except StopIteration:
            task.all_read()  # what was read so far may still become a batch
            raise
        except BaseException:
            self.end()
            raise
        task.read(index, began_ns, samples)
        return found

    def end(self) -> TaskStamps | None:
        """End the task that is under way, if there is one, and return its stamps."""
        task, self.task = self.task, None
        return None if task is None else task.end()

    def __reduce__(self) -> tuple[object, ...]:
        return ReadingWatch, ()


class StampedDataset(Dataset[object]):
    """A map-style dataset, each of whose samples is timed."""

    def __init__(self, dataset: Dataset[Any], watch: ReadingWatch) -> None:
        self.dataset: Any = dataset
        self.watch = watch

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: object) -> object:
        dataset, samples = self.dataset, len(index) if isinstance(index, list) else 1
        return self.watch.timed(lambda: dataset[index], index, samples)

    @property
    def __getitems__(self) -> Callable[[Sequence[object]], object] | None:
        """Function that reads several samples; torch's fetcher takes None for "one at a time"."""
        return self._fetch if fetches_in_batches(self.dataset) else None

    def _fetch(self, indices: Sequence[object]) -> object:
        dataset, first = self.dataset, indices[0] if len(indices) else None
        read = partial(dataset.__getitems__, indices)
        return self.watch.timed(read, first, len(indices))


class StampedStream(IterableDataset[object]):
    """An iterable dataset, each of whose samples is timed; an index is a place in the stream."""

    def __init__(self, dataset: IterableDataset[object], watch: ReadingWatch) -> None:
        self.dataset = dataset
        self.watch = watch

    def __len__(self) -> int:
        return len(self.dataset)  # type: ignore[arg-type]

    def __iter__(self) -> Iterator[object]:
        self.watch.end()  # ends a task of samples that were dropped
        return self._timed(iter(self.dataset))

    def _timed(self, samples: Iterator[object]) -> Iterator[object]:
        for number in itertools.count():
            try:
                sample = self.watch.timed(partial(next, samples), number)
            except StopIteration:
                return
            yield sample


class EnvelopeCollate:
    """Collates, and puts the batch and its stamps into an envelope."""

    def __init__(self, collate_fn: Callable[[object], Batch], watch: ReadingWatch) -> None:
        self.collate_fn = collate_fn
        self.watch = watch

    def __call__(self, samples: object) -> Envelope:
        """Return the batch of samples in its envelope."""
        task = self.watch.task or self.watch.begin()
        task.all_read()
        began_ns = clock.monotonic_ns()
        try:
            batch = self.collate_fn(samples)
            task.collated(began_ns)
        finally:
            stamps = self.watch.end() or task.end()
        return Envelope(batch, stamps)


def show_dataset() -> None:
    """Make ``get_worker_info().dataset`` the user's, where one that wraps it stands for it."""
    info = get_worker_info()
    if info is not None:
        stands: Any = info.dataset
        timed = isinstance(stands, StampedDataset | StampedStream)
        shown: Any = own_dataset(stands.dataset if timed else stands)
        if shown is not stands:
            set_worker_info(number=info.id, workers=info.num_workers, seed=info.seed, dataset=shown)


def stampable(dataset: object) -> bool:
    """Return whether a dataset may be wrapped; torch looks into its own iterable DataPipes."""
    return not isinstance(dataset, IterDataPipe)


class Around:
    """Wraps an iterator of batches, or of their indices, and has its length and attributes."""

    def __init__(self, batches: Any) -> None:
        self._batches = batches

    def __len__(self) -> int:
        return len(self._batches)

    def __iter__(self) -> Any:
        return self

    def __getattr__(self, name: str) -> Any:
        if name == "_batches":
            raise AttributeError(name)
        return getattr(self._batches, name)

    def __reduce__(self) -> tuple[object, ...]:
        # Lightning copies its trainer with the iterators in it; processes cannot be copied.
        return iter, ((),)


class WatchedSampler(Around):
    """A sampler or batch sampler of any kind that torch takes, whose calls are noted."""

    def __init__(self, sampler: Iterable[object], wait: WaitWatch) -> None:
        super().__init__(sampler)
        self._wait = wait

    def __iter__(self) -> Iterator[object]:
        drawn = iter(self._batches)
        while True:
            try:
                indices = self._wait.sampled(drawn)
            except StopIteration:
                return
            yield indices


def stamped(
    dataset: Dataset[object], collate_fn: Callable[[object], Batch]
) -> tuple[StampedDataset | StampedStream, EnvelopeCollate]:
    """Return what stands for a dataset and its collate function where stamps are taken."""
    watch = ReadingWatch()
    collate = EnvelopeCollate(collate_fn, watch)
    if isinstance(dataset, IterableDataset):
        return StampedStream(dataset, watch), collate
    return StampedDataset(dataset, watch), collate


@dataclass(slots=True, eq=False)
class Ledger:
    """Where the stamps of one loader go."""

    wait: WaitWatch = field(default_factory=WaitWatch)
    """Watch of what the training process does by itself."""
    count: int = 0
    """Number of batches delivered so far."""
    records: deque[BatchStamps] | None = None
    """Deque that takes the stamps; None: they are not taken."""


class OpenedEnvelopes(Around):
    """The batches of one epoch, each taken out of its envelope when it is delivered."""

    def __init__(self, envelopes: Iterator[Envelope], ledger: Ledger) -> None:
        super().__init__(envelopes)
        self._ledger = ledger
        self._first = True

    def __next__(self) -> Batch:
        ledger = self._ledger
        ledger.wait.requested(recorded=ledger.records is not None)
        envelope = next(self._batches)
        ledger.count += 1
        if ledger.records is not None:
            task = envelope.task
            own = ledger.wait.delivered()
            if envelope.unpickled_ns is not None:
                own = own._replace(unpacked_ns=(envelope.unpickled_ns,))
            ledger.records.append(
                BatchStamps(
                    number=ledger.count,
                    samples=task.samples,
                    requested_ns=ledger.wait.requested_ns,
                    delivered_ns=clock.monotonic_ns(),
                    tasks=(task,),
                    first=self._first,
                    pinned_ns=envelope.pinned_ns,
                    own=own,
                )
            )
        self._first = False
        return envelope.batch
