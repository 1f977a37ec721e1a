"""What is measured of one stage of a run: its steps, its loaders' stamps, and what loggers get."""

from __future__ import annotations

import dataclasses
import itertools
import os
import weakref
from bisect import bisect_right
from collections import deque
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import torch
from torch.utils.data import ConcatDataset, IterableDataset, Subset

from lightning_fastdata.batches.layout import decodes_in_place
from lightning_fastdata.batches.staged import batch_samples
from lightning_fastdata.device.backend import has_streams
from lightning_fastdata.device.prefetch import Prefetched
from lightning_fastdata.host import clock
from lightning_fastdata.host.cpu import read_cpu_limit
from lightning_fastdata.host.usage import SpentMeter
from lightning_fastdata.insight.measure.host_metrics import NO_MACHINE
from lightning_fastdata.insight.measure.metrics import (
    EventClock,
    StepTimeline,
    measured,
    p50_and_p95,
    warm_steps,
)
from lightning_fastdata.insight.measure.padding import PaddingMeter
from lightning_fastdata.insight.model.evidence import (
    LoaderFacts,
    busy_share,
    closed_options,
    read_loader,
    stage_evidence,
    stage_times,
)
from lightning_fastdata.insight.verdicts.catalogue import judge
from lightning_fastdata.insight.waits.causes import CauseTotals, LoaderWait, OneOfSeveral, costliest
from lightning_fastdata.loading.loader import FastDataLoader
from lightning_fastdata.loading.source import setup_of
from lightning_fastdata.tree import held

if TYPE_CHECKING:
    from lightning_fastdata.insight.measure.host_metrics import MachineSeen
    from lightning_fastdata.insight.measure.metrics import Columns, StageSummary
    from lightning_fastdata.insight.model.evidence import Evidence
    from lightning_fastdata.insight.verdicts.catalogue import Verdict
    from lightning_fastdata.insight.waits.causes import LoaderKey, WaitCauses
    from lightning_fastdata.stamps.batch_stamps import BatchStamps
    from lightning_fastdata.types import Batch, Stage

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
        self.padding = PaddingMeter()
        self._counted = _Counted()
        self._logged = _Counted()
        self._logged_steps = 0
        self._duration_s = 0.0
        self._last: float | None = None
        self._cpu = SpentMeter()

    def epoch_opens(self) -> None:
        """Note that the next step is the first of an epoch, and counted apart."""
        self.timeline.epoch_began()
        self.stamps.epoch_began()

    def began(self) -> None:
        """Note that the stage is under way, if it was not before."""
        if self._last is None:
            self._last = clock.monotonic()
            self._cpu.began()

    def size_of(self, batch: Batch) -> tuple[int, float]:
        """Return the samples of a batch, and its tokens, padding left out; 0: not known."""
        return batch_samples(batch), self.padding.tokens_of(batch)

    def step_ended(self, samples: int, tokens: float = 0.0) -> None:
        """Close the step, in which the model got so many samples, and tokens if that is known."""
        self.timeline.compute_ended(samples)
        self._counted.samples += samples
        self._counted.tokens += tokens
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
        each = self._counted.since(self._logged)
        self._logged = dataclasses.replace(self._counted)
        rate = means.get(f"{self.stamps.prefix}/throughput_samples_per_s")
        if each and rate is not None:
            means[f"{self.stamps.prefix}/throughput_tokens_per_s"] = each * rate
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
        self.stamps.step_wait_ms = None if summary.wait is None else summary.wait.mean_ms
        loaders = self.stamps.loader_waits()
        most = costliest(loaders)
        waits = sum(spike.phase == "stall" for spike in summary.spikes)
        causes = self.stamps.summary(spikes=waits) if most is None else most.causes
        each, rate = self._counted.since(_Counted()), summary.samples_per_s
        return dataclasses.replace(
            summary,
            causes=causes,
            loaders=loaders,
            updates=self.updates,
            tokens_per_s=each * rate if each and rate is not None else None,
        )

    def _drop_foreign(self) -> None:
        """Forget stamps of batches that were read outside of the steps."""

    def evidence(
        self,
        summary: StageSummary,
        facts: LoaderFacts,
        *,
        cpus: float,
        machine: MachineSeen = NO_MACHINE,
        val: StageSummary | None = None,
    ) -> Evidence:
        """Return everything that is known of the stage; as of :func:`stage_evidence`."""
        totals = self.stamps.slowest()
        loader, stamps = self.stamps.slowest_loader()
        most = costliest(summary.loaders)
        if most is not None and most.causes is None:
            loader, stamps = None, []  # waited for most is a loader that takes no stamps
        times = stage_times(summary, stamps, self._cpu.used())
        setup, one_of, shares = None, None, tuple[int, ...]()
        if loader is not None and stamps:
            setup = setup_of(loader, cpus=cpus, step_cpus=times.step_cpus)
            one_of, shares = self.stamps.one_of(), self.stamps.stream_samples()
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
            read_rates=None if totals is None else totals.rates,
            padding=self.padding.found(),
            stream_samples=shares,
            one_of=one_of,
        )


@dataclasses.dataclass(slots=True)
class _Counted:
    """What the steps of a stage had."""

    samples: int = 0
    tokens: float = 0.0

    def since(self, before: _Counted) -> float:
        """Return the tokens of a sample since then, the mean; 0: not known."""
        return (self.tokens - before.tokens) / max(1, self.samples - before.samples)


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

    def __init__(
        self, number: int, loader: FastDataLoader, key: LoaderKey | None, *, lendable: bool
    ) -> None:
        self.number = number
        self.key = key
        self.loader = weakref.ref(loader)
        # Bounded, as stamps of batches that are read outside of the steps are not cut.
        kind = StampQueue if lendable else deque
        self.records: deque[BatchStamps] = kind(maxlen=2 * _MOST_UNCUT)
        self.newest: deque[BatchStamps] = deque(maxlen=_KEPT_STAMPS)

    @property
    def waited_ns(self) -> int:
        return sum(batch.delivered_ns - batch.requested_ns for batch in self.newest)


class StageStamps:
    """The stamps of one stage's loaders, and what the waits for their batches were made of.

    Where several loaders are known by their keys, each is reported by itself, and what is asked of
    "the" loader is about the one that is waited for most.

    Args:
        prefix: Of the names for loggers: ``data`` for training, ``data_val`` for validation.
        lendable: Let a later one take over a loader, and take over those of earlier ones that do.
    """

    def __init__(self, prefix: str, *, lendable: bool = False) -> None:
        self.prefix = prefix
        self.step_wait_ms: float | None = None
        self._lendable = lendable
        self._sources: dict[LoaderKey | None, CauseTotals] = {}
        self._watched: list[_Watched] = []
        self._numbers = itertools.count()
        self._keys: dict[LoaderKey, str] = {}
        """Of several loaders, in their order: why one is not watched; empty: it is."""
        self._unwatched: dict[str, None] = {}
        self._stamped = False
        self._opening = True
        """The first step of an epoch is under way."""
        self._steps = self._window_steps = 0
        """Steps that were not the first of an epoch: all, and since the last metrics."""

    def watch(self, loaders: Iterable[object], keys: Sequence[LoaderKey] = ()) -> None:
        """Have each FastDataLoader among some loaders record its stamps, if no other code does.

        Several that are read in the same steps or in turn have keys; else they count as one.
        """
        loaders = list(loaders)
        key_of = {id(loader): key for loader, key in zip(loaders, keys, strict=False)}
        unknown = {id(each) for each in loaders if not self._recognized(each)}
        if unknown:
            self.cut()
            self._watched = [each for each in self._watched if each.loader() is not None]
        for loader in loaders:
            key = key_of.get(id(loader))
            why = self._begin_watching(loader, key) if id(loader) in unknown else ""
            if why:
                self._unwatched[why] = None
            if key is not None:
                self._keys[key] = why

    def _begin_watching(self, loader: object, key: LoaderKey | None) -> str:
        """Have a loader record its stamps, or return why it does not."""
        if not isinstance(loader, FastDataLoader):
            return f"a {type(loader).__name__} does not tell, FastDataLoader does"
        mine = self._lendable and isinstance(loader.records, StampQueue)
        if loader.records is not None and not mine:
            return "other code takes the stamps of its loader"
        watched = next((each for each in self._watched if each.loader() is loader), None)
        if watched is None:  # else it was taken over in between
            watched = _Watched(next(self._numbers), loader, key, lendable=self._lendable)
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
        self._sources.clear()
        self._opening, self._steps, self._window_steps = True, 0, 0
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

    def epoch_began(self) -> None:
        """Note that the next step is the first of an epoch."""
        self.cut()
        self._opening = True

    def step_ended(self) -> None:
        """Cut what has come together, if it is much or of the first step of an epoch."""
        if self._opening:
            self.cut()
            self._opening = False
            return
        self._steps += 1
        self._window_steps += 1
        for watched in self._watched:
            if len(watched.records) > _MOST_UNCUT:
                self.cut()
                return

    def metrics(self) -> dict[str, float]:
        """Return the mean parts of the waits since the last call, a batch or a step with keys."""
        self.cut()
        steps, self._window_steps = self._window_steps, 0
        found: dict[str, float] = {}
        for source in self._sources.values():
            batches, source.window_batches = source.window_batches, 0
            per_step = 1.0 if source.key is None else batches / max(1, steps)
            for name, ms in source.window().items():
                found[name] = found.get(name, 0.0) + ms * per_step
        return found

    def summary(self, *, spikes: int = 0) -> WaitCauses | None:
        """Return why batches were late, without so many of the longest waits; None: no stamps."""
        source = self.slowest()
        return None if source is None else source.summary(self._path_of, spikes=spikes)

    def loader_waits(self) -> tuple[LoaderWait, ...]:
        """Return what each of several loaders costs, in their order; empty where there is one."""
        self.cut()
        waits = self._waits_ms()
        return tuple(
            LoaderWait(
                name=key.name,
                label=key.label,
                wait_ms=waits[key],
                batches=None if source is None else source.batches,
                causes=None if source is None else source.summary(self._path_of),
            )
            for key in self._keys
            for source in (self._sources.get(key),)
        )

    def _waits_ms(self) -> dict[LoaderKey, float | None]:
        """Return what a step waits for each of several loaders; None: not known."""
        found: dict[LoaderKey, float | None] = dict.fromkeys(self._keys)
        if not self._steps:
            return found
        mine = {key: self._sources[key] for key in found if key in self._sources}
        stamped = {key: each.waited_ms(self._steps) for key, each in mine.items()}
        silent = [key for key in found if key not in mine]
        found |= stamped
        if self.step_wait_ms is None:
            return found
        if len(silent) == 1:
            found[silent[0]] = max(0.0, self.step_wait_ms - sum(stamped.values()))
        return found

    def slowest(self) -> CauseTotals | None:
        """Return what is known of the loader that was waited for most; None without stamps."""
        self.cut()
        waits = self._waits_ms()
        keyed = {key: each for key, each in self._sources.items() if key is not None}
        if not keyed:
            return self._sources.get(None)
        return keyed[max(keyed, key=lambda key: waits.get(key) or 0.0)]

    def slowest_loader(self) -> tuple[FastDataLoader | None, list[BatchStamps]]:
        """Return the loader that was waited for most (None: gone), and its newest stamps."""
        source = self.slowest()
        mine = [each for each in self._watched if source is not None and each.key == source.key]
        slowest = max(mine, key=lambda each: each.waited_ns, default=None)
        return (None, []) if slowest is None else (slowest.loader(), list(slowest.newest))

    def one_of(self) -> OneOfSeveral | None:
        """Return which of several loaders is waited for most; None where there is one."""
        source = self.slowest()
        if source is None or source.key is None:
            return None
        waits = self._waits_ms()
        mine_ms, all_ms = waits[source.key] or 0.0, sum(each or 0.0 for each in waits.values())
        share = mine_ms / all_ms if all_ms else 0.0
        return OneOfSeveral(label=source.key.label, wait_share=share)

    def stream_samples(self) -> tuple[int, ...]:
        """Return the samples that each worker of that loader made of a stream.

        Empty where it reads no stream, has one worker at most, or delivers batches out of order:
        then workers make as much as they are fast.
        """
        source, (loader, _) = self.slowest(), self.slowest_loader()
        if source is None or loader is None or loader.num_workers < 2 or not loader.in_order:
            return ()
        if not isinstance(loader.dataset, IterableDataset):
            return ()
        return tuple(source.made[number] for number in range(loader.num_workers))

    def busy_share(self) -> float | None:
        """Return the part of the time, 0 to 1, in which that loader's workers had a task lately."""
        loader, stamps = self.slowest_loader()
        return None if loader is None else busy_share(stamps, loader.num_workers)

    def missing(self) -> str | None:
        """Return why nothing is known about the waits; None if something is."""
        self.cut()
        if self._stamped:
            return None
        loaders = [each.loader() for each in self._watched]
        executors = dict.fromkeys(
            f"executor {each.executor!r} does not tell" for each in loaders if each is not None
        )
        return ", ".join(self._unwatched or executors) or "nothing was noted"

    def missing_loaders(self) -> dict[str, str]:
        """Return which of several loaders take no stamps, and why, where others do."""
        return {key.label: why for key, why in self._keys.items() if why and self._stamped}

    def cut(self) -> None:
        """Cut the waits of all batches that were recorded."""
        for watched in self._watched:
            self._stamped |= bool(watched.records)
            while watched.records:
                batch = watched.records.popleft()
                source = self._sources.get(watched.key)
                if source is None:
                    source = self._sources[watched.key] = CauseTotals(self.prefix, watched.key)
                source.add(batch, watched.number, opening=self._opening)
                watched.newest.append(batch)

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
