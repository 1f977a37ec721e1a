"""What is measured of one stage of a run: its steps, its loaders' stamps, and what loggers get."""

from __future__ import annotations

import dataclasses
import itertools
import weakref
from collections import Counter, deque
from collections.abc import Iterable, Mapping, Sequence, Sized
from contextlib import suppress
from numbers import Number
from typing import TYPE_CHECKING, Any, Final, Literal, cast

from torch.utils.data import DataLoader, IterableDataset

from lightning_fastdata.batches.staged import batch_samples
from lightning_fastdata.device.backend import has_streams
from lightning_fastdata.fingerprint import Fingerprint, fingerprint
from lightning_fastdata.host import clock
from lightning_fastdata.host.clock import SpentMeter
from lightning_fastdata.insight.evidence import Evidence, evidence_of
from lightning_fastdata.insight.finding import LoaderFacts
from lightning_fastdata.insight.step_costs import PaddingMeter
from lightning_fastdata.insight.steps import EventClock, StageSummary, StepTimeline, mean_ms
from lightning_fastdata.insight.waits import CauseTotals, WaitCauses
from lightning_fastdata.loading.loader import FastDataLoader
from lightning_fastdata.loading.simulate import WORKERS, LoaderSetup, TrainingTimes
from lightning_fastdata.loading.source import setup_of
from lightning_fastdata.sources.files import files_of
from lightning_fastdata.stamps.batch_stamps import BatchStamps, ReadRates
from lightning_fastdata.tree import Path, at_path, leaves
from lightning_fastdata.types import Batch, Stage

if TYPE_CHECKING:
    import torch

_MOST_UNCUT: Final = 256
"""Most recorded waits that stay uncut until a result is asked for."""
_KEPT_STAMPS: Final = 512
"""Number of newest batches of each loader whose stamps are kept for predictions."""
_COMPARED_WITHIN_S: Final = 0.01


class StageMeter:
    """The timeline of one stage, its stamps, its log window and the wall time it has covered."""

    def __init__(self, stage: Stage, device: torch.device) -> None:
        self.stage: Stage = stage
        self.prefix = "data" if stage == "train" else f"data_{stage}"
        """Prefix of the names that loggers get."""
        self.parts: tuple[Path, ...] = ((),)
        """Paths in a batch to what each loader gave, of several that are read in the same steps."""
        self.stamps = StageStamps()
        self._device = device
        self.restart()

    def restart(self) -> None:
        """Forget what was measured so far."""
        events = EventClock(device=self._device) if has_streams(self._device) else None
        self.timeline = StepTimeline(device=events)
        self.stamps.restart()
        self.padding = PaddingMeter()
        self.changes = ReadChanges()
        self._duration_s = 0.0
        self._last: float | None = None
        self._cpu = SpentMeter()
        """CPU time of all steps but the first, in which ``torch.compile`` compiles."""
        self._stepped = False

    def wait_began(self) -> None:
        """Note that a batch is asked for: the stage is under way, if it was not before."""
        if self._last is None:
            self._last = clock.monotonic()
            self._cpu.began()
        self.timeline.wait_began()

    def size_of(self, batch: Batch) -> int:
        """Return the samples of a batch; 0: not known."""
        with suppress(Exception):  # a batch may be anything, and its own methods may raise
            parts = [part for path in self.parts if (part := at_path(batch, path)) is not None]
            return sum(map(_samples_in, parts or [batch]))
        return 0

    def step_ended(self, samples: int) -> None:
        """End the step, in which the model got so many samples."""
        self.timeline.compute_ended(samples)
        now = clock.monotonic()
        if self._last is not None:
            self._duration_s += now - self._last
        self._last = now
        if not self._stepped:
            self._stepped = True
            self._cpu.paused(counts=False)
            self._cpu.began()
        self.stamps.step_ended()

    def paused(self) -> None:
        """Do not count the time until the stage goes on: training and validation take turns."""
        self._last = None
        self._cpu.paused()
        self.timeline.paused()
        self.stamps.paused()

    def metrics(self) -> dict[str, float]:
        """Return the means over the steps since the last call, by their names for loggers."""
        found = {**window_means(self.timeline.history.window()), **self.stamps.metrics()}
        return {f"{self.prefix}{name}": value for name, value in found.items()}

    def summary(self) -> StageSummary | None:
        """Return where the steps went, or None before the first step ended."""
        history = self.timeline.history
        if history.steps == 0:
            return None
        summary = history.summarize(
            self.stage,
            duration_s=self._duration_s,
            device=self._device.type,
        )
        causes = self.stamps.summary(without=_long_waits(summary))
        return dataclasses.replace(summary, causes=_with_starts(causes, summary))

    def evidence(self, summary: StageSummary, loader: LoaderFacts, **known: Any) -> Evidence:
        """Return what is known of the stage, of its batches by the loader that is waited for most.

        ``known``: further fields of the evidence.
        """
        known["padding"] = self.padding.padding()
        slowest = None if summary.causes is None else self.stamps.slowest()
        if slowest is None:
            return evidence_of(summary, loader, **known)
        causes, share = self.stamps.of_one(slowest, without=_long_waits(summary))
        causes = _with_starts(causes, summary, share)
        stamps, setups = list(slowest.newest), slowest.setups()
        times = self._training_times(summary, stamps)
        cpus = float(loader.usable_cpus or 1)

        def setup_with(workers: int | None) -> LoaderSetup | None:
            setup = setups.get(workers)
            if setup is None:
                return None
            return dataclasses.replace(setup, cpus=cpus, step_cpus=times.step_cpus)

        return evidence_of(
            dataclasses.replace(summary, causes=causes),
            loader,
            stamps,
            setup_with(None) if stamps else None,
            setup_with=setup_with,
            step_queued=times.step_queued,
            loader_share=share,
            read_rates=slowest.rates,
            stream_samples=slowest.stream_samples(),
            **known,
        )

    def _training_times(
        self, summary: StageSummary, stamps: Sequence[BatchStamps]
    ) -> TrainingTimes:
        """Return how the training process spent its time; what it loaded is taken from stamps."""
        warm_ms = (mean_ms(summary.wait) or 0.0) * (summary.steps - summary.cold_steps)
        waited_ms = warm_ms + (summary.cold_wait_ms or 0.0) * summary.cold_steps
        waited_ms -= summary.first_wait_ms or 0.0
        steps = max(0, summary.steps - 1)
        own_ns = [
            task.ended_ns - task.began_ns if task.cpu_ns is None else task.cpu_ns
            for batch in stamps
            for task in batch.tasks
            if task.process < 0
        ]
        used = self._cpu.used()
        # What waits for batches lost to other programs is among what was waited.
        queued_ns = sum(batch.own.runqueue_ns or 0 for batch in stamps)
        in_waits_s = queued_ns / 1e9 / max(1, len(stamps)) * steps
        return TrainingTimes(
            cpu_s=used.cpu_s,
            wall_s=used.wall_s,
            runqueue_s=max(0.0, used.runqueue_s - in_waits_s),
            waited_s=waited_ms / 1e3,
            loading_cpu_s=sum(own_ns) / 1e9 / max(1, len(stamps)) * steps,
        )


def _samples_in(batch: Batch) -> int:
    """Return the samples of a batch of one loader; 0 where it is an object of unknown content."""
    found = batch_samples(batch)
    told = isinstance(batch, Sized | Number) or hasattr(batch, "ndim")
    told = told or hasattr(batch, "num_graphs") or next(leaves(batch), None) is not batch
    return found if told else 0


class ReadChanges:
    """What changes the dataset and the ``collate_fn`` of a loader: steps, or the end of an epoch.

    Compared is how they are at the start of each epoch, and at the end of its first step.
    """

    def __init__(self) -> None:
        self._by: set[Literal["steps", "epochs", "unknown"]] = set()
        self._epochs = 0
        self._read: tuple[Fingerprint | None, Fingerprint | None] = None, None
        """Fingerprints at the start of the last epoch, with globals and without; None: unknown."""

    def epoch_began(self, loader: object) -> None:
        """Look at what is read, when the first batch of an epoch is there."""
        if self._by == {"unknown"} and self._read[1] is None:
            return  # another look would take as long, and end as early
        now = _look(loader), _look(loader, with_globals=False)
        if self._epochs and None in (now[0], self._read[0]):
            self._by.add("unknown")
        elif self._epochs and now[0] != self._read[0]:
            self._by.add("epochs")
        self._read, self._epochs = now, self._epochs + 1

    def first_step_ended(self, loader: object) -> None:
        """Look again. Globals are left out: a loop has some that no dataset reads."""
        then = self._read[1]
        now = None if then is None else _look(loader, with_globals=False)
        if None not in (now, then) and now != then:
            self._by.add("steps")

    def heeded(self, facts: LoaderFacts) -> LoaderFacts:
        """Return facts of the loader by which nothing is advised that would read what was."""
        if self._by <= {"unknown"}:
            return dataclasses.replace(facts, compared=not self._by)
        closed = {**facts.closed, "cache": "what is read changes while it trains"}
        if "steps" in self._by and facts.num_workers == 0:
            closed["num_workers"] = "as steps change what is read, which workers would not see"
        kept = facts.persistent_workers or None
        return dataclasses.replace(facts, persistent_workers=kept, closed=closed)


def _look(loader: object, *, with_globals: bool = True) -> Fingerprint | None:
    read = [getattr(loader, name, None) for name in ("dataset", "collate_fn")]
    return fingerprint(*read, within_s=_COMPARED_WITHIN_S, with_globals=with_globals)


def _long_waits(summary: StageSummary) -> int:
    """Return how many of the long steps, which are left out of the means, are long waits."""
    return sum((t.stall_ms or 0.0) > (t.compute_ms or 0.0) for t in summary.long_steps)


def _with_starts(
    causes: WaitCauses | None, summary: StageSummary, share: float = 1.0
) -> WaitCauses | None:
    """Return causes with what starts of epochs took, where each step was the first of its epoch.

    Such steps wait for workers to start as well, before these do anything for the batch. ``share``:
    share of the waits that is for the batches of ``causes``, 0 to 1.
    """
    if causes is None or summary.steps > summary.cold_steps:
        return causes
    waited_ms = share * (summary.cold_wait_ms or 0.0) * summary.cold_steps
    started_ms = waited_ms / causes.batches - causes.wait.total_ms
    idle_ms = causes.wait.idle_ms + max(0.0, started_ms)
    return dataclasses.replace(causes, wait=dataclasses.replace(causes.wait, idle_ms=idle_ms))


_MEANS: Final = {
    "step": "/step_ms",
    "wait": "/time_wait_ms",
    "compute": "/time_compute_ms",
    "transfer": "_step/transfer_ms",
    "augment": "_step/augment_ms",
}
"""Phase of a `StageSummary` -> what follows the prefix in the name of its mean."""


def window_means(window: StageSummary) -> dict[str, float]:
    """Return the scalars of a window of steps, each by its name behind the prefix of the stage.

    What was not measured has no key.
    """
    found = {name: mean_ms(getattr(window, phase)) for phase, name in _MEANS.items()}
    found["/throughput_samples_per_s"] = window.samples_per_s
    found["/throughput_if_data_were_free_samples_per_s"] = window.samples_per_s_if_data_were_free
    if window.stall is not None and window.step is not None:
        found["/stall_percent"] = 100 * window.stall.share
        found["_band/stall_p95_ms"] = window.stall.p95_ms
    return {name: value for name, value in sorted(found.items()) if value is not None}


class _Watched:
    """The stamps of one loader, to which there is only a weak reference."""

    def __init__(self, number: int, loader: FastDataLoader) -> None:
        self.number = number
        self.loader = weakref.ref(loader)
        self._setups: dict[int | None, LoaderSetup | None] = {}
        # Bounded, as nobody may ask for the records.
        self.records: deque[BatchStamps] = deque(maxlen=2 * _MOST_UNCUT)
        self.restart()

    def restart(self) -> None:
        self.records.clear()
        self.newest: deque[BatchStamps] = deque(maxlen=_KEPT_STAMPS)
        self.rates: ReadRates | None = None
        """Samples a second that half of its workers read, and that all read; None: not tried."""
        self.made: Counter[int] = Counter()
        """Number of a process -> samples that it made."""
        self.totals = CauseTotals()
        """Waits for this loader alone; empty while it was the only one."""
        self.paused = False
        """Whether the stage has paused since the newest batch."""

    @property
    def waited_ns(self) -> int:
        return sum(batch.delivered_ns - batch.requested_ns for batch in self.newest)

    def keep(self, batch: BatchStamps) -> None:
        if self.paused:  # the time in between is no part of a step, as that between two epochs
            batch, self.paused = batch._replace(first=True), False
        self.newest.append(batch)
        self.rates = batch.rates or self.rates
        for task in batch.tasks:
            self.made[task.process] += task.samples

    def setups(self) -> Mapping[int | None, LoaderSetup | None]:
        """Return the setups with other numbers of workers, and under None that which it has.

        Of a loader that is gone they are those of the last call.
        """
        loader = self.loader()
        if loader is not None:
            self._setups = {n: loader.setup_with(n, cpus=1, step_cpus=1) for n in WORKERS}
            self._setups[None] = setup_of(loader, cpus=1, step_cpus=1)
        return self._setups

    def stream_samples(self) -> tuple[int, ...]:
        """Return how many samples of a stream each worker made.

        Empty where the loader reads no stream, has one worker at most, or delivers batches out of
        order: then faster workers make more.
        """
        loader = self.loader()
        if loader is None or loader.num_workers < 2 or not loader.in_order:
            return ()
        if not isinstance(loader.dataset, IterableDataset):
            return ()
        return tuple(self.made[number] for number in range(loader.num_workers))


class StageStamps:
    """The stamps of one stage's loaders, and what the waits for their batches were made of.

    Several loaders count as one in the summary, and what is asked of "the" loader is about the one
    that is waited for most. Where one of them takes no stamps, nothing is known of any.
    """

    def __init__(self) -> None:
        self._watched: list[_Watched] = []
        self._newest: list[_Watched] = []
        """Stamps of the loaders that were shown last."""
        self._numbers = itertools.count()
        self.restart()

    def watch(self, loaders: Iterable[object]) -> None:
        """Have FastDataLoaders among the loaders record stamps, unless other code takes them."""
        newest = [self._recording(loader) for loader in loaders]
        self.cut()
        self._watched = [each for each in self._watched if each.loader() is not None]
        self._newest = [each for each in newest if each is not None]

    def _recording(self, loader: object) -> _Watched | None:
        """Have a loader record its stamps, or note why it does not."""
        if not isinstance(loader, FastDataLoader):
            itself = "" if isinstance(loader, DataLoader) else " itself"  # others may wrap one
            why = f"a {type(loader).__name__} does not tell, FastDataLoader{itself} does"
            self._unwatched[why] = None
            return None
        for watched in self._watched:
            if loader.records is watched.records:
                watched.loader = weakref.ref(loader)  # Lightning may have made it from one of ours
                return watched
        if loader.records is not None:
            self._unwatched["other code takes the stamps of its loader"] = None
            return None
        known = next((each for each in self._watched if each.loader() is loader), None)
        if known is None:  # else recording was stopped in between
            known = _Watched(next(self._numbers), loader)
            self._watched.append(known)
        loader.record_stamps(known.records)
        return known

    def restart(self) -> None:
        """Forget what was recorded so far; loaders are to be shown anew."""
        self._totals = CauseTotals()
        self._unwatched: dict[str, None] = {}
        """Reasons why some of the loaders do not tell, as keys."""
        self._stamped = False
        for watched in self._watched:
            watched.restart()

    def paused(self) -> None:
        """Have predictions leave out the time until the next batch is asked for."""
        self.cut()
        for watched in self._watched:
            watched.paused = True

    def stop(self) -> None:
        """Take no more stamps; what was taken is kept."""
        self.cut()
        for watched in self._watched:
            loader = watched.loader()
            if loader is not None and loader.records is watched.records:
                watched.setups()  # nobody may hold the loader when they are asked for
                loader.record_stamps(None)

    def step_ended(self) -> None:
        """Cut the recorded waits into parts, if there are many."""
        if any(len(each.records) > _MOST_UNCUT for each in self._watched):
            self.cut()

    def metrics(self) -> dict[str, float]:
        """Return the mean parts of the wait for a batch since the last call."""
        self.cut()
        return {} if self.missing() is not None else self._totals.window()

    def summary(self, *, without: int = 0) -> WaitCauses | None:
        """Return why batches were late, without so many of the longest waits; None: not known."""
        if self.missing() is not None:
            return None
        return self._totals.summary(self._path_of, without=without)

    def of_one(self, watched: _Watched, *, without: int = 0) -> tuple[WaitCauses | None, float]:
        """Return why the batches of one loader were late, and its share of the waits, 0 to 1.

        Only loaders that were shown last count: if there is one, it goes on with all waits so far.
        """
        if len(self._newest) < 2:
            return self.summary(without=without), 1.0
        causes = {
            each.number: each.totals.summary(self._path_of, without=without)
            for each in self._newest
        }
        waited_ms = {n: c.batches * c.wait.total_ms for n, c in causes.items() if c is not None}
        all_ms = sum(waited_ms.values())
        share = waited_ms.get(watched.number, 0.0) / all_ms if all_ms else 1.0
        return causes.get(watched.number), share

    def slowest(self) -> _Watched | None:
        """Return what is known of the loader that was waited for most; None without stamps."""
        self.cut()
        stamped = [each for each in self._newest if each.newest]
        stamped = stamped or [each for each in self._watched if each.newest]
        return max(stamped, key=lambda each: each.waited_ns, default=None)

    def missing(self) -> str | None:
        """Return why it is not known what the waits were made of; None if it is."""
        self.cut()
        if self._stamped and not self._unwatched:
            return None
        loaders = [each.loader() for each in self._watched]
        executors = dict.fromkeys(
            f"executor {each.executor!r} does not tell" for each in loaders if each is not None
        )
        return ", ".join(self._unwatched or executors) or "nothing was noted"

    def cut(self) -> None:
        """Cut the waits of all batches that were recorded."""
        for watched in self._watched:
            self._stamped |= bool(watched.records)
            while watched.records:
                batch = watched.records.popleft()
                self._totals.add(batch, watched.number)
                if len(self._newest) > 1:
                    watched.totals.add(batch, watched.number)
                watched.keep(batch)

    def _path_of(self, number: int, index: object) -> str | None:
        owner = next((each.loader() for each in self._watched if each.number == number), None)
        with suppress(Exception):  # what the user's dataset lists may be anything
            files = None if owner is None else files_of(owner.dataset, [cast("int", index)])
            return None if files is None else files[0]
        return None


def not_known(late: Iterable[StageMeter]) -> tuple[str, ...]:
    """Return why it is not known why batches were late, for stages in which they were."""
    missing = {each.stage: why for each in late if (why := each.stamps.missing()) is not None}
    if not missing:
        return ()
    names, reasons = " and ".join(missing), "; ".join(dict.fromkeys(missing.values()))
    return (f"Why batches were late is not known for {names}: {reasons}.",)
