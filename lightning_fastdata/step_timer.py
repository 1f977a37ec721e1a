"""Where the steps of any loop go: plain PyTorch, Fabric, or something of one's own."""

from __future__ import annotations

from collections.abc import Generator, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Literal

from torch.utils.data import DataLoader

from lightning_fastdata.device.backend import default_type, device_of
from lightning_fastdata.device.prefetch import Prefetched
from lightning_fastdata.errors import OptionsError, check_among
from lightning_fastdata.host.cpu import read_cpu_limit
from lightning_fastdata.host.machine import describe_machine, read_versions
from lightning_fastdata.insight.finding import LoaderFacts, class_of_settings, read_loader
from lightning_fastdata.insight.report import RunReport
from lightning_fastdata.insight.stage import StageMeter, not_known
from lightning_fastdata.insight.steps import StageSummary
from lightning_fastdata.insight.verdict import Verdict, judge
from lightning_fastdata.insight.wall import loop_time
from lightning_fastdata.prove import read_settings
from lightning_fastdata.tree import held
from lightning_fastdata.types import STAGES, AroundLoader, B, Batch, Batch_co, Stage

if TYPE_CHECKING:
    import torch


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
        OptionsError: ``device`` is no device, or this machine does not have it.

    Example:
        >>> timer = StepTimer()
        >>> for epoch in range(3):
        ...     for images, labels in timer.batches(loader):
        ...         with timer.transfer():  # optional
        ...             images, labels = images.to(device), labels.to(device)
        ...         step(images, labels)
        >>> print(timer.report())
    """

    def __init__(self, device: torch.device | str | int | None = None) -> None:
        self.device = device_of(default_type() if device is None else device)
        self._stages: dict[Stage, LoopStage] = {}
        self._reading: dict[Stage, object] = {}
        """Stage -> token of the newest iteration of one of its loaders."""
        self._running: LoopStage | None = None
        self._size: int | None = None
        """Number of samples in the open step; None: no step is open."""

    def batches(self, loader: Iterable[B], stage: Stage = "train") -> TimedBatches[B]:
        """Return the batches of a loader, each of which begins a step.

        A step that the loop leaves by ``break``, ``return`` or an exception is not counted, as it
        is not known how far it got, unless :meth:`step_ended` was called. While batches of
        another stage are read (a validation in the middle of training), the step before them has
        ended. Several loaders that are read in the same steps are one: ``batches(zip(a, b))``.

        Args:
            loader: A ``FastDataLoader``, which also shows why its batches are late; any other
                ``DataLoader``, what ``prefetch`` or ``fabric.setup_dataloaders`` return, or any
                iterable. What delivers batches on the device already has the transfer in the wait.
            stage: What the steps are for; each stage is reported by itself.

        Returns:
            An iterable of the loader's length. Each iteration is an epoch, whose first step is
            counted apart. Other attributes are the loader's.

        Raises:
            OptionsError: There is no such stage, or the loader cannot be iterated; when it is
                iterated: another loader of this stage has been begun since.
        """
        check_among("stage", stage, STAGES)
        if not isinstance(loader, Iterable):
            raise OptionsError(
                f"batches() got {loader!r} for a loader, which cannot be iterated; pass a "
                "DataLoader or another iterable of batches."
            )
        return TimedBatches(self, loader, stage)

    def transfer(self) -> AbstractContextManager[None]:
        """Return a context in which the batch is moved to the device; without effect elsewhere."""
        return self._phase("transfer")

    def augment(self) -> AbstractContextManager[None]:
        """Return a context in which transforms run on the device.

        Within :meth:`transfer` its time is taken off the transfer.
        """
        return self._phase("augment")

    @contextmanager
    def _phase(self, name: str) -> Iterator[None]:
        """Return a context that times a part of the step that is open then, if one is."""
        stage = self._running if self._size is not None else None
        timeline = None if stage is None else stage.timeline
        if timeline is not None:
            getattr(timeline, f"{name}_began")()
        try:
            yield
        finally:
            if timeline is not None:
                getattr(timeline, f"{name}_ended")()

    def step_ended(self) -> None:
        """End the step here. What the loop does until it asks for the next batch is a gap."""
        size, self._size = self._size, None
        if size is not None and self._running is not None:
            self._running.step_ended(size)

    def metrics(self) -> dict[str, float]:
        """Return the means over the steps since the last call, for any logger.

        Returns:
            The names and units of ``DataThroughputCallback``: ``data/step_ms``,
            ``data/stall_percent``, ``data_wait/read_cpu_ms`` and so on, for other stages
            ``data_val/...``. Empty if no step has ended.
        """
        return {name: v for each in self._stages.values() for name, v in each.metrics().items()}

    def report(self) -> RunReport:
        """Return everything measured so far: stages, what limits the first of them, and why.

        On a GPU the newest steps, which it has not reached, are left out.
        """
        found = {name: self._stages[name].summary() for name in STAGES if name in self._stages}
        measured = {name: summary for name, summary in found.items() if summary is not None}
        stages = [self._stages[name] for name in measured]
        verdict = waited = None
        if stages:
            first, val = stages[0], measured.get("val") if "train" in measured else None
            val_facts = self._stages["val"].facts if val is not None else LoaderFacts()
            verdict = first.verdict(measured[first.stage], val, val_facts)
        late = [each for each in stages if measured[each.stage].stalls]
        if "train" in measured:
            trained = [each for each in stages if each.stage in ("train", "val")]
            waited = sum(each.timeline.history.stalled_s() for each in trained) / 60
        return RunReport(
            stages=tuple(measured.values()),
            verdict=verdict,
            device_minutes_waited=waited,
            recent={each.stage: each.timeline.history.newest() for each in stages},
            notes=not_known(late),
            versions=read_versions(),
            machine=describe_machine(self.device),
        )

    def _iterate(self, loader: Iterable[B], name: Stage) -> Generator[B, None, None]:
        stage = self._stages.setdefault(name, LoopStage(name, self.device))
        if name in self._reading:  # an iterator was left before its end
            self._left(stage)
        self.step_ended()
        self._reading[name] = reader = object()
        read, first = stage.epoch_began(loader), True
        try:
            self._asked(stage)  # workers start in iter()
            batches = iter(loader)
            while True:
                try:
                    taken = [next(batches)]
                except StopIteration:
                    return
                stage.timeline.wait_ended()
                if first:
                    stage.changes.epoch_began(read)
                stage.padding.look(taken[0])
                self._size = stage.size_of(taken[0])
                yield taken.pop()  # so that the memory is free when the loop lets go of it
                if self._reading.get(name) is not reader:
                    raise OptionsError(
                        f"Another loader of stage={name!r} was begun meanwhile. Read several in "
                        "the same steps as one: batches(zip(a, b))."
                    )
                if first:
                    self.step_ended()
                    stage.changes.first_step_ended(read)
                first = False
                self._asked(stage)
        finally:
            if self._reading.get(name) is reader:
                del self._reading[name]
                self._left(stage)

    def _asked(self, stage: LoopStage) -> None:
        """Begin a step of a stage, which ends the one that is open."""
        self.step_ended()
        if self._running is not stage and self._running is not None:
            self._running.paused()
        self._running = stage
        stage.wait_began()

    def _left(self, stage: LoopStage) -> None:
        """Forget the step of a stage that has not ended."""
        if self._running is stage:
            self._running = self._size = None
        stage.epoch_ended()


class TimedBatches(AroundLoader[Batch_co]):
    """Batches of a loader that begin steps, as :meth:`StepTimer.batches` returns them."""

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


class LoopStage(StageMeter):
    """A stage of the user's own loop, whose loader is known only while it is read."""

    def __init__(self, stage: Stage, device: torch.device) -> None:
        super().__init__(stage, device)
        self.facts = LoaderFacts()
        """What the loader that was read last says about itself."""
        self._settings_in: Literal["FastDataLoader", "DataLoader"] = "DataLoader"
        self._zipped = False
        """Whether each batch is a tuple with one of each of several loaders."""

    def epoch_began(self, loader: object) -> object:
        """Note that a loader is about to be iterated; return it without what wraps it."""
        self.timeline.epoch_began()
        self._zipped = isinstance(loader, zip)
        loader = _unwrapped(loader)
        self.facts = read_loader(loader)
        self._settings_in = class_of_settings(loader)
        self.stamps.watch([loader])
        return loader

    def size_of(self, batch: Batch) -> int:
        """Return the samples of a batch of all loaders; 0: not known."""
        self.parts = tuple((i,) for i in range(len(batch))) if self._zipped else ((),)
        return super().size_of(batch)

    def epoch_ended(self) -> None:
        """Stop measuring the loader: batches that are read from it now belong to no step."""
        self.timeline.drop_open_step()
        self.stamps.stop()
        self.paused()

    def verdict(
        self, summary: StageSummary, val: StageSummary | None, val_facts: LoaderFacts
    ) -> Verdict:
        """Return what limits the stage, given its validation, if there is one."""
        cpus = read_cpu_limit().usable_cpus
        loader = replace(self.changes.heeded(self.facts), usable_cpus=cpus)
        closed = {f"val.{option}": why for option, why in val_facts.closed.items()}
        loader = replace(loader, closed={**loader.closed, **closed})
        if summary.augment is not None:
            loader = replace(loader, augment_on="device")
        return judge(
            self.evidence(
                summary,
                loader,
                settings_in=self._settings_in,
                wall=loop_time(summary, val),
                val_workers=val_facts.num_workers,
            )
        )


def _unwrapped(loader: object) -> object:
    """Return the loader inside its wrappers, which may move its batches to the device."""
    while True:
        if isinstance(loader, Prefetched):
            loader = loader.loader
            continue
        # Fabric's wrapper copies its loader's attributes, but the loader itself has no public name.
        # If a version lacks this name, no stamps are taken, and a test fails.
        inner = held(loader, "_dataloader")
        if not isinstance(inner, DataLoader):
            return loader
        loader = inner
