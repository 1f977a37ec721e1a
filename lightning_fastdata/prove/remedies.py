"""Which changes of a loader are worth a try, by what is known of it, and which it refuses."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Final, Literal, TypeAlias

Changes: TypeAlias = Literal["nothing", "steps", "epochs", "unknown"]
Reader: TypeAlias = Literal["torch", "fast", "chosen", "other"]

_CPU_BOUND: Final = 0.7
"""Of the CPUs that could read, the part in use from which on more workers than CPUs are no use."""
_MOST_WORKERS: Final = 16
_KEEP_UP: Final = 0.03
"""Of a step, the part below which workers keep up with the training."""
_START_SHARE: Final = 0.015
"""Of an epoch: where it starts sooner, workers that stay cannot gain 3 %."""
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
    """What is other in a loader; None and False: as it is."""

    num_workers: int | None = None
    persistent_workers: bool = False
    pin_memory: bool = False
    fast: bool = False
    """This package's loader, which chooses who reads."""
    cache: str | None = None
    """Where samples are kept: ``"ram"`` or ``"disk"``."""
    share: bool = False
    """Lists and dicts of the dataset are in memory that all workers have together."""

    @property
    def lasts(self) -> bool:
        """Its first epoch does what later ones need not do again."""
        return self.persistent_workers or self.fast or self.cache is not None

    def __or__(self, other: Change) -> Change:
        """Return both; the other's number of workers wins."""
        number = self.num_workers if other.num_workers is None else other.num_workers
        return Change(
            num_workers=number,
            persistent_workers=self.persistent_workers or other.persistent_workers,
            pin_memory=self.pin_memory or other.pin_memory,
            fast=self.fast or other.fast,
            cache=self.cache or other.cache,
            share=self.share or other.share,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Remedy:
    """One change to try, or several together."""

    name: str
    """As the table calls it."""
    change: Change
    effort: float
    """How much of the program and the machine it takes: of two that gain the same, the smaller."""
    says: tuple[str, ...] = ()
    """What else changes with it."""

    @classmethod
    def of_dict(cls, known: Mapping[str, Any]) -> Remedy:
        """Return what `dataclasses.asdict` made plain."""
        says = tuple(known["says"])
        return cls(**{**known, "change": Change(**known["change"]), "says": says})


@dataclass(frozen=True, slots=True, kw_only=True)
class Refused:
    """A remedy that is not tried."""

    name: str
    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class LoaderFacts:
    """What decides which remedies there are."""

    reader: Reader
    """``"torch"``: a plain DataLoader; ``"fast"``: ours with a number of workers; ``"chosen"``:
    ours, which chooses; ``"other"``: a class of loaders of its own, or several loaders."""
    num_workers: int
    cpus: int
    """Usable ones."""
    cuda: bool
    """A CUDA device trains."""
    used_cpus: float
    """CPUs that the training and its workers used."""
    step_share: float = 1.0
    """Of a step in the middle of an epoch, what free data would save, 0 to 1."""
    start_share: float = 0.0
    """Of an epoch, what its start takes until the first batch is there, 0 to 1."""
    persistent: bool = False
    pinned: bool = False
    stream: bool = False
    """The dataset is iterable: it has no index."""
    changes: Changes = "nothing"
    """What was seen to change the dataset, its collate_fn or its own sampler while it is read;
    ``"unknown"``: they cannot be compared."""
    in_globals: bool = False
    """Only globals of the user's modules changed in its steps, which the dataset may read."""
    cached: bool = False
    keeps_bytes: float = 0.0
    """What all samples take, as they come out of the loader."""
    free_bytes: float = 0.0
    """What a cache in memory may take."""
    epochs: float = math.inf
    """Of the training."""
    objects: str = ""
    """The largest list or dict that workers would copy, in words; empty: none is large."""
    pipeline: str = ""
    """An Albumentations pipeline that the dataset holds; empty: none that is known."""


FAST: Final = "the loader of this package"
SHARE: Final = "share(dataset)"
PERSIST: Final = Remedy(
    name="persistent_workers=True", change=Change(persistent_workers=True), effort=1
)


def named(facts: LoaderFacts) -> tuple[list[Remedy], list[Refused]]:
    """Return the remedies that the evidence names, and those of them that must not be tried."""
    if facts.reader == "other":
        why = "the batches come from no plain DataLoader, which alone can be made anew"
        return [], [Refused(name="another loader", why=why)]
    if facts.reader == "chosen":
        why = "this package chooses them for the loader already"
        return [], [Refused(name="workers, persistence and pinning", why=why)]
    # What is most likely to help comes first, as the time may not do for all.
    workers, others = _workers(facts), _others(facts)
    wanted = [*others[:1], *workers[:1], *_flags(facts), *others[1:], *workers[1:]]
    remedies, refused = [], []
    for remedy in wanted:
        why = _why_not(remedy.change, facts)
        if why:
            refused.append(Refused(name=remedy.name, why=why))
        elif facts.changes == "unknown":
            said = "what is read cannot be compared: make sure that no step changes it"
            remedies.append(replace(remedy, says=(*remedy.says, said)))
        else:
            remedies.append(remedy)
    if facts.pipeline:
        where = "no CUDA device trains" if not facts.cuda else "it changes the dataset itself"
        why = f"{where}; FastDataModule(augment=...) decides it by a trial of its own"
        refused.append(Refused(name=f"augmentation of {facts.pipeline} on the device", why=why))
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


def _flags(facts: LoaderFacts) -> list[Remedy]:
    found = []
    if facts.num_workers and not facts.persistent and facts.start_share > _START_SHARE:
        found.append(PERSIST)
    if facts.cuda and not facts.pinned:
        found.append(Remedy(name="pin_memory=True", change=Change(pin_memory=True), effort=1))
    return found


def _others(facts: LoaderFacts) -> list[Remedy]:
    found = [Remedy(name=FAST, change=Change(fast=True), effort=2, says=(_OWN_DRAWS,))]
    if facts.objects and facts.changes == "nothing":  # what is shared can no longer change
        says = f"{facts.objects} is held once, and can no longer be changed"
        found.append(Remedy(name=SHARE, change=Change(share=True), effort=2, says=(says,)))
    if not facts.cached:
        found.append(
            Remedy(name="a cache in memory", change=Change(cache="ram"), effort=3, says=(_FILLED,))
        )
    return found


def _why_not(change: Change, facts: LoaderFacts) -> str:
    """Return why a change must not be tried; empty: it may."""
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
        what = "its steps change what is read"
        if facts.in_globals:
            what = "its steps change globals, which may be read (a loop in a function has none)"
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
    """Return the best remedies together, at most one of each kind of loader.

    Args:
        remedies: Those that were tried one at a time.
        gains: How many times as fast an epoch is with those that help.
        may_persist: Workers that were not there before may stay between epochs.
    """
    plain = [name for name in gains if remedies[name].change.num_workers is not None]
    flags = [remedies[n] for n in gains if _is_flag(remedies[n].change)]
    if plain and may_persist and PERSIST.name not in remedies:
        flags.insert(0, PERSIST)
    # Several numbers: the start of many workers is what they lose by, and where they stay, there
    # is none.
    workers = [[remedies[n], *flags] for n in sorted(plain, key=gains.__getitem__, reverse=True)]
    workers = workers[:2] or [flags]
    cache = [remedies[n] for n in gains if remedies[n].change.cache]
    fast = [remedies[n] for n in gains if remedies[n].change.fast]
    joined = {}
    for parts in (*workers, [*workers[0], *cache], [*fast, *cache]):
        if len(parts) > 1:
            both = _joined(parts)
            joined[both.name] = both
    return list(joined.values())


def _is_flag(change: Change) -> bool:
    return change.persistent_workers or change.pin_memory


def _joined(parts: list[Remedy]) -> Remedy:
    change = Change()
    for part in parts:
        change = change | part.change
    return Remedy(
        name=" + ".join(part.name for part in parts),
        change=change,
        effort=sum(part.effort for part in parts),
        says=tuple(dict.fromkeys(said for part in parts for said in part.says)),
    )


_SHORT: Final = {"training": "train", "validation": "val"}
"""Stages, as variables are named for them."""

# -- what to write ---------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class CallSeen:
    """How a loader was made, as far as it can be told from the loader."""

    stage: str
    """``"training"`` or ``"validation"``."""
    kind: str
    """Its class."""
    dataset: str
    """The class of its dataset."""
    dataset_name: str = "dataset"
    """What the lines to paste call it; other datasets have other names."""
    arguments: Mapping[str, str]
    """Name -> as it is written in Python; those that differ from the defaults."""


def code_of(
    change: Change,
    calls: list[CallSeen],
    *,
    given_to_fit: bool,
    home: str = "lightning_fastdata",
) -> list[str]:
    """Return the lines to paste.

    Args:
        change: What is to be other.
        calls: The loaders that it concerns.
        given_to_fit: ``trainer.fit(model, loader, ...)`` was given the loaders.
        home: The module that has the data module which the Trainer takes.
    """
    if change.fast and given_to_fit and not change.cache:
        given = "train_loader, val_loader" if len(calls) > 1 else "train_loader"
        return [
            f"from {home} import FastDataModule",
            f'data = FastDataModule.from_loaders({given}, num_workers="auto")',
            "trainer.fit(model, datamodule=data)",
        ]
    new = change.fast and any(call.kind == "DataLoader" for call in calls)
    names = ["CachedDataset"] * (change.cache is not None) + ["FastDataLoader"] * new
    names += ["share"] * change.share
    lines = [f"from lightning_fastdata import {', '.join(names)}"] if names else []
    stages: list[str] = []
    for call in calls:
        dataset = call.dataset_name
        if change.share:
            dataset = f"share({dataset})"
        if change.cache:
            dataset = f'CachedDataset({dataset}, "{change.cache}")'
        arguments = dict(call.arguments)
        if change.fast:
            for name in ("num_workers", "persistent_workers", "prefetch_factor", "pin_memory"):
                arguments.pop(name, None)
            arguments["num_workers"] = '"auto"'
        if change.num_workers is not None:
            arguments["num_workers"] = str(change.num_workers)
        if change.persistent_workers:
            arguments["persistent_workers"] = "True"
        if change.pin_memory:
            arguments["pin_memory"] = "True"
        kind = "FastDataLoader" if change.fast else call.kind
        given = ", ".join([dataset, *(f"{name}={text}" for name, text in arguments.items())])
        stages.append(call.stage)
        number = f"_{alike}" if (alike := stages.count(call.stage)) > 1 else ""
        made = f"{_SHORT[call.stage]}_loader{number}"
        lines.append(f"{made} = {kind}({given})  # {call.stage}, of {call.dataset}")
    return lines
