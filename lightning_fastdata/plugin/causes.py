"""Why batches were late: the stamps of a trainer's loaders, from setup to teardown."""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, Final

from lightning_fastdata.insight.causes import CauseTotals
from lightning_fastdata.insight.evidence import busy_share
from lightning_fastdata.insight.sample_files import sample_path
from lightning_fastdata.loading.loader import FastDataLoader

if TYPE_CHECKING:
    from lightning_fastdata.insight.causes import WaitCauses
    from lightning_fastdata.loading.stamps import BatchStamps
    from lightning_fastdata.types import Stage

_MOST_UNCUT: Final = 256
"""Waits are cut when something is logged, but at the latest when so many have come together."""
_KEPT_STAMPS: Final = 512
"""The newest batches of each loader are kept for predictions."""


class StageCauses:
    """The stamps of one stage's loaders, and what the waits for their batches were made of.

    Args:
        stage: ``"train"`` or ``"val"``.
        prefix: Of the names for loggers.
    """

    def __init__(self, stage: Stage, prefix: str) -> None:
        self.stage: Stage = stage
        self.prefix = prefix
        self._totals = CauseTotals(prefix)
        self._records: list[deque[BatchStamps]] = []
        self._newest: list[deque[BatchStamps]] = []
        self._loaders: list[weakref.ref[FastDataLoader]] = []
        self._unwatched: dict[str, None] = {}
        self._stamped = False

    def watch(self, loaders: Any) -> None:
        """Have each FastDataLoader among some loaders record its stamps, if none does so yet."""
        for loader in flattened(loaders):
            if not isinstance(loader, FastDataLoader):
                kind = type(loader).__name__
                self._unwatched[f"a {kind} takes no stamps, as FastDataLoader does"] = None
            elif loader.records is None:
                records: deque[BatchStamps] = deque()
                loader.record_stamps(records)
                self._records.append(records)
                self._newest.append(deque(maxlen=_KEPT_STAMPS))
                self._loaders.append(weakref.ref(loader))
            else:
                self._recognize(loader)

    def _recognize(self, loader: FastDataLoader) -> None:
        """Note a loader that records already: for us, if Lightning made it from one of ours."""
        for number, records in enumerate(self._records):
            if loader.records is records:
                self._loaders[number] = weakref.ref(loader)
                return
        self._unwatched["somebody else takes the stamps of its loader"] = None

    def restart(self) -> None:
        """Forget what was recorded so far."""
        self._totals = CauseTotals(self.prefix)
        for records in (*self._records, *self._newest):
            records.clear()

    def stop(self) -> None:
        """Take no more stamps; what was taken is kept."""
        for number, reference in enumerate(self._loaders):
            loader = reference()
            if loader is not None and loader.records is self._records[number]:
                loader.record_stamps(None)

    def step_ended(self) -> None:
        """Cut what has come together, if it is much."""
        for records in self._records:
            if len(records) > _MOST_UNCUT:
                self._cut()
                return

    def metrics(self) -> dict[str, float]:
        """Return the mean parts of the waits since the last call, by their names for loggers."""
        self._cut()
        return self._totals.window()

    def summary(self) -> WaitCauses | None:
        """Return why batches were late, or None without stamps."""
        self._cut()
        return self._totals.summary(self._path_of)

    def slowest_loader(self) -> tuple[FastDataLoader | None, list[BatchStamps]]:
        """Return the loader that was waited for most of late, and its newest stamps.

        The loader is None if it is gone, and there are no stamps if none were taken.
        """
        self._cut()
        if not self._newest:
            return None, []
        waits = [
            sum(batch.delivered_ns - batch.requested_ns for batch in newest)
            for newest in self._newest
        ]
        number = waits.index(max(waits))
        return self._loaders[number](), list(self._newest[number])

    def busy_share(self) -> float | None:
        """Return the part of the time in which that loader's workers had a task; None if unknown.

        Over its newest batches, 0 to 1, the mean over workers.
        """
        loader, stamps = self.slowest_loader()
        return None if loader is None else busy_share(stamps, loader.num_workers)

    def missing(self) -> str | None:
        """Return why nothing is known about the waits; None if something is."""
        if self._stamped:
            return None
        executors = {
            f"executor {loader.executor!r} takes no stamps": None
            for reference in self._loaders
            if (loader := reference()) is not None
        }
        return ", ".join(self._unwatched or executors) or "no stamps were taken"

    def _cut(self) -> None:
        for number, records in enumerate(self._records):
            self._stamped |= bool(records)
            newest = self._newest[number]
            while records:
                batch = records.popleft()
                self._totals.add(batch, number)
                newest.append(batch)

    def _path_of(self, number: int, index: Any) -> str | None:
        loader = self._loaders[number]()
        return None if loader is None else sample_path(loader.dataset, index)


def watch_sources(trainer: Any, watch: Callable[[Stage, Any], None]) -> Callable[[], None]:
    """Show a trainer's loaders before they are iterated, and return what stops that.

    Lightning calls no hook between getting a loader and starting its workers. It asks an object of
    its own for the loaders, which has no public name; where a version has no such object, the
    loaders are seen when the training starts, and a test tells.

    Args:
        trainer: Before it has any loader.
        watch: Called with ``"train"`` or ``"val"`` and the loaders, in whatever form they come.
    """
    fit = trainer.fit_loop
    loops: list[tuple[Stage, Any]] = [
        ("train", fit),
        ("val", getattr(getattr(fit, "epoch_loop", None), "val_loop", None)),
        ("val", getattr(trainer, "validate_loop", None)),
    ]
    shown = []
    for stage, loop in loops:
        source = getattr(loop, "_data_source", None)
        ask = getattr(source, "dataloader", None)
        if callable(ask) and hasattr(source, "__dict__"):
            vars(source)["dataloader"] = _ShownLoaders(ask, stage, watch)
            shown.append(source)

    def stop() -> None:
        for source in shown:
            vars(source).pop("dataloader", None)

    return stop


def causes_note(stages: Iterable[StageCauses]) -> tuple[str, ...]:
    """Return what has to be said of stages for which nothing is known about the waits."""
    missing = {stage.stage: why for stage in stages if (why := stage.missing()) is not None}
    if not missing:
        return ()
    names, reasons = " and ".join(missing), "; ".join(dict.fromkeys(missing.values()))
    return (f"Why batches were late is not known for {names}: {reasons}.",)


class _ShownLoaders:
    """Asks for loaders and shows them to somebody."""

    def __init__(
        self, ask: Callable[[], Any], stage: Stage, watch: Callable[[Stage, Any], None]
    ) -> None:
        self.ask = ask
        self.stage = stage
        self.watch = watch

    def __call__(self) -> Any:
        loaders = self.ask()
        self.watch(self.stage, loaders)
        return loaders

    def __reduce__(self) -> tuple[Any, ...]:
        # A copy of the trainer is not measured.
        return _itself, (self.ask,)


def _itself(value: Any) -> Any:
    return value


def flattened(loaders: Any) -> Iterator[Any]:
    """Return a trainer's loaders one by one, in whatever form they come."""
    if loaders is None:
        return
    # Lightning's CombinedLoader.
    loaders = getattr(loaders, "flattened", loaders)
    if isinstance(loaders, Mapping):
        loaders = list(loaders.values())
    if isinstance(loaders, list | tuple):
        for loader in loaders:
            yield from flattened(loader)
    else:
        yield loaders
