"""Changes of a loader that are worth a try, given the facts about it, and those it refuses."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from functools import reduce
from operator import or_
from typing import Any, Final, Literal, TypeAlias

Changes: TypeAlias = Literal["nothing", "steps", "epochs", "unknown"]
Reader: TypeAlias = Literal["torch", "ours", "other"]

_CPU_BOUND: Final = 0.7
"""Used share of the CPUs that could read, from which on more workers than CPUs are of no use."""
_MOST_WORKERS: Final = 16
_KEEP_UP: Final = 0.03
"""Share of a step that free data would save, below which workers keep up with the training."""
_START_SHARE: Final = 0.015
"""Share of an epoch that its start takes, below which workers that stay cannot gain 3 %."""
_OWN_DRAWS: Final = (
    "a shuffled order, and what is drawn for samples, follow from seed and epoch: other draws than "
    "now"
)
_FILLED: Final = "the first epoch fills it, and it ends with the program"
_WORKERS_DRAW: Final = (
    "what the dataset draws at random is drawn in the workers: other draws than now"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """A change of a loader; None and False: that setting stays as it is."""

    num_workers: int | None = None
    persistent_workers: bool = False
    fast: bool = False
    """Whether to use this package's loader, which chooses how to read."""
    cache: str | None = None
    """Place where samples are kept, ``"ram"`` or ``"disk"``; None: they are not."""

    @property
    def lasts(self) -> bool:
        """Whether its first epoch does work that later epochs need not do again."""
        return self.persistent_workers or self.fast or self.cache is not None

    def __or__(self, other: Change) -> Change:
        """Return both changes together; a number of workers in ``other`` goes first."""
        theirs = ((field.name, getattr(other, field.name)) for field in fields(other))
        return replace(self, **{n: v for n, v in theirs if v is not None and v is not False})


@dataclass(frozen=True, slots=True, kw_only=True)
class Remedy:
    """One change to try, or several together."""

    name: str
    """Name of the remedy in the table of the report."""
    change: Change
    effort: float
    """How much it changes, as a rank: of two remedies of equal gain the smaller one is chosen."""
    says: tuple[str, ...] = ()
    """Texts on what else changes with it, for the report."""

    @classmethod
    def of_dict(cls, known: Mapping[str, Any]) -> Remedy:
        """Return the remedy of a dict that `dataclasses.asdict` made."""
        says = tuple(known["says"])
        return cls(**{**known, "change": Change(**known["change"]), "says": says})


@dataclass(frozen=True, slots=True, kw_only=True)
class LoaderFacts:
    """Facts about a loader and its training that decide which remedies there are."""

    reader: Reader
    """Kind of the loader: ``"torch"``, a plain DataLoader; ``"ours"``, a FastDataLoader;
    ``"other"``, a class that makes batches in its own way, or several loaders."""
    num_workers: int
    cpus: int
    """CPUs that this process and its workers may use."""
    used_cpus: float
    """CPUs that the training and its workers used."""
    step_share: float = 1.0
    """Share of a step in the middle of an epoch that free data would save, 0 to 1."""
    start_share: float = 0.0
    """Share of an epoch that passes until its first batch is there, 0 to 1."""
    persistent: bool = False
    stream: bool = False
    """Whether the dataset is iterable, without an index."""
    changes: Changes = "nothing"
    """What was seen to change the dataset, its collate_fn or its own sampler while it is read;
    ``"unknown"``: they cannot be compared."""
    cached: bool = False
    keeps_bytes: float = 0.0
    """Bytes that all samples take, as they come out of the loader."""
    free_bytes: float = 0.0
    """Bytes that a cache in memory may take."""
    epochs: float = math.inf
    """Number of epochs of the training; infinity: no limit is known."""


FAST: Final = "the loader of this package"
PERSIST: Final = Remedy(
    name="persistent_workers=True", change=Change(persistent_workers=True), effort=1
)


def named(facts: LoaderFacts) -> tuple[list[Remedy], dict[str, str]]:
    """Return the remedies that suit the facts, and why others must not be tried, by their names."""
    if facts.reader == "other":
        why = "the batches do not come from one plain DataLoader, which alone can be made anew"
        return [], {"another loader": why}
    if facts.reader == "ours":
        why = 'num_workers="auto" chooses them for a loader of this package'
        return [], {"workers, persistence and pinning": why}
    # Remedies most likely to help come first, as the time may not suffice for all.
    workers, others = _workers(facts), _others(facts)
    starts = facts.num_workers and not facts.persistent and facts.start_share > _START_SHARE
    wanted = [*others[:1], *workers[:1], *others[1:], *workers[1:]]
    if starts:
        wanted.insert(2, PERSIST)
    remedies, refused = list[Remedy](), dict[str, str]()
    for remedy in wanted:
        why = _why_not(remedy.change, facts)
        if why:
            refused[remedy.name] = why
        elif facts.changes == "unknown":
            said = "what is read cannot be compared: make sure that no step changes it"
            remedies.append(replace(remedy, says=(*remedy.says, said)))
        else:
            remedies.append(remedy)
    return remedies, refused


def _workers(facts: LoaderFacts) -> list[Remedy]:
    now, cpus = facts.num_workers, facts.cpus
    if now and facts.step_share < _KEEP_UP:
        return []
    computes = facts.used_cpus >= _CPU_BOUND * min(cpus, max(1, now))
    if now < cpus:
        numbers = [cpus] if computes else [cpus, 4 * cpus]
    elif computes:
        numbers = [cpus] if now > cpus else []
    else:
        numbers = [2 * now, 4 * now]
    says = () if now else (_WORKERS_DRAW,)
    return [
        Remedy(name=f"num_workers={number}", change=Change(num_workers=number), effort=1, says=says)
        for number in dict.fromkeys(min(number, _MOST_WORKERS) for number in numbers)
        if number != now
    ]


def _others(facts: LoaderFacts) -> list[Remedy]:
    found = [Remedy(name=FAST, change=Change(fast=True), effort=2, says=(_OWN_DRAWS,))]
    if not facts.cached:
        found.append(
            Remedy(name="a cache in memory", change=Change(cache="ram"), effort=3, says=(_FILLED,))
        )
    return found


def _why_not(change: Change, facts: LoaderFacts) -> str:
    """Return why a change must not be tried; empty: it may be tried."""
    if facts.stream and (change.num_workers is not None or change.fast):
        return (
            "which samples a stream gives depends on the number of workers; if yours divides "
            "itself among them, set another one and compare"
        )
    if facts.stream and change.cache:
        return "a stream has no index by which samples could be kept"
    if facts.stream and change.persistent_workers:
        return "a part of a stream's epoch tells nothing of workers that stay"
    if facts.epochs <= 1 and (change.cache or change.persistent_workers):
        return "the training has one epoch, and this helps from the second on"
    moves = change.num_workers is not None or change.fast
    if facts.changes == "steps":
        what = "its steps change what is read (globals count; a loop in a function has none)"
        if change.cache:
            return f"{what}, and a cache keeps what was read before"
        if change.persistent_workers:
            return f"{what}, and workers that stay have what was there before"
        if moves and not facts.num_workers:
            return f"{what}, and workers would see that an epoch later"
        if change.fast:
            return f"{what}, and where it would be read is left open"
    if facts.changes == "epochs" and (change.cache or change.persistent_workers):
        return "what is read changes between epochs, and this keeps what was there in the first"
    if change.cache and facts.keeps_bytes > facts.free_bytes:
        return (
            f"all samples take {facts.keeps_bytes / 1e9:.3g} GB, of which memory may hold "
            f"{facts.free_bytes / 1e9:.3g} GB"
        )
    return ""


def together(
    remedies: Mapping[str, Remedy], gains: Mapping[str, float], *, may_persist: bool
) -> list[Remedy]:
    """Return combinations of the best remedies, at most one for each kind of loader.

    ``gains``: for each remedy that helps, the factor by which an epoch is faster. ``may_persist``:
    whether workers that were not there before may stay between epochs.
    """
    plain = [name for name in gains if remedies[name].change.num_workers is not None]
    untried = plain and may_persist and PERSIST.name not in remedies
    flags = [PERSIST] if untried or PERSIST.name in gains else []
    # Two numbers of workers: many workers lose by their start, which is saved if they stay.
    best = sorted(plain, key=gains.__getitem__, reverse=True)[:2]
    workers = [[remedies[name], *flags] for name in best] or [flags]
    cache = [remedies[name] for name in gains if remedies[name].change.cache]
    fast = [remedies[name] for name in gains if remedies[name].change.fast]
    ways = (*workers, [*workers[0], *cache], [*fast, *cache])
    joined = [_joined(parts) for parts in ways if len(parts) > 1]
    return list({both.name: both for both in joined}.values())


def _joined(parts: list[Remedy]) -> Remedy:
    return Remedy(
        name=" + ".join(part.name for part in parts),
        change=reduce(or_, (part.change for part in parts)),
        effort=sum(part.effort for part in parts),
        says=tuple(dict.fromkeys(said for part in parts for said in part.says)),
    )


def code_of(
    change: Change, *, given_to_fit: bool, validates: bool, home: str = "lightning_fastdata"
) -> list[str]:
    """Return lines of code for a change; ``...`` stands for the arguments of the script's loader.

    ``given_to_fit``: whether the script passes its loaders to ``trainer.fit(model, loader, ...)``.
    ``validates``: whether it has a loader for validation. ``home``: the module that has the
    ``FastDataModule`` for the script's Trainer.
    """
    if change.fast and given_to_fit and not change.cache:
        given = "train_loader, val_loader" if validates else "train_loader"
        return [
            f"from {home} import FastDataModule",
            f'data = FastDataModule.from_loaders({given}, num_workers="auto")',
            "trainer.fit(model, datamodule=data)",
        ]
    names = ["CachedDataset"] * (change.cache is not None) + ["FastDataLoader"] * change.fast
    lines = [f"from lightning_fastdata import {', '.join(names)}"] if names else []
    kind = "FastDataLoader" if change.fast else "DataLoader"
    dataset = f'CachedDataset(dataset, "{change.cache}")' if change.cache else "dataset"
    arguments = [dataset, "..."]
    number = '"auto"' if change.fast else change.num_workers
    arguments += [] if number is None else [f"num_workers={number}"]
    arguments += ["persistent_workers=True"] * change.persistent_workers
    return [*lines, f"loader = {kind}({', '.join(arguments)})"]
