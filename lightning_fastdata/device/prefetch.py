"""Batches sent to the device one ahead of use, on a side stream: ``prefetch(loader, device)``."""

from __future__ import annotations

import warnings
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from typing import TYPE_CHECKING, Any, Final, Generic, NamedTuple, TypeVar

from lightning_fastdata.augment import StageTransform, as_batch_transform
from lightning_fastdata.batches.staged import (
    StagedBatch,
    batch_samples,
    leaves,
    move,
    shows_its_memory,
)
from lightning_fastdata.device.backend import (
    DeviceStreams,
    device_draws,
    device_of,
    device_streams,
    is_out_of_memory,
)
from lightning_fastdata.device.shared_draws import told_of_shared_draws
from lightning_fastdata.errors import BatchError, FastDataWarning, OptionsError
from lightning_fastdata.order.epoch_order import rank_now
from lightning_fastdata.order.samplers import tell_samplers
from lightning_fastdata.randomness.global_generators import kept_random_state
from lightning_fastdata.randomness.seeds import derived_seed, seed_global_generators
from lightning_fastdata.torch_internals import next_has_arrived
from lightning_fastdata.types import AroundLoader, B, Batch, Batch_co, SampleKey

if TYPE_CHECKING:
    import torch


BATCHES_AHEAD: Final = 1
"""Most batches that a lane holds on the device besides the one that is trained on."""
_NO_ROOM: Final = (
    "The device has no memory for a batch ahead of the one that is trained on. From now on each is "
    "moved when it is its turn. A smaller batch_size leaves room for it."
)
_Sent = TypeVar("_Sent")


def prefetch(
    loader: Iterable[B],
    device: torch.device | str | int,
    transform: Callable[..., Any] | None = None,
    *,
    seed: int = 0,
    streams: Callable[[torch.device], DeviceStreams | None] = device_streams,
) -> Prefetched[B]:
    """Return the batches of a loader on a device, transformed there, each one batch ahead.

    On CUDA a batch is copied and transformed on a side stream while the step before it computes;
    the copy overlaps only if the loader has ``pin_memory=True``. On other devices a batch is moved
    and transformed when it is asked for. The batches are the same either way.

    Args:
        loader: A ``FastDataLoader``, any ``DataLoader``, any iterable of batches.
        device: Device to which the batches go.
        transform: Transform of each batch on the device: a callable or ``nn.Module`` from batch to
            batch, or a pipeline of Albumentations or of torchvision's v2. A
            ``FastDataLoader(transform=..., on_device=True, staged=...)`` brings its own, which runs
            first. It runs while the step before still computes, so it must not read what the
            training writes (weights, running means).
        seed: Seed of the transform's draws, which depend on it, the rank, the epoch and the number
            of the batch, and on nothing else. ``random``, ``numpy.random`` and torch's generators
            of the CPU and of the device are restored after each batch.
        streams: Returns the streams of a device, or None if it has none.

    Returns:
        An iterable that can be iterated again, of the loader's length if it has one. Its other
        attributes are the loader's. ``set_epoch`` sets the epoch of the draws and of the samplers;
        without it epochs are counted from 0.

    Raises:
        OptionsError: ``device`` is no device, or this machine does not have it; ``loader`` cannot
            be iterated.
        TransformError: ``transform`` cannot transform a batch.

    Example:
        >>> for epoch in range(epochs):
        ...     batches.set_epoch(epoch)
        ...     for images, labels in batches:  # on the device, augmented
        ...         step(images, labels)
    """
    return Prefetched(loader, device_of(device), transform, seed=seed, streams=streams)


def _saves(loader: Any) -> Any:
    """Return a loader that can save its position; raise OptionsError if it is another one."""
    if not hasattr(loader, "state_behind"):
        raise OptionsError(
            f"prefetch() takes the batches of a {type(loader).__name__} one ahead of their use, "
            "and can save and restore the position in a FastDataLoader only. Give it one."
        )
    return loader


class _Count(NamedTuple):
    batches: int
    samples: int


class Prefetched(AroundLoader[Batch_co]):
    """The iterable of batches that :func:`prefetch` returns."""

    def __init__(
        self,
        loader: Iterable[Batch_co],
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
        self._work: _Work | None = None
        self._batches: Iterator[Batch_co] | None = None
        self._start = _Count(0, 0)
        """Batches and samples of the next epoch that were used before a resume."""

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch of the next iteration, and of the loader's samplers that have one."""
        self._next_epoch = epoch
        samplers = (getattr(self.loader, name, None) for name in ("sampler", "batch_sampler"))
        tell_samplers(epoch, self.loader, *samplers)

    def __iter__(self) -> Iterator[Batch_co]:
        epoch = self._epochs if self._next_epoch is None else self._next_epoch
        self._next_epoch, self._epochs = None, epoch + 1
        if self._lane is None:
            streams = self._streams(self.device)
            self._lane = None if streams is None else SideLane(streams)
        lane = self._lane
        start, self._start = self._start, _Count(0, 0)
        self._work = work = _Work(self, epoch, start, aside=lane is not None)
        batches = iter(self.loader)
        if lane is None:
            self._batches = map(work, batches)
            return self._batches
        ahead: Iterator[Batch_co] = OneAhead(
            batches,
            lambda batch: lane.send(batch, work.begun()),
            Crossing.land,
            lambda: lane.has_room,
        )
        self._batches = ahead
        return ahead

    def state_dict(self) -> dict[str, Any]:
        """Return how far the training has come, as ``FastDataLoader.state_dict()`` does.

        Raises:
            OptionsError: The loader is no FastDataLoader.
        """
        ahead = self._batches.ahead if isinstance(self._batches, OneAhead) else 0
        state = _saves(self.loader).state_behind(ahead)
        used = self._start if self._work is None else self._work.used(ahead)
        return {**state, "prefetch": list(used if state["batches"] else _Count(0, 0))}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Have the next iteration go on after the last batch before a state was saved.

        Raises:
            OptionsError: The loader is no FastDataLoader, or the state is not one of a loader.
        """
        _saves(self.loader).load_state_dict(state)
        self._epochs, self._work = state["epoch"], None
        self._start = _Count(*state.get("prefetch", (state["batches"], 0)))


class _Work:
    """Moves and transforms the batches of one epoch."""

    def __init__(self, owner: Prefetched[Any], epoch: int, start: _Count, *, aside: bool) -> None:
        self._device = owner.device
        self._aside = aside
        self._seed = derived_seed(owner.seed, "prefetch", rank_now().number)
        self._epoch = epoch
        self._loader: Any = owner.loader
        # The program may have changed the pipeline since the epoch before.
        owner._transform = None if owner._transform is None else owner._transform.renewed()
        self._transform: StageTransform | None = owner._transform
        self._counts = deque([start], 2)
        """Batches and samples before the last batch that was sent, and those including it."""

    def used(self, ahead: int) -> _Count:
        """Return the batches and samples used, if ``ahead`` batches (0 or 1) are not used yet."""
        return self._counts[0 if ahead else -1]

    def begun(self) -> Callable[[Batch], Batch]:
        """Return a function that moves and transforms the next batch; it may be called again."""
        count = self._counts[-1]
        self._counts.append(_Count(count.batches + 1, count.samples))
        return partial(self._carried_out, count)

    def __call__(self, batch: Batch) -> Batch:
        return self.begun()(batch)

    def _carried_out(self, count: _Count, batch: Batch) -> Batch:
        moved = move(batch, self._device, non_blocking=self._aside)
        if isinstance(moved, StagedBatch) and moved.draws is None:
            moved = moved.batch
        elif isinstance(moved, StagedBatch):
            if not getattr(self._loader, "on_device", False):
                raise BatchError(
                    "The loader gave a StagedBatch with draws, but has no transform= with "
                    "on_device=True that they were drawn for. Pass the FastDataLoader itself."
                )
            # The loader takes in a changed pipeline as its epoch begins, with the first batch.
            moved = self._loader.transform.apply(moved.batch, moved.draws)
        if self._transform is None:
            return moved
        key = SampleKey(self._seed, self._epoch, count.samples)
        self._counts[-1] = _Count(count.batches + 1, count.samples + batch_samples(moved))
        draws = drawn_under(self._seed, self._epoch, count.batches, self._device)
        with draws, told_of_shared_draws(self._transform, moved):
            return self._transform.apply_unprepared(moved, key)


@contextmanager
def drawn_under(seed: int, epoch: int, number: object, device: torch.device) -> Iterator[None]:
    """Seed the global generators for one batch in the block, and restore them afterwards.

    They are ``random``, ``numpy.random``, and torch's generators of the CPU and of the device;
    ``number`` identifies the batch in its epoch.
    """
    with kept_random_state():
        seed_global_generators(seed, epoch, ("batch", number))
        with device_draws(device):
            yield


class Crossing:
    """A batch on its way to the device; it keeps the batch as it was sent, to redo the work."""

    __slots__ = ("__weakref__", "_lane", "_work", "done", "moved", "source")

    def __init__(self, source: Batch, work: Callable[[Batch], Batch], lane: SideLane) -> None:
        self.source = source
        """The batch as it was sent."""
        self._work = work
        self._lane = lane
        self.moved: tuple[Batch] | None = None
        """Result of the side stream; None: there is none, or it was handed out or dropped."""
        self.done: torch.Event | None = None
        """Event after the work of the side stream; None: it was given no work."""

    def land(self) -> Batch:
        """Return the batch for use on the current stream, which waits for it; the host does not.

        If no side stream has worked on it, or it has landed before, the current one does the work.
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
        """Drop the result of the side stream if it has not landed; return whether it had one."""
        dropped, self.moved = self.moved is not None, None
        return dropped


class SideLane:
    """A side stream and the batches that are on it.

    A batch is sent when the device has done all steps but the last that it was given, so that it
    holds :data:`BATCHES_AHEAD` batches besides the one of that step. If memory runs out all the
    same, no more batches are sent ahead.
    """

    def __init__(self, streams: DeviceStreams) -> None:
        self.streams = streams
        self._landed: torch.Event | None = None
        """Event after the steps before the batch that landed last; None: no batch has landed."""
        self._ahead: weakref.ref[Crossing] | None = None
        """Batch that was sent last; None: none was."""
        self._full = False
        self._sources: deque[tuple[torch.Event, Batch]] = deque()
        weakref.finalize(self, _wait_for, self._sources)

    @property
    def has_room(self) -> bool:
        """Whether a batch can be sent now, while the one that landed last is trained on."""
        passed = self._landed is None or self._landed.query()
        return passed and not self._full

    def send(self, batch: Batch, work: Callable[[Batch], Batch]) -> Crossing:
        """Have the side stream do ``work`` on a batch, and return without waiting for it.

        The host waits until there is room for it.

        Args:
            batch: A batch in host memory, or on the device as the consumer's stream left it. It is
                kept alive until the side stream is done with it.
            work: Moves and transforms the batch, and reads nothing else.
        """
        crossing = Crossing(batch, work, self)
        given = list(leaves(batch))
        if self._full or not all(map(shows_its_memory, given)):
            # Memory that cannot be seen might be reused too early: the consumer's stream works.
            return crossing
        self._make_room()
        while self._sources and self._sources[0][0].query():
            self._sources.popleft()
        streams = self.streams
        on_host = all(getattr(leaf, "is_cpu", False) for leaf in given)
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
        """Note that the current stream will now train on a batch."""
        self._landed = self.streams.mark()

    def drop(self) -> bool:
        """Drop the batch that was sent ahead, which is made anew at its turn, and send no more.

        Returns:
            Whether there was a batch to drop.
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
        with suppress(RuntimeError):  # a device that has failed no longer reads the batch
            sources[0][0].synchronize()
        sources.popleft()


class OneAhead(Generic[_Sent]):
    """Iterates batches, each sent to the device while the one before it is used.

    The next batch is asked for early only if it is known to be ready, else at its turn: no step
    waits for the batch after its own. So a batch that is made in the calling process when it is
    asked for sees what the step before has written, and draws as it would without this class.
    ``receive`` turns a batch that was sent into the one that is handed out.
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
        """Batch that was sent ahead, or the error that asking for it raised; None: neither."""

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
        """Number of batches taken from the loader and not handed out yet: 0 or 1."""
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
        except Exception as error:  # raised at the turn of the batch that comes next
            return error


def is_ready(batches: Iterator[Batch]) -> bool | None:
    """Return whether the next batch, or the end, comes without waiting.

    None: it is made in this process when it is asked for, or nothing is known about it.
    """
    ready = getattr(batches, "ready", None)  # wrappers of batches may have it, too
    found: bool | None = ready() if callable(ready) else next_has_arrived(batches)
    return found
