"""How good the number of workers is that is planned, and that it is tuned to, beside a sweep.

    python benchmarks/tune.py [--quick] [--only sleeps] [--rounds 3] [--json FILE] [--publish]

For each workload: an automatic ``FastDataLoader`` trains for some hundred steps of 6 ms in which
the training process sleeps, as one does whose device computes. It is compared with every choice
that a user has by hand: the same loader with ``workers`` at 0 to 24 (the sweep), and torch's
DataLoader with 0, 1, 2 and 4 workers. Each of these is measured once; then the best of the sweep,
the best of torch's and the automatic loader run in turn, and what is told are medians of ratios
within a round.

Workloads that change: storage becomes slow, or quick, in the middle of an epoch. What is told is
the step from the 200th after the change on, beside the best of a sweep under the new conditions.
"""

from __future__ import annotations

import gc
import itertools
import os
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

os.environ.setdefault("NO_ALBUMENTATIONS_UPDATE", "1")

import numpy as np
import torch
from auto_workloads import WORKLOADS, Timed, Workload, timed
from published import TORCH_WORKERS, Ratio, add_publish, publish
from torch.utils.data import DataLoader, Dataset, IterableDataset, get_worker_info
from turns import arguments, in_turn, machine, ratio, write

from lightning_fastdata import FastDataLoader
from lightning_fastdata.loading.tuner import Tuner

STEP_S = 0.006
OURS = (0, 1, 2, 3, 4, 6, 8, 12, 16, 24)
TUNED_STEPS = 300
AFTER_CHANGE = 200
MOST_S = 2.5
"""A choice of the sweep is measured for no longer."""
KEPT = (
    "sleeps 5 ms", "reads 2 ms, computes 1 ms", "stragglers: 3 % wait 60 ms",
    "bursts: 1 shard of 8 waits 10 ms", "computes 0.02 ms", "computes 0.1 ms", "computes 0.5 ms",
    "computes 5 ms", "__getitems__", "tiny tuples", "ragged, padded by collate_fn",
    "huge samples, 8 MB", "memory-mapped images", "ImageFolder images, PIL",
)  # fmt: skip


def lognormal_ms(mean: float, sigma: float) -> Callable[[int], tuple[float, float]]:
    """Return waits that differ from sample to sample, the same ones in each run."""
    drawn = np.random.default_rng(0).lognormal(np.log(mean) - sigma**2 / 2, sigma, 997)
    return lambda index: (0.0, float(drawn[index % 997]))


class Hungry(Timed):
    """Each worker holds 150 MB of its own."""

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        if not hasattr(self, "held"):
            self.held = np.ones(150_000_000 // 8)
        return super().__getitem__(index)


class Stream(IterableDataset):
    """Waits 2 ms for each sample; each worker reads its share."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __iter__(self) -> Iterator[torch.Tensor]:
        info = get_worker_info()
        first, step = (0, 1) if info is None else (info.id, info.num_workers)
        for index in range(first, self.length, step):
            time.sleep(0.002)
            yield torch.full((64,), float(index))


MORE = (
    timed("waits 3 ms, spread 0.5", 16, lognormal_ms(3, 0.47)),
    timed("waits 3 ms, spread 1", 16, lognormal_ms(3, 0.83)),
    Workload(
        name="memory-hungry, waits 3 ms",
        make=lambda _, n: Hungry(n, lambda _: (0.0, 3.0)),
        batch_size=16,
    ),
    Workload(name="a stream, waits 2 ms", make=lambda _, n: Stream(n), batch_size=16),
)


class Storage(Dataset):
    """Waits as long as a file says, which may change at any moment."""

    def __init__(self, length: int, file: Path) -> None:
        self.length, self.file = length, file

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> torch.Tensor:
        time.sleep(float(self.file.read_text()) / 1000)
        return torch.full((64,), float(index))


def set_wait(file: Path, ms: float) -> None:
    """Have samples wait so long from now on; whoever reads sees the old text or the new one."""
    new = file.with_suffix(".new")
    new.write_text(str(ms))
    new.replace(file)


CHANGES = {"storage becomes slow": (0.3, 8.0), "storage becomes quick": (8.0, 0.3)}
"""Milliseconds that a sample waits before and after."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """One workload; steps in milliseconds."""

    planned: str
    tuned: str
    moves: list[str]
    spent_percent: float
    first_ms: float
    """The first 50 steps of the automatic loader, its start included."""
    tuned_ms: float
    sweep_ms: dict[str, float]
    torch_ms: dict[str, float]
    of_best: float
    """Throughput of the automatic loader over that of the best of the sweep."""
    of_torch: float
    """The same over the best of torch's."""


def steps(loader: Any) -> Iterator[float]:
    """Yield the milliseconds of each step, over as many epochs as are asked for."""
    began = time.perf_counter()
    while True:
        for _ in loader:
            time.sleep(STEP_S)
            now = time.perf_counter()
            yield (now - began) * 1000
            began = now


def mean_ms(found: Iterator[float], *, skip: int, take: int) -> float:
    """Return the mean of some steps; fewer if they take too long."""
    for _ in range(skip):
        next(found)
    until, kept = time.perf_counter() + MOST_S, []
    for ms in itertools.islice(found, take):
        kept.append(ms)
        if time.perf_counter() > until and len(kept) >= 8:
            break
    return statistics.fmean(kept)


def torch_loader(work: Workload, data: Any, workers: int) -> DataLoader:
    shuffle = None if isinstance(data, IterableDataset) else True
    return DataLoader(
        data, work.batch_size, shuffle, num_workers=workers, persistent_workers=workers > 0,
        collate_fn=work.collate_fn,
    )  # fmt: skip


def our_loader(work: Workload, data: Any, workers: int | None) -> FastDataLoader:
    shuffle = None if isinstance(data, IterableDataset) else True
    executor = "auto" if workers is None else "workers" if workers else "inline"
    return FastDataLoader(
        data, work.batch_size, shuffle, executor=executor,
        num_workers="auto" if workers is None else workers,
        persistent_workers=bool(workers) or None, collate_fn=work.collate_fn,
    )  # fmt: skip


def swept(work: Workload, data: Any, make: Callable[..., Any], numbers: Any) -> dict[str, float]:
    """Return the step with each number of workers."""
    found = {}
    for workers in numbers:
        loader = make(work, data, workers)
        running = steps(loader)
        found[str(workers)] = mean_ms(running, skip=12 + 2 * workers, take=60)
        running.close()
        del running, loader
        gc.collect()
    return found


def measure(work: Workload, scratch: Path, *, rounds: int, numbers: Any) -> Found:
    """Measure one workload."""
    data = work.make(scratch, work.batch_size * 150)
    ours = swept(work, data, our_loader, numbers)
    torchs = swept(work, data, torch_loader, TORCH_WORKERS)
    auto = our_loader(work, data, None)
    planned = f"{auto.executor} {auto.num_workers}"
    running = steps(auto)
    began = time.perf_counter()
    first_ms = mean_ms(running, skip=0, take=50)
    until = time.perf_counter() + 6 * MOST_S
    for number, _ in enumerate(running):
        if number >= TUNED_STEPS or time.perf_counter() > until:
            break
    lasted_s = time.perf_counter() - began
    tuner = auto.training.tuner if isinstance(auto.training.tuner, Tuner) else None
    best = {
        "auto": running,
        "sweep": steps(our_loader(work, data, int(min(ours, key=ours.__getitem__)))),
        "torch": steps(torch_loader(work, data, int(min(torchs, key=torchs.__getitem__)))),
    }
    # Batches that were made ahead in the turns of others come at once: two for each worker.
    skip = 12 + 2 * max(*map(int, ours), auto.num_workers)
    turns = in_turn(
        {name: lambda each=each: mean_ms(each, skip=skip, take=60) for name, each in best.items()},
        rounds=rounds,
    )
    found = Found(
        planned=planned,
        tuned=f"{auto.executor} {auto.num_workers}",
        moves=[] if tuner is None else [str(move) for move in tuner.moves],
        spent_percent=0.0 if tuner is None else 100 * tuner.spent_s / lasted_s,
        first_ms=first_ms,
        tuned_ms=statistics.median(turns["auto"]),
        sweep_ms=ours,
        torch_ms=torchs,
        of_best=1 / ratio(turns["auto"], turns["sweep"]),
        of_torch=1 / ratio(turns["auto"], turns["torch"]),
    )
    for each in best.values():
        each.close()
    best.clear()
    auto.close()
    gc.collect()
    return found


def changed(name: str, scratch: Path, numbers: Any) -> dict[str, Any]:
    """Return the step before a change, right after it, and later, beside the best of a sweep."""
    before_ms, after_ms = CHANGES[name]
    file = scratch / "wait_ms"
    work = Workload(name=name, make=lambda _, n: Storage(n, file), batch_size=16)
    data = work.make(scratch, 16 * 5000)
    set_wait(file, after_ms)
    best = swept(work, data, our_loader, numbers)
    set_wait(file, before_ms)
    auto = FastDataLoader(data, 16, num_workers="auto")
    running = steps(auto)
    mean_ms(running, skip=200, take=1)
    started_as = f"{auto.executor} {auto.num_workers}"
    set_wait(file, after_ms)
    at_once_ms = mean_ms(running, skip=12, take=20)
    later_ms = mean_ms(running, skip=AFTER_CHANGE - 32, take=100)
    moves = auto.training.tuner.moves if isinstance(auto.training.tuner, Tuner) else ()
    found = {
        "before": started_as,
        "after": f"{auto.executor} {auto.num_workers}",
        "moves": [str(move) for move in moves],
        "at_once_ms": at_once_ms,
        "later_ms": later_ms,
        "sweep_ms": best,
        "of_best": min(best.values()) / later_ms,
    }
    running.close()
    auto.close()
    return found


def main() -> None:
    parser = arguments(__doc__, rounds=3)
    add_publish(parser)
    parser.add_argument("--quick", action="store_true", help="a smaller sweep, one round")
    parser.add_argument("--only", default="", help="workloads whose names have this in them")
    chosen = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    numbers = (0, 2, 4, 16) if chosen.quick else OURS
    rounds = 1 if chosen.quick else chosen.rounds
    works = [*(work for work in WORKLOADS if work.name in KEPT), *MORE]
    rows: dict[str, Any] = {}
    print(
        f"{'workload':<34} {'planned':>11} {'tuned':>11} {'first':>7} {'tuned':>7} {'best':>7} "
        f"{'torch':>7}  {'of best':>7} {'of torch':>8} {'spent':>6}   (ms a step)"
    )
    with tempfile.TemporaryDirectory() as folder:
        scratch = Path(folder)
        for work in works:
            if chosen.only not in work.name:
                continue
            found = measure(work, scratch, rounds=rounds, numbers=numbers)
            rows[work.name] = asdict(found)
            best, torchs = min(found.sweep_ms.values()), min(found.torch_ms.values())
            print(
                f"{work.name:<34} {found.planned:>11} {found.tuned:>11} {found.first_ms:7.2f} "
                f"{found.tuned_ms:7.2f} {best:7.2f} {torchs:7.2f}  {found.of_best:7.2f} "
                f"{found.of_torch:8.2f} {found.spent_percent:5.1f}%",
                flush=True,
            )
        for name in CHANGES:
            if chosen.only not in name:
                continue
            rows[name] = one = changed(name, scratch, numbers)
            print(
                f"{name:<34} {one['before']:>11} {one['after']:>11} {one['at_once_ms']:7.2f} "
                f"{one['later_ms']:7.2f} {min(one['sweep_ms'].values()):7.2f} {'':>7}  "
                f"{one['of_best']:7.2f}",
                flush=True,
            )
    ratios = [row["of_best"] for row in rows.values()]
    against = [row["of_torch"] for row in rows.values() if "of_torch" in row]
    if ratios:
        print(
            f"of the best of the sweep: median {statistics.median(ratios):.2f}, "
            f"worst {min(ratios):.2f}"
        )
    if against:
        print(f"of the best of torch's: median {statistics.median(against):.2f}, "
              f"worst {min(against):.2f}")  # fmt: skip
    if against and not chosen.only:
        ends = {"median": statistics.median(against), "worst": min(against)}
        best = {min(row["torch_ms"], key=row["torch_ms"].get) for row in rows.values()
                if "torch_ms" in row}  # fmt: skip
        publish(
            {
                f"tune/{name}": Ratio(
                    median=value, lowest=min(against), highest=max(against), rounds=rounds,
                    torch_workers=sorted(map(int, best)),
                )
                for name, value in ends.items()
            },
            machine(),
            asked=chosen.publish,
        )  # fmt: skip
    write(chosen.json, "tune", rows)


if __name__ == "__main__":
    main()
