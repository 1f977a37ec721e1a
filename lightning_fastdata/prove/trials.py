"""The order in which changes are tried, what the measured blocks say of them, and the report."""

from __future__ import annotations

import functools
import math
import statistics
import textwrap
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final, Literal, TypeAlias

import numpy as np

from lightning_fastdata.errors import printable
from lightning_fastdata.prove.remedies import Remedy, code_of, together

Phase: TypeAlias = Literal["bound", "try", "confirm"]
Outcome: TypeAlias = Literal["change", "nothing to gain", "nothing found", "not known"]

AS_IS: Final = "as it is"
FREE: Final = "the same batches again"
LEAST_GAIN: Final = 1.03
"""Factor by which an epoch has to be faster for a change of the code to be worth it."""
_LEVEL: Final = 0.05
_BOUND_PAIRS: Final = (2, 2, 4)
"""Pairs of blocks in each round that measures the gain of free data; a clear gain ends them."""
_SURELY_MUCH: Final = 1.2
_SURELY_NOTHING: Final = 1.06
"""Upper end of the interval of free data's gain, below which there is nothing to gain."""
_CONFIRMED_PAIRS: Final = (5, 12)
"""Fewest and most pairs of blocks that are planned to confirm a remedy."""
_LEAST_PAIRS: Final = 3
"""Fewest pairs of blocks that confirm a remedy, if the time is over before all planned ones."""
_ROUNDS: Final = (2, 6)
"""Rounds in which the remedies run one at a time, and the most while none is seen to gain."""
_LOSES: Final = 0.9
"""Gain factor below which a remedy, if that is sure, gets no further round."""
_WITHOUT_A: Final = 3
"""Most blocks of remedies between two blocks of the training as it is."""
_WIDTH: Final = 88
_OTHERS_CPUS: Final = 0.3
"""Mean number of CPUs used by other programs, above which the report says so."""
_KNOWN: Final = 99.0
"""Upper end of an interval of a gain, above which the interval says nothing."""
_UNSURE: Final = 1.1
"""Upper end of the interval of free data's gain, above which "nothing to gain" is not sure."""
_UNMEASURED: Final = "no training step was measured"
_MORE_TIME: Final = "More time, or a quieter machine, would tell."


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """Some steps of a training with one setting, and the time of an epoch computed from them."""

    arm: str
    """Setting of the block: ``AS_IS``, ``FREE`` or the name of a remedy."""
    phase: Phase
    epoch_s: float
    """Wall time of an epoch with its start and its share of validation, in seconds."""
    step_ms: float
    """Wall time of a step in the middle of an epoch, wait included, in ms."""
    wall_s: float
    """Wall time of the block itself, in seconds."""
    others_cpus: float = 0.0
    """Mean number of CPUs that other programs used during the block."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """The block to run next."""

    arm: str
    phase: Phase
    warm: bool = False
    """Whether it only warms up (workers start, caches are filled), so that times do not count."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Gain:
    """Factor by which an epoch is faster, with its interval of 95 %."""

    factor: float
    low: float
    """Lower end of the interval, corrected for the number of tries."""
    high: float

    @property
    def holds(self) -> bool:
        """Whether the gain is worth a change, and not by chance."""
        return self.factor > LEAST_GAIN and self.low > 1.0


@dataclass(slots=True)
class Trial:
    """The results of a trial so far; it is filled while the blocks run."""

    script: str
    blocks: list[Block] = field(default_factory=list)
    remedies: dict[str, Remedy] = field(default_factory=dict)
    """Remedies that are tried, by name."""
    refused: dict[str, str] = field(default_factory=dict)
    """Reasons why remedies are not tried, by the name of the remedy."""
    failed: dict[str, str] = field(default_factory=dict)
    """Errors that ended remedies, by the name of the remedy."""
    notes: list[str] = field(default_factory=list)
    """Notes for the report: parts of the script that were switched off, and limits of the trial."""
    facts: dict[str, Any] = field(default_factory=dict)
    """Facts about the training: ``batches`` of an epoch, ``epochs``, and so on."""
    stopped: str = ""
    """Reason why the trial ended before everything was tried; empty: it did not."""
    ended: bool = False
    """Whether the trial came to its end."""


def of_dict(known: Mapping[str, Any]) -> Trial:
    """Return the trial of a dict that `dataclasses.asdict` made."""
    remedies = {name: Remedy.of_dict(each) for name, each in known["remedies"].items()}
    blocks = [Block(**each) for each in known["blocks"]]
    return Trial(**{**known, "blocks": blocks, "remedies": remedies})


# -- the order of the blocks -----------------------------------------------------------------------


def turns(
    trial: Trial, left_s: Callable[[], float], name_remedies: Callable[[], None]
) -> Iterator[Turn]:
    """Yield the turn to run next; it expects the block of a turn in ``trial.blocks`` afterwards.

    First it measures the gain of free data; if there is none, no remedy is tried. Then the remedies
    run one at a time, then the best of them together, and then the best of all again, to confirm it
    by blocks that had no part in choosing it. The training as it is runs in between.
    ``name_remedies`` is called once the gain of free data is known, and fills ``trial.remedies``.
    """
    yield Turn(arm=FREE, phase="bound", warm=True)
    for pairs in _BOUND_PAIRS:
        yield from _in_pairs(FREE, "bound", pairs)
        bound = bound_of(trial)
        if bound.factor < LEAST_GAIN and bound.high < _SURELY_NOTHING:
            return
        if bound.factor > _SURELY_MUCH or left_s() <= 0:
            break
    if bound.factor < LEAST_GAIN:
        return
    name_remedies()
    yield from _tried(trial, left_s, list(trial.remedies))
    may_persist = bool(trial.facts.get("may_persist"))
    joined = together(trial.remedies, _worthwhile(trial), may_persist=may_persist)
    for remedy in joined:
        trial.remedies[remedy.name] = remedy
    yield from _tried(trial, left_s, [remedy.name for remedy in joined])
    best = candidate(trial)
    if best is None:
        return
    least, most = _CONFIRMED_PAIRS
    pairs = max(least, min(most, int(left_s() / max(_pair_s(trial, best), 1e-3))))
    yield from _in_pairs(best, "confirm", pairs)


def _pair_s(trial: Trial, arm: str) -> float:
    return sum(_mean(trial, each, "wall_s") or 0.0 for each in (AS_IS, arm))


def _in_pairs(arm: str, phase: Phase, pairs: int) -> Iterator[Turn]:
    """Yield turns in the order A B B A A B B A ..., so that a steady drift affects both alike."""
    for number in range(pairs):
        both = (AS_IS, arm) if number % 2 == 0 else (arm, AS_IS)
        for name in both:
            yield Turn(arm=name, phase=phase)


def _tried(trial: Trial, left_s: Callable[[], float], names: Sequence[str]) -> Iterator[Turn]:
    """Yield rounds of some remedies, every second round in the opposite order.

    It ends when only the time to confirm the best of them is left.
    """
    for number in range(_ROUNDS[1]):
        if number >= _ROUNDS[0] and candidate(trial) is not None:
            return
        left = [n for n in names if n not in trial.failed and not (number and _loses(trial, n))]
        row = [AS_IS, *left]
        for at in range(_WITHOUT_A + 1, len(row), _WITHOUT_A + 1):
            row.insert(at, AS_IS)
        if number % 2:
            row.reverse()
        elif trial.blocks[-1].arm == AS_IS and trial.blocks[-1].phase == "try":
            row.pop(0)
        for name in row if left else ():
            best = candidate(trial)
            if left_s() < _CONFIRMED_PAIRS[0] * _pair_s(trial, best or FREE):
                return
            if not number and name != AS_IS and trial.remedies[name].change.lasts:
                yield Turn(arm=name, phase="try", warm=True)
            if name not in trial.failed:
                yield Turn(arm=name, phase="try")


def _loses(trial: Trial, name: str) -> bool:
    logs = log_gains(trial.blocks, name)
    if not logs:
        return False
    spread = _spread(trial)
    chance = 0.0 if spread is None else 2 * spread.deviation / math.sqrt(len(logs))
    return statistics.fmean(logs) < math.log(_LOSES) - chance


def _worthwhile(trial: Trial) -> dict[str, float]:
    found = {}
    for name in trial.remedies:
        logs = log_gains(trial.blocks, name, "try")
        if logs and name not in trial.failed and statistics.fmean(logs) > 0.0:
            found[name] = math.exp(statistics.fmean(logs))
    return found


def candidate(trial: Trial) -> str | None:
    """Return the remedy to confirm: of those within 3 % of the best, the one of least effort.

    The best is what gains most in all epochs of the script, of which the first fills a cache.
    """
    seen = {name: in_all(trial, name, gain) for name, gain in _worthwhile(trial).items()}
    if not seen or max(seen.values()) <= LEAST_GAIN:
        return None
    best = max(seen.values())
    near = [name for name, factor in seen.items() if factor * LEAST_GAIN >= best]
    return min(near, key=lambda name: (trial.remedies[name].effort, -seen[name]))


def in_all(trial: Trial, name: str, factor: float) -> float:
    """Return the gain of a remedy over all epochs, given that of the epochs behind the first.

    In the first, which fills a cache, it is that of the remedy without the cache.
    """
    epochs, change = trial.facts.get("epochs"), trial.remedies[name].change
    if not epochs or not change.cache:
        return factor
    alone = replace(change, cache=None)
    others = [n for n, remedy in trial.remedies.items() if remedy.change == alone]
    gain = gain_of(trial, others[0]) if others else None
    return float(epochs / (1 / (1.0 if gain is None else gain.factor) + (epochs - 1) / factor))


# -- the gains by the blocks -----------------------------------------------------------------------


def log_gains(blocks: Iterable[Block], arm: str, phase: Phase | None = None) -> list[float]:
    """Return, for each block of an arm, the logarithm of the factor by which it was faster.

    Each block is compared with the nearest block of the training as it is, of the same phase, that
    no earlier block of this arm was compared with: the pairs are then independent of each other.
    """
    run = [block for block in blocks if phase is None or block.phase == phase]
    plain = {at: block for at, block in enumerate(run) if block.arm == AS_IS}
    logs = []
    for at, block in enumerate(run):
        same = [each for each in plain if plain[each].phase == block.phase]
        if block.arm != arm or not same:
            continue
        nearest = min(same, key=lambda each: abs(each - at))
        logs.append(math.log(plain.pop(nearest).epoch_s / block.epoch_s))
    return logs


def bound_of(trial: Trial) -> Gain:
    """Return the gain of free data, which no remedy can exceed."""
    return interval(log_gains(trial.blocks, FREE, "bound"))


def gain_of(trial: Trial, name: str) -> Gain | None:
    """Return the gain of a remedy; None: nothing is known.

    For a remedy that was confirmed, only the blocks count that had no part in choosing it. Others
    have few blocks each, so that their interval rests on the spread of all remedies.
    """
    tries = max(1, len(trial.remedies) - len(trial.failed))
    confirmed = log_gains(trial.blocks, name, "confirm")
    if len(confirmed) >= _LEAST_PAIRS:
        return interval(confirmed, tries=tries)
    tried = log_gains(trial.blocks, name, "try")
    if not tried:
        return None
    return interval(tried, tries=tries, spread=_spread(trial))


def _spread(trial: Trial) -> Spread | None:
    """Return the spread of single pairs, pooled over all remedies and free data."""
    rows = [log_gains(trial.blocks, name, "try") for name in trial.remedies]
    return _pooled([*rows, log_gains(trial.blocks, FREE, "bound")])


def confirmed(trial: Trial) -> tuple[str, Gain] | None:
    """Return the remedy that was run again to confirm it, and its gain; None: there is none."""
    for name in trial.remedies:
        if len(log_gains(trial.blocks, name, "confirm")) >= _LEAST_PAIRS:
            gain = gain_of(trial, name)
            return None if gain is None else (name, gain)
    return None


@dataclass(frozen=True, slots=True)
class Spread:
    """How far single pairs are from their mean."""

    deviation: float
    """Standard deviation of the logarithms of the pairs' gains."""
    freedom: int
    """Number of degrees of freedom of the deviation."""


def _pooled(rows: Iterable[Sequence[float]]) -> Spread | None:
    rows = [row for row in rows if len(row) > 1]
    freedom = sum(len(row) - 1 for row in rows)
    if not freedom:
        return None
    squares = sum((value - statistics.fmean(row)) ** 2 for row in rows for value in row)
    return Spread(math.sqrt(squares / freedom), freedom)


def interval(logs: Sequence[float], *, tries: int = 1, spread: Spread | None = None) -> Gain:
    """Return the gain of some pairs, with Student's interval at 95 %, Bonferroni-corrected.

    Args:
        logs: Logarithm of the ratio of each pair; at least one.
        tries: Number of remedies among which the error level is divided.
        spread: Spread of single pairs; None: it is computed from ``logs``.
    """
    middle = statistics.fmean(logs)
    spread = _pooled([logs]) if spread is None else spread
    if spread is None:
        return Gain(factor=math.exp(middle), low=0.0, high=math.inf)
    quantile = student_quantile(1 - _LEVEL / (2 * tries), spread.freedom)
    half = quantile * spread.deviation / math.sqrt(len(logs))
    high = math.inf if middle + half > 700 else math.exp(middle + half)
    return Gain(factor=math.exp(middle), low=math.exp(middle - half), high=high)


@functools.cache
def student_quantile(probability: float, freedom: int) -> float:
    """Return the quantile of Student's t distribution for a probability above a half.

    With t = sqrt(freedom) * tan(angle), the density of the angle is a power of its cosine.
    """
    angles = np.linspace(0.0, np.pi / 2, 100_001)
    density = np.cos(angles) ** (freedom - 1)
    areas = np.concatenate(([0.0], np.cumsum(density[1:] + density[:-1])))  # the trapezoidal rule
    angle = np.interp(2 * probability - 1, areas / areas[-1], angles)
    return math.sqrt(freedom) * math.tan(angle)


# -- in words --------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Conclusion:
    """The conclusion of a trial."""

    trial: Trial
    outcome: Outcome
    verdict: str
    """Sentence that states the outcome."""
    remedy: str | None = None
    """Name of the remedy that is recommended; None: none is."""
    gain: Gain | None = None
    """Gain of the recommended remedy; None: none is recommended."""
    code: tuple[str, ...] = ()
    """Lines of code that apply the recommended remedy."""

    @property
    def says(self) -> tuple[str, ...]:
        """Texts on what to know of the recommended remedy."""
        if self.remedy is None or self.gain is None:
            return ()
        remedy, epochs = self.trial.remedies[self.remedy], self.trial.facts.get("epochs")
        says = list(remedy.says)
        if remedy.change.cache and epochs:
            gain = in_all(self.trial, self.remedy, self.gain.factor)
            says.append(f"in the {epochs:.3g} epochs of this script that is {gain:.3g}x in all")
        return tuple(says)

    @property
    def exit_code(self) -> int:
        """Exit code of the command: 0, nothing to change; 1, change recommended; 2, not known."""
        return {"change": 1, "not known": 2}.get(self.outcome, 0)

    def text(self) -> str:
        """Return the report for people."""
        lines = [f"fastdata prove · {printable(self.trial.script, keep='')}", ""]
        lines += _table(self.trial, self.remedy)
        lines += ["", *_wrapped(self.verdict, "")]
        if self.remedy is not None:
            lines += ["", "Write:", *(f"    {line}" for line in self.code)]
            lines += [line for said in self.says for line in _wrapped(said, "know  ")]
        lines += [""] * bool(self.trial.refused)
        for name, why in self.trial.refused.items():
            lines += _wrapped(f"{name}: {why}", "not tried  ")
        for name, why in self.trial.failed.items():
            if name not in self.trial.refused:
                lines += _wrapped(f"{name}: {why}", "failed  ")
        if self.trial.stopped and self.trial.blocks:
            lines += _wrapped(f"{self.trial.stopped}; this is what is known", "stopped  ")
        others = (
            statistics.fmean(b.others_cpus for b in self.trial.blocks) if self.trial.blocks else 0
        )
        if others > _OTHERS_CPUS:
            said = (
                f"other programs used {others:.1f} CPUs meanwhile; without them the gain may differ"
            )
            lines += _wrapped(said, "note  ")
        if self.trial.blocks:  # the notes speak of the figures
            lines += [line for note in self.trial.notes for line in _wrapped(note, "note  ")]
        return "\n".join(lines)


def conclude(trial: Trial) -> Conclusion:
    """Return the conclusion from the blocks of a trial, whether it came to its end or not."""
    found = confirmed(trial)
    if found is not None and found[1].holds:
        name, gain = found
        facts = trial.facts
        code = code_of(
            trial.remedies[name].change,
            given_to_fit=bool(facts.get("given_to_fit")),
            validates=bool(facts.get("validates")),
            home=facts.get("home", "lightning_fastdata"),
        )
        verdict = (
            f"{name}: an epoch takes {1 / gain.factor:.0%} of its time, {gain.factor:.2f}x as "
            f"fast ({gain.low:.2f} to {gain.high:.2f})."
        )
        return Conclusion(
            trial=trial, outcome="change", verdict=verdict, remedy=name, gain=gain, code=tuple(code)
        )
    outcome, verdict = _without_a_change(trial, found)
    return Conclusion(trial=trial, outcome=outcome, verdict=verdict)


def _without_a_change(trial: Trial, unsure: tuple[str, Gain] | None) -> tuple[Outcome, str]:
    """Return the outcome of a trial that recommends no change, and the sentence for it.

    ``unsure``: the remedy that was run again, whose gain may be chance.
    """
    if not log_gains(trial.blocks, FREE, "bound"):
        return "not known", f"Nothing is known: {trial.stopped or _UNMEASURED}."
    bound = bound_of(trial)
    if bound.factor < LEAST_GAIN and bound.high > _UNSURE:
        return "not known", (
            f"Not decided: free data would bring {bound.factor:.2f}x, which is not sure yet "
            f"({_in_words(bound)}). {_MORE_TIME}"
        )
    if bound.factor < LEAST_GAIN:
        share = min(1.0, 1 / bound.factor)
        return "nothing to gain", (
            f"Nothing to gain: the model takes {share:.0%} of the time, and free "
            f"data would bring {max(bound.factor, 1.0):.2f}x at most."
        )
    free = f"free data would bring {bound.factor:.2f}x at most"
    if unsure is not None and unsure[1].factor > LEAST_GAIN:
        name, gain = unsure
        return "not known", (
            f"Not decided: {name} seems to bring {gain.factor:.2f}x ({_in_words(gain)}), which may "
            f"be chance. {_MORE_TIME}"
        )
    if not trial.ended:
        return "not known", f"Not decided: {free}, and no change has been confirmed yet."
    known = {block.arm for block in trial.blocks} | trial.failed.keys()
    if untried := [name for name in trial.remedies if name not in known]:
        names = f"{', '.join(untried)}; --budget gives more"
        return "not known", f"Not decided: {free}, and there was no time to try {names}."
    if not trial.remedies:
        return "not known", f"Nothing tried: {free}, and there is no change to try on this loader."
    return "nothing found", f"Nothing found: {free}, and no change that was tried brings 3 %."


def _rows(trial: Trial) -> list[tuple[str, Gain | None]]:
    rows: list[tuple[str, Gain | None]] = [(AS_IS, None)]
    if log_gains(trial.blocks, FREE, "bound"):
        rows.append((FREE, bound_of(trial)))
    rows += [(name, gain_of(trial, name)) for name in trial.remedies]
    return [row for row in rows if row[1] is not None or _mean(trial, row[0], "epoch_s")]


def _table(trial: Trial, chosen: str | None) -> list[str]:
    rows = _rows(trial)
    if not rows:
        return [" nothing was measured"]
    width = max(24, *(len(name) for name, _ in rows))
    lines = [f" {'':<{width}}  {'step':>9}  {'epoch':>9}  {'gain':>6}  interval"]
    for name, gain in rows:
        step, epoch = _mean(trial, name, "step_ms"), _mean(trial, name, "epoch_s")
        cells = f"{_number(step)} ms  {_number(epoch)} s "
        told = "" if gain is None else f"  {gain.factor:>5.2f}x  {_in_words(gain)}"
        mark = (
            " <-" if name == chosen else "  (at most)" if name == FREE and gain is not None else ""
        )
        lines.append(f" {name:<{width}}  {cells}{told}{mark}".rstrip())
    return lines


def _in_words(gain: Gain) -> str:
    """Return the interval of a gain as text; "not known" if there were too few pairs."""
    return f"{gain.low:.2f} to {gain.high:.2f}" if gain.high <= _KNOWN else "not known"


def _number(value: float | None) -> str:
    if value is None:
        return f"{'-':>7}"
    digits = 1 if value < 1000 else 0
    return f"{value:>7.{digits}f}" if value >= 10 else f"{value:>7.2f}"


def _mean(trial: Trial, name: str, what: str) -> float | None:
    known = [getattr(block, what) for block in trial.blocks if block.arm == name]
    return statistics.fmean(known) if known else None


def _wrapped(text: str, head: str) -> list[str]:
    return textwrap.wrap(
        printable(text), _WIDTH, initial_indent=f" {head}", subsequent_indent=" " * (len(head) + 1)
    )


# -- the time of an epoch, computed from a part of it ----------------------------------------------


def epoch_s(
    *,
    cycle_s: float,
    rest_s: float,
    validation_s: float,
    validation_rest_s: float,
    validations: float,
) -> float:
    """Return the seconds that an epoch takes, computed from a part of it.

    The part has the start and the end of the epoch, and of one validation; only steps in the middle
    are missing. The part took ``cycle_s``, and the missing training steps take ``rest_s``. Its
    validation took ``validation_s`` of that, and the missing validation steps take
    ``validation_rest_s``. An epoch has ``validations`` validations.
    """
    return cycle_s - validation_s + rest_s + validations * (validation_s + validation_rest_s)


def middle_step_s(asked_s: Sequence[float], *, ahead: int = 0) -> float:
    """Return the mean step in the middle half of an epoch, in seconds.

    By then the batches read ahead at the start are used up, and the loader is still reading. In a
    short part it is the mean of all steps, as batches of the middle are made during the first ones.

    Args:
        asked_s: Times at which each batch was asked for, and at which the last step had ended.
        ahead: Batches that the loader reads ahead.
    """
    steps = len(asked_s) - 1
    if steps < 1:
        return 0.0
    begin, end = (steps // 4, steps - steps // 4) if steps >= max(8, 4 * ahead) else (0, steps)
    return (asked_s[end] - asked_s[begin]) / (end - begin)
