"""What a data module is made of: datasets, or loaders that are taken apart into datasets."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING, Any, Final, TypeVar

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
from lightning_fastdata.order.samplers import is_drawn_at_start
from lightning_fastdata.planning.options import LoaderOptions
from lightning_fastdata.plugin.data.arguments import (
    LOADER_ARGUMENTS,
    checked_shuffle,
    joined_options,
    take_batch_size,
)
from lightning_fastdata.plugin.seams.internals import combined_mode
from lightning_fastdata.randomness.search import loaded_classes
from lightning_fastdata.torch_internals import MAKES_BATCHES
from lightning_fastdata.tree import held_by
from lightning_fastdata.types import STAGES

if TYPE_CHECKING:
    from lightning_fastdata.plugin.data.datamodule import DataModuleHooks as DataModule
    from lightning_fastdata.types import Stage

M = TypeVar("M", bound="DataModule")
DATASET_METHOD: Final = {stage: f"{stage}_dataset" for stage in STAGES}
"""What a subclass writes for each stage."""
_LOOKED_AT: Final = 64
_WORKERS: Final = ("num_workers", "prefetch_factor", "persistent_workers")
_ABOUT_LOADERS: Final = ("batch_size", "shuffle", "options", *LOADER_ARGUMENTS)


# -- what a dataset method returns -----------------------------------------------------------------


def datasets_of(module: DataModule, stage: Stage) -> Any:
    """Return what the dataset method of a stage returns, or the dataset that took its place.

    ``self.train_dataset = ...`` in ``setup()``, as many data modules have it, hides the method.
    """
    found = getattr(module, DATASET_METHOD[stage])
    return found() if callable(found) and not isinstance(found, Dataset) else found


def named(datasets: object, name: str) -> list[tuple[str, Any]]:
    """Return each dataset with the name that messages call it by.

    Raises:
        DatasetError: These are the splits of a Hugging Face dataset, for all stages.
    """
    if is_missing(datasets):
        return []
    kind = type(datasets).__name__
    if isinstance(datasets, Mapping) and kind.endswith("DatasetDict"):
        raise DatasetError(
            f"{name} is the {kind} of all splits ({', '.join(datasets)}). "
            f"Return one of them: [{next(iter(datasets))!r}]."
        )
    if isinstance(datasets, Mapping):
        return [(f"{name}[{key!r}]", dataset) for key, dataset in datasets.items()]
    if isinstance(datasets, list | tuple) and _is_several(datasets):
        return [(f"{name}[{i}]", dataset) for i, dataset in enumerate(datasets)]
    return [(name, datasets)]


def in_form_of(datasets: object, values: Sequence[Any]) -> Any:
    """Return one value for each dataset, in the order of :func:`named`, as the datasets came.

    They are one dataset, or several by name or position; not none at all.
    """
    if isinstance(datasets, Mapping):
        return dict(zip(datasets, values, strict=True))
    return list(values) if _is_several(datasets) else values[0]


def is_missing(datasets: object) -> bool:
    """Whether there is no dataset at all."""
    return datasets is None or (isinstance(datasets, list | tuple | dict) and len(datasets) == 0)


def _is_several(datasets: object) -> bool:
    """Whether these are datasets rather than one dataset that happens to be a sequence."""
    if isinstance(datasets, Dataset) or not isinstance(datasets, list | tuple):
        return False
    # One is enough: what else is among them is refused by its position.
    # Datasets of Hugging Face have __getitems__ in common with torch's.
    return any(
        isinstance(each, Dataset | GivenLoader) or hasattr(each, "__getitems__")
        for each in datasets
    )


def refuse_loaders(datasets: object, name: str, stage: Stage) -> None:
    """Raise DatasetError if what a dataset method returned is a DataLoader, or holds one."""
    items: Sequence[object] = [datasets]
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


def held_pipelines(dataset: object) -> Iterator[tuple[str, object]]:
    """Yield the pipelines that a dataset holds, and where, as ``.transform``.

    They are of Albumentations, or of torchvision's v2.

    What counts are plain attributes, or items of lists and dicts there, of the dataset and of
    datasets that it holds so, as ``Subset`` and ``ConcatDataset`` do. No code of theirs is run or
    read. A pipeline in several places is yielded at the first.
    """
    kinds = (
        *loaded_classes("albumentations", "BaseCompose", "BasicTransform"),
        *loaded_classes("torchvision.transforms.v2", "Transform"),
    )
    seen: set[int] = set()
    waiting: list[tuple[str, object]] = [("", dataset)]
    while waiting:
        where, owner = waiting.pop(0)
        for name, value in held_by(owner).items():
            for place, item in _with_items(f"{where}.{name}", value):
                if id(item) in seen or not isinstance(item, (Dataset, *kinds)):
                    continue
                seen.add(id(item))
                if isinstance(item, Dataset):
                    waiting.append((place, item))
                else:
                    yield place, item


def _with_items(place: str, value: object) -> Iterator[tuple[str, object]]:
    yield place, value
    if isinstance(value, list | tuple | dict):
        items = value.items() if isinstance(value, dict) else enumerate(value)
        for key, item in islice(items, _LOOKED_AT):
            yield f"{place}[{key!r}]", item


def move_line(place: str, pipeline: object, name: str, stage: Stage, *, has_one: bool) -> str:
    """Return what to write so that a device may compute a pipeline that a dataset holds.

    ``place`` is where the dataset holds it, ``name`` how the user knows the dataset. ``has_one``:
    the stage has a pipeline already.
    """
    package, kind = type(pipeline).__module__.partition(".")[0], type(pipeline).__name__
    named = {"torchvision": f"a torchvision v2.{kind}"}.get(package, f"an {package}.{kind}")
    own, held = f"dataset{place}", place.rpartition(".")[2]
    given = f"augment={own}" if stage == "train" else f"augment={{{stage!r}: {own}}}"
    line = f"write {given}"
    if has_one:
        line = f"put the transforms of {own} before those of augment="
    instead = "None in its place" if "[" in held else f"{held}=None"
    return (
        f"{name}{place} is {named} that runs in the workers. To have it computed on the device, "
        f"move it: {line}, and give the dataset {instead}."
    )


class Constant:
    """A dataset method that returns a given dataset; unlike a lambda, it can be pickled.

    ``combine`` makes one loader of those of the datasets; None: Lightning does.
    """

    def __init__(self, dataset: object, combine: Callable[[Any], Any] | None = None) -> None:
        self.dataset = dataset
        self.combine = combine

    def __call__(self) -> object:
        """Return the dataset."""
        return self.dataset


# -- loaders that a user has -----------------------------------------------------------------------


@dataclass(frozen=True, slots=True, eq=False)
class GivenLoader:
    """What a DataLoader says of its batches."""

    dataset: Dataset[Any]
    arguments: Mapping[str, object]
    """Of ``make_loader``, except for the batch size."""
    batch_size: int | None
    """Samples in a batch; None where that is the batch sampler's, or samples come as they are."""
    base: int | None = None
    """The data module's ``batch_size`` for which this one holds; with another it is scaled."""


def taken_apart(
    item: Any, batch_size: int, options: LoaderOptions | None = None
) -> tuple[Any, dict[str, Any]]:
    """Return the dataset of an item that a dataset method returned, and arguments of its loader.

    What the user set in the options of the stage wins over a :class:`GivenLoader`.
    """
    if not isinstance(item, GivenLoader):
        return item, {}
    known = dict(item.arguments)
    if "batch_sampler" not in known:
        rows = item.batch_size
        if rows is not None and item.base is not None:
            rows = max(1, round(rows * batch_size / item.base))
        known["batch_size"] = rows
    if options is not None:
        default = LoaderOptions()
        names = [field.name for field in fields(options)]
        chosen = {n for n in names if getattr(options, n) != getattr(default, n)}
        known = {n: v for n, v in known.items() if n not in chosen}
    return item.dataset, known


def _given_loaders(
    loaders: Any, name: str, **workers: bool
) -> tuple[Any, Callable[[Any], Any] | None]:
    """Take a DataLoader, a list or dict of them, or Lightning's CombinedLoader of these apart.

    Returns a :class:`GivenLoader` for each, in the same form, and what combines the loaders made of
    them; None: Lightning does.
    """
    combine, mode = None, combined_mode(loaders)
    if mode is not None:
        kind: Callable[..., Any] = type(loaders)
        combine = partial(kind, mode=mode)
        loaders = loaders.iterables
    if isinstance(loaders, Mapping):
        given = {key: _given(loaders[key], f"{name}[{key!r}]", **workers) for key in loaders}
        return given, combine
    if isinstance(loaders, list | tuple):
        several = [_given(one, f"{name}[{at}]", **workers) for at, one in enumerate(loaders)]
        return several, combine
    return _given(loaders, name, **workers), combine


def _given(loader: object, name: str, *, keep_workers: bool, chosen: bool) -> GivenLoader:
    kind = type(loader).__name__
    if not isinstance(loader, DataLoader):
        raise OptionsError(
            f"{name} is of type {kind}; from_loaders() takes torch DataLoaders, a list or a dict "
            "of them. Give datasets to from_datasets(). A loader of another kind stays as it is if "
            "a subclass returns it from train_dataloader(), val_dataloader(), ..."
        )
    own = [n for n in MAKES_BATCHES if getattr(type(loader), n) is not getattr(DataLoader, n)]
    if own and not isinstance(loader, FastDataLoader):
        raise OptionsError(
            f"{name} is a {kind}, which makes its batches in its own way ({own[0]}). Give its "
            "dataset to from_datasets(), or have a subclass return it from train_dataloader(), "
            "val_dataloader(), ..., which leaves it as it is."
        )
    if isinstance(loader, FastDataLoader) and loader.transform:
        raise OptionsError(
            f"{name} is a FastDataLoader with a transform. Give the transform to the data module "
            "as augment=."
        )
    arguments = _order(loader) | _workers(loader, keep=keep_workers, chosen=chosen)
    batches = loader.batch_size is not None or loader.batch_sampler is not None
    if loader.collate_fn is not (default_collate if batches else default_convert):
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


def _order(loader: DataLoader[Any]) -> dict[str, object]:
    """Return which samples come in which order; a plain shuffle is that of the data module."""
    if isinstance(loader.dataset, IterableDataset):
        return {}
    if loader.batch_size is None and loader.batch_sampler is not None:
        return {"batch_sampler": loader.batch_sampler}
    sampler: object = loader.sampler
    data: object = loader.dataset
    if type(sampler) is SequentialSampler and sampler.data_source is data:
        return {"shuffle": False}
    if (
        type(sampler) is RandomSampler
        and sampler.data_source is data
        and sampler.generator is None
        and not sampler.replacement
        and sampler.num_samples == len(sampler.data_source)
    ):
        return {"shuffle": True}
    return {"sampler": sampler}


def _workers(loader: DataLoader[Any], *, keep: bool, chosen: bool) -> dict[str, object]:
    """Return what is kept of a loader's workers; ``chosen``: their number is left open."""
    taken: dict[str, object] = {}
    if loader.multiprocessing_context is not None:
        taken["multiprocessing_context"] = loader.multiprocessing_context.get_start_method()
    if loader.timeout:
        taken["timeout"] = loader.timeout
    if not loader.in_order:
        taken["in_order"] = False
    left_open = chosen or (isinstance(loader, FastDataLoader) and loader.chosen)
    # What reads in the training process sees what steps change; which batches a stream gives
    # depends on how many workers share it out; a sampler of the user's may look at what steps
    # write, and is asked ahead for each worker.
    source = loader.sampler if loader.batch_sampler is None else loader.batch_sampler
    stream = isinstance(loader.dataset, IterableDataset)
    stays = not loader.num_workers or stream or not is_drawn_at_start(source)
    if keep or (stays and not left_open):
        names = _WORKERS if loader.num_workers else _WORKERS[:1]
        taken |= {name: getattr(loader, name) for name in names}
    if keep:
        taken["pin_memory"] = loader.pin_memory
    return taken


# -- data modules of what exists already -----------------------------------------------------------


def of_datasets(
    cls: Callable[..., M], datasets: Sequence[object], arguments: Mapping[str, Any]
) -> M:
    """Return a data module whose dataset methods return these datasets, one or None for each stage.

    Arguments of the constructor that are None and a loader's own count as not given.
    """
    module = _made(cls, arguments)
    for stage, dataset in zip(STAGES, datasets, strict=True):
        if dataset is not None:
            setattr(module, DATASET_METHOD[stage], Constant(dataset))
    return module


def of_loaders(
    cls: Callable[..., M],
    loaders: Mapping[Stage, Any],
    arguments: Mapping[str, Any],
    *,
    keep_workers: bool,
) -> M:
    """Return a data module that makes the batches of loaders, which are given by stage in any form.

    Raises:
        OptionsError: An argument is one that the loaders decide, or one of them cannot be taken
            apart.
    """
    for name in ("batch_size", "shuffle"):
        if name in arguments:
            raise OptionsError(
                f"from_loaders() takes {name} from the loaders. Leave out {name}="
                f"{arguments[name]!r}, or use from_datasets()."
            )
    chosen = arguments.get("num_workers") == "auto"
    given = {
        stage: _given_loaders(own, stage, keep_workers=keep_workers, chosen=chosen)
        for stage, own in loaders.items()
        if not is_missing(own if combined_mode(own) is None else own.iterables)
    }
    sizes = [one.batch_size for form, _ in given.values() for _, one in named(form, "")]
    base = next((size for size in sizes if size is not None), None)
    module = _made(cls, {**arguments, "batch_size": base})
    for stage, (form, combine) in given.items():
        based = [replace(one, base=base) for _, one in named(form, stage)]
        setattr(module, DATASET_METHOD[stage], Constant(in_form_of(form, based), combine))
    return module


def _made(cls: Callable[..., M], arguments: Mapping[str, Any]) -> M:
    """Return a data module, also of a class that does not take all arguments about loaders.

    What its constructor leaves out is set afterwards.
    """
    given = {n: v for n, v in arguments.items() if v is not None or n not in _ABOUT_LOADERS}
    parameters = inspect.signature(cls).parameters
    open_ended = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    later = set() if open_ended else set(_ABOUT_LOADERS) - set(parameters)
    module = cls(**{n: v for n, v in given.items() if n not in later})
    rest = {n: v for n, v in given.items() if n in later}
    if "batch_size" in rest:
        take_batch_size(module, rest["batch_size"])
    if "shuffle" in rest:
        module.shuffle = checked_shuffle(rest["shuffle"])
    loader_arguments = {name: rest.get(name) for name in LOADER_ARGUMENTS}
    module.options = joined_options(rest.get("options", module.options), loader_arguments)
    return module
