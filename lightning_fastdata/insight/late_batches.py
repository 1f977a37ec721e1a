"""Batches that came late, from workers of this machine or actors of a cluster: why, and what helps.

The stamps of batches show it.
"""

from __future__ import annotations

import math
import statistics
from dataclasses import replace
from functools import partial
from typing import Final

from lightning_fastdata.errors import printable, rounded
from lightning_fastdata.insight.evidence import DOMINANT, OTHERS_LOW, RUNQUEUE_HIGH, Evidence
from lightning_fastdata.insight.finding import (
    ALL_COSTS,
    Advice,
    Finding,
    Gain,
    Rule,
    cpus_text,
    make_finding,
)
from lightning_fastdata.insight.waits import (
    SLOW_FACTOR,
    OperationShare,
    lock_between_processes,
    seen_at_lock,
    where_text,
)
from lightning_fastdata.loading.simulate import LoaderSetup, scaled

_SLOW_HIGH, _BUSY_HIGH = 0.30, 0.95
_MANY: Final = 0.1
"""Part of all samples, 0 to 1, above which slow ones are no exceptions that could be repaired."""
_SHARED, _BY_THEMSELVES = 0.35, 0.75
"""Bounds of what :func:`_read_more_by` returns: below the first, workers wait for something that
they share; from the second on, each waits by itself."""
_OTHERS: Final = "held up by other programs"
_CACHE: Final = Advice(
    text="cache samples (FastDataModule(cache='auto'))", changes=("cache",), joins=True
)
_READING: Final = ("read_cpu", "read_runqueue", "read_blocked", "slow_sample")
"""Parts of the wait that samples which are kept do not have."""
_ON_DEVICE: Final = Advice(text="augmentation on the device", changes=("augment_on",), joins=True)
_NAMED: Final = 0.2
"""Share of reading from which on an operation is named."""
_COLLATE_LESS: Final = (
    "samples of few arrays, and one torch.stack or np.stack for each of them in collate_fn; or a "
    "__getitems__ of the dataset that reads a batch at once"
)
_HIGH: Final = 0.20
"""Share of the wait below which a cost is no finding."""
_LEAST_MS, _OF_STEP = 1.0, 0.05
"""Time in ms and share of a step: a cost below either is no finding, however short the wait is."""
_UNEVEN: Final = 1.8
"""Least ratio of the busiest worker's samples to an even share at which the shares are uneven."""
_IF_UNEVEN: Final = ALL_COSTS | {"FD302", "FD303", "FD304", "FD305"}
"""Codes that uneven shares replace: the last four hold only where all workers work."""
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
        (_FEWER_BYTES, Advice(text="pin_memory=False", changes=("pin_memory",), joins=True)),
    ),
    "network": (
        "the way of complete batches from their actors",
        (_FEWER_BYTES, Advice(text="actors on nearer nodes (Ray(resources={...}))", joins=True)),
    ),
}
"""Part of the wait after a batch is made -> that part in words, and what to try."""


def _advised(now: LoaderSetup, wanted: LoaderSetup, gain: Gain | None) -> Advice:
    """Return the advice to change one setup to another, e.g. ``LoaderOptions(num_workers=6)``."""
    changes: dict[str, object] = {}
    if now.inline and wanted.workers:
        changes["executor"] = "workers"
    if wanted.workers != now.workers:
        changes["num_workers"] = wanted.workers
    written = ", ".join(f"{option}={value!r}" for option, value in changes.items())
    return Advice(text=f"LoaderOptions({written})", changes=tuple(changes), gain=gain)


def largest(e: Evidence) -> tuple[str, float]:
    """Return the part of the wait that stands out; waiting for a CPU counts as CPU time.

    Returns:
        A field of :class:`WaitParts` without its unit, and its share of the wait; ``""`` and 0 if
        none is 40 % of it.
    """
    shares = e.shares
    if shares:
        shares["read_cpu"] += shares.pop("read_runqueue") + shares.pop("queued")
        if _at_limit(e):
            shares["read_blocked"] += shares.pop("slow_sample")
        elif _many_are_slow(e):
            slow = shares.pop("slow_sample")
            computes = sum(c.cpu_ns for c in e.costs) / max(1, sum(c.read_ns for c in e.costs))
            shares["read_cpu"] += computes * slow
            shares["read_blocked"] += (1 - computes) * slow
    name = max(shares, key=shares.__getitem__, default="")
    share = shares.get(name, 0.0)
    return (name, share) if share >= DOMINANT else ("", 0.0)


def _more_workers(
    e: Evidence, otherwise: Finding, *, together: bool = False, computing: bool = False
) -> Finding:
    """Return the finding with the number of workers that the model recommends, if one helps.

    ``together``: workers may wait for something that they share, which the model does not know. A
    lock between processes that was seen is such a thing, however short the wait for it was.
    ``computing``: workers compute, so that more of them than there are CPUs are of no use.
    """
    wanted, now = e.best_workers(computing=computing), e.setup
    if wanted is None or now is None:
        return otherwise
    leave = f"the number of workers: more than {now.workers} are no faster"
    if "num_workers" in e.loader.closed:
        leave = f"the number of workers, {e.loader.closed['num_workers']}"
    elif wanted.workers > now.workers:
        gain, most = e.gain(wanted), e.gain_without(1.0)
        if gain is not None and most is not None:  # more workers make no step compute faster
            gain = replace(gain, after_ms=max(gain.after_ms, most.after_ms))
        if gain is not None and gain.worthwhile:
            if together or seen_at_lock(e.causes.operations):
                gain = replace(gain, basis="independent")
            more = _advised(now, wanted, gain)
            return replace(otherwise, advice=(more, *otherwise.advice))
    return replace(otherwise, leave_alone=leave)


def _slow_samples(e: Evidence) -> Finding | None:
    share = e.shares.get("slow_sample", 0.0)
    if share < _SLOW_HIGH or _at_limit(e) or _many_are_slow(e):
        return None
    named = ", ".join(
        f"{printable(str(s.path or s.index), keep='')} "
        f"({rounded(s.ms, 3)} ms, others {rounded(s.typical_ms, 2)})"
        for s in e.causes.slow_samples[:3]
    )
    repair = f"repair these samples: {named}" if named else "repair the slow samples"
    finding = _spent(
        e,
        share,
        "waiting for single slow samples",
        repair,
        "the other samples",
        e.gain(costs=scaled(e.costs, slow_samples=False)),
    )
    alone = e.setup is not None and not e.setup.workers
    return _more_workers(e, finding) if alone else finding


def _read_more_by(e: Evidence) -> float | None:
    """Return how reading grows with the workers: 1 as they do, 0 not at all; None: not tried."""
    rates = e.read_rates
    if rates is None or rates.many <= rates.few or min(rates.few_per_s, rates.many_per_s) <= 0:
        return None
    return math.log(rates.many_per_s / rates.few_per_s) / math.log(rates.many / rates.few)


def _shares(e: Evidence) -> bool:
    """Return whether workers wait for something that they share."""
    more = _read_more_by(e)
    if more is not None:
        return more < _SHARED
    return lock_between_processes(e.causes.lines) and e.setup is not None


def _at_limit(e: Evidence) -> bool:
    """Return whether storage is at its limit, and so is slow for whichever reader comes last.

    If only a sample were slow by itself, the workers would soon have nothing to do.
    """
    return _shares(e) and e.busy_share is not None and e.busy_share > _BUSY_HIGH


def _many_are_slow(e: Evidence) -> bool:
    """Return whether slow samples are so many that they are what the data is like.

    Only the slowest sample of a batch is known, so that batches without a slow one tell how many
    there are; at least half a batch is taken for such a one.
    """
    if not e.costs:
        return False
    usual_ns = statistics.median(
        (cost.read_ns - (cost.slowest_ns if cost.samples > 1 else 0.0)) / max(1, cost.samples - 1)
        for cost in e.costs
    )
    without = sum(cost.slowest_ns <= SLOW_FACTOR * usual_ns for cost in e.costs)
    samples = statistics.fmean(cost.samples for cost in e.costs)
    return max(0.5, without) / len(e.costs) < math.pow(1 - _MANY, samples)


def _where_it_waits(e: Evidence, share: float) -> str:
    """Return in words the longest line, if it waits for a fifth of reading or more.

    A line is known to wait where it takes more of reading than all that computes. ``share``: the
    share of the wait that is spent waiting in reading.
    """
    shares = e.shares
    computes = shares.get("read_cpu", 0.0) + shares.get("read_runqueue", 0.0)
    return where_text(e.causes.lines, beside=computes / (computes + share))


def _latency(e: Evidence) -> Finding | None:
    name, share = largest(e)
    if name != "read_blocked" or _shares(e):
        return None
    finding = _spent(
        e,
        share,
        "waiting for storage, a network or a lock",
        (Advice(text="keep the data on a local disk"), _cached(e)),
        "transforms: the CPUs are not what is short",
        e.gain(costs=scaled(e.costs, blocked=0.0)),
        _where_it_waits(e, share),
    )
    return more_that_wait(e, finding)


def more_that_wait(e: Evidence, otherwise: Finding) -> Finding:
    """Return the finding with more workers, if they help beside what they may wait for."""
    if _shares(e):
        return otherwise
    return _more_workers(e, otherwise, together=(_read_more_by(e) or 0.0) < _BY_THEMSELVES)


def _bandwidth(e: Evidence) -> Finding | None:
    name, share = largest(e)
    if name != "read_blocked" or not _shares(e):
        return None
    rates = ""
    if e.read_rates is not None:
        few, few_per_s, many, many_per_s = e.read_rates
        rates = f"; {many} workers read {rounded(many_per_s, 3)} samples/s and {few} of them "
        rates += f"{rounded(few_per_s, 3)}"
    return _spent(
        e,
        share,
        "waiting for a lock, a disk or a line that workers share",
        (Advice(text="find the lock, or keep the data on a local disk"), _cached(e)),
        "the number of workers: more of them read no more",
        e.gain(costs=scaled(e.costs, blocked=0.0)),
        rates + _where_it_waits(e, share),
    )


def _saturated(e: Evidence) -> bool:
    loads = e.without_cpu >= RUNQUEUE_HIGH or e.throttled
    reads = largest(e)[0] == "read_cpu"
    return e.times.stalls and loads and reads and not e.own_fits


def _named(e: Evidence) -> OperationShare | None:
    """Return the most expensive operation of a pipeline, if it takes a fifth of reading or more."""
    return next((op for op in e.causes.operations if op.augments and op.share >= _NAMED), None)


def _transforms(e: Evidence) -> tuple[Advice, ...]:
    """Return advice that makes reading take less CPU time, the best first."""
    named = _named(e)
    takes = "" if named is None else f" ({named.name} takes {named.share:.0%} of reading)"
    cheaper = Advice(text=f"cheaper transforms{takes}")
    elsewhere = replace(_ON_DEVICE, gain=_less_computing(e, 1.0))
    return (cheaper, *([elsewhere] if e.device_could_augment else []), _cached(e))


def _gain_of_transforms(e: Evidence) -> Gain | None:
    named = _named(e)
    return _less_computing(e, 1.0 if named is None else named.share)


def _less_computing(e: Evidence, less: float) -> Gain | None:
    """Return the gain if this share, 0 to 1, of what reading computes vanished."""
    part = sum(e.shares.get(f"read_{kind}", 0.0) for kind in ("cpu", "runqueue"))
    fewer = e.gain(costs=scaled(e.costs, cpu=1 - less))
    return fewer or e.gain_without(less * (part or 1.0))


def _cached(e: Evidence) -> Advice:
    """Return the advice to keep samples, which spares all of reading, whatever it waits for."""
    part = sum(share for name, share in e.shares.items() if name in _READING)
    none = e.gain(costs=scaled(e.costs, cpu=0.0, blocked=0.0))
    return replace(_CACHE, gain=none or e.gain_without(part))


def _spent(
    e: Evidence,
    share: float,
    what: str,
    remedy: str | Advice | tuple[Advice, ...],
    leave: str,
    gain: Gain | None = None,
    more: str = "",
) -> Finding:
    """Return the finding that a share of the wait, 0 to 1, is spent on something.

    ``gain``: what spending less on it gains; None: at most the share. ``more``: added to the cause.
    """
    cause = (
        f"{what} is {share:.0%} of the wait for data, which costs {e.of_step(e.stall_ms):.0%} of "
    )
    cause += f"each step{more}"
    return make_finding(e.times.stall_share, cause, remedy, gain or e.gain_without(share), leave)


def _few_workers(e: Evidence) -> Finding | None:
    name, share = largest(e)
    starved = e.waits_for_cpu > share / 2
    if name != "read_cpu" or starved or _saturated(e) or e.crowded:
        return None
    finding = _spent(
        e,
        share,
        "reading and transforming samples on a CPU",
        _transforms(e),
        "storage: it is not what is waited for",
        _gain_of_transforms(e),
        where_text(e.causes.lines),
    )
    return _more_workers(e, finding, computing=True)


def _few_cpus(e: Evidence) -> Finding | None:
    if not _saturated(e):
        return None
    reads_itself = e.setup is not None and not e.setup.workers
    who = "the training process waits" if reads_itself else "ready workers wait"
    facts = [f"{who} for a CPU {e.without_cpu_text}"]
    if e.throttled:
        facts.append(f"a CPU quota held back threads for {e.machine.throttled_cpus:.1f} CPUs")
    wanted, now = e.best_workers(), e.setup
    remedy = _transforms(e)
    if now is not None:
        workers = "1 worker" if now.workers == 1 else f"{now.workers} workers"
        if now.workers:
            facts.append(f"{workers} and the training share {cpus_text(now.cpus)}")
        if now.worker_threads > 1:
            facts.append(f"a worker uses {now.worker_threads:.1f} of them while it computes")
            # torch has one thread in a worker, and so has OpenCV where it was imported before.
            threads = "one thread for each worker (threadpoolctl.threadpool_limits(1) for NumPy, "
            threads += "pyarrow.set_cpu_count(1), cv2.setNumThreads(0), in worker_init_fn)"
            alone = e.gain(replace(now, worker_threads=1.0))
            one = Advice(text=threads, gain=alone)
            remedy = (one, *remedy)
        if wanted is not None and wanted.workers < now.workers:
            gain = e.gain(wanted)
            remedy = (_advised(now, wanted, gain), *remedy)
    cause = "; ".join(facts) + where_text(e.causes.lines)
    leave = "more workers: they would share the same CPUs"
    return make_finding(e.times.stall_share, cause, remedy, _gain_of_transforms(e), leave)


def _collation(e: Evidence) -> Finding | None:
    name, share = largest(e)
    if name != "collate":
        return None
    gain = e.gain(costs=scaled(e.costs, collate=0.0))
    finding = _spent(e, share, "collating samples", _COLLATE_LESS, "reading and transforms", gain)
    waits = sum(cost.collate_blocked_ns - cost.collate_ns for cost in e.costs)
    return _more_workers(e, finding, together=waits > 0, computing=waits <= 0)


def _neighbours(e: Evidence) -> Finding | None:
    runqueue = e.without_cpu
    if not e.times.stalls or runqueue < RUNQUEUE_HIGH or not e.own_fits:
        return None
    here = e.setup is None or not e.setup.workers
    if here and not e.crowded:
        return None
    facts = [f"workers, or the training process, wait for a CPU {e.without_cpu_text}"]
    if e.setup is not None and e.wanted_cpus is not None:
        facts.append(f"own work needs {e.wanted_cpus:.1f} of {cpus_text(e.setup.cpus)}")
    if (e.machine.other_cpus or 0.0) >= OTHERS_LOW:
        facts.append(f"other programs use {e.machine.other_cpus:.1f} CPUs of this machine")
    # Workers of a training that reads by itself, or that wait for storage, may well gain.
    waits = here or largest(e)[0] not in ("", "read_cpu")
    lost_ms = runqueue * (e.times.step_ms or 0.0)
    if e.summary.device != "cpu":  # else the model, too, computes on the CPUs that others have
        lost_ms = min(e.stall_ms, lost_ms)
    # Shares of several processes add up to more than a step, whose own work remains.
    most_ms = (e.times.step_ms or 0.0) - e.alone_ms
    gain = e.times.without(max(0.0, min(lost_ms, most_ms)))
    if gain is None or not gain.worthwhile:
        return None
    return make_finding(
        e.times.stall_share,
        "; ".join(facts),
        "find what else runs on this machine, if only threads that transforms start "
        "(cv2.setNumThreads(0)), or give this process CPUs of its own (taskset, a cgroup)",
        gain,
        "" if waits else "more workers: they would wait, too",
    )


def _own(e: Evidence, part: str, what: str, remedy: str, leave: str) -> Finding | None:
    """Return the finding that the training process itself takes long for a part of the wait."""
    share = e.shares.get(part, 0.0)
    return _spent(e, share, what, remedy, leave) if _costs_enough(e, share) else None


_sampler: Final = partial(
    _own,
    part="sampler",
    what="asking the sampler which samples come next, in the training process,",
    remedy="a sampler that computes the order of an epoch once, in __iter__, and then gives "
    "numbers of an array",
    leave="the number of workers: the sampler runs in the training process",
)
_unpacking: Final = partial(
    _own,
    part="unpack",
    what="unpickling batches in the training process",
    remedy="batches of few large tensors or arrays: many small objects (lists, dicts, strings) are "
    "made anew one by one; have collate_fn put them together in the workers",
    leave="the number of workers: batches are unpickled in the training process",
)


def _costs_enough(e: Evidence, share: float) -> bool:
    spent_ms = share * e.stall_ms
    return share >= _HIGH and spent_ms >= _LEAST_MS and (e.times.share(spent_ms) or 0.0) >= _OF_STEP


def _on_the_way(e: Evidence) -> Finding | None:
    """Return the finding that complete batches take long on their way to the training process."""
    dominant, _ = largest(e)
    name = dominant if dominant in _WAYS else "handover"
    share, (what, advice) = e.shares.get(name, 0.0), _WAYS[name]
    if name == "handover" and not _hands_over_long(e, share):
        return None
    if name == "handover" and e.setup is not None and e.setup.scheduling == "sample":
        # Batches are handed over as memory already.
        text = "find threads of the training process that compute, such as loggers and "
        text += "callbacks, as they hold the interpreter's lock; then smaller batches"
        advice = (Advice(text=text),)
    return _spent(e, share, what, advice, "the number of workers")


def _hands_over_long(e: Evidence, share: float) -> bool:
    """Return whether the hand-over takes long by itself, and not because something delays it."""
    gain = e.gain_without(share)
    queues = e.without_cpu >= RUNQUEUE_HIGH and share < DOMINANT
    if queues or e.crowded:
        return False  # sending a batch away waits for a CPU as making it does
    if not _costs_enough(e, share) or (e.setup is not None and not e.setup.workers):
        return False
    return gain is None or gain.worthwhile


def _uneven(e: Evidence) -> Finding | None:
    """Return the finding that one worker makes far more of a stream than an even share.

    Workers that each yield the whole stream make as many samples as each other: no finding.
    """
    samples, workers = sum(e.stream_samples), len(e.stream_samples)
    most = max(e.stream_samples, default=0)
    if not most or most * workers < _UNEVEN * samples or not e.times.stalls:
        return None
    # At best a step takes as much less time as the busiest worker has less to do.
    less_ms = (1 - samples / (most * workers)) * (e.times.step_ms or 0.0)
    return make_finding(
        e.times.stall_share,
        f"one of {workers} workers makes {most / samples:.0%} of the samples of this stream, and "
        f"waiting for batches costs {e.of_step(e.stall_ms):.0%} of each step",
        "share the stream out evenly: at least as many files as workers, of equal size, each read "
        "by one worker (get_worker_info() in __iter__)",
        e.times.without(min(e.stall_ms, less_ms)),
        "more workers: they would have nothing to do",
    )


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
