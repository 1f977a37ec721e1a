"""What a training would take with so many CPU cores of other machines, before they are rented."""

from __future__ import annotations

import itertools
import math
import statistics
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Final, Literal, TypeAlias

import numpy as np
from torch.utils.data import IterableDataset

from lightning_fastdata.batches.packed import pack
from lightning_fastdata.errors import OptionsError
from lightning_fastdata.executors.kinds import KINDS
from lightning_fastdata.host import clock
from lightning_fastdata.host.cpu import read_cpu_limit
from lightning_fastdata.tuning.costs import BatchCost, LoaderSetup, ways_of
from lightning_fastdata.tuning.moves import GOOD_ENOUGH, LITTLE
from lightning_fastdata.tuning.simulate import batch_costs, scaled, simulate

if TYPE_CHECKING:
    from lightning_fastdata.insight.report.run_report import RunReport
    from lightning_fastdata.loading.loader import FastDataLoader
    from lightning_fastdata.stamps.batch_stamps import BatchStamps

CORES: Final = (1, 2, 4, 8, 16, 32, 64)
Bound: TypeAlias = Literal["cores", "link", "training process", "training"]
_TAKING_MS: Final = 1.0
"""What a batch of no size costs the training process: ``python benchmarks/remote.py``."""
_COLD: Final = 2
"""Batches that are not counted: the worker starts."""
_COPIES: Final = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class RemoteStep:
    """What is expected with so many cores."""

    cores: int
    step_ms: float
    wait_ms: float
    """Of that, the time waited for the batch."""
    bound: Bound
    """What keeps the step from being shorter: too few cores; the link; what taking a batch costs
    the training process; or nothing but the training itself."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RemotePlan:
    """What a training would take with cores of other machines, by the simulator.

    ``print(plan.text())`` shows the table.
    """

    rows: tuple[RemoteStep, ...]
    """By cores, the fewest first."""
    batch_bytes: float
    make_ms: float
    """What one core takes to make a batch."""
    training_ms: float
    """What the training takes of a step besides waiting for its batch."""
    mb_per_s: float
    latency_ms: float

    @property
    def best(self) -> RemoteStep:
        """The fewest cores whose step is within 3 % of the shortest."""
        least_ms = min(row.step_ms for row in self.rows)
        return next(row for row in self.rows if row.step_ms <= GOOD_ENOUGH * least_ms)

    def advice(self, room: int) -> str:
        """Return in a sentence how many actors to take, where there is room for so many."""
        best = self.best
        if best.bound == "cores" and best.cores >= room:
            return f"{room} actors, all that there is room for, are too few."
        return f"{best.cores} actors are enough: the step is bound by the {best.bound}."

    def text(self) -> str:
        """Return the table, and what it rests on."""
        megabytes = self.batch_bytes / 1e6
        lines = [
            f"A batch has {megabytes:.3g} MB and takes a core {self.make_ms:.3g} ms.",
            f"The training takes {self.training_ms:.3g} ms of a step.",
            f"Over a link of {self.mb_per_s:g} MB/s and {self.latency_ms:g} ms:",
            f"{'cores':>7}  {'ms a step':>9}  {'waited':>6}  bound by",
        ]
        for row in self.rows:
            waited = row.wait_ms / row.step_ms if row.step_ms else 0.0
            mark = "  <- enough" if row is self.best else ""
            lines.append(f"{row.cores:7}  {row.step_ms:9.1f}  {waited:6.0%}  {row.bound}{mark}")
        return "\n".join(lines)


def plan_remote(
    loader: FastDataLoader,
    run: RunReport | str | Path | None = None,
    *,
    step_ms: float | None = None,
    cores: Sequence[int] = CORES,
    mb_per_s: float = 1000.0,
    latency_ms: float = 0.5,
    core_speed: float = 1.0,
    batches: int = 16,
) -> RemotePlan:
    """Predict what a step would take if actors of ``executor="ray"`` made the batches.

    Some batches are read now, by a single worker of a copy of the loader, or one actor if its
    executor is ``"ray"``: they show what a batch costs a core, and how many bytes it has.

    Args:
        loader: Of the training; it is not read itself.
        run: Its report, or the path of its ``report.json``, which shows what the training takes of
            a step besides waiting for data.
        step_ms: The same in milliseconds; excludes ``run``. Neither: 0, which shows how fast
            batches can be had.
        cores: Numbers of CPU cores of other machines, an actor each.
        mb_per_s: What the network brings to the machine that trains, in megabytes (10^6) a second:
            some 120 for 1 Gbit/s, 1200 for 10 Gbit/s.
        latency_ms: Of that network, there and back.
        core_speed: How many times as fast as a core of this machine one of those is.
        batches: That are read, 4 or more.

    Returns:
        The expected step for each number of cores.

    Raises:
        OptionsError: An argument is impossible, the loader gives too few batches, or takes no
            stamps, or the report has no steps.
    """
    _check("mb_per_s", mb_per_s)
    _check("core_speed", core_speed)
    _check("latency_ms", latency_ms, or_zero=True)
    _check("step_ms", step_ms or 0.0, or_zero=True)
    if not cores or not all(type(each) is int and each > 0 for each in cores):
        raise OptionsError(f"cores is {cores!r}; it has to be whole numbers from 1.")
    if run is not None and step_ms is not None:
        raise OptionsError("Both run and step_ms say what the training takes; give one of them.")
    if batches < 2 * _COLD:
        raise OptionsError(f"batches is {batches!r}; {2 * _COLD} or more have to be read.")
    own_ms = (step_ms or 0.0) if run is None else _own_ms(run)
    stamps, size_bytes = _read(loader, batches + _COLD)
    costs = [
        replace(cost, step_ns=own_ms * 1e6, size_bytes=size_bytes)
        for cost in scaled(batch_costs(stamps), cpu=1 / core_speed, collate=1 / core_speed)
    ]
    return predict_remote(
        costs,
        cores=cores,
        mb_per_s=mb_per_s,
        latency_ms=latency_ms,
        copy_ms=_copy_ms(size_bytes),
        cpus=float(read_cpu_limit().usable_cpus),
        in_order=loader.in_order,
    )


def predict_remote(
    costs: Sequence[BatchCost],
    *,
    cores: Sequence[int],
    mb_per_s: float,
    latency_ms: float,
    copy_ms: float = 0.0,
    taking_ms: float = _TAKING_MS,
    cpus: float = 1.0,
    in_order: bool = True,
) -> RemotePlan:
    """Return the plan for batches of these costs, whose hand-over is replaced; pure.

    ``copy_ms``: What it takes to copy a batch, which an actor does once and the training once.
    ``taking_ms``: What else a batch costs the training process. ``cpus``: That it may use.
    """
    taking_ns = (taking_ms + copy_ms) * 1e6
    link_ns = [cost.size_bytes / mb_per_s * 1e3 for cost in costs]
    sent = [
        replace(
            cost,
            collate_ns=cost.collate_ns + copy_ms * 1e6,
            taking_ns=taking_ns,
            handover_ns=taking_ns + latency_ms * 1e6 + way,
        )
        for cost, way in zip(costs, link_ns, strict=True)
    ]
    mean_link_ms = statistics.fmean(link_ns) / 1e6
    training_ms = statistics.fmean(cost.step_ns for cost in costs) / 1e6
    rows: list[RemoteStep] = []
    for number in sorted(set(cores)):
        setup = LoaderSetup(
            workers=number,
            look_ahead=max(8, 2 * number),
            scheduling="actors",
            in_order=in_order,
            cpus=cpus,
            far_share=1.0,
            sent_share=1.0,
            link_bytes_per_s=mb_per_s * 1e6,
        )
        found = simulate(sent, setup)
        step_ms, wait_ms = found.step_ms, min(found.wait_ms, found.step_ms)
        if rows and rows[-1].step_ms < step_ms:  # those too many have nothing to do
            step_ms, wait_ms = rows[-1].step_ms, rows[-1].wait_ms
        bound = _bound(step_ms, wait_ms, training_ms + taking_ns / 1e6, mean_link_ms)
        rows.append(RemoteStep(cores=number, step_ms=step_ms, wait_ms=wait_ms, bound=bound))
    return RemotePlan(
        rows=tuple(rows),
        batch_bytes=statistics.fmean(cost.size_bytes for cost in costs),
        make_ms=statistics.fmean(c.cpu_ns + c.blocked_ns + c.collate_ns for c in sent) / 1e6,
        training_ms=training_ms,
        mb_per_s=mb_per_s,
        latency_ms=latency_ms,
    )


def _bound(step_ms: float, wait_ms: float, taken_ms: float, link_ms: float) -> Bound:
    if wait_ms <= LITTLE * step_ms:
        return "training"
    if step_ms <= GOOD_ENOUGH * max(taken_ms, link_ms):
        return "link" if link_ms > taken_ms else "training process"
    return "cores"


def _check(name: str, value: float, *, or_zero: bool = False) -> None:
    if not isinstance(value, int | float) or not 0 <= value < math.inf or not (value or or_zero):
        least = "from 0" if or_zero else "above 0"
        raise OptionsError(f"{name} is {value!r}; it has to be a number {least}.")


def _own_ms(run: RunReport | str | Path) -> float:
    """Return what a recorded training took of a step besides waiting for data."""
    from lightning_fastdata.insight.report.recorded import as_run_report, read_report

    if isinstance(run, str | Path):
        run = as_run_report(read_report(Path(run)), Path(run))
    stage = run.stages[0] if run.stages else None
    if stage is None or stage.step is None:
        raise OptionsError("The report has no timed steps; give step_ms in its place.")
    gap_ms = 0.0 if stage.gap is None else stage.gap.mean_ms
    waited_ms = 0.0 if stage.stall is None else stage.stall.mean_ms
    return max(0.0, stage.step.mean_ms + gap_ms - waited_ms)


def _read(loader: FastDataLoader, batches: int) -> tuple[list[BatchStamps], float]:
    """Return the stamps of some batches that one worker makes, and the bytes of one."""
    if isinstance(loader.dataset, IterableDataset):
        raise OptionsError("Actors read by index, which a stream has not; 'workers' reads it here.")
    twin = loader.with_workers(1)
    twin.tune = "off"
    if not KINDS[twin.executor].elsewhere:
        twin.executor = "workers"
    records: deque[BatchStamps] = deque()
    twin.record_stamps(records)
    sizes: list[int] = []
    try:
        for batch in itertools.islice(twin, batches):
            sizes.append(pack(batch)[0].size_bytes)
    finally:
        twin.close()
    steady = list(records)[_COLD:]
    if len(steady) < 2:
        raise OptionsError(
            f"The loader gave {len(sizes)} batches and stamps of {len(records)}; {2 * _COLD} are "
            "needed to tell what one costs."
        )
    sent = [way.size_bytes for _, way in ways_of(steady)]
    return steady, statistics.fmean(sent or sizes)


def _copy_ms(size_bytes: float) -> float:
    """Return what it takes to copy so many bytes in memory."""
    one, other = (np.ones(max(1, round(size_bytes)), np.uint8) for _ in range(2))
    spent: list[float] = []
    for _ in range(_COPIES):
        began_s = clock.monotonic()
        np.copyto(other, one)
        spent.append((clock.monotonic() - began_s) * 1e3)
    return statistics.median(spent)
