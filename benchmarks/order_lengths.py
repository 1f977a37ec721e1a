"""Padding, waste and balance by law: sections of ``order.py``.

Beside batches of like length and packs, batches of 32 samples at random. All is counted: only
the time to the first batch depends on the machine.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from lengths import LAWS, MOST, drawn
from torch.utils.data import BatchSampler

from lightning_fastdata import BucketBatchSampler, pack
from lightning_fastdata.order.samplers import ShuffleSampler

if TYPE_CHECKING:
    import numpy as np

COUNT = 200_000
"""Samples."""


def padded(lengths: np.ndarray, batches: Iterable[Sequence[int]]) -> float:
    """Return the share of the tokens of batches that is padding."""
    batches = list(batches)
    places = sum(len(batch) * int(lengths[batch].max()) for batch in batches)
    return 1 - sum(int(lengths[batch].sum()) for batch in batches) / places


def padding(rounds: int, count: int = COUNT) -> None:
    """Print, of each law, what is padding in batches of all kinds, and what packs waste."""
    rows: list[dict[str, object]] = []
    for name in LAWS:
        lengths = drawn(name, count)
        plain = list(BatchSampler(ShuffleSampler(range(count)), 32, False))
        tokens = 2 * int(lengths.max())
        began_s = time.perf_counter()
        sampler = BucketBatchSampler(lengths, tokens=tokens)
        first = next(iter(sampler))
        took_s = time.perf_counter() - began_s
        assert len(first)
        packs = {
            split: pack(range(count), MOST, lengths=lengths, split=split).waste
            for split in (True, False)
        }
        rows.append(
            {
                "law": name,
                "mean length": float(lengths.mean()),
                "32 at random": padded(lengths, plain),
                "32 by length": padded(lengths, BucketBatchSampler(lengths, batch_size=32)),
                f"{tokens} tokens": padded(lengths, sampler),
                "packs, split": packs[True],
                "packs, whole": packs[False],
                "first batch s": took_s,
            }
        )
    shown(f"padding, {count} samples", rows)


def balance(rounds: int, count: int = COUNT) -> None:
    """Print, of each law, by how much the rank with most to do exceeds the mean in an epoch."""
    rows: list[dict[str, object]] = []
    for name in LAWS:
        lengths = drawn(name, count)
        row: dict[str, object] = {"law": name}
        for number in (2, 4, 64):
            for cost, power in (("linear", 1), ("quadratic", 2)):
                how = {"tokens": 2 * int(lengths.max()), "cost": cost}
                loads = []
                for rank in range(number):
                    own = BucketBatchSampler(lengths, num_replicas=number, rank=rank, **how)
                    batches = own.sampler.order.batches()
                    loads.append(sum(len(b) * float(lengths[b].max()) ** power for b in batches))
                row[f"{number} ranks, {cost}"] = max(loads) * number / sum(loads) - 1
        rows.append(row)
    shown(f"balance, {count} samples", rows)


def shown(title: str, rows: Sequence[dict[str, object]]) -> None:
    """Print a table."""
    print(f"\n{title}\n\n| {' | '.join(rows[0])} |\n{'| --- ' * len(rows[0])}|")
    for row in rows:
        print(f"| {' | '.join(_text(name, value) for name, value in row.items())} |")


def _text(name: str, value: object) -> str:
    if not isinstance(value, float):
        return str(value)
    return f"{value:.2f}" if name in ("mean length", "first batch s") else f"{value:.1%}"
