"""What a dataset method may return: one dataset, or several by name or position."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch.utils.data import Dataset

from lightning_fastdata.errors import DatasetError
from lightning_fastdata.plugin.data.given_loaders import GivenLoader


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
