"""What the steps of each rank took, which rank holds up the others, and how rank 0 learns it.

Where ranks compute in step, all their steps are equally long: the rank whose data is late stalls,
and the others wait for it inside their backward pass, which counts as compute. So the rank that
holds up the others is the one that stalls most, and its compute is the shortest.

Once an epoch each rank writes one short record into the key-value store at which the ranks of
``torch.distributed`` met, and rank 0 reads them. That is no collective: it works with every
backend, cannot get between the collectives of the training, and a rank that is ahead, behind, or
gone makes no other wait for longer than some seconds, once.
"""

from __future__ import annotations

import json
import socket
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Final, TypeVar

from lightning_fastdata.host import clock
from lightning_fastdata.insight.measure.metrics import measured, warm_steps
from lightning_fastdata.insight.model.finding import STALL_LOW
from lightning_fastdata.insight.waits.causes import cause_lines
from lightning_fastdata.torch_internals import default_store

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence, Set

    from torch.distributed import Store  # type: ignore[attr-defined]

    from lightning_fastdata.insight.measure.metrics import Columns, StageSummary, StepHistory

T = TypeVar("T")

_MEANS: Final = ("step_ms", "stall_ms", "wait_ms", "compute_ms")
_PATIENCE_S: Final = 2.0
_LATE_PATIENCE_S: Final = 0.05
"""For ranks that have been waited for in vain the last time."""
_POLL_S: Final = 0.005


@dataclass(frozen=True, slots=True, kw_only=True)
class RankTiming:
    """What the training steps of one rank took, the means over its steps. None: not measured."""

    rank: int
    """Global rank, counted from 0."""
    host: str
    """Name of the machine it runs on."""
    steps: int
    """Steps the means are over; first steps of epochs are left out if there are others."""
    step_ms: float | None = None
    """The whole step as the device saw it."""
    stall_ms: float | None = None
    """Of that, the time in which the device had nothing to do because of data."""
    wait_ms: float | None = None
    """Time the host waited for data; equals ``stall_ms`` where the host computes."""
    compute_ms: float | None = None
    """Forward, backward and optimizer, and in there the waiting for slower ranks."""
    reason: str = ""
    """What the stamps of its loader say of most of its waits; empty: nothing, or it hardly waits.
    """


def rank_timing(steps: Columns, *, rank: int, host: str, reason: str = "") -> RankTiming:
    """Return the means of a rank's warm steps, with the reason why its batches are late."""
    counted = warm_steps(steps)
    known = {name: measured(counted[name]) for name in _MEANS}
    means = {name: float(values.mean()) for name, values in known.items() if values.size}
    return RankTiming(rank=rank, host=host, steps=len(counted["cold"]), reason=reason, **means)


def together(timings: Sequence[RankTiming]) -> RankTiming:
    """Return several timings of one rank, oldest first, as one: means over all of their steps."""
    newest, means = timings[-1], {}
    for name in _MEANS:
        known = [(v, t.steps) for t in timings if (v := getattr(t, name)) is not None and t.steps]
        total = sum(steps for _, steps in known)
        means[name] = sum(value * steps for value, steps in known) / total if total else None
    steps = sum(timing.steps for timing in timings)
    return RankTiming(
        rank=newest.rank, host=newest.host, steps=steps, reason=newest.reason, **means
    )


def slowest(ranks: Iterable[RankTiming]) -> RankTiming | None:
    """Return the rank that stalls most, then computes least; None with fewer than two."""
    timed = _with_stall(ranks)
    if len(timed) < 2:
        return None
    return max(timed, key=lambda each: (each.stall_ms or 0.0, -(each.compute_ms or 0.0)))


def mean_stall_ms(ranks: Iterable[RankTiming]) -> float | None:
    """Return the mean over the ranks whose stall was measured; None if it was on none."""
    timed = _with_stall(ranks)
    return sum(each.stall_ms or 0.0 for each in timed) / len(timed) if timed else None


def rank_metrics(ranks: Sequence[RankTiming]) -> dict[str, float]:
    """Return the scalars of two ranks or more."""
    if len(ranks) < 2:
        return {}
    found: dict[str, float | None] = {"stall_mean_ms": mean_stall_ms(ranks)}
    for name, figures in {"stall": (max, min), "compute": (max, min), "step": (max,)}.items():
        values = [v for each in ranks if (v := getattr(each, f"{name}_ms")) is not None]
        for figure in figures:
            found[f"{name}_{figure.__name__}_ms"] = figure(values, default=None)
    worst = slowest(ranks)
    found["slowest_rank"] = None if worst is None else float(worst.rank)
    return {f"data_ranks/{name}": v for name, v in sorted(found.items()) if v is not None}


def ranks_line(ranks: Sequence[RankTiming]) -> str | None:
    """Return one sentence on the ranks; None if there are no two to compare."""
    worst, mean = slowest(ranks), mean_stall_ms(ranks)
    if worst is None or mean is None:
        return None
    stall = worst.stall_ms or 0.0
    if worst.step_ms and (stall - mean) / worst.step_ms >= STALL_LOW:
        return (
            f"rank {worst.rank} on {worst.host} stalls {stall:.1f} ms a step, the mean is "
            f"{mean:.1f}"
        )
    timed = _with_stall(ranks)
    hosts = len({each.host for each in timed})
    where = f"{len(timed)} ranks on {hosts} host{'s' if hosts > 1 else ''}"
    return f"{where} stall alike, {mean:.1f} ms a step, at most {stall:.1f}"


def all_known(ranks: Sequence[RankTiming]) -> tuple[RankTiming, ...]:
    """Return the ranks; none if one, or its stall, is missing: it may be the one looked for."""
    complete = [each.rank for each in _with_stall(ranks)] == [*range(len(ranks))]
    return tuple(ranks) if complete else ()


def _with_stall(ranks: Iterable[RankTiming]) -> list[RankTiming]:
    return [each for each in ranks if each.stall_ms is not None]


class RankRecords:
    """What the ranks of one run have measured so far; complete on rank 0 only.

    Every rank makes one when its training starts. At the end of an epoch rank 0 waits
    ``patience_s`` for ranks that have not reported; once it has waited in vain for a rank, it
    hardly waits for that one any more until it has caught up.
    """

    def __init__(
        self,
        store: Store | None,
        *,
        rank: int,
        world_size: int,
        host: str | None = None,
        patience_s: float = _PATIENCE_S,
    ) -> None:
        self._store = store
        self._rank = rank
        self._host = socket.gethostname() if host is None else host
        self._patience_s = patience_s
        self._steps = self._epochs = 0
        # Records that are next to be read of each rank, and what is known of it.
        self._next = dict.fromkeys(range(world_size), 0)
        self._late: set[int] = set()
        self._so_far: dict[int, RankTiming] = {}
        self._broken = None if store is not None else "there is no store that the ranks share"
        # A later fit of the same ranks must not read what an earlier one left.
        self._run = self._tried(lambda store: store.add(f"runs/{rank}", 1))

    @property
    def so_far(self) -> tuple[RankTiming, ...]:
        """The means over all epochs that were reported, by rank; on other ranks than 0 empty."""
        return tuple(self._so_far[rank] for rank in sorted(self._so_far))

    def epoch_ended(
        self, history: StepHistory, summary: StageSummary | None = None
    ) -> tuple[RankTiming, ...]:
        """Report what the steps since the last call took; return what is new on rank 0."""
        new, self._steps = history.steps - self._steps, history.steps
        reason = ""
        if summary is not None and (summary.stall_share or 0.0) >= STALL_LOW and summary.causes:
            reason = next(iter(cause_lines(summary.causes)), "")
        timing = rank_timing(history.newest(new), rank=self._rank, host=self._host, reason=reason)
        key = self._key(self._rank, self._epochs)
        self._tried(lambda store: store.set(key, json.dumps(asdict(timing))))
        self._epochs += 1
        return self.read(self._patience_s)

    def read(self, patience_s: float = 0.0) -> tuple[RankTiming, ...]:
        """Return on rank 0 what ranks have reported since the last call, waiting for late ones."""
        if self._rank != 0:
            return ()
        newest: dict[int, RankTiming] = {}
        self._tried(lambda store: self._read_into(newest, store, patience_s))
        return tuple(newest[rank] for rank in sorted(newest))

    def notes(self) -> tuple[str, ...]:
        """Return what has to be said of ranks that are not known."""
        if self._broken is not None:
            return (f"What the other ranks measured is not known: {self._broken}.",)
        missing = sorted(self._next.keys() - self._so_far.keys())
        if self._rank != 0 or not missing or not self._epochs:
            return ()
        return (f"Nothing was heard of rank {', '.join(map(str, missing))}.",)

    def _read_into(self, newest: dict[int, RankTiming], store: Store, patience_s: float) -> None:
        self._await(self._next.keys() - self._late, store, patience_s)
        self._await(self._late, store, min(patience_s, _LATE_PATIENCE_S))
        for rank in self._next:
            reported = []
            while store.check([key := self._key(rank, self._next[rank])]):
                reported.append(RankTiming(**json.loads(store.get(key))))
                store.delete_key(key)
                self._next[rank] += 1
            if reported:
                newest[rank] = together(reported)
                known = self._so_far.get(rank)
                self._so_far[rank] = together(reported if known is None else [known, *reported])
        self._late = {rank for rank, number in self._next.items() if number < self._epochs}

    def _await(self, ranks: Set[int], store: Store, patience_s: float) -> None:
        newest = self._epochs - 1
        awaited = [self._key(rank, newest) for rank in ranks if self._next[rank] <= newest]
        until = clock.monotonic() + patience_s
        while awaited and not store.check(awaited) and clock.monotonic() < until:
            clock.sleep(_POLL_S)

    def _key(self, rank: int, number: int) -> str:
        return f"{self._run}/{rank}/{number}"

    def _tried(self, act: Callable[[Store], T]) -> T | None:
        """Use the store while it answers; the training does not fail if it does not."""
        if self._broken is not None or self._store is None:
            return None
        try:
            return act(self._store)
        except RuntimeError as error:  # every torch.distributed error is one
            self._broken = f"{type(error).__name__}: {error}".splitlines()[0]
            return None


def shared_store() -> Store | None:
    """Return a store of our own within the one at which this process met its ranks, or None."""
    store = default_store()
    if store is None:
        return None
    from torch.distributed import PrefixStore  # type: ignore[attr-defined]

    return PrefixStore("lightning_fastdata", store)
