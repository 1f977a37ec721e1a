"""What was used is counted between begin and pause, and only there."""

from __future__ import annotations

import copy
import gc
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
from virtual_time import virtual_time

from lightning_fastdata.host import clock
from lightning_fastdata.host.clock import SpentMeter, SpentTime


def test_intervals_add_up_and_breaks_do_not_count():
    with virtual_time() as virtual:
        meter = SpentMeter()
        meter.began()
        virtual.work(1)
        meter.began()
        virtual.queue(1)
        meter.paused()
        virtual.work(7)
        assert meter.used() == SpentTime(wall_s=2, cpu_s=1, runqueue_s=1)
        meter.began()
        clock.sleep(1)
        assert meter.used() == SpentTime(wall_s=3, cpu_s=1, runqueue_s=1)
        assert meter.total == SpentTime(wall_s=2, cpu_s=1, runqueue_s=1)
        meter.paused(counts=False)
        assert meter.used() == SpentTime(wall_s=2, cpu_s=1, runqueue_s=1)


def test_a_copy_and_another_thread_read_of_themselves(tmp_path):
    meter = SpentMeter()
    copied = copy.deepcopy(meter)
    del meter
    gc.collect()
    with (tmp_path / "in its place").open("w+") as file:
        file.write("5 9000000000000000000 7\n")
        file.flush()
        assert copied.read().runqueue_s < 1e9
    with ThreadPoolExecutor(1) as other:
        assert other.submit(copied.read).result().runqueue_s < 1e9


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
    assert SpentMeter().read().runqueue_s == 0
    told.write_text("nonsense")
    assert SpentMeter().read().runqueue_s == 0
    told.write_text("5 2000000000 7\n")
    assert SpentMeter().read().runqueue_s == 2


def test_in_a_time_of_its_own_a_thread_waits_for_no_cpu_of_the_machine(tmp_path, monkeypatch):
    monkeypatch.setattr(clock, "_THREAD_SCHEDSTAT", tmp_path / "schedstat")
    (tmp_path / "schedstat").write_text("5 2000000000 7\n")
    with virtual_time() as virtual:
        assert SpentMeter().read().runqueue_s == 0
        virtual.queue(3)
        assert SpentMeter().read().runqueue_s == 3
