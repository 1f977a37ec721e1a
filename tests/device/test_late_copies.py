"""Batches reach the device whole, and without holding up the host, however late it copies.

The package runs unchanged on a pretended CUDA (:mod:`rig.late_cuda`) in all ways of loading.
``tests/mutants/late_copies.py`` takes out the precautions one by one.
"""

from __future__ import annotations

import functools

import pytest
from rig.late_trainings import (
    all_cases,
    check_bytes,
    check_limit,
    check_overlap,
    check_sources,
    check_waits,
    overlaps,
    train,
)
from thoroughness import LONG

CASES = pytest.mark.parametrize("case", all_cases(), ids=str)
SEEDS = range(6 if LONG else 1)


def schedules(case):
    """Return the schedules that a case can tell apart, and seeds of random ones."""
    elsewhere = [("late-other-device", 0)] if case.device else []
    fixed = [("late", 0), ("late-side", 0), ("late-main", 0)]
    return [*fixed, *elsewhere, *(("random", seed) for seed in SEEDS)]


LATEST = [("late", 0), ("late-main", 0)]
"""The steps themselves are late, so that a host that need not wait runs far ahead of them."""
seen = functools.cache(train)


@pytest.mark.cases(7)
@CASES
def test_the_bytes_of_a_batch_are_right_at_the_first_and_the_last_read_of_a_step(case):
    for schedule, seed in schedules(case):
        check_bytes(case, seen(case, schedule, seed))


@pytest.mark.cases(7)
@CASES
def test_no_locked_memory_is_written_while_a_queued_copy_reads_it(case):
    for schedule, seed in schedules(case):
        check_sources(case, seen(case, schedule, seed))


@pytest.mark.cases(7)
@CASES
def test_the_host_waits_for_the_device_only_to_hold_no_more_batches_there(case):
    for schedule, seed in LATEST:
        check_waits(case, seen(case, schedule, seed))


@pytest.mark.cases(7)
@CASES
def test_a_late_device_holds_two_batches_at_most(case):
    for schedule, seed in (*LATEST, ("late-side", 0)):
        check_limit(case, seen(case, schedule, seed))


@pytest.mark.cases(5)
@pytest.mark.parametrize("case", list(filter(overlaps, all_cases())), ids=str)
def test_a_batch_is_copied_and_transformed_beside_the_steps_before_it(case):
    check_overlap(case, seen(case, "late-main", 0))


def test_a_training_of_one_seed_sees_the_device_work_in_one_order():
    case = next(case for case in all_cases() if str(case) == "inline-pinned-auto-augmented")
    one, other = (train(case, "random", 5) for _ in range(2))
    assert one.order == other.order
    assert train(case, "random", 6).order != one.order
