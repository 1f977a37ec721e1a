"""What a loader saves of its training, and how a pass goes on from that."""

from __future__ import annotations

import functools
import importlib.metadata
import warnings
import zlib
from collections.abc import Iterator, Sequence, Sized
from dataclasses import replace
from itertools import islice
from typing import TYPE_CHECKING, Any, Final, cast

from torch.utils.data import IterableDataset

from lightning_fastdata.batches.staged import StagedBatch
from lightning_fastdata.caches.cached import CachedDataset
from lightning_fastdata.errors import FastDataWarning
from lightning_fastdata.executors.stream_state import ReadSamples, tell_others
from lightning_fastdata.host import clock
from lightning_fastdata.loading.kept_executor import EpochIterator
from lightning_fastdata.loading.position import LoaderState, Pass, UnderWay
from lightning_fastdata.order.epoch_order import dataset_length
from lightning_fastdata.order.indices import EpochIndices, Start, Stateful
from lightning_fastdata.order.mixture import Mixture
from lightning_fastdata.order.ranks import deciding, sampler_in, share_in, split_of
from lightning_fastdata.order.samplers import epoch_order, rows_in
from lightning_fastdata.torch_internals import under_way
from lightning_fastdata.tree import held
from lightning_fastdata.types import Batch, SetsEpoch

if TYPE_CHECKING:
    from lightning_fastdata.loading.loader import FastDataLoader

_DIGESTS_KEPT: Final = 256


def as_it_is(loader: FastDataLoader[Any], indices: EpochIndices | None) -> LoaderState:
    """Return the state of a loader at the start of epoch 0. ``indices``: None of a stream."""
    batch_size = loader.batch_size
    if batch_size is None:
        batch_size = rows_in(loader.batch_sampler)
    stream = isinstance(loader.dataset, IterableDataset)
    split = None if indices is None else split_of(indices.source)
    return LoaderState(
        epoch=0,
        batches=0,
        samples=0,
        length=None if stream else dataset_length(loader.dataset),
        batch_size=batch_size,
        world_size=1 if split is None else split.num_replicas,
        seed=loader.seed,
        order="a stream" if indices is None else type(deciding(indices.source)).__name__,
        dataset=_fingerprint(loader.dataset),
        package=own_version(),
    )


def _fingerprint(dataset: object) -> str:
    """Return 16 hexadecimal digits that differ for datasets of another class, length or files.

    No sample is read. Of a dataset that lists its files (``samples``, ``imgs``) 64 names count,
    without their folders, as data may move to another machine.
    """
    text: list[str] = []
    while dataset is not None and len(text) < 64:
        if type(dataset) is not CachedDataset:  # with a cache, it is the same data
            text.append(f"{type(dataset).__module__}.{type(dataset).__qualname__}")
        listed = next((v for n in ("samples", "imgs") if (v := _listed(dataset, n))), None)
        if listed is not None:
            text.append(str(len(listed)))
            text.extend(_file_name(listed[i]) for i in range(0, len(listed), -(-len(listed) // 64)))
        dataset = held(dataset, "dataset")
    joined = "\n".join(text).encode(errors="surrogateescape")
    return f"{zlib.crc32(joined):08x}{zlib.adler32(joined):08x}"


def _listed(dataset: object, name: str) -> Sequence[object] | None:
    found = held(dataset, name)
    return found if isinstance(found, list | tuple) and found else None


def _file_name(entry: object) -> str:
    path = entry[0] if isinstance(entry, tuple | list) and entry else entry
    return path.replace("\\", "/").rpartition("/")[2] if isinstance(path, str) else ""


@functools.cache
def own_version() -> str:
    """Return the version of this package; "" where it is on the path without being installed."""
    try:
        return importlib.metadata.version("lightning-fastdata")
    except importlib.metadata.PackageNotFoundError:
        return ""


def samples_before(indices: EpochIndices, now: LoaderState, epoch: int, batches: int) -> int:
    """Return how many samples of an epoch all ranks have had after so many batches of each."""
    known = indices.samples(epoch, batches)
    if known is None:
        return min(batches * (now.batch_size or 1) * now.world_size, now.length or 2**62)
    return known


def with_indices(state: LoaderState, indices: EpochIndices) -> LoaderState:
    """Return a state with what its sampler drew, and which samples were delivered."""
    if not state.batches:
        return replace(state, drawn=indices.drawn(state.epoch))
    samples = samples_before(indices, state, state.epoch, state.order_from)
    digest = indices.digest(state.epoch, samples, state.order_from)
    return replace(state, samples=samples, digest=digest, drawn=indices.drawn())


def start_of(begun: Pass, now: LoaderState, indices: EpochIndices) -> Start:
    """Return where the indices of a pass begin, and tell what of the loader is not as it was."""
    state = begun.state
    if state is None:
        return Start()
    if not state.batches:
        indices.prepare(state.drawn)
        return Start(drawn=None if "ahead" in state.drawn else state.drawn or None)
    if state.samples < 0:  # a training that was saved without our state
        tell_unknown(state, f"with batch {state.batches} of the order there is now")
        return Start(
            batches=state.batches,
            samples=samples_before(indices, now, begun.epoch, state.batches),
        )
    changed = _tell(state, now, indices)
    # The digest of a sampler that splits itself is that of one rank, and rank 0 saves.
    splits = now.world_size > 1 and not _shared_here(indices, begun.epoch)
    return Start(
        batches=state.order_from,
        samples=state.samples,
        late=tuple(state.late),
        same_batches=state.same_steps(now),
        drawn=state.drawn or None,
        digest=None if splits or changed else state.digest,
    )


def tell_unknown(state: LoaderState, where: str) -> None:
    """Warn that it is not known which batches were taken; the epoch goes on ``where``."""
    warnings.warn(
        f"The training took {state.batches} batches of epoch {state.epoch} before it was saved, "
        "and the checkpoint does not hold which: another loader gave them, or a state_dict() of a "
        f"data module does not call super(). The epoch goes on {where}, so that samples may come "
        "twice or not at all in it; later epochs are whole.",
        FastDataWarning,
        stacklevel=2,
    )


def tell_ranks(state: LoaderState) -> None:
    """Warn that what other ranks had taken is not known."""
    warnings.warn(
        f"Batches come as they are ready (in_order=False), and each of the {state.world_size} "
        "ranks had taken others when the training was saved. Those of rank 0 are known, so that "
        f"in epoch {state.epoch} some samples may come twice or not at all on other ranks; later "
        "epochs are whole. For an exact resume leave in_order=True.",
        FastDataWarning,
        stacklevel=2,
    )


def tell_draws(stream: object) -> None:
    """Warn that a stream draws from generators that no state holds."""
    warnings.warn(
        f"{type(stream).__name__} draws from global generators (random, numpy.random, torch). "
        "Those of the training process are not saved, and workers that are started anew for each "
        "epoch are seeded from torch's. So after this resume it draws other numbers than without a "
        "break, with workers from the next epoch on. Read it with num_workers=1 or more and "
        "persistent_workers=True, or have it draw from a generator of its own that is seeded by "
        "the epoch, which on_train_epoch_start can tell it.",
        FastDataWarning,
        stacklevel=2,
    )


def tell_left(stream: object, epoch: int) -> None:
    """Warn that a stream was left before its end, and its state from then is not known."""
    warnings.warn(
        f"The pass over {type(stream).__name__} before epoch {epoch} was left before its end (as "
        "with limit_train_batches), and its state_dict() from then is not known. The epoch begins "
        "as that of a new stream, which may be other samples than without a break. Have the "
        "stream end by itself.",
        FastDataWarning,
        stacklevel=2,
    )


def cut_anew(state: LoaderState, now: LoaderState, indices: EpochIndices) -> LoaderState:
    """Return a state with its position counted in batches of the present size.

    They count from the end of the epoch, where the whole batches are those that are left.
    """
    if state.same_steps(now):
        return state
    start = Start(batches=state.batches * state.world_size // now.world_size, samples=state.samples)
    left = indices.batches_left(state.epoch, start)
    return state if left is None else replace(state, batches=len(indices) - left)


def _shared_here(indices: EpochIndices, epoch: int) -> bool:
    """Return whether it is known here what the other ranks get."""
    return epoch_order(indices.source, epoch) is not None or share_in(indices.source) is not None


def _tell(state: LoaderState, now: LoaderState, indices: EpochIndices) -> bool:
    """Tell what is not as it was, and return whether the order is another one."""
    texts = list(_told(state, now, indices))
    if texts:
        warnings.warn(" ".join(texts), FastDataWarning, stacklevel=2)
    return next(state.differences(now), None) is not None


def _told(state: LoaderState, now: LoaderState, indices: EpochIndices) -> Iterator[str]:
    where = f"epoch {state.epoch} after {state.samples} samples"
    difference = next(state.differences(now), None)
    if difference is not None:
        yield (
            f"The training was saved in {where}, and since then something has changed: "
            f"{difference}. The epoch goes on at that place of the order there is now, so that "
            "samples may come twice or not at all in it; later epochs are whole."
        )
    if "draw" in state.drawn or "torch" in state.drawn:
        yield (
            f"{now.order} draws from torch's global generator: the rest of this epoch is that of "
            "before, and later epochs are drawn from the generator as it will be then. For the "
            "same epochs as without a break, give the sampler a generator, or restore torch's."
        )
    if state.same_steps(now):
        return
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
    """Return what a map-style dataset saves of itself; None: nothing."""
    if isinstance(dataset, IterableDataset) or not isinstance(dataset, Stateful):
        return None
    return dataset.state_dict()


def restore_dataset(dataset: object, state: LoaderState) -> None:
    """Give a map-style dataset what it saved of itself."""
    saved = state.dataset_state
    if saved is not None and isinstance(dataset, Stateful):
        dataset.load_state_dict(saved)
    if isinstance(dataset, Mixture):
        dataset.go_on_at(state.epoch, state.samples)


def sampler_epoch(loader: FastDataLoader[Any]) -> int | None:
    """Return the epoch that was set for a loader's sampler; None: it has none.

    Lightning sets it after it has made the iterator of a resumed run.
    """
    for sampler in (loader.sampler, sampler_in(loader.batch_sampler)):
        epoch: int | None = getattr(sampler, "epoch", None)
        if isinstance(sampler, SetsEpoch) and epoch is not None:
            return epoch
    return None


def read_again(batches: DigestedBatches, state: LoaderState, stream: object) -> Iterator[Batch]:
    """Drop the batches of a stream that were delivered before a state, and return the others."""
    began_s = clock.monotonic()
    for _ in islice(batches, state.batches):
        pass
    if state.batches:
        if state.digest not in (None, batches.digest):
            tell_others(stream)
        warnings.warn(
            f"{state.batches} batches of {type(stream).__name__} that were delivered before the "
            "training was saved were "
            f"read again and dropped, in {clock.monotonic() - began_s:.1f} s, as torch's own "
            "iterator cannot begin within a stream. What its workers draw from global generators "
            'is not drawn again. Use executor="workers".',
            FastDataWarning,
            stacklevel=2,
        )
    yield from batches


class WatchedBatches(Iterator[Batch]):
    """The batches of a pass that may not come in order; which were fetched is noted."""

    def __init__(self, batches: Iterator[Batch], begun: Pass, source: object) -> None:
        self._batches = batches
        self._begun = begun
        self._source = source

    def __next__(self) -> Batch:
        batch = next(self._batches)
        source = self._source
        now = source.under_way() if isinstance(source, EpochIterator) else under_way(source)
        if now is not None:
            self._begun.note(UnderWay(*now))
        return batch

    def __len__(self) -> int:
        return len(cast("Sized", self._batches))

    def __getattr__(self, name: str) -> Any:
        if name == "_batches":
            raise AttributeError(name)
        return getattr(self._batches, name)

    def __reduce__(self) -> tuple[object, ...]:
        # Lightning copies its trainer with the iterators in it; processes cannot be copied.
        return iter, ((),)


class DigestedBatches(WatchedBatches):
    """The batches of a stream that torch reads: a digest of them is noted."""

    def __init__(self, batches: Iterator[Batch], begun: Pass) -> None:
        super().__init__(batches, begun, None)
        self._seen = ReadSamples()

    @property
    def digest(self) -> int:
        """Of the batches until now."""
        return self._seen.digest

    def __next__(self) -> Batch:
        batch = next(self._batches)
        self._seen.add(batch.batch if isinstance(batch, StagedBatch) else batch)
        self._begun.digests[self._seen.samples] = self.digest
        self._begun.digests.pop(self._seen.samples - _DIGESTS_KEPT, None)
        return batch
