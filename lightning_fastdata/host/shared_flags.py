"""A flag for each of many things, which processes that were forked from this one share."""

from __future__ import annotations

import mmap


class SharedFlags:
    """Flags by number, all down at first: a byte each in memory that forked processes share.

    A copy that was sent to another process or made by ``copy`` begins anew.

    Args:
        count: Number of flags.
    """

    def __init__(self, count: int) -> None:
        self._count = count
        # Closed with the last process that has it; a length of 0 is refused.
        self._raised = mmap.mmap(-1, max(1, count))

    def __contains__(self, index: int) -> bool:
        return self._raised[index] == 1

    def add(self, index: int) -> None:
        """Raise a flag, in all processes."""
        self._raised[index] = 1

    def __reduce__(self) -> tuple[type[SharedFlags], tuple[int]]:
        return SharedFlags, (self._count,)
