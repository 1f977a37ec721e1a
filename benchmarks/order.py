"""What an order costs, and what batches by length save: indices, mixtures, padding, balance.

    python benchmarks/order.py [SECTION ...] [--rounds 5]

Sections are the functions below; without one, all of them run. Times are medians, of one process,
in nanoseconds of CPU time.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Iterable
from itertools import islice

import numpy as np
import torch
from order_lengths import balance, padding
from order_peers import peers, peers_index
from torch.utils.data import BatchSampler, RandomSampler, WeightedRandomSampler

from lightning_fastdata import Mixture
from lightning_fastdata.data import EpochOrder, SharedSampler
from lightning_fastdata.order.samplers import RankBatchSampler, ShuffleSampler, index_batches

LENGTHS = (10**6, 10**8)
BATCH = 256
READ = 400
"""Batches that are read of an epoch."""


class Numbers:
    """A dataset of any length, for which only the order counts."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> int:
        return index


def timed(make: Callable[[], Iterable[object]], count: int, rounds: int) -> tuple[float, float]:
    """Return milliseconds to the first item, and nanoseconds for each of the next ones."""
    firsts, nexts = [], []
    for _ in range(rounds):
        began = time.process_time_ns()
        items = iter(make())
        next(items)
        first = time.process_time_ns()
        got = sum(1 for _ in islice(items, count))
        nexts.append((time.process_time_ns() - first) / max(got, 1))
        firsts.append((first - began) / 1e6)
    return statistics.median(firsts), statistics.median(nexts)


def index_cost(rounds: int) -> None:
    """Print what the first batch of an epoch costs, and each index after it."""
    print(f"| {'order':44} | rows | ms to the first batch | ns an index |")
    print("| --- | --- | --- | --- |")
    for length in LENGTHS:
        data = Numbers(length)
        orders: dict[str, Callable[[], Iterable[object]]] = {
            "EpochOrder, one rank of 8": lambda n=length: EpochOrder(
                length=n, batch_size=BATCH, world_size=8
            ).batches(),
            "ShuffleSampler": lambda d=data: index_batches(
                BatchSampler(ShuffleSampler(d), BATCH, False)
            ),
        }
        if length <= 10**7:  # torch's own hold all indices as integers of Python
            orders |= {
                "torch RandomSampler": lambda d=data: BatchSampler(RandomSampler(d), BATCH, False),
                "RandomSampler, one rank of 8": lambda d=data: shared(RandomSampler(d)),
                "torch WeightedRandomSampler": lambda d=data: BatchSampler(
                    WeightedRandomSampler(torch.ones(len(d)), len(d)), BATCH, False
                ),
                "WeightedRandomSampler, one rank of 8": lambda d=data: shared(
                    WeightedRandomSampler(torch.ones(len(d)), len(d))
                ),
                "a sampler of one's own, one rank of 8": lambda d=data: shared(range(len(d))),
            }
        for name, make in orders.items():
            first, each = timed(make, READ, rounds)
            print(f"| {name:44} | {length:.0e} | {first:.2f} | {each / BATCH:.0f} |", flush=True)


def shared(sampler: Iterable[int]) -> RankBatchSampler:
    """Return the batches of one rank of eight."""
    share = SharedSampler(sampler, batch_size=BATCH, num_replicas=8, rank=3)
    return RankBatchSampler(share, BATCH, False)


def mixture_cost(rounds: int) -> None:
    """Print what the first sample of a mixture costs to find, and those after it."""
    print("\n| mixture | rows | ms to the first sample | ns a sample, in order | at random |")
    print("| --- | --- | --- | --- | --- |")
    for length in LENGTHS:
        for parts in (2, 5, 50):
            weights = {f"part {i}": 1 / (i + 1) for i in range(parts)}
            datasets = {name: Numbers(length // parts) for name in weights}

            def made(datasets=datasets, weights=weights) -> Mixture:
                return Mixture(datasets, weights)

            def in_order(made=made) -> Iterable[object]:
                mixed = made()
                return (mixed[i] for i in range(len(mixed)))

            def at_random(made=made) -> Iterable[object]:
                mixed = made()
                places = np.random.default_rng(1).integers(len(mixed), size=300).tolist()
                return (mixed[i] for i in places)

            first, each = timed(in_order, 20_000, rounds)
            _, alone = timed(at_random, 200, rounds)
            row = f"{parts} parts | {length:.0e} | {first:.2f} | {each:.0f} | {alone:.0f}"
            print(f"| {row} |", flush=True)


SECTIONS = {
    "index_cost": index_cost,
    "mixture_cost": mixture_cost,
    "padding": padding,
    "balance": balance,
    "peers": peers,
    "peers_index": peers_index,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("sections", nargs="*", choices=[*SECTIONS, []], default=[])
    parser.add_argument("--rounds", type=int, default=5)
    asked = parser.parse_args()
    for name, section in SECTIONS.items():
        if name in asked.sections or not asked.sections:
            section(asked.rounds)


if __name__ == "__main__":
    main()
