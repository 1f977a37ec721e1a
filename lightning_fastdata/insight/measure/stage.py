"""What is measured of one stage of a run: its steps, its loaders' stamps, and what loggers get."""

from __future__ import annotations

import dataclasses
import itertools
import os
import weakref
from bisect import bisect_right
from collections import Counter, deque
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import torch
from torch.utils.data import ConcatDataset, IterableDataset, Subset

from lightning_fastdata.batches.layout import decodes_in_place
from lightning_fastdata.device.backend import has_streams
from lightning_fastdata.device.prefetch import Prefetched
from lightning_fastdata.host import clock
from lightning_fastdata.host.cpu import read_cpu_limit
from lightning_fastdata.host.usage import SpentMeter
from lightning_fastdata.insight.measure.metrics import (
    EventClock,
    StepTimeline,
    measured,
    p50_and_p95,
    warm_steps,
)
from lightning_fastdata.insight.model.evidence import (
    LoaderFacts,
    busy_share,
    closed_options,
    model_computes,
    read_loader,
    stage_evidence,
    stage_times,
)
from lightning_fastdata.insight.verdicts.catalogue import judge
from lightning_fastdata.insight.waits.causes import CauseTotals
from lightning_fastdata.loading.loader import FastDataLoader
from lightning_fastdata.loading.source import setup_of
from lightning_fastdata.tree import held

if TYPE_CHECKING:
    from lightning_fastdata.insight.measure.metrics import Columns, StageSummary
    from lightning_fastdata.insight.model.evidence import Evidence
    from lightning_fastdata.insight.verdicts.catalogue import Verdict
    from lightning_fastdata.insight.waits.causes import WaitCauses
    from lightning_fastdata.stamps.batch_stamps import BatchStamps, ReadRates
    from lightning_fastdata.types import Stage

_MOST_UNCUT: Final = 256
"""Waits are cut when a result is asked for, at the latest when there are so many."""
_KEPT_STAMPS: Final = 512
"""The newest batches of each loader are kept for predictions."""


class StageMeter:
    """The timeline of one stage, its stamps, its log window and the wall time it has covered.

    ``updates`` counts optimizer steps; None: they are not counted.
    """

    def __init__(
        self,
        stage: Stage,
        device: torch.device,
        stamps: StageStamps,
        *,
        updates: int | None = None,
    ) -> None:
        self.stage: Stage = stage
        self.stamps = stamps
        self.updates = updates
        events = EventClock(device=device) if has_streams(device) else None
        self.timeline = StepTimeline(device=events)
        self._device = device
        self._logged_steps = 0
        self._duration_s = 0.0
        self._last: float | None = None
        self._cpu = SpentMeter()

    def epoch_opens(self) -> None:
        """Note that the next step is the first of an epoch, and counted apart."""
        self.timeline.epoch_began()

    def began(self) -> None:
        """Note that the stage is under way, if it was not before."""
        if self._last is None:
            self._last = clock.monotonic()
            self._cpu.began()

    def step_ended(self, samples: int) -> None:
        """Close the step, in which the model got so many samples."""
        self.timeline.compute_ended(samples)
        now = clock.monotonic()
        if self._last is not None:
            self._duration_s += now - self._last
        self._last = now
        self.stamps.step_ended()

    def paused(self) -> None:
        """Do not count the time until the stage goes on: training and validation take turns."""
        self._last = None
        self._cpu.paused()

    def metrics(self) -> dict[str, float]:
        """Return the means over the steps since the last call, by their names for loggers."""
        self._drop_foreign()
        history = self.timeline.history
        new, self._logged_steps = history.steps - self._logged_steps, history.steps
        means = window_means(history.newest(new), self.stamps.prefix) if new else {}
        return {**means, **self.stamps.metrics()}

    def summary(self) -> StageSummary | None:
        """Return where the steps went, or None before the first step ended."""
        self._drop_foreign()
        history = self.timeline.history
        if history.steps == 0:
            return None
        summary = history.summarize(
            self.stage,
            duration_s=self._duration_s,
            device=self._device.type,
            dropped_steps=self.timeline.dropped_steps,
        )
        waits = sum(spike.phase == "stall" for spike in summary.spikes)
        causes = self.stamps.summary(spikes=waits)
        return dataclasses.replace(summary, causes=causes, updates=self.updates)

    def _drop_foreign(self) -> None:
        """Forget stamps of batches that were read outside of the steps."""

    def evidence(
        self, summary: StageSummary, facts: LoaderFacts, *, cpus: float, **measured: Any
    ) -> Evidence:
        """Return everything that is known of the stage; ``measured`` is added to it."""
        loader, stamps = self.stamps.slowest_loader()
        times = stage_times(summary, stamps, self._cpu.used())
        measured["model_computes"] = model_computes(summary, times)
        setup = None
        if loader is not None and stamps:
            setup = setup_of(loader, cpus=cpus, step_cpus=times.step_cpus)
            measured["stream_samples"] = self.stamps.stream_samples()
        return stage_evidence(
            summary,
            stamps,
            setup,
            facts,
            step_queued=times.step_queued,
            read_rates=self.stamps.rates,
            **measured,
        )


class LoopStage(StageMeter):
    """A stage whose loaders are known when they are read, and may be read outside of it, too."""

    def __init__(self, stage: Stage, device: torch.device) -> None:
        prefix = "data" if stage == "train" else f"data_{stage}"
        super().__init__(stage, device, StageStamps(prefix, lendable=True))
        self._facts = LoaderFacts()
        self._closed: dict[str, str] = {}
        self._moved_by: dict[str, None] = {}

    def epoch_began(self, loader: object) -> None:
        """Note that a loader is about to be iterated, maybe within others."""
        self.timeline.epoch_began()
        loader, moves = _unwrapped(loader)
        if moves:
            self._moved_by[moves] = None
        self._facts, self._closed = read_loader(loader), closed_options(loader)
        self._drop_foreign()
        self.stamps.watch([loader])

    def wait_began(self) -> None:
        """Note that a batch is asked for."""
        self.began()
        self.timeline.wait_began()

    def paused(self) -> None:
        """Do not count the time until the next batch of this stage is asked for."""
        self._drop_foreign()
        self.stamps.cut()
        super().paused()

    def verdict(self, summary: StageSummary, val: StageSummary | None = None) -> Verdict:
        """Return what limits the stage, given its validation, if there is one."""
        cpus = read_cpu_limit().usable_cpus
        facts = dataclasses.replace(self._facts, usable_cpus=cpus)
        if summary.augment is not None:
            facts = dataclasses.replace(facts, augment_on="device")
        evidence = self.evidence(
            summary,
            facts,
            cpus=float(cpus),
            val=val,
            closed=self._closed,
        )
        return judge(summary, facts, evidence)

    def not_known(self) -> tuple[str, ...]:
        """Return what is not known, and why; several stages may say the same."""
        transfer = "The wait includes the transfer: {} moves each batch before it delivers it."
        notes = [transfer.format(moves) for moves in self._moved_by]
        missing = self.stamps.missing()
        if missing is not None:
            notes.append(f"Why batches were late is not known: {missing}.")
        return tuple(notes)

    def _drop_foreign(self) -> None:
        if self._last is None:
            self.stamps.drop_uncut()


def _unwrapped(loader: object) -> tuple[object, str]:
    """Return the loader within others, and what moves its batches to a device; empty: nothing."""
    moves = ""
    while True:
        if isinstance(loader, Prefetched):
            moves, loader = moves or "prefetch()", loader.loader
            continue
        # Fabric's wrapper copies its loader's attributes, but the loader itself has no public name.
        # A version without this one is taken for a loader without stamps, and a test fails.
        inner = held(loader, "_dataloader")
        if not isinstance(inner, torch.utils.data.DataLoader):
            return loader, moves
        if held(loader, "_device") is not None:
            moves = moves or "Fabric"
        loader = inner


_MEANS: Final = {
    "step_ms": "/step_ms",
    "wait_ms": "/time_wait_ms",
    "compute_ms": "/time_compute_ms",
    "transfer_ms": "_step/transfer_ms",
    "augment_ms": "_step/augment_ms",
}
"""Column -> what follows the prefix in the name of its mean."""


def window_means(columns: Columns, prefix: str = "data") -> dict[str, float]:
    """Return the scalars of a window of steps.

    Cold steps are left out, unless there are no others; what was not measured has no key.
    """
    columns = warm_steps(columns)
    step, stall, samples = columns["step_ms"], columns["stall_ms"], columns["samples"]
    scalars: dict[str, float] = {}
    for column, name in _MEANS.items():
        values = measured(columns[column])
        if values.size:
            scalars[f"{prefix}{name}"] = float(values.mean())
    timed = ~np.isnan(step)
    total = float(step[timed].sum())
    if total > 0:
        rate = float(samples[timed].sum()) * 1e3 / total
        scalars[f"{prefix}/throughput_samples_per_s"] = rate
    both = timed & ~np.isnan(stall)
    total, stalled = float(step[both].sum()), float(stall[both].sum())
    if total > 0:
        scalars[f"{prefix}/stall_percent"] = 100.0 * stalled / total
    if total > max(0.0, stalled):
        free = float(samples[both].sum()) * 1e3 / (total - stalled)
        scalars[f"{prefix}/throughput_if_data_were_free_samples_per_s"] = free
        scalars[f"{prefix}_headroom/speedup_possible"] = total / (total - stalled)
    for phase in ("step", "stall", "compute"):
        values = measured(columns[f"{phase}_ms"])
        if values.size:
            p50, p95 = p50_and_p95(values)
            band = {"p50": p50, "p95": p95, "max": float(values.max())}
            scalars |= {f"{prefix}_band/{phase}_{key}_ms": ms for key, ms in band.items()}
    return dict(sorted(scalars.items()))


class StampQueue(deque["BatchStamps"]):
    """Stamps of a loader that a later :class:`StageStamps` may take over."""


class _Watched:
    """The stamps of one loader, which is not kept alive."""

    def __init__(self, number: int, loader: FastDataLoader, *, lendable: bool) -> None:
        self.number = number
        self.loader = weakref.ref(loader)
        # Bounded, as stamps of batches that are read outside of the steps are not cut.
        kind = StampQueue if lendable else deque
        self.records: deque[BatchStamps] = kind(maxlen=2 * _MOST_UNCUT)
        self.newest: deque[BatchStamps] = deque(maxlen=_KEPT_STAMPS)
        self.made: Counter[int] = Counter()
        """Samples, by the number of the process that made them."""

    @property
    def waited_ns(self) -> int:
        return sum(batch.delivered_ns - batch.requested_ns for batch in self.newest)


class StageStamps:
    """The stamps of one stage's loaders, and what the waits for their batches were made of.

    Several loaders count as one: what is asked of "the" loader is about the one that is waited for
    most. Where one of them takes no stamps, nothing is known.

    Args:
        prefix: Of the names for loggers: ``data`` for training, ``data_val`` for validation.
        lendable: Let a later one take over a loader, and take over those of earlier ones that do.
    """

    def __init__(self, prefix: str, *, lendable: bool = False) -> None:
        self.prefix = prefix
        self._lendable = lendable
        self._totals = CauseTotals(prefix)
        self._watched: list[_Watched] = []
        self._numbers = itertools.count()
        self._unwatched: dict[str, None] = {}
        """Why some of the loaders there are now are not watched."""
        self._stamped = False

    def watch(self, loaders: Iterable[object]) -> None:
        """Have each FastDataLoader among some loaders record its stamps, if no other code does."""
        loaders = list(loaders)
        unknown = [each for each in loaders if not self._recognized(each)]
        if unknown:
            self.cut()
            self._watched = [each for each in self._watched if each.loader() is not None]
        if loaders:
            reasons = map(self._begin_watching, unknown)
            self._unwatched = dict.fromkeys(filter(None, reasons))

    def _begin_watching(self, loader: object) -> str:
        """Have a loader record its stamps, or return why it does not."""
        if not isinstance(loader, FastDataLoader):
            return f"a {type(loader).__name__} does not tell, FastDataLoader does"
        mine = self._lendable and isinstance(loader.records, StampQueue)
        if loader.records is not None and not mine:
            return "other code takes the stamps of its loader"
        watched = next((each for each in self._watched if each.loader() is loader), None)
        if watched is None:  # else it was taken over in between
            watched = _Watched(next(self._numbers), loader, lendable=self._lendable)
            self._watched.append(watched)
        loader.record_stamps(watched.records)
        return ""

    def _recognized(self, loader: object) -> bool:
        """Note a loader that records for us: maybe one that Lightning made from one of ours."""
        if isinstance(loader, FastDataLoader):
            for watched in self._watched:
                if loader.records is watched.records:
                    watched.loader = weakref.ref(loader)
                    return True
        return False

    def restart(self) -> None:
        """Forget what was recorded so far."""
        self._totals = CauseTotals(self.prefix)
        self.drop_uncut()
        for watched in self._watched:
            watched.newest.clear()
            watched.made.clear()

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
        if any(len(each.records) > _MOST_UNCUT for each in self._watched):
            self.cut()

    def metrics(self) -> dict[str, float]:
        """Return the mean parts of the waits for a batch since the last call."""
        self.cut()
        return self._totals.window()

    def summary(self, *, spikes: int = 0) -> WaitCauses | None:
        """Return why batches were late, without so many of the longest waits; None: not known."""
        known = self.missing() is None
        return self._totals.summary(self._path_of, spikes=spikes) if known else None

    @property
    def rates(self) -> ReadRates | None:
        """What half of the workers and all of them read, if that was tried."""
        return self._totals.rates

    def slowest_loader(self) -> tuple[FastDataLoader | None, list[BatchStamps]]:
        """Return the loader that was waited for most (None: gone), and its newest stamps."""
        slowest = self._slowest()
        return (None, []) if slowest is None else (slowest.loader(), list(slowest.newest))

    def _slowest(self) -> _Watched | None:
        known = self._watched if self.missing() is None else []
        return max(known, key=lambda each: each.waited_ns, default=None)

    def stream_samples(self) -> tuple[int, ...]:
        """Return the samples that each worker of that loader made of a stream.

        Empty where it reads no stream, has one worker at most, or delivers batches out of order:
        then workers make as much as they are fast.
        """
        slowest = self._slowest()
        loader = None if slowest is None else slowest.loader()
        if slowest is None or loader is None or loader.num_workers < 2 or not loader.in_order:
            return ()
        if not isinstance(loader.dataset, IterableDataset):
            return ()
        return tuple(slowest.made[number] for number in range(loader.num_workers))

    def busy_share(self) -> float | None:
        """Return the part of the time, 0 to 1, in which that loader's workers had a task lately."""
        loader, stamps = self.slowest_loader()
        return None if loader is None else busy_share(stamps, loader.num_workers)

    def missing(self) -> str | None:
        """Return why nothing is known about the waits; None if something is."""
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
                watched.newest.append(batch)
                for task in batch.tasks:
                    watched.made[task.process] += task.samples

    def _path_of(self, number: int, index: object) -> str | None:
        owner = next((each.loader() for each in self._watched if each.number == number), None)
        return None if owner is None else sample_path(owner.dataset, index)


def sample_path(dataset: Any, index: Any) -> str | None:
    """Return the file of a sample of an image folder, also within subsets, if it is known."""
    try:
        while isinstance(dataset, Subset | ConcatDataset):
            if isinstance(dataset, Subset):
                dataset, index = dataset.dataset, dataset.indices[index]
            else:
                ends = dataset.cumulative_sizes
                which = bisect_right(ends, index)
                index -= ends[which - 1] if which else 0
                dataset = dataset.datasets[which]
        # Only our own list is a property: one of the user may open a file.
        samples = dataset.samples if decodes_in_place(dataset) else held(dataset, "samples")
        return os.fsdecode(samples[index][0])
    except Exception:  # `samples` is the user's, and may be anything
        return None
