"""How well a run with 2 workers foretells the step of other loaders: predicted against measured.

Each workload runs once with 2 workers, whose stamps are recorded. From these, the steps with other
numbers of workers, and out of order, are predicted, and then measured, too::

    python benchmarks/whatif.py --rounds 3 --json whatif.json

``--quick`` takes one round of three workloads with fewer batches.
"""

from __future__ import annotations

import statistics
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils.data import Dataset, default_collate
from turns import arguments, write

from lightning_fastdata.host.cpu import read_cpu_limit
from lightning_fastdata.insight.simulate import LoaderSetup, batch_costs, simulate
from lightning_fastdata.loading.loader import FastDataLoader
from lightning_fastdata.loading.worker_count import look_ahead_batches

RECORDED_WORKERS = 2
SETTLED = 20
"""The first batches are not measured: workers start and fill what is ahead."""
OTHERS = ((1, True), (2, False), (3, True), (4, True), (4, False), (6, True), (8, True))
"""Workers, and whether in order."""


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


def slow_collate(samples: list[torch.Tensor]) -> torch.Tensor:
    """Collate, and use a CPU for 20 ms."""
    spin(0.02)
    return default_collate(samples)  # type: ignore[no-any-return]


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
    settings: dict[str, Any] = field(default_factory=dict)
    """More arguments of the loader."""


WORKLOADS = {
    "io": Workload(step_s=0.015, blocked_s=0.004),
    "cpu": Workload(step_s=0.010, cpu_s=0.002),
    "mixed": Workload(step_s=0.012, blocked_s=0.002, cpu_s=0.001),
    "slow collate": Workload(step_s=0.012, blocked_s=0.0005, settings={"collate_fn": slow_collate}),
    "slow samples": Workload(step_s=0.010, blocked_s=0.001, slow_s=0.3),
    "large batches": Workload(step_s=0.020, blocked_s=0.001, floats=150_000, batch_size=32),
    "step on a CPU": Workload(step_s=0.010, cpu_s=0.001, step_on_cpu=True),
    "cheap": Workload(step_s=0.015),
}
QUICK = ("io", "mixed", "slow samples")


def measure(
    work: Workload, workers: int, *, in_order: bool, batches: int, records: Any = None
) -> float:
    """Train in a plain loop and return the mean step in milliseconds."""
    samples = Samples(
        batches * work.batch_size, blocked_s=work.blocked_s, cpu_s=work.cpu_s, slow_s=work.slow_s,
        floats=work.floats,
    )  # fmt: skip
    loader = FastDataLoader(
        samples, work.batch_size, num_workers=workers, executor="workers", in_order=in_order,
        **work.settings,
    )  # fmt: skip
    if records is not None:
        loader.record_stamps(records)
    step: Callable[[float], None] = spin if work.step_on_cpu else time.sleep
    began = 0.0
    count = 0
    try:
        for _ in loader:
            count += 1
            if count == SETTLED:
                began = time.perf_counter()
            step(work.step_s)
        return (time.perf_counter() - began) / (count - SETTLED + 1) * 1e3
    finally:
        loader.close()


def setup_of(work: Workload, workers: int, *, in_order: bool) -> LoaderSetup:
    """Return the loader of :func:`measure` as the model knows it."""
    split = "collate_fn" not in work.settings
    return LoaderSetup(
        workers=workers,
        look_ahead=look_ahead_batches(
            workers, prefetch=None, batch_size=work.batch_size, split=split
        ),
        scheduling="sample" if split else "queue",
        in_order=in_order,
        cpus=float(read_cpu_limit().usable_cpus),
        step_cpus=1.0 if work.step_on_cpu else 0.05,
    )


def compare(name: str, work: Workload, batches: int) -> list[dict[str, Any]]:
    """Record, predict, measure; return a row for each of the other loaders."""
    records: deque[Any] = deque()
    measure(work, RECORDED_WORKERS, in_order=True, batches=batches, records=records)
    costs = batch_costs(list(records)[SETTLED // 2 :])
    rows = []
    for workers, in_order in OTHERS:
        predicted = simulate(costs, setup_of(work, workers, in_order=in_order)).step_ms
        measured = measure(work, workers, in_order=in_order, batches=batches)
        error = predicted / measured - 1
        order = "" if in_order else ", any order"
        print(
            f"{name:<14} {workers} workers{order:<12} predicted {predicted:7.2f} ms  "
            f"measured {measured:7.2f} ms  {error:+7.1%}",
            flush=True,
        )
        rows.append(
            {
                "workload": name, "workers": workers, "in_order": in_order,
                "predicted_ms": predicted, "measured_ms": measured, "error": error,
            }
        )  # fmt: skip
    return rows


def main() -> None:
    """Compare all workloads, round by round."""
    parser = arguments(__doc__ or "", rounds=3)
    parser.add_argument("--quick", action="store_true", help="one round, fewer workloads")
    parser.add_argument("--only", choices=sorted(WORKLOADS), help="one workload")
    options = parser.parse_args()
    names = (options.only,) if options.only else QUICK if options.quick else tuple(WORKLOADS)
    batches, rounds = (80, 1) if options.quick else (160, options.rounds)
    torch.set_num_threads(1)
    rows = []
    for turn in range(rounds):
        for name in names:
            rows += [{"round": turn, **row} for row in compare(name, WORKLOADS[name], batches)]
    # Noise of a single run is not the model's: the measurements of all rounds stand for each.
    settled = []
    for name in names:
        for workers, in_order in OTHERS:
            same = [
                row for row in rows
                if (row["workload"], row["workers"], row["in_order"]) == (name, workers, in_order)
            ]  # fmt: skip
            predicted = statistics.median(row["predicted_ms"] for row in same)
            settled.append(abs(predicted / statistics.median(r["measured_ms"] for r in same) - 1))
    settled.sort()
    summary = {
        "configurations": len(settled),
        "median_error": statistics.median(settled),
        "p95_error": settled[min(len(settled) - 1, int(len(settled) * 0.95))],
        "worst_error": settled[-1],
    }
    print(", ".join(f"{key} {value:.3g}" for key, value in summary.items()))
    write(options.json, "whatif", {"rows": rows, "summary": summary})


if __name__ == "__main__":
    main()
