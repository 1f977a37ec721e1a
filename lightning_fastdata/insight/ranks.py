"""What the steps of each rank took, which rank holds up the others, and how rank 0 learns it.

Where ranks compute in step, all their steps are equally long: the rank whose data is late stalls,
and the others wait for it inside their backward pass, which counts as compute. So the rank that
holds up the others is the one that stalls most, and its compute is the shortest.

At the end of each epoch a rank writes one short record of all its steps so far into the key-value
store at which the ranks of ``torch.distributed`` met, over the one before, and rank 0 reads them.
That is no collective: it works with every backend, cannot get between the collectives of the
training, and a rank that is ahead, behind, or gone makes no other wait for long.
"""

from __future__ import annotations

import json
import socket
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Final, TypeVar

from lightning_fastdata.host import clock
from lightning_fastdata.insight.finding import STALL_LOW, Finding, Rule, make_finding
from lightning_fastdata.insight.waits import cause_lines
from lightning_fastdata.torch_internals import default_store

if TYPE_CHECKING:
    from torch.distributed import Store  # type: ignore[attr-defined]

    from lightning_fastdata.insight.evidence import Evidence
    from lightning_fastdata.insight.steps import StageSummary

T = TypeVar("T")

_PATIENCE_S: Final = 0.05
"""Seconds that rank 0 waits at the end of an epoch for records of other ranks."""
_PATIENCE_AT_END_S: Final = 2.0
"""Seconds that rank 0 waits once, at the end of the run, for records of other ranks."""
_POLL_S: Final = 0.005
_PHASES: Final = ("step", "stall", "wait", "compute")


@dataclass(frozen=True, slots=True, kw_only=True)
class RankTiming:
    """Mean times of the training steps of one rank. None: not measured."""

    rank: int
    """Global rank, counted from 0."""
    host: str
    """Name of the machine that the rank runs on."""
    steps: int
    """Number of steps in the means; first steps of epochs are left out if there are others."""
    epochs: int = 1
    """Number of epochs that have ended."""
    step_ms: float | None = None
    """Time of the whole step as the device saw it."""
    stall_ms: float | None = None
    """Part of ``step_ms`` in which the device was idle because of data."""
    wait_ms: float | None = None
    """Time the host waited for data; equals ``stall_ms`` where the host computes."""
    compute_ms: float | None = None
    """Time of forward, backward and optimizer, which includes waiting for slower ranks."""
    reason: str = ""
    """Largest part of the rank's waits, in words; empty: not known, or the rank hardly waits."""


def slowest(ranks: Iterable[RankTiming]) -> RankTiming | None:
    """Return the rank that stalls most, the one with less compute if equal; None: no two ranks."""
    timed = _with_stall(ranks)
    if len(timed) < 2:
        return None
    return max(timed, key=lambda each: (each.stall_ms or 0.0, -(each.compute_ms or 0.0)))


def mean_stall_ms(ranks: Iterable[RankTiming]) -> float | None:
    """Return the mean stall in ms of the ranks that measured theirs; None: no rank did."""
    timed = _with_stall(ranks)
    return statistics.fmean(each.stall_ms or 0.0 for each in timed) if timed else None


def rank_metrics(ranks: Sequence[RankTiming]) -> dict[str, float]:
    """Return the scalars for loggers; empty with fewer than two ranks."""
    worst = slowest(ranks)
    return {} if worst is None else {"data_ranks/stall_max_ms": worst.stall_ms or 0.0}


def ranks_line(ranks: Sequence[RankTiming]) -> str | None:
    """Return one sentence on the ranks; None if there are no two to compare."""
    worst, mean = slowest(ranks), mean_stall_ms(ranks)
    if worst is None or mean is None:
        return None
    count = len(_with_stall(ranks))
    return (
        f"{count} ranks stall {mean:.1f} ms a step on average, rank {worst.rank} on {worst.host} "
        f"{worst.stall_ms or 0.0:.1f}"
    )


def _with_stall(ranks: Iterable[RankTiming]) -> list[RankTiming]:
    return [each for each in ranks if each.stall_ms is not None]


def _late(e: Evidence) -> RankTiming | None:
    """Return the rank that stalls most, if 3 % of this rank's step longer than the mean."""
    worst, mean_ms = slowest(e.ranks), mean_stall_ms(e.ranks)
    late_ms = ((worst and worst.stall_ms) or 0.0) - (mean_ms or 0.0)
    return worst if (e.step_times.share(late_ms) or 0.0) >= STALL_LOW else None


def is_held_up(e: Evidence) -> bool:
    """Return whether the late rank stalls longer than this one, by 3 % of the step or more."""
    late, stall_ms = _late(e), e.step_times.stall_ms
    if late is None or late.stall_ms is None or stall_ms is None:
        return False
    return (e.step_times.share(late.stall_ms - stall_ms) or 0.0) >= STALL_LOW


def _late_rank(e: Evidence) -> Finding | None:
    late = _late(e)
    if late is None:
        return None
    *others, worst = sorted(each.stall_ms or 0.0 for each in e.ranks)
    mean = statistics.fmean((*others, worst))
    return make_finding(
        e.step_times.share(worst - mean),
        f"rank {late.rank} on {late.host} stalls {worst:.1f} ms a step, all of them {mean:.1f} on "
        "average, and every rank waits for the last one"
        + (f"; there, {late.reason}" if late.reason else ""),
        f"look at the data and the host of rank {late.rank}: its share of the files, its CPUs, its "
        "disk",
        e.step_times.without(worst - max(others)),
        "the loaders of the other ranks",
    )


RULES: Final = (Rule("FD316", "one rank holds up the others", _late_rank, about="rank"),)


class RankRecords:
    """What the ranks of one run have measured so far; complete on rank 0 only.

    Every rank makes one when its training starts.
    """

    def __init__(
        self, store: Store | None, *, rank: int, world_size: int, host: str | None = None
    ) -> None:
        self._store = store
        self._rank = rank
        self._ranks = range(world_size)
        self._host = socket.gethostname() if host is None else host
        self._epochs = 0
        self._known: dict[int, RankTiming] = {}
        self._broken = None if store is not None else "there is no store that the ranks share"
        # A later fit of the same ranks must not read what an earlier one left.
        self._run = self._tried(lambda store: store.add(f"runs/{rank}", 1))

    @property
    def so_far(self) -> tuple[RankTiming, ...]:
        """What is known of each rank, by rank; empty on all ranks but 0."""
        return tuple(self._known[rank] for rank in sorted(self._known))

    @property
    def complete(self) -> tuple[RankTiming, ...]:
        """``so_far``, or empty if a rank or its stall is missing: it may be the late one."""
        known = self.so_far
        return known if len(_with_stall(known)) == len(self._ranks) else ()

    def epoch_ended(self, summary: StageSummary | None) -> None:
        """Report what the steps so far took, and read on rank 0 what others have reported."""
        self._epochs += 1
        timing = RankTiming(rank=self._rank, host=self._host, steps=0, epochs=self._epochs)
        if summary is not None:
            timing = self._timing(summary)
        text = json.dumps(asdict(timing))
        self._tried(lambda store: store.set(f"{self._run}/{self._rank}", text))
        self._read(_PATIENCE_S)

    def _timing(self, summary: StageSummary) -> RankTiming:
        causes = summary.causes if (summary.stall_share or 0.0) >= STALL_LOW else None
        lines = [] if causes is None else cause_lines(causes)
        phases = ((name, getattr(summary, name)) for name in _PHASES)
        means = {f"{name}_ms": phase.mean_ms for name, phase in phases if phase is not None}
        return RankTiming(
            rank=self._rank,
            host=self._host,
            steps=summary.steps - summary.cold_steps or summary.steps,
            epochs=self._epochs,
            reason=next(iter(lines), ""),
            **means,
        )

    def _read(self, patience_s: float) -> None:
        """Read on rank 0 what ranks have reported; wait at most so long for those behind."""
        until = clock.monotonic() + patience_s
        while self._rank == 0 and self._broken is None:
            self._tried(self._read_from)
            epochs = {rank: timing.epochs for rank, timing in self._known.items()}
            behind = [rank for rank in self._ranks if epochs.get(rank, 0) < self._epochs]
            if not behind or clock.monotonic() >= until:
                return
            clock.sleep(_POLL_S)

    def ended(self) -> None:
        """Read on rank 0 what ranks have reported last, and wait longer for it."""
        self._read(_PATIENCE_AT_END_S)

    def _read_from(self, store: Store) -> None:
        for rank in self._ranks:
            key = f"{self._run}/{rank}"
            if store.check([key]):  # getting a key that is not there would wait for it
                self._known[rank] = RankTiming(**json.loads(store.get(key)))

    def notes(self) -> tuple[str, ...]:
        """Return sentences on ranks of which nothing is known."""
        if self._broken is not None:
            return (f"What the other ranks measured is not known: {self._broken}.",)
        missing = [rank for rank in self._ranks if rank not in self._known]
        if self._rank != 0 or not missing or not self._epochs:
            return ()
        return (f"Nothing was heard of rank {', '.join(map(str, missing))}.",)

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
    """Return a store of our own within the one at which the ranks met; None: there is none."""
    store = default_store()
    if store is None:
        return None
    from torch.distributed import PrefixStore  # type: ignore[attr-defined]

    return PrefixStore("lightning_fastdata", store)
