"""The batches of indices that a loader reads in an epoch, from any position on, and their digest.

An order that is a function of (seed, epoch) goes on by arithmetic. Of any other sampler the first
batches are drawn again and dropped, from the random state that it began the epoch with; whether
they are those of before is seen by their digest.
"""

from __future__ import annotations

import base64
import sys
import warnings
import zlib
from array import array
from collections.abc import Iterable, Iterator, Sized
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from itertools import chain, islice
from typing import Any, Final, Protocol, TypeAlias, cast, runtime_checkable

import numpy as np
import torch
from torch.utils.data import (
    BatchSampler,
    RandomSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from lightning_fastdata.errors import FastDataWarning, OptionsError
from lightning_fastdata.order.buckets import BucketOrder
from lightning_fastdata.order.epoch_order import (
    EpochOrder,
    cut,
    dataset_length,
    parts_of,
    steps_in,
)
from lightning_fastdata.order.ranks import Step, deciding, keyed, share_in
from lightning_fastdata.order.samplers import (
    draws_at_start,
    epoch_order,
    index_batches,
    listed,
    rows_in,
    shared_items,
)
from lightning_fastdata.randomness.global_generators import kept_random_state

AnyOrder: TypeAlias = EpochOrder | BucketOrder
Drawn: TypeAlias = dict[str, Any]
"""What a sampler drew an epoch from, as plain data; empty: nothing is known."""

_HASHED_AT_ONCE: Final = 2**16
_DIGESTS_KEPT: Final = 2**12
"""Batches that are read ahead of the training at most."""
_PLAIN: Final = np.dtype("<i8")
"""Of indices, as they are hashed."""
_CHECKED: Final = 2**27
"""Samples whose digest is checked: an order of (seed, epoch) takes up to 30 ns for each."""
_DRAW_FROM_TORCH: Final = (SubsetRandomSampler, WeightedRandomSampler)
"""Without a generator they draw from torch's own when their first index is asked for."""


@runtime_checkable
class Stateful(Protocol):
    """An object that saves and restores its state, as torchdata's protocol has it."""

    def state_dict(self) -> dict[str, Any]:
        """Return the state, as plain data."""

    def load_state_dict(self, state_dict: dict[str, Any], /) -> None:
        """Go on from a state."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    """Where in an epoch to begin."""

    batches: int = 0
    """Batches of this rank that were delivered before."""
    samples: int = 0
    """Samples that all ranks were given before."""
    late: tuple[int, ...] = ()
    """Numbers of batches among them that were not delivered, and come first."""
    same_batches: bool = True
    """They were cut as they are now; False: only ``samples`` counts."""
    drawn: Drawn | None = None
    """What the sampler drew the epoch from."""
    digest: int | None = None
    """Of the indices before, as they were delivered; None: not known."""


class EpochIndices:
    """Iterable over epochs of the batches of indices, each from ``start`` on.

    Args:
        source: A batch sampler, or a sampler whose items are taken one by one.
        arrays: Yield int64 arrays where that gives the same indices.
        seed: By which, with the epoch, draws from global generators are keyed; None: they are not.
    """

    def __init__(
        self, source: Iterable[Any], *, arrays: bool = False, seed: int | None = None
    ) -> None:
        self.source = source
        self.arrays = arrays
        self._share = share_in(source)
        self._seed = seed if self._share is None else self._share.seed
        self.start = Start()
        """Of the epoch that begins next."""
        self.epoch = 0
        """Its number."""
        self.drawn_epoch: int | None = None
        """The number of the epoch that the sampler drew last."""
        self._taken = _Taken()
        self._began_at = Start()
        self._drawn = self._to_draw()
        self._hashed: tuple[AnyOrder, int, int] | None = None

    @property
    def sampler(self) -> object:
        """What decides the order."""
        return getattr(self.source, "sampler", self.source)

    def _to_draw(self) -> Drawn:
        return _drawn_from(deciding(self.source), keyed=self._seed is not None)

    def __len__(self) -> int:
        """Return the length of a whole epoch, as torch's iterators tell it."""
        return len(cast("Sized", self.source))

    def __iter__(self) -> Iterator[Any]:
        """Begin an epoch."""
        start = self._began_at = self.start
        epoch: int = getattr(self.sampler, "epoch", 0)
        order = epoch_order(self.source, epoch)
        if order is None:
            return self._watched(start)
        if start.drawn:
            _restore(deciding(self.source), start.drawn)
            self._drawn = self._to_draw()
            order = cast("AnyOrder", epoch_order(self.source, epoch))
        if start.digest is not None and start.samples <= _CHECKED:
            _check(start, self.digest(epoch, start.samples, 0), deciding(self.source))
        late = map(order.batch, start.late if start.same_batches else ())
        left = _left_of(order, start.samples)
        if left is None:
            _tell_of_too_few(order, start)
        rest = chain(late, () if left is None else left.batches())
        return rest if self.arrays else map(listed, rest)

    def drawn(self) -> Drawn:
        """Return what the sampler drew the epoch from that began last."""
        return self._drawn

    def to_draw(self) -> Drawn:
        """Return what the sampler is going to draw the next epoch from, where it holds that."""
        drawn = self._to_draw()
        held = {name: drawn[name] for name in ("sampler", "generator") if name in drawn}
        return {"ahead": held} if held else {}

    def prepare(self, drawn: Drawn) -> None:
        """Set the sampler to what :meth:`to_draw` returned."""
        _restore(deciding(self.source), drawn.get("ahead", {}))

    def digest(self, epoch: int, samples: int, batches: int) -> int | None:
        """Return the CRC-32 of the indices of an epoch before a position; None: not known.

        The position is given as samples of all ranks, and as batches of this one.

        It is that of all ranks; of a sampler that splits itself among them, of this rank. Of an
        order that is not known by (seed, epoch), it is of the epoch that began last. Indices count
        as little-endian int64, however they are put into batches. Of an order that is
        known so, it is not made of more samples than are checked: on a thousand ranks they pass in
        a minute, and would take longer than ten seconds.
        """
        order = epoch_order(self.source, epoch)
        if order is None:
            return self._taken.before(batches)[0]
        if samples > _CHECKED:
            return None
        order = replace(order, rank=0, world_size=1)
        done, crc = 0, 0
        if self._hashed is not None and self._hashed[0] == order and self._hashed[1] <= samples:
            _, done, crc = self._hashed
        bounds = ((done + a, done + b) for a, b in cut(samples - done, _HASHED_AT_ONCE))
        for part in parts_of(order.samples(), bounds):
            crc = zlib.crc32(part.astype("<i8", copy=False).tobytes(), crc)
        self._hashed = order, samples, crc
        return crc

    def samples(self, epoch: int, batches: int) -> int | None:
        """Return how many samples all ranks had after so many batches of each; None: not known."""
        order, begun = epoch_order(self.source, epoch), self._began_at
        if order is None:
            return self._taken.before(batches)[1]
        if batches < begun.batches or self.epoch != epoch:
            begun = Start()
        left = _left_of(order, begun.samples)
        if left is None:
            return begun.samples
        return left.samples_before(min(batches - begun.batches, len(left)))

    def batches_left(self, epoch: int, start: Start) -> int | None:
        """Return how many batches an epoch has behind a position; None: not known."""
        order, share, source = epoch_order(self.source, epoch), self._share, self.source
        if order is not None:
            left = _left_of(order, start.samples)
            return 0 if left is None else len(left)
        items = dataset_length(deciding(source) if share is None else share.source)
        if items is None:
            return None
        if share is not None:
            rows = 1 if share.gives_samples else rows_in(share.source)
            done = start.batches * share.num_replicas if rows is None else start.samples // rows
            return share.number_of_steps(items - done)
        if type(source) is not BatchSampler:
            return None
        return steps_in(items - start.samples, source.batch_size, drop_last=source.drop_last)

    def _watched(self, start: Start) -> Iterator[Any]:
        """Return the batches of an order that is not known before it is drawn."""
        # What is shared out goes on by samples, unless some of its steps come first.
        by_steps = self._share is None or bool(start.late) or not start.batches
        again = start.batches if by_steps and start.same_batches else None
        if again is None:
            self._taken = _Taken(start.batches, start.digest, start.samples)
        else:
            self._taken = _Taken()
        return self._from(start, again, self._taken)

    def _from(self, start: Start, again: int | None, taken: _Taken) -> Iterator[Any]:
        """Yield batches behind ``again`` steps, or, if that is None, behind the start's samples."""
        share, decides = self._share, deciding(self.source)
        source = self.source if share is None else share.source
        if start.drawn:
            source = _drawing_again(source, decides, start.drawn)
        # Not before: torch draws a seed of its own between iter() and the first index.
        self._drawn, self.drawn_epoch = start.drawn or self._to_draw(), self.epoch
        steps = self._steps(source, start if again is None else Start(), taken)
        if self._seed is not None:
            made, once = steps, draws_at_start(decides)
            steps = keyed(lambda: made, self._seed, self.epoch, once=once)
        late = []
        with _as_before(start.drawn):
            for number, step in enumerate(islice(steps, again or 0)):
                taken.add(step.whole)
                if number in start.late:
                    late.append(step.own)
            if again:
                _check(start, taken.before(again)[0], decides)
            first = list(islice(steps, 1))
        lists = share is not None and share.gives_samples and not self.arrays
        for own in late:
            yield listed(own) if lists else own
        for step in chain(first, steps):
            taken.add(step.whole)
            yield listed(step.own) if lists else step.own

    def _steps(self, source: Iterable[Any], start: Start, taken: _Taken) -> Iterator[Step]:
        """Return the steps of a source, or of what one shares out, behind a start's samples."""
        share, samples, size = self._share, start.samples, 1
        if share is not None and share.gives_samples:
            size = share.full
        elif share is None and type(source) is BatchSampler:
            size = source.batch_size
        if samples % size:  # batches of another size ended there, and all are cut anew
            source, samples = _rest_of(source, samples), 0
        if share is not None:
            items = shared_items(share, source)
        else:
            items = index_batches(source) if self.arrays else source
        if samples:
            items = _behind(items, start, taken, deciding(self.source))
        return (Step((item,), item) for item in items) if share is None else share.steps(items)


def _left_of(order: AnyOrder, samples: int) -> AnyOrder | None:
    """Return an order from behind so many samples on; None: the rest cannot be shared evenly."""
    try:
        return replace(order, start=samples)
    except OptionsError:
        return None


def _tell_of_too_few(order: AnyOrder, start: Start) -> None:
    warnings.warn(
        f"{len(order.samples()) - start.samples} samples are left of this epoch, of which "
        f"{order.world_size} ranks cannot have as many batches each: they are left out of it. "
        "Later epochs are whole.",
        FastDataWarning,
        stacklevel=3,
    )


def _check(start: Start, found: int | None, sampler: object) -> None:
    if start.digest is not None and found != start.digest:
        warnings.warn(
            f"The first {start.batches} batches of this epoch are not those that were delivered "
            f"before the training was saved: {type(sampler).__name__} gives another order now. The "
            f"epoch goes on with batch {start.batches} of the new order, so that samples may come "
            "twice or not at all in it. Give the sampler a seed and set_epoch(), or state_dict() "
            "and load_state_dict().",
            FastDataWarning,
            stacklevel=2,
        )


# -- what a sampler draws an epoch from ------------------------------------------------------------


def _drawn_from(sampler: object, *, keyed: bool) -> Drawn:
    """Return what a sampler is about to draw an epoch from."""
    if isinstance(sampler, Stateful):
        return {"sampler": sampler.state_dict()}
    generator = getattr(sampler, "generator", None)
    if isinstance(generator, torch.Generator):
        return {"generator": _packed(generator.get_state())}
    if keyed:
        return {}
    if type(sampler) is RandomSampler:
        generator = torch.Generator()
        generator.set_state(torch.get_rng_state())
        return {"draw": int(torch.empty((), dtype=torch.int64).random_(generator=generator))}
    return {"torch": _packed(torch.get_rng_state())} if type(sampler) in _DRAW_FROM_TORCH else {}


def _restore(sampler: object, drawn: Drawn) -> None:
    """Set a sampler, or the generator that it holds, to what an epoch was, or will be, drawn from.

    Raises:
        OptionsError: The state of a generator was expected, and something else was saved.
    """
    if "sampler" in drawn and isinstance(sampler, Stateful):
        sampler.load_state_dict(drawn["sampler"])
    generator = getattr(sampler, "generator", None)
    if "generator" in drawn and isinstance(generator, torch.Generator):
        generator.set_state(_unpacked(drawn["generator"]))


def _drawing_again(source: Iterable[Any], sampler: Any, drawn: Drawn) -> Iterable[Any]:
    """Return what yields the indices of a sampler that draws from what it drew from before."""
    _restore(sampler, drawn)
    if "draw" not in drawn or type(sampler) is not RandomSampler:
        return source
    generator = torch.Generator()
    generator.manual_seed(int(drawn["draw"]))
    again = RandomSampler(
        sampler.data_source, sampler.replacement, sampler.num_samples, generator=generator
    )
    if type(source) is BatchSampler:
        return BatchSampler(again, source.batch_size, source.drop_last)
    return again if source is sampler else source


@contextmanager
def _as_before(drawn: Drawn | None) -> Iterator[None]:
    """Have torch's generator in the block in the state that the epoch was drawn from."""
    if not drawn or "torch" not in drawn:
        yield
        return
    with kept_random_state(("torch",)):
        torch.set_rng_state(_unpacked(drawn["torch"]))
        yield


# -- what was taken of an epoch --------------------------------------------------------------------


def _rest_of(source: Any, samples: int) -> Iterable[Any]:
    """Return a sampler, or batches of it of the present size, without its first samples."""
    if type(source) is not BatchSampler:
        return _Rest(source, samples)
    rest: Any = _Rest(source.sampler, samples)
    return BatchSampler(rest, source.batch_size, source.drop_last)


class _Rest:
    def __init__(self, sampler: Iterable[int], skipped: int) -> None:
        self.sampler, self.skipped = sampler, skipped

    def __iter__(self) -> Iterator[int]:
        return islice(iter(self.sampler), self.skipped, None)


def _behind(items: Iterable[Any], start: Start, taken: _Taken, sampler: object) -> Iterator[Any]:
    """Yield batches without the samples before a start, which may end within one of them."""
    before, crc = start.samples, 0
    for item in items:
        rows = _rows(item)
        if before:
            crc = zlib.crc32(_as_bytes(item if before >= rows else item[:before]), crc)
            if before <= rows:
                taken.begin(start.batches, crc, start.samples)
                _check(start, crc, sampler)
        if before < rows:
            yield item[before:] if before else item
        before = max(0, before - rows)


def _rows(batch: object) -> int:
    return len(batch) if isinstance(batch, list | tuple | np.ndarray) else 1


class _Taken:
    """The digest and the number of the indices of an epoch before each of its last steps."""

    def __init__(self, step: int = 0, crc: int | None = 0, samples: int = 0) -> None:
        self.begin(step, crc, samples)

    def begin(self, step: int, crc: int | None, samples: int) -> None:
        """Count on from a step, of what was taken before."""
        self._step = step
        self._before = {step: (crc, samples)}

    def add(self, whole: tuple[Any, ...]) -> None:
        """Count a step of all ranks in."""
        crc, samples = self._before[self._step]
        for batch in whole:
            crc = None if crc is None else zlib.crc32(_as_bytes(batch), crc)
            samples += _rows(batch)
        self._step += 1
        self._before[self._step] = crc, samples
        self._before.pop(self._step - _DIGESTS_KEPT, None)

    def before(self, step: int) -> tuple[int | None, int | None]:
        """Return the digest, and how many samples all ranks had, before a step; None: not known."""
        return self._before.get(step, (None, None))


def _as_bytes(batch: object) -> Any:
    if type(batch) is np.ndarray and batch.dtype == _PLAIN and batch.flags.c_contiguous:
        return batch
    if type(batch) is list and sys.byteorder == "little":
        with suppress(TypeError, OverflowError):  # which other lists raise
            return array("q", batch).tobytes()  # in a half of NumPy's time
    if isinstance(batch, np.ndarray | list | tuple | int):
        numbers = np.asarray(batch)
        if numbers.dtype.kind in "iu":
            return numbers.astype("<i8", copy=False).tobytes()
    # One after another, so that another cut of the same indices has the same digest.
    items = batch if isinstance(batch, list) else [batch]
    return "".join(f"{item!r}," for item in items).encode()


def _packed(state: torch.Tensor) -> str:
    """Return the state of a generator as text; zlib, as half of a Mersenne Twister's is zeros."""
    return base64.b64encode(zlib.compress(state.numpy().tobytes())).decode()


def _unpacked(text: str) -> torch.Tensor:
    try:
        data = zlib.decompressobj().decompress(base64.b64decode(text, validate=True), 2**16)
        state = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        torch.Generator().set_state(state)
    except (ValueError, TypeError, RuntimeError, zlib.error) as error:
        raise OptionsError(
            "The state of a sampler's generator was expected in the state of a FastDataLoader, "
            f"and {text!r:.60} is none ({error}). Give what FastDataLoader.state_dict() returned."
        ) from error
    return state
