"""The loaders of a trainer: seen before they are iterated, and one by one."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from lightning_fastdata.insight.waits.several_loaders import LoaderKey
from lightning_fastdata.plugin.seams.internals import data_source

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
