"""Mixture: several datasets as one, sampled in proportion to their weights, in an own order."""

from __future__ import annotations

import heapq
import math
import operator
import os
import warnings
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import count
from numbers import Real
from typing import Any, Final, TypeAlias

import numpy as np
from torch.utils.data import Dataset, IterableDataset

from lightning_fastdata.errors import (
    DatasetError,
    FastDataWarning,
    OptionsError,
    check,
    checked_seed,
    is_whole,
)
from lightning_fastdata.order.epoch_order import (
    Counted,
    Ints,
    KeyedPermutation,
    check_whole,
    dataset_length,
    whole,
)
from lightning_fastdata.randomness.seeds import derived_seed
from lightning_fastdata.torch_internals import unsplit_stream
from lightning_fastdata.tree import has_method
from lightning_fastdata.types import Batch, SetsEpoch

Weights: TypeAlias = Mapping[str, float]
"""Weight of each part, by its name; only their ratios count."""
Schedule: TypeAlias = "Weights | Mapping[int, Weights]"
"""Weights, or the weights by the number of the first step in which they hold."""

_TOGETHER: Final = 2**10
"""Places whose samples are located at once: that takes 1 us each, and 0.5 ms for a single one."""
_KEPT: Final = 64
_NONE: Final = object()
_WHOLE: Final = 2**20
"""Sum of the weights when they are rounded to integers: products with 2**42 samples are exact."""
_PACKAGE: Final = __name__.partition(".")[0]


class Mixture(Dataset[Any]):
    """Several datasets as one map-style dataset, which has an order of its own.

    In any 1,000 consecutive samples the number from each part is within 4 of its weight (within 7
    where weights change), see :class:`Interleaving`. A part is read in passes, each in another
    order; :meth:`epochs` tells how many there were. Sample ``i`` is the ``i``-th of the epoch, and
    follows from seed, weights and epoch: any loader that reads the dataset in its own order, on any
    number of ranks, reads the mixture. Draws within a sample are keyed by its place, so that a
    sample that comes twice in an epoch is augmented in two ways. ``FastDataModule`` does not
    shuffle it, resumes it exactly, and logs the proportions.

    A :class:`PackedDataset` or another mixture may be a part; a pass over it is one of its epochs.

    An iterable dataset may be a part. Each process reads all of it in its own order and drops the
    samples that other processes get: read it with one worker. At its end it begins anew.

    Args:
        datasets: The parts, by name.
        weights: Weight of each part, 0 or more; or such weights by the number of the first step in
            which they hold, the first number being 0. Default: the lengths of the parts.
        length: Samples of an epoch. Default: those of all parts together.
        samples_a_step: Samples of a step of all ranks, for the steps of ``weights``. Default: 1, so
            that ``weights`` count samples.
        seed: Seed of the order within the parts.
        shuffle: Whether each pass over a part has another order; False: the order of the part.

    Raises:
        DatasetError: There is no part, one is empty, or one is no dataset.
        OptionsError: Weights are negative, sum up to 0 or name other parts, a schedule does not
            begin at 0, the length of an epoch is not known, or another argument is impossible.

    Example:
        >>> mixture = Mixture({"a": "xyz", "b": range(4)}, {"a": 1, "b": 3}, shuffle=False)
        >>> [mixture[i] for i in range(len(mixture))]
        [0, 'x', 1, 2, 3, 'y', 0]
    """

    has_own_order = True
    """Tells loaders not to shuffle it."""

    def __init__(
        self,
        datasets: Mapping[str, Any],
        weights: Schedule | None = None,
        *,
        length: int | None = None,
        samples_a_step: int = 1,
        seed: int = 0,
        shuffle: bool = True,
    ) -> None:
        if not isinstance(datasets, Mapping):
            raise DatasetError(
                f"The parts of a Mixture are a {type(datasets).__name__}. Give them by name: "
                "Mixture({'name': dataset}, ...)."
            )
        self.datasets = dict(datasets)
        lengths = {name: _length_of(part, name) for name, part in self.datasets.items()}
        if not lengths:
            raise DatasetError(
                "A Mixture needs at least one part: Mixture({'name': dataset}, ...)."
            )
        known = [number for number in lengths.values() if number is not None]
        total = sum(known) if len(known) == len(lengths) else None
        check_whole(length=length)
        check("shuffle", shuffle, isinstance(shuffle, bool), "True and False")
        if total is None and (length is None or weights is None):
            raise OptionsError(
                "A part of the Mixture is a stream, which has no length: give weights=, and say by "
                "length= how many samples an epoch has."
            )
        self.length = int(length or total or 0)
        self.samples_a_step = whole("samples_a_step", samples_a_step)
        self.shuffle = shuffle
        self.seed = checked_seed(seed)
        self.epoch: int = Counted()
        self._lengths = lengths
        schedule = _schedule(lengths if weights is None else weights)
        self._made_with = {
            step * self.samples_a_step: _checked(each, lengths) for step, each in schedule.items()
        }
        self._set(self._made_with)
        self._streams = {
            name: _Stream(part, name)
            for name, part in self.datasets.items()
            if isinstance(part, IterableDataset)
        }

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> Batch:
        """Return the sample at a place of the epoch that was set last."""
        return self.of_epoch(index, self.epoch)

    def of_epoch(self, index: int, epoch: int) -> Batch:
        """Return the sample at a place of any epoch."""
        name, row, number = self._located(index, epoch)
        if name in self._streams:
            return self._streams[name].get(row)
        part = self.datasets[name]
        # A part whose samples change with the epoch has the same samples throughout a pass.
        return part.of_epoch(row, number) if has_method(part, "of_epoch") else part[row]

    def place(self, index: int) -> tuple[str, int]:
        """Return the name of the part that a place's sample comes from, and its index there.

        For a stream, the index is the number of its samples that come before, over all epochs.
        """
        return self._located(index, self.epoch)[:2]

    def _located(self, index: int, epoch: int) -> tuple[str, int, int]:
        """Return the part of a place's sample, its index there, and the number of the pass."""
        index = operator.index(index)  # NumPy's small integers would overflow
        index = index + self.length if index < 0 else index
        if not 0 <= index < self.length:
            raise IndexError(f"There is no sample {index} in an epoch of {self.length}.")
        number, at = divmod(epoch * self.length + index, _TOGETHER)
        parts, rows, passes = _together(self._order, number)
        return self._order.names[parts[at]], rows[at], passes[at]

    def set_epoch(self, epoch: int) -> None:
        """Go to the samples of an epoch, counted from 0; loaders of this package call it."""
        self.epoch = epoch
        for part in self.datasets.values():
            if type(part).__module__.partition(".")[0] == _PACKAGE and hasattr(part, "set_epoch"):
                part.set_epoch(epoch)

    # -- proportions -------------------------------------------------------------------------------

    def weights_at(self, epoch: int, samples: int = 0) -> dict[str, float]:
        """Return the weights, with a sum of 1, after ``samples`` samples of an epoch."""
        return self._order.segment(epoch * self.length + samples).weights

    def counts(self, epoch: int, samples: int = 0) -> dict[str, int]:
        """Return how many samples each part gave in all until ``samples`` samples of an epoch."""
        return self._order.counts(epoch * self.length + samples)

    def epochs(self, epoch: int, samples: int = 0) -> dict[str, float | None]:
        """Return how many passes over each part were made until then; None for a stream."""
        return {
            name: None if (length := self._lengths[name]) is None else number / length
            for name, number in self.counts(epoch, samples).items()
        }

    def _set(self, schedule: dict[int, dict[str, float]]) -> None:
        self._schedule = schedule
        self._order = _Order(schedule, self._lengths, self.seed, shuffle=self.shuffle)

    # -- going on ----------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return the weights as plain data; the loader saves the position."""
        return {
            "weights": [[start, dict(each)] for start, each in self._schedule.items()],
            "lengths": dict(self._lengths),
            "seed": self.seed,
            "parts": {name: part.state_dict() for name, part in self._mixtures.items()},
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take the weights of a saved state, for :meth:`go_on_at`.

        Raises:
            OptionsError: A part of the saved mixture is missing.
        """
        gone = [name for name in state["lengths"] if name not in self._lengths]
        if gone:
            raise OptionsError(
                f"The Mixture of the checkpoint had the parts {', '.join(map(repr, gone))}, "
                "without which it cannot go on. Keep them, with weight 0 from now on."
            )
        then = {"seed": state["seed"], **state["lengths"]}
        now = {"seed": self.seed, **self._lengths}
        other = next((name for name in then if then[name] != now[name]), None)
        if other is not None:
            warnings.warn(
                f"The Mixture of the checkpoint had {then[other]} for {other!r} (samples of a "
                f"part, or the seed), and it is {now[other]} now: passes over parts that have "
                "begun go on in another order, so that samples may come twice or not at all.",
                FastDataWarning,
                stacklevel=2,
            )
        self._saved = state
        for name in state.get("parts", {}).keys() & self._mixtures.keys():
            self._mixtures[name].load_state_dict(state["parts"][name])

    def go_on_at(self, epoch: int, samples: int) -> None:
        """Go on after ``samples`` samples of an epoch, with the state that was loaded.

        Samples before this place follow the weights of the state, and those from it on the weights
        with which the mixture was made.
        """
        saved = vars(self).pop("_saved", None)
        if saved is None:
            return
        none = dict.fromkeys(self._lengths, 0.0)
        before = {int(start): {**none, **each} for start, each in saved["weights"]}
        place = epoch * self.length + samples
        # Not as a state that was loaded before left them: it may lie behind this one.
        made = self._made_with
        now = made[max(start for start in made if start <= place)]
        joined = {start: each for start, each in before.items() if start < place}
        if not joined or joined[max(joined)] != now:
            joined[place] = now
        self._set(joined | {at: each for at, each in made.items() if at > place})
        for name, part in self._mixtures.items():
            passes, rows = divmod(self.counts(epoch, samples)[name], len(part))
            # A pass over it that has begun in an order that was drawn ends with its weights.
            part.go_on_at(*((passes + 1, 0) if rows and self.shuffle else (passes, rows)))

    @property
    def _mixtures(self) -> dict[str, Mixture]:
        """The parts that are mixtures themselves."""
        return {name: part for name, part in self.datasets.items() if isinstance(part, Mixture)}


def _length_of(part: Any, name: str) -> int | None:
    length = dataset_length(part)
    if isinstance(part, IterableDataset):
        return None
    if length is None or not hasattr(part, "__getitem__"):
        raise DatasetError(
            f"Part {name!r} of the Mixture is a {type(part).__name__}. Give a dataset with "
            "__getitem__() and __len__(), or an IterableDataset."
        )
    if length == 0:
        raise DatasetError(f"Part {name!r} of the Mixture is empty. Leave it out.")
    return length


def _schedule(weights: Any) -> Mapping[int, Any]:
    """Return weights by the number of the first step in which they hold."""
    each = list(weights.values()) if isinstance(weights, Mapping) else []
    if not any(isinstance(one, Mapping) for one in each):
        return {0: weights}
    whole = all(isinstance(one, Mapping) for one in each)
    whole = whole and all(is_whole(step, 0) for step in weights)
    if not whole or min(weights) != 0:
        raise OptionsError(
            f"weights of a Mixture change at {list(weights)!r:.200}; give the weights of each part "
            "by the numbers of the steps from which they hold, the first of them 0."
        )
    return {int(step): weights[step] for step in sorted(weights)}


def _checked(weights: Any, names: Mapping[str, object]) -> dict[str, float]:
    """Return weights with a sum of 1, in the order of the parts."""
    if not isinstance(weights, Mapping) or weights.keys() != names.keys():
        raise OptionsError(
            f"The weights of a Mixture are {weights!r:.300}; give one for each part by its name, "
            f"as {dict.fromkeys(names, 1)}. 0 leaves a part out."
        )
    given = {name: weights[name] for name in names}
    fine = all(isinstance(one, Real) and 0 <= float(one) < math.inf for one in given.values())
    largest = max(map(float, given.values())) if fine else 0.0
    if not largest:
        raise OptionsError(
            f"The weights of a Mixture are {given!r:.300}; give numbers from 0 that do not sum up "
            "to 0."
        )
    ratios = {name: float(one) / largest for name, one in given.items()}  # their sum is finite
    return {name: ratio / sum(ratios.values()) for name, ratio in ratios.items()}


@dataclass(frozen=True, eq=False, slots=True)
class _Segment:
    first: int
    """Number of the segment's first sample, counted over all epochs."""
    weights: dict[str, float]
    parts: Interleaving
    before: list[int]
    """Number of samples of each part that come before the segment."""

    def counts(self, samples: int) -> list[int]:
        """Return how many of the first ``samples`` samples are of each part."""
        more = self.parts.counts(samples - self.first)
        return [one + other for one, other in zip(self.before, more, strict=True)]


class _Order:
    """The part, and the index in it, of each sample of all epochs."""

    def __init__(
        self,
        schedule: Mapping[int, Mapping[str, float]],
        lengths: Mapping[str, int | None],
        seed: int,
        *,
        shuffle: bool,
    ) -> None:
        self.names, self.lengths = tuple(lengths), tuple(lengths.values())
        self.seeds = [derived_seed(seed, name) if shuffle else None for name in lengths]
        """Seed of the order of each part; None: the part keeps its own order."""
        self.segments: list[_Segment] = []
        for first, weights in sorted(schedule.items()):
            before = self.segments[-1].counts(first) if self.segments else [0] * len(lengths)
            parts = Interleaving(list(weights.values()))
            self.segments.append(_Segment(first, dict(weights), parts, before))

    def segment(self, place: int) -> _Segment:
        number = bisect_right(self.segments, place, key=lambda segment: segment.first)
        return self.segments[max(0, number - 1)]

    def counts(self, samples: int) -> dict[str, int]:
        return dict(zip(self.names, self.segment(samples).counts(samples), strict=True))

    def at(self, places: Any) -> tuple[Any, Any, Any]:
        """Return each place's part, index in that part, and number of the pass over it; int64."""
        firsts = [segment.first for segment in self.segments]
        in_segment = np.searchsorted(firsts, places, side="right") - 1
        parts, rows = np.empty_like(places), np.empty_like(places)
        for number in np.unique(in_segment):
            segment, which = self.segments[number], in_segment == number
            found, before = segment.parts.at(places[which] - segment.first)
            parts[which], rows[which] = found, before + np.array(segment.before)[found]
        passes = np.zeros_like(places)
        for part in np.unique(parts):
            which = parts == part
            rows[which], passes[which] = self._rows(int(part), rows[which])
        return parts, rows, passes

    def _rows(self, part: int, numbers: Any) -> tuple[Any, Any]:
        """Return the indices in a part, and the passes, of samples numbered over all passes."""
        length, seed = self.lengths[part], self.seeds[part]
        if length is None:
            return numbers, 0
        passes, rows = np.divmod(numbers, length)
        for number in np.unique(passes) if seed is not None else ():
            order = KeyedPermutation(length, seed=seed or 0, epoch=int(number))
            rows[passes == number] = order.at(rows[passes == number])
        return rows, passes


@lru_cache(maxsize=_KEPT)  # kept outside the dataset, so that reading does not change its state
def _together(order: _Order, number: int) -> tuple[list[int], list[int], list[int]]:
    start = number * _TOGETHER
    parts, rows, passes = order.at(np.arange(start, start + _TOGETHER))
    return parts.tolist(), rows.tolist(), passes.tolist()


@dataclass(frozen=True, slots=True)
class _Pair:
    left: _Pair | int
    right: _Pair | int
    share: int
    """Weight of ``left``; ``left`` and ``right`` together have the weight ``of``."""
    of: int

    def lefts(self, numbers: Any) -> Any:
        """Return how many of the pair's first ``numbers`` samples are of ``left``."""
        return (2 * numbers * self.share + self.of) // (2 * self.of)


class Interleaving:
    """An endless sequence of the numbers of parts, each as often as its weight says.

    Every run of it holds each part in proportion, with random access. Two parts are interleaved as
    the pixels of a straight line are: of the first ``n`` samples, ``floor(n * share + 1/2)`` are of
    the first part. Such a sequence is balanced (Morse and Hedlund, "Symbolic Dynamics II: Sturmian
    Trajectories", American Journal of Mathematics 62, 1940): in any run of ``L`` samples each part
    comes less than once more or less than ``L`` times its share. More parts are interleaved two by
    two along Huffman's tree of their weights ("A Method for the Construction of Minimum-Redundancy
    Codes", Proceedings of the IRE 40, 1952). A part is then off by less than the sum of
    ``weight / weight of the group`` over the groups that it is in, itself included and the whole
    excluded. Along Huffman's tree these weights grow at least as the Fibonacci numbers do, so that
    it is less than the sum of their reciprocals, 3.36, for any number of parts, run and weights.

    Args:
        weights: Weight of each part, 0 or more, not all of them 0. Weights are rounded to about a
            millionth of their sum.
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
        """Return each place's part, and how many samples of that part come before it; int64."""
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
        """Return how many of the first ``samples`` samples are of each part."""
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


class _Stream:
    """The samples of a stream by number, over all passes; it is quickest in ascending order."""

    def __init__(self, stream: IterableDataset[Any], name: str) -> None:
        self._stream, self._name = stream, name
        self._samples: Iterator[Any] | None = None
        self._next = self._process = 0
        self._last: Batch = None

    def __getstate__(self) -> dict[str, object]:
        return {**self.__dict__, "_samples": None, "_last": None}

    def get(self, number: int) -> Batch:
        """Return a sample; samples before it that were not asked for are read and dropped.

        The last one may be asked for again. For an earlier one, the stream is read from its start.
        """
        samples = self._samples if self._process == os.getpid() else None
        if samples is None or number < self._next - 1:
            samples, self._next, self._process = self._passes(), 0, os.getpid()
        self._samples = None  # stays so if reading raises
        with unsplit_stream():
            while self._next <= number:
                self._last = next(samples)
                self._next += 1
        self._samples = samples
        return self._last

    def _passes(self) -> Iterator[Any]:
        for number in count():
            if isinstance(self._stream, SetsEpoch):
                self._stream.set_epoch(number)
            sample = _NONE
            for sample in self._stream:
                yield sample
            if sample is _NONE:
                raise DatasetError(
                    f"Part {self._name!r} of the Mixture, a {type(self._stream).__name__}, gave no "
                    f"sample in pass {number}. A stream has to begin anew when it is iterated "
                    "again."
                )
