"""One sample read before the workers start: its size, and whether it can be read at all."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset, IterableDataset

from lightning_fastdata.errors import DatasetError
from lightning_fastdata.loading.draws import kept_random_state
from lightning_fastdata.loading.order import dataset_length


def probe_sample(dataset: Dataset[Any], name: str) -> Any:
    """Return sample 0 of a map-style dataset, leaving dataset and random state as they were.

    The sample is read from a shallow copy, because a dataset that opens its files on first use
    must open them in each worker and not here.

    Args:
        dataset: The dataset to read.
        name: How the user knows it, for the messages, e.g. ``"Photos.train_dataset()"``.

    Returns:
        The sample, or None for an iterable dataset, which cannot be read without consuming it.

    Raises:
        DatasetError: The dataset is empty, or reading the sample raised.
    """
    if isinstance(dataset, IterableDataset):
        return None
    if dataset_length(dataset) == 0:
        raise DatasetError(
            f"{name} returned an empty {type(dataset).__name__} (length 0). "
            "Check the path or the filter that made it."
        )
    with kept_random_state():
        try:
            return shallow_copy(dataset)[0]
        except Exception as error:
            raise DatasetError(
                f"Reading sample 0 of {name} ({type(dataset).__name__}) raised "
                f"{type(error).__name__}: {error}. The training would have failed at its first "
                "batch; the cause is in the traceback above."
            ) from error


def shallow_copy(dataset: Any) -> Any:
    """Copy a dataset and the datasets it wraps, sharing their data but no attribute."""
    try:
        twin = copy.copy(dataset)
    except Exception:  # whatever a dataset's own __copy__ or __reduce__ raises
        return dataset
    wrapped = getattr(twin, "dataset", None)
    if isinstance(wrapped, Dataset):
        twin.dataset = shallow_copy(wrapped)
    several = getattr(twin, "datasets", None)
    if isinstance(several, list) and all(isinstance(d, Dataset) for d in several):
        twin.datasets = [shallow_copy(d) for d in several]
    return twin


def sample_bytes(sample: Any) -> int:
    """Return the bytes of all tensors, arrays and images in a sample."""
    if isinstance(sample, torch.Tensor):
        return sample.element_size() * sample.nelement()
    if isinstance(sample, np.ndarray | np.generic):
        return int(sample.nbytes)
    if isinstance(sample, bytes | str):
        return len(sample)
    if isinstance(sample, Mapping):
        return sum(sample_bytes(value) for value in sample.values())
    if isinstance(sample, list | tuple):
        return sum(sample_bytes(value) for value in sample)
    if is_dataclass(sample):
        return sum(sample_bytes(getattr(sample, f.name)) for f in fields(sample))
    if hasattr(sample, "getbands") and hasattr(sample, "size"):  # a PIL image
        return int(sample.size[0] * sample.size[1] * len(sample.getbands()))
    return 8
