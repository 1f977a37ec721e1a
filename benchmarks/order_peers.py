"""Orders of other libraries beside ours: sections of ``order.py``.

    pip install grain lhotse online-dynamic-batching

What is not installed is said, and left out. Padding, waste and balance are counted; times are
taken in turn, and are CPU time of one process.
"""

from __future__ import annotations

import importlib
import statistics
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from importlib.metadata import version
from itertools import islice
from typing import TYPE_CHECKING, Any

import torch
from lengths import LAWS, MOST, drawn
from order_lengths import padded, shown
from torch.utils.data import BatchSampler
from turns import in_turn, ratio, spread

from lightning_fastdata import BucketBatchSampler, Mixture, pack
from lightning_fastdata.data import EpochOrder
from lightning_fastdata.order.samplers import ShuffleSampler, index_batches

if TYPE_CHECKING:
    import numpy as np

COUNT = 5_000
"""Samples of each law."""
RANKS = 4
BINS = 64
"""Packs that grain has open at once."""
PACKAGES = {"grain": "grain", "lhotse": "lhotse", "odb": "online-dynamic-batching"}


def installed(module: str) -> bool:
    """Return whether a peer is there; say so if it is not, or which version it is."""
    try:
        importlib.import_module(module)
    except ImportError as error:
        print(f"{PACKAGES[module]}: not here ({error})")
        return False
    print(f"{PACKAGES[module]} {version(PACKAGES[module])}")
    return True


def lhotse_batches(lengths: np.ndarray, tokens: int, *, ranks: int, rank: int) -> list[list[int]]:
    """Return the batches of lhotse's DynamicBucketingSampler; a token is a second of sound."""
    from lhotse import CutSet
    from lhotse.dataset import DynamicBucketingSampler
    from lhotse.testing.dummies import dummy_cut

    cuts = (dummy_cut(i, duration=float(n)) for i, n in enumerate(lengths.tolist()))
    sampler = DynamicBucketingSampler(
        CutSet.from_cuts(cuts), max_duration=float(tokens), num_buckets=30, shuffle=True,
        world_size=ranks, rank=rank,
    )  # fmt: skip
    return [[_number(cut.id) for cut in batch] for batch in sampler]


def _number(name: str) -> int:
    return int(name.rpartition("-")[2].partition("_")[0])  # "_dup0" behind what comes twice


class Texts:
    """A dataset of texts with these lengths, as online-dynamic-batching reads them."""

    def __init__(self, lengths: np.ndarray) -> None:
        self.lengths = lengths.tolist()

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": torch.zeros(self.lengths[index], dtype=torch.int8)}


def _sizes(texts: Sequence[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    return {"input_ids": torch.tensor([[len(text["input_ids"]) for text in texts]])}


def odb_padding(lengths: np.ndarray, tokens: int) -> float:
    """Return the share of the tokens of online-dynamic-batching that is padding."""
    from odb import ODBDataLoader

    loader = ODBDataLoader(
        Texts(lengths), token_budget=tokens, shuffle=True, num_workers=1, prefetch_factor=256,
        collate_fn=_sizes,
    )  # fmt: skip
    batches = [batch["input_ids"] for batch in loader]
    places = sum(batch.numel() * int(batch.max()) for batch in batches)
    return 1 - sum(int(batch.sum()) for batch in batches) / places


def grain_waste(lengths: np.ndarray, kind: str) -> float:
    """Return the share of the places in grain's packs of whole documents that is empty."""
    import grain
    import numpy as np

    documents = grain.MapDataset.source(lengths.tolist()).shuffle(seed=1)
    documents = documents.map(lambda n: {"ids": np.broadcast_to(np.int8(0), (n,))})
    packs: Any = getattr(grain.experimental, kind)(
        documents.to_iter_dataset(), length_struct={"ids": MOST}, num_packing_bins=BINS
    )
    return 1 - int(lengths.sum()) / (sum(1 for _ in packs) * MOST)


def excess(lengths: np.ndarray, of_rank: Callable[[int], Sequence[Sequence[int]]]) -> float:
    """Return by how much the rank with most tokens, padding among them, exceeds the mean."""
    loads = []
    for rank in range(RANKS):
        loads.append(sum(len(b) * int(lengths[b].max()) for b in map(list, of_rank(rank))))
    return max(loads) * RANKS / sum(loads) - 1


def peers(rounds: int, count: int = COUNT) -> None:
    """Print, of each law, padding, waste and balance beside those of other libraries."""
    here = {module for module in PACKAGES if installed(module)}
    warnings.simplefilter("ignore")
    if "odb" in here:
        try:
            odb_padding(drawn("chat", 100), 2 * MOST)
        except RuntimeError as error:  # it has torch's worker loop, which differs by version
            print(f"odb does not run with torch {torch.__version__}: {str(error).split('. ')[0]}")
            here.discard("odb")
    rows: list[dict[str, object]] = []
    for name in LAWS:
        lengths = drawn(name, count)
        tokens = 2 * int(lengths.max())

        def ours(rank: int, lengths=lengths, tokens=tokens) -> list[Sequence[int]]:
            return list(BucketBatchSampler(lengths, tokens=tokens, num_replicas=RANKS, rank=rank))

        row: dict[str, object] = {"law": name}
        row["padding, ours"] = padded(lengths, BucketBatchSampler(lengths, tokens=tokens))
        if "lhotse" in here:
            of_rank = [
                lhotse_batches(lengths, tokens, ranks=RANKS, rank=rank) for rank in range(RANKS)
            ]
            alone = lhotse_batches(lengths, tokens, ranks=1, rank=0)
            row["padding, lhotse"] = padded(lengths, alone)
        if "odb" in here:
            row["padding, odb"] = odb_padding(lengths, tokens)
        row["packs, ours"] = pack(range(count), MOST, lengths=lengths, split=False).waste
        if "grain" in here:
            row["packs, grain first fit"] = grain_waste(lengths, "FirstFitPackIterDataset")
            row["packs, grain best fit"] = grain_waste(lengths, "BestFitPackIterDataset")
        row[f"{RANKS} ranks, ours"] = excess(lengths, ours)
        if "lhotse" in here:
            row[f"{RANKS} ranks, lhotse"] = excess(lengths, of_rank.__getitem__)
        rows.append(row)
    shown(f"beside others, {count} samples", rows)


def _ours(length: int) -> Iterator[int]:
    order = EpochOrder(length=length, batch_size=256, world_size=8)
    return (index for batch in order.batches() for index in batch.tolist())


def _our_shuffle(length: int) -> Iterator[int]:
    batches = index_batches(BatchSampler(ShuffleSampler(range(length)), 256, False))
    return (index for batch in batches for index in batch.tolist())


def _grain_sampler(length: int) -> Iterator[int]:
    from grain.python import IndexSampler, ShardOptions

    sampler = IndexSampler(length, ShardOptions(3, 8), shuffle=True, num_epochs=1, seed=1)
    return (sampler[place].record_key for place in range(3, length, 8))


def _grain_shuffle(length: int) -> Iterator[int]:
    import grain

    order = grain.MapDataset.range(length).shuffle(seed=1)
    return (order[place] for place in range(length))


def _our_mixture(length: int) -> Iterator[object]:
    halves = range(length // 2)
    mixed = Mixture({"a": halves, "b": halves}, {"a": 0.7, "b": 0.3})
    return (mixed[place] for place in range(len(mixed)))


def _grain_mixture(length: int) -> Iterator[object]:
    import grain

    half = grain.MapDataset.range(length // 2)
    mixed = grain.MapDataset.mix([half.shuffle(seed=1), half.shuffle(seed=2)], [0.7, 0.3])
    return (mixed[place] for place in range(len(mixed)))


TURNS: dict[str, tuple[Callable[[int], Iterator[object]], Callable[[int], Iterator[object]]]] = {
    "one rank of 8 (grain: IndexSampler)": (_ours, _grain_sampler),
    "a shuffle (grain: MapDataset)": (_our_shuffle, _grain_shuffle),
    "a mixture of 2": (_our_mixture, _grain_mixture),
}


def cost(make: Callable[[int], Iterator[object]], length: int, read: int) -> tuple[float, float]:
    """Return milliseconds to the first index, and nanoseconds for each of the next ones."""
    began = time.process_time_ns()
    items = make(length)
    next(items)
    first = time.process_time_ns()
    got = sum(1 for _ in islice(items, read))
    return (first - began) / 1e6, (time.process_time_ns() - first) / got


def peers_index(rounds: int, read: int = 10_000) -> None:
    """Print what an index costs beside grain, in turn: lowest, median and highest of all rounds."""
    if not installed("grain"):
        return
    print("| order | rows | ms to the first, ours | grain | ns an index, ours | grain | ratio |")
    print("| --- | --- | --- | --- | --- | --- | --- |")
    for name, makers in TURNS.items():
        for length in (10**6, 10**8):
            firsts: dict[str, list[float]] = {"ours": [], "grain": []}

            def run(who: str, make: Any, firsts=firsts, length=length) -> float:
                first, each = cost(make, length, read)
                firsts[who].append(first)
                return each

            found = in_turn(
                {
                    who: lambda who=who, make=make: run(who, make)
                    for who, make in zip(firsts, makers, strict=True)
                },
                rounds=rounds,
            )
            first = " | ".join(f"{statistics.median(values[1:]):.2f}" for values in firsts.values())
            each = " | ".join(spread(values) for values in found.values())
            row = f"{name} | {length:.0e} | {first} | {each}"
            print(f"| {row} | {ratio(found['grain'], found['ours']):.1f} |", flush=True)
