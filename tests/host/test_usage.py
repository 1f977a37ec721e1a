from __future__ import annotations

import multiprocessing
import os
import sys
from typing import TYPE_CHECKING

import pytest

from lightning_fastdata.host.usage import (
    read_host_usage,
    read_pages,
    worker_processes,
)

if TYPE_CHECKING:
    from pathlib import Path

linux = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="needs Linux' /proc")


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
    usage = read_host_usage([worker.pid], at_s=1.5)
    assert usage.at_s == 1.5
    # A forked worker shares nearly all of its pages.
    pages = read_pages(worker.pid)
    assert pages.own_bytes < 0.3 * pages.anonymous_bytes
    go_on.set()
    worker.join()
    assert worker.pid not in worker_processes()


def test_a_machine_that_tells_nothing_gives_only_what_is_known(tmp_path: Path) -> None:
    usage = read_host_usage([1, 2], at_s=3.0, root=tmp_path)
    assert (usage.throttling, usage.cpu) == (None, None)
    assert read_pages(os.getpid(), root=tmp_path) is None
