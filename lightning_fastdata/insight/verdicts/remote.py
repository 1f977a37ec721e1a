"""Findings about batches that actors of a cluster make."""

from __future__ import annotations

import statistics
from typing import Final

from lightning_fastdata.errors import printable
from lightning_fastdata.insight.model import remedies
from lightning_fastdata.insight.model.evidence import Evidence
from lightning_fastdata.insight.model.finding import Advice, Finding
from lightning_fastdata.insight.verdicts.late_batches import largest
from lightning_fastdata.insight.verdicts.rule import ALL_COSTS, Rule, found, of_wait
from lightning_fastdata.tuning.simulate import scaled

_FULL: Final = 0.9
"""Of the object stores, where it is not told what was written to disk."""
_UINT8, _ON = "uint8 pixels that the device floats", ("augment_on",)
_NEAR: Final = (
    "smaller batches; or actors on nearer nodes (LoaderOptions(actor_options={'resources': ...}))"
)
_TIMES: Final = 1.5
"""A node is slow whose samples take so many times as long as those of the others."""
_FEWEST_BATCHES: Final = 8
"""Of a node, and of all others."""


def _network(e: Evidence) -> Finding | None:
    name, share = largest(e)
    if name != "network":
        return None
    cause = of_wait(e, share, "the way of complete batches from their actors")
    if e.remote is not None and e.remote.way_ms is not None:
        cause += f"; a batch takes {e.remote.batch_bytes / 1e6:.3g} MB in {e.remote.way_ms:.3g} ms"
    on_device = (Advice(text=f"{_UINT8} (FastDataModule(augment_on='gpu')); {_NEAR}", changes=_ON),)
    return found(
        "FD327",
        e.stall_share,
        cause,
        (*(on_device if e.augment_ms is None else ()), Advice(text=f"{_UINT8}; {_NEAR}")),
        remedies.without(e, share * (e.stall_ms or 0.0)),
        "the number of actors: more of them share the same way",
    )


def _store(e: Evidence) -> Finding | None:
    seen = e.remote
    if seen is None or not e.stalls:
        return None
    if seen.spilled_bytes:
        cause = f"object stores were full, and wrote {seen.spilled_bytes / 1e6:.0f} MB to disk"
    elif seen.spilled_bytes is None and (seen.store_used_share or 0.0) >= _FULL:
        cause = f"the object stores are {seen.store_used_share:.0%} full"
    else:
        return None
    return found(
        "FD328",
        e.stall_share,
        f"{cause}, while waiting for data costs {e.stall_share or 0.0:.0%} of each step",
        "larger object stores (ray start --object-store-memory, in bytes), smaller batches or "
        "fewer actors; and let other programs of the cluster drop what they hold",
        remedies.without(e, e.stall_ms),
        "the network: what is read from disk again looks like it",
    )


def _few_actors(e: Evidence) -> Finding | None:
    now, seen = e.setup, e.remote
    if not e.stalls or "num_workers" in e.closed or now is None or seen is None:
        return None
    wanted = remedies.best_workers(e)
    if wanted is None:
        return None
    gain = remedies.gain_of_setup(e, wanted)
    if wanted.workers <= now.workers or gain is None or not gain.worthwhile:
        return None
    busy = "" if e.busy_share is None else f", busy {e.busy_share:.0%} of the time,"
    return found(
        "FD329",
        e.stall_share,
        f"{now.workers} actors{busy} make batches more slowly than the training takes them, which "
        f"costs {e.stall_share or 0.0:.0%} of each step; the cluster has {seen.free_cpus:g} CPUs "
        "free",
        remedies.advised(now, wanted, gain),
        gain,
        "the network: it is not what is waited for",
    )


def _slow_node(e: Evidence) -> Finding | None:
    if e.remote is None or not e.stalls or len(e.remote.nodes) < 2:
        return None
    slow, *others = e.remote.nodes
    usual_ms = statistics.median(each.sample_ms for each in others)
    rest = sum(each.batches for each in others)
    if min(slow.batches, rest) < _FEWEST_BATCHES or slow.sample_ms < _TIMES * usual_ms:
        return None
    now_ms = (slow.batches * slow.sample_ms + rest * usual_ms) / (slow.batches + rest)
    factor = usual_ms / now_ms
    return found(
        "FD330",
        e.stall_share,
        f"samples take {slow.sample_ms:.3g} ms on {printable(slow.name, keep='')}, "
        f"{slow.sample_ms / usual_ms:.1f} times as long as on the other nodes ({usual_ms:.3g} ms)",
        f"find what else runs on {printable(slow.name, keep='')}, or keep actors off it "
        "(LoaderOptions(actor_options={'label_selector': ...}))",
        remedies.gain_of_costs(e, scaled(e.costs, cpu=factor, blocked=factor, collate=factor)),
        "the other nodes",
    )


_IF_MORE_HELP: Final = ALL_COSTS | {"FD303", "FD305", "FD309"}
"""What these say of workers is said here of actors, and of the CPUs that a cluster has."""
RULES: Final = (
    Rule("FD327", "batches of actors are long on their way", _network, "loader", ALL_COSTS),
    Rule("FD328", "the cluster's object stores are full", _store, "machine", ALL_COSTS),
    Rule("FD329", "the actors are too few", _few_actors, "loader", _IF_MORE_HELP, "FD301"),
    Rule("FD330", "one node of the cluster is slow", _slow_node, "loader", ALL_COSTS, "FD301"),
)
