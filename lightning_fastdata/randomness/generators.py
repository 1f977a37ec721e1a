"""The global generators of ``random``, ``numpy.random`` and torch's CPU: were they drawn from?"""

from __future__ import annotations

import ctypes
import hashlib
import random
import sys
import warnings
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any, Final, TypeAlias, get_args

import numpy as np
import numpy.random  # forked processes find it loaded, which takes a tenth of a second
import torch

from lightning_fastdata.errors import FastDataWarning
from lightning_fastdata.randomness.search import find_instances, loaded_classes

_PYTHON: Any = getattr(random.getstate, "__self__", None)
"""The generator behind ``random``."""
GENERATORS: Final = ("random", "numpy", "torch")
"""The global generators, as they are named here."""
_MT19937_WORDS: Final = 624
_MT19937_BYTES: Final = 4 * (_MT19937_WORDS + 1)
"""A Mersenne Twister in memory: its words, and the position among them."""
_Twister: TypeAlias = ctypes.Array[ctypes.c_char]
"""Its memory; read and written, as ``raw``, while the interpreter's lock is held."""


_without_deviate: bytes | None = None
"""Words at which ``numpy.random`` keeps no normal deviate back, which it is slow to ask."""


def _twister_at(address: int) -> _Twister:
    return (ctypes.c_char * _MT19937_BYTES).from_address(address)


class DrawWatch:
    """Remembers the states of the global generators, and sees whether they are still the same.

    Seeding a generator costs more than a cheap sample does, so each is seeded only once a dataset
    has been seen to draw from it. Code that draws and puts the state back cannot be seen.

    Args:
        names: Which generators, of ``GENERATORS``.
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
        self._memory = _twister_at(address) if address else None
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
            self._memory.raw, _PYTHON.gauss_next = self._state

    def _read(self) -> object:
        if self._memory is None:
            return random.getstate()
        # A normal deviate is kept back beside the words.
        return self._memory.raw, _PYTHON.gauss_next


@cache
def _python_address() -> int:
    """Return where CPython keeps the position and the words behind ``random``; 0 if unknown."""
    head = object.__basicsize__
    if (
        sys.implementation.name != "cpython"
        or type(_PYTHON) is not random.Random
        or head + _MT19937_BYTES > type(_PYTHON).__basicsize__
    ):
        return 0
    _, (*words, position), _ = _PYTHON.getstate()
    expected = np.array([position, *words], np.uint32).tobytes()
    address = id(_PYTHON) + head
    return address if ctypes.string_at(address, _MT19937_BYTES) == expected else 0


class _NumpyGenerator:
    """The state behind ``numpy.random``, in memory: ``get_state`` and ``set_state`` take 100 us."""

    def __init__(self) -> None:
        self._owner: object = None
        self._memory: _Twister | None = None
        self._words: bytes | None = None
        self._state: Any = None

    def begin(self) -> None:
        global _without_deviate
        self._words, self._state = self._read(), None
        if self._words is None or self._words != _without_deviate:
            # A normal deviate is kept back beside the words; while there is none, and the words
            # stay the same, there will be none.
            self._state = np.random.get_state(legacy=False)
            if self._words is not None and self._state["has_gauss"] == 0:
                self._state, _without_deviate = None, self._words

    def moved(self) -> bool:
        if self._state is None:
            return self._read() != self._words
        return not _equal(self._state, np.random.get_state(legacy=False))

    def restore(self) -> None:
        if self._state is not None or self._words is None:
            np.random.set_state(self._state)
        elif self._read() != self._words:
            np.random.seed(0)  # keeps no deviate back
            if self._memory is None:  # of a generator that has taken its place
                raise RuntimeError("numpy.random got a generator of another kind in between")
            self._memory.raw = self._words

    def _read(self) -> bytes | None:
        generator = np.random.mtrand.get_bit_generator()
        if generator is not self._owner:
            known = isinstance(generator, np.random.MT19937)
            self._memory = _twister_at(generator.ctypes.state_address) if known else None
            self._owner = generator
        return None if self._memory is None else self._memory.raw


class _TorchGenerator:
    """The state of torch's CPU generator."""

    def begin(self) -> None:
        self._state = torch.default_generator.get_state()

    def moved(self) -> bool:
        now = torch.default_generator.get_state()
        # Bytes are compared faster than tensors, and than memoryviews.
        return bool(now.numpy().tobytes() != self._state.numpy().tobytes())

    def restore(self) -> None:
        torch.set_rng_state(self._state)


_WATCHED: Final = {"random": PythonGenerator, "numpy": _NumpyGenerator, "torch": _TorchGenerator}


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


_Generator: TypeAlias = (
    np.random.Generator | np.random.RandomState | random.Random | torch.Generator
)
GENERATOR_CLASSES: Final = get_args(_Generator)
_MOST_BITS: Final = 64
"""Of a seed that was chosen; without one NumPy takes 128 bits from the system."""


class OwnGenerators:
    """The generators that a map-style dataset holds where they can be found.

    Found are those in attributes of the dataset and of what it holds, and those that the user's own
    code refers to, but not those of Albumentations pipelines, which are keyed with these.

    Args:
        dataset: The dataset, in the process whose generators count as its initial ones.
    """

    def __init__(self, dataset: object) -> None:
        self.dataset = dataset
        # Side processes get these along with the dataset, as the very objects that it holds.
        self._found = [(generator, _origin(generator)) for generator in _generators(dataset)]
        self._refused = False

    def __bool__(self) -> bool:
        return bool(self._found)

    def look_again(self) -> bool:
        """Take in generators that were made since; return whether there are any."""
        known = {id(generator) for generator, _ in self._found}
        held = _generators(self.dataset)
        new = [generator for generator in held if id(generator) not in known]
        if new:
            # One that took another's place is keyed in its place.
            here = {id(generator) for generator in held}
            kept = [pair for pair in self._found if id(pair[0]) in here]
            self._found = [*kept, *((generator, b"") for generator in new)]
        return bool(new)

    def key(self, seed: int, epoch: int, index: object) -> None:
        """Give each generator the state that belongs to one sample."""
        for place, (generator, origin) in enumerate(self._found):
            text = f"{seed},{epoch},{index},{place},".encode() + origin
            number = int.from_bytes(hashlib.blake2b(text, digest_size=16).digest(), "little")
            try:
                seed_generator(generator, number)
            except Exception as error:  # whatever a generator of another kind raises
                self._refuse(generator, error)

    @contextmanager
    def kept(self) -> Iterator[None]:
        """Leave the generators as they were at the end of the block."""
        states = [(generator, state_of(generator)) for generator, _ in self._found]
        try:
            yield
        finally:
            for generator, state in states:
                _set_state(generator, state)

    def _refuse(self, generator: _Generator, error: Exception) -> None:
        if not self._refused:
            self._refused = True
            warnings.warn(
                f"{type(self.dataset).__name__} draws from a {type(generator).__name__} that "
                f"cannot be seeded for each sample ({error}): what it draws depends on which "
                "worker reads a sample. Use np.random.default_rng(...), or executor='torch'.",
                FastDataWarning,
                stacklevel=2,
            )


def own_generators(dataset: object, *, shared: bool) -> OwnGenerators | None:
    """Return the generators of a map-style dataset that are to be keyed.

    Args:
        dataset: The dataset of a loader, without what this package puts around it.
        shared: Threads of one process read it, so that no generator can be keyed; that is warned
            of if there are any.
    """
    own = OwnGenerators(dataset)
    if not shared:
        return own
    if own:
        warnings.warn(
            f"{type(dataset).__name__} draws from generators of its own, which the threads of a "
            "sidecar share: its samples depend on timing, and differ from run to run. Use "
            "executor='workers', which keys them by sample.",
            FastDataWarning,
            stacklevel=2,
        )
    return None


def _generators(dataset: object) -> list[_Generator]:
    pipelines = loaded_classes("albumentations", "BaseCompose", "BasicTransform")
    return [
        found
        for found in find_instances(dataset, (*GENERATOR_CLASSES, *pipelines))
        if isinstance(found, GENERATOR_CLASSES) and not _is_global(found)
    ]


def _is_global(generator: _Generator) -> bool:
    """Return whether a generator is keyed with the global ones, or is none to be seeded at all."""
    return (
        isinstance(generator, random.SystemRandom)
        or generator is _PYTHON
        or generator is getattr(np.random.get_state, "__self__", None)
        or generator is torch.default_generator
    )


def _origin(generator: _Generator) -> bytes:
    """Return what tells a generator from one that was seeded otherwise."""
    if isinstance(generator, torch.Generator):
        return b"%d" % generator.initial_seed()
    if isinstance(generator, np.random.Generator):
        seeds = getattr(generator.bit_generator, "seed_seq", None)  # not of each kind
        if not isinstance(seeds, np.random.SeedSequence):
            return repr((None, ())).encode()
        entropy = seeds.entropy
        if isinstance(entropy, int) and entropy.bit_length() > _MOST_BITS:
            entropy = None  # seeded by the system: each run would be another one
        return repr((entropy, seeds.spawn_key)).encode()
    return hashlib.blake2b(repr(state_of(generator)).encode(), digest_size=16).digest()


def seed_generator(generator: _Generator, number: int) -> None:
    """Give a generator the state that belongs to a number."""
    if isinstance(generator, np.random.Generator):
        kind = type(generator.bit_generator)
        generator.bit_generator.state = kind(number).state
    elif isinstance(generator, np.random.RandomState):
        generator.seed(np.frombuffer(number.to_bytes(16, "little"), np.uint32))
    elif isinstance(generator, torch.Generator):
        generator.manual_seed(number % 2**63)
    else:
        generator.seed(number)


def state_of(generator: _Generator) -> object:
    """Return the present state of a generator."""
    if isinstance(generator, np.random.Generator):
        return generator.bit_generator.state
    if isinstance(generator, np.random.RandomState):
        return generator.get_state(legacy=False)
    if isinstance(generator, torch.Generator):
        return generator.get_state()
    return generator.getstate()


def _set_state(generator: _Generator, state: Any) -> None:
    if isinstance(generator, np.random.Generator):
        generator.bit_generator.state = state
    elif isinstance(generator, random.Random):
        generator.setstate(state)
    else:
        generator.set_state(state)
