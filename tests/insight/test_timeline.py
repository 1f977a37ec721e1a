"""Clocks and marks become timings: exact to a microsecond on a virtual device, never waiting."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from thoroughness import max_examples

from lightning_fastdata.insight.steps import EventClock, HostClock, StepTimeline

US = 1e-3


class VirtualGpu:
    """Work starts when the host has launched it and the queue before it is done."""

    def __init__(self):
        self.now_ns = 0
        self.free_ns = 0
        self.events = 0

    def host(self, ms):
        """Let the host be busy (or wait for data)."""
        self.now_ns += round(ms * 1e6)

    def launch(self, ms):
        """Queue work on the device; takes no host time."""
        self.free_ns = max(self.now_ns, self.free_ns) + round(ms * 1e6)

    def synchronize(self):
        self.now_ns = max(self.now_ns, self.free_ns)

    def clock_ns(self):
        return self.now_ns

    def new_event(self):
        self.events += 1
        return VirtualEvent(self)


class VirtualEvent:
    """Fires at ``max(host time when recorded, device free)``."""

    def __init__(self, gpu):
        self.gpu = gpu
        self.at_ns = None

    def record(self):
        self.at_ns = max(self.gpu.now_ns, self.gpu.free_ns)

    def query(self):
        return self.gpu.now_ns >= self.at_ns

    def elapsed_time(self, end):
        assert self.query()
        assert end.query()
        return (end.at_ns - self.at_ns) / 1e6


def cuda_timeline(**kwargs):
    gpu = VirtualGpu()
    device = EventClock(gpu.new_event)
    return gpu, StepTimeline(host=HostClock(gpu.clock_ns), device=device, **kwargs)


def cpu_timeline(**kwargs):
    gpu = VirtualGpu()
    return gpu, StepTimeline(host=HostClock(gpu.clock_ns), **kwargs)


def wait(gpu, timeline, ms):
    timeline.wait_began()
    gpu.host(ms)
    timeline.wait_ended()


def gpu_step(gpu, timeline, *, wait_ms, transfer=0.0, augment=0.0, compute=0.0, launch_host=0.0):
    """One step as Lightning runs it: the augmentation inside the transfer."""
    wait(gpu, timeline, wait_ms)
    timeline.transfer_began()
    gpu.launch(transfer)
    timeline.augment_began()
    gpu.launch(augment)
    timeline.augment_ended()
    timeline.transfer_ended()
    gpu.host(launch_host)
    gpu.launch(compute)
    timeline.compute_ended(64)


def row(timeline, index, name):
    return timeline.history.newest()[name][index]


def drain(gpu, timeline):
    gpu.synchronize()
    timeline.poll()


def test_a_wait_behind_a_busy_device_is_no_stall():
    gpu, timeline = cuda_timeline()
    gpu_step(gpu, timeline, wait_ms=0, compute=50)
    gpu_step(gpu, timeline, wait_ms=30, compute=50)
    drain(gpu, timeline)
    assert row(timeline, 1, "wait_ms") == pytest.approx(30, abs=US)
    assert row(timeline, 1, "stall_ms") == pytest.approx(0, abs=US)
    assert row(timeline, 1, "compute_ms") == pytest.approx(50, abs=US)
    assert row(timeline, 1, "step_ms") == pytest.approx(50, abs=US)


def test_only_the_exposed_part_of_a_wait_is_stall():
    gpu, timeline = cuda_timeline()
    gpu_step(gpu, timeline, wait_ms=0, compute=50)
    gpu_step(gpu, timeline, wait_ms=80, transfer=2, augment=3, compute=50)
    drain(gpu, timeline)
    for name, ms in {
        "wait_ms": 80, "stall_ms": 30, "transfer_ms": 2, "augment_ms": 3, "compute_ms": 50,
        "step_ms": 85, "gap_ms": 0,
    }.items():  # fmt: skip
        assert row(timeline, 1, name) == pytest.approx(ms, abs=US), name


def test_with_a_synchronize_in_each_step_the_whole_wait_is_stall():
    gpu, timeline = cuda_timeline()
    for _ in range(3):
        gpu_step(gpu, timeline, wait_ms=7, compute=20)
        gpu.synchronize()
    drain(gpu, timeline)
    assert timeline.history.newest()["stall_ms"] == pytest.approx([7, 7, 7], abs=US)
    assert timeline.history.newest()["step_ms"] == pytest.approx([27, 27, 27], abs=US)
    assert timeline.history.newest()["gap_ms"][1:] == pytest.approx([0, 0], abs=US)


def test_a_launch_bound_step_is_compute_not_stall():
    gpu, timeline = cuda_timeline()
    for _ in range(3):
        gpu_step(gpu, timeline, wait_ms=0, compute=2, launch_host=9)
    drain(gpu, timeline)
    assert timeline.history.newest()["stall_ms"] == pytest.approx([0, 0, 0], abs=US)
    # The second step's first mark is reached when the first step's 2 ms of work are done.
    assert timeline.history.newest()["compute_ms"] == pytest.approx([11, 9, 9], abs=US)


def test_events_are_as_many_as_the_host_is_ahead_and_recorded_again():
    gpu, timeline = cuda_timeline()
    for _ in range(50):
        gpu_step(gpu, timeline, wait_ms=1, compute=1000)
    drain(gpu, timeline)
    made = gpu.events
    assert made <= 7 * 50
    for _ in range(200):
        gpu_step(gpu, timeline, wait_ms=1, compute=4)
        drain(gpu, timeline)
    assert gpu.events == made
    columns = timeline.history.newest()
    assert columns["wait_ms"] == pytest.approx([1] * 250, abs=US)
    assert columns["step_ms"][-200:] == pytest.approx([5] * 200, abs=US)


def test_what_was_not_marked_is_none_and_never_zero():
    gpu, timeline = cpu_timeline()
    timeline.transfer_began()
    gpu.host(2)
    timeline.transfer_ended()
    gpu.host(5)
    timeline.compute_ended(8)
    columns = timeline.history.newest()
    assert [name for name, values in columns.items() if values[0] != values[0]] == [
        "wait_ms", "stall_ms", "augment_ms", "gap_ms",
    ]  # fmt: skip
    assert columns["step_ms"][0] == 7


def test_a_step_without_any_mark_counts_its_samples_only():
    _, timeline = cpu_timeline()
    timeline.compute_ended(8)
    summary = timeline.history.summarize("train", duration_s=1.0)
    assert (summary.steps, summary.samples) == (1, 8)
    assert summary.step is summary.compute is summary.wait is None


def test_what_follows_the_last_work_of_a_step_is_gap():
    gpu, timeline = cuda_timeline()
    for _ in range(2):
        wait(gpu, timeline, 1)
        gpu.launch(5)
        timeline.work_ended()
        gpu.synchronize()
        gpu.host(20)
        timeline.compute_ended(1)
    drain(gpu, timeline)
    assert row(timeline, 1, "compute_ms") == pytest.approx(5, abs=US)
    assert row(timeline, 1, "gap_ms") == pytest.approx(20, abs=US)


def test_what_runs_aside_within_the_work_is_gap_and_only_as_long_as_the_device_is_idle():
    gpu, timeline = cuda_timeline()
    for _ in range(2):
        wait(gpu, timeline, 1)
        gpu.launch(5)
        timeline.aside_began()
        gpu.host(20)
        timeline.aside_ended()
        gpu.launch(4)
        timeline.work_ended()
        gpu.synchronize()
        timeline.compute_ended(1)
    drain(gpu, timeline)
    assert row(timeline, 1, "compute_ms") == pytest.approx(9, abs=US)
    assert row(timeline, 1, "step_ms") == pytest.approx(10, abs=US)
    assert row(timeline, 1, "gap_ms") == pytest.approx(15, abs=US)


def test_an_exhausting_fetch_leaves_no_trace_once_dropped():
    gpu, timeline = cuda_timeline()
    gpu_step(gpu, timeline, wait_ms=1, compute=5)
    timeline.wait_began()
    gpu.host(500)
    timeline.drop_open_step()
    gpu_step(gpu, timeline, wait_ms=2, compute=5)
    drain(gpu, timeline)
    assert row(timeline, 1, "wait_ms") == pytest.approx(2, abs=US)
    assert row(timeline, 1, "stall_ms") == pytest.approx(2, abs=US)
    assert row(timeline, 1, "step_ms") == pytest.approx(7, abs=US)
    assert row(timeline, 1, "gap_ms") != row(timeline, 1, "gap_ms")


def test_an_augmentation_that_began_before_the_transfer_is_not_counted_twice():
    gpu, timeline = cpu_timeline()
    for mark in (timeline.augment_began, timeline.transfer_began, timeline.augment_ended):
        mark()
        gpu.host(2)
    timeline.compute_ended(1)
    assert row(timeline, 0, "augment_ms") == 4
    assert row(timeline, 0, "step_ms") == 6


MARKS = st.sampled_from(
    ["wait_began", "wait_ended", "transfer_began", "transfer_ended", "augment_began",
     "augment_ended", "aside_began", "aside_ended", "drop_open_step", "epoch_began", "work_ended",
     "paused", "end", "host", "launch", "sync"]
)  # fmt: skip


@max_examples(150)
@given(marks=st.lists(MARKS, max_size=60), cuda=st.booleans())
def test_no_order_of_marks_corrupts_a_later_step(marks, cuda):
    gpu, timeline = cuda_timeline() if cuda else cpu_timeline()
    for mark in marks:
        if mark == "end":
            timeline.compute_ended(1)
        elif mark == "host":
            gpu.host(1.5)
        elif mark == "launch":
            gpu.launch(2.5)
        elif mark == "sync":
            gpu.synchronize()
        else:
            getattr(timeline, mark)()
    timeline.drop_open_step()
    drain(gpu, timeline)
    ended = marks.count("end")
    assert timeline.history.steps == ended
    assert not timeline._pending
    gpu_step(gpu, timeline, wait_ms=7, compute=0)
    drain(gpu, timeline)
    columns = timeline.history.newest()
    assert columns["stall_ms"][-1] == pytest.approx(7, abs=US)
    assert columns["step"][-1] == ended
    times = [columns[name] for name in columns if name.endswith("_ms")]
    assert all((values[values == values] >= 0).all() for values in times)


@given(waits=st.lists(st.floats(0, 50), min_size=2, max_size=8), compute=st.floats(0, 30))
@max_examples(30)
def test_gaps_and_steps_together_are_the_device_time(waits, compute):
    gpu, timeline = cuda_timeline()
    for ms in waits:
        gpu_step(gpu, timeline, wait_ms=ms, transfer=1, augment=2, compute=compute)
    drain(gpu, timeline)
    columns = timeline.history.newest()
    told = columns["step_ms"].sum() + columns["gap_ms"][1:].sum()
    assert told == pytest.approx(gpu.free_ns / 1e6, abs=US)
