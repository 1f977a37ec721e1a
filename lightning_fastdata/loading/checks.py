"""Checks of what a user sets about a loader, and of what is given to it as a dataset."""

from __future__ import annotations

import os
from collections.abc import Iterator
from numbers import Integral
from typing import Any

from torch.utils.data import DataLoader, Dataset, IterableDataset

from lightning_fastdata.errors import DatasetError, OptionsError
from lightning_fastdata.loading.order import dataset_length


def check(name: str, value: object, fine: bool, allowed: str) -> None:
    """Raise an :class:`OptionsError` that names the option and its value, unless it is fine."""
    if not fine:
        raise OptionsError(f"{name} is {value!r}; allowed are {allowed}.")


def check_among(name: str, value: object, allowed: tuple[str, ...]) -> None:
    """Raise an :class:`OptionsError` unless the value is one of the allowed ones."""
    check(name, value, value in allowed, ", ".join(map(repr, allowed)))


def unsuited(executor: str, *, iterable: bool, workers: int) -> Iterator[str]:
    """Yield why an executor that the user chose will not be the one that fetches."""
    if iterable and executor in ("gather", "sidecar"):
        yield f"executor={executor!r} reads by index, which a stream has not; 'workers' reads it."
    elif not workers and executor in ("workers", "sidecar"):
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
    fine = isinstance(seed, Integral) and not isinstance(seed, bool)
    check("seed", seed, fine, "whole numbers")
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
    if ordered or dataset_length(dataset) is not None:
        return
    kind, why = type(dataset).__name__, "it has no __len__()"
    if hasattr(dataset, "__len__"):
        try:
            len(dataset)
        except Exception as error:
            why = f"its __len__() raised {type(error).__name__}: {error}"
    raise DatasetError(
        f"{name} is a {kind}, of which no order can be made: {why}. Give it a __len__() that "
        "returns the number of its samples, pass a sampler, or derive it from "
        "torch.utils.data.IterableDataset if it is a stream."
    )


def _no_dataset(given: Any) -> str | None:
    """Return what was given instead of a dataset, and what to do; None: it is one."""
    told = f"the {type(given).__name__} {given!r:.200}, not a dataset"
    if given is None:
        return "None, not a dataset. Return a dataset, or leave it out of the list."
    if isinstance(given, type):
        return f"the class {given.__name__}, not a dataset. Make one of it: {given.__name__}(...)."
    if isinstance(given, str | bytes | os.PathLike):
        return (
            f"{told}. Open what is there: a folder of images with FastImageFolder({given!r:.200}), "
            "other files with a Dataset of your own."
        )
    if isinstance(given, DataLoader):
        return f"a {type(given).__name__}, not a dataset. Give its dataset: loader.dataset."
    if isinstance(given, list | tuple) and any(isinstance(each, Dataset) for each in given):
        return (
            f"a {type(given).__name__} of datasets, not a dataset. Join them with "
            "torch.utils.data.ConcatDataset, or return one flat list or dict of datasets."
        )
    if hasattr(given, "__getitem__"):
        return None
    if hasattr(given, "__next__"):
        return (
            f"{told} but an iterator, which can be read once only. Derive from "
            "torch.utils.data.IterableDataset and make the iterator in its __iter__()."
        )
    if hasattr(given, "__iter__"):
        return (
            f"{told}: it has no __getitem__(). If it is a stream, derive it from "
            "torch.utils.data.IterableDataset, otherwise give a list of the samples."
        )
    if callable(given):
        return f"{told} but a function. Call it, and give what it returns."
    return f"{told}. A dataset has __getitem__() and __len__(), or is an IterableDataset."
