"""How well a run with 2 workers foretells the step of other loaders: predicted against measured.

Each workload runs with 2 workers, whose stamps are recorded. From these, the steps with other
numbers of workers, and out of order, are predicted, and then measured, too::

    python benchmarks/whatif.py --rounds 3 --json whatif.json

Every round records, predicts and measures everything anew, and the medians over rounds are
compared; how far two measurements of the same loader are apart is printed beside the errors. A run
during which other processes (or the hypervisor) take more than 4 % of the CPUs says nothing about a
loader and is done again, up to 4 times in all; a loader without any undisturbed run is counted
apart. This is decided by the time on CPUs alone, before the run's result is looked at.

``--quick`` takes one round of four workloads with fewer batches.
"""

from __future__ import annotations

import resource
import statistics
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import combinations
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import Dataset, default_collate
from turns import arguments, write

from lightning_fastdata.host.cpu import read_affinity, read_cpu_limit
from lightning_fastdata.loading.loader import FastDataLoader
from lightning_fastdata.loading.simulate import TrainingTimes, batch_costs, simulate
from lightning_fastdata.loading.source import setup_of

RECORDED = 2
"""Workers, and whether in order."""
SETTLED = 20
"""The first batches are not measured: workers start and fill what is ahead."""
TAIL = 20
"""Nor the last ones, which come from what is ahead while no more are made."""
DISTURBED = 0.04
"""Of the CPUs, taken by others."""
ATTEMPTS = 4
BATCHES = 100
OTHERS = (1, 3, 4, 8)


def spin(seconds: float) -> None:
    """Use a CPU for so long, however often it is taken away meanwhile."""
    until = time.thread_time() + seconds
    while time.thread_time() < until:
        pass


class Samples(Dataset[torch.Tensor]):
    """Samples that cost time blocked, time on a CPU and bytes; some a lot more."""

    def __init__(
        self, count: int, *, blocked_s: float, cpu_s: float, slow_s: float, floats: int
    ) -> None:
        self.count, self.blocked_s, self.cpu_s = count, blocked_s, cpu_s
        self.slow_s, self.floats = slow_s, floats

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> torch.Tensor:
        if self.slow_s and index % 160 == 5:
            time.sleep(self.slow_s)
        if self.blocked_s:
            time.sleep(self.blocked_s)
        if self.cpu_s:
            spin(self.cpu_s)
        return torch.zeros(self.floats)


def slow_collate(samples: list[torch.Tensor]) -> Any:
    """Collate, and use a CPU for 20 ms."""
    spin(0.02)
    return default_collate(samples)


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """What samples and steps cost."""

    step_s: float
    """Of a step without data."""
    blocked_s: float = 0.0
    """Of a sample: time blocked."""
    cpu_s: float = 0.0
    """Of a sample: time on a CPU."""
    slow_s: float = 0.0
    """Of one sample in 160: more time blocked."""
    floats: int = 1000
    """In a sample."""
    batch_size: int = 16
    """Samples in a batch."""
    step_on_cpu: bool = False
    """The step uses a CPU, and does not wait for a device."""
    executor: str = "workers"
    """Who reads."""
    others: tuple[int, ...] = OTHERS
    """What is predicted: numbers of workers."""
    settings: dict[str, Any] = field(default_factory=dict)
    """More arguments of the loader."""


WORKLOADS = {
    "io": Workload(step_s=0.015, blocked_s=0.004),
    "cpu": Workload(step_s=0.010, cpu_s=0.0015),
    "mixed": Workload(step_s=0.012, blocked_s=0.002, cpu_s=0.001),
    "slow collate": Workload(step_s=0.012, blocked_s=0.0005, settings={"collate_fn": slow_collate}),
    "slow samples": Workload(
        step_s=0.010, blocked_s=0.001, slow_s=0.3,
        others=(1, 4),
    ),
    "large batches": Workload(step_s=0.020, blocked_s=0.001, floats=150_000, batch_size=32),
    "step on a CPU": Workload(step_s=0.010, cpu_s=0.001, step_on_cpu=True),
    "cheap": Workload(step_s=0.015),
    "torch, io": Workload(step_s=0.015, blocked_s=0.003, executor="torch"),
    "torch, cpu": Workload(step_s=0.010, cpu_s=0.0015, executor="torch"),
    "torch, slow samples": Workload(
        step_s=0.010, blocked_s=0.001, slow_s=0.3, executor="torch",
        others=(1, 4),
    ),
}  # fmt: skip
QUICK = ("io", "cpu", "mixed", "slow samples")


@dataclass(slots=True)
class Use:
    """What a piece of the program used."""

    wall_s: float = 0.0
    own_cpu_s: float = 0.0
    """On a CPU: this process, without its children."""
    runqueue_s: float = 0.0
    """This thread was ready but had no CPU."""
    others: float = 0.0
    """Of the CPUs, the part that others took, 0 to 1."""


def _runqueue_s() -> float:
    return int(Path("/proc/thread-self/schedstat").read_text().split()[1]) / 1e9


def _machine_s() -> float:
    """Return the CPU time of everybody: user, nice, system, irq, softirq and steal (proc(5))."""
    ticks = [int(text) for text in Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9]]
    return (sum(ticks[:3]) + sum(ticks[5:8])) / 100


def _tree_s() -> float:
    both = map(resource.getrusage, (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(use.ru_utime + use.ru_stime for use in both)


@contextmanager
def used() -> Iterator[Use]:
    """Fill in what the block uses; its child processes have to end in it."""
    use = Use()
    machine, tree, own = _machine_s(), _tree_s(), time.process_time()
    queued, began = _runqueue_s(), time.perf_counter()
    yield use
    use.wall_s = time.perf_counter() - began
    use.runqueue_s = _runqueue_s() - queued
    use.own_cpu_s = time.process_time() - own
    others = _machine_s() - machine - (_tree_s() - tree)
    use.others = max(0.0, others / use.wall_s / read_affinity())


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One run of a loader."""

    step_ms: float
    """The mean step between those left out at both ends."""
    others: float
    """Of the CPUs, the part that others took, 0 to 1."""
    step_cpus: float
    """CPUs that the training uses between two requests."""
    step_queued: float
    """Part of the steps in which it was ready but had no CPU, 0 to 1."""
    stamps: tuple[Any, ...]
    """Of the batches that were measured, if they were recorded."""


def loader_of(work: Workload, workers: int, batches: int) -> FastDataLoader:
    """Return a loader with so many batches, and those that are left out at both ends."""
    samples = Samples(
        (SETTLED + batches + TAIL) * work.batch_size, blocked_s=work.blocked_s, cpu_s=work.cpu_s,
        slow_s=work.slow_s, floats=work.floats,
    )  # fmt: skip
    return FastDataLoader(
        samples, work.batch_size, num_workers=workers, executor=work.executor,
        **work.settings,
    )  # fmt: skip


def train(work: Workload, workers: int, batches: int, *, record: bool) -> Run:
    """Train in a plain loop."""
    loader = loader_of(work, workers, batches)
    records: deque[Any] = deque()
    if record:
        loader.record_stamps(records)
    step: Callable[[float], None] = spin if work.step_on_cpu else time.sleep
    waited = 0.0
    with used() as all_of_it:
        iterator = iter(loader)
        for _ in range(SETTLED):
            next(iterator)
            step(work.step_s)
        with used() as use:
            for _ in range(batches):
                asked = time.perf_counter()
                next(iterator)
                waited += time.perf_counter() - asked
                step(work.step_s)
        for _ in iterator:
            pass
        del iterator
        loader.close()
    times = TrainingTimes(
        cpu_s=use.own_cpu_s, wall_s=use.wall_s, waited_s=waited, runqueue_s=use.runqueue_s
    )
    return Run(
        step_ms=use.wall_s / batches * 1e3,
        others=all_of_it.others,
        step_cpus=times.step_cpus,
        step_queued=times.step_queued,
        stamps=tuple(records)[SETTLED : SETTLED + batches + 1],
    )


def undisturbed(work: Workload, workers: int, batches: int, *, record: bool = False) -> Run:
    """Return the first run that others left alone, or the one that they disturbed least."""
    runs: list[Run] = []
    while len(runs) < ATTEMPTS and (not runs or runs[-1].others > DISTURBED):
        runs.append(train(work, workers, batches, record=record))
    return min(runs, key=lambda run: run.others)


def compare(name: str, work: Workload, batches: int) -> list[dict[str, Any]]:
    """Record, predict, measure; return a row for each of the other loaders."""
    recorded = undisturbed(work, RECORDED, batches, record=True)
    costs = batch_costs(recorded.stamps, step_queued=recorded.step_queued)
    rows = []
    for workers in work.others:
        setup = setup_of(
            loader_of(work, workers, batches),
            cpus=float(read_cpu_limit().usable_cpus),
            step_cpus=recorded.step_cpus,
        )
        if setup is None:
            raise ValueError(f"The model does not know executor {work.executor!r}.")
        predicted = simulate(costs, setup).step_ms
        measured = undisturbed(work, workers, batches)
        others = max(recorded.others, measured.others)
        rows.append(
            {
                "workload": name, "workers": workers, "others": others,
                "predicted_ms": predicted, "measured_ms": measured.step_ms,
            }
        )  # fmt: skip
        print(f"{line(rows[-1])}  others took {others:.1%} of the CPUs", flush=True)
    return rows


def line(row: dict[str, Any]) -> str:
    """Return a comparison as text."""
    error = row["predicted_ms"] / row["measured_ms"] - 1
    return (
        f"{row['workload']:<19} {row['workers']} workers  predicted "
        f"{row['predicted_ms']:7.2f} ms  measured {row['measured_ms']:7.2f} ms  {error:+6.1%}"
    )


def settled(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return one row for each loader: the medians of its undisturbed rounds, or else of all."""
    loaders: dict[Any, list[dict[str, Any]]] = {}
    for row in rows:
        loaders.setdefault((row["workload"], row["workers"]), []).append(row)
    found = []
    for same in loaders.values():
        clean = [row for row in same if row["others"] <= DISTURBED]
        counted = clean or same
        measured = [row["measured_ms"] for row in counted]
        keys = ("predicted_ms", "measured_ms")
        middle = {key: statistics.median(row[key] for row in counted) for key in keys}
        pairs = [abs(a / b - 1) for a, b in combinations(measured, 2)]
        found.append({**same[0], **middle, "disturbed": not clean, "apart": pairs})
    return found


def summary_of(loaders: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the errors of predictions, and how far two measurements of one loader are apart."""
    errors = sorted(abs(row["predicted_ms"] / row["measured_ms"] - 1) for row in loaders)
    pairs = sorted(pair for row in loaders for pair in row["apart"]) or [float("nan")]
    return {
        "loaders": len(loaders),
        "workloads": len({row["workload"] for row in loaders}),
        **{f"error_{key}": value for key, value in _quantiles(errors).items()},
        **{f"measured_twice_{key}": value for key, value in _quantiles(pairs).items()},
    }


def _quantiles(values: list[float]) -> dict[str, float]:
    p95 = values[min(len(values) - 1, int(len(values) * 0.95))]
    return {"median": statistics.median(values), "p95": p95, "worst": values[-1]}


def main() -> None:
    """Compare all workloads, round by round."""
    parser = arguments(__doc__ or "", rounds=3)
    parser.add_argument("--quick", action="store_true", help="one round, fewer workloads")
    parser.add_argument("--only", choices=sorted(WORKLOADS), help="one workload")
    options = parser.parse_args()
    names = (options.only,) if options.only else QUICK if options.quick else (*WORKLOADS,)
    batches, rounds = (50, 1) if options.quick else (BATCHES, options.rounds)
    torch.set_num_threads(1)
    rows = [
        {"round": turn, **row}
        for turn in range(rounds)
        for name in names
        for row in compare(name, WORKLOADS[name], batches)
    ]
    loaders = settled(rows)
    print("Medians of the rounds:")
    for row in loaders:
        print(line(row) + ("  disturbed" if row["disturbed"] else ""))
    clean = [row for row in loaders if not row["disturbed"]]
    summary: dict[str, Any] = {"disturbed": len(loaders) - len(clean), "all": summary_of(loaders)}
    if clean:
        summary["undisturbed"] = summary_of(clean)
    print("\n".join(f"{key}: {value}" for key, value in summary.items()))
    write(options.json, "whatif", {"rows": rows, "loaders": loaders, "summary": summary})


if __name__ == "__main__":
    main()
