"""How much the tests try: a part of the cases, or with ``make test-long`` all of them.

Tests marked ``slow`` are left out of a short run, and of the cases of a test marked ``cases(n)``
only ``n`` are in it, spread evenly over all. Tests marked ``realtime`` run with
``make test-realtime`` only, on a machine with nothing else to do, and those marked ``mutant`` with
``make test-mutants``.

Hypothesis draws the same examples in each short run, keeps none, and shows a failing one as it was
drawn: how long it takes to shrink one has no limit. ``pytest --hypothesis-profile=shrink`` shrinks
it. A long run draws other examples each time, and shrinks them.
"""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from hypothesis import HealthCheck, Phase, settings
from hypothesis.internal.conjecture import providers

LONG = os.environ.get("TEST_LONG") == "1"
REALTIME = os.environ.get("TEST_REALTIME") == "1"
MUTANTS = os.environ.get("TEST_MUTANTS") == "1"

LONGEST = (
    *("front_door/test_changing_world.py", "test_docs.py", "front_door/test_prove.py"),
    *("test_examples.py", "resilience/test_replay.py"),
    *("executors/test_standby.py", "resilience/test_stream_resume.py"),
    *("resilience/test_bad_samples.py", "front_door/test_other_streams.py"),
    *("resilience/test_preemption.py", "front_door/test_zero_code.py"),
    *("front_door/test_notebook.py", "front_door/test_loggers.py"),
    *("conformance/test_missing_packages.py", "plugin/test_guard_on_ranks.py"),
    *("ext/sources/test_objects.py", "executors/test_kills.py", "caches/test_cached_dataset.py"),
    *("executors/test_stream.py", "caches/test_cached_source.py", "loading/test_facts.py"),
    *("resilience/test_resumed_again.py", "augment/test_compiled_steps.py"),
    *("conformance/test_running.py", "executors/test_fault_races.py", "device/test_late_copies.py"),
    *("front_door/test_several_loaders.py",),
    *("front_door/test_names_inside_reading.py", "plugin/test_prefetching.py"),
    *("executors/test_pool_on_machine.py", "loading/test_epoch_begins.py"),
    *("executors/test_gather.py", "caches/test_identity.py", "augment/test_exhaustive_colours.py"),
)
"""Files that take longest, many of them in programs of their own. They come first where files are
shared out to several processes: one that comes last leaves all others idle."""


def choose_examples() -> None:
    """Tell Hypothesis which examples to draw, before any test is imported."""
    # How fast a machine draws them says nothing about the code.
    untimed = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
    settings.register_profile("long", untimed)
    settings.register_profile("shrink", untimed, derandomize=True, database=None)
    settings.register_profile(
        "short",
        settings.get_profile("shrink"),
        phases=[Phase.explicit, Phase.generate],
        max_examples=max_examples(100).max_examples,
    )
    settings.load_profile("long" if LONG else "short")
    if not LONG:
        leave_out_numbers_of_the_code()


def leave_out_numbers_of_the_code() -> None:
    """Have Hypothesis draw no numbers and texts that it finds in the modules that are imported.

    With them a change anywhere, or another order of the tests, would change the examples of all.
    """
    # Of Hypothesis's own; test_thoroughness.py sees it if it goes by another name.
    providers._get_local_constants = providers.Constants


def max_examples(count: int, **how: Any) -> settings:
    """Have Hypothesis draw ``count`` examples in a long run, and a fifth of them otherwise.

    Without this, it draws as many as of 100.
    """
    drawn = count if LONG else max(min(count, 12), count // 5)
    return settings(max_examples=drawn, deadline=None, **how)


def some(cases: Iterable[Any], every: int) -> list[Any]:
    """Return all cases in a long run, and otherwise each ``every``-th, the first one included."""
    return list(cases)[:: 1 if LONG else every]


def longest_first(items: Iterable[Any], root: Path) -> list[Any]:
    """Return tests by their files, with those of :data:`LONGEST` first."""
    places = {root / "tests" / file: place for place, file in enumerate(LONGEST)}
    return sorted(items, key=lambda item: (places.get(item.path, len(places)), str(item.path)))


def left_out(items: Iterable[Any]) -> set[Any]:
    """Return which collected tests this run leaves out; the same ones each time."""
    items = list(items)
    marks = {mark for mark, asked in (("realtime", REALTIME), ("mutant", MUTANTS)) if not asked}
    left = {item for item in items if any(map(item.get_closest_marker, marks))}
    if LONG:
        return left
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
