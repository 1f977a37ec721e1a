"""Every time is between the bounds of its step, and steps are a quarter of an octave."""

from __future__ import annotations

import itertools

from hypothesis import given
from hypothesis import strategies as st

from lightning_fastdata.executors.pool.stalls import BUCKETS, bounds_ns, bucket_of


@given(st.integers(0, 2**62))
def test_a_time_lies_within_its_step(ns):
    shortest, next_ns = bounds_ns(bucket_of(ns))
    assert shortest <= ns < next_ns
    assert next_ns - shortest <= max(1, shortest / 4)


def test_steps_follow_one_another_without_gaps():
    steps = [bounds_ns(bucket) for bucket in range(BUCKETS - 1)]
    assert steps[0][0] == 0
    assert all(one[1] == other[0] for one, other in itertools.pairwise(steps))


def test_times_beyond_the_scale_are_in_its_last_step():
    assert bucket_of(2**200) == BUCKETS - 1
    assert bucket_of(-1) == 0
