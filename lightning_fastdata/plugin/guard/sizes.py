"""Which batch size fits the GPU: sizes that are tried, and what is decided. Nothing is predicted.

``halved`` or ``doubled`` -> training steps (:mod:`~lightning_fastdata.plugin.guard.steps`) ->
``Probe`` -> ``GuardDecision``. Nothing here knows Lightning or runs a model.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, Literal, NamedTuple, TypeAlias

from lightning_fastdata.host.memory import size_text

GuardPolicy: TypeAlias = Literal["accumulate", "raise", "warn", "off"]
"""What to do with a batch that does not fit.

``warn`` trains on it in parts and tells. ``accumulate`` tries before the training what fits, loads
smaller batches and accumulates gradients over more of them. ``raise`` ends the training. ``off``
leaves the error as it is.
"""

_FIRST: Final = 4
_NEARLY: Final = 0.95  # of the most rows a second
_FEWEST_RATES: Final = 3
_NO_FASTER: Final = 1.05  # times as many rows a second are not worth twice the batch


class Probe(NamedTuple):
    """What training steps at one batch size took."""

    rows: int
    """Rows of the batch."""
    peak_bytes: int | None
    """Most memory held during the steps; None if the device ran out of memory."""
    budget_bytes: int
    """What they may take: free memory less the reserve."""
    step_s: float = 0.0
    """Seconds of a training step, without the transfer of its batch."""

    @property
    def fits(self) -> bool:
        """Whether the steps ran, and left the reserve alone."""
        return self.peak_bytes is not None and self.peak_bytes <= self.budget_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class GuardDecision:
    """What the guard decided about the batch size of a training, and why."""

    batch_size: int
    """Rows per batch to load."""
    accumulate_grad_batches: int
    """Batches to accumulate gradients over before each optimizer step."""
    action: Literal["keep", "accumulate", "chosen", "raise", "skipped"]
    """``keep``: it fits. ``accumulate``: it does not, load smaller batches. ``chosen``: no size was
    asked for. ``raise``: not even one row fits. ``skipped``: nothing was tried."""
    reason: str
    """The decision and its cause as sentences for a person."""
    probes: tuple[Probe, ...] = ()
    """What it rests on."""


def halved(rows: int, measure: Callable[[int], Probe]) -> tuple[Probe, ...]:
    """Return probes of a size, of half of it and so on, down to one that fits or to one row."""
    probes = [measure(rows)]
    while not probes[-1].fits and probes[-1].rows > 1:
        probes.append(measure(-(-probes[-1].rows // 2)))
    return tuple(probes)


def doubled(most: int, measure: Callable[[int], Probe]) -> tuple[Probe, ...]:
    """Return probes of 4 rows, of 8 and so on, up to ``most``, while it fits and gets faster.

    It ends where two doublings together brought less than 5 % more rows a second. Where 4 rows do
    not fit, fewer are tried.
    """
    probes = halved(min(_FIRST, most), measure)
    while probes[-1].fits and _FIRST <= probes[-1].rows < most and not _is_past_knee(probes):
        probes = (*probes, measure(min(2 * probes[-1].rows, most)))
    return probes


def accumulated(asked: int, probes: Sequence[Probe], accumulate_now: int) -> GuardDecision:
    """Return what to do about batches of ``asked`` rows, by the probes of :func:`halved`.

    ``accumulate_now`` is how many batches gradients are accumulated over already. The first probe
    has fewer rows than were asked for where the dataset has no more.
    """
    full, last = probes[0], probes[-1]
    need = f"A training step on {full.rows} rows needs {_needed(full)}"
    if full.fits:
        return GuardDecision(
            batch_size=asked,
            accumulate_grad_batches=accumulate_now,
            action="keep",
            reason=f"{need}, {size_text(full.budget_bytes)} may be used: the batch size stays.",
        )
    need = f"{need}, but {size_text(full.budget_bytes)} may be used"
    if not last.fits:
        return _nothing_fits(need, accumulate_now)
    batches = accumulate_now * -(-full.rows // last.rows)
    before, after = full.rows * accumulate_now, last.rows * batches
    seen = f"still sees {after}" if after == before else f"sees {after} instead of {before}"
    return GuardDecision(
        batch_size=last.rows,
        accumulate_grad_batches=batches,
        action="accumulate",
        reason=f"{need}: the loader now gives {last.rows} rows at a time and gradients accumulate "
        f"over {batches} batches. Each optimizer step {seen} rows.",
    )


def chosen(probes: Sequence[Probe], accumulate_now: int) -> GuardDecision:
    """Return the decision where no batch size was asked for, by the probes of :func:`doubled`.

    The smallest size is chosen that trains 95 % of the most rows a second: a larger one takes
    memory, and optimizer steps from each epoch, for nothing.
    """
    fitting = [probe for probe in probes if probe.fits]
    if not fitting:
        last = probes[-1]
        need = f"A training step on {last.rows} row needs {_needed(last)}"
        return _nothing_fits(
            f"{need}, but {size_text(last.budget_bytes)} may be used", accumulate_now
        )
    rates = _rows_per_s(fitting)
    best = max(rates.values())
    found = next(probe for probe in fitting if rates[probe.rows] >= _NEARLY * best)
    tried = ", ".join(f"{rows}: {rate:.4g}" for rows, rate in rates.items())
    return GuardDecision(
        batch_size=found.rows,
        accumulate_grad_batches=accumulate_now,
        action="chosen",
        reason=f'batch_size="auto": {found.rows} rows at a time, which takes '
        f"{size_text(found.peak_bytes or 0)} of the {size_text(found.budget_bytes)} that may be "
        f"used and trains {rates[found.rows] / best:.0%} of the most rows a second. Rows a second "
        f"that were measured, by batch size: {tried}.",
    )


def skipped(asked: int, accumulate_now: int, why: str) -> GuardDecision:
    """Return the decision to leave everything as it is because nothing could be measured."""
    return GuardDecision(
        batch_size=asked,
        accumulate_grad_batches=accumulate_now,
        action="skipped",
        reason=f"The batch size was not checked against the GPU's memory: {why}.",
    )


def _nothing_fits(need: str, accumulate_now: int) -> GuardDecision:
    return GuardDecision(
        batch_size=1,
        accumulate_grad_batches=accumulate_now,
        action="raise",
        reason=f"{need}, and not even one row fits. Free memory on the device, use a smaller model "
        "or smaller samples, or set guard to 'off' to try nevertheless.",
    )


def _is_past_knee(probes: Sequence[Probe]) -> bool:
    rates = list(_rows_per_s(probes).values())
    enough = len(rates) >= _FEWEST_RATES
    return enough and max(rates[-2:]) <= _NO_FASTER * max(rates[:-2])


def _rows_per_s(probes: Sequence[Probe]) -> dict[int, float]:
    # A clock may be too coarse for the fastest of steps.
    return {probe.rows: probe.rows / max(probe.step_s, 1e-9) for probe in probes}


def _needed(probe: Probe) -> str:
    if probe.peak_bytes is None:
        return "more GPU memory than there is"
    return f"{size_text(probe.peak_bytes)} of GPU memory"
