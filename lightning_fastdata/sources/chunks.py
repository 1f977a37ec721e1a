"""Samples in the chunks of LitData, read in any order."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from lightning_fastdata.errors import DatasetError
from lightning_fastdata.sources.source import OpenedInEachProcess, Raw, imported
from lightning_fastdata.types import Batch, MapDataset


class LitDataSource(OpenedInEachProcess[MapDataset]):
    """The samples of a dataset that litdata optimized, as its ``StreamingDataset`` returns them.

    In any order, by number; ``StreamingDataset`` itself goes on as a stream. In a dict, tuple or
    list, views of memory become bytes.

    Args:
        path: Of the folder, on this machine.
        **options: For ``litdata.StreamingDataset``.

    Raises:
        OptionsError: litdata is not installed.
        DatasetError: The folder cannot be read.
    """

    parallel_reads = 1

    def __init__(self, path: str | os.PathLike[str], **options: object) -> None:
        self.path = os.fspath(path)
        self.index = os.fspath(Path(path) / "index.json")  # by its time a cache knows the samples
        self.options = options
        self._length = len(self.open())

    def __len__(self) -> int:
        return self._length

    def open(self) -> MapDataset:
        """Return the dataset of this process."""
        litdata = imported("litdata", "LitDataSource")
        if not Path(self.index).is_file():
            raise DatasetError(f"{self.path} has no index.json; give a folder that litdata wrote.")
        try:
            dataset: MapDataset
            dataset = litdata.StreamingDataset(self.path, shuffle=False, **self.options)
            return dataset
        except Exception as error:
            raise DatasetError(f"{self.path} cannot be read as LitData: {error}.") from error

    def get_bytes(self, indices: Sequence[int]) -> list[Raw]:
        """Return samples."""
        samples = self.opened()
        return [_owned(samples[int(index)]) for index in indices]

    def name_of(self, index: int) -> str:
        """Return the folder and the number of the sample."""
        return f"{self.path}:sample {index}"


def _owned(value: Batch) -> Batch:
    """Return a sample without views of a file that may be let go."""
    if isinstance(value, memoryview):
        return bytes(value)
    if type(value) is dict:
        return {key: _owned(part) for key, part in value.items()}
    return type(value)(map(_owned, value)) if type(value) in (list, tuple) else value
