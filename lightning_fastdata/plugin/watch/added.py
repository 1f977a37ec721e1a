"""What ``fastdata run`` adds to a Trainer: its callback, and, with ``--fast``, its loaders.

A FastDataLoader takes the place of a plain DataLoader where the batches stay the same.
"""

from __future__ import annotations

import hashlib
import multiprocessing
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final

from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
    default_collate,
)

from lightning_fastdata.caches.fixed_part import is_fixed, tried_indices
from lightning_fastdata.caches.sample_form import taken_apart
from lightning_fastdata.errors import DatasetError, FastDataError
from lightning_fastdata.loading.loader import FastDataLoader
from lightning_fastdata.planning.facts.probe_process import Tell, try_apart
from lightning_fastdata.plugin.seams.internals import combined_mode
from lightning_fastdata.plugin.seams.loaders import with_paths
from lightning_fastdata.plugin.seams.trainer import print_line
from lightning_fastdata.plugin.watch.throughput import ThroughputHooks
from lightning_fastdata.randomness.global_generators import kept_random_state
from lightning_fastdata.randomness.seeds import seed_global_generators
from lightning_fastdata.tree import children, replace_leaves

if TYPE_CHECKING:
    from lightning.pytorch import LightningModule, Trainer

    from lightning_fastdata.types import Batch, MapDataset, Stage

_DEADLINE_S: Final = 60.0
_TRIED_ROWS: Final = 8
"""In a batch, where a batch sampler decides how many there are."""
_DRAW_NOTHING: Final = (SequentialSampler, DistributedSampler)
"""From a global generator."""
_DRAW_AT_ONCE: Final = (RandomSampler, SubsetRandomSampler, WeightedRandomSampler)
"""Torch's samplers that draw the order of an epoch before its first batch."""
_RANDOM: Final = (
    "its samples draw at random, or differ from reading to reading: with another loader they would "
    "be other samples"
)


class AddedHooks(ThroughputHooks):
    """A DataThroughputCallback that leaves the measuring to one that the script has.

    Args:
        fast: Put a FastDataLoader in the place of plain DataLoaders where the batches stay the
            same; the loaders that stay are named with the reason.
        report: Where the report is written. Default: as of ``DataThroughputCallback``.
    """

    def __init__(self, *, fast: bool = False, report: str | None = None) -> None:
        super().__init__(report=report or True)
        self.fast = fast

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Begin to measure, unless another callback does."""
        callbacks: list[object] = list(trainer.callbacks)  # type: ignore[attr-defined]
        own = [c for c in callbacks if isinstance(c, ThroughputHooks) and c is not self]
        measures = own[0] if own else self
        if self.fast and measures.change_loaders is None:

            def tell(line: str) -> None:
                if trainer.is_global_zero:
                    print_line(trainer, f"fastdata run --fast: {line}")

            measures.change_loaders = PlainLoaders(tell)
        if not own:
            super().setup(trainer, pl_module, stage)


class PlainLoaders:
    """Puts a FastDataLoader in the place of each DataLoader whose batches that does not change.

    The sampler stays the user's own, so that the order stays, too. That the samples do is tried:
    in a process that is thrown away, some samples of the dataset and a batch of them are made
    twice, under different states of the random generators; then one batch of the new loader has to
    be the same to the last bit. What cannot be shown to be the same stays as it is.

    Args:
        tell: Is given a line for each loader: what was done, or why nothing was.
    """

    def __init__(self, tell: Callable[[str], object]) -> None:
        self._tell = tell
        self._told: set[str] = set()
        # Each with what it is about, so that no address is used twice.
        self._replaced: dict[int, tuple[object, FastDataLoader]] = {}
        self._tried: dict[tuple[int, ...], tuple[object, str | None]] = {}

    def __call__(self, stage: Stage, loaders: object) -> object:
        """Return the loaders of a stage, in the form in which they came."""
        several = stage == "train" or combined_mode(loaders) not in (None, "sequential")
        at_once = several and len(list(with_paths(loaders))) > 1
        return self._changed(stage, loaders, at_once=at_once)

    def _changed(self, stage: Stage, loaders: object, *, at_once: bool) -> object:
        def of_one(_: object, loader: Any) -> object:
            mode = combined_mode(loader)
            if mode is None:
                return self._in_place_of(stage, loader, at_once=at_once)
            inner = self._changed(stage, loader.iterables, at_once=at_once)
            return loader if inner is loader.iterables else type(loader)(inner, mode=mode)

        return replace_leaves(loaders, of_one)

    def _in_place_of(self, stage: Stage, loader: object, *, at_once: bool) -> object:
        if loader is None or isinstance(loader, FastDataLoader):
            return loader
        if id(loader) in self._replaced:
            return self._replaced[id(loader)][1]
        if type(loader) is not DataLoader:
            name = type(loader).__name__
            self._say(f"{stage}: {name} is left as it is: it may make its batches in its own way")
            return loader
        name = f"DataLoader of {type(loader.dataset).__name__}"
        reason = _unsuitable(loader, at_once=at_once) or self._try_once(loader)
        if reason is not None:
            self._say(f"{stage}: {name} is left as it is: {reason}")
            return loader
        self._say(
            f"{stage}: FastDataLoader in the place of the {name}; a batch of both is the same to "
            "the last bit"
        )
        found = fast_loader(loader)
        self._replaced[id(loader)] = (loader, found)
        return found

    def _try_once(self, loader: DataLoader[Any]) -> str | None:
        # A module may make a loader of the same dataset for each epoch.
        key = id(loader.dataset), id(loader.collate_fn)
        if key not in self._tried:
            self._tried[key] = (loader, why_not_the_same(loader))
        return self._tried[key][1]

    def _say(self, line: str) -> None:
        if line not in self._told:
            self._told.add(line)
            self._tell(line)


def why_not_the_same(loader: DataLoader[Any]) -> str | None:
    """Return why a FastDataLoader might make other batches; None: one that it made is the same."""
    indices = tried_indices(len(loader.dataset), loader.batch_size or _TRIED_ROWS)  # type: ignore[arg-type]
    arguments = loader.dataset, loader.collate_fn, indices
    method = multiprocessing.get_start_method()
    apart = try_apart(_try, *arguments, start_method=method, deadline_s=_DEADLINE_S)
    if "refusal" in apart.values:
        return str(apart.values["refusal"])
    if apart.failure is not None:
        return f"a process that tried some samples {apart.failure.what}"
    try:
        with kept_random_state():
            ours = _digest(_one_batch(loader, indices))
    except FastDataError as error:
        return str(error)
    return None if ours == apart.values["digest"] else "a batch of FastDataLoader was another one"


def fast_loader(loader: DataLoader[Any]) -> FastDataLoader:
    """Return a FastDataLoader that takes a loader's samples in the same order."""
    order: dict[str, Any] = {"batch_sampler": loader.batch_sampler}
    if loader.batch_size is not None:
        order = {
            "batch_size": loader.batch_size,
            "sampler": loader.sampler,
            "drop_last": loader.drop_last,
        }
    if loader.persistent_workers:  # torch draws from its generator once, and not in each epoch
        order |= {"num_workers": loader.num_workers, "persistent_workers": True}
    return FastDataLoader(loader.dataset, **order, **_settings(loader))


def _unsuitable(loader: DataLoader[Any], *, at_once: bool) -> str | None:
    """Return what in a loader's settings stands against another one; None: nothing."""
    if isinstance(loader.dataset, IterableDataset):
        return "it reads a stream, whose batches depend on the workers"
    if loader.batch_sampler is None:
        return "it returns samples, not batches"
    if loader.worker_init_fn is not None:
        return "its worker_init_fn may change what the dataset returns"
    if not loader.in_order:
        return "in_order=False leaves the order of its batches open"
    if not len(loader.dataset):  # type: ignore[arg-type]
        return "its dataset is empty"
    sampler: object = loader.sampler
    if loader.batch_size is None:
        sampler = loader.batch_sampler
        if type(sampler) is BatchSampler:
            sampler = sampler.sampler
    if type(sampler) not in (*_DRAW_NOTHING, *_DRAW_AT_ONCE):
        return f"its {type(sampler).__name__} may draw at random between the batches"
    if at_once and isinstance(sampler, _DRAW_AT_ONCE) and sampler.generator is None:
        return (
            "it is read together with others, and who of them draws first from torch's generator "
            "decides the order of its samples"
        )
    return None


def _settings(loader: DataLoader[Any]) -> dict[str, Any]:
    """Return the settings of a loader that have no say in the order of its samples."""
    own = loader.collate_fn is not default_collate
    context = loader.multiprocessing_context
    return {
        "collate_fn": loader.collate_fn if own else None,
        "pin_memory": loader.pin_memory,
        "timeout": loader.timeout,
        "generator": loader.generator,
        "multiprocessing_context": None if context is None else context.get_start_method(),
    }


def _one_batch(loader: DataLoader[Any], indices: list[int]) -> Batch:
    """Return the batch that a FastDataLoader makes of some samples, by the means it chooses."""
    settings = {**_settings(loader), "pin_memory": False, "generator": None}
    ours = FastDataLoader(loader.dataset, len(indices), sampler=indices, **settings)
    try:
        return next(iter(ours))
    finally:
        ours.close()


def _try(
    dataset: MapDataset, collate: Callable[[list[Batch]], Batch], indices: list[int], tell: Tell
) -> None:
    """Tell why another loader's batches might be others, or a digest of one batch."""
    try:
        random = not is_fixed(dataset)
    except DatasetError:
        tell("refusal", "its samples hold objects that cannot be compared")
        return
    if random:
        tell("refusal", _RANDOM)
        return
    digests = []
    for seed in (0, 1):
        seed_global_generators(seed, 0, 0)
        batch = collate([dataset[index] for index in indices])
        try:
            digests.append(_digest(batch))
        except DatasetError:
            tell("refusal", "its batches hold objects that cannot be compared")
            return
    if digests[0] != digests[1]:
        tell("refusal", _RANDOM)
        return
    tell("digest", digests[0])


def _digest(batch: Batch) -> str:
    """Return what two batches have in common if they are the same to the last bit.

    Raises:
        DatasetError: There is something in it that cannot be compared.
    """
    found = hashlib.sha256()

    def take(value: Batch) -> None:
        parts = children(value)
        if parts is None:
            form, raws = taken_apart(value)
            found.update(repr(form).encode())
            for raw in raws:
                found.update(bytes(raw))
            return
        found.update(f"{type(value).__qualname__} of {[key for key, _ in parts]!r}".encode())
        for _, part in parts:
            take(part)

    take(batch)
    return found.hexdigest()
