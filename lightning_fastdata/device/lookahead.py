"""Batches on their way over a side stream, and an iterator that sends them one batch ahead."""

from __future__ import annotations

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
from lightning_fastdata.randomness.global_generators import DrawWatch
from lightning_fastdata.torch_internals import next_has_arrived
from lightning_fastdata.types import Batch

if TYPE_CHECKING:
    from lightning_fastdata.device.streams import DeviceStreams

_STEPS_AHEAD: Final = 2
"""How far the host may run ahead of the device. Each batch it is ahead takes device memory, as
memory that two streams use is free only when the device is done with it."""
_Sent = TypeVar("_Sent")


@runtime_checkable
class _KnowsHost(Protocol):
    is_cpu: bool


class Crossing:
    """A batch that a side stream moves and transforms; ``done``: the event behind that."""

    __slots__ = ("_batch", "_done", "_streams")

    def __init__(self, batch: Batch, done: torch.cuda.Event | None, streams: DeviceStreams) -> None:
        self._batch = batch
        self._done = done
        self._streams = streams

    def land(self) -> Batch:
        """Return the batch for use on the current stream, which waits for it; the host does not."""
        if self._done is not None:
            self._streams.wait(self._done)
            for leaf in leaves(self._batch):
                if shows_its_memory(leaf):
                    self._streams.keep(leaf)
        return self._batch


class SideLane:
    """A side stream and the batches that are on it.

    The host may send ``steps_ahead`` batches before the device has come to the first.
    """

    def __init__(self, streams: DeviceStreams, *, steps_ahead: int = _STEPS_AHEAD) -> None:
        self._streams = streams
        self._steps_ahead = steps_ahead
        self._consumed: deque[torch.cuda.Event] = deque()
        self._sources: deque[tuple[torch.cuda.Event, Batch]] = deque()
        weakref.finalize(self, _wait_for, self._sources)

    def send(
        self, batch: Batch, work: Callable[[Batch], Batch], *, after_consumer: bool
    ) -> Crossing:
        """Have the side stream do ``work`` on a batch, and return without waiting for it.

        Args:
            batch: A batch in host memory, or on the device as the consumer's stream left it. It is
                kept alive until the side stream is done with it.
            work: Moves and transforms it.
            after_consumer: Begin only when the consumer's stream is through with what it has been
                given so far. False lets the copy run beside all of that, and is for work that reads
                nothing but the batch.
        """
        streams = self._streams
        here = streams.mark()
        self._consumed.append(here)
        while len(self._consumed) > self._steps_ahead:
            self._consumed.popleft().synchronize()
        while self._sources and self._sources[0][0].query():  # type: ignore[no-untyped-call]
            self._sources.popleft()
        given = list(leaves(batch))
        if not all(map(shows_its_memory, given)):
            # Its memory could be used again too early, so the consumer's stream does the work.
            return Crossing(work(batch), None, streams)
        on_host = all(isinstance(leaf, torch.Tensor | _KnowsHost) and leaf.is_cpu for leaf in given)
        with streams.aside():
            if after_consumer or not on_host:
                streams.wait(here)
            try:
                moved = work(batch)
            finally:
                done = streams.mark()
                self._sources.append((done, batch))
        return Crossing(moved, done, streams)


def _wait_for(sources: deque[tuple[torch.cuda.Event, Batch]]) -> None:
    while sources:
        with suppress(RuntimeError):  # a device that has failed reads nothing
            sources[0][0].synchronize()
        sources.popleft()


class OneAhead(Generic[_Sent]):
    """Iterates batches, each sent to the device while the one before it is used.

    The next batch is asked for only if it is there without waiting, where the iterator says so,
    and else when it is its turn; so no batch that is ready is held up by another. An iterator
    that makes its batches in the calling process is watched at its second batch: if that draws from
    the global generators, from which the training may draw as well, none is made ahead.

    Args:
        batches: The iterator of a loader.
        send: Sends a batch on its way.
        receive: Makes of a batch that was sent what is handed out.
    """

    def __init__(
        self,
        batches: Iterator[Batch],
        send: Callable[[Batch], _Sent],
        receive: Callable[[_Sent], Batch],
    ) -> None:
        self._batches: Iterator[Batch] | None = batches
        self._send = send
        self._receive = receive
        self._next: tuple[_Sent] | Exception | None = None
        """The batch that was sent ahead, or what asking for it raised."""
        self._asked = 0
        self._draws = True

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
            ready = is_ready(self._batches)
            if not waiting and (self._draws if ready is None else not ready):
                return None
            self._asked += 1
            # The first one may draw the seed of an order.
            watch = DrawWatch() if ready is None and self._asked == 2 else None
            batch = next(self._batches)
            if watch is not None:
                self._draws = watch.drew()
            return (self._send(batch),)
        except Exception as error:  # it belongs to the batch that is to come
            return error


def is_ready(batches: Iterator[Batch]) -> bool | None:
    """Return whether the next batch, or the end, can be had without waiting for another process.

    None: it is made in this process when it is asked for, or nothing is known about it.
    """
    ready = getattr(batches, "ready", None)  # which what stands for batches may hand on
    return bool(ready()) if callable(ready) else next_has_arrived(batches)
