"""Time to the first batch: of the first epoch and of later ones, by start method and dataset.

A small dataset, and one that holds 1.28 million paths as Python strings, as an image folder of the
size of ImageNet does. The time of an epoch is from ``iter()`` to the first batch. For the first one
the loader is new in each round; the second is the next epoch of that same loader, with and without
``persistent_workers``.
"""

from __future__ import annotations

import statistics
import time
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset
from turns import arguments, in_turn, ratio, spread, write

from lightning_fastdata.loading.loader import FastDataLoader

BATCH, BATCHES, WORKERS = 16, 4, 2


class Paths(Dataset):
    """Names of files, of which a sample makes a tensor in about 0.2 ms."""

    def __init__(self, count: int) -> None:
        self.paths = [f"/data/train/n{i % 1000:08d}/image_{i:08d}.JPEG" for i in range(count)]

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        until = time.perf_counter() + 0.0002
        while time.perf_counter() < until:
            pass
        return torch.full((3, 32, 32), float(len(self.paths[index]))), index


def first_batch_s(loader: Any) -> float:
    """Return the seconds to the first batch, and read the other ones."""
    began = time.perf_counter()
    batches = iter(loader)
    next(batches)
    spent = time.perf_counter() - began
    for _ in batches:
        pass
    return spent


def both_epochs(make: Any, kept: list[float]) -> float:
    """Return the seconds to a new loader's first batch; note those of its second epoch."""
    loader = make()
    spent = first_batch_s(loader)
    kept.append(first_batch_s(loader))
    if isinstance(loader, FastDataLoader):
        loader.close()
    return spent


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--methods", nargs="*", default=["fork", "forkserver", "spawn"])
    parser.add_argument("--paths", nargs="*", type=int, default=[1000, 1_280_000])
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    table: dict[str, Any] = {}
    print(f"{'':46s}{'ratio':>7s}  ms of torch: low / median / high;  of ours")
    for count in chosen.paths:
        data = Paths(count)
        order = torch.randperm(count)[: BATCH * BATCHES].tolist()
        for method in chosen.methods:
            for keep in (False, True):
                how: dict[str, Any] = {
                    "batch_size": BATCH,
                    "sampler": order,
                    "num_workers": WORKERS,
                    "multiprocessing_context": method,
                    "persistent_workers": keep,
                }
                later: dict[str, list[float]] = {"torch": [], "ours": []}
                makers = {
                    "torch": lambda how=how, data=data: DataLoader(data, **how),
                    "ours": lambda how=how, data=data: FastDataLoader(
                        data, executor="workers", **how
                    ),
                }
                firsts = in_turn(
                    {
                        name: lambda make=make, kept=later[name]: both_epochs(make, kept)
                        for name, make in makers.items()
                    },
                    rounds=chosen.rounds,
                )
                later = {name: found[1:] for name, found in later.items()}
                for epoch, found in (("first", firsts), ("later", later)):
                    if epoch == "later" and not keep:
                        continue
                    name = f"{count} paths, {method}, {epoch} epoch" + ", kept" * keep
                    quotient = ratio(found["torch"], found["ours"])
                    in_ms = {who: [1000 * s for s in spent] for who, spent in found.items()}
                    table[name] = {**in_ms, "speedup": quotient}
                    theirs, ours = spread(in_ms["torch"]), spread(in_ms["ours"])
                    print(f"{name:46s}x{quotient:6.2f}  {theirs};  {ours}", flush=True)
    worst = min(row["speedup"] for row in table.values())
    typical = statistics.median(row["speedup"] for row in table.values())
    print(f"lowest ratio x{worst:.2f}, median x{typical:.2f} (over 1: ours is earlier)")
    write(chosen.json, "startup", table)


if __name__ == "__main__":
    main()
