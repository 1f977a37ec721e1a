"""Which files this process has open, so that a test can ask for those that it opened itself."""

from __future__ import annotations

import gc
import os
from contextlib import suppress


def open_files(kind: str = "") -> set[tuple[int, int, int]]:
    """Return the descriptors of this process after garbage was collected, each with its file.

    Take those of before away, never compare counts: what earlier tests left may be closed at any
    time, by a thread or with the garbage. A number is given again once its file is closed, so
    device and inode of the file stand beside it. ``kind`` is a part of what the descriptor links
    to, such as ``"memfd:"``.
    """
    gc.collect()
    found = set()
    for name in os.listdir("/proc/self/fd"):
        # One is that of the listing itself, which is closed by now.
        with suppress(OSError):
            if kind in os.readlink(f"/proc/self/fd/{name}"):
                file = os.fstat(int(name))
                found.add((int(name), file.st_dev, file.st_ino))
    return found
