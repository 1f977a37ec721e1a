"""A trial in words: a table, one line of verdict, what to write."""

from __future__ import annotations

import statistics
import textwrap
from dataclasses import dataclass
from typing import Final, Literal, TypeAlias

from lightning_fastdata.errors import printable
from lightning_fastdata.prove.remedies import code_of
from lightning_fastdata.prove.trials import (
    AS_IS,
    FREE,
    LEAST_GAIN,
    Gain,
    Trial,
    bound_of,
    confirmed,
    gain_of,
    log_gains,
)

Outcome: TypeAlias = Literal["change", "nothing to gain", "nothing found", "not known"]

EXIT_CODES: Final[dict[Outcome, int]] = {
    "nothing to gain": 0,
    "nothing found": 0,
    "change": 1,
    "not known": 2,
}
_WIDTH: Final = 88
_OTHERS_CPUS: Final = 0.3
"""CPUs of other programs from which on they are told of."""
_KNOWN: Final = 99.0
"""The upper end of an interval above which the interval says nothing."""
_UNSURE: Final = 1.1
"""An upper end above which it is said that one cannot be sure of nothing."""
_UNMEASURED: Final = "no training step was measured"
_MORE_TIME: Final = "More time, or a quieter machine, would tell."


@dataclass(frozen=True, slots=True, kw_only=True)
class Conclusion:
    """What a trial comes to."""

    trial: Trial
    outcome: Outcome
    verdict: str
    """One sentence."""
    remedy: str | None = None
    """The name of the remedy that is recommended."""
    gain: Gain | None = None
    """Of it."""
    code: tuple[str, ...] = ()
    """Lines to paste."""

    @property
    def says(self) -> tuple[str, ...]:
        """What to know of the remedy that is recommended."""
        if self.remedy is None or self.gain is None:
            return ()
        remedy, epochs = self.trial.remedies[self.remedy], self.trial.facts.get("epochs")
        says = list(remedy.says)
        if remedy.change.cache and epochs:
            in_all = epochs / (1 + (epochs - 1) / self.gain.factor)
            says.append(f"in the {epochs:.0f} epochs of this script that is {in_all:.3g}x in all")
        return tuple(says)

    @property
    def exit_code(self) -> int:
        """0: nothing is to be changed; 1: a change is recommended; 2: it is not known."""
        return EXIT_CODES[self.outcome]

    def text(self) -> str:
        """Return it for people."""
        lines = [f"fastdata prove · {printable(self.trial.script, keep='')}", ""]
        lines += _table(self.trial, self.remedy)
        lines += ["", *_wrapped(self.verdict, "")]
        if self.remedy is not None:
            lines += ["", "Write:", *(f"    {line}" for line in self.code)]
            lines += [line for said in self.says for line in _wrapped(said, "know  ")]
        told = [f"{each.name}: {each.why}" for each in self.trial.refused]
        if told:
            lines += ["", *(line for each in told for line in _wrapped(each, "not tried  "))]
        unsuited = {each.name for each in self.trial.refused}
        for name, why in self.trial.failed.items():
            if name in unsuited:
                continue
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
    """Return what the blocks of a trial say, whether it came to its end or not."""
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
    """Return what a trial comes to that recommends nothing, and the sentence that says it.

    ``unsure``: the remedy that was confirmed, whose gain may be chance.
    """
    if not log_gains(trial.blocks, FREE, "bound"):
        return "not known", f"Nothing is known: {trial.stopped or _UNMEASURED}."
    bound = bound_of(trial)
    if bound.factor < LEAST_GAIN and bound.high > _UNSURE:
        return "not known", (
            f"Not decided: free data would bring {bound.factor:.2f}x, which is not sure yet "
            f"({_interval(bound)}). {_MORE_TIME}"
        )
    if bound.factor < LEAST_GAIN:
        share = min(1.0, 1 / bound.factor)
        return "nothing to gain", (
            f"Nothing to gain: the model takes {share:.0%} of the time, and free "
            f"data would bring {max(bound.factor, 1.0):.2f}x at most."
        )
    free = f"free data would bring {bound.factor:.2f}x"
    if unsure is not None and unsure[1].factor > LEAST_GAIN:
        name, gain = unsure
        return "not known", (
            f"Not decided: {name} seems to bring {gain.factor:.2f}x ({_interval(gain)}), which may "
            f"be chance. {_MORE_TIME}"
        )
    if not trial.ended:
        return "not known", f"Not decided: {free}, and no change has been confirmed yet."
    known = {block.arm for block in trial.blocks} | trial.failed.keys()
    if untried := [name for name in trial.remedies if name not in known]:
        names = ", ".join(untried)
        return "not known", f"Not decided: {free}, and the time did not do for {names}."
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
        told = "" if gain is None else f"  {gain.factor:>5.2f}x  {_interval(gain)}"
        mark = (
            " <-" if name == chosen else "  (at most)" if name == FREE and gain is not None else ""
        )
        lines.append(f" {name:<{width}}  {cells}{told}{mark}".rstrip())
    return lines


def _interval(gain: Gain) -> str:
    """Return it in words, where there were enough pairs for one that says something."""
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
