"""What you may set about a loader, and how it is checked."""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Mapping, Sized
from dataclasses import dataclass, fields
from typing import Any, Final, Literal, TypeAlias

import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset

from lightning_fastdata.augment import StageTransform
from lightning_fastdata.batches.bad_samples import BadSamplePolicy, BadSamples
from lightning_fastdata.errors import (
    DatasetError,
    OptionsError,
    TransformError,
    check,
    check_among,
    check_callable,
    is_number,
    is_whole,
)
from lightning_fastdata.executors.kinds import AnyExecutor, kind_of
from lightning_fastdata.types import has_own_order

Auto: TypeAlias = Literal["auto"]


class LeftOpen(float):
    """The ``timeout`` of a loader that was given none: 0, as torch's, for who makes one of it."""


_START_METHODS: Final = ("auto", "fork", "spawn", "forkserver")
_OF_WORKERS: Final = ("prefetch_factor", "persistent_workers", "multiprocessing_context")
"""Options that torch refuses for a loader without workers."""


def check_loader(
    options: LoaderOptions,
    batch_size: object,
    *,
    alone: bool,
    transform: object,
    on_device: bool,
    staged: object,
    orders: Mapping[str, object],
    functions: Mapping[str, tuple[object, str]],
    generator: object,
) -> None:
    """Raise an error that names what of a loader's arguments is impossible, if anything is.

    ``orders`` are samplers, ``functions`` callables and what each takes. ``staged``: the stage for
    whose hooks batches are staged; None: nobody runs anything on them. ``alone``: whether there are
    to be no workers. (A data module takes options of workers all the same, which are for all of its
    stages.)

    Raises:
        OptionsError: An argument is impossible, or is for workers and there are none.
        TransformError: ``transform`` was not made by this package, nobody would run it, or there
            are no batches.
    """
    for name in _OF_WORKERS if alone else ():
        value = getattr(options, name)
        if value is not False and value != "auto":
            raise OptionsError(
                f"{name} is {value!r}, which is for workers, but num_workers is 0. Leave out "
                f'{name}, or set num_workers to a number from 1, or to "auto".'
            )
    for name, (function, takes) in functions.items():
        check_callable(name, function, takes)
    fine = batch_size is None or (is_whole(batch_size, 1))
    check("batch_size", batch_size, fine, "None and whole numbers from 1")
    for name, order in orders.items():
        fine = order is None or isinstance(order, Iterable) or hasattr(order, "__getitem__")
        check(name, order, fine, "None and what can be iterated")
    fine = isinstance(generator, torch.Generator | None)
    check("generator", generator, fine, "None and a torch.Generator")
    if transform is not None and not isinstance(transform, StageTransform):
        raise TransformError(
            f"transform is {transform!r}; it has to be made by as_batch_transform(...). Or give it "
            "to a FastDataModule as augment=."
        )
    if transform is not None and staged is None and (on_device or not transform.starts_in_worker):
        raise TransformError(
            f"{transform.name} is to run on whole batches on the device, and a FastDataLoader by "
            "itself has nobody who does that. Give it to FastDataModule(augment=...) or "
            "DataThroughputCallback(augment=...), or leave out on_device, or call it on each batch."
        )
    if staged is not None and batch_size is None and orders["batch_sampler"] is None:
        raise TransformError(
            "A transform on the device needs batches, but batch_size=None. Set a batch_size, "
            "or pass the transform to the dataset."
        )


def check_dataset(dataset: object, name: str, *, ordered: bool, shuffle: object = None) -> None:
    """Raise an error that says what is wrong, unless it is a dataset, and may be shuffled so.

    ``ordered``: whether a sampler is given, too, which knows the order without the length.

    Raises:
        DatasetError: It is no dataset.
        OptionsError: The dataset has an order of its own, and is to be shuffled.
    """
    if shuffle and has_own_order(dataset):
        kind = type(dataset).__name__
        raise OptionsError(
            f"shuffle={shuffle!r}, but a {kind} has an order of its own, another one in each "
            f"epoch. Leave out shuffle; {kind}(shuffle=...) is for what it is made of."
        )
    if isinstance(dataset, IterableDataset):
        return
    wrong = None if isinstance(dataset, Dataset) else _no_dataset(dataset)
    if wrong is not None:
        raise DatasetError(f"{name} is {wrong}")
    if ordered:
        return
    why, cause = "it has no __len__()", None
    if isinstance(dataset, Sized):
        try:
            len(dataset)
            return
        except Exception as error:
            why, cause = f"its __len__() raised {type(error).__name__}: {error}", error
    raise DatasetError(
        f"{name} is a {type(dataset).__name__}, of which no order can be made: {why}. Give it a "
        "__len__() that returns the number of its samples, pass a sampler, or derive it from "
        "torch.utils.data.IterableDataset if it is a stream."
    ) from cause


def _no_dataset(given: object) -> str | None:
    """Return what was given instead of a dataset, and what to do; None: it may be a dataset."""
    kind = type(given).__name__
    if given is None:
        return "None, not a dataset. Return a dataset, or leave it out of the list."
    if isinstance(given, type):
        return f"the class {given.__name__}, not a dataset. Make one of it: {given.__name__}(...)."
    if isinstance(given, DataLoader):
        return f"a {kind}, not a dataset. Give its dataset: loader.dataset."
    if _holds_datasets(given, levels=2):
        return (
            f"a {kind} of datasets, not a dataset. Join them with "
            "torch.utils.data.ConcatDataset, or return one flat list or dict of datasets."
        )
    if isinstance(given, bytes | os.PathLike) or (isinstance(given, str) and _is_path(given)):
        path = os.fsdecode(given)
        return (
            f"the path {path!r:.200}, not a dataset. Open what is there: a folder of images with "
            f"FastImageFolder({path!r:.200}, ...), other files with a Dataset of your own."
        )
    if hasattr(given, "__getitem__"):
        return None
    return (
        f"the {kind} {given!r:.200}, not a dataset. A dataset has __getitem__() and __len__(), or "
        "is a torch.utils.data.IterableDataset, if it is a stream."
    )


def _holds_datasets(given: object, levels: int) -> bool:
    return (levels > 0 and isinstance(given, list | tuple)) and any(
        isinstance(each, Dataset) or _holds_datasets(each, levels - 1) for each in given
    )


def _is_path(text: str) -> bool:
    """Return whether a string must be a path, and is not letters that torch takes for a dataset."""
    return not any(letter.isspace() for letter in text) or os.path.exists(text)  # noqa: PTH110


def given_options(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return those arguments of a loader that are given; a context is its start method."""
    given = {name: value for name, value in arguments.items() if value is not None}
    method = given.get("multiprocessing_context", "")
    if hasattr(method, "get_start_method"):
        given["multiprocessing_context"] = method.get_start_method()
    return given


@dataclass(frozen=True, slots=True, kw_only=True)
class LoaderOptions:
    """What you may set about a loader; ``"auto"`` chooses for this machine and says why.

    Args:
        num_workers: Processes that read samples; 0 reads in the training process. ``"auto"`` begins
            with what suits the dataset, and changes their number while the training runs, where
            the steps show that another one pays; order and content of the batches stay. A number
            of your own stays as it is.
        pin_memory: Copy batches to page-locked memory, from where a GPU copies without waiting.
        persistent_workers: Keep the workers between epochs instead of starting new ones;
            ``"unchanged"``, which ``"auto"`` is in training and validation: keep them while what
            they read is as it was when they started.
        prefetch_factor: Batches each worker is ahead, at least 1.
        multiprocessing_context: How workers are started.
        timeout: Seconds after which a worker that gets nowhere with a sample is replaced, and the
            sample read once more; if that gets nowhere, too, it is an error that shows what the
            worker does. 0 waits for ever. "auto": 60, or 20 times the 99th percentile of tasks if
            that is more. Torch's own iterator waits for a batch for that long; with "auto" for
            ever.
        in_order: Batches come as the sampler gives them; False hands over whichever is ready
            first.
        executor: Who fetches: torch's own iterator, or this package's engine: ``"inline"`` the
            training process, ``"gather"`` rows of tensors in one call, ``"workers"`` processes,
            ``"ray"`` num_workers actors of a Ray cluster, which may be on other machines, or a
            :class:`~lightning_fastdata.executors.ray.Ray`, which says what each of them takes.
        on_bad_sample: What to do about a sample that cannot be read: ``"raise"`` an error that
            names it, ``"replace"`` it by another one, the same for any number of workers, or
            ``"skip"`` it, which shortens its batch. Or a :class:`BadSamples`, which also says how
            many may be bad, and where they are listed; default: ``bad_samples.jsonl`` in the
            trainer's log folder if they are replaced or skipped. Streams can only raise.
        probe: Read some samples before the workers start, and choose what suits them. False reads
            none: for datasets that must not be read then, or whose keys are not 0, 1, 2, ...
        split: Whether a stream (``IterableDataset``) divides itself among workers, so that several
            read it. ``"auto"``: it is known for streams of some libraries; of another one, a few
            samples are read in a process that is thrown away (not with ``probe=False``), and it
            does if it asks ``get_worker_info()`` for its part.

    Raises:
        OptionsError: A value is impossible.
    """

    # Described above and not below each field, because that is where LightningCLI takes its help.
    num_workers: int | Auto = "auto"
    pin_memory: bool | Auto = "auto"
    persistent_workers: bool | Literal["unchanged"] | Auto = "auto"
    prefetch_factor: int | Auto = "auto"
    multiprocessing_context: Literal["auto", "fork", "spawn", "forkserver"] = "auto"
    timeout: float | Auto = "auto"
    in_order: bool = True
    executor: Auto | AnyExecutor = "auto"
    on_bad_sample: BadSamplePolicy | BadSamples = "raise"
    probe: bool = True
    split: bool | Auto = "auto"

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            # An array compares with "auto" element by element.
            check(field.name, value, not getattr(value, "shape", ()), "single values, no arrays")
        for name, lowest in (("num_workers", 0), ("prefetch_factor", 1)):
            value = getattr(self, name)
            fine = value == "auto" or is_whole(value, lowest)
            check(name, value, fine, f'whole numbers from {lowest}, or "auto"')
            if value != "auto":  # torch and Python take no number of NumPy
                object.__setattr__(self, name, int(value))
        for name in ("pin_memory", "split"):
            value = getattr(self, name)
            check(name, value, value == "auto" or type(value) is bool, 'True, False or "auto"')
        stay = self.persistent_workers
        fine = stay in ("auto", "unchanged") or type(stay) is bool
        check("persistent_workers", stay, fine, 'True, False, "unchanged" or "auto"')
        for name in ("in_order", "probe"):
            check(name, getattr(self, name), type(getattr(self, name)) is bool, "True and False")
        check_among("multiprocessing_context", self.multiprocessing_context, _START_METHODS)
        if self.executor != "auto":
            kind_of(self.executor)  # raises an error if there is none
        BadSamples.of(self.on_bad_sample)
        wait: Any = self.timeout
        fine = is_number(wait) and type(wait) is not bool and 0 <= wait < math.inf
        check("timeout", wait, fine or wait == "auto", 'seconds from 0 (no timeout), or "auto"')

    def set_by_user(self) -> frozenset[str]:
        """Return the names of the options that are set to other than their defaults."""
        return frozenset(f.name for f in fields(self) if getattr(self, f.name) != f.default)
