"""A loader read with one number of workers after the other: how fast it is with each."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Protocol, Self

from lightning_fastdata.errors import OptionsError, require
from lightning_fastdata.host import clock
from lightning_fastdata.tuning.moves import GOOD_ENOUGH, WORKERS

_LEAST_BATCHES: Final = 8
_WARM_BATCHES: Final = 8
_BAR: Final = 30
_NO_BETTER: Final = 2
"""Numbers of workers in a row that are no faster end a sweep."""


class Sweepable(Protocol):
    """A loader, of which copies with other numbers of workers may be made."""

    @property
    def num_workers(self) -> int:
        """Side processes that read; 0: none."""

    def with_workers(self, workers: int) -> Self:
        """Return a copy, not read yet, with another number of workers; 0: none."""

    def close(self) -> None:
        """Stop the workers."""

    def __iter__(self) -> Iterator[Any]: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Sweep:
    """What a loader gives with several numbers of workers."""

    name: str
    planned: int
    """The number that was planned, without a sweep."""
    batches_per_s: dict[int, float]
    """By number of workers; the planned one is among them."""
    batch_size: int | None
    step_ms: float
    """What was done with each batch, besides reading it: a sleep."""

    @property
    def best(self) -> int:
        """The smallest number that is within 3 % of the fastest."""
        fastest = max(self.batches_per_s.values())
        good = (n for n, rate in self.batches_per_s.items() if GOOD_ENOUGH * rate >= fastest)
        return min(good)

    @property
    def plan_share(self) -> float:
        """What the plan reaches of the fastest, 0 to 1."""
        return self.batches_per_s[self.planned] / max(self.batches_per_s.values())

    def text(self) -> str:
        """Return the table, what the plan reaches, and the setting as YAML."""
        fastest = max(self.batches_per_s.values())
        step = f", with a step of {self.step_ms:g} ms" if self.step_ms else ", nothing else done"
        lines = [f"{self.name}{step}", f"{'workers':>8}  {'batches/s':>9}  {'samples/s':>9}"]
        for number, rate in sorted(self.batches_per_s.items()):
            samples = f"{rate * self.batch_size:9.0f}" if self.batch_size else f"{'':9}"
            bar = "█" * round(_BAR * rate / fastest)
            marks = ["best"] * (number == self.best) + ["planned"] * (number == self.planned)
            lines.append(f"{number:8}  {rate:9.1f}  {samples}  {bar:<{_BAR}} {', '.join(marks)}")
        return "\n".join(
            [
                *(line.rstrip() for line in lines),
                f"The plan without a sweep reaches {self.plan_share:.0%} of the fastest.",
                "",
                self.yaml(),
            ]
        )

    def yaml(self) -> str:
        """Return the best number as a part of a LightningCLI config."""
        return f"data:\n  options:\n    num_workers: {self.best}"

    def write_curve(self, path: str | Path) -> None:
        """Draw the curve as a picture.

        Raises:
            MissingPackageError: matplotlib is not installed.
            OptionsError: The file cannot be written.
        """
        require("matplotlib", extra="tensorboard", what="A picture of the curve")
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure

        figure = Figure(figsize=(6.4, 4.0), layout="constrained")
        FigureCanvasAgg(figure)
        axes = figure.subplots()
        numbers = sorted(self.batches_per_s)
        axes.plot(numbers, [self.batches_per_s[number] for number in numbers], marker="o")
        axes.axvline(self.planned, linestyle="--", color="gray", label=f"planned: {self.planned}")
        axes.axvline(self.best, linestyle=":", color="green", label=f"best: {self.best}")
        axes.set(xlabel="workers", ylabel="batches/s", title=self.name, ylim=(0, None))
        axes.legend()
        try:
            figure.savefig(path)
        except (OSError, ValueError) as error:
            raise OptionsError(f"The picture cannot be written to {path}: {error}.") from error


def sweep(
    loader: Sweepable,
    *,
    name: str,
    batch_size: int | None,
    numbers: Iterable[int] = (0, *WORKERS),
    seconds: float = 2.0,
    step_ms: float = 0.0,
    tell: Callable[[str], None] = lambda _: None,
) -> Sweep:
    """Read copies of a loader with growing numbers of workers, until more are no faster; 0 last.

    Args:
        loader: As it was planned; it is not read itself.
        name: How the user knows it.
        batch_size: Samples in a batch; None: not known.
        numbers: Of workers, the smallest first; the planned one is added.
        seconds: That each is measured, after a few batches.
        step_ms: Slept after each batch, as a process does whose device computes.
        tell: Takes a line about each that was measured.

    Raises:
        OptionsError: The loader gives no batch.
    """
    planned = loader.num_workers
    found: dict[int, float] = {}
    waited = 0
    # What is opened while this process reads, no worker that is forked later may share.
    for number in sorted({*numbers, planned}, key=lambda number: number or math.inf):
        if waited >= _NO_BETTER and number > planned:
            continue
        twin = loader.with_workers(number)
        try:
            rate = _batches_per_s(twin, seconds, step_ms / 1000, warm=_WARM_BATCHES + 2 * number)
        finally:
            twin.close()
        tell(f"{number} workers: {rate:.1f} batches/s")
        better = rate > GOOD_ENOUGH * max(found.values(), default=0.0)
        waited = 0 if better else waited + 1
        found[number] = rate
    found = dict(sorted(found.items()))
    return Sweep(
        name=name, planned=planned, batches_per_s=found, batch_size=batch_size, step_ms=step_ms
    )


def _batches_per_s(loader: Sweepable, seconds: float, step_s: float, *, warm: int) -> float:
    batches = _endless(loader)
    began = clock.monotonic()
    for _ in itertools.islice(batches, warm):
        clock.sleep(step_s)
        if clock.monotonic() - began > 2 * seconds:
            break
    began, count = clock.monotonic(), 0
    while count < _LEAST_BATCHES or clock.monotonic() - began < seconds:
        next(batches)
        clock.sleep(step_s)
        count += 1
    return count / (clock.monotonic() - began)


def _endless(loader: Sweepable) -> Iterator[Any]:
    while True:
        empty = True
        for batch in loader:
            empty = False
            yield batch
        if empty:
            raise OptionsError("The loader gives no batch, so that there is nothing to measure.")
