"""The loaders of a trainer: seen before they are iterated, one by one, and shared by ranks."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from lightning_fastdata.loading.loader import FastDataLoader
from lightning_fastdata.plugin.seams.internals import (
    combined_mode,
    data_source,
    itself,
    replace_for_one_run,
)
from lightning_fastdata.tuning.tuner import Tuner

if TYPE_CHECKING:
    from lightning.pytorch import Trainer

    from lightning_fastdata.types import Stage


def watch_sources(
    trainer: Trainer,
    stages: Collection[Stage],
    watch: Callable[[Stage, object], object],
) -> Callable[[], None]:
    """Show a trainer's loaders before they are iterated, and return what stops that.

    ``watch`` returns None, or what is to be iterated in their place.

    Lightning calls no hook between getting a loader and starting its workers. Where a version has
    no data source, the loaders are seen when the training starts.
    """
    loops: list[tuple[Stage, object]] = [
        ("train", trainer.fit_loop),
        ("val", trainer.fit_loop.epoch_loop.val_loop),
        ("val", trainer.validate_loop),
        ("test", trainer.test_loop),
        ("predict", trainer.predict_loop),
    ]
    shown = []
    for stage, loop in loops:
        source = data_source(loop) if stage in stages else None
        if source is not None:
            vars(source)["dataloader"] = _ShownLoaders(source.dataloader, stage, watch)
            shown.append(source)

    def stop() -> None:
        for source in shown:
            vars(source).pop("dataloader", None)

    return stop


class _ShownLoaders:
    """A data source's ``dataloader``, which shows what it returns."""

    def __init__(
        self,
        ask: Callable[[], object],
        stage: Stage,
        watch: Callable[[Stage, object], object],
    ) -> None:
        self.ask = ask
        self.stage = stage
        self.watch = watch

    def __call__(self) -> object:
        loaders = self.ask()
        others = self.watch(self.stage, loaders)
        return loaders if others is None else others

    def __reduce__(self) -> tuple[Callable[..., object], tuple[object]]:
        # A copy of the trainer is not measured.
        return itself, (self.ask,)


class EmptyLoaders:
    """Makes a CombinedLoader of Lightning's one of no loaders.

    Lightning takes an empty list or dict for a loader itself, whose length is 0, and warns of that.
    """

    @property
    def flattened(self) -> list[Any]:
        """None at all."""
        return []

    @flattened.setter
    def flattened(self, flattened: list[Any]) -> None:
        """Take back what Lightning has prepared, which is none, too."""


def flattened(loaders: object) -> Iterator[Any]:
    """Return a trainer's loaders one by one, in whatever form they come."""
    return (loader for _, loader in with_paths(loaders))


def mapped(loaders: Any, function: Callable[[Any], object]) -> Any:
    """Return a trainer's loaders in the same form, each replaced by what the function returns."""
    mode = combined_mode(loaders)
    if mode is not None:
        kind: Callable[..., Any] = type(loaders)
        return kind(mapped(loaders.iterables, function), mode=mode)
    if isinstance(loaders, Mapping):
        return {key: mapped(loader, function) for key, loader in loaders.items()}
    if isinstance(loaders, list | tuple):
        return [mapped(loader, function) for loader in loaders]
    return None if loaders is None else function(loaders)


def labelled(loaders: object) -> list[tuple[str, Any]]:
    """Return several loaders, each with its key as the user wrote it; empty if there is one.

    For sentences, e.g. ``loader 'images'``, ``loader 1`` or ``loader 'pairs'[0]``.
    """
    found = [
        (f"loader {path[0]!r}{''.join(f'[{key!r}]' for key in path[1:])}", loader)
        for path, loader in with_paths(loaders)
        if path
    ]
    return found if len(found) > 1 else []


def with_paths(
    loaders: Any, path: tuple[object, ...] = ()
) -> Iterator[tuple[tuple[object, ...], Any]]:
    """Yield a trainer's loaders with the keys and positions under which each is found."""
    if hasattr(loaders, "iterables") and hasattr(loaders, "flattened"):  # a CombinedLoader
        loaders = loaders.iterables
    inner: Iterable[tuple[object, object]]
    if isinstance(loaders, Mapping):
        inner = loaders.items()
    elif isinstance(loaders, list | tuple):
        inner = enumerate(loaders)
    else:
        if loaders is not None:
            yield path, loaders
        return
    for key, loader in inner:
        yield from with_paths(loader, (*path, key))


def average_exactly(trainer: Trainer) -> None:
    """Keep a trainer's strategy from rounding the mean of whole numbers over the ranks, in one run.

    An epoch's mean in ``self.log(..., sync_dist=True)`` is the mean of the ranks' sums over the
    mean of their counts. Lightning rounds the latter down, because counts are integers: 11 samples
    on two ranks count as 2 * 5, and the logged mean is a tenth too large.
    """
    strategy = trainer.strategy
    ours = isinstance(strategy.reduce, partial) and strategy.reduce.func is _reduce
    if not ours:
        replace_for_one_run(trainer, strategy, "reduce", partial(_reduce, strategy.reduce))


def _reduce(
    reduce: Callable[..., object],
    tensor: object,
    group: object = None,
    reduce_op: object = "mean",
) -> object:
    """Reduce over the ranks as a strategy does; means of integers are floating-point numbers."""
    if isinstance(tensor, torch.Tensor) and reduce_op in ("mean", "avg"):
        whole = not (tensor.is_floating_point() or tensor.is_complex())
        tensor = tensor.to(torch.get_default_dtype()) if whole else tensor
    return reduce(tensor, group=group, reduce_op=reduce_op)


def tuned_loaders(loaders: object) -> Iterator[tuple[FastDataLoader, Tuner]]:
    """Yield the loaders whose workers are tuned, and what tunes them."""
    for loader in flattened(loaders):
        if isinstance(loader, FastDataLoader) and loader.tuner is not None:
            yield loader, loader.tuner
