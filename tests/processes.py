"""What tests of real processes wait for, and how their samples never end."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from typing import Any

import psutil


def until(condition: Callable[[], Any], seconds: float = 120) -> None:
    """Wait for something that comes without fail, however loaded the machine is."""
    end, pause_s = time.monotonic() + seconds, 0.0002
    while not condition():
        assert time.monotonic() < end, "it has not come to that"
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, 0.005)


def hang() -> None:
    """Never return; a signal that is caught does not end it either."""
    while True:
        signal.pause()


def runs(pid: int) -> bool:
    """Return whether a process is there and has not ended."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
