"""Which file a sample of a dataset was read from."""

from __future__ import annotations

import os
from typing import Any

from torch.utils.data import Subset


def sample_path(dataset: Any, index: Any) -> str | None:
    """Return the file of a sample of an image folder, torchvision's or ours, or of a subset of one.

    None if the dataset has no list ``samples`` that begins with paths. Bytes that are no text are
    surrogates in it, as the ``os`` module has them.
    """
    try:
        while isinstance(dataset, Subset):
            dataset, index = dataset.dataset, dataset.indices[index]
        path = dataset.samples[index][0]
        return os.fsdecode(path)
    except Exception:  # `samples` is the user's, and may be anything
        return None
