"""The position of a training in the batches of a loader: how it is tracked, saved and resumed.

Only batches that the training took count, not those fetched or handed out ahead of it.
"""

from __future__ import annotations

import copy
import functools
import warnings
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence, Sized
from contextlib import suppress
from dataclasses import asdict, dataclass, field, fields, replace
from itertools import islice
from typing import TYPE_CHECKING, Any, ClassVar, Final, NamedTuple, Protocol, TypeAlias, cast

import numpy as np
import torch
from torch.utils.data import BatchSampler, IterableDataset

from lightning_fastdata.batches.staged import StagedBatch
from lightning_fastdata.caches.cached import CachedDataset
from lightning_fastdata.errors import DatasetError, FastDataWarning, OptionsError, add_note
from lightning_fastdata.fingerprint import CountsBatches, Fingerprint, fingerprint
from lightning_fastdata.host import clock
from lightning_fastdata.host.machine import version_of
from lightning_fastdata.loading.source import workers_of
from lightning_fastdata.loading.stamped import Around
from lightning_fastdata.order.epoch_order import Counted, dataset_length, rank_now
from lightning_fastdata.order.indices import Drawn, EpochIndices, Start, tells_state
from lightning_fastdata.order.lengths import BucketBatchSampler
from lightning_fastdata.order.mixture import Mixture
from lightning_fastdata.order.samplers import (
    deciding,
    epoch_order,
    rows_in,
    sampler_in,
    share_in,
    split_of,
)
from lightning_fastdata.randomness.seeds import lasting
from lightning_fastdata.torch_internals import being_read, under_way
from lightning_fastdata.tree import find_composes, held, leaves
from lightning_fastdata.types import Batch, SetsEpoch

if TYPE_CHECKING:
    from lightning_fastdata.executors.kinds import Executor
    from lightning_fastdata.loading.loader import FastDataLoader

VERSION: Final = 1
_version_of: Final = functools.cache(version_of)
_KEPT: Final = 2**12
"""Number of last batches of a pass whose :class:`Noted` is kept."""
_WITHIN_S: Final = 0.03
_SHARE: Final = 0.01
_LOOKED_AT: Final = 64
"""Number of first batches in a stream's digest, and the interval of those it takes in later."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Position:
    """Position of a training in a loader's batches, of map-style data or a stream: plain data."""

    epoch: int
    """Epoch, counted from 0; the randomness of the batches is keyed by it."""
    batches: int
    """Batches of this pass over the data that the training took, per rank."""
    samples: int
    """Samples of this pass that all ranks took, and those of ``late``; below 0: not known. Where a
    sampler splits itself (:func:`ranks_aside`), those of one rank."""
    late: list[int] = field(default_factory=list)
    """Numbers, in the order of the epoch, of batches that later ones have overtaken. They were not
    taken, and come first when the training goes on."""
    passes: int = 0
    """Passes over the data in the epoch before this one, where the loader is shorter than others;
    each has an order and draws of its own."""
    reached: int | None = None
    """Batches of the order up to the last one that was taken; None: equal to ``batches``."""
    in_order: bool = True
    """Whether batches are taken in the order of the epoch; False: as they are ready."""
    length: int | None = None
    """Samples of the dataset; None: it has no length."""
    batch_size: int | None = None
    """Samples of one rank's batch; None: not known."""
    world_size: int = 1
    seed: int = 0
    order: str = ""
    """Class name of the sampler that decides the order; "a stream" for an iterable dataset."""
    digest: int | None = None
    """CRC-32 of the indices before the position, or of a stream's batches; None: not known."""
    dataset: str = ""
    """Fingerprint of the dataset's class and of the names of its files."""
    drawn: Drawn = field(default_factory=dict)
    """What the sampler drew the epoch from, if its order is no function of (seed, epoch)."""
    dataset_state: dict[str, Any] | None = None
    """What a map-style dataset's own ``state_dict()`` returned; None: it has none."""
    parts: int = 1
    """Number of parts in which a stream is read, one per worker; 1 for map-style data."""
    lanes: list[dict[str, Any]] | None = None
    """A :class:`LanePosition` for each part of a stream; empty: the stream has no state, and its
    batches are counted; None: its state is not known."""
    rank: list[int] = field(default_factory=list)
    """Number of the rank that read a stream, and how many ranks there were; empty: not known, or
    map-style data."""
    draws: bool = False
    """Whether a stream or its ``collate_fn`` draws from global generators, which are not saved."""
    base_seed: int | None = None
    """Seed from which those of the side processes were derived; None: not known."""
    quarantine: list[int] = field(default_factory=list)
    """Indices of samples that are not read again, as they killed or hung the process that did."""
    bad: list[int | str] = field(default_factory=list)
    """Samples that were replaced or left out; they count against the budget of bad samples."""
    package: str = ""
    """Version of this package that wrote the state; "": it was not installed."""
    version: int = VERSION
    """Version of the format of the state."""

    def as_dict(self) -> dict[str, Any]:
        """Return plain data that :meth:`from_dict` takes."""
        return asdict(self)

    @classmethod
    def from_dict(cls, state: object) -> Position:
        """Return the state that was saved as plain data.

        Raises:
            OptionsError: It is no state of a loader, or one of another version.
        """
        if not isinstance(state, Mapping) or not {"epoch", "batches", "version"} <= state.keys():
            raise OptionsError(
                f"The state of a FastDataLoader was expected, with its epoch and batches, and this "
                f"was given: {state!r:.200}. Give what FastDataLoader.state_dict() returned."
            )
        if state["version"] != VERSION:
            raise OptionsError(
                f"The state of a FastDataLoader is of version {state['version']!r}, written by "
                f"lightning_fastdata {state.get('package')!r}; this one reads version {VERSION}. "
                "Resume with the version that wrote it."
            )
        known = {each.name for each in fields(cls)}
        given = cls(**{name: value for name, value in state.items() if name in known})
        for name in ("epoch", "batches", "samples"):
            value = getattr(given, name)
            if type(value) is not int or value < 0:
                raise OptionsError(
                    f"The state of a FastDataLoader says {name}={value!r}, which is no number "
                    "from 0 on. It was not written by FastDataLoader.state_dict()."
                )
        return given

    @property
    def order_from(self) -> int:
        """Number, in the order of the epoch, of the first batch after all that were taken."""
        return self.batches if self.reached is None else self.reached

    @property
    def is_known(self) -> bool:
        """Whether it is known which batches came before."""
        return self.in_order or not self.batches or self.reached is not None or bool(self.lanes)

    def differences(self, now: Position) -> Iterator[str]:
        """Yield how the loader differs from when the state was saved, most important first."""
        if self.length != now.length:
            yield f"the dataset has {now.length} samples and had {self.length}"
        elif self.dataset != now.dataset:
            yield "the dataset is of another class, or lists other files"
        if self.order != now.order:
            yield f"the order is that of {now.order} and was that of {self.order}"
        if self.seed != now.seed:
            yield f"seed={now.seed} and was {self.seed}"
        if self.package != now.package:
            yield f"this is lightning_fastdata {now.package} and it was {self.package}"

    def same_steps(self, now: Position) -> bool:
        """Return whether a step takes as many samples over all ranks as when it was saved."""
        was = (self.batch_size or 1) * self.world_size
        return was == (now.batch_size or 1) * now.world_size


class Place(NamedTuple):
    """How far a run has come."""

    epoch: int
    """Epoch, counted from 0; as soon as one is over, the number of the next."""
    taken: int
    """Batches of the epoch that the training took; between epochs, those of the previous one."""
    last: bool
    """Whether the batch that the training took last was the last one of its epoch."""
    within: bool = False
    """Whether the run goes on within an epoch, from a checkpoint that was written there."""


class Run(Protocol):
    """The training that takes the batches of a loader."""

    @property
    def began(self) -> bool:
        """Whether there is a training; if not, a plain loop takes the batches."""

    @property
    def over(self) -> bool:
        """Whether the training has ended: a plain loop takes the batches that come next."""

    def takes(self, loader: object) -> bool:
        """Return whether the run takes the batches of a loader, as far as that is known."""

    def place(self) -> Place:
        """Return how far the run has come."""

    def resumed(self, loader: object) -> Position | None:
        """Return the position of a loader in the checkpoint that is resumed; None: not known."""


UnderWay: TypeAlias = tuple[int, tuple[int, ...]]
"""Number of batches begun since a pass began, and the numbers of those not handed over yet."""


class Noted(NamedTuple):
    """State after a batch of a pass, where it does not follow from the batch's number."""

    under_way: UnderWay | None = None
    """Batches of the pass that were begun, and those not handed over yet; None: not known."""
    digest: int | None = None
    """CRC-32 of the stream's batches so far; None: not known, or no stream."""


@dataclass(kw_only=True)
class Pass:
    """One pass over the data of a loader."""

    epoch: int
    state: Position | None = None
    """Position at which the pass began; None: the start of the epoch."""
    before: int = 0
    """Batches of earlier passes in the same epoch, where the loader is shorter than others."""
    passes: int = 0
    """Number of these passes."""
    handed: int = 0
    """Batches that were handed out, including those before the pass began."""
    exhausted: bool = False
    aside: bool = False
    """Whether the training does not take the batches of this pass."""
    earlier: Pass | None = None
    """The pass before this one in the same epoch; None: this is the first."""
    indices: EpochIndices | None = None
    """Copy of the loader's indices, where another pass has begun since; None: the loader's own."""
    executor: Executor | None = None
    """Executor that reads the pass; None: torch's own iterator does."""
    base_seed: int | None = None
    """Seed from which those of its side processes were derived; None: torch's own iterator."""
    noted: dict[int, Noted] = field(default_factory=dict)
    """State after each of the last batches that were read, by the number of batches until then."""

    def __getstate__(self) -> dict[str, Any]:
        # The executor belongs to one loader; a copy of the loader starts its own.
        return {**vars(self), "indices": None, "executor": None}

    def note(self, batches: int, noted: Noted) -> None:
        """Note the state after a number of batches."""
        self.noted[batches] = noted
        self.noted.pop(batches - _KEPT, None)

    def behind(self, batches: int) -> tuple[int | None, list[int], int | None]:
        """Return ``reached``, ``late`` and ``digest`` of the :class:`Position` after a batch."""
        state = self.state or Position(epoch=self.epoch, batches=0, samples=0)
        if batches == state.batches:
            return state.reached, state.late, state.digest
        now, digest = self.noted.get(batches, Noted())
        if not self.noted and state.reached is not None:
            now = batches - state.batches, ()  # all batches are handed over in order
        if now is None:
            return None, [], digest
        before, ahead = state.late, state.order_from - len(state.late)
        reached, waiting = now
        while reached and reached - 1 in waiting:
            reached -= 1
        late = [place for place in waiting if place < reached]
        late += range(reached, len(before))
        numbers = (before[at] if at < len(before) else ahead + at for at in late)
        return ahead + max(reached, len(before)), sorted(numbers), digest


class CountedBatches(Around, CountsBatches):
    """The batches of a pass, counted as they are handed out.

    The pass begins when its first batch is asked for: Lightning makes an iterator before it has
    read the next epoch from a checkpoint, and before its hooks have changed the data.

    ``tell``: tells the dataset the epoch of the pass again, called before a batch where another
    pass, of any loader, has begun since. ``ahead_of``: the sampler whose batches steps do not
    change. If it is a batch sampler, a step that changes its ``batch_size`` is warned of.
    ``by_index``: a batch that raised an error counts, too, once a loop that goes on has got a later
    one; an error may end a stream.
    """

    def __init__(
        self,
        begin: Callable[[], tuple[Pass, Iterator[Batch]]],
        tell: Callable[[Pass], object],
        loader: Sized,
        watch: StateWatch | None,
        ahead_of: object,
        passes: Passes,
        *,
        by_index: bool = True,
    ) -> None:
        self._passes = passes
        self._begin: Callable[[], tuple[Pass, Iterator[Batch]]] | None = begin
        self._tell = tell
        self._loader = loader
        self._watch = watch
        self._sampler = ahead_of if isinstance(ahead_of, BatchSampler) else None
        self._by_index = by_index
        self._size: int | None = None
        self._pass: Pass | None = None
        self._failed = 0
        super().__init__(iter(()))

    def __next__(self) -> Batch:
        if self._begin is not None:
            self._pass, self._batches = self._begin()
            self._begin = None
        begun, watch = cast("Pass", self._pass), self._watch
        if Passes.told != id(begun):
            self._tell(begun)
        if watch is not None:
            watch.asked()
        if self._sampler is not None:
            self._look_at_size(self._sampler)
        try:
            batch = next(self._batches)
        except StopIteration:
            begun.exhausted = True
            raise
        except Exception:
            self._failed += self._by_index
            raise
        begun.handed += 1 + self._failed
        self._failed = 0
        self._passes.handed_out(begun)
        if watch is not None:
            watch.handed_out()
        return batch

    @property
    def is_read(self) -> bool:
        """Whether the pass has begun and is not over."""
        return self._pass is not None and not self._pass.exhausted

    def _look_at_size(self, sampler: BatchSampler) -> None:
        # A batch sampler whose constructor leaves out super() has no batch_size; torch needs none.
        size, self._size = self._size, getattr(sampler, "batch_size", None)
        if None not in (size, self._size) and size != self._size:
            _warn(
                f"The batch sampler's batch_size was {size} and is {self._size} since the last "
                "step. Batches that were drawn ahead, and those of torch's BatchSampler, keep the "
                "size that they had: change it between epochs."
            )

    def __len__(self) -> int:
        return len(self._loader)  # torch's iterators have a length, too


class NamedBatches(Around):
    """The batches of torch's iterator without workers; an error names the sample."""

    def __next__(self) -> Batch:
        try:
            return next(self._batches)
        except Exception as error:
            read = being_read(error)
            if read is not None:
                which = "one of the samples" if isinstance(read, list) else "sample"
                add_note(error, f"While reading {which} {read!r:.400} of the dataset.")
            raise


class Passes:
    """The passes of a training over a loader: how far it has come, where the next pass begins."""

    told: ClassVar[int] = 0
    """``id`` of the pass, of any loader, whose epoch a dataset was told last; each pass tells it as
    it begins. A reference to the pass would keep its workers alive."""

    def __init__(self) -> None:
        self._pending: Position | None = None
        """Position that was loaded, until a batch follows it; None: there is none."""
        self.current: Pass | None = None
        """The pass whose batches the training takes; None: none was asked for since a load."""
        self._begun: Pass | None = None
        """The pass that began last, also if the training does not take its batches."""
        self._epochs = 0
        """Epoch of the next pass, where neither the user nor a run counts epochs."""

    @property
    def is_loaded(self) -> bool:
        """Whether the next pass goes on from a state that was loaded."""
        return self._pending is not None

    def load(self, state: Position) -> None:
        """Go on from a state with the next pass."""
        self._pending = state
        self.current = None
        self._epochs = state.epoch

    def next_pass(
        self,
        epoch: Callable[[], int] | None,
        sampler_epoch: int | None,
        dataset_epoch: int | None = None,
    ) -> Pass:
        """Return the next pass of a loader in a plain loop.

        Args:
            epoch: Returns the epoch; None: passes are counted from 0.
            sampler_epoch: Epoch that the user has set on the sampler; None: it has none.
            dataset_epoch: Epoch that the user has set on the dataset since the pass before.
        """
        pending = self._pending
        if epoch is not None:
            number = int(epoch())
        elif pending is not None:
            number = pending.epoch
        elif dataset_epoch is not None:
            number = self._epochs = dataset_epoch
        else:
            # An epoch that the user sets on a sampler goes first; unset, it stays at 0.
            number = max(self._epochs, sampler_epoch or 0)
        self._epochs = max(self._epochs, number + 1)
        if pending is None or pending.epoch != number:
            return Pass(epoch=number)
        return Pass(epoch=number, state=pending, handed=pending.batches)

    def next_pass_of(self, run: Run, loader: object, epoch: Callable[[], int] | None) -> Pass:
        """Return the pass whose batches a run is going to take next.

        ``epoch``, if given, is asked for the epoch in place of the run.
        """
        state = run.resumed(loader) or self._pending
        number, taken, last, within = run.place()
        number = number if epoch is None else epoch()
        now = self.current
        if now is not None and now.epoch == number and taken:
            if now.exhausted:
                if taken >= now.before:  # no state is asked for of passes before it
                    now.earlier = None
                before, passes = now.before + now.handed, now.passes + 1
                return Pass(epoch=number, before=before, passes=passes, earlier=now)
            if now.handed:
                return Pass(epoch=number, aside=True)
        if state is not None and not state.batches:
            # The run may not have counted yet that its last batch ended an epoch.
            over = last and state.epoch == number + 1
            if over or state.epoch == number:
                before, passes = taken if state.passes else 0, state.passes
                return Pass(epoch=state.epoch, state=state, before=before, passes=passes)
        if not taken:
            if within and state is not None and state.epoch == number:
                tell_begun_anew(state)
            return Pass(epoch=number)
        if state is None or state.epoch != number:
            if not within:  # the count is still that of the epoch before
                return Pass(epoch=number)
            state = Position(epoch=number, batches=taken, samples=-1)
        before = max(0, taken - state.batches)
        begun = Pass(epoch=number, state=state, before=before, passes=state.passes)
        begun.handed = state.batches
        return begun

    def another_begins(self, indices: EpochIndices | None) -> None:
        """Keep the indices of the last pass with it, as the next draws anew."""
        if self._begun is not None and indices is not None:
            self._begun.indices = copy.copy(indices)

    def settle(self, begun: Pass) -> None:
        """Note that the first batch of a pass is asked for."""
        self._begun = begun
        if not begun.aside:
            self.current, self._pending = begun, None

    def handed_out(self, begun: Pass) -> None:
        """Note that a pass gave a batch: of several open passes, the state is that of this one."""
        if self.current is not None and not begun.aside:
            self.current = begun

    def now(
        self, run: Run | None, length: int | None, ahead: int = 0
    ) -> tuple[int, int, Position | Pass | None]:
        """Return the epoch and how many batches of the pass were taken.

        Args:
            run: The run that takes the batches; None: a plain loop takes all that are handed out.
            length: Batches of a whole pass; None: not known.
            ahead: Batches that a plain loop has taken but not used yet.

        Returns:
            Epoch, batches, and a third value: the loaded state if no batch has followed it yet,
            else the pass that gave the batches, or None if none were taken.
        """
        begun = self.current
        if self._pending is not None:
            return self._pending.epoch, self._pending.batches, self._pending
        if run is None:
            if begun is None:
                return 0, 0, None
            used = begun.handed - ahead
            whole = (begun.exhausted and not ahead) or used == length
            return (begun.epoch + 1, 0, None) if whole else (begun.epoch, max(0, used), begun)
        epoch, taken, last, _ = run.place()
        if begun is None or begun.epoch != epoch:
            return epoch, 0, None
        handed = begun.before + begun.handed
        if taken > handed and not begun.exhausted:
            return epoch, 0, None  # the count is still that of the epoch before
        if taken and last:
            return epoch + 1, 0, None
        taken = min(taken, handed)
        while begun.earlier is not None and taken < begun.before:
            begun = begun.earlier
        return epoch, max(0, taken - begun.before), begun


def _warn(text: str) -> None:
    warnings.warn(text, FastDataWarning, stacklevel=3)


class StateWatch:
    """Compares the objects that are read before and after a step, to find steps that change them.

    It looks at steps 1, 2, 4, 8, and so on, and at others while looking takes at most a hundredth
    of the time. It ignores changes by reading itself, and objects that cannot be compared.

    Args:
        objects: The objects that are read.
        text: The warning if a step has changed them, with a place for the number of the step.
        caches: Caches of these objects; one is no longer used once a step has changed its dataset.
        reads_later: Returns whether later batches are read in the state of that time. If they were
            read when the epoch began, no step can change them.
    """

    def __init__(
        self,
        objects: tuple[object, ...],
        text: str,
        caches: Sequence[CachedDataset] = (),
        reads_later: Callable[[], bool] = lambda: True,
    ) -> None:
        self._objects = objects
        self._text = text
        self._caches = caches
        self._reads_later = reads_later
        self._count = 0
        self._began_s, self._spent_s = clock.monotonic(), 0.0
        self._looks = False
        self._before: Fingerprint | None = None

    def handed_out(self) -> None:
        """Note that a step begins."""
        self._count += 1
        began_s = clock.monotonic()
        cheap = self._spent_s <= _SHARE * (began_s - self._began_s)
        self._looks = cheap or not self._count & (self._count - 1)
        self._looks &= self._reads_later()
        if self._looks and self._text:
            self._before = self._look()
            self._spent_s += clock.monotonic() - began_s

    def asked(self) -> None:
        """Warn, once, if the step that has ended changed the objects that are read."""
        if not self._looks:
            return
        began_s = clock.monotonic()
        for cache in self._caches:
            cache.notice_change(_WITHIN_S)
        if self._before is not None and self._look() not in (None, self._before):
            _warn(self._text.format(self._count))
            self._text = ""
        self._looks, self._before = False, None
        self._spent_s += clock.monotonic() - began_s

    def _look(self) -> Fingerprint | None:
        # A step that draws from a pipeline changes no sample: each sample has a key of its own.
        drawn = lasting(find_composes(self._objects))
        return fingerprint(*self._objects, within_s=_WITHIN_S, with_globals=False, instead=drawn)


def as_it_is(loader: FastDataLoader[Any], indices: EpochIndices | None) -> Position:
    """Return a loader's position at the start of epoch 0; ``indices`` is None for a stream."""
    batch_size, workers = loader.batch_size, workers_of(loader)
    if batch_size is None:
        batch_size = rows_in(loader.batch_sampler)
    stream = isinstance(loader.dataset, IterableDataset)
    split = None if indices is None else split_of(indices.source)
    return Position(
        epoch=0,
        batches=0,
        samples=0,
        length=None if stream else dataset_length(loader.dataset),
        batch_size=batch_size,
        world_size=1 if split is None else split.num_replicas,
        in_order=loader.in_order or workers < (2 if stream else 1),
        parts=max(1, workers) if stream else 1,
        rank=list(rank_now()) if stream else [],
        seed=loader.seed,
        order="a stream" if indices is None else type(deciding(indices.source)).__name__,
        dataset=_fingerprint(loader.dataset),
        package=_version_of("lightning-fastdata") or "",
    )


def _fingerprint(dataset: object) -> str:
    """Return 16 hexadecimal digits that differ for datasets of another class or other files.

    No sample is read. If the dataset lists its files (``samples``, ``imgs``), their number and 64
    of their names count, without folders, as data may move to another machine.
    """
    text: list[str] = []
    while dataset is not None and len(text) < 64:
        if type(dataset) is not CachedDataset:  # with a cache, it is the same data
            text.append(f"{type(dataset).__module__}.{type(dataset).__qualname__}")
        lists = (held(dataset, name) for name in ("samples", "imgs"))
        listed = next((each for each in lists if isinstance(each, list | tuple) and each), None)
        if listed is not None:
            text.append(str(len(listed)))
            text.extend(_file_name(listed[i]) for i in range(0, len(listed), -(-len(listed) // 64)))
        dataset = held(dataset, "dataset")
    joined = "\n".join(text).encode(errors="surrogateescape")
    return f"{zlib.crc32(joined):08x}{zlib.adler32(joined):08x}"


def _file_name(entry: object) -> str:
    path = entry[0] if isinstance(entry, tuple | list) and entry else entry
    return path.replace("\\", "/").rpartition("/")[2] if isinstance(path, str) else ""


def samples_before(indices: EpochIndices, now: Position, epoch: int, batches: int) -> int:
    """Return how many samples of an epoch all ranks have had after ``batches`` batches of each."""
    known = indices.samples(epoch, batches)
    if known is None:
        return min(batches * (now.batch_size or 1) * now.world_size, now.length or 2**62)
    return known


def with_indices(state: Position, indices: EpochIndices, *, opened: bool) -> Position:
    """Return a state completed by the samples delivered, their digest, and the sampler's draws.

    ``opened``: the base seed of the epoch that is still to begin is drawn already.
    """
    if not state.batches:
        drawn: Drawn = indices.drawn(state.epoch)
        return replace(state, drawn=drawn.get("ahead", drawn) if opened else drawn)
    samples = samples_before(indices, state, state.epoch, state.order_from)
    digest = indices.digest(state.epoch, samples, state.order_from)
    return replace(state, samples=samples, digest=digest, drawn=indices.drawn())


def start_of(begun: Pass, now: Position, indices: EpochIndices) -> Start:
    """Return where the indices of a pass begin, and warn of what has changed in the loader."""
    state = begun.state
    if state is None:
        return Start()
    if not state.batches and not state.samples:
        indices.prepare(state.drawn)
        return Start(drawn={} if "ahead" in state.drawn else state.drawn)
    if state.samples < 0:  # the training was saved without a state of the loader
        tell_unknown(state, f"with batch {state.batches} of the order there is now")
        return Start(
            batches=state.batches,
            samples=samples_before(indices, now, begun.epoch, state.batches),
        )
    changed = _tell(state, now, indices)
    # If a sampler splits itself among ranks, the saved digest is that of rank 0 alone.
    splits = now.world_size > 1 and not _shared_here(indices, begun.epoch)
    return Start(
        batches=state.order_from,
        samples=state.samples,
        late=tuple(state.late),
        same_batches=state.same_steps(now),
        drawn=state.drawn,
        digest=None if splits or changed else state.digest,
    )


def tell_unknown(state: Position, where: str) -> None:
    """Warn that it is not known which batches were taken; the epoch goes on ``where``."""
    _warn(
        f"The training took {state.batches} batches of epoch {state.epoch} before it was saved, "
        "and the checkpoint does not hold which: another loader gave them, or a state_dict() of a "
        f"data module does not call super(). The epoch goes on {where}, so that samples may come "
        "twice or not at all in it; later epochs are whole."
    )


def tell_begun_anew(state: Position) -> None:
    """Warn that Lightning begins an epoch anew within which the training was saved."""
    _warn(
        f"The training was saved after {state.batches} batches of epoch {state.epoch}, and "
        "Lightning begins it anew, as it has no more than that now (limit_train_batches, another "
        "dataset) or a tuner has run: samples come again in it; later epochs are whole."
    )


def tell_loose(loader: object) -> None:
    """Warn, as a position is saved, that no training can go on from it."""
    _warn(
        f"{type(loader).__name__} hands over batches of a stream as they are ready "
        "(in_order=False), and which of them were taken is not saved: a training cannot go on "
        "within this epoch, only from a checkpoint between two epochs. For the former leave "
        "in_order=True."
    )


def check_order(state: Position) -> None:
    """Refuse to go on if it is not known which batches were taken; warn if only rank 0 knows.

    Raises:
        OptionsError: With what to do.
    """
    if not state.is_known:
        raise OptionsError(
            f"The training was saved within epoch {state.epoch}, after {state.batches} batches "
            "that came as they were ready (in_order=False). Which they were is not known, so that "
            "samples would come twice or not at all. Go on from a checkpoint between two epochs, "
            "and leave in_order=True to go on from any."
        )
    if state.batches and state.world_size > 1 and not state.in_order:
        _tell_of_rank_0(state)


def _tell_of_rank_0(state: Position) -> None:
    _warn(
        "Batches came as they were ready (in_order=False), and each rank had taken others when the "
        f"training was saved. Those of rank 0 are known, so that in epoch {state.epoch} some "
        "samples may come twice or not at all on other ranks; later epochs are whole. For an exact "
        "resume leave in_order=True."
    )


def tell_draws(stream: object) -> None:
    """Warn that a stream draws from generators that no state holds."""
    _warn(
        f"{type(stream).__name__} draws from global generators (random, numpy.random, torch), or "
        "its collate_fn does, and their states are not saved. So after this resume it may draw "
        "other numbers than without a break. Have it draw from a generator of its own that is "
        "seeded by the epoch, which on_train_start and on_train_epoch_start can tell it, or that "
        "its state_dict() holds."
    )


def why_new(state: Position, now: Position, *, by_torch: bool) -> str:
    """Return why an epoch begins without the state that a stream keeps from pass to pass.

    "": it begins with it. ``by_torch``: torch's own iterator reads the stream.
    """
    if by_torch:
        return "torch's iterator gives no state of it"
    if state.lanes:
        return f"{now.parts} workers read it, and {state.parts} did when it was saved"
    left = "the pass before was left before its end (as with limit_train_batches)"
    return left if state.lanes is None else ""


def tell_new_stream(stream: object, state: Position, why: str) -> None:
    """Warn that an epoch begins without the state that a stream keeps from earlier passes."""
    if not why:
        return
    _warn(
        f"Epoch {state.epoch} begins as that of a new {type(stream).__name__}, as {why}. What the "
        "stream keeps from pass to pass is lost, so that samples may be others than without a "
        "break. Have it make that from the epoch, which on_train_epoch_start can tell it."
    )


def of_other_rank(state: Position, dataset: object) -> Position:
    """Return the state from which another rank goes on, made from the one that rank 0 saved.

    The state of a stream on rank 0 covers only the part that rank 0 reads.
    """
    if not isinstance(dataset, IterableDataset):
        return state
    if state.epoch and state.lanes:
        tell_new_stream(dataset, state, "its state was saved on rank 0, for the part that it reads")
    if state.batches and state.is_known and not state.in_order:
        _tell_of_rank_0(state)
    # All ranks decide as rank 0 does: they all refuse to go on, or all go on.
    return replace(state, lanes=state.lanes and [], digest=None, in_order=state.is_known)


def check_stream(state: Position, now: Position) -> None:
    """Refuse to go on within an epoch of a stream that would give other batches than before.

    Raises:
        OptionsError: With what to set.
    """
    if state.batch_size != now.batch_size:
        raise OptionsError(
            f"The stream was saved in batches of {state.batch_size} and goes on from whole "
            f"batches, but now has batches of {now.batch_size}. "
            f"Set batch_size={state.batch_size}."
        )
    if state.parts != now.parts:
        raise OptionsError(
            f"The stream was shared out among {state.parts} workers when it was saved, and now is "
            f"among {now.parts}, who would read other samples. Set num_workers={state.parts} until "
            "this epoch has ended."
        )
    (_, then), (_, ranks) = state.rank or now.rank, now.rank
    if then != ranks:
        raise OptionsError(
            f"The stream was saved on {then} ranks, and shares itself out among {ranks} now, which "
            f"would read other samples. Go on with {then} until this epoch has ended."
        )


def cut_anew(state: Position, now: Position, indices: EpochIndices) -> Position:
    """Return a state with its position counted in batches of the present size.

    It is the length of the epoch less the batches that are left of it.
    """
    if state.same_steps(now):
        return state
    batches = state.batches * state.world_size // now.world_size
    start = Start(batches=batches, samples=state.samples, drawn=state.drawn)
    left = indices.batches_left(state.epoch, start)
    return state if left is None else replace(state, batches=len(indices) - left)


def _shared_here(indices: EpochIndices, epoch: int) -> bool:
    """Return whether this process knows which samples the other ranks get."""
    return epoch_order(indices.source, epoch) is not None or share_in(indices.source) is not None


def _tell(state: Position, now: Position, indices: EpochIndices) -> bool:
    """Warn of what has changed since the state was saved; return whether the order has changed."""
    texts = list(_told(state, now, indices))
    if texts:
        _warn(" ".join(texts))
    return next(state.differences(now), None) is not None


def _told(state: Position, now: Position, indices: EpochIndices) -> Iterator[str]:
    where = f"epoch {state.epoch} after {state.samples} samples"
    difference = next(state.differences(now), None)
    if difference is not None:
        yield (
            f"The training was saved in {where}, and since then something has changed: "
            f"{difference}. The epoch goes on at that place of the order there is now, so that "
            "samples may come twice or not at all in it; later epochs are whole."
        )
    if "torch" in state.drawn:
        yield (
            f"{now.order} draws from torch's global generator: the rest of this epoch is that of "
            "before, and later epochs are drawn from the generator as it will be then. For the "
            "same epochs as without a break, give the sampler a generator, or restore torch's."
        )
    if state.same_steps(now):
        return
    if type(indices.source) is BucketBatchSampler and state.batch_size != now.batch_size:
        return  # batches of another size are put together anew, of which the digest tells
    if state.late:
        yield (
            f"{len(state.late)} batches of {state.batch_size} samples that others had overtaken "
            "(in_order=False) are left out of this epoch, as batches have another size now."
        )
    was = f"{state.batch_size or 'batches'} x {state.world_size} ranks"
    size = now.batch_size or "batches"
    steps = f"steps of {size} x {now.world_size} ranks, which were of {was}"
    if _shared_here(indices, state.epoch) or now.world_size == state.world_size:
        yield f"From {where} on there are {steps}: no sample comes twice or is left out."
    else:
        yield (
            f"From {where} on there are {steps}, and {now.order} decides itself what each rank "
            "gets: samples may come twice or not at all in this epoch."
        )


def dataset_state(dataset: object) -> dict[str, Any] | None:
    """Return the state that a map-style dataset saves of itself; None: it has none.

    That of a mapping, as a TensorDict is one, is not a state of reading, but all of its data.
    """
    if isinstance(dataset, IterableDataset | Mapping) or not tells_state(dataset):
        return None
    return dataset.state_dict()


def restore_dataset(dataset: object, state: Position, samples: int) -> None:
    """Give a map-style dataset the state that it saved of itself.

    ``samples``: number of those of the epoch that all ranks had taken.
    """
    saved = state.dataset_state
    if saved is not None and tells_state(dataset):
        dataset.load_state_dict(saved)
    if isinstance(dataset, Mixture):
        dataset.go_on_at(state.epoch, samples)


def sampler_epoch(loader: FastDataLoader[Any]) -> int | None:
    """Return the epoch that was set on a loader's sampler; None: it has none, or none was set.

    Lightning sets it after it has made the iterator of a resumed run.
    """
    for sampler in (loader.sampler, sampler_in(loader.batch_sampler)):
        epoch: int | None = getattr(sampler, "epoch", None)
        counted = epoch is None or isinstance(epoch, Counted)
        if isinstance(sampler, SetsEpoch) and not counted:
            return epoch
    return None


class ReadBatches(Around):
    """The batches of a pass as they are read; the state after each is noted.

    ``source``: tells which batches are under way; None for a stream. ``first``: the number of
    batches of the pass that came before.
    """

    def __init__(
        self, batches: Iterator[Batch], begun: Pass, source: object = None, *, first: int = 0
    ) -> None:
        super().__init__(batches)
        self._begun = begun
        self._source = source
        self._count = first
        self._failed = 0
        self.digest: int | None = None if first or source is not None else 0
        """CRC-32 of the stream's batches until now; None: not known, or no stream."""

    def __next__(self) -> Batch:
        source = self._source
        try:
            batch = next(self._batches)
        except Exception:
            self._failed += source is not None
            raise
        if self.digest is not None and (self._count < _LOOKED_AT or not self._count % _LOOKED_AT):
            parts = batch.batch if isinstance(batch, StagedBatch) else batch
            text = "".join(map(_some_of, leaves(parts)))
            self.digest = zlib.crc32(text.encode(errors="replace"), self.digest)
        self._count += 1 + self._failed
        self._failed = 0
        ask = getattr(source, "under_way", None)
        now = under_way(source) if ask is None else ask()
        self._begun.note(self._count, Noted(now, self.digest))
        return batch


def _some_of(leaf: object) -> str:
    """Return some values of a leaf of a batch, as text; its class where it shows none."""
    values: Any = leaf
    # Tensors may refuse any of these: nested ones, some quantised ones, those without memory.
    with suppress(Exception):
        if isinstance(leaf, torch.Tensor):
            # The class of a library may read more into an index than the place of a number.
            values = leaf.as_subclass(torch.Tensor).detach()
        elif isinstance(leaf, bytes):
            values = np.frombuffer(leaf, np.uint8)
        elif not isinstance(leaf, np.ndarray) or leaf.dtype.hasobject:
            known = isinstance(leaf, str | int | float | bool | np.generic | None)
            return repr(leaf) if known else type(leaf).__name__
        values = values.reshape(-1)
        # With an odd step, the values come from different places in each sample.
        return repr(values[:: len(values) // 64 | 1].tolist())
    return type(leaf).__name__


def read_again(batches: ReadBatches, state: Position, stream: object, *, by_torch: bool) -> None:
    """Read and drop the batches of a stream that were delivered before a state, with a warning.

    ``by_torch``: torch's own iterator reads the stream.

    Raises:
        DatasetError: The stream has fewer batches.
    """
    name, began_s = type(stream).__name__, clock.monotonic()
    found = sum(1 for _ in islice(batches, state.batches))
    if found < state.batches:
        raise DatasetError(
            f"{name} has ended after {found} batches, and {state.batches} were delivered before "
            "the training was saved. It is not the stream that it was: resume with the same data, "
            "or begin the epoch anew."
        )
    seconds = clock.monotonic() - began_s
    why, remedy = ", as it has none", ", or give it state_dict() and load_state_dict()"
    if tells_state(stream):
        why, remedy = " that it could go on from", ""
        if by_torch:
            why = ", as torch's own loader read it"
            remedy = ', or set executor="inline", which saves its state'
    _warn(
        f"To go on where the training was saved, {found} batches of {name} that were delivered "
        f"before were read again and dropped, in {seconds:.1f} s. No state of it was saved{why}."
    )
    if state.digest not in (None, batches.digest):
        _warn(
            f"{name} gave other samples than before the training was saved, when they were read "
            "again to go on behind them. So the training goes on, but in this epoch some samples "
            "come twice and others not at all. Have it shuffle by a seed and by the epoch, which "
            "on_train_start and on_train_epoch_start can tell it (WebDataset: detshuffle=True and "
            f"a seed){remedy}."
        )
