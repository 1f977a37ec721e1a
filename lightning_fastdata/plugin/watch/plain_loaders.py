"""FastDataLoader in the place of a trainer's plain DataLoaders, where the batches stay the same."""

from __future__ import annotations

import hashlib
import multiprocessing
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Final

from torch.utils.data import DataLoader, IterableDataset, default_collate

from lightning_fastdata.caches.fixed_part import is_fixed, same_parts, tried_indices
from lightning_fastdata.caches.sample_form import taken_apart
from lightning_fastdata.errors import FastDataError
from lightning_fastdata.loading.loader import FastDataLoader
from lightning_fastdata.planning.facts.probe_process import Tell, try_apart
from lightning_fastdata.plugin.seams.internals import combined_mode
from lightning_fastdata.randomness.generators import kept_random_state
from lightning_fastdata.randomness.seeds import seed_global_generators

if TYPE_CHECKING:
    from lightning_fastdata.types import Stage

_DEADLINE_S: Final = 60.0
_TRIED_ROWS: Final = 8
"""In a batch, where a batch sampler decides how many there are."""
_RANDOM: Final = (
    "its samples draw at random, or differ from reading to reading: with another loader they would "
    "be other samples"
)


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
        # Each with what it is about, so that no address is used twice.
        self._replaced: dict[int, tuple[object, FastDataLoader]] = {}
        self._decided: dict[tuple[int, int], tuple[object, str | None]] = {}

    def __call__(self, stage: Stage, loaders: Any) -> Any:
        """Return the loaders of a stage, in the form in which they came."""
        if isinstance(loaders, DataLoader):
            return self._faster(stage, loaders)
        mode = combined_mode(loaders)
        if mode is not None:
            return type(loaders)(self(stage, loaders.iterables), mode=mode)
        if type(loaders) is dict:
            return {key: self(stage, loader) for key, loader in loaders.items()}
        if type(loaders) in (list, tuple):
            return type(loaders)(self(stage, loader) for loader in loaders)
        if loaders is not None and not isinstance(loaders, Mapping | list | tuple):
            self._tell(f"{stage}: a {type(loaders).__name__} is left as it is: it is no DataLoader")
        return loaders

    def _faster(self, stage: Stage, loader: DataLoader[Any]) -> DataLoader[Any]:
        if isinstance(loader, FastDataLoader):
            return loader
        if id(loader) in self._replaced:
            return self._replaced[id(loader)][1]
        # A module may make a loader of the same dataset for each epoch.
        key = id(loader.dataset), id(loader.collate_fn)
        if key not in self._decided:
            reason = why_not_the_same(loader)
            self._decided[key] = (loader, reason)
            name = type(loader.dataset).__name__
            self._tell(
                f"{stage}: DataLoader of {name} is left as it is: {reason}"
                if reason is not None
                else f"{stage}: FastDataLoader in the place of the DataLoader of {name}; a batch "
                "of both is the same to the last bit"
            )
        if self._decided[key][1] is not None:
            return loader
        found = fast_loader(loader)
        self._replaced[id(loader)] = (loader, found)
        return found


def why_not_the_same(loader: DataLoader[Any]) -> str | None:
    """Return why a FastDataLoader might make other batches; None: one that it made is the same."""
    reason = _unsuitable(loader)
    if reason is not None:
        return reason
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
            ours = _digest(taken_apart(_one_batch(loader, indices)))
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


def _unsuitable(loader: DataLoader[Any]) -> str | None:
    """Return what in a loader's settings stands against another one; None: nothing."""
    if type(loader) is not DataLoader:
        return f"it is a {type(loader).__name__}, which may make its batches in its own way"
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


def _one_batch(loader: DataLoader[Any], indices: list[int]) -> Any:
    """Return the batch that a FastDataLoader makes of some samples, by the means it chooses."""
    settings = {**_settings(loader), "pin_memory": False, "generator": None}
    ours = FastDataLoader(loader.dataset, len(indices), sampler=indices, **settings)
    try:
        return next(iter(ours))
    finally:
        ours.close()


def _try(dataset: Any, collate: Callable[[list[Any]], Any], indices: list[int], tell: Tell) -> None:
    """Tell why another loader's batches might be others, or a digest of one batch."""
    if not is_fixed(dataset):
        tell("refusal", _RANDOM)
        return
    batches = []
    for seed in (0, 1):
        seed_global_generators(seed, 0, 0)
        batches.append(taken_apart(collate([dataset[index] for index in indices])))
    if not same_parts(*batches):
        tell("refusal", _RANDOM)
        return
    tell("digest", _digest(batches[0]))


def _digest(parts: tuple[object, list[Any]]) -> str:
    found = hashlib.sha256(repr(parts[0]).encode())
    for part in parts[1]:
        found.update(bytes(part))
    return found.hexdigest()
