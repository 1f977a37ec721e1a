"""Which documents come into one pack, so that few packs hold all of them."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import defaultdict
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from lightning_fastdata.order.epoch_order import Ints


def best_fit(lengths: Ints, tokens: int) -> Ints:
    """Return the number of the pack of each document, int64 [documents].

    Best fit decreasing: documents come the longest first, and each goes where the least room is
    left that suffices.

    Args:
        lengths: Of the documents, the longest first, from 1 to ``tokens``.
        tokens: Tokens of a pack.
    """
    numbers, packs = [], 0
    rooms: list[int] = []  # that packs have left, in order
    having: defaultdict[int, list[int]] = defaultdict(list)  # room -> packs
    for length in lengths.tolist():
        place = bisect_left(rooms, length)
        if place < len(rooms):
            room = rooms[place]
            pack = having[room].pop()
            if not having[room]:
                del rooms[place]
        else:
            room, pack, packs = tokens, packs, packs + 1
        numbers.append(pack)
        if room > length:
            if not having[room - length]:
                insort(rooms, room - length)
            having[room - length].append(pack)
    return np.array(numbers, np.int64)
