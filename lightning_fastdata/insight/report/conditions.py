"""Conditions on the metrics of two runs: what must not be.

Their grammar::

    CONDITION = METRIC OP LIMIT
    METRIC    = a name of METRICS, with ``val.`` or another stage before it, if not of training
    OP        = ">" | ">=" | "<" | "<="
    LIMIT     = NUMBER              of b itself:         stall_percent > 5
              | ("+"|"-") NUMBER    of b - a:            stall_share > +0.02
              | ("+"|"-") NUMBER "%"  of (b - a) / a:    step_ms > +10%    samples_per_s < -5%

The sign makes it a change; no metric is ever negative.
"""

from __future__ import annotations

import difflib
import operator
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Literal

from lightning_fastdata.errors import OptionsError
from lightning_fastdata.insight.report.recorded import MAIN_STAGE, METRICS

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

_OPERATORS: Final[Mapping[str, Callable[[float, float], bool]]] = {
    ">": operator.gt,
    ">=": operator.ge,
    "<": operator.lt,
    "<=": operator.le,
}
_CONDITION: Final = re.compile(
    r"\s*(?P<metric>[A-Za-z_][\w.]*)\s*(?P<operator>>=|<=|>|<)\s*"
    r"(?P<sign>[+-]?)\s*(?P<number>(?:\d+(?:\.\d*)?|\.\d+)(?:[eE][+-]?\d+)?)\s*(?P<percent>%?)\s*"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Condition:
    """What must not be."""

    text: str
    """As it was written."""
    metric: str
    """Its name, with the stage before it if that is not training."""
    operator: str
    """``>``, ``>=``, ``<`` or ``<=``."""
    limit: float
    """What to compare with, signed; in percent where ``of`` is ``"percent"``."""
    of: Literal["value", "difference", "percent"]
    """What is compared with the limit: b, b - a, or (b - a) / a in percent."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """A condition, looked up in two runs."""

    condition: Condition
    found: float
    """What was compared with the limit. Infinite: a change in percent of what was 0."""

    @property
    def holds(self) -> bool:
        """Whether what must not be is: the comparison fails."""
        return _OPERATORS[self.condition.operator](self.found, self.condition.limit)

    @property
    def found_text(self) -> str:
        """``found`` in words, e.g. ``+12.3%``."""
        if self.condition.of == "value":
            return number_text(self.found)
        return signed_text(self.found, "%" if self.condition.of == "percent" else "")


def parse_condition(text: str) -> Condition:
    """Return the condition that a text in the grammar of this module says.

    Raises:
        OptionsError: It is not in the grammar, or its metric is unknown.
    """
    found = _CONDITION.fullmatch(text)
    if found is None:
        raise OptionsError(
            f"The condition {text!r} cannot be read. Write METRIC OP LIMIT with one of >, >=, <, "
            "<=: 'step_ms > +10%' (change in percent), 'stall_share > +0.02' (change) or "
            "'stall_percent > 5' (value)."
        )
    if found["percent"] and not found["sign"]:
        raise OptionsError(
            f"The condition {text!r} has a percentage without a sign. A change is written with "
            f"one: +{found['number']}% or -{found['number']}%."
        )
    metric = found["metric"].removeprefix(f"{MAIN_STAGE}.")
    _check_known(metric.rpartition(".")[2], text)
    return Condition(
        text=text.strip(),
        metric=metric,
        operator=found["operator"],
        limit=float(found["sign"] + found["number"]),
        of="percent" if found["percent"] else "difference" if found["sign"] else "value",
    )


def _check_known(metric: str, text: str) -> None:
    if metric in METRICS:
        return
    near = difflib.get_close_matches(metric, METRICS, n=3)
    meant = f" Did you mean {' or '.join(near)}?" if near else ""
    raise OptionsError(
        f"The condition {text!r} names an unknown metric, {metric!r}.{meant} "
        f"Known are: {', '.join(METRICS)}; with 'val.' before them, those of validation."
    )


def number_text(value: float | None) -> str:
    """Return four digits, or all before the point; ``-`` for None."""
    if value is None:
        return "-"
    return f"{value:.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def signed_text(value: float | None, unit: str = "") -> str:
    """Return the number with its sign, to a tenth where it is in percent; ``-`` for None."""
    if value is None:
        return "-"
    if unit or abs(value) >= 1000:
        return f"{value:+.{1 if unit else 0}f}{unit}"
    return f"{value:+.4g}"
