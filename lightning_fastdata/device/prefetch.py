"""Batches that go to the device one ahead, on a side stream: ``prefetch(loader, device)``."""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any, Final, Generic, Protocol, TypeVar, runtime_checkable

import torch

from lightning_fastdata.augment import as_batch_transform
from lightning_fastdata.batches.staged import (
    StagedBatch,
    batch_samples,
    leaves,
    move,
    shows_its_memory,
)
from lightning_fastdata.batches.streams import device_streams
from lightning_fastdata.errors import BatchError, OptionsError
from lightning_fastdata.executors.fetch import seed_global_generators
from lightning_fastdata.randomness.generators import DrawWatch, kept_random_state
from lightning_fastdata.torch_internals import next_has_arrived
from lightning_fastdata.types import Batch, SampleKey, SetsEpoch

if TYPE_CHECKING:
    from lightning_fastdata.augment import StageTransform
    from lightning_fastdata.batches.streams import DeviceStreams

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
    ready = getattr(batches, "ready", None)
    return bool(ready()) if callable(ready) else next_has_arrived(batches)


def prefetch(
    loader: Iterable[Batch],
    device: torch.device | str | int,
    transform: Callable[..., Any] | None = None,
    *,
    seed: int = 0,
    streams: Callable[[torch.device], DeviceStreams | None] = device_streams,
) -> Prefetched:
    """Return the batches of a loader on a device, transformed there, each one batch ahead.

    On CUDA a batch is copied and transformed on a side stream while the step before it computes;
    the copy runs beside only if the loader has ``pin_memory=True``. On other devices it is moved
    and transformed when it is asked for. The batches are the same either way.

    Args:
        loader: A ``FastDataLoader``, any ``DataLoader``, any iterable of batches.
        device: Where the batches go.
        transform: What runs on each batch on the device: a callable or ``nn.Module`` from batch to
            batch, or an Albumentations pipeline. A ``FastDataLoader(transform=..., on_device=True,
            staged=...)`` brings its own, which runs first. It runs while the step before still
            computes, so it must not read what the training writes (weights, running means).
        seed: Seed of the transform's draws, which depend on it, the epoch and the number of the
            batch, and on nothing else. ``random``, ``numpy.random`` and torch's generators of the
            CPU and of the device are put back after it.
        streams: The streams of a device; None where it has none.

    Returns:
        An iterable that can be iterated again, of the loader's length if it has one. Other
        attributes are the loader's. ``set_epoch`` sets the epoch of the draws and of the samplers;
        without it epochs are counted from 0.

    Raises:
        TransformError: ``transform`` cannot transform a batch.

    Example:
        >>> for epoch in range(epochs):
        ...     batches.set_epoch(epoch)
        ...     for images, labels in batches:  # on the device, augmented
        ...         step(images, labels)
    """
    if isinstance(device, int):
        device = torch.device("cuda", device)
    return Prefetched(loader, torch.device(device), transform, seed=seed, streams=streams)


@runtime_checkable
class _HasSampler(Protocol):
    sampler: object


@runtime_checkable
class _HasBatchSampler(Protocol):
    batch_sampler: object


class _Prepared(Protocol):
    def apply(self, batch: Batch, draws: object, /) -> Batch: ...


@runtime_checkable
class _BringsTransform(Protocol):
    on_device: bool
    transform: _Prepared | None


class Prefetched:
    """What :func:`prefetch` returns."""

    def __init__(
        self,
        loader: Iterable[Batch],
        device: torch.device,
        transform: Callable[..., Any] | None,
        *,
        seed: int,
        streams: Callable[[torch.device], DeviceStreams | None],
    ) -> None:
        if not isinstance(loader, Iterable):
            raise OptionsError(
                f"prefetch() got {loader!r} for a loader, which cannot be iterated; pass a "
                "DataLoader or another iterable of batches."
            )
        self.loader = loader
        self.device = device
        self.seed = seed
        self._streams = streams
        self._lane: SideLane | None = None
        self._transform = None if transform is None else as_batch_transform(transform)
        self._epochs = 0
        self._next_epoch: int | None = None

    def __len__(self) -> int:
        """Batches of the loader; a TypeError if it has no length."""
        return len(self.loader)  # type: ignore[arg-type]

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name == "loader":
            raise AttributeError(name)
        return getattr(self.loader, name)

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch of the next iteration, and of the loader's samplers that have one."""
        self._next_epoch = epoch
        owners: list[object] = [self.loader]
        if isinstance(self.loader, _HasSampler):
            owners.append(self.loader.sampler)
        if isinstance(self.loader, _HasBatchSampler):
            owners.append(self.loader.batch_sampler)
            if isinstance(self.loader.batch_sampler, _HasSampler):
                owners.append(self.loader.batch_sampler.sampler)
        for owner in {id(owner): owner for owner in owners}.values():
            if isinstance(owner, SetsEpoch):
                owner.set_epoch(epoch)

    def __iter__(self) -> Iterator[Batch]:
        """Begin an epoch."""
        epoch = self._epochs if self._next_epoch is None else self._next_epoch
        self._next_epoch, self._epochs = None, epoch + 1
        if self._lane is None:
            streams = self._streams(self.device)
            self._lane = None if streams is None else SideLane(streams)
        lane = self._lane
        work = _Work(self, epoch, aside=lane is not None)
        batches = iter(self.loader)
        if lane is None:
            return map(work, batches)
        # What was drawn by sample reads the batch and nothing else; a callable may read anything.
        waits = self._transform is not None
        return OneAhead(
            batches, lambda batch: lane.send(batch, work, after_consumer=waits), Crossing.land
        )


class _Work:
    """Moves and transforms the batches of one epoch."""

    def __init__(self, owner: Prefetched, epoch: int, *, aside: bool) -> None:
        self._device = owner.device
        self._aside = aside
        self._seed, self._epoch = owner.seed, epoch
        loader: object = owner.loader
        self._prepared: _Prepared | None = None
        if isinstance(loader, _BringsTransform) and loader.on_device:
            self._prepared = loader.transform
        self._transform: StageTransform | None = owner._transform
        self._batches = self._samples = 0

    def __call__(self, batch: Batch) -> Batch:
        moved = move(batch, self._device, non_blocking=self._aside)
        number, self._batches = self._batches, self._batches + 1
        if isinstance(moved, StagedBatch) and moved.draws is None:
            moved = moved.batch
        elif isinstance(moved, StagedBatch):
            if self._prepared is None:
                raise BatchError(
                    "The loader gave a StagedBatch with draws, but has no transform= with "
                    "on_device=True that they were drawn for. Pass the FastDataLoader itself."
                )
            moved = self._prepared.apply(moved.batch, moved.draws)
        if self._transform is None:
            return moved
        key = SampleKey(self._seed, self._epoch, self._samples)
        self._samples += batch_samples(moved)
        with _drawn_under(self._seed, self._epoch, number, self._device):
            return self._transform.apply_unprepared(moved, key)


@contextmanager
def _drawn_under(seed: int, epoch: int, number: int, device: torch.device) -> Iterator[None]:
    """Seed the global generators for one batch, and put them back."""
    with kept_random_state():
        seed_global_generators(seed, epoch, ("batch", number))
        if device.type != "cuda":
            yield
            return
        index = torch.cuda.current_device() if device.index is None else device.index
        generator = torch.cuda.default_generators[index]
        before = generator.get_state()
        generator.manual_seed(int(torch.randint(2**62, ())))
        try:
            yield
        finally:
            generator.set_state(before)
