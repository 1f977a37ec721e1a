"""Whether a batch fits the GPU: predicted from smaller ones, and run before it is chosen.

``probe_sizes`` -> training steps (:mod:`~lightning_fastdata.plugin.guard.steps`) -> ``Probe`` ->
``decide`` -> ``GuardDecision``. Nothing here knows Lightning or runs a model.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal, NamedTuple, TypeAlias

from lightning_fastdata.host.memory import size_text

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

GuardPolicy: TypeAlias = Literal["accumulate", "raise", "warn", "off"]
"""What to do with a batch that does not fit.

``accumulate`` loads smaller batches and accumulates gradients over more of them, ``raise`` stops
the run, ``warn`` lets it go on, ``off`` does not look.
"""

GuardAction: TypeAlias = Literal["keep", "accumulate", "chosen", "raise", "warn", "skipped"]

_CLOSE = 8
_NEARLY = 0.95  # of the most rows a second
_FEWEST_RATES = 3
_NO_FASTER = 1.05  # times as many rows a second are not worth twice the batch


class Probe(NamedTuple):
    """What steps at one batch size took."""

    rows: int
    """Rows of the batch."""
    peak_bytes: int | None
    """Most memory held during the steps; None if the device ran out of memory."""
    step_s: float | None = None
    """Seconds of a training step, without the transfer of its batch; None: not measured."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GuardDecision:
    """What the guard decided about one batch size, and why."""

    asked_batch_size: int
    """Rows per batch that the user asked for."""
    batch_size: int
    """Rows per batch to load. Never more than was asked for."""
    accumulate_grad_batches: int
    """Batches to accumulate gradients over before each optimizer step."""
    predicted_peak_bytes: int | None
    """Predicted peak of a training step at the asked size; None if unknown."""
    budget_bytes: int | None
    """What a training step may take: free memory less the reserve; None if not read."""
    action: GuardAction
    """``keep``: it fits. ``accumulate``: it does not, load smaller batches.
    ``chosen``: no size was asked for. ``raise``, ``warn``: it does not fit, stop or tell.
    ``skipped``: not looked at, nothing is known."""
    reason: str
    """The decision and its cause as sentences for a person."""
    probes: tuple[Probe, ...] = ()
    """What it rests on."""


def next_probe_rows(asked: int, probes: Sequence[Probe]) -> int | None:
    """Return the batch size to try next, or None when enough is known.

    Two sizes that run are enough: ``b`` and ``2 b`` with ``b`` from 2 to 4. Where one does not run,
    a smaller one is tried; one row, which is no batch for batch normalisation, only if two do not.
    """
    ran = [probe.rows for probe in probes if probe.peak_bytes is not None]
    failed = [probe.rows for probe in probes if probe.peak_bytes is None]
    if not probes:
        return min(asked, max(2, min(4, asked // 4)))
    if len(ran) >= 2:
        return None
    if not ran:
        return min(failed) // 2 or None
    if not failed:
        return min(2 * ran[0], asked) if ran[0] < asked else None
    between = (ran[0] + min(failed)) // 2
    return ran[0] // 2 if ran[0] >= 4 else between if between > ran[0] else None


def next_larger_rows(probes: Sequence[Probe], chosen: int | None) -> int | None:
    """Return the batch size to try on the way to the chosen one; None: it has run, or is unknown.

    Each one is at most twice the largest that ran, so that it rests on a prediction from near by.
    If one runs out of memory nevertheless, the limit is looked for in between, to an eighth.
    """
    ran = max((probe.rows for probe in probes if probe.peak_bytes is not None), default=0)
    failed = min((probe.rows for probe in probes if probe.peak_bytes is None), default=None)
    if not ran or chosen is None or chosen <= ran:
        return None
    if failed is not None:
        close = failed - ran <= max(1, ran // _CLOSE)
        return None if close else min(chosen, (ran + failed) // 2)
    return min(chosen, 2 * ran)


def probe_sizes(
    asked: int,
    measure: Callable[[int], Probe],
    chosen: Callable[[Sequence[Probe]], int | None] = lambda _: None,
) -> tuple[Probe, ...]:
    """Return the probes that ``measure(rows)`` gives, of two small sizes and up to the chosen one.

    ``chosen`` returns the size that would be trained with, by the probes that ran so far.
    """
    probes: tuple[Probe, ...] = ()
    while (rows := next_probe_rows(asked, probes)) is not None:
        probes = (*probes, measure(rows))
    while True:
        ran = [probe for probe in probes if probe.peak_bytes is not None]
        rows = next_larger_rows(probes, chosen(ran))
        if rows is None:
            return probes
        probes = (*probes, measure(rows))


def predict_peak_bytes(probes: Sequence[Probe], rows: int) -> int | None:
    """Return the predicted peak in bytes of a training step on ``rows`` rows; None if none ran.

    It is the straight line through the two largest sizes that ran, never falling: parameters,
    gradients and optimizer state do not depend on the rows, activations are proportional to them.
    Real curves are convex at small sizes (the peak moves from the optimizer step into the backward
    pass), so that the line is 2 to 3 % low at large sizes; the reserve of 5 % covers it. With one
    size, all its memory is taken to grow with the rows: too much rather than too little.
    """
    ran = sorted((probe.rows, probe.peak_bytes) for probe in probes if probe.peak_bytes is not None)
    if not ran:
        return None
    last_rows, last_peak = ran[-1]
    if len(ran) == 1:
        return max(last_peak, math.ceil(last_peak * rows / last_rows))
    before_rows, before_peak = ran[-2]
    # whole numbers, so that nothing is lost at tens of gigabytes
    rise = max(0, last_peak - before_peak) * (rows - last_rows)
    return last_peak - (-rise // (last_rows - before_rows))


def decide(
    *,
    asked: int,
    probes: Sequence[Probe],
    budget_bytes: int,
    policy: GuardPolicy | None,
    accumulate_now: int = 1,
    dataset_rows: int | None = None,
) -> GuardDecision:
    """Return what to do about a batch of ``asked`` rows.

    With ``accumulate`` the batch is cut into the fewest parts that fit. Up to twice as many are
    taken if they divide it evenly: then each optimizer step sees exactly as many rows as before.
    Otherwise the reason says by how many rows the optimizer step differs.

    Without a policy the most rows that fit are chosen. If not even one fits, that and
    ``accumulate`` become ``raise``. ``accumulate_now`` is how many batches gradients are
    accumulated over already; no batch has more rows than ``dataset_rows``.
    """
    full = asked if dataset_rows is None else max(1, min(asked, dataset_rows))

    ran = max((probe.rows for probe in probes if probe.peak_bytes is not None), default=0)
    failed = any(probe.peak_bytes is None for probe in probes)

    def too_large(rows: int) -> bool:
        predicted = predict_peak_bytes(probes, rows)
        return (failed and rows > ran) or predicted is None or predicted > budget_bytes

    predicted = predict_peak_bytes(probes, full)
    need = f"A training step on {full} rows needs {_needed(probes, full, predicted)} of GPU memory"
    have = f"{size_text(budget_bytes)} may be used"
    keep = GuardDecision(
        asked_batch_size=asked,
        batch_size=asked,
        accumulate_grad_batches=accumulate_now,
        predicted_peak_bytes=predicted,
        budget_bytes=budget_bytes,
        action="keep",
        reason=f"{need}, {have}: the batch size stays.",
    )
    if not too_large(full):
        return keep
    largest = bisect_left(range(1, full + 1), True, key=too_large)
    return _act(keep, policy, full, largest, f"{need}, but {have}")


def _act(
    keep: GuardDecision, policy: GuardPolicy | None, full: int, largest: int, short: str
) -> GuardDecision:
    """Return what the policy does about ``full`` rows of which at most ``largest`` fit."""
    if policy == "warn":
        fits = f"At most {largest} rows fit" if largest else "Not even one row fits"
        advice = "expect an out-of-memory error, or let the guard act with policy 'accumulate'"
        return replace(keep, action="warn", reason=f"{short}. {fits}: {advice}.")
    if largest == 0:
        fits = "and not even one row fits. Free memory on the device, use a smaller model"
        advice = "or smaller samples, or set the guard's policy to 'warn' to try nevertheless"
        return replace(keep, action="raise", reason=f"{short}, {fits} {advice}.")
    if policy == "raise":
        fits = f"At most {largest} rows fit: set the batch size to {largest} or less"
        advice = "or let the guard act with policy 'accumulate'"
        return replace(keep, action="raise", reason=f"{short}. {fits}, {advice}.")
    if policy is None:
        most = f"{short}. At most {largest} rows fit."
        return replace(keep, action="chosen", batch_size=largest, reason=most)
    parts = _parts(full, largest)
    rows = math.ceil(full / parts)
    batches = keep.accumulate_grad_batches * parts
    before, after = full * keep.accumulate_grad_batches, rows * batches
    seen = f"still sees {after}" if after == before else f"sees {after} instead of {before}"
    return replace(
        keep,
        batch_size=rows,
        accumulate_grad_batches=batches,
        action="accumulate",
        reason=f"{short}: the loader now gives {rows} rows at a time and gradients accumulate over "
        f"{batches} batches. Each optimizer step {seen} rows.",
    )


def is_past_knee(probes: Sequence[Probe]) -> bool:
    """Return whether larger batches train no more rows a second.

    The last two sizes brought less than 5 % together. Without times it is never so.
    """
    rates = _rows_per_s(probes)
    if len(rates) < _FEWEST_RATES:
        return False
    *before, _, _ = rates.values()
    return max(list(rates.values())[-2:]) <= _NO_FASTER * max(before)


def at_knee(largest: GuardDecision, probes: Sequence[Probe]) -> GuardDecision:
    """Return the decision where no batch size was asked for, given the largest one that fits.

    The smallest size is chosen that trains 95 % of the most rows a second: a larger one takes
    memory, and optimizer steps from each epoch, for nothing.
    """
    rates = _rows_per_s(probes)
    if largest.action not in ("keep", "chosen") or not rates:
        return largest
    best = max(rates.values())
    rows = next(rows for rows, rate in rates.items() if rate >= _NEARLY * best)
    peak, room = predict_peak_bytes(probes, rows) or 0, largest.budget_bytes or 0
    tried = ", ".join(f"{rows}: {rate:.4g}" for rows, rate in rates.items())
    return replace(
        largest,
        batch_size=rows,
        action="chosen",
        predicted_peak_bytes=peak,
        reason=f'batch_size="auto": {rows} rows at a time, which takes {size_text(peak)} of the '
        f"{size_text(room)} that may be used and trains {rates[rows] / best:.0%} of the most rows "
        f"a second; {largest.batch_size} would fit. Rows a second that were measured, by batch "
        f"size: {tried}.",
    )


def _rows_per_s(probes: Sequence[Probe]) -> dict[int, float]:
    """Return the rows a second by size, the smallest first, of sizes that ran and were timed."""
    timed = sorted(each for each in probes if each.peak_bytes is not None and each.step_s)
    return {each.rows: each.rows / each.step_s for each in timed if each.step_s}


def skipped(asked: int, accumulate_now: int, why: str) -> GuardDecision:
    """Return the decision to leave everything as it is because nothing could be measured."""
    return GuardDecision(
        asked_batch_size=asked,
        batch_size=asked,
        accumulate_grad_batches=accumulate_now,
        predicted_peak_bytes=None,
        budget_bytes=None,
        action="skipped",
        reason=f"The batch size was not checked against the GPU's memory: {why}.",
    )


def _parts(rows: int, largest: int) -> int:
    """Return into how many batches to cut ``rows`` so that none has more than ``largest``."""
    fewest = math.ceil(rows / largest)
    # Beyond twice as many, e.g. 127 batches of one row for 127, speed is worth more than the rest.
    even = (parts for parts in range(fewest, 2 * fewest + 1) if rows % parts == 0)
    return next(even, fewest)


def _needed(probes: Sequence[Probe], rows: int, predicted: int | None) -> str:
    failed = [probe.rows for probe in probes if probe.peak_bytes is None and probe.rows <= rows]
    if failed:
        return f"more than there is (a step on {min(failed)} rows ran out of memory)"
    return f"about {size_text(predicted or 0)}"
