"""What processes use and have, told by the kernel."""

from __future__ import annotations

import multiprocessing
import os
import subprocess
import sys
from typing import TYPE_CHECKING

import psutil
import pytest
from host.roots import root_of

from lightning_fastdata.host.cpu import read_cpu_throttling, read_cpu_use, worker_processes
from lightning_fastdata.host.memory import read_pages

if TYPE_CHECKING:
    from pathlib import Path

ROLLUP = """\
55e5c7c00000-7ffd5a7fe000 ---p 00000000 00:00 0                          [rollup]
Rss:               12345 kB
Pss:                4000 kB
Anonymous:          {anonymous} kB
Pss_Dirty:          3000 kB
Shared_Clean:       1000 kB
"""


def test_processes_are_added_up_without_those_that_are_gone(tmp_path: Path) -> None:
    sizes = {11: 100, 12: 50}
    files = {f"proc/{pid}/smaps_rollup": ROLLUP.format(anonymous=kib) for pid, kib in sizes.items()}
    root = root_of(tmp_path, files)
    sizes = [read_pages(process, root=root) for process in (11, 12, 13)]
    assert [size and size.anonymous_bytes for size in sizes] == [100 * 1024, 50 * 1024, None]


linux = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="needs Linux' /proc")


@linux
def test_the_memory_of_this_process_agrees_with_psutil() -> None:
    seen = psutil.Process().memory_info()
    assert read_pages(os.getpid()).anonymous_bytes == pytest.approx(seen.rss - seen.shared, rel=0.1)


@linux
def test_memory_that_a_child_has_touched_is_seen() -> None:
    code = (
        "import mmap, sys; m = mmap.mmap(-1, 1 << 26, flags=mmap.MAP_PRIVATE);"
        "m.write(b'x' * (1 << 26)) if sys.argv[1] == 'touch' else None;"
        "print('ready', flush=True); sys.stdin.read()"
    )
    sizes = []
    for how in ("leave", "touch"):
        with subprocess.Popen(
            [sys.executable, "-c", code, how], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        ) as child:
            assert child.stdout.readline() == b"ready\n"
            sizes.append(read_pages(child.pid).own_bytes)
            child.stdin.close()
    assert sizes[1] - sizes[0] == pytest.approx(2**26, rel=0.1)


def read_then_wait(path, ready, go_on):
    with open(path, "rb") as file:
        file.read()
    ready.set()
    go_on.wait()


@linux
def test_a_worker_is_seen_with_what_it_reads_and_takes_until_it_has_ended(tmp_path: Path) -> None:
    (tmp_path / "data").write_bytes(bytes(3 * 2**20))
    context = multiprocessing.get_context("fork")
    ready, go_on = context.Event(), context.Event()
    worker = context.Process(target=read_then_wait, args=(tmp_path / "data", ready, go_on))
    others = worker_processes()  # of loaders that are not collected yet
    worker.start()
    assert ready.wait(30)
    assert worker.pid in worker_processes()
    assert worker.pid not in others
    assert read_cpu_use([worker.pid]).own_s >= 0
    # A forked worker shares nearly all of its pages.
    pages = read_pages(worker.pid)
    assert pages.own_bytes < 0.3 * pages.anonymous_bytes
    go_on.set()
    worker.join()
    assert worker.pid not in worker_processes()


def test_a_machine_that_tells_nothing_gives_only_what_is_known(tmp_path: Path) -> None:
    assert read_cpu_throttling(root=tmp_path) is read_cpu_use([1, 2], root=tmp_path) is None
    assert read_pages(os.getpid(), root=tmp_path) is None
