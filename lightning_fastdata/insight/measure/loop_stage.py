"""One stage of a loop that the user wrote: its steps, its loaders, what limits it."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any, Literal

import torch

from lightning_fastdata.augment.stage_transform import leaves_to_device
from lightning_fastdata.device.prefetch import Prefetched
from lightning_fastdata.host.cpu import read_cpu_limit
from lightning_fastdata.insight.measure.clock import CudaClock, HostClock, cuda_event
from lightning_fastdata.insight.measure.stage_meter import StageMeter
from lightning_fastdata.insight.measure.stage_stamps import StageStamps
from lightning_fastdata.insight.model.loader_facts import LoaderFacts, read_loader
from lightning_fastdata.insight.verdicts.verdict import judge
from lightning_fastdata.loading.loader import FastDataLoader

if TYPE_CHECKING:
    from lightning_fastdata.insight.measure.metrics import StageSummary
    from lightning_fastdata.insight.verdicts.verdict import Verdict
    from lightning_fastdata.types import Stage


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
