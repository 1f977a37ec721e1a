"""How much the tests try: a part of the cases, or with ``make test-long`` all of them."""

from __future__ import annotations

import os
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
