"""Which options of a loader nobody is told to change, and why: what the gate of advice asks for."""

from __future__ import annotations

from typing import Final

from torch.utils.data import IterableDataset

from lightning_fastdata.caches.folders import caches_in
from lightning_fastdata.loading.loader import FastDataLoader
from lightning_fastdata.tuning.tuner import Tuner

_DECIDED: Final = frozenset(
    {"num_workers", "executor", "prefetch_factor", "pin_memory", "persistent_workers", "split"}
)
"""What follows from dataset and machine; other options have one default for all."""
_CHOSEN: Final = "which was chosen for this dataset and this machine"
_TUNED: Final = "which is tuned while it trains"
_DRAWN: Final = "its samples are drawn at random, or nobody has looked"


def closed_options(loader: object, *, prefix: str = "") -> dict[str, str]:
    """Return the options of a loader that are closed, each with the reason.

    Args:
        loader: Of any kind; it is not iterated.
        prefix: Of the names of options, as ``"val."``.
    """
    ours = loader if isinstance(loader, FastDataLoader) else None
    plan = None if ours is None else ours.plan
    found = {}
    if plan is not None:
        chosen = {each.option for each in plan.choices if each.by == "auto"}
        found = dict.fromkeys(sorted(chosen & _DECIDED), _CHOSEN)
    if ours is not None and isinstance(ours.tune, Tuner):
        back = [move for move in ours.tune.moves if move.outcome == "taken back"]
        found["num_workers"] = f"{_TUNED}: {back[-1]}" if back else _TUNED
    if ours is None or plan is None or plan.draws is not False:
        found["cache"] = _DRAWN
    elif isinstance(ours.dataset, IterableDataset):
        found["cache"] = "a stream has no index to keep samples by"
    elif caches_in(ours.dataset):
        found["cache"] = "samples are kept already"
    return {f"{prefix}{option}": why for option, why in found.items()}
