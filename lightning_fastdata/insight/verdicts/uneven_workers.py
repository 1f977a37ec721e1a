"""Finding about a stream that its workers share out unevenly."""

from __future__ import annotations

from dataclasses import replace
from itertools import accumulate
from typing import TYPE_CHECKING, Final

from lightning_fastdata.insight.model.finding import Finding, Gain, severity_of
from lightning_fastdata.insight.model.remedies import scaled_step_ms
from lightning_fastdata.insight.model.simulate import simulate
from lightning_fastdata.insight.verdicts.rule import ALL_COSTS, Rule

if TYPE_CHECKING:
    from lightning_fastdata.insight.model.evidence import Evidence

_NEARLY_ALL: Final = 0.9
"""Of the samples."""
_FEW: Final = 0.5
"""Of the workers: if no more make nearly everything, the shares are uneven."""
_TWICE: Final = 2.0
"""Even shares: if the busiest worker makes as many, a stream takes twice as long as it could."""
_NEEDS_ALL_WORKERS: Final = frozenset({"FD302", "FD303", "FD304", "FD305", "FD309"})
"""What these recommend or conclude is right where all workers work."""


def uneven(e: Evidence) -> Finding | None:
    """FD325: few of the workers make nearly all samples of a stream, or one of them far too many.

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
    who = (
        f"one of {workers} workers makes"
        if working == 1
        else f"{working} of {workers} workers make"
    )
    return Finding(
        code="FD325",
        severity=severity_of(e.stall_share),
        cause=f"{who} {share:.0%} of the samples of this stream, and waiting for batches costs "
        f"{e.stall_share or 0.0:.0%} of each step",
        remedy="share the stream out evenly: at least as many files as workers, of equal size, "
        "each read by one worker (get_worker_info() in __iter__)",
        gain=_gain_of_even_shares(e),
        leave_alone="more workers: they would have nothing to do",
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
    Rule(
        "FD325",
        "few workers make most of a stream",
        uneven,
        about="loader",
        replaces=ALL_COSTS | _NEEDS_ALL_WORKERS,
        after="FD301",
    ),
)
