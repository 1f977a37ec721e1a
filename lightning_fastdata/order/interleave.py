"""Parts taken in turn so that every run of them holds each in proportion, with random access.

Two parts are interleaved as the pixels of a straight line are: of the first ``n`` samples,
``floor(n * share + 1/2)`` are of the one. Such a sequence is balanced (Morse and Hedlund, "Symbolic
Dynamics II: Sturmian Trajectories", American Journal of Mathematics 62, 1940): in any run of ``L``
samples each part comes less than once more or less than ``L`` times its share. More parts are
interleaved two by two along Huffman's tree of their weights ("A Method for the Construction of
Minimum-Redundancy Codes", Proceedings of the IRE 40, 1952). A part is then off by less than the sum
of ``weight / weight of the group`` over the groups that it is in, itself included and the whole
excluded. Along Huffman's tree these weights grow at least as the Fibonacci numbers do, so that it
is less than the sum of their reciprocals, 3.36, for any number of parts, run and weights.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count
from typing import TYPE_CHECKING, Any, Final, TypeAlias

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Ints: TypeAlias = NDArray[np.int64]

_WHOLE: Final = 2**20
"""Weights count in parts of this: products with 2**42 samples are exact."""


@dataclass(frozen=True, slots=True)
class _Pair:
    left: _Pair | int
    right: _Pair | int
    share: int
    """Of ``left``, out of ``of``."""
    of: int

    def lefts(self, numbers: Any) -> Any:
        """Return how many of the first so many are of ``left``."""
        return (2 * numbers * self.share + self.of) // (2 * self.of)


class Interleaving:
    """An endless sequence of the numbers of parts, each as often as its weight says.

    Args:
        weights: Of each part, at least 0; not all of them 0. They count in millionths of their sum.
    """

    def __init__(self, weights: Sequence[float]) -> None:
        total = sum(weights)
        numbers = count()
        heap: list[tuple[int, int, _Pair | int]] = [
            (max(1, round(weight / total * _WHOLE)), next(numbers), part)
            for part, weight in enumerate(weights)
            if weight > 0
        ]
        self.parts = len(weights)
        heapq.heapify(heap)
        while len(heap) > 1:
            (one, _, right), (other, _, left) = heapq.heappop(heap), heapq.heappop(heap)
            pair = _Pair(left, right, other, one + other)
            heapq.heappush(heap, (one + other, next(numbers), pair))
        self._root = heap[0][2]

    def at(self, places: Ints) -> tuple[Ints, Ints]:
        """Return the part at each place, and how many of that part come before it; int64."""
        parts, before = np.empty_like(places), np.empty_like(places)
        waiting = [(self._root, np.arange(len(places)), places)]
        while waiting:
            node, which, numbers = waiting.pop()
            if not isinstance(node, _Pair):
                parts[which], before[which] = node, numbers
                continue
            lefts = node.lefts(numbers)
            is_left = node.lefts(numbers + 1) > lefts
            waiting.append((node.left, which[is_left], lefts[is_left]))
            waiting.append((node.right, which[~is_left], (numbers - lefts)[~is_left]))
        return parts, before

    def counts(self, samples: int) -> list[int]:
        """Return how many of the first so many samples are of each part."""
        found = [0] * self.parts
        waiting = [(self._root, samples)]
        while waiting:
            node, number = waiting.pop()
            if isinstance(node, _Pair):
                left = node.lefts(number)
                waiting += [(node.left, left), (node.right, number - left)]
            else:
                found[node] = number
        return found
