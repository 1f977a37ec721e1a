"""How long samples take, one byte each: a scale of quarter octaves, from 1 ns to centuries."""

from __future__ import annotations

from typing import Final

BUCKETS: Final = 256
_STEPS_BITS: Final = 2
"""Two bits behind the leading one tell four steps of each octave apart."""


def bucket_of(ns: int) -> int:
    """Return the step of a time on the scale, 0 to 255."""
    shift = ns.bit_length() - _STEPS_BITS - 1
    if shift <= 0:
        return max(0, ns)
    # The leading bit is always set; what remains are 2 bits of the step, after 4 steps an octave.
    return min(BUCKETS - 1, (shift << _STEPS_BITS) + (ns >> shift))


def bounds_ns(bucket: int) -> tuple[int, int]:
    """Return the shortest time of a step of the scale, and the shortest of the next."""
    return _shortest_ns(bucket), _shortest_ns(bucket + 1)


def _shortest_ns(bucket: int) -> int:
    octave = (bucket >> _STEPS_BITS) - 1
    if octave <= 0:
        return bucket
    return ((1 << _STEPS_BITS) + (bucket & ((1 << _STEPS_BITS) - 1))) << octave
