from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from lightning_fastdata.host.cpu import CpuThrottling
from lightning_fastdata.host.usage import HostUsage
from lightning_fastdata.insight.measure.host_metrics import MachineSeen


def usage(at_s, *, periods=None, throttled=0, held_us=0):
    throttling = None
    if periods is not None:
        throttling = CpuThrottling(
            periods=periods, throttled_periods=throttled, throttled_us=held_us
        )
    return HostUsage(at_s=at_s, throttling=throttling)


def test_a_quota_that_was_used_up_is_told():
    before = usage(10, periods=100, throttled=7)
    after = usage(12, periods=120, throttled=12, held_us=3_000_000)
    assert MachineSeen.between(before, after) == MachineSeen(
        throttled_share=0.25, throttled_cpus=1.5
    )


def test_what_nobody_tells_is_not_known():
    assert MachineSeen.between(usage(0), usage(1)) == MachineSeen()


@given(st.integers(0, 2**40), st.integers(0, 2**40), st.floats(0, 1e6))
def test_no_pair_of_readings_leaves_the_scale(begin, end, seconds):
    before = usage(0, periods=begin, throttled=end)
    after = usage(seconds, periods=end, throttled=begin)
    share = MachineSeen.between(before, after).throttled_share
    assert share is None or 0 <= share <= 1
