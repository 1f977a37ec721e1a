"""Lines of code add up, and are put into words where they say most."""

from __future__ import annotations

import json
from dataclasses import asdict, replace

import pytest
from misses import each

from lightning_fastdata.insight.waits import (
    LineShare,
    LineTotals,
    lock_between_processes,
    where_text,
)
from lightning_fastdata.stamps.lines import ELSEWHERE, Place

MS = 1_000_000


def time(line=1, ms=10.0, *, calls="", file="rows.py"):
    return Place(file, line, "Rows.read", calls), round(ms * MS)


def shares_of(*tasks):
    totals = LineTotals()
    for task in tasks:
        totals.add(task)
    return totals.shares()


def share(line=1, of=0.6, *, calls=""):
    return LineShare(file="rows.py", line=line, function="Rows.read", calls=calls, share=of)


def test_lines_are_shares_of_all_that_was_seen_the_longest_first():
    other = ELSEWHERE, 10 * MS
    found = shares_of((time(1, 20), time(2, 30)), (time(1, 40), other))
    assert [(each.line, each.share) for each in found] == [(1, 0.6), (2, 0.3)]
    assert json.loads(json.dumps(asdict(found[0])))["file"] == "rows.py"


@pytest.mark.parametrize(
    ("calls", "named"),
    [
        ({"PIL Image.convert": 30, "PIL Image.copy": 10}, "PIL Image.convert"),
        ({"json load": 12, "zlib": 12, "": 12}, ""),
        ({"": 30, "math.sqrt": 10}, ""),
    ],
)
def test_what_a_line_calls_is_what_takes_most_of_its_time(calls, named):
    found = shares_of([time(1, ms, calls=name) for name, ms in calls.items()])
    assert found[0].calls == named


def test_memory_is_bounded_whatever_is_read():
    totals = LineTotals()
    for number in range(3000):
        totals.add([time(number, 1), time(-1, 5)])
    assert len(totals._lines) <= 256
    found = totals.shares()
    assert len(found) == 20
    assert (found[0].line, found[0].share) == (-1, pytest.approx(5 / 6))


@each(
    ("calls", "shared"),
    [
        ("multiprocessing SemLock.__enter__", True),
        ("filelock BaseFileLock.acquire", True),
        ("threading Condition.wait", False),
        ("", False),
    ],
)
def test_a_lock_that_processes_share_is_told_from_one_within_a_process(calls, shared):
    line = share(calls=calls)
    assert lock_between_processes([share(2, 0.2), line]) == shared
    assert not lock_between_processes([replace(line, share=0.2)])


def test_a_cause_gets_the_line_that_stands_out():
    assert where_text((share(1, 0.4), share(2, 0.5))).startswith("; 50% of reading")
    assert where_text(()) == where_text((share(of=0.1),)) == ""


def test_what_lines_call_has_its_share_and_operations_are_told_from_decoders():
    totals, jitter = LineTotals(), "torchvision/transforms/v2/_color.py"
    blur = "albumentations Blur"
    totals.add([time(1, 30, calls=f"{blur}.apply"), time(2, 10, calls=f"{blur}.get_params")])
    totals.add([time(3, 20)])
    totals.add([time(4, 20, calls="PIL Image.convert")])
    # A loader's own pipeline: there is no line of the user's.
    totals.add([(Place(jitter, 9, "ColorJitter.transform", "torchvision adjust_hue"), 20 * MS)])
    found = {each.name: (each.share, each.augments) for each in totals.operations()}
    assert found == {
        blur: (0.4, True),
        "PIL Image.convert": (0.2, False),
        "torchvision ColorJitter": (0.2, True),
    }
    assert sum(each.share for each in totals.shares()) == pytest.approx(1.0)
    assert shares_of((time(1, 5),)) == shares_of() == ()  # too little was seen
