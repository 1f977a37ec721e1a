"""Cheap samples: the training process reads them itself, while side processes stand by.

Handing over a batch can cost more than reading it. But side processes have the dataset as it was
when the epoch began, and the training process has it as it is now. So before each few milliseconds
of reading in the training process, the dataset is compared with what it was then. As soon as it has
changed, or cannot be compared, the side processes, which were started when the epoch began, read
the rest.

Which way makes the training quicker depends on what it does with the batches. Both are timed in its
first epoch. Where side processes were quicker, they are timed once more and for longer, as the
machine may have done something else meanwhile. Where they were not, they are timed once more in the
next epoch, as they start slowly.
"""

from __future__ import annotations

import logging
import statistics
import threading
import warnings
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from itertools import chain, islice, pairwise
from typing import TYPE_CHECKING, Any, Final

from lightning_fastdata.batches.memory import copied
from lightning_fastdata.errors import FastDataWarning
from lightning_fastdata.executors.inline import InlineExecutor, NotTakenError
from lightning_fastdata.host import clock
from lightning_fastdata.tree import bytes_in

if TYPE_CHECKING:
    from lightning_fastdata.batches.staged import PinThread
    from lightning_fastdata.executors.fetch import FetchPlan
    from lightning_fastdata.executors.pool.scheduler import PoolExecutor
    from lightning_fastdata.fingerprint import Fingerprint
    from lightning_fastdata.stamps.batch_stamps import BatchStamps
    from lightning_fastdata.types import Batch

log = logging.getLogger(__name__)
_WITHIN_S: Final = 0.03
"""CPU seconds after which a comparison is given up; Python's garbage collection may be in it."""
_CHEAP_S: Final = 0.003
"""CPU seconds of a comparison above which side processes alone read, from the next epoch on."""
_TIMES: Final = 120
"""Ratio of the time spent reading between two comparisons to the time of a comparison."""
_LEAST_S, _MOST_S = 0.001, 0.05
"""Bounds, in seconds, of the time spent reading between two comparisons."""
_LAST: Final = 3
"""Number of newest comparisons of which the shortest counts, as others do more than compare."""
_LEAST_TIMES: Final = 20
"""Least ratio of reading to comparing, also where the batches then do not fit the CPU caches."""
_MOST_BATCHES: Final = 512
_MOST_BYTES: Final = 2**25
_CACHED_BYTES: Final = 2**21
"""Bytes of batches that about fit into the caches of a CPU until they are used."""
_CHANGED_MEANWHILE: Final = (
    "The dataset or its collate_fn has changed while a batch was read in the training process: by "
    "reading it (a counter, say, or samples that are kept), or by another thread. Workers read "
    "instead from now on, as it is when an epoch begins, with what that batch has changed. Set "
    'num_workers=1 and executor="workers" to have nothing read in the training process, or '
    "num_workers=0 to have all read there, as things are by then."
)
_GROUP: Final = 8
"""Number of consecutive batches of side processes that are timed together."""
_TIMED: Final = 5
"""Least number of times of each way of reading whose medians are compared."""
_TIMED_S: Final = 0.1
"""Seconds of steps with batches read here, before side processes are tried."""
_WORTH_IT: Final = 0.97
_SURE: Final = 4 * _TIMED
"""Number of timings in the second trial where side processes were quicker: a short trial may fall
into a moment when the machine is busy otherwise, and the choice is for good."""
_TRIALS: Final = 2
"""Number of trials with the same result that choose. New side processes touch their memory for the
first time: where they were no quicker, the second trial is in another epoch."""


@dataclass(slots=True)
class Ways:
    """What is known of a loader's two ways of reading; it outlives epochs."""

    aside: bool | None = None
    """Whether side processes read; None: it is not known yet which way is quicker."""
    here_s: deque[float] = field(default_factory=lambda: deque(maxlen=4 * _TIMED))
    """Seconds from batch to batch, the step included, where the training process reads."""
    spent_s: float = 0.0
    """Sum of the seconds from which the times in ``here_s`` were taken."""
    won: int = 0
    """Number of trials in which side processes were quicker."""
    lost: int = 0
    """Number of trials in which side processes were not quicker."""

    def note(self, seconds: float, batches: int) -> None:
        """Note how long the training took for batches that were read here."""
        self.here_s.append(seconds / batches)
        self.spent_s += seconds

    @property
    def tries(self) -> bool:
        """Whether it is time to try side processes."""
        enough = len(self.here_s) >= _TIMED and self.spent_s >= _TIMED_S
        return self.aside is None and enough

    def decide(self, aside_s: list[float]) -> None:
        """Count a trial by its seconds from batch to batch, and choose once enough trials agree."""
        if len(aside_s) >= _TIMED:
            here_ms, aside_ms = (1000 * statistics.median(x) for x in (self.here_s, aside_s))
            aside = aside_ms < _WORTH_IT * here_ms
            self.won, self.lost = self.won + aside, self.lost + (not aside)
            if _TRIALS in (self.won, self.lost):
                self.aside = aside
            log.info(
                "From batch to batch it takes %.3g ms where the training process reads, %.3g where "
                "workers do: %s%s.",
                *(here_ms, aside_ms, "these read" if aside else "it reads, and they stand by"),
                "" if self.aside is None else " from now on",
            )


class _Copying:
    """A ``collate_fn`` whose batches are copies, as side processes hand them over.

    What the training does to such a batch changes neither the dataset nor another batch.
    """

    def __init__(self, collate_fn: Callable[[Any], Batch]) -> None:
        self._collate_fn = collate_fn
        self.size_bytes = 0
        """Bytes of the last batch."""

    def __call__(self, samples: Any) -> Batch:
        batch, self.size_bytes = copied(self._collate_fn(samples))
        return batch


class StandbyExecutor:
    """Fetches in the calling thread, or in the side processes of a pool.

    Args:
        plan: Plan whose order is known when the epoch begins.
        pool: Side processes that fetch by the same plan.
        ways: What earlier executors of the loader have found.
        pin_thread: Thread that copies batches into page-locked memory, as for the pool; None: none.
    """

    def __init__(
        self,
        plan: FetchPlan,
        pool: PoolExecutor,
        ways: Ways,
        pin_thread: PinThread | None = None,
    ) -> None:
        self._plan = plan
        self._copying: _Copying | None = None
        here = replace(plan, at_start=False)
        if not (plan.default_collation or plan.gathered):  # these copy what the dataset holds
            self._copying = _Copying(plan.collate_fn)
            here = replace(here, collate_fn=self._copying)
        self._here = InlineExecutor(here)
        self._pool = pool
        self._ways = ways
        self._pin_thread = pin_thread
        self._source: Iterator[Any] = iter(())
        self._epoch = 0
        self._before: Fingerprint | None = None
        self._earlier = 0
        """Number of batches of the epoch that the pool began in trials that have ended."""
        self._trial: list[float] | None = None
        """Times at which the batches of a trial of the pool were asked for; None: no trial runs."""
        self._aside = self._tried = False
        self._batches = 1
        """Number of batches that are read at once, between two comparisons."""
        self._size_bytes: int | None = None
        """Bytes of one batch; None: nothing was read yet."""
        self._begins, self._read_s = True, 0.0
        self._compared_s: deque[float] = deque(maxlen=_LAST)
        """CPU seconds that the last comparisons of the epoch took."""
        self._idle = True
        """Whether side processes have read nothing since they started or last proved unchanged."""
        self._since_s: float | None = None

    def start_epoch(self, batches: Iterable[Any], epoch: int) -> None:
        """Begin an epoch; what is left of the one before is dropped."""
        self._source, self._epoch = iter(batches), epoch
        self._here.start_epoch(self._source, epoch)
        self._pool.start_epoch(iter(()), epoch)  # which starts the processes that are missing
        self._earlier, self._trial, self._since_s = 0, None, None
        self._aside = self._tried = False
        self._begins = True
        self._compared_s.clear()
        self._before = self._state()
        if self._before is None or self._before.counts or self._ways.aside:
            self._turn_aside(self._source)

    def __iter__(self) -> StandbyExecutor:
        return self

    def __next__(self) -> Batch:
        while True:
            if not self._aside and not self._here.left:
                self._look()
            if not self._aside:
                try:
                    return self._pinned(self._read_here())
                except NotTakenError as error:
                    self._turn_aside(chain(error.asked, self._source))
            if self._trial is not None:
                self._trial.append(clock.monotonic())
            try:
                return next(self._pool)
            except StopIteration:
                if self._trial is None:
                    raise
            self._end_trial()

    def _look(self) -> None:
        """Decide who reads the next batches, when all that were read here are handed out."""
        now_s = clock.monotonic()
        if self._since_s is not None:
            self._ways.note(now_s - self._since_s, self._batches)
        self._since_s = now_s
        # The program does nothing between the begin of an epoch and its first batch.
        begins, self._begins = self._begins, False
        began = all(child.began for child in self._pool.children.values())
        if self._ways.tries and began and not self._tried:
            self._tried = True
            self._try_aside(_TIMED)
            return
        if not begins and self._state() != self._before:
            self._turn_aside(self._source)
            return
        compared_s = min(self._compared_s)
        if not begins and compared_s > _CHEAP_S:
            self._ways.aside = True
        self._batches = max(1, int(min(self._fitting(compared_s), 2 * self._batches)))

    def _fitting(self, compared_s: float) -> float:
        """Return how many batches are best read at once if a comparison takes ``compared_s``."""
        if self._size_bytes is None or not self._read_s:
            return 1
        wanted_s = min(max(_LEAST_S, _TIMES * compared_s), _MOST_S)
        cached, most = (bound // max(1, self._size_bytes) for bound in (_CACHED_BYTES, _MOST_BYTES))
        least = _LEAST_TIMES * compared_s / self._read_s
        return min(wanted_s / self._read_s, max(cached, least), most, _MOST_BATCHES)

    def _state(self) -> Fingerprint | None:
        began_s = clock.thread_time()
        state = self._plan.state(_WITHIN_S)
        self._compared_s.append(clock.thread_time() - began_s)
        return state

    def _read_here(self) -> Batch:
        """Return the next batch.

        Raises:
            NotTakenError: Side processes are to read it.
        """
        if self._here.left:
            return self._here.next_of(1)
        began_s = clock.monotonic()
        batch = self._here.next_of(self._batches, self._holds)
        self._batches = 1 + self._here.left
        self._read_s = (clock.monotonic() - began_s) / self._batches
        if self._size_bytes is None:
            copying = self._copying
            self._size_bytes = bytes_in(batch) if copying is None else copying.size_bytes
        return batch

    def _pinned(self, batch: Batch) -> Batch:
        if self._pin_thread is None:
            return batch
        return self._pin_thread.pin(lambda: batch).result().batch

    def _holds(self) -> bool:
        """Return whether neither reading nor another thread has changed what is read."""
        begins, alone = self._size_bytes is None, threading.active_count() < 2
        if alone and not begins and _TIMES * min(self._compared_s) > _MOST_S:
            return True
        holds = self._state() == self._before
        if not holds and (begins or alone):
            self._ways.aside = True
            warnings.warn(_CHANGED_MEANWHILE, FastDataWarning, stacklevel=5)
        return holds

    def _turn_aside(self, batches: Iterator[Any]) -> None:
        self._aside, self._idle = True, False
        self._pool.start_epoch(batches, self._epoch)

    def _try_aside(self, groups: int) -> None:
        """Have side processes read ``groups`` groups of batches, and time them."""
        self._trial = []
        around = 2 * self._plan.look_ahead  # while the pool fills, and while it empties
        self._turn_aside(islice(self._source, around + _GROUP * (groups + 1)))

    def _end_trial(self) -> None:
        asked_s, ahead = self._trial or [], self._plan.look_ahead
        middle = asked_s[ahead : max(ahead, len(asked_s) - ahead)]
        marks = middle[::_GROUP]
        won = self._ways.won
        self._ways.decide([(b - a) / _GROUP for a, b in pairwise(marks)])
        self._trial, self._since_s = None, None
        self._earlier += self._pool.under_way()[0]
        self._aside = False
        if self._ways.aside:
            self._turn_aside(self._source)
        elif self._ways.won > won:
            self._try_aside(_SURE)

    def under_way(self) -> tuple[int, tuple[int, ...]]:
        """Return how many batches of the epoch were begun, and which were not handed over."""
        before = self._here.under_way()[0] + self._earlier
        if not self._aside:
            return before, ()
        begun, waiting = self._pool.under_way()
        return before + begun, tuple(before + place for place in waiting)

    def ready(self) -> bool | None:
        """Return whether the next batch, or the end, can be had without waiting.

        None: this process makes it when it is asked for.
        """
        over = self._trial is not None and not self._pool.under_way()[1]
        return self._pool.ready() if self._aside and not over else None

    def record(self, records: deque[BatchStamps] | None) -> None:
        """Append the stamps of each delivered batch to ``records`` from now on; None: stop."""
        self._here.record(records)
        self._pool.record(records)

    def resize(self, workers: int, look_ahead: int | None = None) -> None:
        """Have ``workers`` side processes, and ``look_ahead`` batches under way."""
        self._pool.resize(workers, look_ahead)

    def ask_states(self, within_s: float) -> None:
        """Ask each side process for the state of what it reads, as the epoch is over."""
        if not self._idle:
            self._pool.ask_states(within_s)

    def read_the_same(self, digest: bytes, within_s: float) -> bool:
        """Return whether what the side processes read is still as the training process has it."""
        self._idle = self._idle or self._pool.read_the_same(digest, within_s)
        return self._idle

    def close(self) -> None:
        """Stop all side processes; batches handed out stay valid."""
        self._here.close()
        self._pool.close()
