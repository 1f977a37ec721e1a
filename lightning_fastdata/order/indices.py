"""The batches of indices that a loader reads in an epoch, from any position on, and their digest.

An order that is a function of (seed, epoch) goes on by arithmetic. Of any other sampler the first
batches are drawn again and dropped, from the random state that it began the epoch with; whether
they are those of before is seen by their digest.
"""

from __future__ import annotations

import base64
import copy
import re
import sys
import warnings
import zlib
from array import array
from collections import deque
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
    Sampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from lightning_fastdata.errors import FastDataWarning, OptionsError
from lightning_fastdata.order.buckets import BucketOrder
from lightning_fastdata.order.epoch_order import EpochOrder, cut, dataset_length, parts_of
from lightning_fastdata.order.ranks import KeyedDraws, Step, deciding, share_in, tell_samplers
from lightning_fastdata.order.samplers import (
    draws_at_start,
    epoch_order,
    index_batches,
    listed,
    rows_in,
    shared_items,
    shared_steps,
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
        self._ahead = _Digests(Start(), drawn_again=True)
        self._began_at = Start()
        self._began = self._beginning()
        self._hashed: tuple[AnyOrder, int, int] | None = None

    @property
    def sampler(self) -> object:
        """What decides the order."""
        return getattr(self.source, "sampler", self.source)

    def _beginning(self, again: Drawn | None = None) -> _Began:
        return _Began(deciding(self.source), again, keyed=self._seed is not None)

    def __len__(self) -> int:
        """Return the length of a whole epoch, as torch's iterators tell it."""
        return len(cast("Sized", self.source))

    def __iter__(self) -> Iterator[Any]:
        """Begin an epoch."""
        start = self._began_at = self.start
        epoch: int = getattr(self.sampler, "epoch", 0)
        known = epoch_order(self.source, epoch)
        if known is not None and start.drawn:
            _restore(deciding(self.source), start.drawn)
            self._began = self._beginning()
            known = epoch_order(self.source, epoch)
        if known is not None:
            if not start.samples:
                return self._plain(self.source)
            if start.digest is not None and start.samples <= _CHECKED:
                _check(start, self.digest(epoch, start.samples, 0), deciding(self.source))
            late = map(known.batch, start.late if start.same_batches else ())
            left = _left_of(known, start.samples)
            if left is None:
                _tell_of_too_few(known, start)
            rest = chain(late, () if left is None else left.batches())
            return rest if self.arrays else (batch.tolist() for batch in rest)
        # What is shared out goes on by samples, unless some of its steps come first.
        by_steps = self._share is None or bool(start.late) or not start.batches
        self._ahead = _Digests(start, drawn_again=start.same_batches and by_steps)
        return self._watched(start, self._ahead)

    def drawn(self) -> Drawn:
        """Return what the sampler drew the epoch from that began last."""
        return self._began.drawn()

    def to_draw(self) -> Drawn:
        """Return what the sampler is going to draw the next epoch from, where it holds that."""
        drawn = self._beginning().drawn()
        held = {name: drawn[name] for name in ("sampler", "generator") if name in drawn}
        return {"ahead": held} if held else {}

    def prepare(self, drawn: Drawn) -> None:
        """Set the sampler to what :meth:`to_draw` returned, which is of the epoch before."""
        sampler, held = deciding(self.source), drawn.get("ahead", {})
        epoch: int = getattr(sampler, "epoch", self.epoch)
        _restore(sampler, held)
        if "sampler" in held:  # lhotse's stay at that one's end until they are told of another
            tell_samplers(sampler, epoch)

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
            return self._ahead.at(batches)
        if samples > _CHECKED:
            return None
        order = replace(order, rank=0, world_size=1, equal_counts=False)
        done, crc = 0, 0
        if self._hashed is not None and self._hashed[0] == order:
            _, done, crc = self._hashed
        if done > samples:
            done, crc = 0, 0
        bounds = ((done + a, done + b) for a, b in cut(samples - done, _HASHED_AT_ONCE))
        for part in parts_of(order.samples(), bounds):
            crc = zlib.crc32(part.astype("<i8", copy=False).tobytes(), crc)
        self._hashed = order, samples, crc
        return crc

    def samples(self, epoch: int, batches: int) -> int | None:
        """Return how many samples all ranks had after so many batches of each; None: not known."""
        order, begun = epoch_order(self.source, epoch), self._began_at
        if order is None:
            return self._ahead.samples_at(batches)
        if batches < begun.batches or self.epoch != epoch:
            begun = Start()
        left = _left_of(order, begun.samples)
        done = 0 if left is None else min(batches - begun.batches, len(left))
        return begun.samples if left is None else left.samples_before(done)

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
        full, rest = divmod(items - start.samples, source.batch_size)
        return full + (rest > 0 and not source.drop_last)

    def _plain(self, source: Iterable[Any]) -> Iterator[Any]:
        return index_batches(source) if self.arrays else iter(source)

    def _steps(self, source: Iterable[Any], start: Start) -> Iterator[Step]:
        """Return the steps of a source, or of what one shares out, from a start on."""
        share = self._share
        if share is None:
            source = source if start.same_batches else _cut_anew(source, start.samples)
            yield from (Step((batch,), batch) for batch in self._plain(source))
            return
        if self._ahead.behind:
            yield from shared_steps(share, source)
            return
        if share.gives_samples and start.samples % share.full:
            source = _Rest(source, start.samples)
            start = replace(start, samples=0, digest=None)
        items = (each for each in shared_items(share, source))  # lhotse's have iter() begin anew
        of_step = 1 if share.gives_samples else share.num_replicas
        first = list(islice(items, of_step if start.samples else 0))
        rest = _behind(chain(first, items), start, self._ahead, deciding(share.source))
        yield from share.steps(rest, first=first)

    def _watched(self, start: Start, digests: _Digests) -> Iterator[Any]:
        share, decides = self._share, deciding(self.source)
        source = self.source if share is None else share.source
        if start.drawn:
            source = _drawing_again(source, decides, start.drawn)
        # Not before: torch draws a seed of its own between iter() and the first index.
        self._began, self.drawn_epoch = self._beginning(start.drawn), self.epoch
        steps = self._steps(source, start)
        if self._seed is not None:
            made, once = steps, draws_at_start(decides)
            steps = KeyedDraws(lambda: made, self._seed, self.epoch, once=once)
        late = []
        with _as_before(start.drawn):
            for number, step in enumerate(islice(steps, digests.behind)):
                digests.add(step.whole)
                if number in start.late:
                    late.append(step.own)
            if digests.behind and start.digest is not None:
                _check(start, digests.at(start.batches), decides)
        lists = share is not None and share.gives_samples and not self.arrays
        for own in late:
            yield listed(own) if lists else own
        for step in steps:
            digests.add(step.whole)
            yield listed(step.own) if lists else step.own


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
    if found != start.digest:
        warnings.warn(
            f"The first {start.batches} batches of this epoch are not those that were delivered "
            f"before the training was saved: {type(sampler).__name__} gives another order now. The "
            f"epoch goes on with batch {start.batches} of the new order, so that samples may come "
            "twice or not at all in it. Give the sampler a seed and set_epoch(), or state_dict() "
            "and load_state_dict().",
            FastDataWarning,
            stacklevel=2,
        )


class _Began:
    """What a sampler was about to draw an epoch from."""

    def __init__(self, sampler: object, again: Drawn | None, *, keyed: bool) -> None:
        self._again, self._keyed = again, keyed
        self._sampler = sampler
        self._torch = torch.get_rng_state()
        generator = getattr(sampler, "generator", None)
        self._generator = generator.get_state() if isinstance(generator, torch.Generator) else None
        state = copy.deepcopy(sampler.state_dict()) if isinstance(sampler, Stateful) else None
        # torchdata's says how many samples it gave of the epoch before, and would go on from there.
        self._state = None if [*(state or ())] == ["yielded"] else state

    def drawn(self) -> Drawn:
        if self._again:
            return self._again
        if self._state is not None:
            return {"sampler": self._state}
        if self._generator is not None:
            return {"generator": _packed(self._generator)}
        if self._keyed:
            return {}
        if type(self._sampler) is RandomSampler:
            generator = torch.Generator()
            generator.set_state(self._torch)
            return {"draw": int(torch.empty((), dtype=torch.int64).random_(generator=generator))}
        return {"torch": _packed(self._torch)} if type(self._sampler) in _DRAW_FROM_TORCH else {}


def _restore(sampler: object, drawn: Drawn) -> None:
    """Set a sampler, or the generator that it holds, to what an epoch was, or will be, drawn from.

    Raises:
        OptionsError: The state of a generator was expected, and something else was saved.
    """
    if "sampler" in drawn and isinstance(sampler, Stateful):
        # A copy: lhotse's samplers take out of a state what they have loaded.
        sampler.load_state_dict(copy.deepcopy(drawn["sampler"]))
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


def _cut_anew(source: Iterable[Any], samples: int) -> Iterable[Any]:
    """Return batches of the present size of what comes behind some samples of a sampler."""
    if type(source) is not BatchSampler:
        return _behind(source, Start(samples=samples))
    rest: Sampler[int] = _Rest(source.sampler, samples)  # type: ignore[assignment]
    return BatchSampler(rest, source.batch_size, source.drop_last)


def _behind(
    batches: Iterable[Any],
    start: Start,
    digests: _Digests | None = None,
    sampler: object = None,
) -> Iterator[Any]:
    """Yield batches without the samples before a start, which may end within one of them."""
    before = start.samples
    for batch in batches:
        rows = _rows(batch)
        if before and digests is not None:
            digests.pass_by(batch if before >= rows else batch[:before], last=before <= rows)
            if before <= rows and start.digest is not None:
                _check(start, digests.at(start.batches), sampler)
        if before < rows:
            yield batch[before:] if before else batch
        before = max(0, before - rows)


def _rows(batch: object) -> int:
    return len(batch) if isinstance(batch, list | tuple | np.ndarray) else 1


class _Rest:
    def __init__(self, sampler: Iterable[int], skipped: int) -> None:
        self.sampler, self.skipped = sampler, skipped

    def __iter__(self) -> Iterator[int]:
        return islice(iter(self.sampler), self.skipped, None)


class _Digests:
    """The digest and the number of the indices of an epoch before each of its last steps."""

    def __init__(self, start: Start, *, drawn_again: bool) -> None:
        self.behind = start.batches if drawn_again else 0
        """Steps before the start that are to be added, too."""
        self._crc = 0 if drawn_again else start.digest
        self._passed = 0
        self._samples, self._count = (0, 0) if drawn_again else (start.samples, start.batches)
        self._last = deque(((self._crc, self._samples),), _DIGESTS_KEPT)

    def pass_by(self, batch: Any, *, last: bool) -> None:
        """Take in indices that come before the start, where it is not drawn again by steps."""
        self._passed = zlib.crc32(_as_bytes(batch), self._passed)
        if last:
            self._crc = self._passed
            self._last[-1] = self._crc, self._samples

    def add(self, whole: tuple[Any, ...]) -> None:
        """Count a step of all ranks in."""
        for batch in whole:
            if self._crc is not None:
                self._crc = zlib.crc32(_as_bytes(batch), self._crc)
            self._samples += _rows(batch)
        self._count += 1
        self._last.append((self._crc, self._samples))

    def at(self, batches: int) -> int | None:
        """Return the digest before step ``batches``; None: not known."""
        return self._before(batches)[0]

    def samples_at(self, batches: int) -> int | None:
        """Return how many samples all ranks had before step ``batches``; None: not known."""
        return self._before(batches)[1]

    def _before(self, batches: int) -> tuple[int | None, int | None]:
        number = batches - self._count + len(self._last) - 1
        return self._last[number] if 0 <= number < len(self._last) else (None, None)


def _as_bytes(batch: object) -> Any:
    if type(batch) is np.ndarray and batch.dtype == _PLAIN and batch.flags.c_contiguous:
        return batch
    if type(batch) is list and sys.byteorder == "little":
        with suppress(TypeError, OverflowError):  # which other lists raise
            return array("q", batch).tobytes()  # in a half of NumPy's time
    if isinstance(batch, np.ndarray | list | tuple | int):
        with suppress(ValueError):  # of items of several lengths, such as lhotse's cuts
            numbers = np.asarray(batch)
            if numbers.dtype.kind in "iu":
                return numbers.astype("<i8", copy=False).tobytes()
    # One after another, so that another cut has the same digest; addresses are of this process.
    items = batch if isinstance(batch, list) else [batch]
    return re.sub(" at 0x[0-9a-f]+", "", "".join(f"{item!r}," for item in items)).encode()


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
