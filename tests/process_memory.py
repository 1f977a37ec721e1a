"""What keeps the process of the tests cheap to fork, which they do thousands of times.

A fork copies the tables of all memory, which is twice as slow where that is in small pages. Python
takes its memory in small ones, whatever the C library is told to do, and what is written to while a
forked process lives falls into small ones again.
"""

from __future__ import annotations

import ctypes
import gc
import os
import re
import sys
from pathlib import Path

_MADV_COLLAPSE = 25
_HUGE = 2**21
_PRIVATE = re.compile(r"^([0-9a-f]+)-([0-9a-f]+) rw-p 00000000 00:00 0 *(?:\[heap\])?$", re.M)
_FORKS_THAT_SPOIL = 20
_LARGEST_OF_PYTHON = 470
"""Bytes of an object for which Python does not ask the C library."""
_forks = _FORKS_THAT_SPOIL
_kept: list[bytes] = []


def _forked() -> None:
    global _forks  # noqa: PLW0603
    _forks += 1


os.register_at_fork(after_in_parent=_forked)


def take_in_one_piece(mebibytes: int) -> None:
    """Have Python take so much memory for its objects at once, before it imports anything.

    It takes one MiB after the other, wherever there is room: what does not lie together never falls
    into huge pages.
    """
    blocks = [b""] * (mebibytes * 2000)  # which does not grow in between
    for at in range(len(blocks)):
        blocks[at] = bytes(_LARGEST_OF_PYTHON)
    _kept.extend(blocks[::1000])  # in each MiB one stays, so that all of them do


def settle() -> None:
    """Give back what was freed, and leave what stays out of later collections of garbage."""
    global _forks  # noqa: PLW0603
    gc.collect()
    gc.freeze()
    if sys.platform == "linux":
        ctypes.CDLL(None).malloc_trim(0)
        if _forks >= _FORKS_THAT_SPOIL:
            _into_huge_pages()
            _forks = 0


def _into_huge_pages() -> None:
    """Have the kernel put the memory of this process into huge pages, where it can (Linux 6.1)."""
    madvise = ctypes.CDLL(None).madvise
    for first, last in _PRIVATE.findall(Path("/proc/self/maps").read_text()):
        begin, end = -(-int(first, 16) // _HUGE) * _HUGE, int(last, 16) // _HUGE * _HUGE
        for at in range(begin, end, _HUGE):
            madvise(ctypes.c_void_p(at), ctypes.c_size_t(_HUGE), _MADV_COLLAPSE)
