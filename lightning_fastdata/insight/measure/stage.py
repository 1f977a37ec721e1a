"""What is measured of one stage of a run: its steps, its loaders' stamps, and what loggers get."""

from __future__ import annotations

import dataclasses
import itertools
import operator
import os
import weakref
from bisect import bisect_right
from collections import Counter, deque
from collections.abc import Iterable
from typing import Any, Final

import numpy as np
import torch
from torch.utils.data import ConcatDataset, IterableDataset, Subset

from lightning_fastdata.batches.layout import decodes_in_place
from lightning_fastdata.batches.staged import batch_samples
from lightning_fastdata.device import has_streams
from lightning_fastdata.host import clock
from lightning_fastdata.host.clock import SpentMeter
from lightning_fastdata.host.cpu import read_cpu_limit
from lightning_fastdata.insight.measure.host_metrics import NO_MACHINE, MachineSeen
from lightning_fastdata.insight.measure.metrics import (
    Columns,
    EventClock,
    StageSummary,
    StepTimeline,
    measured,
    p50_and_p95,
    warm_steps,
)
from lightning_fastdata.insight.measure.padding import PaddingMeter
from lightning_fastdata.insight.model.evidence import (
    Evidence,
    LoaderFacts,
    closed_options,
    read_loader,
    stage_evidence,
    stage_times,
)
from lightning_fastdata.insight.verdicts.catalogue import Verdict, judge
from lightning_fastdata.insight.waits.causes import CauseTotals, WaitCauses
from lightning_fastdata.loading.loader import FastDataLoader
from lightning_fastdata.loading.prefetch import Prefetched
from lightning_fastdata.loading.source import setup_of
from lightning_fastdata.stamps.batch_stamps import BatchStamps, ReadRates
from lightning_fastdata.tree import held
from lightning_fastdata.types import Batch, Stage

_MOST_UNCUT: Final = 256
"""Waits are cut when a result is asked for, at the latest when there are so many."""
_KEPT_STAMPS: Final = 512
"""The newest batches of each loader are kept for predictions."""


class StageMeter:
    """The timeline of one stage, its stamps, its log window and the wall time it has covered."""

    def __init__(self, stage: Stage, device: torch.device) -> None:
        self.stage: Stage = stage
        self.prefix = "data" if stage == "train" else f"data_{stage}"
        """Of the names for loggers."""
        self.stamps = StageStamps(self.prefix)
        self._device = device
        self.restart()

    def restart(self) -> None:
        """Forget what was measured so far."""
        events = EventClock(device=self._device) if has_streams(self._device) else None
        self.timeline = StepTimeline(device=events)
        self.stamps.restart()
        self.padding = PaddingMeter()
        self._counted = 0.0, 0
        """Tokens, without padding, and samples of the steps of which these are known."""
        self._told = self._counted
        """What they were when the last metrics were taken."""
        self._logged_steps = 0
        self._duration_s = 0.0
        self._last: float | None = None
        self._cpu = SpentMeter()

    def began(self) -> None:
        """Note that the stage is under way, if it was not before."""
        if self._last is None:
            self._last = clock.monotonic()
            self._cpu.began()

    def wait_began(self) -> None:
        """Note that a batch is asked for."""
        self.began()
        self.timeline.wait_began()

    def size_of(self, batch: Batch) -> tuple[int, float]:
        """Return the samples of a batch, and its tokens, padding left out; 0: not known."""
        return batch_samples(batch), self.padding.tokens_of(batch)

    def step_ended(self, samples: int, tokens: float = 0.0) -> None:
        """Close the step, in which the model got so many samples, and tokens if that is known."""
        if tokens:
            self._counted = self._counted[0] + tokens, self._counted[1] + samples
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
        self.timeline.paused()

    def metrics(self) -> dict[str, float]:
        """Return the means over the steps since the last call, by their names for loggers."""
        history = self.timeline.history
        new, self._logged_steps = history.steps - self._logged_steps, history.steps
        means = window_means(history.newest(new), self.prefix) if new else {}
        rate = means.get(f"{self.prefix}/throughput_samples_per_s")
        tokens, samples = map(operator.sub, self._counted, self._told)
        self._told = self._counted
        if rate is not None and samples:
            means[f"{self.prefix}/throughput_tokens_per_s"] = rate * tokens / samples
        return {**means, **self.stamps.metrics()}

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
        rate, (tokens, samples) = summary.samples_per_s, self._counted
        return dataclasses.replace(
            summary,
            causes=self.stamps.summary(without=_long_waits(summary)),
            tokens_per_s=rate * tokens / samples if rate is not None and samples else None,
        )

    def evidence(
        self,
        summary: StageSummary,
        facts: LoaderFacts,
        *,
        cpus: float,
        machine: MachineSeen = NO_MACHINE,
        val: StageSummary | None = None,
    ) -> Evidence:
        """Return everything that is known of the stage; as of :func:`stage_evidence`.

        Causes are those of the loader that is waited for most: a finding names no other one.
        """
        slowest = None if summary.causes is None else self.stamps.slowest()
        share = 1.0
        if slowest is not None:
            causes, share = self.stamps.of_one(slowest, without=_long_waits(summary))
            summary = dataclasses.replace(summary, causes=causes)
        stamps = [] if slowest is None else list(slowest.newest)
        times = stage_times(summary, stamps, self._cpu.used())
        loader = None if slowest is None else slowest.loader()
        setup = None
        if loader is not None and stamps:
            setup = setup_of(loader, cpus=cpus, step_cpus=times.step_cpus)
        return dataclasses.replace(
            stage_evidence(
                summary,
                stamps,
                setup,
                facts,
                machine=machine,
                step_queued=times.step_queued,
                val=val,
            ),
            loader_share=share,
            read_rates=None if slowest is None else slowest.rates,
            padding=self.padding.found(),
            stream_samples=() if slowest is None else slowest.stream_samples(),
        )


def _long_waits(summary: StageSummary) -> int:
    """Return how many of the long steps, which are no part of the means, are long waits."""
    return sum((t.stall_ms or 0.0) > (t.compute_ms or 0.0) for t in summary.long_steps)


class LoopStage(StageMeter):
    """A stage of a loop of one's own, whose loader is known while it is read."""

    def __init__(self, stage: Stage, device: torch.device) -> None:
        super().__init__(stage, device)
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
        self.stamps.watch([loader])

    def epoch_ended(self) -> None:
        """Let go of the loader: what is read of it now is of no step."""
        self.timeline.drop_open_step()
        self.stamps.stop()
        self.paused()

    def verdict(self, summary: StageSummary, val: StageSummary | None = None) -> Verdict:
        """Return what limits the stage, given its validation, if there is one."""
        cpus = read_cpu_limit().usable_cpus
        facts = dataclasses.replace(self._facts, usable_cpus=cpus)
        if summary.augment is not None:
            facts = dataclasses.replace(facts, augment_on="device")
        evidence = self.evidence(summary, facts, cpus=float(cpus), val=val)
        return judge(summary, facts, dataclasses.replace(evidence, closed=self._closed))

    def not_known(self) -> tuple[str, ...]:
        """Return what is not known, and why; several stages may say the same."""
        transfer = "The wait includes the transfer: {} moves each batch before it delivers it."
        notes = [transfer.format(moves) for moves in self._moved_by]
        missing = self.stamps.missing()
        if missing is not None:
            notes.append(f"Why batches were late is not known: {missing}.")
        return tuple(notes)


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
    stalls = measured(columns["stall_ms"])
    if stalls.size:
        scalars[f"{prefix}_band/stall_p95_ms"] = p50_and_p95(stalls)[1]
    return dict(sorted(scalars.items()))


class _Watched:
    """The stamps of one loader, which is not kept alive."""

    def __init__(self, number: int, loader: FastDataLoader) -> None:
        self.number = number
        self.loader = weakref.ref(loader)
        # Bounded, as nobody may ask for them.
        self.records: deque[BatchStamps] = deque(maxlen=2 * _MOST_UNCUT)
        self.restart()

    def restart(self) -> None:
        self.records.clear()
        self.newest: deque[BatchStamps] = deque(maxlen=_KEPT_STAMPS)
        self.rates: ReadRates | None = None
        """What half of its workers and all of them read, if that was tried."""
        self.made: Counter[int] = Counter()
        """Samples, by the number of the process that made them."""
        self.totals = CauseTotals()
        """Of this loader alone; empty while it was the only one."""

    @property
    def waited_ns(self) -> int:
        return sum(batch.delivered_ns - batch.requested_ns for batch in self.newest)

    def keep(self, batch: BatchStamps) -> None:
        self.newest.append(batch)
        self.rates = batch.rates or self.rates
        for task in batch.tasks:
            self.made[task.process] += task.samples

    def stream_samples(self) -> tuple[int, ...]:
        """Return the samples that each worker made of a stream.

        Empty where it reads no stream, has one worker at most, or delivers batches out of order:
        then workers make as much as they are fast.
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

    def __init__(self, prefix: str) -> None:
        self._prefix = prefix
        self._watched: list[_Watched] = []
        self._newest: list[_Watched] = []
        """Those of the loaders that were shown last."""
        self._numbers = itertools.count()
        self.restart()

    def watch(self, loaders: Iterable[object]) -> None:
        """Have each FastDataLoader among some loaders record its stamps, if no other code does."""
        shown = [(loader, self._recognized(loader)) for loader in loaders]
        self.cut()
        self._watched = [each for each in self._watched if each.loader() is not None]
        found = [known or self._recording(loader) for loader, known in shown]
        self._newest = [each for each in found if each is not None]

    def _recognized(self, loader: object) -> _Watched | None:
        """Note a loader that records for us: maybe one that Lightning made from one of ours."""
        if isinstance(loader, FastDataLoader):
            for watched in self._watched:
                if loader.records is watched.records:
                    watched.loader = weakref.ref(loader)
                    return watched
        return None

    def _recording(self, loader: object) -> _Watched | None:
        """Have a loader record its stamps, or note why it does not."""
        if not isinstance(loader, FastDataLoader):
            self._unwatched[f"a {type(loader).__name__} does not tell, FastDataLoader does"] = None
            return None
        if loader.records is not None:
            self._unwatched["other code takes the stamps of its loader"] = None
            return None
        watched = next((each for each in self._watched if each.loader() is loader), None)
        if watched is None:  # else it was let go of in between
            watched = _Watched(next(self._numbers), loader)
            self._watched.append(watched)
        loader.record_stamps(watched.records)
        return watched

    def restart(self) -> None:
        """Forget what was recorded so far; loaders are to be shown anew."""
        self._totals = CauseTotals(self._prefix)
        self._unwatched: dict[str, None] = {}
        """Why some of the loaders do not tell."""
        self._stamped = False
        for watched in self._watched:
            watched.restart()

    def stop(self) -> None:
        """Take no more stamps; what was taken is kept."""
        self.cut()
        for watched in self._watched:
            loader = watched.loader()
            if loader is not None and loader.records is watched.records:
                loader.record_stamps(None)

    def step_ended(self) -> None:
        """Cut what has come together, if it is much."""
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

        Of the loaders that were shown last: one that is alone goes on where another one was.
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
