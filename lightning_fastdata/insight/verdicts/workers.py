"""Findings about what the workers do, and how evenly."""

from __future__ import annotations

from dataclasses import replace
from itertools import accumulate
from typing import Final

from lightning_fastdata.insight.model import contention, remedies
from lightning_fastdata.insight.model.evidence import Evidence
from lightning_fastdata.insight.model.finding import Advice, Finding, Gain
from lightning_fastdata.insight.model.remedies import scaled_step_ms
from lightning_fastdata.insight.verdicts.late_batches import largest
from lightning_fastdata.insight.verdicts.rule import ALL_COSTS, Rule, found, of_wait
from lightning_fastdata.tuning.simulate import simulate

_HIGH: Final = 0.20
"""Part of the wait: what takes less is no finding."""
_DOMINANT: Final = 0.40
_LEAST_MS, _OF_STEP = 1.0, 0.05
"""What costs a step less is no finding, however short the wait is."""


def _sampler(e: Evidence) -> Finding | None:
    return _own(
        e,
        "sampler",
        "FD323",
        "asking the sampler which samples come next, in the training process,",
        "a sampler that computes the order of an epoch once, in __iter__, and then gives numbers "
        "of an array",
        "the number of workers: the sampler runs in the training process",
    )


def _unpacking(e: Evidence) -> Finding | None:
    return _own(
        e,
        "unpack",
        "FD324",
        "unpickling batches in the training process",
        "batches of few large tensors or arrays: many small objects (lists, dicts, strings) are "
        "made anew one by one; have collate_fn put them together in the workers",
        "the number of workers: batches are unpickled in the training process",
    )


def _own(e: Evidence, part: str, code: str, what: str, remedy: str, leave: str) -> Finding | None:
    share = contention.part_shares(e).get(part, 0.0)
    if not _costs_enough(e, share):
        return None
    gain = remedies.without(e, share * (e.stall_ms or 0.0))
    return found(code, e.stall_share, of_wait(e, share, what), remedy, gain, leave)


def _costs_enough(e: Evidence, share: float) -> bool:
    """Return whether a part of the wait costs enough for a finding."""
    spent_ms = share * (e.stall_ms or 0.0)
    return share >= _HIGH and spent_ms >= _LEAST_MS and (e.of_step(spent_ms) or 0.0) >= _OF_STEP


def _handover(e: Evidence) -> Finding | None:
    share = contention.part_shares(e).get("handover", 0.0)
    gain = remedies.without(e, share * (e.stall_ms or 0.0))
    if contention.crowded(e) or (
        contention.runqueue_share(e) >= contention.RUNQUEUE_HIGH and share < _DOMINANT
    ):
        return None  # who sends a batch away waits for a CPU as those do who make it
    # Page-locking is on the way, too, and then the longer part.
    if not _costs_enough(e, share) or largest(e)[0] == "pin":
        return None
    if (gain is not None and not gain.worthwhile) or (e.setup is not None and not e.setup.workers):
        return None
    few = Advice(text="batches of few tensors or arrays", part=share)
    memory = f"{few.text}, with LoaderOptions(executor='workers'), which hands over memory"
    remedy: Advice | tuple[Advice, ...] = (replace(few, text=memory, changes=("executor",)), few)
    if e.setup is not None and e.setup.scheduling == "sample":
        # Batches are handed over as memory already.
        text = "find threads of the training process that compute, such as loggers and "
        text += "callbacks, as they hold the interpreter's lock; then smaller batches"
        remedy = Advice(text=text, part=share)
    cause = of_wait(e, share, "handing complete batches over")
    return found("FD308", e.stall_share, cause, remedy, gain, "the number of workers")


def _pinning(e: Evidence) -> Finding | None:
    name, share = largest(e)
    if name != "pin":
        return None
    cause = of_wait(e, share, "copying batches into page-locked memory")
    remedy = (
        Advice(text="samples of fewer bytes (images as uint8, made float on the device)"),
        Advice(text="pin_memory=False", changes=("pin_memory",), joins=True),
    )
    gain = remedies.without(e, None if e.stall_ms is None else share * e.stall_ms)
    return found("FD311", e.stall_share, cause, remedy, gain, "the number of workers")


_NEARLY_ALL: Final = 0.9
"""Of the samples."""
_FEW: Final = 0.5
"""Of the workers: if no more make nearly everything, the shares are uneven."""
_TWICE: Final = 2.0
"""Even shares: if the busiest worker makes as many, a stream takes twice as long as it could."""
_IF_UNEVEN: Final = ALL_COSTS | {"FD302", "FD303", "FD304", "FD305", "FD309"}
"""What the last five recommend or conclude is right where all workers work."""


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
    after_ms = scaled_step_ms(e, min(1.0, even / now))
    return Gain(before_ms=e.step_ms, after_ms=after_ms, basis="simulated")


RULES: Final = (
    Rule("FD323", "the sampler takes long", _sampler, "loader", ALL_COSTS, after="FD307"),
    Rule("FD324", "batches take long to unpickle", _unpacking, "loader", ALL_COSTS, after="FD307"),
    Rule("FD308", "complete batches are long on their way", _handover, "loader", ALL_COSTS),
    Rule("FD311", "page-locking takes long", _pinning, "loader", ALL_COSTS),
    Rule("FD325", "few workers make most of a stream", _uneven, "loader", _IF_UNEVEN, "FD301"),
)
