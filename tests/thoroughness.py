"""How much the tests try: a part of the cases, or with ``make test-long`` all of them.

Tests marked ``slow`` are left out of a short run, and of the cases of a test marked ``cases(n)``
only ``n`` are in it, spread evenly over all.
"""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Iterable
from typing import Any

from hypothesis import settings

LONG = os.environ.get("TEST_LONG") == "1"


def max_examples(count: int, **how: Any) -> settings:
    """Have Hypothesis draw ``count`` examples in a long run, and a third of them otherwise."""
    drawn = count if LONG else max(min(count, 12), count // 3)
    return settings(max_examples=drawn, deadline=None, **how)


def some(cases: Iterable[Any], every: int) -> list[Any]:
    """Return all cases in a long run, and otherwise each ``every``-th, the first one included."""
    return list(cases)[:: 1 if LONG else every]


def left_out(items: Iterable[Any]) -> set[Any]:
    """Return which collected tests a short run leaves out; the same ones each time."""
    left = set()
    by_function = defaultdict(list)
    for item in items:
        few = item.get_closest_marker("cases")
        if item.get_closest_marker("slow"):
            left.add(item)
        elif few is not None:
            by_function[item.nodeid.partition("[")[0], few.args[0]].append(item)
    for (_, count), cases in by_function.items():
        cases.sort(key=lambda item: item.nodeid)
        kept = {(2 * i + 1) * len(cases) // (2 * count) for i in range(count)}
        left |= {case for at, case in enumerate(cases) if at not in kept}
    return left
