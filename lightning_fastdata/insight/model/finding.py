"""A finding is one cause of a slow step, its remedy, and what it would gain; a rule looks for one.

All that rules advise passes one gate before anybody is told of it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final, Literal, NamedTuple, TypeAlias

if TYPE_CHECKING:
    from lightning_fastdata.insight.model.evidence import Evidence

Severity: TypeAlias = Literal["fine", "moderate", "high"]
Kind: TypeAlias = Literal[
    "data-bound",
    "compute-bound",
    "balanced",
    "unknown",
    "paused between epochs",
    "starved in validation",
    "held up",
    "held up by other programs",
]


STALL_LOW, STALL_HIGH = 0.03, 0.10
HANDING_OVER_MS: Final = 1.5
"""A wait up to here is what it takes to hand a batch over between processes, which no option
shortens: 0.3 to 1.3 ms by ``benchmarks/handing_over.py``."""
_MOSTLY_WAITING: Final = 0.3
"""Of a step: from here on another way to load is worth a try, however short the wait is."""
_BASIS = {"independent": "if the workers share nothing"}
TRANSFER_HIGH, AUGMENT_HIGH = 0.05, 0.10
_LEAST_PART: Final = 0.1
"""Of the wait: advice about less is noise."""
SMALL_COSTS: Final = frozenset({"FD001", "FD002"})
"""Findings without stamps where the stall is 10 % or less: any known cause replaces them."""
ALL_COSTS: Final = SMALL_COSTS | {"FD101", "FD102", "FD104"}
"""All findings without stamps: a cause of late batches replaces them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Gain:
    """What a step takes now, and would take."""

    before_ms: float
    """Measured."""
    after_ms: float
    """Expected."""
    basis: Literal["simulated", "independent", "floor"]
    """``"simulated"``: the recorded batches in the other setup. ``"independent"``: the same, if the
    workers share nothing that they wait for, as a lock or a full line would be.
    ``"floor"``: no less is possible, as the cost cannot vanish as a whole."""

    @property
    def factor(self) -> float:
        """How many times as fast."""
        return self.before_ms / self.after_ms if self.after_ms > 0 else math.inf

    @property
    def saved_ms(self) -> float:
        """Of a step."""
        return self.before_ms - self.after_ms

    @property
    def worthwhile(self) -> bool:
        """It is more than what is good enough."""
        from lightning_fastdata.tuning.simulate import GOOD_ENOUGH  # loads torch

        return self.factor > GOOD_ENOUGH


@dataclass(frozen=True, slots=True, kw_only=True)
class Advice:
    """One thing to do, as a rule proposes it; the gate decides whether it is given."""

    text: str
    """What to change, options as they are written in code."""
    changes: tuple[str, ...] = ()
    """Options of the loader or the data module that it changes; those of validation's loader begin
    with ``"val."``."""
    gain: Gain | None = None
    """What it makes of a step; None: what the finding says."""
    part: float = 1.0
    """Of the wait, what it speaks of, 0 to 1."""
    joins: bool = False
    """It is told beside what comes before it, and not in its place only."""
    for_speed: bool = True
    """False: it averts an error, or gets more known, and needs no gain."""


KEEP: Final = Advice(text="LoaderOptions(persistent_workers=True)", changes=("persistent_workers",))
PIN: Final = Advice(text="LoaderOptions(pin_memory=True)", changes=("pin_memory",))


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One cause, in words for people and a code for programs."""

    code: str
    """Stable code; ``docs/verdicts`` has a page for each."""
    severity: Severity
    """``"fine"``: nothing to do; ``"moderate"`` up to 10 % of the step; ``"high"`` above."""
    cause: str
    """One sentence with the figures it rests on."""
    remedy: str
    """What to change, options as they are written in code; empty if there is nothing to do."""
    gain: Gain | None = None
    """What the remedy makes of a step; None: not known."""
    leave_alone: str = ""
    """What does not help, or is fine as it is."""
    advice: tuple[Advice, ...] = ()
    """What a rule proposes, the best first. Empty behind the gate, which makes ``remedy`` of it."""

    @property
    def family(self) -> str:
        """What people know such causes by, e.g. ``"slow storage"``."""
        return family_of(self.code)


FAMILIES: Final = {
    "too few steps": "FD000",
    "data is fine": "FD001 FD002",
    "late batches": "FD104",
    "too few workers": "FD101 FD102",
    "slow storage": "FD303 FD304",
    "slow samples": "FD302",
    "costly transforms": "FD305",
    "full CPUs": "FD306 FD315",
    "costly hand-over": "FD307 FD308 FD323 FD324",
    "copy, augmentation, padding": "FD312 FD313 FD337",
    "validation": "FD318",
    "beside the steps": "FD310 FD320",
    "memory": "FD334 FD335 FD336",
    "uneven shares": "FD316 FD325",
}
"""What is shown of a code -> the codes that it stands for."""


def family_of(code: str) -> str:
    """Return what people know the cause of a code by; empty: there is no such code."""
    return next((name for name, codes in FAMILIES.items() if code in codes.split()), "")


def costs_much(stall_ms: float, share: float) -> bool:
    """Return whether a wait of a share of each step, 0 to 1, is more than handing over takes."""
    return stall_ms > HANDING_OVER_MS or share > _MOSTLY_WAITING


def gain_text(gain: Gain) -> str:
    """Return a gain in words, e.g. ``1.52x (78.0 -> 51.3 ms a step, simulated)``."""
    most = "at most " if gain.basis in ("floor", "independent") else ""
    basis = "" if gain.basis == "floor" else f", {_BASIS.get(gain.basis, gain.basis)}"
    steps = f"{gain.before_ms:.1f} -> {gain.after_ms:.1f} ms a step"
    return f"{most}{gain.factor:.2f}x ({steps}{basis})"


def duration_text(seconds: float) -> str:
    """Return ``0.8 s``, ``34 s``, ``1 min 34 s`` or ``2 h 05 min``."""
    if seconds < 9.95:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    return f"{whole // 3600} h {whole % 3600 // 60:02d} min"


def steps_text(steps: int) -> str:
    """Return ``1 step`` or ``1200 steps``."""
    return f"{steps} step{'' if steps == 1 else 's'}"


@dataclass(frozen=True, slots=True)
class Rule:
    """One cause: how it is looked for, and how what was found goes with other findings."""

    code: str
    """Stable code; it keeps its meaning for ever. ``docs/verdicts`` has a page for it."""
    title: str
    find: Callable[[Evidence], Finding | None]
    """None where the facts do not show the cause, or were not measured."""
    about: Literal["stage", "loader", "machine", "rank", "run"] = "stage"
    """What the cause belongs to. ``"loader"``: of several loaders, the one that is waited for most,
    which the finding names. ``"machine"``: the same, but the remedy is no option of a loader.
    ``"rank"``: one of several processes that train together. ``"run"``: a pause between steps."""
    replaces: frozenset[str] = SMALL_COSTS
    """Codes of findings that are left out beside this one: it says why, or they rest on what it
    shows to be wrong."""
    after: str = ""
    """The code after which it stands in the catalogue; empty: its own place by code."""
    kind: Kind | None = None
    """What a run is called that this cause holds up most; None: what its stall says."""


class Found(NamedTuple):
    """A finding, and the rule that made it."""

    rule: Rule
    finding: Finding


def found(
    code: str,
    share: float | None,
    cause: str,
    remedy: str | Advice | tuple[Advice, ...],
    gain: Gain | None = None,
    leave_alone: str = "",
) -> Finding:
    """Return the finding of something that costs this share of a step, 0 to 1.

    Of several remedies the best comes first, and the gate gives one of them.
    """
    remedy = Advice(text=remedy) if isinstance(remedy, str) else remedy
    return Finding(
        code=code,
        severity="high" if share is not None and share > STALL_HIGH else "moderate",
        cause=cause,
        remedy="",
        gain=gain,
        leave_alone=leave_alone,
        advice=remedy if isinstance(remedy, tuple) else (remedy,),
    )


def of_wait(e: Evidence, share: float, what: str) -> str:
    """Return in words that something is a share of the wait, 0 to 1, and what that costs."""
    stall = e.stall_share or 0.0
    return f"{what} is {share:.0%} of the wait for data, which costs {stall:.0%} of each step"


def passed(finding: Finding, closed: Mapping[str, str]) -> Finding:
    """Return a finding whose remedy is the first advice that may be given; with none, it is fine.

    What ``joins`` is told beside it, unless it has a gain of its own. ``closed``: of ``Evidence``.
    """
    given: list[Advice] = []
    for advice in finding.advice:
        allowed = may_be_given(advice, advice.gain or finding.gain, closed)
        if allowed and (not given or (given[0].gain is None and advice.joins)):
            given.append(advice)
    finding = replace(finding, advice=())
    if not given:
        return replace(finding, severity="fine", remedy="")
    remedy = ", or ".join(advice.text for advice in given)
    return replace(finding, remedy=remedy, gain=given[0].gain or finding.gain)


def may_be_given(advice: Advice, gain: Gain | None, closed: Mapping[str, str]) -> bool:
    """Return whether an advice with this gain may be given."""
    if set(advice.changes) & set(closed):
        return False
    worthwhile = advice.part >= _LEAST_PART and gain is not None and gain.worthwhile
    return worthwhile or not advice.for_speed
