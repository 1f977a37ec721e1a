"""What was used is counted between begin and pause, and only there."""

from __future__ import annotations

import threading

import pytest
from virtual_time import virtual_time

from lightning_fastdata.host import clock
from lightning_fastdata.host.clock import SpentMeter, SpentTime, read_spent


def test_intervals_add_up_and_breaks_do_not_count():
    readings = iter(SpentTime(wall_s=w, cpu_s=w / 2, runqueue_s=w / 4) for w in (1, 3, 10, 11, 12))
    meter = SpentMeter(lambda: next(readings))
    meter.began()
    meter.began()
    meter.paused()
    assert meter.used() == SpentTime(wall_s=2, cpu_s=1, runqueue_s=0.5)
    meter.began()
    assert meter.used() == SpentTime(wall_s=3, cpu_s=1.5, runqueue_s=0.75)
    assert meter.used() == SpentTime(wall_s=4, cpu_s=2, runqueue_s=1)


def test_threads_count_and_sleep_does_not():
    with virtual_time() as virtual:
        meter = SpentMeter()
        meter.began()
        thread = threading.Thread(target=virtual.work, args=(0.1,))
        thread.start()
        thread.join()
        clock.sleep(0.2)
        used = meter.used()
    assert (used.wall_s, used.cpu_s) == (pytest.approx(0.3), pytest.approx(0.1))


def test_a_kernel_that_tells_nothing_leaves_the_run_queue_out(tmp_path, monkeypatch):
    told = tmp_path / "schedstat"
    monkeypatch.setattr(clock, "_THREAD_SCHEDSTAT", told)
    assert read_spent().runqueue_s == 0
    told.write_text("nonsense")
    assert read_spent().runqueue_s == 0
    told.write_text("5 2000000000 7\n")
    assert read_spent().runqueue_s == 2


def test_in_a_time_of_its_own_a_thread_waits_for_no_cpu_of_the_machine(tmp_path, monkeypatch):
    monkeypatch.setattr(clock, "_THREAD_SCHEDSTAT", tmp_path / "schedstat")
    (tmp_path / "schedstat").write_text("5 2000000000 7\n")
    with virtual_time() as virtual:
        assert read_spent().runqueue_s == 0
        virtual.queue(3)
        assert read_spent().runqueue_s == 3
