"""How one process fetches the batches of a stream, and how the caller itself fetches any."""

from __future__ import annotations

import math
import warnings
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import count, repeat
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeVar

from torch.utils.data import IterableDataset

from lightning_fastdata.batches.bad_samples import NO_SAMPLES, Fault
from lightning_fastdata.batches.keyed import KeyedIterableDataset
from lightning_fastdata.batches.libraries import tell_epoch
from lightning_fastdata.errors import DatasetError, FastDataWarning, add_note
from lightning_fastdata.executors.fetch import AT_START_BYTES, Fetcher
from lightning_fastdata.executors.stream_state import (
    LanePosition,
    StreamHistory,
    StreamNote,
    StreamState,
)
from lightning_fastdata.fingerprint import Fingerprint
from lightning_fastdata.host import clock
from lightning_fastdata.randomness.global_generators import DrawWatch
from lightning_fastdata.stamps.batch_stamps import BatchStamps, TaskStamps, TaskWatch, WaitWatch
from lightning_fastdata.stamps.lines import LineWatch
from lightning_fastdata.tree import bytes_in

if TYPE_CHECKING:
    from lightning_fastdata.executors.fetch import FetchPlan
    from lightning_fastdata.types import Batch

_Fetched = TypeVar("_Fetched")
_WATCHED: Final = 64
"""Number of first batches of a stream that are watched for draws from global generators."""


class StreamAsk(NamedTuple):
    """Request for a batch of a stream, in the place of indices, which a stream has not."""

    generation: int
    """Number of the pass over the stream; another number starts a new pass."""
    samples: int | None
    """Number of samples wanted for a batch; None: one sample, not in a list."""
    resume: LanePosition | None = None
    """Position at which a pass that begins with this batch resumes; None: at the beginning."""


END_OF_STREAM: Final = object()
"""What a :class:`StreamFetcher` returns in place of a batch when there is none left."""


class StreamFetcher:
    """Reads batches of a stream, whose samples come one after the other."""

    def __init__(self, plan: FetchPlan) -> None:
        self.plan = plan
        self.dataset: Any = plan.dataset
        self.position = 0
        """State of the fetcher: 0 reads a sample, -1 collates, -2 loads a state."""
        self.stamps: TaskWatch | None = None
        """Watch that notes the times of samples and collation; None: no stamps are taken."""
        self.faults: list[Fault] = []
        """Always empty, as an error ends a stream."""
        self._generation = -1
        self._samples: Iterator[Any] = iter(())
        self._ended = False
        self._read = 0
        self._skip = 0
        self._state = StreamState(plan.dataset)
        self._draws, self._watched, self._drew = DrawWatch(), 0, False

    @property
    def draws(self) -> bool:
        """Whether the stream was seen to draw from global generators."""
        return self._drew

    def attempt(self, fetch: Callable[[], _Fetched]) -> _Fetched:
        """Return what ``fetch`` returns; a stream is neither seeded nor read twice."""
        return fetch()

    def asks(
        self, batches: Iterable[int | None], resume: Sequence[LanePosition] | None = None
    ) -> Iterator[StreamAsk]:
        """Begin an epoch, and return what :meth:`batch` is to be called with."""
        self.drop()
        generation, lane = self._generation + 1, None if resume is None else resume[0]
        return (StreamAsk(generation, samples, lane) for samples in batches)

    def _start(self, ask: StreamAsk, epoch: int, mark: Callable[[int], None] | None) -> None:
        """Begin a pass over the stream; what is left of the one before is dropped."""
        begin = LanePosition() if ask.resume is None else ask.resume
        self._generation, self._ended = ask.generation, False
        self.drop()  # a file or lock that the old pass holds is free for the new one
        self._skip, self._read = 0, (begin.batches - begin.skip) * (ask.samples or 1)
        self.position, state = -2, begin.state
        for earlier in range(begin.passes, 0, -1):
            tell_epoch(self.dataset, epoch - earlier)
            samples, state = self._state.begin(state), None
            for number in count():
                if mark is not None:
                    mark(number)
                if next(samples, END_OF_STREAM) is END_OF_STREAM:
                    break  # what the stream does at the end of a pass is done here, too
        if begin.passes:
            tell_epoch(self.dataset, epoch)
        samples = self._state.begin(state)
        if isinstance(self.dataset, KeyedIterableDataset):
            samples = self.dataset.over(samples, first=self._read)
        self._samples, self._skip, self.position = samples, begin.skip, 0

    def batch(self, ask: StreamAsk, epoch: int, mark: Callable[[int], None] | None = None) -> Batch:
        """Return the next collated batch, or :data:`END_OF_STREAM`."""
        self._watched += 1
        watches = not self._drew and self._watched <= _WATCHED
        if watches:
            self._draws.begin()
        if ask.generation != self._generation:
            self._start(ask, epoch, mark)
        while self._skip:
            self._drop_one(ask, mark)
        samples = self._next_samples(ask, mark)
        ended = not samples or (self._ended and self.plan.drop_last)
        batch = END_OF_STREAM if ended else self._collated(ask, samples)
        self._drew |= watches and self._draws.drew()
        return batch

    def _collated(self, ask: StreamAsk, samples: list[Any]) -> Batch:
        self.position = -1
        if self.stamps is not None:
            self.stamps.all_read()
        began_ns = clock.monotonic_ns()
        batch = self.plan.collate_fn(samples[0] if ask.samples is None else samples)
        if self.stamps is not None:
            self.stamps.collated(began_ns)
        return batch

    def _next_samples(self, ask: StreamAsk, mark: Callable[[int], None] | None) -> list[Any]:
        self.position = 0
        samples: list[Any] = []
        wanted = 1 if ask.samples is None else ask.samples
        while len(samples) < wanted and not self._ended:
            if mark is not None:
                mark(self._read if self._skip else len(samples))
            began_ns = clock.monotonic_ns()
            sample = next(self._samples, END_OF_STREAM)
            self._ended = sample is END_OF_STREAM
            if not self._ended:
                samples.append(sample)
                if self.stamps is not None and not self._skip:
                    self.stamps.read(self._read, began_ns)
                self._read += 1
        return samples

    def _drop_one(self, ask: StreamAsk, mark: Callable[[int], None] | None) -> None:
        """Read and drop a batch that had been delivered after the state that was loaded."""
        if not self._next_samples(ask, mark):
            more, self._skip = self._skip, 0
            raise DatasetError(
                f"{type(self.dataset).__name__} has ended after {self._read} samples in a part "
                f"that had delivered {more} batches more when the training was saved. It is not "
                "the stream that it was: resume with the same data, or begin the epoch anew."
            )
        self._skip -= 1

    def told(self) -> StreamNote:
        """Return the state after the batch that was fetched last, and whether the stream drew."""
        # After its end, the state of a stream may be that of the next pass.
        state = None if self._ended else self._state.take()
        return StreamNote(state, self._state.refused, self._drew)

    def where(self, ask: StreamAsk) -> str:  # noqa: ARG002 - as of Fetcher
        """Return what was being done, for the text of an error."""
        if self.position < 0:
            return "in collate_fn" if self.position == -1 else "in iter() or load_state_dict"
        return f"while reading sample {self._read} of its stream, counted from 0"

    def drop(self) -> None:
        """Let go of what an epoch holds: the stream, and its files."""
        self._samples = iter(())

    def note(self, ask: StreamAsk) -> str:
        """Return a note to add to an error that the caller sees as it was raised."""
        return f"Raised {self.where(ask)}."


def fetcher_of(plan: FetchPlan, *, guest: bool = False) -> Fetcher | StreamFetcher:
    """Return the fetcher that reads by a plan in the calling thread; see :class:`Fetcher`."""
    if isinstance(plan.dataset, IterableDataset):
        return StreamFetcher(plan)
    return Fetcher(plan, guest=guest)


_MOST_BYTES: Final = 8 * AT_START_BYTES
_AT_ONCE: Final = 32
_COMPARED_S: Final = 0.01
_SHARE: Final = 0.01
"""Share of the time since the first pass that is spent on comparisons beyond those that are due."""
_GROWN: Final = (
    "The epoch that begins is larger than was seen when the loader was made: {size} MiB of it were "
    "read as things are now, and the rest is read as things are by then, which a step may change. "
    'Make the loader anew, or set num_workers=1 and executor="workers".'
)
_CHANGED_BY_READING: Final = (
    "Reading an epoch has changed the dataset or its collate_fn: a counter, say, or samples that "
    "are kept. It was read in the training process, so that the next epoch goes on with that; "
    "workers, which may be chosen elsewhere, do so in copies that end with the epoch. Set "
    'num_workers=0 for the former, or num_workers=1 and executor="workers" for the latter.'
)


class _Made(NamedTuple):
    """A batch that was read and is not handed out yet."""

    batch: Batch
    error: Exception | None
    """Error that is raised in place of the batch when that is asked for; None: there is none."""
    faults: tuple[Fault, ...]
    task: TaskStamps | None


class NotTakenError(Exception):
    """Batches were read in vain, and another executor has to read them."""

    def __init__(self, asked: list[Any]) -> None:
        super().__init__()
        self.asked = asked
        """Indices of these batches, as the sampler gave them."""


class InlineExecutor:
    """Fetches in the calling thread; by index with the same randomness as ``workers``.

    In place of side processes (``plan.at_start``) it reads the dataset as it is when an epoch
    begins: all batches are made before the first one is handed out. Beyond ``_MOST_BYTES`` of
    batches, the rest is read when it is asked for, after a warning.
    """

    def __init__(self, plan: FetchPlan) -> None:
        # The training's own draws must not depend on how its data is loaded.
        self._fetcher = fetcher_of(plan, guest=True)
        self._plan = plan
        self._batches: Iterator[Any] = iter(())
        self._ready: deque[_Made] = deque()
        self._epoch = 0
        self._count = self._begun = 0
        self._first = True
        self._wait = WaitWatch()
        self._records: deque[BatchStamps] | None = None
        is_stream = isinstance(self._fetcher, StreamFetcher)
        self.history = StreamHistory(plan.dataset) if is_stream else None
        """Positions of a stream after each of its last batches; None: the dataset is no stream."""
        self._has_ended = True
        self._passes = 0
        self._began_s = self._spent_s = 0.0
        self.reads_later = True
        """Whether batches still to come are read later, from the dataset as it is by then."""

    def start_epoch(
        self, batches: Iterable[Any], epoch: int, *, resume: Sequence[LanePosition] | None = None
    ) -> None:
        """Begin an epoch; what is left of the one before is dropped.

        ``resume``: position at which a stream resumes. Indices are given without those read before.
        """
        self._epoch, self._first, self._begun = epoch, True, 0
        self._ready.clear()
        self.reads_later = True
        fetcher = self._fetcher
        if not isinstance(fetcher, StreamFetcher) or self.history is None:
            self._batches = iter(batches)
            return
        self.history.start_epoch(1, resume, going_on=(0,), over=self._has_ended)
        self._batches = fetcher.asks(repeat(next(iter(batches))), resume)
        self._has_ended = False

    def under_way(self) -> tuple[int, tuple[int, ...]]:
        """Return how many batches were begun, and an empty tuple: each was delivered or empty."""
        return self._begun, ()

    def __iter__(self) -> InlineExecutor:
        return self

    def __next__(self) -> Batch:
        return self.next_of(1)

    def next_of(self, batches: int, holds: Callable[[], bool] = lambda: True) -> Batch:
        """Return the next batch; if none is left, read ``batches`` of them first.

        Raises:
            NotTakenError: ``holds`` returned False after reading. The batches are dropped.
        """
        while (batch := self._next(batches, holds)) is NO_SAMPLES:
            pass
        return batch

    @property
    def left(self) -> int:
        """Number of batches that were read and are not handed out yet."""
        return len(self._ready)

    def _next(self, batches: int, holds: Callable[[], bool]) -> Batch:
        self._wait.requested(recorded=self._records is not None)
        tasks: tuple[TaskStamps, ...] | None = ()
        if self._plan.at_start and not self._begun and self.history is None:
            tasks = self._read_at_start()
        elif not self._ready:
            asked = self._ask(batches)
            read = self._read(asked)
            if not holds():
                self._ready.clear()
                raise NotTakenError(asked)
            tasks = read if batches > 1 else None
        if not self._ready:
            raise StopIteration
        made = self._ready.popleft()
        self._begun += 1
        if made.faults:
            self._plan.faults.take(list(made.faults))
        if made.error is not None:
            raise made.error
        if made.batch is END_OF_STREAM:
            self._batches, self._has_ended = iter(()), True
            raise StopIteration
        if isinstance(self._fetcher, StreamFetcher) and self.history is not None:
            self.history.made(0, self._fetcher.told())
            self.history.handed_over(0)
        if made.batch is NO_SAMPLES:
            return made.batch
        if made.task is not None and self._records is not None:
            self._note(self._records, made.task, tasks)
        self._first = False
        return made.batch

    def _read_at_start(self) -> tuple[TaskStamps, ...]:
        """Make the batches of the epoch, as long as they take little memory.

        What is read is compared before and behind passes 1, 2, 4, 8 and so on, and others while
        that is cheap.
        """
        self._passes += 1
        now_s = clock.monotonic()
        self._began_s = self._began_s or now_s
        cheap = self._spent_s <= _SHARE * (now_s - self._began_s)
        looks = cheap or not self._passes & (self._passes - 1)
        before = self._state() if looks else None
        size_bytes, seen = 0, 0
        while size_bytes < _MOST_BYTES:
            self._read(self._ask(max(1, min(seen, _AT_ONCE))))
            if len(self._ready) == seen:
                self.reads_later = False
                break
            # The first of the batches is measured, as the last one of an epoch may be smaller:
            # looking into each would take as long as making it.
            first, seen = seen, len(self._ready)
            size_bytes += (seen - first) * bytes_in(self._ready[first].batch)
        else:
            warnings.warn(_GROWN.format(size=size_bytes >> 20), FastDataWarning, stacklevel=2)
        if before is not None and self._state() not in (None, before):
            warnings.warn(_CHANGED_BY_READING, FastDataWarning, stacklevel=2)
            self._spent_s = math.inf  # that was said
        return tuple(made.task for made in self._ready if made.task is not None)

    def _state(self) -> Fingerprint | None:
        began_s = clock.monotonic()
        state = self._plan.state(_COMPARED_S)
        self._spent_s += clock.monotonic() - began_s
        return state

    def _ask(self, batches: int) -> list[Any]:
        """Return the indices of the next batches, as the sampler gives them.

        This is done before reading, when generators that the sampler may draw from are watched.
        """
        asked = []
        for _ in range(batches):
            try:
                asked.append(self._wait.sampled(self._batches))
            except StopIteration:
                break
        return asked

    def _read(self, asked: list[Any]) -> tuple[TaskStamps, ...]:
        """Make batches, and return their stamps."""
        made = self._fetcher.attempt(lambda: list(map(self._make, asked))) if asked else []
        self._ready.extend(made)
        return tuple(each.task for each in made if each.task is not None)

    def _make(self, indices: Any) -> _Made:
        """Make a batch, or the error that is raised in its place."""
        fetcher, plan, left_out = self._fetcher, self._plan, list[Fault]()
        if plan.faults.quarantine:
            indices, left_out = plan.faults.left_out(
                plan.guard, indices, self._epoch, batched=plan.batched
            )
        stamps = fetcher.stamps
        if stamps is not None:
            stamps.begin()
        batch, failed = NO_SAMPLES, None
        try:
            batch = fetcher.batch(indices, self._epoch)
        except Exception as error:
            failed = error
        task = None if stamps is None else stamps.end()
        if failed is not None:
            failed = self._noted(failed, indices)
        return _Made(batch, failed, (*left_out, *fetcher.faults), task)

    def _noted(self, error: Exception, indices: Any) -> Exception:
        """Return the error to raise in place of one that the dataset has raised."""
        note = self._fetcher.note(indices)
        if note is not None:
            add_note(error, note)
        if not isinstance(error, StopIteration):
            return error
        # Raised from __next__, it would end the epoch early and without a word.
        reason = "\n".join([f"StopIteration: {error}", *vars(error).get("__notes__", ())])
        other = RuntimeError(f"Reading the dataset raised {reason}")
        other.__cause__ = error
        return other

    def _note(
        self,
        records: deque[BatchStamps],
        task: TaskStamps,
        since: tuple[TaskStamps, ...] | None,
    ) -> None:
        """Note what the batch that is handed out has waited for.

        ``since``: tasks done since the batch was asked for, where several batches are made at once;
        None: the task of this batch alone.
        """
        self._count += 1
        own = self._wait.delivered()
        tasks = (task,) if since is None else since
        times = self._wait.requested_ns, task.ended_ns if since is None else clock.monotonic_ns()
        given = self._count, task.samples, *times, tasks
        records.append(BatchStamps(*given, first=self._first, own=own))

    def record(self, records: deque[BatchStamps] | None) -> None:
        """Append the stamps of each batch to ``records`` from now on; None: stop."""
        self._records = records
        self._fetcher.stamps = None if records is None else TaskWatch(-1, LineWatch())

    def close(self) -> None:
        """Drop the epoch, and take no more stamps."""
        self._batches = iter(())
        self._ready.clear()
        self.record(None)
        if isinstance(self._fetcher, StreamFetcher):
            self._fetcher.drop()
