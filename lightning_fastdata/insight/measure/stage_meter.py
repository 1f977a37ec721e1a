"""One stage of any loop: the times of its steps, the stamps of its loaders, what both show."""

from __future__ import annotations

import dataclasses
import time
from typing import TYPE_CHECKING, Any

from lightning_fastdata.host.usage import SpentMeter
from lightning_fastdata.insight.measure.stage import MetricWindow
from lightning_fastdata.insight.measure.timeline import StepTimeline
from lightning_fastdata.insight.model.evidence import evidence_of, stage_evidence
from lightning_fastdata.insight.model.setups import setup_of, stage_times
from lightning_fastdata.insight.model.simulate import least_step_ms
from lightning_fastdata.insight.waits.several_loaders import costliest, cpus_used

if TYPE_CHECKING:
    from collections.abc import Sequence

    from lightning_fastdata.insight.measure.metrics import StageSummary
    from lightning_fastdata.insight.measure.stage_stamps import StageStamps
    from lightning_fastdata.insight.measure.timeline import DeviceClock, HostClock
    from lightning_fastdata.insight.model.evidence import Evidence, LoaderFacts
    from lightning_fastdata.insight.waits.several_loaders import LoaderKey, OneOfSeveral
    from lightning_fastdata.loading.loader import FastDataLoader
    from lightning_fastdata.stamps.batch_stamps import BatchStamps
    from lightning_fastdata.types import Stage


class StageMeter:
    """The timeline of one stage, its stamps, its log window and the wall time it has covered.

    Args:
        stage: What the steps are for.
        device_type: What computes, e.g. ``"cuda"``.
        stamps: Of its loaders.
        host: The clock for waits.
        device: The clock of the device; None where the host's serves for both.
        updates: Optimizer steps so far; None: not counted.
    """

    def __init__(
        self,
        stage: Stage,
        device_type: str,
        stamps: StageStamps,
        *,
        host: HostClock | None = None,
        device: DeviceClock | None = None,
        updates: int | None = None,
    ) -> None:
        self.stage: Stage = stage
        self.stamps = stamps
        self.updates = updates
        self.timeline = StepTimeline(host=host, device=device)
        self._device_type = device_type
        self._window = MetricWindow(self.timeline.history, stamps.prefix)
        self._duration_s = 0.0
        self._last: float | None = None
        self._cpu = SpentMeter()

    @property
    def running(self) -> bool:
        """Whether the stage is under way."""
        return self._last is not None

    def epoch_opens(self) -> None:
        """Note that the next step is the first of an epoch, and counted apart."""
        self.timeline.epoch_began()
        self.stamps.epoch_began()

    def began(self) -> None:
        """Note that the stage is under way, if it was not before."""
        if self._last is None:
            self._last = time.monotonic()
            self._cpu.began()

    def step_ended(self, samples: int) -> None:
        """Close the step, in which the model got so many samples."""
        self.timeline.compute_ended(samples)
        now = time.monotonic()
        if self._last is not None:
            self._duration_s += now - self._last
        self._last = now
        self.stamps.step_ended()

    def updated(self) -> None:
        """Note that an optimizer step was made."""
        self.updates = (self.updates or 0) + 1

    def paused(self) -> None:
        """Do not count the time until the stage goes on: training and validation take turns."""
        self._last = None
        self._cpu.paused()

    def metrics(self) -> dict[str, float]:
        """Return the means over the steps since the last call, by their names for loggers."""
        self.timeline.poll()
        return {**self._window.take(), **self.stamps.metrics()}

    def summary(self) -> StageSummary | None:
        """Return where the steps went, or None before the first step ended."""
        history = self.timeline.history
        if history.steps == 0:
            return None
        summary = history.summarize(
            self.stage,
            duration_s=self._duration_s,
            device=self._device_type,
            dropped_steps=self.timeline.dropped_steps,
        )
        self.stamps.step_wait_ms = None if summary.wait is None else summary.wait.mean_ms
        loaders = self.stamps.loader_waits()
        most = costliest(loaders)
        causes = self.stamps.summary() if most is None else most.causes
        return dataclasses.replace(summary, causes=causes, loaders=loaders, updates=self.updates)

    def evidence(
        self, summary: StageSummary, facts: LoaderFacts, *, cpus: float, **measured: Any
    ) -> Evidence:
        """Return everything that is known of the stage.

        Args:
            summary: Of this stage.
            facts: What its loader says about itself.
            cpus: CPUs this process and its workers may use.
            measured: Further fields of :class:`Evidence`.
        """
        loader, stamps = self.stamps.slowest_loader()
        most = costliest(summary.loaders)
        if most is not None and most.causes is None:
            loader, stamps = None, []  # waited for most is a loader that takes no stamps
        times = stage_times(summary, stamps, self._cpu.used())
        others = self.stamps.other_loaders()
        left = max(min(1.0, cpus), round(cpus - sum(cpus_used(each) for *_, each in others), 1))
        setup = None
        if loader is not None and stamps:
            setup = setup_of(loader, cpus=left, step_cpus=times.step_cpus)
            measured["stream_samples"] = self.stamps.stream_samples()
            measured["one_of"] = self._one_of(others, cpus, times.step_cpus)
        return stage_evidence(
            summary,
            stamps,
            setup,
            facts,
            step_queued=times.step_queued,
            read_rates=self.stamps.read_rates(),
            **measured,
        )

    def _one_of(
        self,
        others: Sequence[tuple[LoaderKey, FastDataLoader, list[BatchStamps]]],
        cpus: float,
        step_cpus: float,
    ) -> OneOfSeveral | None:
        """Return which of several loaders it is, and what the others allow."""
        found = self.stamps.one_of()
        if found is None:
            return None
        limits = []
        for key, loader, stamps in others:
            setup = setup_of(loader, cpus=cpus, step_cpus=step_cpus)
            costs = evidence_of(stamps, setup).costs
            if setup is not None and costs:
                least_ms = least_step_ms(costs, setup, less_ms=found.wait_ms)
                limits.append((key.label, least_ms))
        return dataclasses.replace(found, limits=tuple(limits))
