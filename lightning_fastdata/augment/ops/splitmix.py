"""Random numbers for every pixel that depend on a seed and a position alone.

Number ``i`` of a sample is a hash of its seed and ``i``, in 64-bit integer arithmetic, so that
every device, batch size and order of work gives the same bits, and nothing is kept between calls.
The hash is the finalizer of SplitMix64 (Steele, Lea and Flood, "Fast splittable pseudorandom
number generators", OOPSLA 2014) over a Weyl sequence that is combined with a second key.
"""

from __future__ import annotations

import math
from typing import Any, Final

import numpy as np
import torch

_WEYL: Final = 0x9E3779B97F4A7C15 - (1 << 64)
_FIRST: Final = 0xBF58476D1CE4E5B9 - (1 << 64)
_SECOND: Final = 0x94D049BB133111EB - (1 << 64)
_LOW: Final = 0xFFFFFFFF


def peek_seed(generator: np.random.Generator) -> np.ndarray:
    """Return a seed, int64 ``[2]``, of the present state of a generator, which stays as it is."""
    bits: Any = generator.bit_generator
    state = bits.state
    seed = np.array(bits.random_raw(2), np.uint64).view(np.int64)
    bits.state = state
    # After a 32-bit draw the words to come may be those that came before it.
    seed[0] ^= state.get("has_uint32", 0)
    return seed


def _shifted(words: torch.Tensor, count: int) -> torch.Tensor:
    """Return the words shifted right, with zeros from the left."""
    return (words >> count).bitwise_and_((1 << (64 - count)) - 1)


def words(seed: torch.Tensor, count: int, stream: int = 0) -> torch.Tensor:
    """Return words, int64 ``[n, count]``, of one of the independent streams of seeds ``[n, 2]``."""
    position = torch.arange(1, count + 1, device=seed.device) + (stream << 40)
    # Multiplied, so that second keys of a few bits differ in many.
    mixed = (position * _WEYL + seed[:, :1]).bitwise_xor_(seed[:, 1:] * _SECOND)
    mixed = mixed.bitwise_xor_(_shifted(mixed, 30)).mul_(_FIRST)
    mixed = mixed.bitwise_xor_(_shifted(mixed, 27)).mul_(_SECOND)
    return mixed.bitwise_xor_(_shifted(mixed, 31))


def normal(seed: torch.Tensor, count: int, stream: int = 0) -> torch.Tensor:
    """Return standard normal numbers, float32 ``[n, count]``.

    By Box and Muller ("A note on the generation of random normal deviates", 1958), at most 6.7 from
    zero. Logarithm and cosine differ in the last bit between devices.
    """
    both = words(seed, -(-count // 2), stream)
    radius = ((_shifted(both, 32) + 1).float() * 2.0**-32).log().mul_(-2).sqrt()
    angle = (both & _LOW).float() * (2.0**-32 * 2 * math.pi)
    return torch.cat([radius * angle.cos(), radius * angle.sin()], 1)[:, :count]
