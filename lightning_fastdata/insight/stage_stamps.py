"""The stamps of a stage's loaders: who takes them, and what the waits were made of."""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, Final

from lightning_fastdata.insight.causes import CauseTotals
from lightning_fastdata.insight.evidence import busy_share
from lightning_fastdata.insight.sample_files import sample_path
from lightning_fastdata.loading.loader import FastDataLoader

if TYPE_CHECKING:
    from lightning_fastdata.insight.causes import WaitCauses
    from lightning_fastdata.loading.stamps import BatchStamps, ReadRates

_MOST_UNCUT: Final = 256
"""Waits are cut when somebody asks, but at the latest when so many have come together."""
_KEPT_STAMPS: Final = 512
"""The newest batches of each loader are kept for predictions."""


class StampQueue(deque["BatchStamps"]):
    """Stamps that a loader records for somebody who lets others take the loader over."""


class _Watched:
    """The stamps of one loader, which is not kept alive."""

    def __init__(self, number: int, loader: FastDataLoader, *, lendable: bool) -> None:
        self.number = number
        self.loader = weakref.ref(loader)
        # Bounded, as nobody cuts the stamps of batches that are read outside of the steps.
        kind = StampQueue if lendable else deque
        self.records: deque[BatchStamps] = kind(maxlen=2 * _MOST_UNCUT)
        self.newest: deque[BatchStamps] = deque(maxlen=_KEPT_STAMPS)
        self.rates: ReadRates | None = None

    @property
    def waited_ns(self) -> int:
        return sum(batch.delivered_ns - batch.requested_ns for batch in self.newest)


class StageStamps:
    """The stamps of one stage's loaders, and what the waits for their batches were made of.

    Args:
        prefix: Of the names for loggers: ``data`` for training, ``data_val`` for validation.
        lendable: Let a later one take over a loader, and take over those of earlier ones that do.
    """

    def __init__(self, prefix: str, *, lendable: bool = False) -> None:
        self.prefix = prefix
        self._lendable = lendable
        self._totals = CauseTotals(prefix)
        self._watched: list[_Watched] = []
        self._loaders = 0
        self._unwatched: dict[str, None] = {}
        self._stamped = False

    def watch(self, loaders: Iterable[Any]) -> None:
        """Have each FastDataLoader among some loaders record its stamps, if nobody else does."""
        unknown = [loader for loader in loaders if not self._recognized(loader)]
        if unknown:
            self.cut()
            self._watched = [each for each in self._watched if each.loader() is not None]
        for loader in unknown:
            free = isinstance(loader, FastDataLoader) and (
                loader.records is None
                or (self._lendable and isinstance(loader.records, StampQueue))
            )
            if free:
                watched = self._watched_of(loader)
                loader.record_stamps(watched.records)
            elif isinstance(loader, FastDataLoader):
                self._unwatched["somebody else takes the stamps of its loader"] = None
            else:
                kind = type(loader).__name__
                self._unwatched[f"a {kind} takes no stamps, as FastDataLoader does"] = None

    def _recognized(self, loader: Any) -> bool:
        """Note a loader that records for us: maybe one that Lightning made from one of ours."""
        for watched in self._watched:
            if getattr(loader, "records", None) is watched.records:
                watched.loader = weakref.ref(loader)
                return True
        return False

    def _watched_of(self, loader: FastDataLoader) -> _Watched:
        for watched in self._watched:
            if watched.loader() is loader:  # it was taken over in between
                return watched
        self._watched.append(_Watched(self._loaders, loader, lendable=self._lendable))
        self._loaders += 1
        return self._watched[-1]

    def restart(self) -> None:
        """Forget what was recorded so far."""
        self._totals = CauseTotals(self.prefix)
        self.drop_uncut()
        for watched in self._watched:
            watched.newest.clear()

    def drop_uncut(self) -> None:
        """Forget what was recorded since stamps were last cut: of batches of no step."""
        for watched in self._watched:
            watched.records.clear()

    def stop(self) -> None:
        """Take no more stamps; what was taken is kept."""
        for watched in self._watched:
            loader = watched.loader()
            if loader is not None and loader.records is watched.records:
                loader.record_stamps(None)

    def step_ended(self) -> None:
        """Cut what has come together, if it is much."""
        for watched in self._watched:
            if len(watched.records) > _MOST_UNCUT:
                self.cut()
                return

    def metrics(self) -> dict[str, float]:
        """Return the mean parts of the waits since the last call, by their names for loggers."""
        self.cut()
        return self._totals.window()

    def summary(self) -> WaitCauses | None:
        """Return why batches were late, or None without stamps."""
        self.cut()
        return self._totals.summary(self._path_of)

    def slowest_loader(self) -> tuple[FastDataLoader | None, list[BatchStamps]]:
        """Return the loader that was waited for most of late, and its newest stamps.

        The loader is None if it is gone, and there are no stamps if none were taken.
        """
        self.cut()
        slowest = max(self._watched, key=lambda each: each.waited_ns, default=None)
        return (None, []) if slowest is None else (slowest.loader(), list(slowest.newest))

    def read_rates(self) -> ReadRates | None:
        """Return how much of that loader's data few workers and all read; None if not tried."""
        self.cut()
        slowest = max(self._watched, key=lambda each: each.waited_ns, default=None)
        return None if slowest is None else slowest.rates

    def busy_share(self) -> float | None:
        """Return the part of the time in which that loader's workers had a task; None if unknown.

        Over its newest batches, 0 to 1, the mean over workers.
        """
        loader, stamps = self.slowest_loader()
        return None if loader is None else busy_share(stamps, loader.num_workers)

    def missing(self) -> str | None:
        """Return why nothing is known about the waits; None if something is."""
        self.cut()
        if self._stamped:
            return None
        executors = {
            f"executor {loader.executor!r} takes no stamps": None
            for watched in self._watched
            if (loader := watched.loader()) is not None
        }
        return ", ".join(self._unwatched or executors) or "no stamps were taken"

    def cut(self) -> None:
        """Cut the waits of all batches that were recorded."""
        for watched in self._watched:
            self._stamped |= bool(watched.records)
            while watched.records:
                batch = watched.records.popleft()
                self._totals.add(batch, watched.number)
                watched.newest.append(batch)
                watched.rates = batch.rates or watched.rates

    def _path_of(self, number: int, index: Any) -> str | None:
        for watched in self._watched:
            loader = watched.loader()
            if watched.number == number and loader is not None:
                return sample_path(loader.dataset, index)
        return None
