"""What is measured of one stage of a run: its steps, its waits, and what loggers get of them."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import torch

from lightning_fastdata.device.backend import has_streams
from lightning_fastdata.device.prefetch import Prefetched
from lightning_fastdata.host import clock
from lightning_fastdata.host.cpu import read_cpu_limit
from lightning_fastdata.host.usage import SpentMeter
from lightning_fastdata.insight.measure.metrics import measured, p50_and_p95, warm_steps
from lightning_fastdata.insight.measure.stage_stamps import StageStamps
from lightning_fastdata.insight.measure.timeline import EventClock, StepTimeline
from lightning_fastdata.insight.model.evidence import (
    LoaderFacts,
    closed_options,
    read_loader,
    stage_evidence,
)
from lightning_fastdata.insight.model.loader_seen import model_computes, stage_times
from lightning_fastdata.insight.verdicts.catalogue import judge
from lightning_fastdata.insight.waits.several_loaders import costliest
from lightning_fastdata.loading.source import setup_of
from lightning_fastdata.tree import held

if TYPE_CHECKING:
    from lightning_fastdata.insight.measure.metrics import Columns, StageSummary
    from lightning_fastdata.insight.model.evidence import Evidence
    from lightning_fastdata.insight.verdicts.catalogue import Verdict
    from lightning_fastdata.types import Stage


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
        self.stamps.epoch_began()

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
        self.stamps.step_wait_ms = None if summary.wait is None else summary.wait.mean_ms
        loaders = self.stamps.loader_waits()
        most = costliest(loaders)
        waits = sum(spike.phase == "stall" for spike in summary.spikes)
        causes = self.stamps.summary(spikes=waits) if most is None else most.causes
        return dataclasses.replace(summary, causes=causes, loaders=loaders, updates=self.updates)

    def _drop_foreign(self) -> None:
        """Forget stamps of batches that were read outside of the steps."""

    def evidence(
        self, summary: StageSummary, facts: LoaderFacts, *, cpus: float, **measured: Any
    ) -> Evidence:
        """Return everything that is known of the stage; ``measured`` is added to it."""
        totals = self.stamps.slowest()
        loader, stamps = self.stamps.slowest_loader()
        most = costliest(summary.loaders)
        if most is not None and most.causes is None:
            loader, stamps = None, []  # waited for most is a loader that takes no stamps
        times = stage_times(summary, stamps, self._cpu.used())
        measured["model_computes"] = model_computes(summary, times)
        setup = None
        if loader is not None and stamps:
            setup = setup_of(loader, cpus=cpus, step_cpus=times.step_cpus)
            measured["stream_samples"] = self.stamps.stream_samples()
            measured["one_of"] = self.stamps.one_of()
        return stage_evidence(
            summary,
            stamps,
            setup,
            facts,
            step_queued=times.step_queued,
            read_rates=None if totals is None else totals.rates,
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
