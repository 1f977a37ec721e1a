"""What a loader saves of its training, and how a pass goes on from that."""

from __future__ import annotations

import importlib.metadata
import warnings
from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from torch.utils.data import DistributedSampler, IterableDataset

from lightning_fastdata.errors import FastDataWarning
from lightning_fastdata.loading.position import LoaderState
from lightning_fastdata.order.epoch_order import dataset_length
from lightning_fastdata.order.indices import (
    EpochIndices,
    HasEpoch,
    Start,
    Stateful,
    fingerprint,
    restore_sampler,
)
from lightning_fastdata.order.samplers import epoch_order
from lightning_fastdata.types import SetsEpoch

if TYPE_CHECKING:
    from lightning_fastdata.loading.position import Pass


class SavedLoader(Protocol):
    """What of a FastDataLoader its state rests on."""

    @property
    def dataset(self) -> Any:
        """Map-style or a stream."""

    @property
    def batch_size(self) -> int | None:
        """Samples per batch."""

    @property
    def batch_sampler(self) -> Any:
        """Torch's, or the user's own."""

    @property
    def seed(self) -> int:
        """Of the per-sample randomness."""


@runtime_checkable
class _SizesBatches(Protocol):
    batch_size: int | None


def as_it_is(loader: SavedLoader, indices: EpochIndices | None) -> LoaderState:
    """Return the state of a loader at the start of epoch 0. ``indices``: None of a stream."""
    sampler = None if indices is None else indices.sampler
    batch_size = loader.batch_size
    if batch_size is None and isinstance(loader.batch_sampler, _SizesBatches):
        batch_size = loader.batch_sampler.batch_size
    stream = isinstance(loader.dataset, IterableDataset)
    return LoaderState(
        epoch=0,
        batches=0,
        samples=0,
        length=None if stream else dataset_length(loader.dataset),
        batch_size=batch_size,
        world_size=sampler.num_replicas if isinstance(sampler, DistributedSampler) else 1,
        seed=loader.seed,
        order="a stream" if stream else type(sampler).__name__,
        dataset=fingerprint(loader.dataset),
        package=_own_version(),
    )


def _own_version() -> str:
    try:
        return importlib.metadata.version("lightning-fastdata")
    except importlib.metadata.PackageNotFoundError:  # it is on the path without being installed
        return ""


def samples_before(indices: EpochIndices, now: LoaderState, epoch: int, batches: int) -> int:
    """Return how many samples of an epoch all ranks have had after so many batches of each."""
    order = epoch_order(indices.source, epoch)
    if order is None:
        return min(batches * (now.batch_size or 1) * now.world_size, now.length or 2**62)
    return order.samples_before(min(batches, len(order)))


def with_indices(state: LoaderState, indices: EpochIndices) -> LoaderState:
    """Return a state with what its sampler drew, and which samples were delivered."""
    if not state.batches:
        return replace(state, drawn=indices.to_draw())
    samples = samples_before(indices, state, state.epoch, state.batches)
    digest = indices.digest(state.epoch, samples, state.batches)
    return replace(state, samples=samples, digest=digest, drawn=indices.drawn())


def start_of(begun: Pass, now: LoaderState, indices: EpochIndices) -> Start:
    """Return where the indices of a pass begin, and tell what of the loader is not as it was."""
    state = begun.state
    if state is None:
        return Start()
    if not state.batches:
        restore_sampler(indices.sampler, state.drawn)
        return Start()
    if state.samples < 0:  # a training that was saved without our state
        return Start(
            batches=state.batches,
            samples=samples_before(indices, now, begun.epoch, state.batches),
        )
    _tell(state, now, indices)
    # The digest of a sampler's own order is that of one rank, and rank 0 saves.
    shared = now.world_size > 1 and epoch_order(indices.source, begun.epoch) is None
    return Start(
        batches=state.batches,
        samples=state.samples,
        same_batches=state.same_steps(now),
        drawn=state.drawn or None,
        digest=None if shared else state.digest,
    )


def _tell(state: LoaderState, now: LoaderState, indices: EpochIndices) -> None:
    texts = list(_told(state, now, indices))
    if texts:
        warnings.warn(" ".join(texts), FastDataWarning, stacklevel=2)


def _told(state: LoaderState, now: LoaderState, indices: EpochIndices) -> Iterator[str]:
    where = f"epoch {state.epoch} after {state.samples} samples"
    difference = next(state.differences(now), None)
    if difference is not None:
        yield (
            f"The training was saved in {where}, and since then something has changed: "
            f"{difference}. The epoch goes on at that place of the order there is now, so that "
            "samples may come twice or not at all in it; later epochs are whole."
        )
    if state.same_steps(now):
        return
    was = f"{state.batch_size} x {state.world_size} ranks"
    steps = f"steps of {now.batch_size} x {now.world_size} ranks, which were of {was}"
    known = epoch_order(indices.source, state.epoch) is not None
    if known or now.world_size == state.world_size:
        yield f"From {where} on there are {steps}: no sample comes twice or is left out."
    else:
        yield (
            f"From {where} on there are {steps}, and {now.order} decides itself what each rank "
            "gets: samples may come twice or not at all in this epoch."
        )


def dataset_state(dataset: object) -> dict[str, Any] | None:
    """Return what a map-style dataset saves of itself; None: nothing."""
    if isinstance(dataset, IterableDataset) or not isinstance(dataset, Stateful):
        return None
    return dataset.state_dict()


def restore_dataset(dataset: object, state: LoaderState) -> None:
    """Give a map-style dataset what it saved of itself."""
    saved = state.dataset_state
    if saved is not None and isinstance(dataset, Stateful):
        dataset.load_state_dict(saved)


def sampler_epoch(loader: Any) -> int | None:
    """Return the epoch that was set for a loader's sampler; None: it has none.

    Lightning sets it after it has made the iterator of a resumed run.
    """
    for sampler in (loader.sampler, getattr(loader.batch_sampler, "sampler", None)):
        if isinstance(sampler, SetsEpoch) and isinstance(sampler, HasEpoch):
            return sampler.epoch
    return None
