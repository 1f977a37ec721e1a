"""Shuffled batches of rows in memory, and of token windows, through torch's ways and ours.

    python benchmarks/tabular.py [--rounds 7] [--rows 1000000] [--json results.json]

1 M rows of 64 float32 in batches of 1,024, and 50 M uint16 tokens in windows of 1,025 in batches of
32: whole epochs of all ways in one process, in turn, warm, with nothing done to the batches. The
limit is the same bytes copied in order into memory that is used again; a gather reads them from all
over the memory. CPU time is that of this process: of ways with 2 workers it is only a part.
"""

from __future__ import annotations

from dataclasses import asdict
from functools import partial

import numpy as np
import torch
from rates import compare, show, summary
from torch.utils.data import BatchSampler, DataLoader, Dataset, RandomSampler, TensorDataset
from turns import arguments, write

from lightning_fastdata.data import ColumnDataset, TokenWindows
from lightning_fastdata.loading.loader import FastDataLoader

COLUMNS, BATCH = 64, 1024
TOKENS, LENGTH, STRIDE, WINDOWS = 50_000_000, 1025, 1024, 32


class Batched(Dataset):
    """Rows that are read with one call for a batch, which is then not collated."""

    def __init__(self, table: torch.Tensor) -> None:
        self.table = table

    def __len__(self) -> int:
        return len(self.table)

    def __getitem__(self, index):
        return self.table[index]

    def __getitems__(self, indices):
        return self.table[indices]


class Windows(Dataset):
    """Windows as most training scripts cut them."""

    def __init__(self, tokens: np.ndarray) -> None:
        self.tokens = tokens

    def __len__(self) -> int:
        return (len(self.tokens) - LENGTH) // STRIDE + 1

    def __getitem__(self, index):
        start = index * STRIDE
        return torch.from_numpy(self.tokens[start : start + LENGTH].astype(np.int64))


def same(batch):
    return batch


def read(loader) -> int:
    count = 0
    for batch in loader:
        rows = batch["x"] if isinstance(batch, dict) else batch
        count += len(rows[0] if isinstance(rows, list) else rows)
    return count


def copy_all(table, out) -> int:
    size = len(out)
    for start in range(0, len(table) - size + 1, size):
        np.copyto(out, table[start : start + size])
    return len(table) // size * size


def tabular(rounds: int, count: int):
    table = torch.randn(count, COLUMNS)
    data = TensorDataset(table)
    how = {"batch_size": BATCH, "shuffle": True}
    workers = {**how, "num_workers": 2, "persistent_workers": True}
    whole = {"batch_size": None, "sampler": BatchSampler(RandomSampler(table), BATCH, False)}
    base = "torch DataLoader(TensorDataset)"
    gather = {**how, "executor": "gather"}
    ways = {
        base: partial(read, DataLoader(data, **how)),
        "  2 workers": partial(read, DataLoader(data, **workers)),
        "  __getitems__, collate_fn=identity": partial(
            read, DataLoader(Batched(table), **how, collate_fn=same)
        ),
        "  BatchSampler, batch_size=None": partial(read, DataLoader(Batched(table), **whole)),
        "ours, gather": partial(read, FastDataLoader(data, **gather)),
        "ours, gather ahead": partial(read, FastDataLoader(data, **gather, num_workers=1)),
        "ours, gather ahead, dict": partial(
            read, FastDataLoader(ColumnDataset({"x": table}), **gather, num_workers=1)
        ),
        "memcpy in order, the limit": partial(
            copy_all, table.numpy(), np.zeros((BATCH, COLUMNS), np.float32)
        ),
    }
    return compare(ways, rounds), base


def windows(rounds: int, count: int):
    tokens = np.random.default_rng(0).integers(0, 50_000, count).astype(np.uint16)
    ours = TokenWindows(tokens, LENGTH, stride=STRIDE)
    how = {"batch_size": WINDOWS, "shuffle": True}
    workers = {**how, "num_workers": 2, "persistent_workers": True}
    base = "torch DataLoader"
    wide = np.lib.stride_tricks.sliding_window_view(tokens, LENGTH)[::STRIDE]
    ways = {
        base: partial(read, DataLoader(Windows(tokens), **how)),
        "  2 workers": partial(read, DataLoader(Windows(tokens), **workers)),
        "  TokenWindows.__getitems__": partial(read, DataLoader(ours, **how)),
        "ours, gather": partial(read, FastDataLoader(ours, **how, executor="gather")),
        "ours, gather ahead": partial(
            read, FastDataLoader(ours, **how, executor="gather", num_workers=1)
        ),
        "copy in order to int64, the limit": partial(
            copy_all, wide, np.zeros((WINDOWS, LENGTH), np.int64)
        ),
    }
    return compare(ways, rounds), base


def main() -> None:
    parser = arguments(__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, default=1_000_000)
    asked = parser.parse_args()
    torch.set_num_threads(1)
    tables: dict[str, object] = {}
    parts = (
        ("Tabular", "rows", tabular, asked.rows),
        ("Token windows", "windows", windows, TOKENS),
    )
    for title, unit, part, count in parts:
        turns, base = part(asked.rounds, count)
        rows = summary(turns, base)
        show(f"{title}, {asked.rounds} rounds", unit, rows)
        raw = {name: [asdict(turn) for turn in found] for name, found in turns.items()}
        tables[title] = {"medians": rows, "turns": raw}
    write(asked.json, "tabular", tables)


if __name__ == "__main__":
    main()
