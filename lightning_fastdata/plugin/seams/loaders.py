"""The loaders of a trainer: seen before they are iterated, one by one, and shared by ranks."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, Final

import torch

from lightning_fastdata.insight.waits.several_loaders import LoaderKey
from lightning_fastdata.order.epoch_order import (
    EvaluationBatchSampler,
    can_share_evenly,
    dataset_length,
)
from lightning_fastdata.plugin.seams.internals import (
    data_connector,
    data_source,
    replace_for_one_run,
)

if TYPE_CHECKING:
    from lightning.pytorch import Trainer

    from lightning_fastdata.types import Stage


def watch_sources(
    trainer: Trainer, stages: Collection[Stage], watch: Callable[[Stage, Any], None]
) -> Callable[[], None]:
    """Show a trainer's loaders before they are iterated, and return what stops that.

    Lightning calls no hook between getting a loader and starting its workers. Where a version has
    no data source, the loaders are seen when the training starts.

    Args:
        trainer: Before it has any loader.
        stages: Whose loaders are to be seen.
        watch: Called with the stage and its loaders, in whatever form they come.
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
        if stage not in stages:
            continue
        source = data_source(loop)
        if source is not None:
            vars(source)["dataloader"] = _ShownLoaders(source.dataloader, stage, watch)
            shown.append(source)

    def stop() -> None:
        for source in shown:
            vars(source).pop("dataloader", None)

    return stop


class _ShownLoaders:
    """Asks for loaders and shows them to somebody."""

    def __init__(
        self, ask: Callable[[], Any], stage: Stage, watch: Callable[[Stage, Any], None]
    ) -> None:
        self.ask = ask
        self.stage = stage
        self.watch = watch

    def __call__(self) -> Any:
        loaders = self.ask()
        self.watch(self.stage, loaders)
        return loaders

    def __reduce__(self) -> tuple[Any, ...]:
        # A copy of the trainer is not measured.
        return _itself, (self.ask,)


def _itself(value: Any) -> Any:
    return value


def flattened(loaders: Any) -> Iterator[Any]:
    """Return a trainer's loaders one by one, in whatever form they come."""
    if loaders is None:
        return
    # Lightning's CombinedLoader.
    loaders = getattr(loaders, "flattened", loaders)
    if isinstance(loaders, Mapping):
        loaders = list(loaders.values())
    if isinstance(loaders, list | tuple):
        for loader in loaders:
            yield from flattened(loader)
    else:
        yield loaders


def keyed(loaders: Any) -> list[tuple[LoaderKey, Any]]:
    """Return several loaders with their keys as the user wrote them; empty if there is one."""
    # Lightning's CombinedLoader has them as they were given.
    found = list(_with_paths(getattr(loaders, "iterables", loaders), ()))
    if len(found) < 2:
        return []
    return [(LoaderKey(path), loader) for path, loader in found]


def _with_paths(loaders: Any, path: tuple[Any, ...]) -> Iterator[tuple[tuple[Any, ...], Any]]:
    inner: Iterable[tuple[Any, Any]]
    if isinstance(loaders, Mapping):
        inner = loaders.items()
    elif isinstance(loaders, list | tuple):
        inner = enumerate(loaders)
    else:
        if loaders is not None:
            yield path, loaders
        return
    for key, loader in inner:
        yield from _with_paths(loader, (*path, key))


_PADDED: Final = "Using `DistributedSampler` with the dataloaders. During `trainer."


def average_exactly(trainer: Trainer) -> None:
    """Keep a trainer's strategy from rounding the mean of whole numbers over the ranks, in one run.

    An epoch's mean in ``self.log(..., sync_dist=True)`` is the mean of the ranks' sums over the
    mean of their counts. Lightning rounds the latter down, because counts are integers: 11 samples
    on two ranks count as 2 * 5, and the logged mean is a tenth too large.
    """
    strategy = trainer.strategy
    if not isinstance(vars(strategy).get("reduce"), _ExactReduce):
        replace_for_one_run(trainer, strategy, "reduce", _ExactReduce(strategy.reduce))


class _ExactReduce:
    """A strategy's ``reduce`` whose means of integers are floating-point numbers."""

    def __init__(self, reduce: Callable[..., Any]) -> None:
        self.reduce = reduce

    def __call__(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        whole = isinstance(tensor, torch.Tensor) and not tensor.is_floating_point()
        if whole and not tensor.is_complex() and reduce_op in ("mean", "avg"):
            tensor = tensor.to(torch.get_default_dtype())
        return self.reduce(tensor, group=group, reduce_op=reduce_op)


def silence_padding_warning(trainer: Trainer) -> None:
    """Keep Lightning from warning, in one run, that samples of evenly shared loaders count twice.

    The warning of every other loader is given.
    """
    connector = data_connector(trainer)
    if connector is None:
        return
    prepare = connector._prepare_dataloader
    if not isinstance(prepare, _QuietPrepare):
        quiet = _QuietPrepare(prepare, trainer.world_size)
        replace_for_one_run(trainer, connector, "_prepare_dataloader", quiet)


class _QuietPrepare:
    """A data connector's ``_prepare_dataloader``, which warns only where there is reason to."""

    def __init__(self, prepare: Callable[..., object], ranks: int) -> None:
        self.prepare = prepare
        self.ranks = ranks

    def __call__(self, dataloader: object, *args: Any, **kwargs: Any) -> object:
        with warnings.catch_warnings():
            if is_shared_evenly(dataloader, self.ranks):
                message = re.escape(_PADDED)
                warnings.filterwarnings("ignore", message=message, category=UserWarning)
            return self.prepare(dataloader, *args, **kwargs)


def is_shared_evenly(loader: Any, ranks: int) -> bool:
    """Return whether ranks share a loader's samples, each once and in as many batches on each."""
    batch_sampler = getattr(loader, "batch_sampler", None)
    if not isinstance(batch_sampler, EvaluationBatchSampler):
        return False
    length = dataset_length(loader.dataset) or 0
    return can_share_evenly(length, batch_sampler.batch_size, ranks)
