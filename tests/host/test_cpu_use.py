"""CPU seconds of the machine and of a process with its workers."""

from __future__ import annotations

import multiprocessing
import os
import time

import pytest
from host.roots import root_of

from lightning_fastdata.host.cpu import read_cpu_use

TICK_S = 1 / os.sysconf("SC_CLK_TCK")
MACHINE = """cpu  100 10 20 999 30 1 2 3 0 0
cpu0 50 5 10 500 15 1 1 2 0 0
cpu1 50 5 10 499 15 0 1 1 0 0
intr 1
"""


def of_process(*, used: tuple[int, int, int, int], name: str = "python") -> str:
    before = " ".join(["S", *["0"] * 10])
    return f"77 ({name}) {before} {' '.join(map(str, used))} 20 0 1 0"


@pytest.mark.parametrize("name", ["python", "a (b) c", ")) 1 2 3"])
def test_busy_ticks_of_the_machine_and_of_processes_are_added_up(name, tmp_path):
    told = {"proc/stat": MACHINE, "proc/77/stat": of_process(used=(5, 4, 3, 2), name=name)}
    found = read_cpu_use([77, 78], root=root_of(tmp_path, told))
    assert found.all_s == pytest.approx(136 * TICK_S)
    assert found.own_s == pytest.approx(14 * TICK_S)
    assert found.cpus == 2


def _compute(seconds):
    until = time.process_time() + seconds
    while time.process_time() < until:
        pass


def test_work_of_children_counts_as_ones_own_while_they_live_and_afterwards():
    before = read_cpu_use([os.getpid()])
    if before is None:
        pytest.skip("needs /proc/stat")
    child = multiprocessing.get_context("fork").Process(target=_compute, args=(0.3,))
    child.start()
    child.join()
    after = read_cpu_use([os.getpid()])
    assert after.own_s - before.own_s >= 0.25
    assert after.all_s - before.all_s >= after.own_s - before.own_s - 2 * TICK_S
