"""Findings about batches that came late, from workers of this machine or actors of a cluster."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial
from itertools import accumulate
from typing import Final

from lightning_fastdata.errors import printable, rounded
from lightning_fastdata.insight.model import remedies
from lightning_fastdata.insight.model.evidence import Evidence
from lightning_fastdata.insight.model.finding import (
    ALL_COSTS,
    Advice,
    Finding,
    Gain,
    Rule,
    found,
    of_wait,
)
from lightning_fastdata.insight.waits.causes import (
    OperationShare,
    lock_between_processes,
    where_text,
)
from lightning_fastdata.tuning.simulate import BatchCost, scaled, simulate

_DOMINANT: Final = 0.4
_SLOW_HIGH, _BUSY_HIGH = 0.30, 0.95
_SHARED, _BY_THEMSELVES = 0.35, 0.75
"""Of what more workers should bring if each waits by itself: below, they wait for something that
they share; above, they do not."""
_OTHERS: Final = "held up by other programs"
_CACHE: Final = Advice(
    text="cache samples (FastDataModule(cache='auto'))", changes=("cache",), joins=True
)
_ON_DEVICE: Final = Advice(text="augmentation on the device", changes=("augment_on",), joins=True)
_NAMED: Final = 0.2
"""Of reading: an operation that takes less is not named."""
_COLLATE_LESS: Final = (
    "samples of few arrays, and one torch.stack or np.stack for each of them in collate_fn; or a "
    "__getitems__ of the dataset that reads a batch at once"
)
_HIGH: Final = 0.20
"""Part of the wait: what takes less is no finding."""
_LEAST_MS, _OF_STEP = 1.0, 0.05
"""What costs a step less is no finding, however short the wait is."""
_NEARLY_ALL: Final = 0.9
"""Of the samples."""
_FEW: Final = 0.5
"""Of the workers: if no more make nearly everything, the shares are uneven."""
_TWICE: Final = 2.0
"""Even shares: if the busiest worker makes as many, a stream takes twice as long as it could."""
_IF_UNEVEN: Final = ALL_COSTS | {"FD302", "FD303", "FD304", "FD305"}
"""What the last four recommend or conclude is right where all workers work."""
_FEW_ARRAYS: Final = Advice(text="batches of few tensors or arrays")
_AS_MEMORY: Final = Advice(
    text=f"{_FEW_ARRAYS.text}, with LoaderOptions(executor='workers'), which hands over memory",
    changes=("executor",),
)
_FEWER_BYTES: Final = Advice(
    text="samples of fewer bytes (images as uint8, made float on the device)"
)
_WAYS: Final[dict[str, tuple[str, tuple[Advice, ...]]]] = {
    "handover": ("handing complete batches over", (_AS_MEMORY, _FEW_ARRAYS)),
    "pin": (
        "copying batches into page-locked memory",
        (
            _FEWER_BYTES,
            Advice(text="pin_memory=False", changes=("pin_memory",), joins=True),
        ),
    ),
    "network": (
        "the way of complete batches from their actors",
        (_FEWER_BYTES, Advice(text="actors on nearer nodes (Ray(resources={...}))", joins=True)),
    ),
}
"""Part of the wait in which a batch is made and not here -> in words, and what to try."""


def largest(e: Evidence) -> tuple[str, float]:
    """Return the part of the wait that stands out, if one does; CPU time with waiting for CPUs.

    Returns:
        A field of :class:`WaitParts` without its unit, and its share of the wait; ``""`` and 0 if
        none is 40 % of it.
    """
    shares = remedies.part_shares(e)
    if shares:
        shares["read_cpu"] += shares.pop("read_runqueue") + shares.pop("queued")
        if _at_limit(e):
            shares["read_blocked"] += shares.pop("slow_sample")
    name = max(shares, key=shares.__getitem__, default="")
    share = shares.get(name, 0.0)
    return (name, share) if share >= _DOMINANT else ("", 0.0)


def _more_workers(
    e: Evidence, otherwise: Finding, *, together: bool = False, computing: bool = False
) -> Finding:
    """Return the finding with the number of workers that the model recommends, if one helps.

    ``together``: they may wait for something that they share, of which the model knows nothing.
    ``computing``: they compute, so that no more of them are of use than there are CPUs.
    """
    wanted, now = remedies.best_workers(e, computing=computing), e.setup
    if wanted is None or now is None:
        return otherwise
    gain = remedies.gain_of(e, setup=wanted)
    helps = wanted.workers > now.workers and gain is not None and gain.worthwhile
    if helps and gain is not None and "num_workers" not in e.closed:
        if together:
            gain = replace(gain, basis="independent")
        more = remedies.advised(now, wanted, gain)
        return replace(otherwise, advice=(more, *otherwise.advice))
    leave = f"the number of workers: more than {now.workers} are no faster"
    if "num_workers" in e.closed:
        leave = f"the number of workers, {e.closed['num_workers']}"
    return replace(otherwise, leave_alone=leave)


def _slow_samples(e: Evidence) -> Finding | None:
    share = remedies.part_shares(e).get("slow_sample", 0.0)
    if share < _SLOW_HIGH or _at_limit(e):
        return None
    named = ", ".join(
        f"{printable(str(s.path or s.index), keep='')} "
        f"({s.ms:.0f} ms, others {rounded(s.typical_ms, 2)})"
        for s in e.slow_samples[:3]
    )
    cause = of_wait(e, share, "waiting for single slow samples")
    if e.overtaken_share:
        cause += f"; {e.overtaken_share:.0%} of the batches held up complete ones"
    repair = f"repair these samples: {named}" if named else "repair the slow samples"
    gain = _gain_of(e, share, scaled(e.costs, slow_samples=False))
    finding = found(
        "FD302", e.stall_share, cause, Advice(text=repair, part=share), gain, "the other samples"
    )
    alone = e.setup is not None and not e.setup.workers
    return _more_workers(e, finding) if alone else finding


def _read_more_by(e: Evidence) -> float | None:
    """Return what more workers bring: 1 as much more as they are, 0 nothing; None: not tried."""
    rates = e.read_rates
    if rates is None or rates.many <= rates.few or min(rates.few_per_s, rates.many_per_s) <= 0:
        return None
    return math.log(rates.many_per_s / rates.few_per_s) / math.log(rates.many / rates.few)


def _shares(e: Evidence) -> bool:
    """Return whether workers wait for something that they share."""
    more = _read_more_by(e)
    if more is not None:
        return more < _SHARED
    return lock_between_processes(e.lines) and e.setup is not None


def _at_limit(e: Evidence) -> bool:
    """Return whether storage gives all it has: then it is slow to whichever reader comes last.

    Behind a sample that is slow by itself, workers have nothing to do after a while.
    """
    return _shares(e) and e.busy_share is not None and e.busy_share > _BUSY_HIGH


def _where_it_waits(e: Evidence, share: float) -> str:
    """Return the longest line if it waits for a fifth of reading or more, in words.

    That is known of a line that takes so much more of reading than is not waited. ``share``: Of the
    wait, what is.
    """
    shares = remedies.part_shares(e)
    computes = shares.get("read_cpu", 0.0) + shares.get("read_runqueue", 0.0)
    return where_text(e.lines, beside=computes / (computes + share))


def _latency(e: Evidence) -> Finding | None:
    name, share = largest(e)
    if name != "read_blocked" or _shares(e):
        return None
    finding = found(
        "FD303",
        e.stall_share,
        of_wait(e, share, "waiting for storage, a network or a lock") + _where_it_waits(e, share),
        (Advice(text="keep the data on a local disk", part=share), _CACHE),
        _gain_of(e, share, scaled(e.costs, blocked=0.0)),
        "transforms: the CPUs are not what is short",
    )
    return _more_workers(e, finding, together=(_read_more_by(e) or 0.0) < _BY_THEMSELVES)


def _bandwidth(e: Evidence) -> Finding | None:
    name, share = largest(e)
    if name != "read_blocked" or not _shares(e):
        return None
    cause = of_wait(e, share, "waiting for a lock, a disk or a line that workers share")
    if e.read_rates is not None:
        few, few_per_s, many, many_per_s = e.read_rates
        cause += f"; {many} workers read {rounded(many_per_s, 3)} samples/s and {few} of them "
        cause += f"{rounded(few_per_s, 3)}"
    return found(
        "FD304",
        e.stall_share,
        cause + _where_it_waits(e, share),
        (Advice(text="find the lock, or keep the data on a local disk", part=share), _CACHE),
        _gain_of(e, share, scaled(e.costs, blocked=0.0)),
        "the number of workers: more of them read no more",
    )


def _saturated(e: Evidence) -> bool:
    loads = remedies.runqueue_share(e) >= remedies.RUNQUEUE_HIGH or remedies.throttled(e)
    reads = largest(e)[0] == "read_cpu"
    return e.stalls and loads and reads and remedies.overcommitted(e) and not remedies.crowded(e)


def _named(e: Evidence) -> OperationShare | None:
    """Return the operation of a pipeline that takes most, if that is a fifth of reading."""
    return next((op for op in e.operations if op.augments and op.share >= _NAMED), None)


def _transforms(e: Evidence) -> tuple[Advice, ...]:
    """Return what makes reading take less of a CPU."""
    named = _named(e)
    takes = "" if named is None else f" ({named.name} takes {named.share:.0%} of reading)"
    cheaper = Advice(text=f"cheaper transforms{takes}")
    return (cheaper, *([_ON_DEVICE] if e.device_could_augment else []), _CACHE)


def _gain_of_transforms(e: Evidence) -> Gain | None:
    shares = remedies.part_shares(e)
    part = sum(shares.get(f"read_{kind}", 0.0) for kind in ("cpu", "runqueue"))
    named = _named(e)
    less = 1.0 if named is None else named.share
    return _gain_of(e, less * (part or 1.0), scaled(e.costs, cpu=1 - less))


def _spent(
    e: Evidence,
    code: str,
    share: float,
    what: str,
    remedy: str | Advice | tuple[Advice, ...],
    leave: str,
    gain: Gain | None = None,
) -> Finding:
    """Return the finding that a share of the wait, 0 to 1, is spent on something.

    ``gain``: what less of it gains; None: at most the whole share.
    """
    gain = gain or remedies.without(e, share * (e.stall_ms or 0.0))
    return found(code, e.stall_share, of_wait(e, share, what), remedy, gain, leave)


def _gain_of(e: Evidence, share: float, costs: list[BatchCost]) -> Gain | None:
    """Return what batches of other costs gain; where none were recorded, what it is at most."""
    return remedies.gain_of(e, costs=costs) or remedies.without(e, share * (e.stall_ms or 0.0))


def _few_workers(e: Evidence) -> Finding | None:
    name, share = largest(e)
    starved = remedies.queued_share(e) > share / 2
    if name != "read_cpu" or starved or _saturated(e) or remedies.crowded(e):
        return None
    cause = of_wait(e, share, "reading and transforming samples on a CPU")
    leave = "storage: it is not what is waited for"
    cause += where_text(e.lines)
    finding = found("FD305", e.stall_share, cause, _transforms(e), _gain_of_transforms(e), leave)
    return _more_workers(e, finding, computing=True)


def _few_cpus(e: Evidence) -> Finding | None:
    if not _saturated(e):
        return None
    facts = [f"ready workers wait for a CPU for {remedies.runqueue_share(e):.0%} of their time"]
    if remedies.throttled(e):
        facts.append(f"the CPU quota was used up in {e.machine.throttled_share:.0%} of the periods")
    wanted, now = remedies.best_workers(e), e.setup
    remedy = _transforms(e)
    if now is not None:
        workers = "1 worker" if now.workers == 1 else f"{now.workers} workers"
        facts.append(f"{workers} and the training share {now.cpus:g} CPUs")
        if now.worker_threads > 1:
            facts.append(f"a worker uses {now.worker_threads:.1f} of them while it computes")
            threads = "one thread for each worker (torch.set_num_threads(1), cv2.setNumThreads(0) "
            alone = remedies.gain_of(e, setup=replace(now, worker_threads=1.0))
            one = Advice(text=f"{threads}in worker_init_fn)", gain=alone)
            remedy = (one, *remedy)
        if wanted is not None and wanted.workers < now.workers:
            gain = remedies.gain_of(e, setup=wanted)
            remedy = (remedies.advised(now, wanted, gain), *remedy)
    cause = "; ".join(facts) + where_text(e.lines)
    leave = "more workers: they would share the same CPUs"
    return found("FD306", e.stall_share, cause, remedy, _gain_of_transforms(e), leave)


def _collation(e: Evidence) -> Finding | None:
    name, share = largest(e)
    if name != "collate":
        return None
    gain = remedies.gain_of(e, costs=scaled(e.costs, collate=0.0))
    less = Advice(text=_COLLATE_LESS, part=share)
    return _spent(e, "FD307", share, "collating samples", less, "reading and transforms", gain)


def _neighbours(e: Evidence) -> Finding | None:
    runqueue = remedies.runqueue_share(e)
    own = e.setup is None or e.wanted_cpus is None or remedies.overcommitted(e)
    if not e.stalls or runqueue < remedies.RUNQUEUE_HIGH:
        return None
    here = e.setup is not None and not e.setup.workers
    if (own or here) and not remedies.crowded(e):
        return None
    facts = [f"workers, or the training process, wait for a CPU for {runqueue:.0%} of the time"]
    if e.setup is not None and e.wanted_cpus is not None:
        facts.append(f"own work needs {e.wanted_cpus:.1f} of {e.setup.cpus:g} CPUs")
    if (e.machine.other_cpus or 0.0) >= remedies.OTHERS_LOW:
        facts.append(f"other programs use {e.machine.other_cpus:.1f} CPUs of this machine")
    return found(
        "FD315",
        e.stall_share,
        "; ".join(facts),
        "find what else runs on this machine, if only threads that transforms start "
        "(cv2.setNumThreads(0)), or give this process CPUs of its own (taskset, a cgroup)",
        remedies.without(e, max(0.0, (e.stall_ms or 0.0) - remedies.alone_wait_ms(e))),
        "more workers: they would wait, too",
    )


def _own(e: Evidence, part: str, code: str, what: str, remedy: str, leave: str) -> Finding | None:
    """Return the finding that the training process itself takes long for a part of the wait."""
    share = remedies.part_shares(e).get(part, 0.0)
    return _spent(e, code, share, what, remedy, leave) if _costs_enough(e, share) else None


_sampler: Final = partial(
    _own,
    part="sampler",
    code="FD323",
    what="asking the sampler which samples come next, in the training process,",
    remedy="a sampler that computes the order of an epoch once, in __iter__, and then gives "
    "numbers of an array",
    leave="the number of workers: the sampler runs in the training process",
)
_unpacking: Final = partial(
    _own,
    part="unpack",
    code="FD324",
    what="unpickling batches in the training process",
    remedy="batches of few large tensors or arrays: many small objects (lists, dicts, strings) are "
    "made anew one by one; have collate_fn put them together in the workers",
    leave="the number of workers: batches are unpickled in the training process",
)


def _costs_enough(e: Evidence, share: float) -> bool:
    spent_ms = share * (e.stall_ms or 0.0)
    return share >= _HIGH and spent_ms >= _LEAST_MS and (e.of_step(spent_ms) or 0.0) >= _OF_STEP


def _on_the_way(e: Evidence) -> Finding | None:
    """Return the finding that batches are long on their way here once they are made."""
    dominant, _ = largest(e)
    name = dominant if dominant in _WAYS else "handover"
    share, (what, advice) = remedies.part_shares(e).get(name, 0.0), _WAYS[name]
    if name == "handover" and not _hands_over_long(e, share):
        return None
    if name == "handover" and e.setup is not None and e.setup.scheduling == "sample":
        # Batches are handed over as memory already.
        text = "find threads of the training process that compute, such as loggers and "
        text += "callbacks, as they hold the interpreter's lock; then smaller batches"
        advice = (Advice(text=text),)
    parts = tuple(replace(each, part=share) for each in advice)
    return _spent(e, "FD308", share, what, parts, "the number of workers")


def _hands_over_long(e: Evidence, share: float) -> bool:
    """Return whether the hand-over itself takes this share of the wait, and nothing behind it."""
    gain = remedies.without(e, share * (e.stall_ms or 0.0))
    queues = remedies.runqueue_share(e) >= remedies.RUNQUEUE_HIGH and share < _DOMINANT
    if queues or remedies.crowded(e):
        return False  # who sends a batch away waits for a CPU as those do who make it
    if not _costs_enough(e, share) or (e.setup is not None and not e.setup.workers):
        return False
    return gain is None or gain.worthwhile


def _uneven(e: Evidence) -> Finding | None:
    """Return whether few workers make nearly all samples of a stream, or one of them far too many.

    Workers that each yield the whole stream make as many samples as each other, and are not meant.
    """
    working = working_workers(e.stream_samples)
    workers = len(e.stream_samples)
    if not working or not e.stalls:
        return None
    if working > _FEW * workers:
        working = 1
        if max(e.stream_samples) * workers < _TWICE * sum(e.stream_samples):
            return None
    share = sum(sorted(e.stream_samples)[-working:]) / sum(e.stream_samples)
    who = f"{working} of {workers} workers make"
    if working == 1:
        who = f"one of {workers} workers makes"
    return found(
        "FD325",
        e.stall_share,
        f"{who} {share:.0%} of the samples of this stream, and waiting for batches costs "
        f"{e.stall_share or 0.0:.0%} of each step",
        "share the stream out evenly: at least as many files as workers, of equal size, each read "
        "by one worker (get_worker_info() in __iter__)",
        _gain_of_even_shares(e),
        "more workers: they would have nothing to do",
    )


def working_workers(samples: tuple[int, ...]) -> int:
    """Return the fewest workers that make nine tenths of the samples, of those of each worker."""
    wanted = _NEARLY_ALL * sum(samples)
    made = accumulate(sorted(samples, reverse=True))
    return next((number for number, so_far in enumerate(made, 1) if so_far >= wanted > 0), 0)


def _gain_of_even_shares(e: Evidence) -> Gain | None:
    """Return what the recorded batches would take if all workers made them."""
    if e.setup is None or not e.costs or e.step_ms is None:
        return None
    # As many workers as would be busy if each had as much to do as the busiest one.
    busy = max(1, round(sum(e.stream_samples) / max(e.stream_samples)))
    now = simulate(e.costs, replace(e.setup, workers=busy)).step_ms
    even = simulate(e.costs, replace(e.setup, workers=len(e.stream_samples))).step_ms
    if now <= 0:
        return None
    after_ms = e.step_ms * min(1.0, even / now)
    return Gain(before_ms=e.step_ms, after_ms=after_ms, basis="simulated")


RULES: Final = (
    Rule("FD302", "slow samples hold up their batches", _slow_samples, "loader", ALL_COSTS),
    Rule("FD303", "reading waits for storage", _latency, "loader", ALL_COSTS),
    Rule("FD304", "workers share what they wait for", _bandwidth, "loader", ALL_COSTS),
    Rule("FD305", "reading and transforming take long", _few_workers, "loader", ALL_COSTS),
    Rule("FD306", "own work wants more CPUs than there are", _few_cpus, "loader", ALL_COSTS),
    Rule("FD307", "collation takes long", _collation, "loader", ALL_COSTS),
    Rule("FD315", "other programs have the CPUs", _neighbours, "machine", ALL_COSTS, kind=_OTHERS),
    Rule("FD323", "the sampler takes long", _sampler, "loader", ALL_COSTS, after="FD307"),
    Rule("FD324", "batches take long to unpickle", _unpacking, "loader", ALL_COSTS, after="FD307"),
    Rule("FD308", "complete batches are long on their way", _on_the_way, "loader", ALL_COSTS),
    Rule("FD325", "few workers make most of a stream", _uneven, "loader", _IF_UNEVEN, "FD104"),
)
