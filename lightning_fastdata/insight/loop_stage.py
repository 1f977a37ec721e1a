"""One stage of a loop that nobody but its author knows: its steps, its loaders, what limits it."""

from __future__ import annotations

import dataclasses
import time
import weakref
from collections import deque
from collections.abc import Sized
from typing import TYPE_CHECKING, Any, Final, Literal

import torch

from lightning_fastdata.augment.switching import leaves_to_device
from lightning_fastdata.host.cpu import read_cpu_limit
from lightning_fastdata.host.spent import SpentMeter
from lightning_fastdata.insight.causes import CauseTotals
from lightning_fastdata.insight.clock import CudaClock, HostClock, cuda_event
from lightning_fastdata.insight.evidence import stage_evidence
from lightning_fastdata.insight.outside import LoaderFacts
from lightning_fastdata.insight.sample_files import sample_path
from lightning_fastdata.insight.setups import setup_of, stage_times, step_cpus, step_queued
from lightning_fastdata.insight.timeline import StepTimeline
from lightning_fastdata.insight.verdict import judge
from lightning_fastdata.insight.window import MetricWindow
from lightning_fastdata.loading.loader import FastDataLoader
from lightning_fastdata.loading.moving import leaves
from lightning_fastdata.loading.prefetch import Prefetched

if TYPE_CHECKING:
    from lightning_fastdata.insight.metrics import StageSummary
    from lightning_fastdata.insight.verdict import Verdict
    from lightning_fastdata.loading.stamps import BatchStamps
    from lightning_fastdata.types import Batch, Stage

_MOST_UNCUT: Final = 256
"""Waits are cut when somebody asks, but at the latest when so many have come together."""
_KEPT_STAMPS: Final = 512
"""The newest batches of each loader are kept for predictions."""


class _Watched:
    """The stamps of one loader."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.records = StampQueue(maxlen=2 * _MOST_UNCUT)
        self.newest: deque[BatchStamps] = deque(maxlen=_KEPT_STAMPS)

    @property
    def waited_ns(self) -> int:
        return sum(batch.delivered_ns - batch.requested_ns for batch in self.newest)


class StampQueue(deque["BatchStamps"]):
    """Stamps that a loader records for a loop; a later loop takes the loader over.

    It is bounded, as nobody cuts the stamps of batches that are read outside of the loop.
    """


class LoopStage:
    """The timeline of one stage, the stamps of its loaders, and the time it has covered.

    Args:
        stage: What the steps are for.
        device: What computes.
        host: The clock for waits.
    """

    def __init__(self, stage: Stage, device: torch.device, host: HostClock) -> None:
        self.stage: Stage = stage
        self.device = device
        clock = CudaClock(new_event=_events_on(device)) if device.type == "cuda" else None
        self.timeline = StepTimeline(host=host, device=clock)
        prefix = "data" if stage == "train" else f"data_{stage}"
        self._window = MetricWindow(self.timeline.history, prefix)
        self._totals = CauseTotals(prefix)
        self._watched: weakref.WeakKeyDictionary[FastDataLoader, _Watched] = (
            weakref.WeakKeyDictionary()
        )
        self._records: StampQueue | None = None
        self._facts = LoaderFacts()
        self._moved_by: dict[str, None] = {}
        self._stampless: dict[str, None] = {}
        self._duration_s = 0.0
        self._last: float | None = None
        self._cpu = SpentMeter()

    def epoch_began(self, loader: Any) -> None:
        """Note that a loader is about to be iterated."""
        self.timeline.epoch_began()
        loader, moves = _unwrapped(loader)
        if moves:
            self._moved_by[moves] = None
        self._facts = _facts(loader)
        if not isinstance(loader, FastDataLoader):
            kind = type(loader).__name__
            self._stampless[f"a {kind} takes no stamps, as FastDataLoader does"] = None
        elif loader.records is None or isinstance(loader.records, StampQueue):
            watched = self._watched.setdefault(loader, _Watched(len(self._watched)))
            self._cut(watched)
            loader.record_stamps(watched.records)
            self._records = watched.records
        else:
            self._stampless["somebody else takes the stamps of its loader"] = None

    def wait_began(self) -> None:
        """Note that a batch is asked for."""
        if self._last is None:
            self._last = time.monotonic()
            self._cpu.began()
        self.timeline.wait_began()

    def step_ended(self, samples: int) -> None:
        """Close the step."""
        self.timeline.compute_ended(samples)
        now = time.monotonic()
        if self._last is not None:
            self._duration_s += now - self._last
        self._last = now
        if self._records is not None and len(self._records) > _MOST_UNCUT:
            self._cut_all()

    def paused(self) -> None:
        """Do not count the time until the next batch of this stage is asked for."""
        self._cut_all()
        self._last = None
        self._cpu.paused()

    def metrics(self) -> dict[str, float]:
        """Return the means over the steps since the last call, by their names for loggers."""
        self.timeline.poll()
        self._cut_all()
        return {**self._window.take(), **self._totals.window()}

    def summary(self) -> StageSummary | None:
        """Return where the steps went, or None before the first step ended."""
        history = self.timeline.history
        if history.steps == 0:
            return None
        self._cut_all()
        summary = history.summarize(
            self.stage,
            duration_s=self._duration_s,
            device=self.device.type,
            dropped_steps=self.timeline.dropped_steps,
        )
        return dataclasses.replace(summary, causes=self._totals.summary(self._path_of))

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
        setup, stamps, queued = None, [], 0.0
        # The loader that was waited for most.
        watched = max(self._watched.items(), key=lambda item: item[1].waited_ns, default=None)
        if watched is not None and watched[1].newest:
            stamps = list(watched[1].newest)
            times = stage_times(summary, stamps, self._cpu.used())
            setup = setup_of(watched[0], cpus=float(cpus), step_cpus=step_cpus(**times))
            queued = step_queued(**times)
        evidence = stage_evidence(
            summary,
            stamps,
            setup,
            facts,
            step_queued=queued,
            val_stall_share=val_stall_share,
        )
        return judge(summary, facts, evidence)

    def not_known(self) -> tuple[str, ...]:
        """Return what is not known, and why; several stages may say the same."""
        transfer = "The wait includes the transfer: {} moves each batch before it delivers it."
        told = [transfer.format(moves) for moves in self._moved_by]
        if not any(watched.newest for watched in self._watched.values()):
            executors = {f"executor {each.executor!r} takes no stamps" for each in self._watched}
            reasons = ", ".join(self._stampless or sorted(executors)) or "no stamps were taken"
            told.append(f"Why batches were late is not known: {reasons}.")
        return tuple(told)

    def _cut_all(self) -> None:
        for watched in self._watched.values():
            self._cut(watched)

    def _cut(self, watched: _Watched) -> None:
        if self._last is None:
            # Stamps of batches that somebody read outside of the loop.
            watched.records.clear()
        while watched.records:
            batch = watched.records.popleft()
            self._totals.add(batch, watched.number)
            watched.newest.append(batch)

    def _path_of(self, number: int, index: Any) -> str | None:
        for loader, watched in self._watched.items():
            if watched.number == number:
                return sample_path(loader.dataset, index)
        return None


def batch_samples(batch: Batch) -> int:
    """Return the number of samples in a batch: the first dimension of its first tensor.

    Without any tensor it is the length of the batch, or 1 where it has none.
    """
    for leaf in leaves(batch):
        if getattr(leaf, "ndim", 0):
            return int(leaf.shape[0])
    return len(batch) if isinstance(batch, Sized) else 1


def _facts(loader: Any) -> LoaderFacts:
    """Return what a loader says about itself, which may be nothing."""
    workers = getattr(loader, "num_workers", None)
    augment_on: Literal["cpu", "device"] | None = None
    settled = False
    if isinstance(loader, FastDataLoader) and loader.transform is not None:
        augment_on = "device" if loader.on_device else "cpu"
        settled = not leaves_to_device(loader.transform)
    return LoaderFacts(
        num_workers=workers,
        augment_on=augment_on,
        augment_settled=settled,
        pinned=getattr(loader, "pin_memory", None),
        persistent_workers=getattr(loader, "persistent_workers", None) if workers else None,
    )


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
