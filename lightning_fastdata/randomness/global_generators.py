"""The global generators of ``random``, ``numpy.random`` and torch's CPU: were they drawn from?"""

from __future__ import annotations

import ctypes
import random
import sys
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any, Final, Protocol

import numpy as np
import numpy.random  # forked processes find it loaded, which takes a tenth of a second
import torch

GENERATORS: Final = ("random", "numpy", "torch")
"""The global generators, as they are named here."""
_MT19937_WORDS: Final = 624
_MT19937_BYTES: Final = 4 * (_MT19937_WORDS + 1)
"""A Mersenne Twister in memory: its words, and the position among them."""


class DrawWatch:
    """Remembers the states of the global generators, and sees whether they are still the same.

    Seeding a generator costs more than a cheap sample does, so each is seeded only once a dataset
    has been seen to draw from it. Code that draws and puts the state back cannot be seen.

    Args:
        names: Which generators, of ``GENERATORS``.
    """

    def __init__(self, names: Collection[str] = GENERATORS) -> None:
        self._watched: dict[str, _Watched] = {name: _watched(name) for name in names}
        self.begin()

    def begin(self) -> None:
        """Remember the present states."""
        for generator in self._watched.values():
            generator.begin()

    def drew(self) -> bool:
        """Return whether any of the generators has moved since."""
        return any(generator.moved() for generator in self._watched.values())

    def drawn(self) -> list[str]:
        """Return the names of the generators that have moved since."""
        return [name for name, generator in self._watched.items() if generator.moved()]

    def restore(self) -> None:
        """Put the remembered states back."""
        for generator in self._watched.values():
            generator.restore()

    def leave(self, names: Collection[str]) -> None:
        """Watch some of the generators no longer."""
        for name in names:
            del self._watched[name]


class _Watched(Protocol):
    """One generator, its state, and whether it has moved since that was remembered."""

    def begin(self) -> None: ...
    def moved(self) -> bool: ...
    def restore(self) -> None: ...


def _watched(name: str) -> _Watched:
    if name == "random":
        return PythonGenerator(_python_address())
    return _NumpyGenerator() if name == "numpy" else _TorchGenerator()


class PythonGenerator:
    """The state behind ``random``, read from memory: ``getstate`` and a comparison take 15 us.

    Args:
        address: Where its position and words are; 0: ``getstate`` is to be asked.
    """

    def __init__(self, address: int) -> None:
        self._address = address
        self._state: Any = None

    def begin(self) -> None:
        """Remember the present state."""
        self._state = self._read()

    def moved(self) -> bool:
        """Return whether the generator has moved since."""
        return bool(self._state != self._read())

    def restore(self) -> None:
        """Put the remembered state back."""
        if not self._address:
            random.setstate(self._state)
            return
        memory, kept_back = self._state
        position, *words = np.frombuffer(memory, np.uint32).tolist()
        random.setstate((random.Random.VERSION, (*words, position), kept_back))

    def _read(self) -> Any:
        if not self._address:
            return random.getstate()
        # A normal deviate is kept back beside the words.
        kept_back = _python_generator().gauss_next
        return ctypes.string_at(self._address, _MT19937_BYTES), kept_back


def _python_generator() -> Any:
    return random.getstate.__self__  # type: ignore[attr-defined]


@cache
def _python_address() -> int:
    """Return where CPython keeps the position and the words behind ``random``; 0 if unknown."""
    generator = getattr(random.getstate, "__self__", None)
    head = object.__basicsize__
    if (
        sys.implementation.name != "cpython"
        or type(generator) is not random.Random
        or head + _MT19937_BYTES > type(generator).__basicsize__
    ):
        return 0
    _, (*words, position), _ = generator.getstate()
    told = np.array([position, *words], np.uint32).tobytes()
    address = id(generator) + head
    return address if ctypes.string_at(address, _MT19937_BYTES) == told else 0


class _NumpyGenerator:
    """The state behind ``numpy.random``, read from memory: its own ``get_state`` takes 30 us."""

    def __init__(self) -> None:
        self._owner: Any = None
        self._address = 0
        self._words: bytes | None = None
        self._plain: bytes | None = None
        self._state: Any = None

    def begin(self) -> None:
        words = self._read()
        if words is None or words != self._plain:
            # A normal deviate is kept back beside the words; while there is none, and the words
            # stay the same, there will be none.
            self._state = np.random.get_state(legacy=False)
            self._plain = words if self._state.get("has_gauss") == 0 else None
        self._words = words

    def moved(self) -> bool:
        if self._words is not None and self._plain is not None:
            return self._read() != self._words
        return not _equal(self._state, np.random.get_state(legacy=False))

    def restore(self) -> None:
        np.random.set_state(self._state)

    def _read(self) -> bytes | None:
        find: Any = getattr(np.random, "get_bit_generator", lambda: None)
        generator = find()
        if generator is not self._owner:
            known = type(generator) is np.random.MT19937
            self._address = generator.ctypes.state_address if known else 0
            self._owner = generator
        return ctypes.string_at(self._address, _MT19937_BYTES) if self._address else None


class _TorchGenerator:
    """The state of torch's CPU generator."""

    def begin(self) -> None:
        self._state = torch.get_rng_state()
        self._bytes = self._state.numpy().tobytes()

    def moved(self) -> bool:
        return torch.get_rng_state().numpy().tobytes() != self._bytes

    def restore(self) -> None:
        torch.set_rng_state(self._state)


def _equal(ours: Any, theirs: Any) -> bool:
    if isinstance(ours, dict):
        return ours.keys() == theirs.keys() and all(_equal(ours[k], theirs[k]) for k in ours)
    return bool(np.array_equal(ours, theirs))


@contextmanager
def kept_random_state(names: Collection[str] = GENERATORS) -> Iterator[None]:
    """Restore the global generators, or some of them, at the end of the block."""
    watch = DrawWatch(names)
    try:
        yield
    finally:
        watch.restore()
