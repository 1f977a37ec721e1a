"""Findings about batches that came late: what the wait for them consists of."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Final

from lightning_fastdata.errors import printable
from lightning_fastdata.insight.model import contention, remedies
from lightning_fastdata.insight.model.evidence import Evidence
from lightning_fastdata.insight.model.finding import Advice, Finding, Gain
from lightning_fastdata.insight.verdicts.rule import ALL_COSTS, Rule, found, of_wait
from lightning_fastdata.insight.waits.lines import lock_between_processes, where_text
from lightning_fastdata.tuning.costs import BatchCost
from lightning_fastdata.tuning.simulate import scaled

_DOMINANT: Final = 0.4
_SLOW_HIGH, _BUSY_HIGH = 0.30, 0.95
_SHARED, _BY_THEMSELVES = 0.35, 0.75
"""Of what more workers should bring if each waits by itself: below, they wait for something that
they share; above, they do not."""
_PRESSURE_HIGH: Final = 20.0
_COMPUTE_SLOWER: Final = 1.10
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


def largest(e: Evidence) -> tuple[str, float]:
    """Return the part of the wait that stands out, if one does; CPU time with waiting for CPUs.

    Returns:
        A field of :class:`WaitParts` without its unit, and its share of the wait; ``""`` and 0 if
        none is 40 % of it.
    """
    shares = contention.part_shares(e)
    if shares:
        shares["read_cpu"] += shares.pop("read_runqueue") + shares.pop("queued")
        if _at_limit(e):
            shares["read_blocked"] += shares.pop("slow_sample")
    name = max(shares, key=shares.__getitem__, default="")
    share = shares.get(name, 0.0)
    return (name, share) if share >= _DOMINANT else ("", 0.0)


def _where(e: Evidence, *, blocked: bool | None = None) -> str:
    most = max((each.share for each in e.operations), default=0.0)
    return where_text(e.lines, most, blocked=blocked)


def _more_workers(
    e: Evidence, otherwise: Finding, *, together: bool = False, computing: bool = False
) -> Finding:
    """Return the finding with the number of workers that the model recommends, if one helps.

    Args:
        e: Of the stage.
        otherwise: The finding where more workers do not help.
        together: Workers may wait for something that they share, of which the model knows nothing.
        computing: Workers compute, so that no more of them are of use than there are CPUs.
    """
    wanted, now = remedies.best_workers(e, computing=computing), e.setup
    if wanted is None or now is None:
        return otherwise
    gain = remedies.gain_of_setup(e, wanted)
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
    share = contention.part_shares(e).get("slow_sample", 0.0)
    if share < _SLOW_HIGH or _at_limit(e):
        return None
    named = ", ".join(
        f"{printable(str(s.path or s.index), keep='')} ({s.ms:.0f} ms, others {s.typical_ms:.2g})"
        for s in e.slow_samples[:3]
    )
    cause = of_wait(e, share, "waiting for single slow samples")
    if e.overtaken_share:
        cause += f"; {e.overtaken_share:.0%} of the batches held up complete ones"
    repair = f"repair these samples: {named}" if named else "repair the slow samples"
    wanted, now = remedies.best_against_slow_samples(e), e.setup
    same = now is None or wanted is None or wanted.workers == now.workers
    gain = _gain_of(e, share, scaled(e.costs, slow_samples=False))
    advice: tuple[Advice, ...] = (Advice(text=repair, part=share),)
    if wanted is not None and now is not None and wanted != now:
        passing = remedies.advised(now, wanted, remedies.gain_of_setup(e, wanted))
        text = f"{passing.text}, or {repair}"
        if now.in_order and not wanted.in_order:
            text += "; in_order=False changes the order of batches from run to run"
        advice = (replace(passing, text=text, part=share), *advice)
    leave = "the other samples" + (" and the number of workers" if same else "")
    return found("FD302", e.stall_share, cause, advice, gain, leave)


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
    return lock_between_processes(e.lines) is not None and e.setup is not None


def _at_limit(e: Evidence) -> bool:
    """Return whether storage gives all it has: then it is slow to whichever reader comes last.

    Behind a sample that is slow by itself, workers have nothing to do after a while.
    """
    return _shares(e) and e.busy_share is not None and e.busy_share > _BUSY_HIGH


def _latency(e: Evidence) -> Finding | None:
    name, share = largest(e)
    if name != "read_blocked" or _shares(e):
        return None
    finding = found(
        "FD303",
        e.stall_share,
        of_wait(e, share, "waiting for storage, a network or a lock") + _where(e, blocked=True),
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
        cause += f"; {many} workers read {many_per_s:.3g} samples/s and {few} of them "
        cause += f"{few_per_s:.3g}"
    return found(
        "FD304",
        e.stall_share,
        cause + _where(e, blocked=True),
        (Advice(text="find the lock, or keep the data on a local disk", part=share), _CACHE),
        _gain_of(e, share, scaled(e.costs, blocked=0.0)),
        "the number of workers: more of them read no more",
    )


def _saturated(e: Evidence) -> bool:
    loads = contention.runqueue_share(e) >= contention.RUNQUEUE_HIGH or contention.throttled(e)
    reads = largest(e)[0] == "read_cpu"
    return (
        e.stalls and loads and reads and contention.overcommitted(e) and not contention.crowded(e)
    )


def _transforms(e: Evidence) -> tuple[Advice, ...]:
    """Return what makes reading take less of a CPU."""
    named = next((each for each in e.operations[:1] if each.share >= _NAMED), None)
    takes = "" if named is None else f" ({named.name} takes {named.share:.0%} of reading)"
    cheaper = Advice(text=f"cheaper transforms{takes}")
    return (cheaper, *([_ON_DEVICE] if e.device_could_augment else []), _CACHE)


def _gain_of_transforms(e: Evidence) -> Gain | None:
    shares = contention.part_shares(e)
    part = sum(shares.get(f"read_{kind}", 0.0) for kind in ("cpu", "runqueue"))
    named = next((each.share for each in e.operations[:1] if each.share >= _NAMED), 1.0)
    return _gain_of(e, named * (part or 1.0), scaled(e.costs, cpu=1 - named))


def _gain_of(e: Evidence, share: float, costs: list[BatchCost]) -> Gain | None:
    """Return what batches of other costs gain; where none were recorded, what it is at most."""
    return remedies.gain_of_costs(e, costs) or remedies.without(e, share * (e.stall_ms or 0.0))


def _few_workers(e: Evidence) -> Finding | None:
    name, share = largest(e)
    starved = contention.queued_share(e) > share / 2
    if name != "read_cpu" or starved or _saturated(e) or contention.crowded(e):
        return None
    cause = of_wait(e, share, "reading and transforming samples on a CPU")
    leave = "storage: it is not what is waited for"
    cause += _where(e, blocked=False)
    finding = found("FD305", e.stall_share, cause, _transforms(e), _gain_of_transforms(e), leave)
    return _more_workers(e, finding, computing=True)


def _few_cpus(e: Evidence) -> Finding | None:
    if not _saturated(e):
        return None
    facts = [f"ready workers wait for a CPU for {contention.runqueue_share(e):.0%} of their time"]
    if contention.throttled(e):
        facts.append(f"the CPU quota was used up in {e.throttled_share:.0%} of the periods")
    wanted, now = remedies.best_workers(e), e.setup
    remedy = _transforms(e)
    if now is not None:
        facts.append(f"{now.workers} workers and the training share {now.cpus:g} CPUs")
        if now.worker_threads > 1:
            facts.append(f"a worker uses {now.worker_threads:.1f} of them while it computes")
            threads = "one thread for each worker (torch.set_num_threads(1), cv2.setNumThreads(0) "
            alone = remedies.gain_of_setup(e, replace(now, worker_threads=1.0))
            one = Advice(text=f"{threads}in worker_init_fn)", gain=alone)
            remedy = (one, *remedy)
        if wanted is not None and wanted.workers < now.workers:
            gain = remedies.gain_of_setup(e, wanted)
            remedy = (remedies.advised(now, wanted, gain), *remedy)
    cause = "; ".join(facts) + _where(e, blocked=False)
    leave = "more workers: they would share the same CPUs"
    return found("FD306", e.stall_share, cause, remedy, _gain_of_transforms(e), leave)


def _collation(e: Evidence) -> Finding | None:
    name, share = largest(e)
    if name != "collate":
        return None
    return found(
        "FD307",
        e.stall_share,
        of_wait(e, share, "collating samples"),
        Advice(text=_COLLATE_LESS, part=share),
        _gain_of(e, share, scaled(e.costs, collate=0.0)),
        "reading and transforms",
    )


def _capacity(e: Evidence) -> Finding | None:
    if not e.stalls or e.busy_share is None or e.busy_share <= _BUSY_HIGH or largest(e)[0]:
        return None
    if contention.crowded(e):
        return None
    cause = (
        f"the workers are busy {e.busy_share:.0%} of the time, and no single part of the wait, "
        f"which costs {e.stall_share or 0.0:.0%} of each step, stands out" + _where(e)
    )
    cost = found("FD309", e.stall_share, cause, _transforms(e), _gain_of_transforms(e))
    return _more_workers(e, cost)


def _neighbours(e: Evidence) -> Finding | None:
    runqueue = contention.runqueue_share(e)
    slowed = (e.compute_slowdown or 1.0) >= _COMPUTE_SLOWER
    pressed = slowed and (e.pressure_percent or 0.0) >= _PRESSURE_HIGH
    own = e.setup is None or e.wanted_cpus is None or contention.overcommitted(e)
    if not e.stalls or (runqueue < contention.RUNQUEUE_HIGH and not pressed):
        return None
    here = e.setup is not None and not e.setup.workers
    if (own or here) and not contention.crowded(e):
        return None
    facts = [f"workers, or the training process, wait for a CPU for {runqueue:.0%} of the time"]
    if e.setup is not None and e.wanted_cpus is not None:
        facts.append(f"own work needs {e.wanted_cpus:.1f} of {e.setup.cpus:g} CPUs")
    if (e.other_cpus or 0.0) >= contention.OTHERS_LOW:
        facts.append(f"other programs use {e.other_cpus:.1f} CPUs of this machine")
    if slowed:
        facts.append(f"a step computes {e.compute_slowdown:.2f} times as long as beside idle CPUs")
    return found(
        "FD315",
        e.stall_share,
        "; ".join(facts),
        "find what else runs on this machine, if only threads that transforms start "
        "(cv2.setNumThreads(0)), or give this process CPUs of its own (taskset, a cgroup)",
        remedies.without(e, max(0.0, (e.stall_ms or 0.0) - contention.alone_wait_ms(e))),
        "more workers: they would wait, too",
    )


RULES: Final = (
    Rule("FD302", "slow samples hold up their batches", _slow_samples, "loader", ALL_COSTS),
    Rule("FD303", "reading waits for storage", _latency, "loader", ALL_COSTS),
    Rule("FD304", "workers share what they wait for", _bandwidth, "loader", ALL_COSTS),
    Rule("FD305", "reading and transforming take long", _few_workers, "loader", ALL_COSTS),
    Rule("FD306", "own work wants more CPUs than there are", _few_cpus, "loader", ALL_COSTS),
    Rule("FD307", "collation takes long", _collation, "loader", ALL_COSTS),
    Rule("FD309", "workers do a bit of everything", _capacity, "loader", ALL_COSTS),
    Rule("FD315", "other programs have the CPUs", _neighbours, "machine", ALL_COSTS, kind=_OTHERS),
)
