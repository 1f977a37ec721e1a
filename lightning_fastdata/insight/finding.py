"""A finding is one cause of a slow step, its remedy, and what it would gain; a rule looks for one.

Each family of causes has its own rules, which look at what is known of a stage. The gate,
:func:`passed`, drops advice that must not be given or would gain too little.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Final, Literal, NamedTuple, TypeAlias

from torch.utils.data import IterableDataset

from lightning_fastdata.caches.cached import caches_in
from lightning_fastdata.loading.facts import known_split
from lightning_fastdata.loading.loader import FastDataLoader
from lightning_fastdata.loading.simulate import GOOD_ENOUGH
from lightning_fastdata.order.lengths import BucketBatchSampler

if TYPE_CHECKING:
    from lightning_fastdata.insight.evidence import Evidence

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
"""Longest wait, in ms, that is taken for the hand-over of a batch between processes. No option
shortens it: ``benchmarks/handing_over.py`` measures 0.3 to 1.3 ms."""
_MOSTLY_WAITING: Final = 0.3
"""Share of a step that is waiting, 0 to 1, above which even a short wait is worth advice."""
_BASIS = {"independent": "if the workers share nothing"}
TRANSFER_HIGH, AUGMENT_HIGH = 0.05, 0.10
SMALL_COSTS: Final = frozenset({"FD001", "FD002"})
"""Codes of findings without stamps at a stall of 10 % or less; any known cause replaces them."""
ALL_COSTS: Final = SMALL_COSTS | {"FD101", "FD102", "FD104"}
"""Codes of findings of what data costs, without stamps; causes of late batches replace them."""
_DECIDED: Final = frozenset(
    {"num_workers", "executor", "prefetch_factor", "pin_memory", "persistent_workers", "split"}
)
"""Options whose values follow from dataset and machine; other options have one default for all."""
_CHOSEN: Final = "which was chosen for this dataset and this machine"
_TUNED: Final = "which is tuned while it trains"
_DRAWN: Final = "its samples are drawn at random, or nobody has looked"
_LEARN: Final = "batches straight from a FastDataLoader: it tells why they are late"
_WHOLE_STREAM: Final = (
    "as each may read the whole stream, so that samples come several times: split=True says that "
    "it divides itself among them (get_worker_info)"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTimes:
    """Mean times of the steps of a stage, and of their waits. None: not measured.

    No finding is made that rests on a time which is None.
    """

    step_ms: float | None = None
    """Time from the start of one step to the start of the next, in ms."""
    wait_ms: float | None = None
    """Part of the step in which the training process waited for the batch, in ms."""
    stall_ms: float | None = None
    """Part of the wait, in ms, in which the device was idle: what no work of it hid."""

    def share(self, ms: float | None) -> float | None:
        """Return a time in ms as a share of the step, 0 to 1; None if either was not measured."""
        return None if ms is None or not self.step_ms else ms / self.step_ms

    def waiting_for(self, share: float) -> StepTimes:
        """Return the times with all waits multiplied by a share, 0 to 1."""
        wait_ms, stall_ms = (ms and share * ms for ms in (self.wait_ms, self.stall_ms))
        return replace(self, wait_ms=wait_ms, stall_ms=stall_ms)

    def without(self, ms: float | None) -> Gain | None:
        """Return the gain if a cost of so many ms vanished from the step: the most possible."""
        if self.step_ms is None or ms is None:
            return None
        after_ms = max(0.0, self.step_ms - ms)
        return Gain(before_ms=self.step_ms, after_ms=after_ms, basis="floor")

    @property
    def stall_share(self) -> float | None:
        """Share of the step in which the device waited for data, 0 to 1; None: not measured."""
        return self.share(self.stall_ms)

    @property
    def stalls(self) -> bool:
        """Whether the device waits for data for 3 % of the step, and not for a mere hand-over."""
        share = self.stall_share or 0.0
        return share >= STALL_LOW and costs_much(self.stall_ms or 0.0, share)


@dataclass(frozen=True, slots=True, kw_only=True)
class LoaderFacts:
    """What is known about how batches are made. None: not known, e.g. of a foreign loader."""

    num_workers: int | None = None
    """Number of side processes that load; 0: the training process loads."""
    usable_cpus: int | None = None
    """CPUs this process may use, after affinity, cgroup quota and other ranks on the host."""
    augment_on: Literal["cpu", "device"] | None = None
    augment_settled: bool = False
    """Whether moving the transforms is not to be advised: their place was measured to be the
    faster, or nothing of them can be deferred to a device."""
    pinned: bool | None = None
    """Whether batches arrive in page-locked memory."""
    persistent_workers: bool | None = None
    """Whether workers stay between epochs; None: there are none, or they must not stay, as what
    they read changes with the epochs."""
    compared: bool = True
    """Whether what is read was compared from epoch to epoch; it may be too large for that."""
    streamed: bool | None = None
    """Whether the dataset is an iterable one."""
    loader: str | None = None
    """Name of the loader that the facts are about, e.g. ``loader 'images'``: of several, the one
    that is waited for most. None: there is one."""
    learn: str = _LEARN
    """What to change so that it is known why batches are late; empty: nothing is known to help."""
    closed: Mapping[str, str] = field(default_factory=dict)
    """Option -> why nobody is told to change it: the package chose it, this run has tried another
    value, or the package would not take one. Options of validation begin with ``"val."``."""


def read_loader(loader: object) -> LoaderFacts:
    """Return what a loader of any kind says about itself, which may be nothing."""
    names = ("num_workers", "pin_memory", "persistent_workers", "dataset")
    workers, pinned, kept, dataset = (getattr(loader, name, None) for name in names)
    augment_on: Literal["cpu", "device"] | None = None
    settled = False
    if isinstance(loader, FastDataLoader) and loader.transform is not None:
        augment_on = "device" if loader.on_device else "cpu"
        settled = not loader.transform.defers
    return LoaderFacts(
        augment_on=augment_on,
        augment_settled=settled,
        num_workers=workers,
        pinned=pinned,
        persistent_workers=kept if workers else None,
        streamed=isinstance(dataset, IterableDataset),
        closed=closed_options(loader),
        learn="" if isinstance(loader, FastDataLoader) else _LEARN,
    )


def class_of_settings(loader: object) -> Literal["FastDataLoader", "DataLoader"]:
    """Return the class whose arguments hold the settings of a loader that no data module makes."""
    return "FastDataLoader" if isinstance(loader, FastDataLoader) else "DataLoader"


def closed_options(loader: object, *, prefix: str = "") -> dict[str, str]:
    """Return the options that nobody is told to change, for a loader of any kind, with reasons."""
    ours = loader if isinstance(loader, FastDataLoader) else None
    plan = None if ours is None else ours.plan
    found = {}
    dataset = getattr(loader, "dataset", None)
    if isinstance(dataset, IterableDataset):
        known = known_split(dataset)
        divides = known is not None and known.splits if plan is None else plan.options.split is True
        if not divides:
            found["num_workers"] = _WHOLE_STREAM
    if plan is not None:
        found |= dict.fromkeys(sorted(_DECIDED - plan.asked.set_by_user()), _CHOSEN)
        if plan.options.persistent_workers is False:  # as torch has it: nothing was chosen
            found.pop("persistent_workers", None)
    if ours is not None and ours.training.tuner is not None:
        back = [move for move in ours.training.tuner.moves if move.outcome == "taken back"]
        found["num_workers"] = f"{_TUNED}: {back[-1]}" if back else _TUNED
    if ours is None or ours.draws is not False:
        found["cache"] = _DRAWN
    elif isinstance(dataset, IterableDataset):
        found["cache"] = "a stream has no index to keep samples by"
    elif caches_in(ours.dataset):
        found["cache"] = "samples are kept already"
    if isinstance(getattr(loader, "batch_sampler", None), BucketBatchSampler):
        found["batch_sampler"] = "its batches are of samples of like length"
    return {f"{prefix}{option}": why for option, why in found.items()}


@dataclass(frozen=True, slots=True, kw_only=True)
class Gain:
    """Time of a step before and after a change."""

    before_ms: float
    """Measured time of a step, in ms."""
    after_ms: float
    """Expected time of a step after the change, in ms."""
    basis: Literal["simulated", "independent", "floor"]
    """What ``after_ms`` rests on. ``"simulated"``: a model replayed the recorded batches.
    ``"independent"``: it did, and is right if workers share nothing that they wait for, such as a
    lock or a network. ``"floor"``: it is a lower bound, as a cost cannot vanish as a whole."""

    @property
    def factor(self) -> float:
        """How many times as fast a step becomes."""
        return self.before_ms / self.after_ms if self.after_ms > 0 else math.inf

    @property
    def saved_ms(self) -> float:
        """Time that each step saves, in ms."""
        return self.before_ms - self.after_ms

    @property
    def worthwhile(self) -> bool:
        """Whether a step becomes faster by more than the factor ``GOOD_ENOUGH``."""
        return self.factor > GOOD_ENOUGH


@dataclass(frozen=True, slots=True, kw_only=True)
class Advice:
    """One thing to do, as a rule proposes it; the gate decides whether it is given."""

    text: str
    """What to change, with options written as in code."""
    changes: tuple[str, ...] = ()
    """Options of the loader or the data module that the advice changes; those of validation's
    loader begin with ``"val."``."""
    gain: Gain | None = None
    """Gain of this advice; None: the gain of its finding holds."""
    joins: bool = False
    """Whether the advice may be told beside an earlier one, and not only in its place."""
    for_speed: bool = True
    """Whether advice needs a gain to be given; False: it averts an error, or gets more known."""


KEEP: Final = Advice(text="LoaderOptions(persistent_workers=True)", changes=("persistent_workers",))
KEEP_UNSEEN: Final = replace(KEEP, text=f"{KEEP.text}, if your program changes nothing they read")
PIN: Final = Advice(text="LoaderOptions(pin_memory=True)", changes=("pin_memory",))


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One cause, in words for people and a code for programs."""

    code: str = ""
    """Stable code of the rule that made the finding; ``docs/verdicts`` has a page for each."""
    severity: Severity
    """How much the cause costs. ``"fine"``: there is nothing to do; ``"moderate"``: up to 10 % of a
    step or of the run; ``"high"``: more, or memory runs short."""
    cause: str
    """One sentence that says the cause, with the figures it rests on."""
    remedy: str = ""
    """What to change, with options written as in code; empty: there is nothing to do."""
    gain: Gain | None = None
    """Gain of the remedy; None: not known."""
    leave_alone: str = ""
    """What does not help, or is fine as it is; empty: nothing to say."""
    advice: tuple[Advice, ...] = ()
    """Advice of the rule, the best first; empty once the gate has made ``remedy`` of it."""

    @property
    def family(self) -> str:
        """Name by which people know such causes, e.g. ``"slow storage"``; empty without a code."""
        return next((name for name, codes in FAMILIES.items() if self.code in codes.split()), "")


FAMILIES: Final = {
    "too few steps": "FD000",
    "data is fine": "FD001 FD002",
    "late batches": "FD104",
    "too few workers": "FD101 FD102",
    "slow storage": "FD303 FD304",
    "slow samples": "FD302",
    "costly transforms": "FD305",
    "full CPUs": "FD306 FD315",
    "collation, sampler, hand-over": "FD307 FD308 FD323 FD324",
    "copy, augmentation, padding": "FD312 FD313 FD337",
    "validation": "FD318",
    "beside the steps": "FD310 FD320",
    "memory": "FD334 FD335 FD336",
    "uneven shares": "FD316 FD325",
}
"""Name of a family of causes, as people see it beside a code -> the codes of the family."""


def costs_much(stall_ms: float, share: float) -> bool:
    """Return whether a stall, which is this share of a step, is more than handing over takes."""
    return stall_ms > HANDING_OVER_MS or share > _MOSTLY_WAITING


def gain_text(gain: Gain) -> str:
    """Return a gain in words, e.g. ``1.52x (78.0 -> 51.3 ms a step, simulated)``."""
    if not math.isfinite(gain.factor):
        return f"at most all {gain.before_ms:.1f} ms of a step"
    most = "at most " if gain.basis in ("floor", "independent") else ""
    basis = "" if gain.basis == "floor" else f", {_BASIS.get(gain.basis, gain.basis)}"
    steps = f"{gain.before_ms:.1f} -> {gain.after_ms:.1f} ms a step"
    return f"{most}{gain.factor:.2f}x ({steps}{basis})"


def duration_text(seconds: float) -> str:
    """Return ``40 ms``, ``0.8 s``, ``34 s``, ``1 min 34 s`` or ``2 h 05 min``."""
    if seconds < 0.095:
        return f"{1000 * seconds:.0f} ms"
    if seconds < 9.95:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    return f"{whole // 3600} h {whole % 3600 // 60:02d} min"


def cpus_text(cpus: float, which: str = "") -> str:
    """Return ``1 CPU`` or ``2 usable CPUs``."""
    return f"{cpus:g} {which}CPU{'' if cpus == 1 else 's'}"


def steps_text(steps: int) -> str:
    """Return ``1 step`` or ``1200 steps``."""
    return f"{steps} step{'' if steps == 1 else 's'}"


@dataclass(frozen=True, slots=True)
class Rule:
    """One cause: how it is looked for, and how its finding relates to others."""

    code: str
    """Stable code, which keeps its meaning for ever; ``docs/verdicts`` has a page for it."""
    title: str
    find: Callable[[Evidence], Finding | None]
    """Function that looks at the evidence. It returns None where the facts do not
    show the cause, or were not measured."""
    about: Literal["stage", "loader", "machine", "rank", "run"] = "stage"
    """What the cause belongs to. ``"loader"``: the loader that is waited for most, which the
    finding names if there are several; ``"machine"``: so, but the remedy is no option of it.
    ``"rank"``: one of several processes that train together. ``"run"``: a pause between steps."""
    replaces: frozenset[str] = SMALL_COSTS
    """Codes of findings that are left out beside this one, as it explains them or shows that they
    are wrong."""
    after: str = ""
    """Code after which the rule stands in the catalogue; empty: its own code says where."""
    kind: Kind | None = None
    """What a run is called if this cause holds it up most; None: what its stall says."""


class Found(NamedTuple):
    """A finding, and the rule that made it."""

    rule: Rule
    finding: Finding


def seen_by(rules: Iterable[Rule], evidence: Evidence) -> Iterator[Found]:
    """Yield what rules find in the evidence, each with its rule."""
    for rule in rules:
        finding = rule.find(evidence)
        if finding is not None:
            yield Found(rule, replace(finding, code=rule.code))


def make_finding(
    share: float | None,
    cause: str,
    remedy: str | Advice | tuple[Advice, ...],
    gain: Gain | None = None,
    leave_alone: str = "",
) -> Finding:
    """Return the finding of a cause that costs this share of a step, 0 to 1; None: not known.

    Of several remedies the best comes first, and the gate gives the first that it lets through.
    """
    remedy = Advice(text=remedy) if isinstance(remedy, str) else remedy
    return Finding(
        severity="high" if share is not None and share > STALL_HIGH else "moderate",
        cause=cause,
        gain=gain,
        leave_alone=leave_alone,
        advice=remedy if isinstance(remedy, tuple) else (remedy,),
    )


def passed(finding: Finding, closed: Mapping[str, str]) -> Finding:
    """Return a finding whose remedy is the first advice that may be given; with none, it is fine.

    Later advice that ``joins`` is added, unless the first one has a gain of its own; told is the
    largest gain of all. ``closed``: option -> why nobody is told to change it.
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
    gains = [gain for advice in given if (gain := advice.gain or finding.gain) is not None]
    most = max(gains, key=lambda gain: gain.factor, default=None)
    return replace(finding, remedy=remedy, gain=most)


def may_be_given(advice: Advice, gain: Gain | None, closed: Mapping[str, str]) -> bool:
    """Return whether an advice with this gain may be given."""
    if set(advice.changes) & set(closed):
        return False
    return not advice.for_speed or (gain is not None and gain.worthwhile)
