"""The randomness of one sample: found again from its key, whoever draws it.

Albumentations 2.0.8 gives every DataLoader worker the same random streams, and gives every
transform of a seeded ``Compose`` the same stream as its neighbours. Reseeding each top-level
pipeline with one shared pair of generators before every sample removes both, and makes a sample
depend on nothing but ``(seed, epoch, index)``.
"""

from __future__ import annotations

import functools
import hashlib
import random
import struct
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Final

import numpy as np

if TYPE_CHECKING:
    from lightning_fastdata.types import SampleKey

_NOTHING_DRAWN: Final = (0, 0, 0, 0)


def reseed(composes: Sequence[Any], key: SampleKey) -> None:
    """Give each top-level pipeline the random state that belongs to one sample.

    All transforms of one pipeline share one pair of generators, so they draw one after the other
    from the same stream; different pipelines of one dataset get different streams. NumPy's
    generator is Philox (a counter-based generator), so that setting it costs no mixing.

    Args:
        composes: pipelines (``A.Compose`` or single transforms), in a fixed order.
        key: seed, epoch and index of the sample. Any integers, negative ones too.
    """
    for position, compose in enumerate(composes):
        if not hasattr(compose, "set_random_state"):
            # Another version: its transforms draw in lockstep, but by sample all the same.
            compose.set_random_seed(int.from_bytes(_digest(key, position)[:4], "little"))
            continue
        generator = getattr(compose, "random_generator", None)
        if generator is None or type(generator.bit_generator) is not np.random.Philox:
            generator = np.random.Generator(np.random.Philox(key=0))
        python = random.Random(_seed(generator, key, position))
        compose.set_random_state(generator, python)


def reseeder(compose: object) -> Callable[[SampleKey], None]:
    """Return what does to one pipeline as :func:`reseed` does, at less cost.

    Args:
        compose: a pipeline that nobody else reseeds, and whose transforms stay as they are: it is
            given its generators once, now.
    """
    if not hasattr(compose, "set_random_state"):
        return functools.partial(reseed, (compose,))
    generator, python = np.random.Generator(np.random.Philox(key=0)), random.Random(0)
    compose.set_random_state(generator, python)
    return lambda key: python.seed(_seed(generator, key))


def _digest(key: SampleKey, position: int) -> bytes:
    text = b"%d,%d,%d,%d" % (*key, position)
    return hashlib.blake2b(text, digest_size=32).digest()


def _seed(generator: np.random.Generator, key: SampleKey, position: int = 0) -> int:
    """Seed NumPy's generator, and return what to seed Python's with."""
    first, second, rest = struct.unpack("<QQ16s", _digest(key, position))
    # Tuples, not arrays, whose numbers would be taken out one by one.
    generator.bit_generator.state = {
        "bit_generator": "Philox",
        "state": {"counter": _NOTHING_DRAWN, "key": (first, second)},
        "buffer": _NOTHING_DRAWN,
        "buffer_pos": 4,
        "has_uint32": 0,
        "uinteger": 0,
    }
    return int.from_bytes(rest, "little")
