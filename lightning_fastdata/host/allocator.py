"""What the C library does with memory that is freed."""

from __future__ import annotations

import ctypes
from typing import Final

_M_TRIM_THRESHOLD: Final = -1
_M_MMAP_THRESHOLD: Final = -3
"""glibc's numbers in ``malloc.h``."""
_KEPT_BYTES: Final = 256 << 20
"""Free memory at the end of the heap from which on it goes back to the system."""
_BLOCK_BYTES: Final = (64 << 20, 32 << 20)
"""Blocks from this size on go back as soon as they are freed. Older versions of glibc take no more
than the second."""


def keep_freed_memory() -> bool:
    """Have this process keep what it frees, for the next batch, instead of giving it back.

    glibc gives large blocks back at once, and the system clears each page of the next one: for a
    batch of 12 MB that is 3000 page faults, a third of what a worker spends on decoded images.

    Returns:
        Whether it does now: where the C library is glibc, and takes the setting.
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError, TypeError):
        return False
    mallopt.argtypes, mallopt.restype = [ctypes.c_int, ctypes.c_int], ctypes.c_int
    kept = mallopt(_M_TRIM_THRESHOLD, _KEPT_BYTES)
    return bool(kept and any(mallopt(_M_MMAP_THRESHOLD, size) for size in _BLOCK_BYTES))
