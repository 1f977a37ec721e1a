"""Batches that go to the device one ahead, on a side stream: ``prefetch(loader, device)``."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, Protocol, runtime_checkable

from lightning_fastdata.augment import as_batch_transform
from lightning_fastdata.batches.staged import (
    StagedBatch,
    batch_samples,
    move,
)
from lightning_fastdata.device.backend import device_draws, device_of, device_streams
from lightning_fastdata.device.lookahead import Crossing, OneAhead, SideLane
from lightning_fastdata.errors import BatchError, OptionsError
from lightning_fastdata.randomness.global_generators import kept_random_state
from lightning_fastdata.randomness.seeds import seed_global_generators
from lightning_fastdata.types import B, Batch, Batch_co, SampleKey, SetsEpoch

if TYPE_CHECKING:
    import torch

    from lightning_fastdata.augment import StageTransform
    from lightning_fastdata.device.backend import DeviceStreams


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
    the copy runs beside only if the loader has ``pin_memory=True``. On other devices it is moved
    and transformed when it is asked for. The batches are the same either way.

    Args:
        loader: A ``FastDataLoader``, any ``DataLoader``, any iterable of batches.
        device: Where the batches go.
        transform: What runs on each batch on the device: a callable or ``nn.Module`` from batch to
            batch, or a pipeline of Albumentations or of torchvision's v2. A
            ``FastDataLoader(transform=..., on_device=True, staged=...)`` brings its own, which runs
            first. It runs while the step before still computes, so it must not read what the
            training writes (weights, running means).
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
    return Prefetched(loader, device_of(device), transform, seed=seed, streams=streams)


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


@runtime_checkable
class _Saves(Protocol):
    def state_behind(self, ahead: int) -> dict[str, Any]: ...
    def load_state_dict(self, state: dict[str, Any], /) -> None: ...


def _saves(loader: object) -> _Saves:
    if not isinstance(loader, _Saves):
        raise OptionsError(
            f"prefetch() takes the batches of a {type(loader).__name__} one ahead of their use, "
            "and can save and restore the position in a FastDataLoader only. Give it one."
        )
    return loader


class _Count(NamedTuple):
    batches: int
    samples: int


class Prefetched(Generic[Batch_co]):
    """What :func:`prefetch` returns."""

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
        """Batches and samples of the next epoch that were used before."""

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

    def __iter__(self) -> Iterator[Batch_co]:
        """Begin an epoch."""
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
        """Go on, with the next iteration, behind the batch after which a state was saved.

        Raises:
            OptionsError: The loader is no FastDataLoader, or the state is none of one.
        """
        _saves(self.loader).load_state_dict(state)
        self._epochs, self._work = state["epoch"], None
        self._start = _Count(*state.get("prefetch", (state["batches"], 0)))


class _Work:
    """Moves and transforms the batches of one epoch."""

    def __init__(self, owner: Prefetched[Any], epoch: int, start: _Count, *, aside: bool) -> None:
        self._device = owner.device
        self._aside = aside
        self._seed, self._epoch = owner.seed, epoch
        loader: object = owner.loader
        self._prepared: _Prepared | None = None
        if isinstance(loader, _BringsTransform) and loader.on_device:
            self._prepared = loader.transform
        self._transform: StageTransform | None = owner._transform
        self._counts = deque([start], 2)
        """Before the last batch that was sent, and behind it."""

    def used(self, ahead: int) -> _Count:
        """Return what was used if so many batches, 0 or 1, were sent and not used yet."""
        return self._counts[0 if ahead else -1]

    def begun(self) -> Callable[[Batch], Batch]:
        """Return what is to be done to the next batch, as often as it is called."""
        count = self._counts[-1]
        self._counts.append(_Count(count.batches + 1, count.samples))
        return partial(self._carried_out, count)

    def __call__(self, batch: Batch) -> Batch:
        """Do it to the next batch."""
        return self.begun()(batch)

    def _carried_out(self, count: _Count, batch: Batch) -> Batch:
        moved = move(batch, self._device, non_blocking=self._aside)
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
        key = SampleKey(self._seed, self._epoch, count.samples)
        self._counts[-1] = _Count(count.batches + 1, count.samples + batch_samples(moved))
        with drawn_under(self._seed, self._epoch, count.batches, self._device):
            return self._transform.apply_unprepared(moved, key)


@contextmanager
def drawn_under(seed: int, epoch: int, number: object, device: torch.device) -> Iterator[None]:
    """Seed the global generators for one batch, and put them back.

    ``random``, ``numpy.random``, and torch's of the CPU and of the device; ``number`` stands
    for the batch in its epoch.
    """
    with kept_random_state():
        seed_global_generators(seed, epoch, ("batch", number))
        with device_draws(device):
            yield
