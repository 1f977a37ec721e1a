"""The ranks of a run tell rank 0 once an epoch what their steps took.

Each rank writes one short record into the key-value store at which the ranks of
``torch.distributed`` met, and rank 0 reads them. That is no collective: nothing meets on the
device, it works with every backend, it cannot get between the collectives of the training, and a
rank that is ahead, behind, or gone makes nobody wait for longer than some seconds, once.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Set
from typing import TYPE_CHECKING, Any, Final

from lightning_fastdata.insight.model.finding import STALL_LOW
from lightning_fastdata.insight.waits.causes import cause_lines
from lightning_fastdata.insight.waits.ranks import RankTiming, rank_timing, together
from lightning_fastdata.torch_internals import default_store

if TYPE_CHECKING:
    from lightning.pytorch import Trainer

    from lightning_fastdata.insight.measure.metrics import StageSummary, StepHistory

_PATIENCE_S: Final = 2.0
_LATE_PATIENCE_S: Final = 0.05
"""For ranks that have been waited for in vain the last time."""
_POLL_S: Final = 0.005


class RankRecords:
    """What the ranks of one run have measured so far; complete on rank 0 only.

    Every rank makes one when its training starts.

    Args:
        store: A ``torch.distributed.Store`` that all ranks share; None: there is none.
        rank: Of this process, global.
        world_size: Number of ranks.
        host: Name of this machine.
        patience_s: How long rank 0 waits at the end of an epoch for ranks that have not told yet.
            Once it has waited in vain for a rank, it hardly waits for that one any more until it
            has caught up.
    """

    def __init__(
        self,
        store: Any,
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
        self._steps = 0
        self._epochs = 0
        # Records that are next to be read of each rank, and what is known of it.
        self._next = dict.fromkeys(range(world_size), 0)
        self._late: set[int] = set()
        self._so_far: dict[int, RankTiming] = {}
        self._broken = None if store is not None else "there is no store that the ranks share"
        # A later fit of the same ranks must not read what an earlier one left.
        self._run = self._tried(lambda: store.add(f"runs/{rank}", 1))

    @property
    def so_far(self) -> tuple[RankTiming, ...]:
        """The means over all epochs that were told, by rank; on other ranks than 0 empty."""
        return tuple(self._so_far[rank] for rank in sorted(self._so_far))

    def epoch_ended(
        self, history: StepHistory, summary: StageSummary | None = None
    ) -> tuple[RankTiming, ...]:
        """Tell what the steps since the last call took, and return what all ranks have told.

        Args:
            history: Of this rank's training steps. Of more steps than it keeps, only the kept ones
                count.
            summary: Of all of its training steps; tells why its batches are late.

        Returns:
            On rank 0 the newest means of every rank that has told something since the last call;
            nothing on other ranks.
        """
        new, self._steps = history.steps - self._steps, history.steps
        timing = rank_timing(
            history.newest(new), rank=self._rank, host=self._host, reason=_reason(summary)
        )
        key = self._key(self._rank, self._epochs)
        self._tried(lambda: self._store.set(key, timing.as_json()))
        self._epochs += 1
        return self.read(self._patience_s)

    def read(self, patience_s: float = 0.0) -> tuple[RankTiming, ...]:
        """Return what ranks have told since the last call, on rank 0; nothing on other ranks.

        Args:
            patience_s: How long to wait for ranks that have ended fewer epochs than this one.
        """
        if self._rank != 0:
            return ()
        newest: dict[int, RankTiming] = {}
        self._tried(lambda: self._read_into(newest, patience_s))
        return tuple(newest[rank] for rank in sorted(newest))

    def notes(self) -> tuple[str, ...]:
        """Return what has to be said of ranks that are not known."""
        if self._broken is not None:
            return (f"What the other ranks measured is not known: {self._broken}.",)
        missing = sorted(self._next.keys() - self._so_far.keys())
        if self._rank != 0 or not missing or not self._epochs:
            return ()
        return (f"Nothing was heard of rank {', '.join(map(str, missing))}.",)

    def _read_into(self, newest: dict[int, RankTiming], patience_s: float) -> None:
        self._await(self._next.keys() - self._late, patience_s)
        self._await(self._late, min(patience_s, _LATE_PATIENCE_S))
        for rank in self._next:
            told = []
            while self._has(rank):
                key = self._key(rank, self._next[rank])
                told.append(RankTiming.from_json(self._store.get(key)))
                self._store.delete_key(key)
                self._next[rank] += 1
            if told:
                newest[rank] = together(told)
                known = self._so_far.get(rank)
                self._so_far[rank] = together(told if known is None else [known, *told])
            if self._next[rank] < self._epochs:
                self._late.add(rank)
            else:
                self._late.discard(rank)

    def _await(self, ranks: Set[int], patience_s: float) -> None:
        newest = self._epochs - 1
        awaited = [self._key(rank, newest) for rank in ranks if self._next[rank] <= newest]
        until = time.monotonic() + patience_s
        while awaited and not self._store.check(awaited) and time.monotonic() < until:
            time.sleep(_POLL_S)

    def _has(self, rank: int) -> bool:
        return bool(self._store.check([self._key(rank, self._next[rank])]))

    def _key(self, rank: int, number: int) -> str:
        return f"{self._run}/{rank}/{number}"

    def _tried(self, act: Callable[[], Any]) -> Any:
        """Use the store while it answers; the training does not fail if it does not."""
        if self._broken is not None:
            return None
        try:
            return act()
        except RuntimeError as error:  # every torch.distributed error is one
            self._broken = f"{type(error).__name__}: {error}".splitlines()[0]
            return None


def _reason(summary: StageSummary | None) -> str:
    if summary is None or summary.causes is None or (summary.stall_share or 0.0) < STALL_LOW:
        return ""
    lines = cause_lines(summary.causes)
    return lines[0] if lines else ""


def meet(trainer: Trainer) -> RankRecords | None:
    """Return the records of a trainer's ranks; None with one rank.

    Args:
        trainer: When its strategy is set up.
    """
    if trainer.world_size < 2:
        return None
    return RankRecords(shared_store(), rank=trainer.global_rank, world_size=trainer.world_size)


def shared_store() -> Any:
    """Return a store of our own within the one at which this process met its ranks, or None."""
    store = default_store()
    if store is None:
        return None
    from torch.distributed import PrefixStore  # type: ignore[attr-defined]

    return PrefixStore("lightning_fastdata", store)
