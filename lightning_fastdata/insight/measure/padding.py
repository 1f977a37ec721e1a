"""How many tokens batches have, and how much of them is padding, as a few of them show it."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeAlias

import numpy as np
import torch

from lightning_fastdata.batches.staged import StagedBatch
from lightning_fastdata.tree import children, replace_leaves

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from lightning_fastdata.tree import Path
    from lightning_fastdata.types import Batch

Numbers: TypeAlias = "dict[Path, NDArray[Any]]"
Shapes: TypeAlias = "dict[Path, tuple[int, ...]]"
_LOOKED_AT: Final = 24
"""Batches; they show the padding of all to a few percent of it."""
_FEWEST: Final = 4
_MOST_BYTES: Final = 2**24
"""Of a tensor: a larger one would take more than some milliseconds to look through."""
_ENDS: Final = ("cu_seqlens", "cu_seqlens_q", "cu_seq_lens", "cu_seq_lens_q")
"""Names of the ends of packed sequences."""
_LENGTHS: Final = ("length", "lengths", "lens", "seqlens")
"""Last words of the names of lengths."""
_OTHERS: Final = 0.1
"""Part of the batches that may show something else, as a last one of a single sample does."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Padding:
    """How much of the batches that were looked at is padding."""

    share: float
    """Of their tokens, 0 to 1."""
    sorted_share: float
    """The same, if samples of like length among them were put together in batches as large."""
    shown_by: str
    """In words, e.g. ``attention_mask``."""
    batches: int
    """That were looked at."""
    tokens: int
    """Of a batch, with padding: the mean."""
    to_longest_share: float | None = None
    """The same, if each batch were padded to its longest sample; None: it is.

    Else all of them have one width, above the longest sample of some.
    """

    @property
    def left(self) -> float:
        """Part of the tokens that batches without this padding would have, 0 to 1.

        They are padded to their longest sample, or, if they are already, of samples of like length.
        """
        least = self.sorted_share if self.to_longest_share is None else self.to_longest_share
        return (1 - self.share) / (1 - least)


class _Seen(NamedTuple):
    """What one batch shows."""

    where: Path
    """Of the tensor [samples, places, ...] whose places are tokens or padding."""
    shown_by: str
    lengths: NDArray[np.int64]
    """[samples]; tokens of each."""
    places: int
    """Of each sample, with padding."""
    named: bool
    """Its name says what it is; else batches of several widths have to agree."""


class PaddingMeter:
    """Looks at the first batches of a stage, in host memory, and knows the tokens of all later.

    It is silent where batches do not agree, as then they may show something else.
    """

    def __init__(self) -> None:
        self._seen: list[_Seen] = []
        self._others = 0
        """Batches that showed nothing, or something else."""
        self._found: Padding | None = None

    def look(self, batch: Batch) -> None:
        """Look at a batch as its loader gave it, if that is still of use."""
        if len(self._seen) + self._others >= _LOOKED_AT:
            return
        seen = next(_shown(*numbers_in(batch)), None)
        if seen is None or (self._seen and seen[:2] != self._seen[0][:2]):
            self._others += 1
            return
        self._seen.append(seen)
        self._found = self._summed()

    def found(self) -> Padding | None:
        """Return how much is padding; None: that was not shown."""
        return self._found if self._others <= _OTHERS * len(self._seen) else None

    def _summed(self) -> Padding | None:
        seen = self._seen
        if len(seen) < _FEWEST or not (seen[0].named or len({one.places for one in seen}) > 1):
            return None
        lengths = np.sort(np.concatenate([one.lengths for one in seen]))
        places = sum(len(one.lengths) * one.places for one in seen)
        ends = np.linspace(0, len(lengths), len(seen) + 1).round().astype(int)
        sizes = np.diff(ends)
        if not (sizes.all() and lengths.all()):
            return None
        to_longest = sum(len(one.lengths) * int(one.lengths.max()) for one in seen)
        fixed = len({one.places for one in seen}) == 1 and to_longest < places
        in_order = int((sizes * lengths[ends[1:] - 1]).sum())
        return Padding(
            share=1 - int(lengths.sum()) / places,
            sorted_share=1 - int(lengths.sum()) / in_order,
            shown_by=seen[0].shown_by,
            batches=len(seen),
            tokens=places // len(seen),
            to_longest_share=1 - int(lengths.sum()) / to_longest if fixed else None,
        )

    def tokens_of(self, batch: Batch) -> float:
        """Return the tokens of a batch on any device without padding; 0: not known.

        What of it is padding is taken to be as in the batches that were looked at.
        """
        padding = self.found()
        if padding is None:
            return 0.0
        value: Any = batch
        for key in self._seen[0].where:
            value = dict(children(value) or ()).get(key)
        if not isinstance(value, torch.Tensor) or value.ndim < 2:
            return 0.0
        return value.shape[0] * value.shape[1] * (1 - padding.share)


def numbers_in(batch: Batch) -> tuple[Numbers, Shapes]:
    """Return the whole numbers of a batch, those in host memory, and the shapes of all."""
    if isinstance(batch, StagedBatch):
        batch = batch.batch if batch.crossing is None else batch.crossing.source
        batch = batch.batch if isinstance(batch, StagedBatch) else batch
    numbers: Numbers = {}
    shapes: Shapes = {}

    def note(path: Path, leaf: Any) -> Any:
        if isinstance(leaf, torch.Tensor) and leaf.layout is torch.strided:
            shapes[path] = tuple(leaf.shape)
            whole = not (leaf.is_floating_point() or leaf.is_complex())
            if whole and leaf.device.type == "cpu" and leaf.nbytes <= _MOST_BYTES:
                numbers[path] = leaf.numpy()
        return leaf

    replace_leaves(batch, note, depth=3)
    return numbers, shapes


def _shown(numbers: Numbers, shapes: Shapes) -> Iterator[_Seen]:
    """Yield what the numbers of a batch show, what is surest first."""
    for path, found in numbers.items():
        name, ids = str(path[-1]) if path else "", (*path[:-1], "input_ids")
        if name in _ENDS and ids in shapes:
            places = math.prod(shapes[ids])
            yield _Seen(ids, name, np.array([places]), places, named=True)
        holds = {"attention_mask": 1, "padding_mask": 0}.get("_".join(name.split("_")[-2:]))
        marks = holds is not None and found.ndim == 2 and found.size > 0
        if marks and found.min() >= 0 and found.max() <= 1:
            yield _Seen(path, name, (found == holds).sum(1), found.shape[1], named=True)
    yield from _by_lengths(numbers, shapes)
    yield from _by_pad_ids(numbers)


def _by_lengths(numbers: Numbers, shapes: Shapes) -> Iterator[_Seen]:
    """Yield a row of lengths; one without such a name is known by its largest, the width."""
    for path, lengths in numbers.items():
        if lengths.ndim != 1 or len(lengths) < 2 or lengths.dtype == bool or lengths.min() < 1:
            continue
        name = path[-1] if path and isinstance(path[-1], str) else ""
        named = name.lower().rpartition("_")[2] in _LENGTHS
        for where, shape in shapes.items():
            beside = where[:-1] == path[:-1] and len(shape) > 1 and shape[0] == len(lengths)
            if beside and (lengths.max() == shape[1] or (named and lengths.max() < shape[1])):
                yield _Seen(where, name or "lengths", lengths.astype(np.int64), shape[1], named)


def _by_pad_ids(numbers: Numbers) -> Iterator[_Seen]:
    """Yield ids of which one stands at the ends of rows, or their beginnings, and nowhere else."""
    for path, ids in numbers.items():
        if ids.ndim != 2 or ids.dtype == bool or min(ids.shape) < 2:
            continue
        for inwards in (ids[:, ::-1], ids):
            values, counts = np.unique(inwards[:, 0], return_counts=True)
            pad = values[counts.argmax()]
            is_pad = inwards == pad
            inside = (is_pad[:, 1:] & ~is_pad[:, :-1]).any()
            runs = np.logical_and.accumulate(is_pad, axis=1).sum(1)
            runs -= runs.min() > 0  # where every row ends with it, it ends the text, too
            if not inside and runs.min() == 0 and (runs > 1).any():
                yield _Seen(path, f"pad id {pad}", ids.shape[1] - runs, ids.shape[1], named=False)
