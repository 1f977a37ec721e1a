"""Batches on their way over a side stream, and an iterator that sends them one batch ahead."""

from __future__ import annotations

import warnings
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import TYPE_CHECKING, Final, Generic, Protocol, TypeVar, runtime_checkable

import torch

from lightning_fastdata.batches.staged import (
    leaves,
    shows_its_memory,
)
from lightning_fastdata.device.backend import is_out_of_memory
from lightning_fastdata.errors import FastDataWarning
from lightning_fastdata.torch_internals import next_has_arrived
from lightning_fastdata.types import Batch

if TYPE_CHECKING:
    from lightning_fastdata.device.backend import DeviceStreams

BATCHES_AHEAD: Final = 1
"""Batches that a lane holds on the device beside the one that is trained on, at most."""
_NO_ROOM: Final = (
    "The device has no memory for a batch ahead of the one that is trained on. From now on each is "
    "moved when it is its turn. A smaller batch_size leaves room for it."
)
_Sent = TypeVar("_Sent")


@runtime_checkable
class _KnowsHost(Protocol):
    is_cpu: bool


class Crossing:
    """A batch on its way; what it was before stays until nobody needs this any more."""

    __slots__ = ("__weakref__", "_lane", "_work", "done", "moved", "source")

    def __init__(self, source: Batch, work: Callable[[Batch], Batch], lane: SideLane) -> None:
        self.source = source
        """The batch as it was sent."""
        self._work = work
        self._lane = lane
        self.moved: tuple[Batch] | None = None
        """What a side stream makes of it; None: nothing, or it was handed out or dropped."""
        self.done: torch.Event | None = None
        """Behind the work of the side stream."""

    def land(self) -> Batch:
        """Return the batch for use on the current stream, which waits for it; the host does not.

        If no side stream has it, or it has landed before, the current stream does the work.
        """
        self._lane.note_landing()
        moved, self.moved = self.moved, None
        if moved is None or self.done is None:
            return self._work(self.source)
        self._lane.streams.wait(self.done)
        for leaf in leaves(moved[0]):
            if shows_its_memory(leaf):
                self._lane.streams.keep(leaf)
        return moved[0]

    def drop(self) -> bool:
        """Let go of what a side stream made, if it has not landed; return whether there was any."""
        dropped, self.moved = self.moved is not None, None
        return dropped


class SideLane:
    """A side stream and the batches that are on it.

    A batch is sent when the device is through with all steps but the last that it was given: there
    are :data:`BATCHES_AHEAD` beside the one of that step. Where memory runs out nevertheless,
    nothing is sent ahead any more.
    """

    def __init__(self, streams: DeviceStreams) -> None:
        self.streams = streams
        self._landed: torch.Event | None = None
        """Behind the steps before the batch that landed last."""
        self._ahead: weakref.ref[Crossing] | None = None
        """The batch that was sent last."""
        self._full = False
        self._sources: deque[tuple[torch.Event, Batch]] = deque()
        weakref.finalize(self, _wait_for, self._sources)

    @property
    def has_room(self) -> bool:
        """Whether a batch can be sent now, before the step with the last one that landed."""
        passed = self._landed is None or self._landed.query()
        return passed and not self._full

    def send(self, batch: Batch, work: Callable[[Batch], Batch]) -> Crossing:
        """Have the side stream do ``work`` on a batch, and return without waiting for it.

        The host waits until there is room for it.

        Args:
            batch: A batch in host memory, or on the device as the consumer's stream left it. It is
                kept alive until the side stream is done with it.
            work: Moves and transforms it, and reads nothing else.
        """
        crossing = Crossing(batch, work, self)
        given = list(leaves(batch))
        if self._full or not all(map(shows_its_memory, given)):
            # Memory that is not seen could be used again too early: the consumer's stream does it.
            return crossing
        self._make_room()
        while self._sources and self._sources[0][0].query():
            self._sources.popleft()
        streams = self.streams
        on_host = all(isinstance(leaf, torch.Tensor | _KnowsHost) and leaf.is_cpu for leaf in given)
        here = None if on_host else streams.mark()
        with streams.aside():
            if here is not None:
                streams.wait(here)
            try:
                crossing.moved = (work(batch),)
            except Exception as error:
                if not is_out_of_memory(error):
                    raise
                self._stop()
            finally:
                crossing.done = streams.mark()
                self._sources.append((crossing.done, batch))
        self._ahead = weakref.ref(crossing)
        return crossing

    def note_landing(self) -> None:
        """Note that the current stream is about to be given a batch to train on."""
        self._landed = self.streams.mark()

    def drop(self) -> bool:
        """Let go of a batch that was sent ahead, which is made anew at its turn, and send no more.

        Returns:
            Whether there was one.
        """
        ahead = None if self._ahead is None else self._ahead()
        if ahead is None or not ahead.drop():
            return False
        self._stop()
        return True

    def _make_room(self) -> None:
        if self._landed is not None:
            self._landed.synchronize()

    def _stop(self) -> None:
        if not self._full:
            self._full = True
            warnings.warn(_NO_ROOM, FastDataWarning, stacklevel=3)


def _wait_for(sources: deque[tuple[torch.Event, Batch]]) -> None:
    while sources:
        with suppress(RuntimeError):  # a device that has failed reads nothing
            sources[0][0].synchronize()
        sources.popleft()


class OneAhead(Generic[_Sent]):
    """Iterates batches, each sent to the device while the one before it is used.

    The next batch is asked for only if it is known to be there, and else when it is its turn: no
    step waits for the batch behind its own. One that is made in the calling process, when it is
    asked for, so finds what the step before has written, and draws as it would without this.

    Args:
        batches: The iterator of a loader.
        send: Sends a batch on its way.
        receive: Makes of a batch that was sent what is handed out.
        has_room: Returns whether another one may be sent before it is its turn.
    """

    def __init__(
        self,
        batches: Iterator[Batch],
        send: Callable[[Batch], _Sent],
        receive: Callable[[_Sent], Batch],
        has_room: Callable[[], bool] = lambda: True,
    ) -> None:
        self._batches: Iterator[Batch] | None = batches
        self._send = send
        self._receive = receive
        self._has_room = has_room
        self._next: tuple[_Sent] | Exception | None = None
        """The batch that was sent ahead, or what asking for it raised."""

    def __iter__(self) -> OneAhead[_Sent]:
        return self

    def __next__(self) -> Batch:
        sent, self._next = self._next, None
        if sent is None:
            sent = self._sent(waiting=True)
        if sent is None or isinstance(sent, StopIteration):
            self.close()
            raise StopIteration
        if isinstance(sent, Exception):
            raise sent
        batch = self._receive(sent[0])
        self._next = self._sent(waiting=False)
        return batch

    @property
    def ahead(self) -> int:
        """Batches that were taken from the loader and not handed out: 0 or 1."""
        return int(isinstance(self._next, tuple))

    def close(self) -> None:
        """Ask for no more batches, and drop the one that is under way."""
        self._batches = self._next = None

    def __reduce__(self) -> tuple[object, ...]:
        # Lightning copies its trainer with the iterators in it; streams cannot be copied.
        return iter, ((),)

    def _sent(self, *, waiting: bool) -> tuple[_Sent] | Exception | None:
        if self._batches is None:
            return None
        try:
            if not waiting and not (is_ready(self._batches) and self._has_room()):
                return None
            return (self._send(next(self._batches)),)
        except Exception as error:  # it belongs to the batch that is to come
            return error


def is_ready(batches: Iterator[Batch]) -> bool | None:
    """Return whether the next batch, or the end, can be had without waiting.

    None: it is made in this process when it is asked for, or nothing is known about it.
    """
    ready = getattr(batches, "ready", None)  # which what stands for batches may hand on
    found: bool | None = ready() if callable(ready) else next_has_arrived(batches)
    return found
