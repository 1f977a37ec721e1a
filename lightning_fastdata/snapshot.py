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


class UnseenError(Exception):
    """Something may change that no look would show, or is too much to be kept."""


class Looks:
    """Asks for looks, and keeps nothing."""

    def fact(self, look: Look, obj: object) -> Any:
        """Return what a look tells of an object, to be compared by its value."""
        return look(obj)

    def parts(self, look: Look, obj: object) -> tuple[Any, ...]:
        """Return all that a look tells of an object, each to be compared by identity."""
        return tuple(look(obj))

    def watch(self, look: Look, obj: object) -> None:
        """Take a look whose parts nobody needs now."""

    def memory(self, looks: Iterable[Look], owner: object, at: Any) -> Any:  # noqa: ARG002
        """Return what lies in the memory of an object.

        Args:
            looks: They tell where it lies, and in which form.
            owner: The object.
            at: The memory, as an array of ctypes.
        """
        return at

    def unseen(self) -> None:
        """Note that something may change that no look shows."""


class Snapshot(Looks):
    """What looks at objects have told, and whether they tell it again."""

    def __init__(self, most_bytes: int) -> None:
        self._facts: dict[Look, _Facts] = {}
        self._parts: dict[Look, _Parts] = {}
        self._forms: dict[Look, _Facts] = {}
        self._memory: list[Any] = []
        self.copies: list[bytearray] = []
        """Of the memory of objects."""
        self._most_bytes = most_bytes
        self._seen: set[tuple[Look, int]] = set()

    def fact(self, look: Look, obj: object) -> Any:  # noqa: D102
        new = self._is_new(look, obj)
        return self._facts.setdefault(look, _Facts(look)).add(obj) if new else look(obj)

    def parts(self, look: Look, obj: object) -> tuple[Any, ...]:  # noqa: D102
        new = self._is_new(look, obj)
        return self._parts.setdefault(look, _Parts(look)).add(obj) if new else tuple(look(obj))

    def watch(self, look: Look, obj: object) -> None:  # noqa: D102
        self.parts(look, obj)

    def memory(self, looks: Iterable[Look], owner: object, at: Any) -> bytearray:
        """Return a copy of the memory of an object.

        Raises:
            UnseenError: It is too much.
        """
        if len(at) > self._most_bytes:
            raise UnseenError
        for look in looks:
            self._forms.setdefault(look, _Facts(look)).add(owner)
        self._memory.append(at)
        self.copies.append(bytearray(at))
        return self.copies[-1]

    def unseen(self) -> None:  # noqa: D102
        raise UnseenError

    def _is_new(self, look: Look, obj: object) -> bool:
        key = (look, id(obj))  # whose objects are kept
        new = key not in self._seen
        self._seen.add(key)
        return new

    def holds(self) -> bool:
        """Return whether all is as it was noted."""
        try:
            same = all(facts.same() for facts in self._facts.values())
            same = same and all(parts.same() for parts in self._parts.values())
            return same and self._same_memory()
        except Exception:  # an attribute is gone, or another thread is at work
            return False

    def _same_memory(self) -> bool:
        then = chain(*(forms.found for forms in self._forms.values()), self.copies)
        now = chain(*(forms.now() for forms in self._forms.values()), self._memory)
        # In one call, in which no other thread can let go of the memory before it is read.
        return all(map(eq, then, now))


class _Facts:
    """What one look has told of objects, a value of each."""

    def __init__(self, look: Look) -> None:
        self._look = look
        self._of: list[object] = []
        self.found: list[object] = []

    def add(self, obj: object) -> object:
        found = self._look(obj)
        self._of.append(obj)
        self.found.append(found)
        return found

    def now(self) -> Iterator[object]:
        return map(self._look, self._of)

    def same(self) -> bool:
        return self.found == list(self.now())


class _Parts:
    """What one look has told of objects, several parts of each."""

    def __init__(self, look: Look) -> None:
        self._look = look
        self._of: list[object] = []
        self._lengths: list[int] = []
        self._found: list[object] = []

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
