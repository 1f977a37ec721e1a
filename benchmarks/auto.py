"""What ``executor="auto"`` chooses, beside every choice it has and torch's own DataLoader.

    python benchmarks/auto.py [--quick] [--only images] [--rounds 3] [--json results.json]
    python benchmarks/auto.py --same-workers

For each workload: torch's DataLoader with 0 and with 2 workers (kept between epochs), an automatic
``FastDataLoader``, the loader of an automatic ``FastDataModule``, and the best of a sweep over the
executors with 0, 1, 2 and 4 workers, which is measured once before. Whole epochs in turn, in one
process, after a warm-up, with nothing done to the batches; then the same with a step of about 3 ms
after each batch that computes in the training process on one thread. Ratios are medians over rounds
of the samples per second within a round: the one wanted is at least 0.95 of the better of torch's
two. With ``--quick`` there is no sweep, and there are fewer rounds and shorter epochs.

With ``--same-workers``: what a ``FastDataLoader`` gives in the place of torch's DataLoader with the
same ``num_workers``, 0, 2 and 4, as whoever changes the name of the class has it.
"""

from __future__ import annotations

import contextlib
import copy
import gc
import math
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

import torch
from auto_workloads import WORKLOADS, Workload
from torch.utils.data import DataLoader
from turns import arguments, in_turn, ratio, write

from lightning_fastdata import FastDataLoader, FastDataModule

TORCH_0, TORCH_2 = "torch, 0 workers", "torch, 2 workers"
TWIN = "torch, 0 workers, once more"
LOADER, MODULE = "auto, FastDataLoader", "auto, FastDataModule"
STEP_MS = 3
WANTED = 0.95
MOST_BATCHES, FEWEST_BATCHES = 2000, 10
SWEEP_UNTIL_S = 540
"""Workloads that begin later go without the sweep, so that all of it ends in 12 minutes."""
SWEEP = [
    ("inline", 0),
    *((name, workers) for name in ("gather", "workers") for workers in (1, 2, 4)),
    ("gather", 0),
    ("torch", 1),
    ("torch", 4),
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """One workload."""

    chose: dict[str, str]
    """Of both automatic loaders, executor and workers."""
    per_s: dict[str, float]
    """Samples per second of each contender, median."""
    against_torch: dict[str, float]
    """Of the automatic loaders, the ratio to the better of torch's."""
    with_step: dict[str, float]
    """The same with a computing step after each batch."""
    sweep: dict[str, float]
    """Samples per second of each choice, once."""
    noise: float
    """Ratio of two loaders of torch that are the same: how far from 1 chance takes a ratio."""
    of_sweep: dict[str, float]
    """Of the automatic loaders, the ratio to the best of the sweep, measured again in turn."""


def torch_loader(work: Workload, data: Any, workers: int) -> DataLoader:
    return DataLoader(
        data,
        work.batch_size,
        shuffle=True,
        num_workers="auto" if workers is None else workers,
        persistent_workers=workers > 0,
        collate_fn=work.collate_fn,
    )


def ours(work: Workload, data: Any, executor: Any, workers: int | None = None) -> FastDataLoader:
    return FastDataLoader(
        data,
        work.batch_size,
        shuffle=True,
        executor=executor,
        num_workers="auto" if workers is None else workers,
        persistent_workers=bool(workers) or None,
        collate_fn=work.collate_fn,
    )


def of_module(work: Workload, data: Any) -> FastDataLoader:
    module = FastDataModule.from_datasets(
        data, batch_size=work.batch_size, collate_fn=work.collate_fn
    )
    return module.train_dataloader()


def step() -> Callable[[], object]:
    """Return what computes for about 3 ms in this thread."""
    matrix = torch.rand(192, 192)
    began, count = time.thread_time(), 20
    for _ in range(count):
        matrix @ matrix
    times = max(1, round(STEP_MS / 1000 / ((time.thread_time() - began) / count)))

    def compute() -> None:
        for _ in range(times):
            matrix @ matrix

    return compute


def epoch(loader: Any, size: int, compute: Callable[[], object] | None) -> Callable[[], float]:
    def run() -> float:
        began, count = time.perf_counter(), 0
        for _ in loader:
            count += 1
            if compute is not None:
                compute()
        return count * size / (time.perf_counter() - began)

    return run


def sized(work: Workload, scratch: Path, epoch_s: float) -> Any:
    """Return a dataset of which an epoch takes torch about so long, or 10 batches."""
    few = work.make(scratch, work.batch_size * 3)
    batches = iter(torch_loader(work, few, 0))
    next(batches)
    began = time.perf_counter()
    next(batches)
    each_s = time.perf_counter() - began
    count = min(MOST_BATCHES, max(FEWEST_BATCHES, math.ceil(epoch_s / each_s)))
    return work.make(scratch, work.batch_size * count)


@contextlib.contextmanager
def opened(loaders: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Let go of the loaders and their workers at the end."""
    try:
        yield loaders
    finally:
        for loader in loaders.values():
            close = getattr(loader, "close", None)
            if close is not None:
                close()
        loaders.clear()
        gc.collect()


def swept(work: Workload, data: Any) -> dict[str, float]:
    """Return the samples per second of each choice there is for a workload."""
    rates = {}
    for executor, workers in SWEEP:
        with opened({}) as loaders:
            try:
                loaders["one"] = ours(work, data, executor, workers)
                run = epoch(loaders["one"], work.batch_size, None)
                run()
                rates[f"{executor} {workers}"] = run()
            except Exception:
                continue  # an executor that cannot read such a dataset
    return rates


def measure(work: Workload, scratch: Path, *, rounds: int, epoch_s: float, sweep: bool) -> Found:
    data = sized(work, scratch, epoch_s)
    rates = swept(work, data) if sweep else {}
    # Each has a dataset of its own, as a loader's epoch is written to some.
    loaders = {
        TORCH_0: torch_loader(work, copy.deepcopy(data), 0),
        TORCH_2: torch_loader(work, copy.deepcopy(data), 2),
        TWIN: torch_loader(work, copy.deepcopy(data), 0),
        LOADER: ours(work, copy.deepcopy(data), "auto"),
        MODULE: of_module(work, copy.deepcopy(data)),
    }
    best = max(rates, key=lambda name: rates[name], default=None)
    if best is not None:
        executor, workers = best.split()
        loaders[best] = ours(work, copy.deepcopy(data), executor, int(workers))
    with opened(loaders):
        chose = {name: f"{loaders[name].executor} {loaders[name].num_workers}" for name in AUTO}
        size = work.batch_size
        alone = in_turn({n: epoch(x, size, None) for n, x in loaders.items()}, rounds=rounds)
        compute = step()
        busy = in_turn(
            {n: epoch(x, size, compute) for n, x in loaders.items()},
            rounds=max(1, rounds - 1),
            warm=False,
        )
    return Found(
        chose=chose,
        per_s={name: statistics.median(found) for name, found in alone.items()},
        against_torch=_against(alone, TORCH_0, TORCH_2),
        with_step=_against(busy, TORCH_0, TORCH_2),
        noise=ratio(alone[TWIN], alone[TORCH_0]),
        sweep=rates,
        of_sweep={} if best is None else _against(alone, best, TORCH_0, TORCH_2),
    )


def with_same_workers(work: Workload, scratch: Path, *, rounds: int, epoch_s: float) -> list[str]:
    """Return the choice and the ratio to torch's loader at each number of workers."""
    data, found = sized(work, scratch, epoch_s), []
    for workers in (0, 2, 4):
        loaders = {
            "torch": torch_loader(work, data, workers),
            "ours": ours(work, data, None, workers),
        }
        with opened(loaders):
            rates = in_turn(
                {name: epoch(each, work.batch_size, None) for name, each in loaders.items()},
                rounds=rounds,
            )
            chose = loaders["ours"].executor
        found.append(f"{chose:>8} {ratio(rates['ours'], rates['torch']):6.2f}")
    return found


AUTO = (LOADER, MODULE)


def _against(found: dict[str, list[float]], *others: str) -> dict[str, float]:
    best = max(others, key=lambda name: statistics.median(found[name]))
    return {name: ratio(found[name], found[best]) for name in AUTO}


def show(title: str, found: Found) -> None:
    choice = found.chose[LOADER]
    if found.chose[MODULE] != choice:
        choice += f" / {found.chose[MODULE]}"
    best = max(found.sweep, key=lambda name: found.sweep[name], default="")
    pairs = [
        " ".join(f"{of[name]:5.2f}" for name in AUTO) if of else " " * 11
        for of in (found.against_torch, found.with_step, found.of_sweep)
    ]
    torch_0, torch_2 = found.per_s[TORCH_0], found.per_s[TORCH_2]
    print(
        f"{title:34s} {choice:23s} {torch_0:11,.0f} {torch_2:11,.0f} {found.per_s[LOADER]:11,.0f}  "
        f"{'  '.join(pairs)}  {found.noise:5.2f}  {best}",
        flush=True,
    )


def verdict(title: str, ratios: dict[str, float], wanted: float) -> None:
    worst = min(ratios, key=lambda name: ratios[name])
    mean = statistics.geometric_mean(ratios.values())
    below = sum(value < wanted for value in ratios.values())
    print(
        f"{title}: worst {ratios[worst]:.2f} ({worst}), geometric mean {mean:.2f}, "
        f"{below} of {len(ratios)} below {wanted}"
    )


def main() -> None:
    parser = arguments(__doc__.splitlines()[0], rounds=5)
    parser.add_argument("--quick", action="store_true", help="no sweep, 1 round")
    parser.add_argument("--only", default="", help="workloads whose name contains one of a,b,c")
    parser.add_argument("--no-sweep", action="store_true")
    parser.add_argument("--same-workers", action="store_true")
    asked = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    wanted = asked.only.casefold().split(",")
    works = [work for work in WORKLOADS if any(part in work.name.casefold() for part in wanted)]
    if asked.same_workers:
        with tempfile.TemporaryDirectory() as scratch:
            for work in works:
                row = with_same_workers(work, Path(scratch), rounds=asked.rounds, epoch_s=0.5)
                print(f"{work.name:34s} {'   '.join(row)}", flush=True)
        write(asked.json, "auto --same-workers", {})
        return
    print(
        f"{'':34s} {'auto chose':23s} {'torch 0 /s':>11s} {'torch 2 /s':>11s} {'auto /s':>11s}  "
        f"{'x torch':11s}  {'with step':11s}  {'x sweep':11s}  noise  best of the sweep"
    )
    found, failed = {}, {}
    began, sweep = time.monotonic(), not (asked.quick or asked.no_sweep)
    with tempfile.TemporaryDirectory() as scratch:
        for work in works:
            try:
                found[work.name] = measure(
                    work,
                    Path(scratch),
                    rounds=1 if asked.quick else asked.rounds,
                    epoch_s=0.12 if asked.quick else 0.25,
                    sweep=sweep and time.monotonic() - began < SWEEP_UNTIL_S,
                )
            except ImportError as error:
                failed[work.name] = str(error)
                print(f"{work.name:34s} absent: {error}")
                continue
            show(work.name, found[work.name])
    print("Each pair of ratios: FastDataLoader, FastDataModule. Noise: one of two same loaders.")
    for name in AUTO:
        verdict(
            f"{name} : the better of torch's, loader alone",
            {work: of.against_torch[name] for work, of in found.items()},
            WANTED,
        )
        verdict(
            f"{name} : the better of torch's, with a step",
            {work: of.with_step[name] for work, of in found.items()},
            WANTED,
        )
        swept_ones = {work: of.of_sweep[name] for work, of in found.items() if of.of_sweep}
        if swept_ones:
            verdict(f"{name} : the best of all choices", swept_ones, WANTED)
    write(
        asked.json,
        "auto",
        {"workloads": {name: asdict(of) for name, of in found.items()}, "absent": failed},
    )


if __name__ == "__main__":
    main()
