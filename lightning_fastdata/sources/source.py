"""What a source of bytes is, and who reads ahead."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from operator import index as as_index
from typing import Any, Protocol, SupportsIndex, TypeAlias, cast

from torch.utils.data import ConcatDataset, Subset

from lightning_fastdata.tree import has_method

Raw: TypeAlias = "bytes | memoryview | Mapping[str, Any]"
"""A record as it is stored; of a record with several parts or columns, these by name."""


class Source(Protocol):
    """Records by number, as they are stored.

    Subclassing is not needed. A source is asked in several processes, and by several threads of
    each; it may be pickled, and opens what it reads on first use in each process. A method
    ``will_read(indices)``, where there is one, is called before several are asked for one by one,
    and returns at once: so it can have them read ahead. A method ``block_starts()``
    returns the first record of each group that is read as a whole, increasing from 0, or None: for
    ``shuffle="blocks"``.
    """

    parallel_reads: int
    """How many records are worth asking for at once from threads, as each waits for an answer; 1:
    records are asked for together, in one call."""

    def __len__(self) -> int:
        """Return the number of records."""

    def get_bytes(self, indices: Sequence[int]) -> list[Raw]:
        """Return records, each number at least 0 and below the length, in the order asked for."""

    def name_of(self, index: int) -> str:
        """Return what errors call a record: a file, an object, a place in an archive."""


def reads_ahead(dataset: object) -> bool:
    """Return whether a dataset, or one that torch has wrapped, can begin to read several samples.

    It then has a method ``read_ahead(indices)``, which returns at once.
    """
    while type(dataset) is Subset:
        dataset = dataset.dataset
    if type(dataset) is ConcatDataset:
        return any(reads_ahead(part) for part in dataset.datasets)
    if not has_method(dataset, "read_ahead"):
        return False
    # What stands for another dataset says whether that one can.
    return bool(getattr(dataset, "can_read_ahead", True))


def read_ahead(dataset: object, indices: Sequence[object]) -> None:
    """Have a dataset begin to read samples; those with other keys than numbers are left out."""
    if not reads_ahead(dataset):
        return
    numbers = [as_index(index) for index in indices if isinstance(index, SupportsIndex)]
    while type(dataset) is Subset:
        inner = dataset.indices
        numbers = [inner[number] for number in numbers if -len(inner) <= number < len(inner)]
        dataset = dataset.dataset
    if type(dataset) is ConcatDataset:
        starts = [0, *dataset.cumulative_sizes]
        for part, start, end in zip(dataset.datasets, starts, starts[1:], strict=False):
            read_ahead(part, [number - start for number in numbers if start <= number < end])
    elif numbers:
        cast("Any", dataset).read_ahead(numbers)
