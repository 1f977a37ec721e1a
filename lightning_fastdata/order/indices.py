"""The batches of indices that a loader reads in an epoch, from any position on, and their digest.

An order that is a function of (seed, epoch) is continued by arithmetic. Any other sampler draws its
first batches again, from the random state with which it began the epoch, and they are dropped; a
digest tells whether they are the same as before.
"""

from __future__ import annotations

import base64
import copy
import inspect
import re
import sys
import warnings
import zlib
from array import array
from collections.abc import Iterable, Iterator, Sized
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from itertools import chain, islice
from typing import Any, Final, Protocol, TypeAlias, TypeGuard, cast, runtime_checkable

import numpy as np
import torch
from torch.utils.data import BatchSampler, RandomSampler, SubsetRandomSampler, WeightedRandomSampler

from lightning_fastdata.errors import FastDataWarning, OptionsError
from lightning_fastdata.order.epoch_order import EpochOrder, cut, dataset_length, parts_of, steps_in
from lightning_fastdata.order.lengths import BucketOrder
from lightning_fastdata.order.samplers import (
    BlockShuffleSampler,
    ShuffleSampler,
    Step,
    deciding,
    draws_at_start,
    epoch_order,
    index_batches,
    keyed,
    may_repeat,
    rows_in,
    share_in,
    tell_samplers,
)
from lightning_fastdata.randomness.global_generators import kept_random_state
from lightning_fastdata.types import Repeated

AnyOrder: TypeAlias = EpochOrder | BucketOrder
Drawn: TypeAlias = dict[str, Any]
"""State from which a sampler drew an epoch, as plain data; empty: nothing is known."""

_HASHED_AT_ONCE: Final = 2**16
_DIGESTS_KEPT: Final = 2**12
"""Last steps of an epoch whose digests are kept; no more are read ahead of the training."""
_CHECKED: Final = 2**27
"""Most samples whose digest is checked: an order of (seed, epoch) takes up to 30 ns for each."""
_COUNTED: Final = 2**30
"""Most samples of a dataset whose repetitions are counted, at 4 bytes each."""
_DRAW_FROM_TORCH: Final = (RandomSampler, SubsetRandomSampler, WeightedRandomSampler)
"""Samplers that, without a generator, draw from torch's global one by their first index."""


@runtime_checkable
class Stateful(Protocol):
    """An object that saves and restores its state, as torchdata's protocol has it."""

    def state_dict(self) -> dict[str, Any]:
        """Return the state, as plain data."""

    def load_state_dict(self, state_dict: dict[str, Any], /) -> None:
        """Go on from a state."""


def tells_state(obj: object) -> TypeGuard[Stateful]:
    """Return whether an object has ``state_dict()`` and ``load_state_dict(state)``, called so."""
    if not isinstance(obj, Stateful):
        return False
    try:
        inspect.signature(obj.state_dict).bind()
        inspect.signature(obj.load_state_dict).bind({})
    except (TypeError, ValueError):
        return False
    return True


def may_tell_state(stream: object) -> bool:
    """Return whether a stream tells its state, or its iterator may: a generator has none."""
    begin = getattr(type(stream), "__iter__", None)
    return tells_state(stream) or not inspect.isgeneratorfunction(begin)


@dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    """Place in an epoch at which to begin."""

    batches: int = 0
    """Batches of this rank that were delivered before."""
    samples: int = 0
    """Samples that were delivered before, over all ranks."""
    late: tuple[int, ...] = ()
    """Numbers of batches before ``batches`` that were not delivered, and come first."""
    same_batches: bool = True
    """Whether batches have the size that they had before; False: only ``samples`` counts."""
    drawn: Drawn = field(default_factory=dict)
    """State from which the sampler drew the epoch; empty: not known, or not needed."""
    digest: int | None = None
    """CRC-32 of the indices before this place, as they were delivered; None: not known."""


class EpochIndices:
    """The batches of indices of each epoch: each iteration is one epoch, from ``start`` on.

    Args:
        source: A batch sampler, or a sampler whose items are taken one by one.
        arrays: Yield int64 arrays where that gives the same indices, and no others.
        seed: Keys draws from global generators, together with the epoch; None: they are not keyed.
        drawn_by_index: Dataset whose samples are drawn by their indices, so that one that comes
            again in an epoch, or in a later pass of it, is given as a :class:`Repeated`; None: none
            are.
    """

    def __init__(
        self,
        source: Iterable[Any],
        *,
        arrays: bool = False,
        seed: int | None = None,
        drawn_by_index: object = None,
    ) -> None:
        self.source = source
        self.arrays = arrays
        self._drawn_by_index, self._may_repeat = drawn_by_index, may_repeat(source)
        self._share = share_in(source)
        self._seed = seed if self._share is None else self._share.seed
        self.start = Start()
        """Place at which the next epoch begins."""
        self.epoch = 0
        """Number of the next epoch, counted from 0."""
        self.earlier = 0
        """Number of passes over the data in that epoch that came before, each in another order."""
        self.whole: int | None = None
        """Batches of the whole epoch that began last, where no step can change it; else None."""
        self._taken = _Taken()
        self._began_at = Start()
        self._drawn = self._to_draw()
        self._drawn_epoch: int | None = None
        self._plan: AnyOrder | None = None
        """Plan of the epoch that began last, as it was then; None: it was not known ahead."""
        self._hashed: tuple[AnyOrder, int, int] | None = None

    def _to_draw(self) -> Drawn:
        return _drawn_from(deciding(self.source), keyed=self._seed is not None)

    def __len__(self) -> int:
        """Return the length of a whole epoch, as torch's iterators do."""
        return len(cast("Sized", self.source))

    def __iter__(self) -> Iterator[Any]:
        """Begin an epoch."""
        start = self._began_at = self.start
        self._restore_plan(start)
        self.whole = dataset_length(self.source) if draws_at_start(self.source) else None
        whole, left = self._planned(), self._planned(start=start.samples)
        self._plan, self._plan_epoch = None if left is None else whole, self.epoch
        if whole is None or left is None:
            # An order that ranks share is continued by samples, unless late batches come first, and
            # so is another one whose batches had another size before an earlier resume.
            size = self._cut()[1] if self._share is None else 0
            by_steps = size is None or start.samples == start.batches * size
            again = start.same_batches and (bool(start.late) or by_steps)
            self._taken = _Taken() if again else _Taken(start.batches, start.digest, start.samples)
            return self._watched(start, self._taken, again=again)
        self._drawn = self._to_draw()
        if start.digest is not None and start.samples <= _CHECKED:
            found = self.digest(self.epoch, start.samples, 0)
            _check(start, found, deciding(self.source), computed=True)
        late = map(whole.batch, start.late if start.same_batches else ())
        batches = chain(late, left.batches())
        if self.arrays:
            return batches
        return iter(_marked((batch.tolist() for batch in batches), self._times()))

    def _restore_plan(self, start: Start) -> None:
        """Set a sampler whose order is computed to the state that an epoch is drawn from."""
        if start.drawn and epoch_order(self.source) is not None:
            _restore(deciding(self.source), start.drawn)

    def _planned(self, epoch: int | None = None, start: int = 0) -> AnyOrder | None:
        order = epoch_order(self.source, epoch, start)
        return None if order is None else replace(order, epoch=self._anew(order.epoch))

    def _anew(self, epoch: int) -> int:
        """Return what stands for an epoch, in the present pass of it, where an order is drawn."""
        return epoch + (self.earlier << 32)

    def _times(self) -> _Times | None:
        """Return what counts the indices of a pass; None: they need not be counted."""
        counts = self._drawn_by_index is not None and (self._may_repeat or self.earlier > 0)
        return _Times(self._drawn_by_index, self.earlier) if counts else None

    def drawn(self, epoch: int | None = None) -> Drawn:
        """Return the state from which the sampler drew the epoch that began last.

        ``epoch``: if it is another epoch, one still to be drawn, return the state that the sampler
        and its generator hold now, for :meth:`prepare`.
        """
        if epoch in (None, self._drawn_epoch):
            return self._drawn
        drawn = self._to_draw()
        held = {name: drawn[name] for name in ("sampler", "generator") if name in drawn}
        return {"ahead": held} if held else {}

    def prepare(self, drawn: Drawn) -> None:
        """Set the sampler to the state that it held before an epoch was drawn."""
        _restore(deciding(self.source), drawn.get("ahead", {}))

    def digest(self, epoch: int, samples: int, batches: int) -> int | None:
        """Return the CRC-32 of the indices of an epoch before a position; None: not known.

        The position is given as samples of all ranks, and as batches of this one. Indices count as
        little-endian int64, however they are put into batches. They are the indices of all ranks,
        or those of this rank if the sampler splits itself among ranks. If the order does not follow
        from (seed, epoch), only the epoch that began last is known. If it does, no digest is made
        beyond the most samples that are checked, as that would take longer than ten seconds.
        """
        order = self._order(epoch)
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
            crc = zlib.crc32(_as_bytes(part), crc)
        self._hashed = order, samples, crc
        return crc

    def samples(self, epoch: int, batches: int) -> int | None:
        """Return how many samples all ranks had after ``batches`` of each; None: not known."""
        begun = self._began_at
        if batches < begun.batches or self.epoch != epoch:
            begun = Start()
        left = self._order(epoch, begun.samples)
        if left is None:
            return self._taken.before(batches)[1]
        return left.samples_before(min(batches - begun.batches, len(left)))

    def _order(self, epoch: int, start: int = 0) -> AnyOrder | None:
        """Return the plan of an epoch, whatever was set on the sampler since it began."""
        if self._plan is None or epoch != self._plan_epoch:
            return self._planned(epoch, start)
        return replace(self._plan, start=start)

    def batches_left(self, epoch: int, start: Start) -> int | None:
        """Return how many batches an epoch has after a position; None: not known."""
        self._restore_plan(start)
        left, share = epoch_order(self.source, start=start.samples), self._share
        if left is not None:
            with suppress(OptionsError):  # raised as the epoch begins, if ranks cannot share it
                return len(replace(left, epoch=self._anew(epoch)))
            return None
        sampler, size, drop_last = self._cut()
        items, rows = dataset_length(sampler), rows_in(sampler)
        if items is None or (size is None and share is None and rows is None):
            return None
        if size is not None:
            return steps_in(items - start.samples, size, drop_last=drop_last)
        ranks = 1 if share is None else share.num_replicas
        done = start.batches * ranks if rows is None else start.samples // rows
        return steps_in(items - done, ranks, drop_last=drop_last)

    def _cut(self) -> tuple[Any, int | None, bool]:
        """Return the sampler, its samples in a step, and whether a rest is left out.

        The number of samples is None if the sampler gives batches.
        """
        share, source = self._share, self.source
        if share is not None:
            return share.source, share.full if share.gives_samples else None, share.drop_last
        if type(source) is BatchSampler:
            return source.sampler, source.batch_size, source.drop_last
        return source, None, False

    def _watched(self, start: Start, taken: _Taken, *, again: bool) -> Iterator[Any]:
        """Yield the batches of an order that is not known before it is drawn.

        ``again``: draw and drop whole batches up to the start; else draw and drop its samples.
        """
        decides = deciding(self.source)
        # Not earlier: torch draws a seed of its own between iter() and the first index.
        _restore(decides, start.drawn)
        self._drawn, self._drawn_epoch = start.drawn or self._to_draw(), self.epoch
        steps = self._steps(Start() if again else start, taken)
        if self._seed is not None:
            # A share may be set to another epoch than is counted, and has then the order of that.
            epoch = self._anew(self.epoch if self._share is None else self._share.epoch)
            steps = keyed(steps, self._seed, epoch, once=draws_at_start(decides))
        late = []
        with _as_before(start.drawn):
            for number, step in enumerate(islice(steps, start.batches if again else 0)):
                taken.add(step.whole)
                if number in start.late:
                    late.append(step.own)
            if again:
                _check(start, taken.before(start.batches)[0], decides)
            first = list(islice(steps, 1))
        yield from late
        for step in chain(first, steps):
            taken.add(step.whole)
            yield step.own

    def _steps(self, start: Start, taken: _Taken) -> Iterator[Step]:
        """Yield the steps that follow the samples of a start."""
        (sampler, size, drop_last), samples = self._cut(), start.samples
        if self.earlier and type(sampler) in (ShuffleSampler, BlockShuffleSampler):
            sampler = copy.copy(sampler)
            sampler.set_epoch(self._anew(sampler.epoch))
        items, times, share, first = sampler, self._times(), self._share, list[Any]()
        if size is not None:
            if samples % size:  # no present step ends there: the rest is cut into steps anew
                sampler = (each for each in sampler)
                before, samples = list(islice(sampler, samples)), 0
                _check(start, zlib.crc32(_as_bytes(before)), deciding(self.source))
                first = [(before if times is None else times.marked(before))[:size]]
            batches = BatchSampler(sampler, size, drop_last)
            items = index_batches(batches)
            if not self.arrays:  # arrays are quicker to draw than torch's indices one by one
                items = (each.tolist() if isinstance(each, np.ndarray) else each for each in items)
        elif self.arrays:
            items = map(_own, items)
        items = _marked(items, times)
        if samples:
            items = (each for each in items)  # iter() of lhotse's samplers begins anew
            if share is not None:  # what fills up the last step is of the start of the epoch
                first = list(islice(items, 1 if share.gives_samples else share.num_replicas))
            items = _behind(chain(first, items), start, taken, deciding(self.source))
        # Not earlier: what a sampler draws at the start of its iteration is keyed, too.
        yield from (
            (Step((one,), one) for one in items)
            if share is None
            else share.steps(items, first=first, begun=start.samples)
        )


def _check(start: Start, found: int | None, sampler: object, *, computed: bool = False) -> None:
    """Warn if an epoch's indices before its start are others than were delivered.

    ``computed``: its order follows from seed, epoch and length.
    """
    remedy = "Give the sampler a seed and set_epoch(), or state_dict() and load_state_dict()"
    if computed:
        remedy = (
            "The dataset had another length as the epoch began (or the sampler another seed, or "
            "buckets batches of another size): change that between epochs alone"
        )
    elif start.drawn or type(sampler).__module__.startswith("torch.utils.data."):
        remedy = (
            "What it draws from was another as the epoch began (its weights or indices, or the "
            "length of the dataset): change that between epochs alone"
        )
    if start.digest is not None and found != start.digest:
        warnings.warn(
            f"The first {start.batches} batches of this epoch are not those that were delivered "
            f"before the training was saved: {type(sampler).__name__} gives another order now. The "
            f"epoch goes on with batch {start.batches} of the new order, so that samples may come "
            f"twice or not at all in it. {remedy}.",
            FastDataWarning,
            stacklevel=2,
        )


# -- what a sampler draws an epoch from ------------------------------------------------------------


def _drawn_from(sampler: object, *, keyed: bool) -> Drawn:
    """Return the state from which a sampler is about to draw an epoch."""
    state = copy.deepcopy(sampler.state_dict()) if tells_state(sampler) else None
    # torchdata's samplers save how many samples they gave, and would go on behind those.
    if state is not None and [*state] != ["yielded"]:
        return {"sampler": state}
    generator = getattr(sampler, "generator", None)
    if isinstance(generator, torch.Generator):
        return {"generator": _packed(generator.get_state())}
    from_torch = type(sampler) in _DRAW_FROM_TORCH and not keyed
    return {"torch": _packed(torch.get_rng_state())} if from_torch else {}


def _restore(sampler: object, drawn: Drawn) -> None:
    """Set a sampler, or the generator that it holds, to the state that an epoch is drawn from.

    Raises:
        OptionsError: The state of a generator was expected, and something else was saved.
    """
    if "sampler" in drawn and tells_state(sampler):
        epoch = getattr(sampler, "epoch", None)
        # lhotse's samplers pop what they load from the state, and keep its epoch until it is set.
        sampler.load_state_dict(copy.deepcopy(drawn["sampler"]))
        if epoch is not None:
            tell_samplers(epoch, sampler)
    generator = getattr(sampler, "generator", None)
    if "generator" in drawn and isinstance(generator, torch.Generator):
        generator.set_state(_unpacked(drawn["generator"]))


@contextmanager
def _as_before(drawn: Drawn) -> Iterator[None]:
    """Set torch's generator to the state that the epoch was drawn from while the block runs."""
    if "torch" not in drawn:
        yield
        return
    with kept_random_state(("torch",)):
        torch.set_rng_state(_unpacked(drawn["torch"]))
        yield


# -- what was taken of an epoch --------------------------------------------------------------------


def _behind(items: Iterable[Any], start: Start, taken: _Taken, sampler: object) -> Iterator[Any]:
    """Yield batches without the samples before a start, which may lie within a batch."""
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


def _own(batch: Any) -> Any:
    """Return a batch of a user's sampler, which may use its memory again, in memory of its own.

    An array becomes a list, so that arrays are those that are computed here.
    """
    if isinstance(batch, np.ndarray | torch.Tensor):
        return batch.tolist()
    return list(batch) if type(batch) is list else batch


def _rows(batch: object) -> int:
    return len(batch) if isinstance(batch, list | tuple | np.ndarray) else 1


def _marked(items: Iterable[Any], times: _Times | None) -> Iterable[Any]:
    return items if times is None else map(times.marked, items)


class _Times:
    """How many times each sample of a dataset came in an epoch, in its last pass over the data.

    Counted are indices that are whole numbers, alone or in lists and tuples. ``earlier``: passes
    over the data that came before, each of which counts more than all times in one.
    """

    def __init__(self, dataset: object, earlier: int) -> None:
        self._before = earlier << 24
        length = dataset_length(dataset) or 0
        # The system gives memory only to the parts of it that are written to.
        self._counts = np.zeros(min(length, _COUNTED), np.uint32).data

    def marked(self, item: Any) -> Any:
        """Count an index, or those of a batch; one that came before becomes a Repeated."""
        if type(item) not in (list, tuple):
            return self.marked([item])[0]
        counts, before, found = self._counts, self._before, []
        for index in item:
            try:
                times = counts[index] + before
                counts[index] += 1
                again = times and not getattr(index, "ndim", 0)  # an array of one is none itself
                # A tensor would be sent to workers with all of the memory that it lies in.
                own = index.clone() if again and isinstance(index, torch.Tensor) else index
                found.append(Repeated(own, times) if again else index)
            except (IndexError, NotImplementedError, TypeError):  # no index of a sequence
                found.append(index)
        return found if type(item) is list else tuple(found)


class _Taken:
    """Digest and number of the indices of an epoch before each of its last steps."""

    def __init__(self, step: int = 0, crc: int | None = 0, samples: int = 0) -> None:
        self.begin(step, crc, samples)

    def begin(self, step: int, crc: int | None, samples: int) -> None:
        """Start to count at a step, with the digest and the samples before it."""
        self._step = step
        self._before = {step: (crc, samples)}

    def add(self, whole: tuple[Any, ...]) -> None:
        """Add the indices of a step of all ranks."""
        crc, samples = self._before[self._step]
        for batch in whole:
            crc = None if crc is None else zlib.crc32(_as_bytes(batch), crc)
            samples += _rows(batch)
        self._step += 1
        self._before[self._step] = crc, samples
        self._before.pop(self._step - _DIGESTS_KEPT, None)

    def before(self, step: int) -> tuple[int | None, int | None]:
        """Return the digest and the samples of all ranks before a step; None: not known."""
        return self._before.get(step, (None, None))


def _as_bytes(batch: object) -> Any:
    if type(batch) is list and sys.byteorder == "little":
        with suppress(TypeError, OverflowError):  # raised by lists of other items than int64
            return array("q", batch).tobytes()  # in half of NumPy's time
    if isinstance(batch, np.ndarray | list | tuple | int):
        with suppress(ValueError):  # raised by items of several lengths, such as lhotse's cuts
            numbers = np.asarray(batch)
            if numbers.dtype.kind in "iu":
                return numbers.astype("<i8", copy=False).tobytes()
    # Item by item, so that batches cut otherwise have the same digest; without memory addresses,
    # which differ between processes.
    items = batch if isinstance(batch, list) else [batch]
    return re.sub(" at 0x[0-9a-f]+", "", "".join(f"{item!r}," for item in items)).encode()


def _packed(state: torch.Tensor) -> str:
    """Return the state of a generator as text, compressed: half of a Mersenne Twister is zeros."""
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
