"""Batches per second through side processes by size, from 4 KB to 256 MB, and the memory taken.

A sample is a view of memory, so that nothing but the way of a batch costs: collation, the move to
the training process, and its bookkeeping. Three ways to make a batch: of 16 samples by the default
collation, of 16 samples by a collate function of the user's, and ready from the dataset
(``batch_size=None``). A ready batch is a copy, since torch would move the storage of a view to
shared memory once, and then hand over that same memory for every batch. The memory is the highest
PSS of the whole process tree (shared pages counted once) above that of the program without loaders,
and what ``/dev/shm`` held on top of before.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset
from turns import arguments, in_turn, ratio, shm_bytes, tree_pss_bytes, write

from lightning_fastdata.loading.loader import FastDataLoader

BATCH, WORKERS = 16, 2
SIZES = tuple(4**power * 1024 for power in range(1, 10))
"""4 KiB to 256 MiB."""


class Views(Dataset):
    """Samples that are views of one block, or whole batches that are copies of them."""

    def __init__(self, size_bytes: int, length: int, *, copied: bool = False) -> None:
        self.copied = copied
        self.block = torch.zeros(size_bytes + 64, dtype=torch.uint8)
        self.size, self.length = size_bytes, length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> torch.Tensor:
        at = index % 64
        view = self.block[at : at + self.size]
        return view.clone() if self.copied else view


def stacked(samples: list[torch.Tensor]) -> dict[str, Any]:
    """Collate as a user may."""
    return {"image": torch.stack(samples), "count": len(samples)}


def epoch_s(loader: Any) -> float:
    """Return the seconds of an epoch that keeps no batch."""
    began = time.perf_counter()
    for _batch in loader:
        pass
    return time.perf_counter() - began


def peak_bytes(loader: Any) -> tuple[int, int]:
    """Return the highest PSS of the process tree and use of ``/dev/shm`` during an epoch."""
    pss = shm = 0
    length = len(loader)
    looks = {length // 4, length // 2, length - 1}
    for number, _batch in enumerate(loader):
        shm = max(shm, shm_bytes())
        if number in looks:
            pss = max(pss, tree_pss_bytes())
    return pss, shm


def loaders_of(way: str, size: int, batches: int) -> dict[str, Callable[[], Any]]:
    """Return what makes each contender."""
    if way == "ready":
        data = Views(size, batches, copied=True)
        how: dict[str, Any] = {"batch_size": None}
    else:
        data = Views(size // BATCH, batches * BATCH)
        how = {"batch_size": BATCH, "collate_fn": stacked if way == "own collate" else None}
    two = {**how, "num_workers": WORKERS, "persistent_workers": True}
    return {
        "torch": lambda: DataLoader(data, **two),
        "workers": lambda: FastDataLoader(data, executor="workers", **two),
        "auto": lambda: FastDataLoader(data, num_workers="auto", **how),
    }


def close(loader: Any) -> None:
    """End the workers of a loader."""
    if isinstance(loader, FastDataLoader):
        loader.close()
    else:
        loader._iterator = None


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--sizes", nargs="*", type=int, default=SIZES, help="bytes of a batch")
    parser.add_argument("--ways", nargs="*", default=["samples", "own collate", "ready"])
    parser.add_argument("--most-bytes", type=int, default=2**30, help="moved in an epoch, about")
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    table: dict[str, Any] = {}
    heads = ("torch /s", "workers /s", "auto /s", "workers", "auto")
    print(
        f"{'':24s}" + "".join(f"{head:>12s}" for head in heads) + "   peak MiB (PSS, shm) of each"
    )
    for way in chosen.ways:
        for size in chosen.sizes:
            batches = max(12, min(600, chosen.most_bytes // size))
            makers = loaders_of(way, size, batches)
            loaders = {name: make() for name, make in makers.items()}
            spent = in_turn(
                {n: lambda loader=loader: epoch_s(loader) for n, loader in loaders.items()},
                rounds=chosen.rounds,
            )
            for loader in loaders.values():
                close(loader)
            peaks = {}
            for name, make in makers.items():
                idle, held = tree_pss_bytes(), shm_bytes()
                loader = make()
                pss, shm = peak_bytes(loader)
                peaks[name] = (max(0, pss - idle) / 2**20, max(0, shm - held) / 2**20)
                close(loader)
                del loader
            speed = {name: ratio(spent["torch"], spent[name]) for name in ("workers", "auto")}
            rates = [batches / statistics.median(spent[name]) for name in makers]
            label = f"{way}, {size / 1024:,.0f} KiB"
            cells = "".join(f"{rate:12,.1f}" for rate in rates)
            cells += "".join(f"{f'x{value:.2f}':>12s}" for value in speed.values())
            memory = ", ".join(f"{name} {pss:.0f} {shm:.0f}" for name, (pss, shm) in peaks.items())
            executor = loaders["auto"].executor
            print(f"{label:24s}{cells}   {memory}   (auto: {executor})", flush=True)
            table[label] = {
                "seconds": spent,
                "batches": batches,
                "speedup": speed,
                "peak_mib": peaks,
                "auto": executor,
            }
    lowest = min(table, key=lambda label: min(table[label]["speedup"].values()))
    print(f"lowest: {lowest}, {table[lowest]['speedup']}")
    write(chosen.json, "transport", table)


if __name__ == "__main__":
    main()
