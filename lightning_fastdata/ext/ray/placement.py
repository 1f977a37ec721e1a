"""Where actors go: nodes other than the training's first, and never a CPU that a training needs."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal, TypeAlias

Where: TypeAlias = Literal["elsewhere", "here", "options", "shared"]
"""On any node but the training's own; on that; where the options of the user say; or without a CPU
of its own, beside whoever holds that."""

_PLACING: Final = frozenset(
    {
        "scheduling_strategy",
        "label_selector",
        "fallback_strategy",
        "resources",
        "memory",
        "num_gpus",
        "accelerator_type",
    }
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """A node of the cluster that is alive."""

    id: str
    is_own: bool
    """The training process runs there."""
    has: Mapping[str, float]
    """Resources by their names in Ray."""
    free_cpus: float
    """That nobody holds, as of a moment ago."""
    store_bytes: int
    """Size of its object store."""

    @property
    def cpus(self) -> float:
        """CPUs that it has."""
        return self.has.get("CPU", 0.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Training:
    """The ranks that the actors read for."""

    ranks: int = 1
    """Of the whole training."""
    rank: int = 0
    """This one's number among them."""
    ranks_here: int = 1
    """Of those, so many on this machine."""
    held_cpus: float = 0.0
    """That Ray has given each rank, as to a worker of Ray Train; 0: it knows of none."""

    @property
    def kept_cpus(self) -> float:
        """CPUs of the training's own node that no actor may have."""
        return self.ranks_here * max(1.0, self.held_cpus)


def placed_by_user(options: Mapping[str, object]) -> bool:
    """Return whether options of actors say on which nodes they may run."""
    return not _PLACING.isdisjoint(options)


def has_free(nodes: Sequence[Node], needs: Mapping[str, float]) -> bool:
    """Return whether a node has CPUs that nobody holds for an actor that needs so much."""
    return any(_fits({**node.has, "CPU": node.free_cpus}, needs) for node in nodes)


def share_of_rank(
    nodes: Sequence[Node], needs: Mapping[str, float], training: Training
) -> int | None:
    """Return how many actors that need so much each rank may have; None: as many as it wants.

    A rank that took all that there is would wait in its first step for another one, which would
    wait for it.
    """
    if training.ranks == 1:
        return None
    fits = sum(_fits(_left(node, training), needs) for node in nodes)
    taken = (training.ranks - training.ranks_here) * training.held_cpus / _cpus(needs)
    return max(0, fits - math.ceil(taken)) // training.ranks


def place(
    nodes: Sequence[Node],
    *,
    missing: int,
    needs: Mapping[str, float],
    training: Training,
    by_user: bool = False,
    held: int = 0,
    first: bool = False,
    others: bool = False,
) -> list[Where]:
    """Return where actors go that are missing; fewer than that if a rank may not have them.

    Args:
        nodes: Those that are alive.
        missing: So many are asked for.
        needs: What each takes, by the names of Ray: ``{"CPU": 1}``.
        training: The ranks.
        by_user: The options say where.
        held: Actors of this process, of all of its loaders, that have a CPU.
        first: This loader has none yet: it gets one in any case.
        others: Some of those are of other loaders, which do not read at the same time: one that
            validates would wait for ever for a CPU that one that trains holds.
    """
    share = share_of_rank(nodes, needs, training)
    budget = missing if share is None else min(missing, max(0, share - held))
    if by_user:
        places: list[Where] = ["options"] * budget
        # What else they ask for is not known to be free.
        able = int(sum(node.free_cpus for node in nodes) / _cpus(needs)) if others else budget
    else:
        far = sum(_fits({"CPU": node.free_cpus}, needs) for node in nodes if not node.is_own)
        near = sum(_near(node, nodes, needs, training, held) for node in nodes if node.is_own)
        places = ["elsewhere"] * min(budget, far)
        places += ["here"] * min(budget - len(places), near)
        able = len(places)
        # They wait there until something is free, or a node joins.
        places += ["elsewhere"] * (budget - len(places))
    if others:
        return places[: min(able, budget)] + ["shared"] * (missing - min(able, budget))
    return places or (["shared"] if first else [])


def placed(
    options: Mapping[str, Any], where: Where, nodes: Sequence[Node], own: str
) -> dict[str, Any]:
    """Return the options of an actor that is to go there; ``own`` is the id of the own node."""
    found = dict(options)
    if where == "shared":
        found["num_cpus"] = 0
        farther = any(node.cpus and not node.is_own for node in nodes)
        where = "elsewhere" if farther else "here"
    if where != "options" and not placed_by_user(options):
        found["label_selector"] = {"ray.io/node-id": own if where == "here" else f"!{own}"}
    return found


def share_in_words(share: int, wanted: int, training: Training) -> str:
    """Return a sentence on ranks that have fewer actors than they want."""
    have = share or "one, without a CPU of its own,"
    return (
        f"{training.ranks} ranks want {wanted} actors each; beside the CPU that each keeps to "
        f"train, the cluster has CPUs for {share} each. Until there are more, {have} "
        f"read{'s' * (share < 2)} for each. Add nodes, or ask for fewer."
    )


def most_under_way(store_bytes: int, batch_bytes: int, sharers: int) -> int:
    """Return how many batches may be in an object store for one of so many loaders that use it.

    Together they take a quarter of it; but each has two, if half of it holds them, or one.
    """
    each_bytes = max(1, batch_bytes) * max(1, sharers)
    quarter = store_bytes // 4 // each_bytes
    return max(quarter, min(2, store_bytes // 2 // each_bytes), 1)


def _cpus(needs: Mapping[str, float]) -> float:
    return needs.get("CPU", 0.0) or 1e-3


def _fits(has: Mapping[str, float], needs: Mapping[str, float]) -> int:
    """Return how many actors a node holds; one that needs nothing counts as one with little."""
    asked = {name: each for name, each in needs.items() if each > 0 and name in has}
    missing = any(each > 0 and name not in has for name, each in needs.items())
    if missing or not asked:
        return 0 if missing else int(has.get("CPU", 0.0) / _cpus(needs))
    return min(math.floor(max(0.0, has[name]) / each + 1e-6) for name, each in asked.items())


def _left(node: Node, training: Training) -> Mapping[str, float]:
    """Return what a node has for actors."""
    if node.is_own:
        return {**node.has, "CPU": max(0.0, node.cpus - training.kept_cpus)}
    return node.has


def _near(
    own: Node, nodes: Sequence[Node], needs: Mapping[str, float], training: Training, held: int
) -> int:
    """Return how many actors the training's own node may take now."""
    known = training.ranks_here * training.held_cpus  # which are not free in any case
    near = _fits({"CPU": own.free_cpus - (training.kept_cpus - known)}, needs)
    if near or held or training.ranks > 1:
        return near
    anywhere = sum(_fits(_left(node, training), needs) for node in nodes)
    return 0 if anywhere else min(1, _fits({"CPU": own.free_cpus}, needs))
