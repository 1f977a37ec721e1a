"""Few combinations in which any two values of any two factors meet."""

from __future__ import annotations

from itertools import combinations


def pairwise(factors):
    """Return rows that cover all pairs, always the same ones.

    Args:
        factors: name -> values.

    Returns:
        Dictionaries name -> value.
    """
    names = list(factors)
    if len(names) < 2:
        return [dict.fromkeys(names, value) for values in factors.values() for value in values]
    missing = {
        ((one, first), (other, second)): None
        for one, other in combinations(names, 2)
        for first in range(len(factors[one]))
        for second in range(len(factors[other]))
    }
    rows = []
    while missing:
        chosen = dict(next(iter(missing)))
        for name in names:
            if name not in chosen:
                chosen[name] = max(
                    range(len(factors[name])),
                    key=lambda value, name=name: sum(
                        pair in missing for pair in _pairs({**chosen, name: value}, names)
                    ),
                )
        for pair in _pairs(chosen, names):
            missing.pop(pair, None)
        rows.append({name: factors[name][chosen[name]] for name in names})
    return rows


def _pairs(chosen, names):
    held = [(name, chosen[name]) for name in names if name in chosen]
    return list(combinations(held, 2))
