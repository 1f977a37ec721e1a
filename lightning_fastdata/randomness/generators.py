"""The generators that a dataset holds: found, and given the state that belongs to a sample."""

from __future__ import annotations

import hashlib
import random
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final, TypeAlias, get_args

import numpy as np
import torch

from lightning_fastdata.errors import FastDataWarning
from lightning_fastdata.randomness.global_generators import PYTHON
from lightning_fastdata.randomness.search import find_instances, loaded_classes

_Generator: TypeAlias = (
    np.random.Generator | np.random.RandomState | random.Random | torch.Generator
)
GENERATOR_CLASSES: Final = get_args(_Generator)
_MOST_BITS: Final = 64
"""Of a seed that was chosen; without one NumPy takes 128 bits from the system."""


class OwnGenerators:
    """The generators that a map-style dataset holds where they can be found.

    Found are those in attributes of the dataset and of what it holds, but not those of
    Albumentations pipelines, which are keyed with these.

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

    def origins(self) -> dict[int, object]:
        """Return what each sample's draws rest on beside its key, by the ``id`` of a generator.

        The states themselves are those of the sample that was read last.
        """
        if self._refused:
            return {}
        return {id(each): (place, *rest) for place, (each, *rest) in enumerate(self._found)}

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
        or generator is PYTHON
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
