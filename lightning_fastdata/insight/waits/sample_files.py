"""Which file a sample of a dataset was read from."""

from __future__ import annotations

import os
from bisect import bisect_right
from typing import Any

from torch.utils.data import ConcatDataset, Subset

from lightning_fastdata.attributes import held
from lightning_fastdata.executors.fetch import decodes_in_place


def sample_path(dataset: Any, index: Any) -> str | None:
    """Return the file of a sample of an image folder, torchvision's or ours.

    Subsets and concatenations of such folders are looked through.

    None if the dataset holds no list ``samples`` that begins with paths. Bytes that are no text are
    surrogates in it, as the ``os`` module has them.
    """
    try:
        while isinstance(dataset, Subset | ConcatDataset):
            if isinstance(dataset, Subset):
                dataset, index = dataset.dataset, dataset.indices[index]
            else:
                ends = dataset.cumulative_sizes
                which = bisect_right(ends, index)
                index -= ends[which - 1] if which else 0
                dataset = dataset.datasets[which]
        # Only our own list is a property: one of the user may open a file.
        samples = dataset.samples if decodes_in_place(dataset) else held(dataset, "samples")
        return os.fsdecode(samples[index][0])
    except Exception:  # `samples` is the user's, and may be anything
        return None
