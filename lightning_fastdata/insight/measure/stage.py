"""What is measured of one stage of a run: its steps, its waits, and what loggers get of them."""

from __future__ import annotations

import dataclasses
import time
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch

from lightning_fastdata.augment import leaves_to_device
from lightning_fastdata.device.prefetch import Prefetched
from lightning_fastdata.host.cpu import read_cpu_limit
from lightning_fastdata.host.usage import SpentMeter
from lightning_fastdata.insight.measure.metrics import measured, p50_and_p95, warm_steps
from lightning_fastdata.insight.measure.stage_stamps import StageStamps
from lightning_fastdata.insight.measure.timeline import (
    CudaClock,
    HostClock,
    StepTimeline,
    cuda_event,
)
from lightning_fastdata.insight.model.evidence import (
    LoaderFacts,
    evidence_of,
    read_loader,
    stage_evidence,
)
from lightning_fastdata.insight.model.setups import setup_of, stage_times
from lightning_fastdata.insight.model.simulate import least_step_ms
from lightning_fastdata.insight.verdicts.catalogue import judge
from lightning_fastdata.insight.waits.several_loaders import costliest, cpus_used
from lightning_fastdata.loading.loader import FastDataLoader

if TYPE_CHECKING:
    from collections.abc import Sequence

    from lightning_fastdata.insight.measure.metrics import Columns, StageSummary, StepHistory
    from lightning_fastdata.insight.measure.timeline import DeviceClock
    from lightning_fastdata.insight.model.evidence import Evidence
    from lightning_fastdata.insight.verdicts.catalogue import Verdict
    from lightning_fastdata.insight.waits.several_loaders import LoaderKey, OneOfSeveral
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


class LoopStage(StageMeter):
    """A stage whose loaders are known when they are read, and which may be read outside of it too.

    Args:
        stage: What the steps are for.
        device: What computes.
        host: The clock for waits.
    """

    def __init__(self, stage: Stage, device: torch.device, host: HostClock) -> None:
        prefix = "data" if stage == "train" else f"data_{stage}"
        clock = CudaClock(new_event=_events_on(device)) if device.type == "cuda" else None
        stamps = StageStamps(prefix, lendable=True)
        super().__init__(stage, device.type, stamps, host=host, device=clock)
        self._facts = LoaderFacts()
        self._moved_by: dict[str, None] = {}

    def epoch_began(self, loader: Any) -> None:
        """Note that a loader is about to be iterated."""
        self.timeline.epoch_began()
        loader, moves = _unwrapped(loader)
        if moves:
            self._moved_by[moves] = None
        self._facts = _facts(loader)
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

    def metrics(self) -> dict[str, float]:
        """Return the means over the steps since the last call, by their names for loggers."""
        self._drop_foreign()
        return super().metrics()

    def summary(self) -> StageSummary | None:
        """Return where the steps went, or None before the first step ended."""
        self._drop_foreign()
        return super().summary()

    def verdict(self, summary: StageSummary, *, val_stall_share: float | None = None) -> Verdict:
        """Return what limits the stage.

        Args:
            summary: Of this stage.
            val_stall_share: Part of the steps of validation that waited for data, 0 to 1.
        """
        cpus = read_cpu_limit().usable_cpus
        facts = dataclasses.replace(self._facts, usable_cpus=cpus)
        if summary.augment is not None:
            facts = dataclasses.replace(facts, augment_on="device")
        evidence = self.evidence(summary, facts, cpus=float(cpus), val_stall_share=val_stall_share)
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
        """Forget stamps of batches that were read outside of the loop."""
        if not self.running:
            self.stamps.drop_uncut()


def _facts(loader: Any) -> LoaderFacts:
    """Return what a loader says about itself, which may be nothing."""
    augment_on: Literal["cpu", "device"] | None = None
    settled = False
    if isinstance(loader, FastDataLoader) and loader.transform is not None:
        augment_on = "device" if loader.on_device else "cpu"
        settled = not leaves_to_device(loader.transform)
    return dataclasses.replace(read_loader(loader), augment_on=augment_on, augment_settled=settled)


def _unwrapped(loader: Any) -> tuple[Any, str]:
    """Return the loader within others, and what moves its batches to a device; empty: nothing."""
    moves = ""
    while True:
        inner = loader.loader if isinstance(loader, Prefetched) else _inner_of_fabric(loader)
        if inner is None:
            return loader, moves
        if isinstance(loader, Prefetched):
            moves = moves or "prefetch()"
        elif getattr(loader, "device", None) is not None:
            moves = moves or "Fabric"
        loader = inner


def _inner_of_fabric(loader: Any) -> Any:
    # Fabric's wrapper copies its loader's attributes, but the loader itself has no public name. A
    # version without this one is taken for a loader without stamps, and a test fails.
    inner = vars(loader).get("_dataloader") if hasattr(loader, "__dict__") else None
    return inner if isinstance(inner, torch.utils.data.DataLoader) else None


class _EventOn:
    """A timing event on the current stream of one device, whichever device is current."""

    __slots__ = ("_device", "_event")

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._event: Any = cuda_event()

    def record(self) -> object:
        return self._event.record(torch.cuda.current_stream(self._device))

    def query(self) -> bool:
        return bool(self._event.query())

    def elapsed_time(self, end_event: Any) -> float:
        return float(self._event.elapsed_time(end_event._event))


def _events_on(device: torch.device) -> Any:
    return cuda_event if device.index is None else lambda: _EventOn(device)


def window_means(columns: Columns, prefix: str = "data") -> dict[str, float]:
    """Return the scalars of a window of steps, as ``metric_names.STEPS`` has them.

    Cold steps are left out, unless there are no others.

    Args:
        columns: the steps, as from `StepHistory.newest`.
        prefix: ``data`` for training, ``data_val`` for validation.

    Returns:
        Name -> value; what was not measured has no key.
    """
    columns = warm_steps(columns)
    scalars: dict[str, float] = {}
    for phase in ("step", "time_augment", "time_compute", "time_transfer", "time_wait"):
        values = measured(columns[f"{phase.removeprefix('time_')}_ms"])
        if values.size:
            scalars[f"{prefix}/{phase}_ms"] = float(values.mean())
    step, stall = columns["step_ms"], columns["stall_ms"]
    timed = ~np.isnan(step)
    total = float(step[timed].sum())
    if total > 0:
        scalars[f"{prefix}/throughput_samples_per_s"] = (
            float(columns["samples"][timed].sum()) * 1e3 / total
        )
    both = timed & ~np.isnan(stall)
    total, stalled = float(step[both].sum()), float(stall[both].sum())
    if total > 0:
        scalars[f"{prefix}/stall_percent"] = 100.0 * stalled / total
        if total > stalled:
            free = float(columns["samples"][both].sum()) * 1e3 / (total - stalled)
            scalars[f"{prefix}_headroom/throughput_if_data_were_free_samples_per_s"] = free
            scalars[f"{prefix}_headroom/speedup_possible"] = total / (total - stalled)
    for phase in ("step", "stall", "compute"):
        values = measured(columns[f"{phase}_ms"])
        if values.size:
            p50, p95 = p50_and_p95(values)
            scalars[f"{prefix}_band/{phase}_p50_ms"] = p50
            scalars[f"{prefix}_band/{phase}_p95_ms"] = p95
            scalars[f"{prefix}_band/{phase}_max_ms"] = float(values.max())
    return dict(sorted(scalars.items()))


class MetricWindow:
    """Window means since they were last asked for.

    Args:
        history: where the steps are recorded.
        prefix: ``data`` for training, ``data_val`` for validation.
    """

    __slots__ = ("_history", "_prefix", "_seen")

    def __init__(self, history: StepHistory, prefix: str = "data") -> None:
        self._history = history
        self._prefix = prefix
        self._seen = history.steps

    def take(self) -> dict[str, float]:
        """Return `window_means` of the steps since the last call; empty if there were none.

        Of more steps than the history keeps, only the kept ones count.
        """
        new = self._history.steps - self._seen
        self._seen = self._history.steps
        return window_means(self._history.newest(new), self._prefix) if new else {}
