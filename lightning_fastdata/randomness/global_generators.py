"""Watching, saving and restoring the global generators of ``random``, NumPy and torch's CPU."""

from __future__ import annotations

import ctypes
import random
import struct
import sys
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any, Final, TypeAlias

import numpy as np
import numpy.random  # forked processes find it loaded, which takes a tenth of a second
import torch

from lightning_fastdata.device.backend import generators_in_use

PYTHON: Any = getattr(random.getstate, "__self__", None)
"""The generator behind ``random``."""
NUMPY: Any = getattr(np.random.get_state, "__self__", None)
"""The legacy ``RandomState`` behind the functions of ``numpy.random``."""
GENERATORS: Final = ("random", "numpy", "torch")
"""Names of the global generators in this package."""
_MT19937_WORDS: Final = 624
_MT19937_BYTES: Final = 4 * (_MT19937_WORDS + 1)
"""Bytes of a Mersenne Twister in memory: its words, and the position among them."""
_DEVIATE_BYTES: Final = struct.calcsize("@i4xd")
_Memory: TypeAlias = ctypes.Array[ctypes.c_char]
"""Memory that is read and written by its ``raw``, while the interpreter's lock is held."""


def _memory_at(address: int, size_bytes: int) -> _Memory:
    return (ctypes.c_char * size_bytes).from_address(address)


class DrawWatch:
    """Remembers the states of the global generators, and tells whether they have changed.

    Seeding a generator costs more than a cheap sample does, so a generator is not seeded until a
    dataset was seen to draw from it. Code that draws and restores the state is not noticed.
    """

    def __init__(self, names: Collection[str] = GENERATORS) -> None:
        self._watched = {name: _WATCHED[name]() for name in names}
        self.begin()

    def begin(self) -> None:
        """Remember the present states."""
        for generator in self._watched.values():
            generator.begin()

    def drew(self) -> bool:
        """Return whether any of the generators was drawn from since."""
        return any(generator.moved() for generator in self._watched.values())

    def drawn(self) -> list[str]:
        """Return the names of the generators that were drawn from since."""
        return [name for name, generator in self._watched.items() if generator.moved()]

    def restore(self) -> None:
        """Restore the remembered states."""
        for generator in self._watched.values():
            generator.restore()

    def leave(self, names: Collection[str]) -> None:
        """Stop watching some of the generators."""
        for name in names:
            del self._watched[name]


class PythonGenerator:
    """The state behind ``random``, read from memory: ``getstate`` and a comparison take 15 us.

    ``address``: that of its position and words; 0: call ``getstate`` instead. Default: the address
    at which CPython keeps them.
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
        """Restore the remembered state."""
        if self._memory is None:
            random.setstate(self._state)
        else:
            self._memory.raw, PYTHON.gauss_next = self._state

    def _read(self) -> object:
        if self._memory is None:
            return random.getstate()
        # The generator also holds the second of a pair of normal deviates.
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
    """The state behind ``numpy.random``, read from memory: ``get_state`` takes 30 us.

    ``offset``: that of the held normal deviate, from the address of the ``RandomState``; 0: call
    ``get_state`` instead. Default: the offset at which NumPy keeps it.
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
        now = self._read()  # bytes, if read from memory; else a dictionary with an array in it
        return not _equal(self._state, now) if isinstance(now, dict) else bool(now != self._state)

    def restore(self) -> None:
        """Restore the remembered state."""
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
    """Return the offset in bytes of the normal deviate that a ``RandomState`` holds; 0 if unknown.

    There is a C ``int``, which says whether it holds one, and then the ``double`` itself.
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
    """The state of torch's CPU generator; as bytes it is compared faster than as a tensor."""

    def begin(self) -> None:
        self._state = torch.default_generator.get_state()

    def moved(self) -> bool:
        return _bytes_of(self._state) != _bytes_of(torch.default_generator.get_state())

    def restore(self) -> None:
        torch.default_generator.set_state(self._state)


def _bytes_of(state: torch.Tensor) -> bytes:
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


def snapshot_random_states() -> Callable[[], None]:
    """Return what puts back the random states of Python, numpy, torch and its devices."""
    host = DrawWatch()
    on_device = [(each, each.get_state()) for each in generators_in_use()]

    def undo() -> None:
        host.restore()
        for generator, state in on_device:
            generator.set_state(state)

    return undo
