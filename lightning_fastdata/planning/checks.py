"""Checks of what a user sets about a loader, and of what is given to it as a dataset."""

from __future__ import annotations

import math
import os
from numbers import Integral
from typing import TYPE_CHECKING, Any, Final, Literal

from torch.utils.data import DataLoader, Dataset, IterableDataset

from lightning_fastdata.errors import DatasetError, OptionsError, TransformError
from lightning_fastdata.executors.kinds import KINDS
from lightning_fastdata.randomness.seeds import find_composes

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from lightning_fastdata.executors.kinds import ExecutorName

EXECUTORS: Final = ("auto", *KINDS)
PAGE_LOCKS: Final = ("copy", "register")


def check(name: str, value: object, fine: bool, allowed: str) -> None:
    """Raise an :class:`OptionsError` that names the option and its value, unless it is fine."""
    if not fine:
        raise OptionsError(f"{name} is {value!r}; allowed are {allowed}.")


def check_among(name: str, value: object, allowed: tuple[str, ...]) -> None:
    """Raise an :class:`OptionsError` unless the value is one of the allowed ones."""
    check(name, value, value in allowed, ", ".join(map(repr, allowed)))


def is_seconds(value: object) -> bool:
    """Return whether a value is a time that may be waited."""
    return isinstance(value, int | float) and type(value) is not bool and 0 <= value < math.inf


def unsuited(
    executor: Literal["auto"] | ExecutorName, *, iterable: bool, workers: int
) -> Iterator[str]:
    """Yield why an executor that the user chose will not be the one that fetches."""
    if executor == "auto":
        return
    if iterable and not KINDS[executor].reads_streams:
        yield f"executor={executor!r} reads by index, which a stream has not; 'workers' reads it."
    elif not workers and KINDS[executor].side_processes:
        yield f"executor={executor!r} has num_workers=0, so the training process reads itself."


def check_callable(name: str, value: object, takes: str) -> None:
    """Raise an :class:`OptionsError` unless a value is None or can be called.

    Args:
        name: Of the option.
        value: What was given.
        takes: What the function takes and returns, as ``"samples and returns a batch"``.
    """
    fine = value is None or (callable(value) and not isinstance(value, str))
    check(name, value, fine, f"None and a function that takes {takes}")


def checked_seed(seed: object) -> int:
    """Return a seed as an integer of Python.

    Raises:
        OptionsError: It is no whole number.
    """
    check("seed", seed, _is_whole(seed), "whole numbers")
    return int(seed)  # type: ignore[call-overload,no-any-return]


def check_dataset(dataset: Any, name: str, *, ordered: bool) -> None:
    """Raise a :class:`DatasetError` that says what else was given, unless it is a dataset.

    Args:
        dataset: What was given.
        name: How the user knows it.
        ordered: Whether a sampler is given too, which knows the order without the length.
    """
    if isinstance(dataset, IterableDataset):
        return
    wrong = _no_dataset(dataset)
    if wrong is not None:
        raise DatasetError(f"{name} is {wrong}")
    if ordered:
        return
    why, cause = "it has no __len__()", None
    if hasattr(dataset, "__len__"):
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


def check_whole(name: str, value: object, lowest: int) -> None:
    """Raise an :class:`OptionsError` unless a value is None or a whole number from ``lowest``."""
    fine = _is_whole(value) and int(value) >= lowest  # type: ignore[call-overload]
    check(name, value, value is None or fine, f"None and whole numbers from {lowest}")


def _is_whole(value: object) -> bool:
    return isinstance(value, Integral) and not isinstance(value, bool)


def check_loader(
    dataset: Any,
    *,
    executor: Literal["auto"] | ExecutorName,
    page_lock: object,
    transform: object,
    stall_timeout: object,
    needs_batches: bool,
    whole: Mapping[str, tuple[object, int]],
    orders: Mapping[str, object],
    functions: Mapping[str, tuple[object, str]],
) -> None:
    """Raise an error that names what of a loader's arguments is impossible, if anything is.

    Args:
        dataset: What is to be read.
        executor: Its name.
        page_lock: How memory is locked.
        transform: Of this package, or None.
        stall_timeout: Seconds, or "auto".
        needs_batches: Something runs on the device, on batches.
        whole: Whole numbers or None, and from where on they are allowed.
        orders: Samplers, or None.
        functions: Functions or None, and what each takes.

    Raises:
        DatasetError: It is no dataset.
        OptionsError: Another argument is impossible.
        TransformError: ``transform`` was not made by this package, or there are no batches.
    """
    ordered = any(order is not None for order in orders.values())
    check_dataset(dataset, "The dataset of FastDataLoader", ordered=ordered)
    check_among("executor", executor, EXECUTORS)
    check_among("page_lock", page_lock, PAGE_LOCKS)
    for name, (function, takes) in functions.items():
        check_callable(name, function, takes)
    for name, (value, lowest) in whole.items():
        check_whole(name, value, lowest)
    for name, order in orders.items():
        fine = order is None or hasattr(order, "__iter__") or hasattr(order, "__getitem__")
        check(name, order, fine, "None and what can be iterated")
    fine = stall_timeout == "auto" or is_seconds(stall_timeout)
    check("stall_timeout", stall_timeout, fine, 'seconds from 0 (no timeout), or "auto"')
    if transform is not None and not hasattr(transform, "in_worker"):
        raise TransformError(
            f"transform is {transform!r}; it has to be made by BatchTransform."
            "from_albumentations(...). Or give it to a FastDataModule as augment=."
        )
    if needs_batches and whole["batch_size"][0] is None and orders["batch_sampler"] is None:
        raise TransformError(
            "A transform on the device needs batches, but batch_size=None. Set a batch_size, "
            "or pass the transform to the dataset."
        )
    threads = executor != "auto" and KINDS[executor].threads_per_process > 1
    if threads and whole["num_workers"][0] and (transform or find_composes(dataset)):
        raise OptionsError(
            f"executor is {executor!r}, whose threads would share one Albumentations pipeline and "
            "its random state. Use 'workers' for this dataset."
        )


def _hold_datasets(given: Sequence[Any]) -> bool:
    return any(
        isinstance(each, Dataset)
        or (isinstance(each, list | tuple) and any(isinstance(one, Dataset) for one in each))
        for each in given
    )


def _is_path(text: str) -> bool:
    """Return whether a string is surely no row of letters, which torch would take for a dataset."""
    return not any(letter.isspace() for letter in text) or os.path.exists(text)  # noqa: PTH110


def _no_dataset(given: Any) -> str | None:
    """Return what was given instead of a dataset, and what to do; None: it is one."""
    given_as = f"the {type(given).__name__} {given!r:.200}, not a dataset"
    if given is None:
        return "None, not a dataset. Return a dataset, or leave it out of the list."
    if isinstance(given, type):
        return f"the class {given.__name__}, not a dataset. Make one of it: {given.__name__}(...)."
    if isinstance(given, bytes | os.PathLike) or (isinstance(given, str) and _is_path(given)):
        path = os.fsdecode(given)
        return (
            f"the path {path!r:.200}, not a dataset. Open what is there: a folder of images with "
            f"FastImageFolder({path!r:.200}, ...), other files with a Dataset of your own."
        )
    if isinstance(given, DataLoader):
        return f"a {type(given).__name__}, not a dataset. Give its dataset: loader.dataset."
    if isinstance(given, list | tuple) and _hold_datasets(given):
        return (
            f"a {type(given).__name__} of datasets, not a dataset. Join them with "
            "torch.utils.data.ConcatDataset, or return one flat list or dict of datasets."
        )
    if hasattr(given, "__getitem__"):
        return None
    if hasattr(given, "__next__"):
        return (
            f"{given_as} but an iterator, which can be read once only. Derive from "
            "torch.utils.data.IterableDataset and make the iterator in its __iter__()."
        )
    if hasattr(given, "__iter__"):
        return (
            f"{given_as}: it has no __getitem__(). If it is a stream, derive it from "
            "torch.utils.data.IterableDataset, otherwise give a list of the samples."
        )
    if callable(given):
        return f"{given_as} but a function. Call it, and give what it returns."
    return f"{given_as}. A dataset has __getitem__() and __len__(), or is an IterableDataset."
