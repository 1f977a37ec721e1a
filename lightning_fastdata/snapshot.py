"""Whether looks at objects tell what they told before: seen in microseconds, where they do.

A look is a function that tells one part of what an object is. A snapshot is a flat list of looks,
with the objects that were looked at and what was told of each.

- Items, attributes and namespaces are compared by identity. The snapshot keeps what it was told, so
  that nothing else can lie at the same address later; what cannot change (numbers, texts, tuples of
  such) needs no look of its own.
- Numbers in tensors and arrays are compared byte by byte with a copy, behind a look at where they
  lie and in which form. torch's count of changes (``_version``) would cost less, and is not asked:
  it does not see who writes through ``.numpy()``, ``.data``, a storage, DLPack or ``apply_``, nor
  the running means of a normalisation, nor C code.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from itertools import chain
from operator import eq, is_
from typing import Any, TypeAlias

Look: TypeAlias = Callable[[Any], Any]


class Snapshot:
    """What looks at objects have told, and whether they tell it again."""

    def __init__(self) -> None:
        self._ones: dict[Look, _Ones] = {}
        self._facts: dict[Look, _Facts] = {}
        self._parts: dict[Look, _Parts] = {}
        self._forms: dict[Look, _Facts] = {}
        self._memory: list[Any] = []
        self._copies: list[bytearray] = []
        self._seen: set[tuple[Look, int]] = set()

    def one(self, look: Look, obj: object) -> Any:
        """Return what a look tells of an object, to be compared by identity."""
        return self._told(self._ones, _Ones, look, obj)

    def fact(self, look: Look, obj: object) -> Any:
        """Return what a look tells of an object, to be compared by its value."""
        return self._told(self._facts, _Facts, look, obj)

    def parts(self, look: Look, obj: object) -> tuple[Any, ...]:
        """Return all that a look tells of an object, each to be compared by identity."""
        told: tuple[Any, ...] = self._told(self._parts, _Parts, look, obj)
        return told

    def memory(self, looks: Iterable[Look], owner: object, at: Any) -> bytearray:
        """Return a copy of the memory of an object, to be compared with what lies there.

        Args:
            looks: They tell where it lies, and in which form.
            owner: The object.
            at: The memory, as an array of ctypes.
        """
        for look in looks:
            self._told(self._forms, _Facts, look, owner)
        copy = bytearray(at)
        if copy:
            self._memory.append(at)
            self._copies.append(copy)
        return copy

    def _told(
        self, noted: dict[Look, Any], kind: type[_Facts | _Parts], look: Look, obj: object
    ) -> Any:
        if (look, id(obj)) in self._seen:  # that object, as it is kept
            return kind.asked(look, obj)
        if look not in noted:
            noted[look] = kind(look)
        told = noted[look].add(obj)
        self._seen.add((look, id(obj)))
        return told

    def holds(self) -> bool:
        """Return whether all is as it was noted."""
        try:
            looks = chain(self._ones.values(), self._facts.values(), self._parts.values())
            return all(look.same() for look in looks) and self._same_memory()
        except Exception:  # an attribute is gone, or another thread is at work
            return False

    def _same_memory(self) -> bool:
        then = chain(*(forms.found for forms in self._forms.values()), self._copies)
        now = chain(*(forms.now() for forms in self._forms.values()), self._memory)
        # In one call, in which no other thread can let go of the memory before it is read.
        return all(map(eq, then, now))


class _Facts:
    """What one look has told of objects, a value of each."""

    def __init__(self, look: Look) -> None:
        self._look = look
        self._of: list[object] = []
        self.found: list[object] = []

    @staticmethod
    def asked(look: Look, obj: object) -> object:
        return look(obj)

    def add(self, obj: object) -> object:
        found = self._look(obj)
        self._of.append(obj)
        self.found.append(found)
        return found

    def now(self) -> Iterator[object]:
        return map(self._look, self._of)

    def same(self) -> bool:
        return self.found == list(self.now())


class _Ones(_Facts):
    """What one look has told of objects, which is that very thing."""

    def same(self) -> bool:
        return all(map(is_, self.found, self.now()))


class _Parts:
    """What one look has told of objects, several parts of each."""

    def __init__(self, look: Look) -> None:
        self._look = look
        self._of: list[object] = []
        self._lengths: list[int] = []
        self._found: list[object] = []

    @staticmethod
    def asked(look: Look, obj: object) -> tuple[object, ...]:
        return tuple(look(obj))

    def add(self, obj: object) -> tuple[object, ...]:
        found = tuple(self._look(obj))
        self._of.append(obj)
        self._lengths.append(len(found))
        self._found += found
        return found

    def same(self) -> bool:
        now = list(map(self._look, self._of))
        same_lengths = self._lengths == list(map(len, now))
        return same_lengths and all(map(is_, chain.from_iterable(now), self._found))
