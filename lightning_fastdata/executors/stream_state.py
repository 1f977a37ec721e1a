"""How far a stream has come: its state, as torchdata's protocol has it, in each worker.

A stream is read in parts, one by each worker or one by the calling process. Where the stream, or
the iterator that it gives, has ``state_dict()`` and ``load_state_dict(state)``, its worker sends a
state with a batch. Any other stream has no position here: its batches are counted, and are read
again and dropped where a training goes on.
"""

from __future__ import annotations

import pickle
import warnings
from collections import deque
from collections.abc import Collection, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from io import BytesIO
from typing import Any, Final, NamedTuple

import torch

from lightning_fastdata.batches.keyed import own_dataset
from lightning_fastdata.batches.libraries import why_state_is_lost
from lightning_fastdata.errors import FastDataWarning, OptionsError
from lightning_fastdata.host import clock
from lightning_fastdata.order.indices import Stateful, tells_state

_KEPT: Final = 32
"""Number of last batches whose positions are kept, as the training may not have taken them yet."""
_SHARE: Final = 0.01
"""Share of the time that taking states may cost, 0 to 1."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LanePosition:
    """How far one part of a stream has come."""

    batches: int = 0
    """Number of batches delivered in this epoch."""
    state: bytes | None = None
    """Pickled states of the stream and of its iterator; None: it is read from its beginning."""
    passes: int = 0
    """Number of passes to read to their ends, from the state on, before this epoch begins."""
    skip: int = 0
    """Number of batches to read and drop after the state and the passes."""

    def as_dict(self) -> dict[str, Any]:
        """Return plain data that :meth:`from_dict` takes."""
        states = None if self.state is None else pickle.loads(self.state)  # from our own process
        return {**asdict(self), "state": states}

    @classmethod
    def from_dict(cls, saved: dict[str, Any]) -> LanePosition:
        """Return the position that was saved.

        Raises:
            OptionsError: ``saved`` is no such position.
        """
        try:
            states = saved["state"]
            return cls(**{**saved, "state": None if states is None else pickle.dumps(states)})
        except (KeyError, TypeError) as error:
            raise OptionsError(
                f"It is no position in a stream ({error}): {saved!r:.200}."
            ) from error


class StreamNote(NamedTuple):
    """What the reader of a part tells with a batch."""

    state: bytes | None = None
    """State after the batch, as in :class:`LanePosition`; None: it was not taken."""
    refused: str = ""
    """Why the state cannot be taken, as a text after ``state_dict()``; empty: it can be."""
    drew: bool = False
    """Whether the stream, or its ``collate_fn``, draws from global generators."""


class StreamState:
    """Takes and loads the states of one stream, in the process that reads it."""

    def __init__(self, dataset: object) -> None:
        self._stream: Any = own_dataset(dataset)
        self._has_state: tuple[Stateful | None, Stateful | None] = None, None
        """The stream and its iterator; None in place of one that has no state."""
        self._next_s = 0.0
        self.refused = why_state_is_lost(self._stream) if tells_state(self._stream) else ""
        """Why a state cannot be taken, as a text after ``state_dict()``; empty: it can be."""

    def begin(self, saved: bytes | None) -> Iterator[Any]:
        """Begin a pass at a saved state (None: at its start), and return the stream's iterator."""
        stream = self._stream
        of_stream, of_iterator = _unpickled(saved)
        if of_stream is not None:
            stream.load_state_dict(of_stream)
        iterator: Any = iter(stream)
        if of_stream is not None and not self._has(of_stream):
            stream.load_state_dict(_unpickled(saved)[0])  # __iter__ has set it up anew
        if of_iterator is not None:
            iterator.load_state_dict(of_iterator)
        self._has_state = (
            stream if tells_state(stream) and iterator is not stream else None,
            iterator if tells_state(iterator) else None,
        )
        self._next_s = 0.0
        return iterator  # type: ignore[no-any-return]

    def _has(self, state: object) -> bool:
        try:
            return bool(self._stream.state_dict() == state)
        except Exception:  # it has no state before its first sample, or one with tensors
            return False

    def take(self) -> bytes | None:
        """Return the pickled states of the stream and its iterator; None: none is taken now.

        They belong to the samples read until now. Taking them costs a hundredth of the time.
        """
        began_s = clock.monotonic()
        if self.refused or self._has_state == (None, None) or began_s < self._next_s:
            return None
        try:
            states = (None if one is None else one.state_dict() for one in self._has_state)
            pickled = pickle.dumps(tuple(states), 5)  # they may be live objects, and change later
        except Exception as error:  # whatever the user's code raises
            self.refused = f"raised {type(error).__name__} ({error!s:.200})"
            return None
        ended_s = clock.monotonic()
        self._next_s = ended_s + (ended_s - began_s) / _SHARE
        return pickled


class StreamHistory:
    """Positions of a stream after each of its last batches, in the process that takes these."""

    def __init__(self, dataset: object) -> None:
        self._stream = own_dataset(dataset)
        self._now: tuple[LanePosition, ...] = ()
        self._notes: list[deque[StreamNote]] = []
        self._kept: dict[int, tuple[LanePosition, ...]] = {}
        self._given = 0
        self._is_known = True
        self._refused = ""
        self._told = False
        self.has_state = tells_state(self._stream)
        """Whether the stream has a state, or its iterator was seen to have one."""
        self.drew = False
        """Whether the stream, or its ``collate_fn``, was seen to draw from global generators."""

    def start_epoch(
        self,
        parts: int,
        resume: Sequence[LanePosition] | None = None,
        *,
        going_on: Collection[int] = (),
        over: bool = True,
    ) -> None:
        """Begin an epoch.

        Args:
            parts: Number of parts that the stream is read in.
            resume: Position at which each part begins; None: at its beginning.
            going_on: Numbers of the parts whose readers have read the epoch before.
            over: Whether the epoch before was read to its end.
        """
        ended = self._at_end(self._now) if over else ()
        begins = [
            ended[n] if n in going_on and n < len(ended) else LanePosition() for n in range(parts)
        ]
        self._now = tuple(begins if resume is None else resume)
        self._notes = [deque() for _ in self._now]
        self._given = sum(lane.batches for lane in self._now)
        self._kept = {self._given: self._now}
        self._is_known = over or resume is not None or not going_on

    @property
    def first_turn(self) -> int:
        """Number of the part whose batch is next: the one after the part that gave the last."""
        counts = [lane.batches for lane in self._now]
        last = max(range(len(counts)), key=lambda n: (counts[n], n))
        return (last + 1) % len(counts)

    def made(self, lane: int, note: StreamNote) -> None:
        """Note what the reader of a part tells with its next batch."""
        self._notes[lane].append(note)
        self._refused = self._refused or note.refused
        self.has_state |= note.state is not None
        self.drew |= note.drew

    def handed_over(self, lane: int) -> None:
        """Note that the next batch of a part was handed over."""
        state, at = self._notes[lane].popleft().state, self._now[lane]
        batches = at.batches + 1
        new = replace(at, batches=batches, skip=at.skip + 1)
        if state is not None:
            new = LanePosition(batches=batches, state=state)
        self._now = (*self._now[:lane], new, *self._now[lane + 1 :])
        self._given += 1
        self._kept[self._given] = self._now
        self._kept.pop(self._given - _KEPT - 1, None)

    def position(self, delivered: int, *, over: bool) -> tuple[LanePosition, ...] | None:
        """Return where each part is after ``delivered`` batches from the very start of the epoch.

        Empty: the stream has no state, and its batches are counted. None: the state is not known.
        ``over``: whether these were all batches, and the next epoch begins.

        Raises:
            OptionsError: Fewer batches were handed out, or too many since.
        """
        if over:
            delivered = self._given
        found = self._kept.get(delivered)
        if found is None:
            raise OptionsError(
                f"The position after {delivered} batches of the stream is not known: "
                f"{self._given} were handed out in this epoch, and the last {_KEPT} can be gone "
                "back."
            )
        found = self._at_end(found) if over else found
        begun = any(lane.state is not None or lane.passes for lane in found)
        if begun and not self._refused:
            self._refused = _why_not_saved(found)
        if self._refused and not self._told:
            self._told = True
            warnings.warn(
                f"{type(self._stream).__name__}.state_dict() {self._refused}. So it is not saved, "
                "and a resumed training reads again and drops the samples that were delivered "
                "before, which takes as long as reading them took. What a pass has from the ones "
                "before it is lost.",
                FastDataWarning,
                stacklevel=2,
            )
        anew = self._is_known or not self.has_state
        if self._refused or (anew and not begun):
            return ()
        sure = self._is_known or all(lane.state is not None for lane in found)
        return found if sure else None

    def _at_end(self, lanes: Sequence[LanePosition]) -> tuple[LanePosition, ...]:
        if not (tells_state(self._stream) or any(lane.state is not None for lane in lanes)):
            return tuple(LanePosition() for _ in lanes)
        return tuple(replace(lane, batches=0, skip=0, passes=lane.passes + 1) for lane in lanes)


def _unpickled(saved: bytes | None) -> tuple[Any, Any]:
    states: tuple[Any, Any] = (None, None) if saved is None else pickle.loads(saved)
    return states


def _why_not_saved(lanes: Sequence[LanePosition]) -> str:
    """Return why a checkpoint would not give states back, as a text after their name; or ""."""
    file = BytesIO()
    try:
        torch.save([lane.as_dict() for lane in lanes], file)
        file.seek(0)
        torch.load(file, weights_only=True)
    except Exception as error:  # of the pickle module, or whatever the user's classes raise
        return (
            "holds what no checkpoint gives back, which takes numbers, strings, lists, dicts, None "
            f"and tensors ({str(error).splitlines()[0]:.200})"
        )
    return ""
