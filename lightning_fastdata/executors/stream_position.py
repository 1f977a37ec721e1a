"""How far an epoch of a stream has come: what is saved of it, and what that is made from.

A stream is read in lanes, one in each worker or one in the calling process, whose batches come in
turn. A lane goes on from the state that its dataset gave after some batch (a snapshot), and reads
again and drops the batches between that and the position.
"""

from __future__ import annotations

import math
import pickle
import warnings
from collections import deque
from collections.abc import Sized
from dataclasses import asdict, dataclass, replace
from itertools import islice
from typing import Any, Final, NamedTuple

from lightning_fastdata.errors import FastDataWarning, OptionsError
from lightning_fastdata.executors.stream_state import (
    counts_samples,
    own_stream,
    tell_empty_pass,
    tell_others,
    tell_read_again,
    tells_state,
)

_KEPT: Final = 32
"""Batches that may be handed out, and not yet be taken by the training."""
_KEPT_DIGESTS: Final = 256
"""Of a lane: those of batches that were handed out, and of batches made ahead of them."""
NOTHING: Final = pickle.dumps((None, None, None))
"""Neither a state of the dataset nor of its iterator nor of the generators."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LanePosition:
    """How far one worker has come in its part of a stream."""

    batches: int = 0
    """Delivered in this epoch."""
    ended: bool = False
    """There are no more."""
    state: dict[str, Any] | None = None
    """The dataset's own, to be loaded; None: it is read from its beginning."""
    iterator: dict[str, Any] | None = None
    """That of the iterator that the dataset gave; None: it has none, or is at its beginning."""
    skip: int = 0
    """Batches to read and drop after that."""
    generators: dict[str, Any] | None = None
    """States of the worker's global generators where its reading begins; None: as they are when the
    worker has started."""
    digest: int | None = None
    """Of the samples to be read again, as :class:`.ReadSamples` has it; None: not known."""

    @property
    def has_state(self) -> bool:
        """Whether the dataset is given a state."""
        return self.state is not None or self.iterator is not None

    @property
    def from_start(self) -> bool:
        """Whether the pass is read from its beginning; a state is that from before it."""
        return self.skip == self.batches and not self.ended


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamPosition:
    """How far an epoch of a stream has come: plain data, whole through :meth:`as_dict`."""

    workers: int
    """0: the calling process reads."""
    lanes: tuple[LanePosition, ...]
    """Of each worker, or of the calling process."""
    turn: int = 0
    """The lane whose batch is next."""
    batch_size: int | None = None
    """Samples per batch; None: single samples."""
    base_seed: int | None = None
    """What the workers were seeded from; None: not known."""

    def as_dict(self) -> dict[str, Any]:
        """Return numbers, strings, lists, dicts and None that :meth:`from_dict` takes."""
        return {**asdict(self), "lanes": [asdict(lane) for lane in self.lanes]}

    @classmethod
    def from_dict(cls, saved: dict[str, Any]) -> StreamPosition:
        """Return the position that was saved.

        Raises:
            OptionsError: It is none.
        """
        try:
            lanes = tuple(LanePosition(**lane) for lane in saved["lanes"])
            position = cls(**{**saved, "lanes": lanes})
            if len(lanes) != max(1, position.workers):
                raise ValueError(f"{position.workers} workers, {len(lanes)} lanes")
        except (KeyError, TypeError, ValueError) as error:
            raise OptionsError(
                f"It is no position in a stream ({error}): {saved!r:.200}."
            ) from error
        return position

    def next_epoch(self) -> StreamPosition:
        """Return where the workers of an epoch that has ended begin the next one, if kept."""
        lanes = (replace(lane, batches=0, ended=False) for lane in self.lanes)
        return replace(self, lanes=tuple(lanes), turn=0)

    def check(self, batch_size: int | None, workers: int) -> None:
        """Refuse to go on with another batch size, or where nobody shares out the stream.

        Raises:
            OptionsError: With what to set.
        """
        if batch_size != self.batch_size:
            raise OptionsError(
                f"The stream was saved in batches of {self.batch_size} and goes on from whole "
                f"batches, but now has batches of {batch_size}. Set batch_size={self.batch_size}."
            )
        if self.workers and not workers:
            raise OptionsError(
                f"The stream was read by {self.workers} workers, each its own part, and the "
                "training process alone cannot go on in all of them. "
                f"Set num_workers={self.workers}."
            )


def counts_only(saved: dict[str, Any], epoch: int) -> dict[str, Any]:
    """Return a saved position of another rank for this one, which reads another part of the stream.

    Both have taken as many batches; what the rank of the position saved of its part is left out.
    """
    position = StreamPosition.from_dict(saved)
    if epoch and any(lane.has_state for lane in position.lanes):
        warnings.warn(
            f"The stream's state in epoch {epoch} was saved on rank 0, for the part that it reads. "
            "This rank reads its own part from the beginning of a new stream, so that what that "
            "has from the passes before, as an order, is lost. Have the stream make it from "
            "the epoch, which on_train_epoch_start can tell it.",
            FastDataWarning,
            stacklevel=2,
        )
    lanes = (LanePosition(batches=lane.batches, skip=lane.batches) for lane in position.lanes)
    return replace(position, lanes=tuple(lanes)).as_dict()


class Snapshot(NamedTuple):
    """What a lane can go on from."""

    batches: int
    """After so many of its batches in this epoch."""
    pickled: bytes
    """(state of the dataset, of its iterator, states of the generators): plain data."""


class StreamNote(NamedTuple):
    """What the reader of a lane tells with a batch, or with the end."""

    at_start: bytes | None = None
    """What belongs to the beginning of the epoch, as in :class:`Snapshot`; None: the dataset and
    the generators are as they are when a worker has started."""
    after: bytes | None = None
    """What belongs to the place behind the batch, as in :class:`Snapshot`; None: was not taken."""
    skipped: int | None = None
    """Samples that it has read and dropped to come to the position; None: nothing to tell."""
    skipped_s: float = 0.0
    """How long that took."""
    refused: str = ""
    """Why the state of the dataset cannot be saved, to go on with after its name."""
    digest: int | None = None
    """Of all samples that it has read in this epoch; None: it did not begin at its beginning."""
    drew: bool = False
    """The stream draws from global generators."""
    empty_pass: str = ""
    """What a pass that gave nothing has made of the state that was loaded."""
    others: bool = False
    """Those that it has read again are not those that were delivered before."""


class _Lane:
    def __init__(self, start: LanePosition) -> None:
        self.batches = self.made = start.batches
        began = pickle.dumps((start.state, start.iterator, start.generators))
        self.snapshots = deque([Snapshot(start.batches - start.skip, began)])
        self.at_end: bytes | None = None
        self.digests: deque[tuple[int, int]] = deque(maxlen=_KEPT_DIGESTS)

    def position(self, batches: int) -> LanePosition:
        at_end = self.at_end if batches == self.made else None
        kept = [one for one in self.snapshots if one.batches <= batches]
        last = kept[-1] if at_end is None else Snapshot(batches, at_end)
        state, iterator, generators = pickle.loads(last.pickled)  # from our own process
        skip = batches - last.batches
        return LanePosition(
            batches=batches,
            ended=at_end is not None,
            state=state,
            iterator=iterator,
            skip=skip,
            generators=generators,
            digest=dict(self.digests).get(batches) if skip == batches else None,
        )


class StreamHistory:
    """What has come of an epoch of a stream, in the process that takes the batches.

    Args:
        dataset: The stream.
        workers: Who read it; 0: the calling process.
        batch_size: Samples per batch; None: single samples.
        resume: Where the epoch began; None: at its beginning.
        base_seed: What the workers were seeded from.
    """

    def __init__(
        self,
        dataset: object,
        *,
        workers: int,
        batch_size: int | None,
        resume: StreamPosition | None = None,
        base_seed: int | None = None,
    ) -> None:
        self.workers = workers
        self._stream = own_stream(dataset)
        self._batch_size = batch_size
        self._base_seed = base_seed
        starts = (LanePosition(),) * max(1, workers) if resume is None else resume.lanes
        self._lanes = [_Lane(start) for start in starts]
        self.start_turn = 0 if resume is None else resume.turn
        self._begin = self._given = sum(lane.batches for lane in self._lanes)
        self._order: deque[int] = deque(maxlen=_KEPT)
        self._skipping = {number for number, start in enumerate(starts) if start.skip}
        self._told_skipping = not counts_samples(self._stream) and any(
            start.skip and not start.has_state for start in starts
        )
        self._skipped = 0, 0.0
        self._told_others = self._told_empty = False
        self._refused = ""
        self.drew = False
        """The stream was seen to draw from global generators."""

    def made(self, lane: int, note: StreamNote) -> None:
        """Note that a lane has made its next batch, and what its reader tells with it."""
        one = self._lanes[lane]
        one.made += 1
        self._note(lane, note)
        if note.after is not None:
            one.snapshots.append(Snapshot(one.made, note.after))
        if note.digest is not None:
            one.digests.append((one.made, note.digest))

    def ended(self, lane: int, note: StreamNote) -> None:
        """Note that a lane makes no more batches."""
        self._note(lane, note)
        self._lanes[lane].at_end = note.after or NOTHING

    def _note(self, lane: int, note: StreamNote) -> None:
        if note.at_start is not None:
            self._lanes[lane].snapshots[0] = Snapshot(0, note.at_start)
        self._refused = self._refused or note.refused
        self.drew |= note.drew
        if note.empty_pass and not self._told_empty:
            self._told_empty = True
            tell_empty_pass(self._stream, note.empty_pass)
        if note.others and not self._told_others:
            self._told_others = True
            tell_others(self._stream)
        if note.skipped is not None and lane in self._skipping:
            self._skipping.remove(lane)
            samples, seconds = self._skipped
            self._skipped = samples + note.skipped, max(seconds, note.skipped_s)
            if not self._skipping and self._told_skipping:
                why = "it has no state_dict() and load_state_dict()"
                if tells_state(self._stream):
                    why = "no state of it could be saved"
                samples, seconds = self._skipped
                tell_read_again(self._stream, f"{samples} samples", seconds, why)

    def handed_over(self, lane: int) -> None:
        """Note that the next batch of a lane was handed over."""
        one = self._lanes[lane]
        one.batches += 1
        self._given += 1
        self._order.append(lane)
        while len(one.snapshots) > 1 and one.snapshots[1].batches <= one.batches - _KEPT:
            one.snapshots.popleft()

    def position(self, delivered: int) -> StreamPosition:
        """Return the position after so many batches of the epoch, from its very beginning.

        Raises:
            OptionsError: So many were not handed out, or too long ago.
        """
        back = self._given - delivered
        if back < 0 or back > len(self._order):
            raise OptionsError(
                f"The position after {delivered} batches of the stream is not known: "
                f"{self._given} were handed out in this epoch, which began after {self._begin}, "
                f"and the last {_KEPT} can be gone back."
            )
        if self._refused:
            self._tell_refused()
        counts = [lane.batches for lane in self._lanes]
        kept = len(self._order) - back
        for lane in islice(self._order, kept, None):
            counts[lane] -= 1
        lanes = [lane.position(count) for lane, count in zip(self._lanes, counts, strict=True)]
        return StreamPosition(
            workers=self.workers,
            lanes=tuple(map(self._with_own_count, range(len(lanes)), lanes)),
            turn=self._turn_before(kept),
            batch_size=self._batch_size,
            base_seed=self._base_seed,
        )

    def _turn_before(self, kept: int) -> int:
        """Return whose turn it was before the batch at this place of the order that is kept."""
        if kept:
            return (self._order[kept - 1] + 1) % len(self._lanes)
        if self._given - len(self._order) == self._begin:
            return self.start_turn
        return self._order[0]  # the one before it is forgotten

    def _with_own_count(self, number: int, lane: LanePosition) -> LanePosition:
        """Return the position of a lane, of a stream that makes its state from a count."""
        stream = self._stream
        if lane.ended or not counts_samples(stream):
            return lane
        # It gives what was read to the workers in turn, in batches of its own size. So each lane
        # gets a state of its own, as if the turn had come to it just now.
        workers, size = max(1, self.workers), self._batch_size or 1
        own = getattr(stream, "batch_size", size)  # whatever those of the loader have
        whole = math.lcm(own, size) // size
        most = len(stream) if isinstance(stream, Sized) else math.inf
        for batches in range(lane.batches - lane.batches % whole, 0, -whole):
            rounds = batches * size // own
            samples = ((rounds - 1) * workers + number + 1) * own
            if samples <= most:
                state = dict(stream.state_dict(samples, workers, own))
                skip = lane.batches - batches
                return replace(lane, state=state, skip=skip, digest=None)
        return lane

    def _tell_refused(self) -> None:
        why, self._refused = self._refused, ""
        warnings.warn(
            f"{type(self._stream).__name__}.state_dict() {why}. So it is not saved, and a resumed "
            "training reads again and drops the samples that were delivered before, which takes "
            "as long as reading them took. What a pass has from the ones before it is lost.",
            FastDataWarning,
            stacklevel=2,
        )
