from __future__ import annotations

import time

import numpy as np
import pytest
import torch
from gpu.device import DeviceWork, needs_cuda, no_waiting

from lightning_fastdata.insight.steps import EventClock, StepTimeline

pytestmark = needs_cuda


@pytest.fixture(scope="module")
def work():
    return DeviceWork(size=4096)


@pytest.fixture(scope="module")
def long_work():
    return DeviceWork()


def run_steps(work, *, wait_ms, work_ms, steps, synced):
    """Return the columns of steps with real sleeps and real device work, and the work's true time.

    The true time is measured by events of this function, not by the timeline.
    """
    timeline = StepTimeline(device=EventClock())
    truth = []
    torch.cuda.synchronize()
    for _ in range(steps):
        timeline.wait_began()
        time.sleep(wait_ms / 1e3)
        timeline.wait_ended()
        began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        began.record()
        work(work_ms)
        ended.record()
        truth.append((began, ended))
        timeline.compute_ended(samples=8)
        if synced:
            torch.cuda.synchronize()
    torch.cuda.synchronize()
    timeline.poll()
    assert timeline.history.steps == steps
    columns = timeline.history.newest()
    return columns, np.array([began.elapsed_time(ended) for began, ended in truth])


def test_a_host_that_waits_for_each_step_exposes_every_wait(work):
    columns, truth_ms = run_steps(work, wait_ms=40, work_ms=20, steps=12, synced=True)
    assert columns["stall_ms"].sum() == pytest.approx(columns["wait_ms"].sum(), rel=0.05)
    assert columns["compute_ms"].sum() == pytest.approx(truth_ms.sum(), rel=0.05)


def test_waits_behind_a_busy_device_are_no_stall(work):
    columns, _ = run_steps(work, wait_ms=10, work_ms=40, steps=12, synced=False)
    assert columns["wait_ms"][1:].min() >= 10
    assert columns["stall_ms"][1:].sum() <= 0.05 * columns["wait_ms"][1:].sum()
    assert columns["stall_ms"][0] == pytest.approx(columns["wait_ms"][0], rel=0.05)


def test_of_a_wait_longer_than_the_devices_work_only_the_rest_is_a_stall(work):
    columns, truth_ms = run_steps(work, wait_ms=60, work_ms=25, steps=12, synced=False)
    exposed_ms = columns["wait_ms"][1:].sum() - truth_ms[:-1].sum()
    assert columns["stall_ms"][1:].sum() == pytest.approx(exposed_ms, rel=0.05)


def test_phases_of_a_step_are_the_devices_own_times(work):
    timeline, truth = StepTimeline(device=EventClock()), []
    host = torch.empty(256, 2**20, dtype=torch.uint8).pin_memory()
    torch.cuda.synchronize()
    for _ in range(8):
        events = [torch.cuda.Event(enable_timing=True) for _ in range(3)]
        timeline.wait_began()
        timeline.wait_ended()
        timeline.transfer_began()
        events[0].record()
        host.to("cuda", non_blocking=True)
        events[1].record()
        timeline.augment_began()
        work(20)
        timeline.augment_ended()
        events[2].record()
        timeline.transfer_ended()
        timeline.compute_ended(samples=256)
        truth.append(events)
    torch.cuda.synchronize()
    timeline.poll()
    columns = timeline.history.newest()
    copies = sum(events[0].elapsed_time(events[1]) for events in truth)
    augments = sum(events[1].elapsed_time(events[2]) for events in truth)
    assert columns["transfer_ms"].sum() == pytest.approx(copies, rel=0.1)
    assert columns["augment_ms"].sum() == pytest.approx(augments, rel=0.05)


def test_measuring_never_waits_for_the_device(long_work):
    timeline = StepTimeline(device=EventClock())
    small = torch.zeros(1, device="cuda")
    torch.cuda.synchronize()
    with no_waiting():
        before = long_work(3000)
        for _ in range(20):
            timeline.wait_began()
            timeline.wait_ended()
            timeline.transfer_began()
            timeline.augment_began()
            timeline.augment_ended()
            timeline.transfer_ended()
            small.add_(1)
            timeline.compute_ended(samples=1)
            timeline.poll()
        assert not before.query()
        assert timeline.history.steps == 0
    torch.cuda.synchronize()
    assert timeline.history.steps == 20
