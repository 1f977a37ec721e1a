"""What a data module is made of: datasets, or loaders that are taken apart into datasets."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING, Any, Final

from torch.utils.data import (
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    default_collate,
    default_convert,
)

from lightning_fastdata.errors import DatasetError, OptionsError
from lightning_fastdata.loading.loader import FastDataLoader
from lightning_fastdata.planning.options import LoaderOptions
from lightning_fastdata.plugin.data.arguments import (
    LOADER_ARGUMENTS,
    checked_batch_size,
    checked_shuffle,
    joined_options,
)
from lightning_fastdata.plugin.seams.internals import combined_mode
from lightning_fastdata.torch_internals import MAKES_BATCHES
from lightning_fastdata.types import STAGES

if TYPE_CHECKING:
    from lightning_fastdata.types import Stage

DATASET_METHOD = {stage: f"{stage}_dataset" for stage in STAGES}
"""What a subclass writes for each stage."""
_LOOKED_AT: Final = 64
_WORKERS: Final = ("num_workers", "prefetch_factor", "persistent_workers")


@dataclass(frozen=True, slots=True, eq=False)
class GivenLoader:
    """What a DataLoader says of its batches."""

    dataset: Any
    """What it reads."""
    arguments: Mapping[str, Any]
    """Of ``make_loader``, except for the batch size."""
    batch_size: int | None
    """Samples in a batch; None where that is the batch sampler's, or samples come as they are."""
    base: int | None = None
    """The data module's ``batch_size`` for which this one holds."""

    def rows(self, batch_size: int) -> int | None:
        """Return the samples in a batch when the data module has another ``batch_size``."""
        if self.batch_size is None or self.base is None:
            return self.batch_size
        return max(1, round(self.batch_size * batch_size / self.base))

    def arguments_for(self, batch_size: int) -> dict[str, Any]:
        """Return the arguments of ``make_loader``; see :meth:`rows`."""
        if "batch_sampler" in self.arguments:
            return dict(self.arguments)
        return {**self.arguments, "batch_size": self.rows(batch_size)}


def taken_apart(
    item: Any, batch_size: int, options: LoaderOptions | None = None
) -> tuple[Any, dict[str, Any]]:
    """Return the dataset of an item that a dataset method returned, and what else is known of it.

    Args:
        item: A dataset, or a :class:`GivenLoader`.
        batch_size: Of the data module.
        options: Of the stage. What the user set there wins over the loader.
    """
    if not isinstance(item, GivenLoader):
        return item, {}
    known = item.arguments_for(batch_size)
    if options is not None:
        default = LoaderOptions()
        chosen = {
            f.name for f in fields(options) if getattr(options, f.name) != getattr(default, f.name)
        }
        known = {n: v for n, v in known.items() if {"timeout": "timeout_s"}.get(n, n) not in chosen}
    return item.dataset, known


def refuse_loaders(datasets: Any, name: str, stage: Stage) -> None:
    """Raise DatasetError if what a dataset method returned is a DataLoader, or holds one."""
    items = [datasets]
    if isinstance(datasets, Mapping | list | tuple):
        several = datasets.values() if isinstance(datasets, Mapping) else datasets
        items = list(islice(several, _LOOKED_AT))
    first = next((item for item in items if isinstance(item, DataLoader)), None)
    if first is not None:
        raise DatasetError(
            f"{name} returned a {type(first).__name__}. Return its dataset, or make the data "
            f"module by FastDataModule.from_loaders({stage}=...). To use the loader as it is, "
            f"return it from {stage}_dataloader()."
        )


def given_loaders(
    loaders: Any, name: str, *, keep_workers: bool
) -> tuple[Any, Callable[[Any], Any] | None]:
    """Take loaders apart.

    Args:
        loaders: A DataLoader, a list or dict of them, or Lightning's CombinedLoader of these.
        name: How messages call them.
        keep_workers: Keep their workers and pinning, instead of choosing them.

    Returns:
        A :class:`GivenLoader` for each, in the same form, and what combines the loaders made of
        them; None: Lightning does.

    Raises:
        OptionsError: One of them cannot be taken apart.
    """
    combine = None
    mode = combined_mode(loaders)
    if mode is not None:
        kind: Any = type(loaders)
        combine = partial(kind, mode=mode)
        loaders = loaders.iterables
    given: Any
    if isinstance(loaders, Mapping):
        given = {key: _given(loaders[key], f"{name}[{key!r}]", keep_workers) for key in loaders}
    elif isinstance(loaders, list | tuple):
        given = [_given(one, f"{name}[{at}]", keep_workers) for at, one in enumerate(loaders)]
    else:
        given = _given(loaders, name, keep_workers)
    return given, combine


def _given(loader: Any, name: str, keep_workers: bool) -> GivenLoader:
    kind = type(loader).__name__
    if not isinstance(loader, DataLoader):
        raise OptionsError(
            f"{name} is of type {kind}; from_loaders() takes torch DataLoaders, a list or a dict "
            "of them. Give datasets to from_datasets(). A loader of another kind stays as it is if "
            "a subclass returns it from train_dataloader(), val_dataloader(), ..."
        )
    ours = isinstance(loader, FastDataLoader)
    own = [n for n in MAKES_BATCHES if getattr(type(loader), n) is not getattr(DataLoader, n)]
    if own and not ours:
        raise OptionsError(
            f"{name} is a {kind}, which makes its batches in its own way ({own[0]}). Give its "
            "dataset to from_datasets(), or have a subclass return it from train_dataloader(), "
            "val_dataloader(), ..., which leaves it as it is."
        )
    if isinstance(loader, FastDataLoader) and (loader.transform or loader.device_resident):
        raise OptionsError(
            f"{name} is a FastDataLoader with transform or device_resident. Give the transform to "
            "the data module as augment=, and use make_loader(..., device_resident=True)."
        )
    arguments = _order(loader) | _workers(loader, keep_workers)
    collated = default_collate if _makes_batches(loader) else default_convert
    if loader.collate_fn is not collated:
        arguments["collate_fn"] = loader.collate_fn
    if loader.worker_init_fn is not None:
        arguments["worker_init_fn"] = loader.worker_init_fn
    if loader.generator is not None:
        # Torch draws a seed from it in each epoch, unless the workers stay, and often the order.
        arguments["generator"] = loader.generator
        arguments["persistent_workers"] = loader.persistent_workers
    if loader.drop_last:
        arguments["drop_last"] = True
    if isinstance(loader, FastDataLoader):
        arguments["seed"] = loader.seed
    return GivenLoader(loader.dataset, arguments, loader.batch_size)


def _makes_batches(loader: DataLoader[Any]) -> bool:
    return loader.batch_size is not None or loader.batch_sampler is not None


def _order(loader: DataLoader[Any]) -> dict[str, Any]:
    """Return which samples come in which order; a plain shuffle is that of the data module."""
    if isinstance(loader.dataset, IterableDataset):
        return {}
    if loader.batch_size is None and loader.batch_sampler is not None:
        return {"batch_sampler": loader.batch_sampler}
    sampler: Any = loader.sampler
    data: Any = loader.dataset
    if getattr(sampler, "data_source", None) is not data:
        return {"sampler": sampler}
    if type(sampler) is SequentialSampler:
        return {"shuffle": False}
    if (
        type(sampler) is RandomSampler
        and sampler.generator is None
        and not sampler.replacement
        and sampler.num_samples == len(sampler.data_source)
    ):
        return {"shuffle": True}
    return {"sampler": sampler}


def _workers(loader: DataLoader[Any], keep: bool) -> dict[str, Any]:
    taken: dict[str, Any] = {}
    if loader.multiprocessing_context is not None:
        taken["multiprocessing_context"] = loader.multiprocessing_context.get_start_method()
    if loader.timeout:
        taken["timeout"] = loader.timeout
    if not loader.in_order:
        taken["in_order"] = False
    # Which batches a stream gives depends on how many workers share it out.
    if keep or (isinstance(loader.dataset, IterableDataset) and loader.num_workers):
        names = _WORKERS if loader.num_workers else _WORKERS[:1]
        taken |= {name: getattr(loader, name) for name in names}
    if keep:
        taken["pin_memory"] = loader.pin_memory
    return taken


def named(datasets: Any, name: str) -> list[tuple[str, Any]]:
    """Return each dataset with the name that messages call it by.

    Raises:
        DatasetError: These are the splits of a Hugging Face dataset, for all stages.
    """
    if is_missing(datasets):
        return []
    if isinstance(datasets, Mapping) and type(datasets).__name__.endswith("DatasetDict"):
        raise DatasetError(
            f"{name} is the {type(datasets).__name__} of all splits ({', '.join(datasets)}). "
            f"Return one of them: [{next(iter(datasets))!r}]."
        )
    if isinstance(datasets, Mapping):
        return [(f"{name}[{key!r}]", dataset) for key, dataset in datasets.items()]
    if is_several(datasets):
        return [(f"{name}[{i}]", dataset) for i, dataset in enumerate(datasets)]
    return [(name, datasets)]


def in_form_of(datasets: Any, values: Sequence[Any]) -> Any:
    """Return one value for each dataset in the form in which the datasets came.

    Args:
        datasets: One dataset, or several by name or position; not none at all.
        values: As many values, in the order of :func:`named`.
    """
    if isinstance(datasets, Mapping):
        return dict(zip(datasets, values, strict=True))
    return list(values) if is_several(datasets) else values[0]


def is_several(datasets: Any) -> bool:
    """Whether these are datasets rather than one dataset that happens to be a sequence."""
    if isinstance(datasets, Dataset) or not isinstance(datasets, list | tuple):
        return False
    # One is enough: what else is among them is refused by its position.
    return any(_is_dataset(each) for each in datasets)


def _is_dataset(value: Any) -> bool:
    """Whether a value is surely a dataset; those of Hugging Face know torch's protocol alone."""
    return isinstance(value, Dataset | GivenLoader) or hasattr(type(value), "__getitems__")


def is_missing(datasets: Any) -> bool:
    """Whether there is no dataset at all."""
    return datasets is None or (isinstance(datasets, list | tuple | dict) and len(datasets) == 0)


class Constant:
    """A dataset method that returns a given dataset; unlike a lambda, it can be pickled."""

    def __init__(self, dataset: Any, combine: Callable[[Any], Any] | None = None) -> None:
        self.dataset = dataset
        self.combine = combine
        """Makes one loader of those of the datasets; None: Lightning does."""

    def __call__(self) -> Any:
        """Return the dataset."""
        return self.dataset


_ABOUT_LOADERS: Final = ("batch_size", "shuffle", "options", *LOADER_ARGUMENTS)
_OF_THE_LOADERS: Final = ("batch_size", "shuffle")


def of_datasets(cls: Any, datasets: Sequence[Any], arguments: Mapping[str, Any]) -> Any:
    """Return a data module whose dataset methods return these datasets.

    Args:
        cls: Its class.
        datasets: One for each stage; None: the stage has none.
        arguments: Of the constructor; None for a loader's own argument: not given.
    """
    module = _made(cls, arguments)
    for stage, dataset in zip(STAGES, datasets, strict=True):
        if dataset is not None:
            setattr(module, DATASET_METHOD[stage], Constant(dataset))
    return module


def of_loaders(
    cls: Any, loaders: Mapping[Stage, Any], arguments: Mapping[str, Any], *, keep_workers: bool
) -> Any:
    """Return a data module that makes the batches of these loaders.

    Args:
        cls: Its class.
        loaders: By stage, in any form; None: the stage has none.
        arguments: Of the constructor.
        keep_workers: See `given_loaders`.

    Raises:
        OptionsError: An argument is one that the loaders decide, or one of them cannot be taken
            apart.
    """
    for name in _OF_THE_LOADERS:
        if name in arguments:
            raise OptionsError(
                f"from_loaders() takes {name} from the loaders. Leave out {name}="
                f"{arguments[name]!r}, or use from_datasets()."
            )
    given = {
        stage: given_loaders(own, stage, keep_workers=keep_workers)
        for stage, own in loaders.items()
        if own is not None
    }
    sizes = [one.batch_size for form, _ in given.values() for _, one in named(form, "")]
    base = next((size for size in sizes if size is not None), None)
    module = _made(cls, {**arguments, "batch_size": base})
    for stage, (form, combine) in given.items():
        based = [replace(one, base=base) for _, one in named(form, stage)]
        setattr(module, DATASET_METHOD[stage], Constant(in_form_of(form, based), combine))
    return module


def _made(cls: Any, arguments: Mapping[str, Any]) -> Any:
    """Return a data module, also of a class that does not take all arguments about loaders.

    What its constructor leaves out is set afterwards.
    """
    given = {n: v for n, v in arguments.items() if v is not None or n not in _ABOUT_LOADERS}
    parameters = inspect.signature(cls.__init__).parameters
    open_ended = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    later = set() if open_ended else set(_ABOUT_LOADERS) - set(parameters)
    module = cls(**{n: v for n, v in given.items() if n not in later})
    rest = {n: v for n, v in given.items() if n in later}
    if "batch_size" in rest:
        module.batch_size = checked_batch_size(rest["batch_size"])
    if "shuffle" in rest:
        module.shuffle = checked_shuffle(rest["shuffle"])
    module.options = joined_options(
        rest.get("options", module.options), {n: rest.get(n) for n in LOADER_ARGUMENTS}
    )
    return module
