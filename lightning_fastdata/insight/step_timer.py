"""Where the steps of any loop go: plain PyTorch, Fabric, or something of one's own."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Generator, Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic

from lightning_fastdata.batches.staged import batch_samples
from lightning_fastdata.device.backend import default_type, device_of
from lightning_fastdata.errors import OptionsError
from lightning_fastdata.host.machine import describe_machine, read_versions
from lightning_fastdata.insight.measure.stage import LoopStage
from lightning_fastdata.insight.measure.timeline import StepTimeline
from lightning_fastdata.insight.report.run_report import RunReport
from lightning_fastdata.prove.settings import read_settings
from lightning_fastdata.types import STAGES, Batch_co

if TYPE_CHECKING:
    import torch

    from lightning_fastdata.types import B, Stage


class StepTimer:
    """Measures where the steps of a training loop go, and says what limits them.

    For loops that are no Lightning Trainer's. The loop reads its batches through :meth:`batches`,
    and that is all it has to do. A step begins when a batch is asked for and ends when the next one
    is, or at :meth:`step_ended`. Waits, transfers, augmentation and compute are measured as
    ``DataThroughputCallback`` does it: on a GPU by events that are read late and never waited for.

    Args:
        device: What computes, as for ``torch.device``. Default: the current accelerator if there is
            one, else the CPU. Devices without streams are measured by the clock of the host, for
            which their work is done when it is queued.

    Raises:
        OptionsError: ``device`` is no device.

    Example:
        >>> timer = StepTimer()
        >>> for epoch in range(3):
        ...     for images, labels in timer.batches(loader):
        ...         with timer.transfer():  # optional
        ...             images, labels = images.to(device), labels.to(device)
        ...         step(images, labels)
        >>> print(timer.report())
    """

    def __init__(
        self,
        device: torch.device | str | int | None = None,
    ) -> None:
        if device is None:
            device = default_type()
        try:
            self.device = device_of(device)
        except (RuntimeError, TypeError) as error:
            raise OptionsError(
                f"device={device!r} is no device: {error}. Pass 'cpu', 'cuda' or a torch.device."
            ) from error
        self._stages: dict[Stage, LoopStage] = {}
        self._readers = itertools.count()
        self._running: LoopStage | None = None
        self._open: _OpenStep | None = None
        self._transfer = Phase(self, StepTimeline.transfer_began, StepTimeline.transfer_ended)
        self._augment = Phase(self, StepTimeline.augment_began, StepTimeline.augment_ended)

    def batches(self, loader: Iterable[B], stage: Stage = "train") -> TimedBatches[B]:
        """Return the batches of a loader, each of which begins a step.

        A step that the loop leaves by ``break``, ``return`` or an exception is not counted, as it
        is not known how far it got, unless :meth:`step_ended` was called. While batches of
        another stage are read (a validation in the middle of training), the step before them has
        ended. Several loaders of one stage may be read in one step, as by ``zip``: the step ends
        when one of them is asked again, and their waits add up.

        Args:
            loader: A ``FastDataLoader``, which also shows why its batches are late; any other
                ``DataLoader``, what ``prefetch`` or ``fabric.setup_dataloaders`` return, or any
                iterable. What delivers batches on the device already has the transfer in the wait.
            stage: What the steps are for; each stage is reported by itself.

        Returns:
            An iterable of the loader's length. Each iteration is an epoch, whose first step is
            counted apart. Other attributes are the loader's.

        Raises:
            OptionsError: There is no such stage, or the loader cannot be iterated.
        """
        if stage not in STAGES:
            raise OptionsError(f"stage={stage!r} is none of {', '.join(STAGES)}.")
        if not isinstance(loader, Iterable):
            raise OptionsError(
                f"batches() got {loader!r} for a loader, which cannot be iterated; pass a "
                "DataLoader or another iterable of batches."
            )
        return TimedBatches(self, loader, stage)

    def transfer(self) -> Phase:
        """Return a context in which the batch is moved to the device; without effect elsewhere."""
        return self._transfer

    def augment(self) -> Phase:
        """Return a context in which transforms run on the device.

        Within :meth:`transfer` its time is taken off the transfer.
        """
        return self._augment

    def step_ended(self) -> None:
        """End the step here. What the loop does until it asks for the next batch is a gap."""
        step, self._open = self._open, None
        if step is not None:
            step.stage.step_ended(step.samples)

    def metrics(self) -> dict[str, float]:
        """Return the means over the steps since the last call, for any logger.

        Returns:
            The names and units of ``DataThroughputCallback``: ``data/step_ms``,
            ``data/stall_percent``, ``data_wait/read_cpu_ms`` and so on, for other stages
            ``data_val/...``. Empty if no step has ended.
        """
        return {name: v for stage in self._in_order() for name, v in stage.metrics().items()}

    def report(self) -> RunReport:
        """Return everything measured so far: stages, what limits the first of them, and why.

        On a GPU the newest steps, which it has not reached, are left out.
        """
        measured = [(s, summary) for s in self._in_order() if (summary := s.summary()) is not None]
        summaries = {stage.stage: summary for stage, summary in measured}
        verdict = None
        if measured:
            first, summary = measured[0]
            val = summaries.get("val") if first.stage == "train" else None
            verdict = first.verdict(summary, val)
        return RunReport(
            stages=tuple(summary for _, summary in measured),
            verdict=verdict,
            device_minutes_waited=self._minutes_waited(),
            recent={stage.stage: stage.timeline.history.newest() for stage, _ in measured},
            notes=tuple(dict.fromkeys(n for stage, _ in measured for n in stage.not_known())),
            versions=read_versions(),
            machine=describe_machine(self.device),
        )

    def _minutes_waited(self) -> float | None:
        """Return how long the device of this process waited for data while it trained."""
        train = self._stages.get("train")
        if train is None or not train.timeline.history.steps:
            return None
        stages = [stage for stage in self._in_order() if stage.stage in ("train", "val")]
        return sum(stage.timeline.history.stalled_s() for stage in stages) / 60

    def _in_order(self) -> list[LoopStage]:
        return [self._stages[name] for name in STAGES if name in self._stages]

    def _iterate(self, loader: Iterable[B], name: Stage) -> Generator[B, None, None]:
        stage = self._stages.get(name)
        if stage is None:
            stage = self._stages[name] = LoopStage(name, self.device)
        reader = next(self._readers)
        self._requested(stage, reader)
        stage.epoch_began(loader)
        stage.wait_began()  # workers start in iter()
        try:
            batches = iter(loader)
            while True:
                try:
                    held = [next(batches)]
                except StopIteration:
                    break
                stage.timeline.wait_ended()
                if self._open is None:
                    self._open = _OpenStep(stage, batch_samples(held[0]), [reader])
                else:
                    self._open.readers.append(reader)
                yield held.pop()  # so that the memory is free when the loop lets go of it
                self._requested(stage, reader)
                stage.wait_began()
            if self._open is not None:
                # The step of other loaders goes on; this one had nothing more for it.
                stage.timeline.wait_ended()
        finally:
            self._left(stage, reader)

    def _requested(self, stage: LoopStage, reader: int) -> None:
        """End the step that is open, unless it only needs a batch of one more loader."""
        step = self._open
        if step is not None:
            outer = reader < step.readers[0]  # of two loops, one within the other
            if outer or reader in step.readers or step.stage is not stage:
                self.step_ended()
        if self._running is not stage:
            if self._running is not None:
                self._running.paused()
                self._running.timeline.resumed()
            self._running = stage

    def _left(self, stage: LoopStage, reader: int) -> None:
        """Forget what has not ended, unless other loaders' step goes on."""
        if self._open is not None and reader in self._open.readers:
            self._open = None
        if self._open is None:
            stage.timeline.drop_open_step()
            stage.paused()
            self._running = None


class TimedBatches(Generic[Batch_co]):
    """What :meth:`StepTimer.batches` returns."""

    def __init__(self, timer: StepTimer, loader: Iterable[Batch_co], stage: Stage) -> None:
        self.loader = loader
        self.stage: Stage = stage
        self._timer = timer

    def __iter__(self) -> Iterator[Batch_co]:
        """Begin an epoch; under ``fastdata prove``, a trial in its place."""
        loader = self.loader
        settings = read_settings() if self.stage == "train" else None
        if settings is not None:
            from lightning_fastdata.prove.session import trial_of_loop

            loader = trial_of_loop(settings, loader, self._timer.device)
        return self._timer._iterate(loader, self.stage)

    def __len__(self) -> int:
        """Batches of the loader; a TypeError if it has no length."""
        return len(self.loader)  # type: ignore[arg-type]

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name == "loader":
            raise AttributeError(name)
        return getattr(self.loader, name)


@dataclass(slots=True)
class Phase:
    """A part of whichever step is open when it is entered; without effect if none is."""

    _timer: StepTimer
    _began: Callable[[StepTimeline], None]
    _ended: Callable[[StepTimeline], None]
    _timeline: StepTimeline | None = None

    def __enter__(self) -> None:
        step = self._timer._open
        self._timeline = None if step is None else step.stage.timeline
        if self._timeline is not None:
            self._began(self._timeline)

    def __exit__(self, *error: object) -> None:
        if self._timeline is not None:
            self._ended(self._timeline)


@dataclass(slots=True)
class _OpenStep:
    """A step that has not ended."""

    stage: LoopStage
    samples: int
    readers: list[int]
    """Numbers of the iterations that have delivered a batch for it, the first one first."""
