"""The randomness of one sample: it follows from its key (seed, epoch, index) in any process.

Albumentations 2.0.8 gives every DataLoader worker the same random streams, and gives every
transform of a seeded ``Compose`` the same stream as its neighbours. Reseeding each top-level
pipeline with one shared pair of generators before every sample removes both, and makes a sample
depend on nothing but its key.
"""

from __future__ import annotations

import hashlib
import os
import pickle
import random
import struct
import threading
import warnings
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from mmap import mmap
from typing import TYPE_CHECKING, Any, Final, TypeAlias, get_args

import numpy as np
import torch

from lightning_fastdata.errors import FastDataWarning, OptionsError
from lightning_fastdata.randomness.global_generators import (
    GENERATORS,
    NUMPY,
    PYTHON,
    kept_random_state,
)
from lightning_fastdata.tree import find_instances, held, held_by, loaded_classes

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from lightning_fastdata.types import SampleKey

_NOTHING_DRAWN: Final = (0, 0, 0, 0)
_OF_A_SAMPLE: Final = {
    *("random_generator", "py_random", "params", "_images_was_list", "_masks_was_list"),
    *("is_sequence_input", "label_manager"),  # of the processors of boxes and keypoints
}
"""Attributes that an Albumentations pipeline sets anew for each sample."""
_PARTS: Final = {
    *("transforms", "processors"),
    *("apply_with_params", "update_transform_params", "get_params_dependent_on_data"),
}
"""Attributes of an Albumentations pipeline that hold its parts, and those that a recorder puts in
the place of methods, by which the whole pipeline would be found."""
_KEYED: Final = threading.RLock()
_epochs_are_own = False
_Generator: TypeAlias = (
    np.random.Generator | np.random.RandomState | random.Random | torch.Generator
)
GENERATOR_CLASSES: Final = get_args(_Generator)
_OF_AUGMENT: Final = -1
"""Place of the pipeline of ``augment=`` among pipelines; those of the dataset count from 0."""
_MOST_BITS: Final = 64
"""Most bits of a seed that counts as chosen; without one NumPy takes 128 bits from the system."""


def reseed(composes: Sequence[Any], key: SampleKey) -> None:
    """Give each top-level pipeline of a dataset the random state that belongs to one sample.

    All transforms of one pipeline share one pair of generators, so they draw one after the other
    from the same stream; different pipelines of one dataset get different streams. NumPy's
    generator is Philox (a counter-based generator), so that setting it costs no mixing.

    Args:
        composes: pipelines (``A.Compose`` or single transforms), in a fixed order.
        key: seed, epoch and index of the sample. Any integers, negative ones too.
    """
    for position, compose in enumerate(composes):
        generator = compose.random_generator
        if generator is None or type(generator.bit_generator) is not np.random.Philox:
            generator = np.random.Generator(np.random.Philox(key=0))
        python = random.Random(_seed(generator, key, position))
        compose.set_random_state(generator, python)


def lasting(composes: Sequence[Any]) -> dict[int, tuple[type, dict[str, Any]]]:
    """Return type and attributes of each part of pipelines, by its ``id``, to compare them.

    Attributes that each sample sets anew are left out: generators, parameters, and what processors
    know of its labels.
    """
    found: dict[int, tuple[type, dict[str, Any]]] = {}
    waiting = list(composes)
    while waiting:
        part = waiting.pop()
        if id(part) not in found:
            found[id(part)] = (
                type(part),
                {name: value for name, value in held_by(part).items() if name not in _OF_A_SAMPLE},
            )
            waiting += held(part, "transforms") or ()
            waiting += (held(part, "processors") or {}).values()
    return found


def reseeder(compose: Any) -> Callable[[SampleKey], None]:
    """Return a function that gives the pipeline of ``augment=`` the random state of a sample.

    It draws by the same key as pipelines of the dataset (:func:`reseed`), but other numbers.

    Args:
        compose: a pipeline that nothing else reseeds, and whose transforms do not change: it is
            given its generators once, now.
    """
    generator, python = np.random.Generator(np.random.Philox(key=0)), random.Random(0)
    compose.set_random_state(generator, python)
    return lambda key: python.seed(_seed(generator, key, _OF_AUGMENT))


def _seed(generator: np.random.Generator, key: SampleKey, position: int) -> int:
    """Seed NumPy's generator, and return the seed for Python's."""
    text = b"%d,%d,%d,%d" % (*key, position)
    first, second, rest = struct.unpack("<QQ16s", hashlib.blake2b(text, digest_size=32).digest())
    # Tuples: NumPy would take the numbers out of arrays one by one, which is slower.
    generator.bit_generator.state = {
        "bit_generator": "Philox",
        "state": {"counter": _NOTHING_DRAWN, "key": (first, second)},
        "buffer": _NOTHING_DRAWN,
        "buffer_pos": 4,
        "has_uint32": 0,
        "uinteger": 0,
    }
    return int.from_bytes(rest, "little")


def global_seed() -> int:
    """Return the seed that Lightning's ``seed_everything`` has set for this process, else 0.

    Raises:
        OptionsError: The variable in which it stands holds no whole number.
    """
    text = os.environ.get("PL_GLOBAL_SEED", "0")
    try:
        return int(text)
    except ValueError:
        raise OptionsError(
            f"The environment variable PL_GLOBAL_SEED is {text!r}, and seed_everything() writes "
            "whole numbers there. Unset it, or call seed_everything()."
        ) from None


def is_lightnings_start(start: object) -> bool:
    """Return whether a ``worker_init_fn`` is the one of ``seed_everything(workers=True)``.

    Lightning gives it to each loader that has none. It seeds the global generators, and does
    nothing else.
    """
    function = getattr(start, "func", start)
    told = f"{getattr(function, '__module__', '')}.{getattr(function, '__name__', '')}"
    return told.endswith("fabric.utilities.seed.pl_worker_init_function")


def derived_seed(seed: int, *apart: object) -> int:
    """Return a seed whose draws are independent of those of the seed that it comes from.

    Args:
        seed: a seed of the run.
        apart: what tells the draws from others of the same seed; at least one value.
    """
    text = ",".join(map(str, (seed, *apart))).encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little")


class EpochCell:
    """The current epoch, in shared memory, where worker processes that outlive an epoch read it."""

    def __init__(self) -> None:
        # A program may have set another default device.
        self._shared = _shared_by_workers(torch.zeros(1, dtype=torch.int64, device="cpu"))
        self._number: NDArray[np.int64] | None = None
        self._is_own = False
        self.counted = True
        """Whether a loader counts the epoch; False: the program has set it."""

    def set(self, epoch: int) -> None:
        """Write the epoch; call it before the first index of that epoch is handed out."""
        self._here()[0] = epoch

    def get(self) -> int:
        """Return the epoch last written."""
        return int(self._here()[0])

    def __getstate__(self) -> dict[str, object]:
        # A tensor is sent as shared memory, but a NumPy array as a copy.
        return {**vars(self), "_number": None, "_is_own": False}

    def __setstate__(self, state: dict[str, object]) -> None:
        self.__dict__.update(state)
        # A copy that was made here is not shared yet with the workers that it will have.
        self._shared = _shared_by_workers(self._shared)

    def _here(self) -> NDArray[np.int64]:
        # Read for each sample: a NumPy view takes a tenth of a tensor's time.
        if self._number is None or self._is_own is not _epochs_are_own:
            number: NDArray[np.int64] = self._shared.numpy()
            self._number = number.copy() if _epochs_are_own else number
            self._is_own = _epochs_are_own
        return self._number


def _shared_by_workers(epoch: torch.Tensor) -> torch.Tensor:
    """Return an epoch in memory that workers share; if /dev/shm is full, forked ones alone."""
    try:
        return epoch.share_memory_()  # type: ignore[no-any-return, no-untyped-call]
    except RuntimeError:
        memory = np.frombuffer(mmap(-1, epoch.nbytes), np.int64)
        memory[0] = int(epoch)
        return torch.from_numpy(memory)


def keep_own_epochs() -> None:
    """Have this process keep epochs of its own from now on, not those in shared memory.

    A side process is given the epoch with each task, and may be one ahead of the training process.
    """
    global _epochs_are_own  # noqa: PLW0603 - a fact of the whole process
    _epochs_are_own = True


def seed_global_generators(
    seed: int, epoch: int, index: object, names: Collection[str] = GENERATORS
) -> None:
    """Seed ``random``, ``numpy.random`` and torch's CPU generator, or some of them, for a sample.

    The draws of one of them do not depend on which others are seeded.
    """
    digest = _digest(seed, epoch, index)
    if "random" in names:
        random.seed(int.from_bytes(digest[:8], "little"))
    if "numpy" in names:
        np.random.seed(int.from_bytes(digest[8:12], "little"))
    if "torch" in names:
        # torch.manual_seed would also seed all accelerators, or queue that up.
        torch.default_generator.manual_seed(_torch_seed(digest))


def torch_seed(key: SampleKey) -> int:
    """Return the seed of torch's CPU generator with which ``augment=`` draws for a sample."""
    return _torch_seed(_digest(*_of_augment(key)))


@contextmanager
def keyed_draws(key: SampleKey, names: Collection[str] = GENERATORS) -> Iterator[None]:
    """Seed global generators in the block for what ``augment=`` draws for a sample.

    They are restored afterwards. The dataset's own draws for the sample are others. Only one thread
    at a time runs such a block, as the generators belong to the process.
    """
    with _KEYED, kept_random_state(names):
        seed_global_generators(*_of_augment(key), names)
        yield


def _of_augment(key: SampleKey) -> tuple[int, int, object]:
    return key.seed, key.epoch, ("augment", key.index)


def _digest(seed: int, epoch: int, index: object) -> bytes:
    return hashlib.blake2b(f"{seed},{epoch},{index}".encode(), digest_size=20).digest()


def _torch_seed(digest: bytes) -> int:
    return int.from_bytes(digest[12:], "little", signed=True)


class OwnGenerators:
    """The generators that make part of a batch's draws, as far as they can be found.

    Those of the dataset, of its ``collate_fn`` and of its transform.

    It finds generators in attributes of the dataset and of objects that it holds, but not those
    that Albumentations gives the parts of a pipeline, which :func:`reseed` keys.

    Args:
        dataset: The map-style dataset, in the process whose generators count as its initial ones.
        collate_fn: What puts its samples together.
        transform: What tells by ``pipelines()`` which pipelines run on its samples; None: none do.
    """

    def __init__(self, dataset: object, collate_fn: object = None, transform: Any = None) -> None:
        self.dataset, self._collate_fn, self._transform = dataset, collate_fn, transform
        # Side processes get these together with the dataset, as the same objects that it holds.
        self._found = list(self._held().items())
        self._refused = False

    def _held(self) -> dict[_Generator, bytes]:
        pipelines = () if self._transform is None else self._transform.pipelines()
        return _generators((self.dataset, self._collate_fn, *pipelines))

    def __bool__(self) -> bool:
        return bool(self._found)

    def look_again(self) -> bool:
        """Add generators that were made since; return whether there are any."""
        known = {id(generator) for generator, _ in self._found}
        held = self._held()
        new = [generator for generator in held if id(generator) not in known]
        if new:
            # A generator that is gone loses its place, which the next one is then keyed by.
            here = {id(generator) for generator in held}
            kept = [pair for pair in self._found if id(pair[0]) in here]
            self._found = [*kept, *((generator, b"") for generator in new)]
        return bool(new)

    def origins(self) -> dict[int, object]:
        """Return place and origin of each generator by its ``id``; they decide draws, with the key.

        The states of the generators are those of the sample that was read last.
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
        """Restore the generators at the end of the block."""
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


def _generators(holder: object) -> dict[_Generator, bytes]:
    """Return the generators in an object, each with what tells it from one seeded otherwise."""
    kinds = (
        *GENERATOR_CLASSES,
        *loaded_classes("albumentations", "BaseCompose", "BasicTransform"),
    )
    held = find_instances(holder, kinds)
    found: dict[Any, bytes] = {}
    found |= {each: _origin(each) for each in held if isinstance(each, GENERATOR_CLASSES)}
    parts = lasting([each for each in held if not isinstance(each, GENERATOR_CLASSES)])
    for _, attributes in parts.values():
        own = [value for name, value in attributes.items() if name not in _PARTS]
        for each in find_instances(own, kinds):
            if isinstance(each, GENERATOR_CLASSES):
                found[each] = _origin(each)
            elif id(each) not in parts:  # a pipeline that a part calls itself is not reseeded
                # Without a seed the system has seeded its generators, anew in each run.
                inner = find_instances(list(held_by(each).values()), GENERATOR_CLASSES)
                found |= dict.fromkeys(inner, b"")
    return {each: origin for each, origin in found.items() if not _is_global(each)}


def _is_global(generator: _Generator) -> bool:
    """Return whether a generator is one of the global ones, or cannot be seeded at all."""
    return (
        isinstance(generator, random.SystemRandom)
        or generator is PYTHON
        or generator is NUMPY
        or generator is torch.default_generator
    )


def _origin(generator: _Generator) -> bytes:
    """Return bytes that differ for generators that were seeded differently."""
    if isinstance(generator, torch.Generator):
        return b"%d" % generator.initial_seed()
    if isinstance(generator, np.random.Generator):
        seeds = getattr(generator.bit_generator, "seed_seq", None)  # not every kind has one
        if not isinstance(seeds, np.random.SeedSequence):
            return repr((None, ())).encode()
        entropy = seeds.entropy
        if isinstance(entropy, int) and entropy.bit_length() > _MOST_BITS:
            entropy = None  # seeded by the system: it would differ from run to run
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


def own_states(holder: object) -> list[bytes]:
    """Return the states of the generators that an object holds, pipelines' among them."""
    return [pickle.dumps(state_of(one)) for one in find_instances(holder, GENERATOR_CLASSES)]


def _set_state(generator: _Generator, state: Any) -> None:
    if isinstance(generator, np.random.Generator):
        generator.bit_generator.state = state
    elif isinstance(generator, random.Random):
        generator.setstate(state)
    else:
        generator.set_state(state)
