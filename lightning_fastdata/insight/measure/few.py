"""Readings of a whole training, few of which are kept, however long it lasts."""

from __future__ import annotations

from typing import Final, TypeVar

T = TypeVar("T")

_MOST: Final = 300


class Few(list[T]):
    """At most 300 of the readings that were added, as far from each other at all times."""

    _each, _added = 1, 0

    def add(self, reading: T) -> None:
        """Keep a reading, if it is its turn."""
        if self._added % self._each == 0:
            self.append(reading)
        self._added += 1
        if len(self) > _MOST:
            del self[1::2]
            self._each *= 2
