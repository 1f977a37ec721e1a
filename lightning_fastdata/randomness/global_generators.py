"""The global generators of ``random``, ``numpy.random`` and torch's CPU: were they drawn from?"""

from __future__ import annotations

import ctypes
import random
import struct
import sys
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any, Final, TypeAlias

import numpy as np
import numpy.random  # forked processes find it loaded, which takes a tenth of a second
import torch

PYTHON: Any = getattr(random.getstate, "__self__", None)
"""The generator behind ``random``."""
NUMPY: Any = getattr(np.random.get_state, "__self__", None)
"""That behind ``numpy.random``, as NumPy has had it since before ``default_rng``."""
GENERATORS: Final = ("random", "numpy", "torch")
"""The global generators, as they are named here."""
_MT19937_WORDS: Final = 624
_MT19937_BYTES: Final = 4 * (_MT19937_WORDS + 1)
"""A Mersenne Twister in memory: its words, and the position among them."""
_DEVIATE_BYTES: Final = struct.calcsize("@i4xd")
_Memory: TypeAlias = ctypes.Array[ctypes.c_char]
"""Read and written, as ``raw``, while the interpreter's lock is held."""


def _memory_at(address: int, size_bytes: int) -> _Memory:
    return (ctypes.c_char * size_bytes).from_address(address)


class DrawWatch:
    """Remembers the states of the global generators, and sees whether they are still the same.

    Seeding a generator costs more than a cheap sample does, so each is seeded only once a dataset
    has been seen to draw from it. Code that draws and puts the state back cannot be seen.
    """

    def __init__(self, names: Collection[str] = GENERATORS) -> None:
        self._watched = {name: _WATCHED[name]() for name in names}
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


class PythonGenerator:
    """The state behind ``random``, in memory: ``getstate`` and a comparison take 15 us.

    Its position and words are at ``address``; 0: ``getstate`` is to be asked. Default: where
    CPython keeps them.
    """

    def __init__(self, address: int | None = None) -> None:
        address = _python_address() if address is None else address
        self._memory = _memory_at(address, _MT19937_BYTES) if address else None
        self._state: Any = None

    def begin(self) -> None:
        """Remember the present state."""
        self._state = self._read()

    def moved(self) -> bool:
        """Return whether the generator has moved since."""
        return bool(self._state != self._read())

    def restore(self) -> None:
        """Put the remembered state back."""
        if self._memory is None:
            random.setstate(self._state)
        else:
            self._memory.raw, PYTHON.gauss_next = self._state

    def _read(self) -> object:
        if self._memory is None:
            return random.getstate()
        # A normal deviate is kept back beside the words.
        return self._memory.raw, PYTHON.gauss_next


@cache
def _python_address() -> int:
    """Return where CPython keeps the position and the words behind ``random``; 0 if unknown."""
    head = object.__basicsize__
    if (
        sys.implementation.name != "cpython"
        or type(PYTHON) is not random.Random
        or head + _MT19937_BYTES > type(PYTHON).__basicsize__
    ):
        return 0
    _, (*words, position), _ = PYTHON.getstate()
    expected = np.array([position, *words], np.uint32).tobytes()
    address = id(PYTHON) + head
    return address if ctypes.string_at(address, _MT19937_BYTES) == expected else 0


class NumpyGenerator:
    """The state behind ``numpy.random``, in memory: ``get_state`` takes 30 us, ``set_state`` 70.

    ``offset``: where the deviate is that is kept back beside the words, from the address of the
    ``RandomState``; 0: ``get_state`` is to be asked. Default: where NumPy keeps it.
    """

    def __init__(self, offset: int | None = None) -> None:
        offset = _deviate_offset() if offset is None else offset
        self._deviate = _memory_at(id(NUMPY) + offset, _DEVIATE_BYTES) if offset else None
        self._owner: Any = None
        self._words: _Memory | None = None
        self._state: Any = None

    def begin(self) -> None:
        """Remember the present state."""
        owner = np.random.mtrand.get_bit_generator()
        if owner is not self._owner:
            self._owner, self._words = owner, None
            if self._deviate is not None and isinstance(owner, np.random.MT19937):
                self._words = _memory_at(owner.ctypes.state_address, _MT19937_BYTES)
        self._state = self._read()

    def moved(self) -> bool:
        """Return whether the generator has moved since, or is another one."""
        if np.random.mtrand.get_bit_generator() is not self._owner:
            return True
        now = self._read()  # in memory bytes, else a dictionary with an array in it
        return not _equal(self._state, now) if isinstance(now, dict) else bool(now != self._state)

    def restore(self) -> None:
        """Put the remembered state back."""
        if np.random.mtrand.get_bit_generator() is not self._owner:
            np.random.mtrand.set_bit_generator(self._owner)
        if self._words is None or self._deviate is None:
            np.random.set_state(self._state)
        elif self._state != self._read():
            with self._owner.lock:
                self._words.raw, self._deviate.raw = self._state

    def _read(self) -> object:
        if self._words is None or self._deviate is None:
            return np.random.get_state(legacy=False)
        return self._words.raw, self._deviate.raw


@cache
def _deviate_offset() -> int:
    """Return where a ``RandomState`` keeps a normal deviate back, in bytes; 0 if unknown.

    It is a C ``int``, whether there is one, and then the ``double`` itself.
    """
    if sys.implementation.name != "cpython" or type(NUMPY) is not np.random.RandomState:
        return 0
    one = np.random.RandomState(0)
    found = set()
    for number in range(6):
        one.standard_normal()
        kept = one.get_state(legacy=False)
        if number % 2 == 0:
            memory = ctypes.string_at(id(one), type(one).__basicsize__)
            found.add(memory.find(struct.pack("@i4xd", 1, kept["gauss"])))
    offset = found.pop()
    if found or offset <= 0:
        return 0
    none_kept = ctypes.string_at(id(one) + offset, _DEVIATE_BYTES)
    return offset if none_kept == bytes(_DEVIATE_BYTES) and not kept["has_gauss"] else 0


class _TorchGenerator:
    """The state of torch's CPU generator, as bytes: these are compared faster than tensors."""

    def begin(self) -> None:
        self._state = self._read()

    def moved(self) -> bool:
        return self._state != self._read()

    def restore(self) -> None:
        torch.set_rng_state(torch.frombuffer(bytearray(self._state), dtype=torch.uint8))

    def _read(self) -> bytes:
        state = torch.default_generator.get_state()
        return ctypes.string_at(state.data_ptr(), state.nbytes)


_WATCHED: Final = {"random": PythonGenerator, "numpy": NumpyGenerator, "torch": _TorchGenerator}


def _equal(ours: object, theirs: object) -> bool:
    if isinstance(ours, dict) and isinstance(theirs, dict):
        return ours.keys() == theirs.keys() and all(_equal(ours[k], theirs[k]) for k in ours)
    return bool(np.array_equal(ours, theirs))  # type: ignore[arg-type]


@contextmanager
def kept_random_state(names: Collection[str] = GENERATORS) -> Iterator[None]:
    """Restore the global generators, or some of them, at the end of the block."""
    watch = DrawWatch(names)
    try:
        yield
    finally:
        watch.restore()
