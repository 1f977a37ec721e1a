"""Rows of arrays in HDF5 files and Zarr groups."""

from __future__ import annotations

import os
import warnings
from collections import OrderedDict
from collections.abc import Sequence
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeAlias

import numpy as np

from lightning_fastdata.errors import DatasetError, FastDataWarning, OptionsError
from lightning_fastdata.ext.sources.opened import (
    Handle,
    OpenedInEachProcess,
    imported,
    named_status,
)
from lightning_fastdata.sources.source import Raw

if TYPE_CHECKING:
    import h5py
    import zarr
    from numpy.typing import NDArray

    _Opened: TypeAlias = tuple[dict[str, zarr.Array], OrderedDict[tuple[str, int], NDArray[Any]]]

_CHUNKS_KEPT: Final = 8
_MOST_FILES: Final = 20_000


class _Rows(OpenedInEachProcess[Handle]):
    """Rows of several arrays of one length, by the names of these."""

    parallel_reads = 1
    path: str
    names: list[str]
    _length: int
    _rows_together: int
    """In the longest of the arrays' chunks."""

    def __len__(self) -> int:
        return self._length

    def block_starts(self) -> Sequence[int] | None:
        """Return the first row of each chunk; None: they hold one, or there are none."""
        together = self._rows_together
        return range(0, self._length, together) if together > 1 else None

    def name_of(self, index: int) -> str:
        """Return the file or group, and the number of the row."""
        return f"{self.path}:{','.join(self.names)}[{index}]"


class Hdf5Source(_Rows["h5py.File"]):
    """Rows of datasets in an HDF5 file, by h5py: dicts of arrays by name.

    Args:
        path: Of the file.
        names: Of the datasets in it, all of one length.

    Raises:
        OptionsError: h5py is not installed, or there is no name.
        DatasetError: The file cannot be read, or its datasets differ in length.
    """

    def __init__(self, path: str | os.PathLike[str], names: Sequence[str]) -> None:
        self.path = os.fspath(path)
        self.names = list(names)
        if not self.names:
            raise OptionsError("Hdf5Source got no names; give those of datasets in the file.")
        file = self.open()
        try:
            lengths = {name: len(file[name]) for name in self.names}
            rows = [(file[name].chunks or [1])[0] for name in self.names]
        except (KeyError, TypeError) as error:
            raise DatasetError(
                f"{self.path} has not all of {self.names}: {error}. It has {list(file)}."
            ) from error
        finally:
            file.close()
        self._length = _common_length(self.path, lengths)
        self._rows_together = max(rows)

    def open(self) -> h5py.File:
        """Return the file of this process."""
        h5py = imported("h5py", "Hdf5Source")
        try:
            return h5py.File(self.path, "r")
        except OSError as error:
            raise DatasetError(f"{self.path} cannot be read as HDF5: {error}.") from error

    def get_bytes(self, indices: Sequence[int]) -> list[Raw]:
        """Return rows; rows that follow each other are read in one call."""
        file = self.opened()
        order = np.unique(np.asarray(indices, np.int64))
        rows: dict[int, dict[str, Any]] = {index: {} for index in order.tolist()}
        for run in np.split(order, np.flatnonzero(np.diff(order) > 1) + 1):
            for name in self.names if len(run) else ():
                block = file[name][run[0] : run[-1] + 1]
                for index, row in zip(run.tolist(), block, strict=True):
                    rows[index][name] = np.array(row)  # which does not hold the block
        return [rows[index] for index in indices]


class ZarrSource(_Rows["_Opened"]):
    """Rows of the arrays in a Zarr group, by zarr 3: dicts of arrays by name.

    Arrays are stored in chunks of so many rows, each of which is read whole. The last eight are
    kept in each process; see :class:`ParquetSource` for what a shuffled order means.

    Args:
        path: Of the group, or an address that zarr opens.
        names: Of arrays in it, all of one length; None: all there are.
        **storage_options: For ``zarr.open_group``.

    Raises:
        OptionsError: zarr is not installed, or has no such version.
        DatasetError: The group cannot be read, or its arrays differ in length.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        names: Sequence[str] | None = None,
        **storage_options: object,
    ) -> None:
        self.path = os.fspath(path)
        self.storage_options = storage_options
        group = self._group()
        self.names = list(names) if names is not None else sorted(dict(group.arrays()))
        if not self.names:
            raise DatasetError(f"{self.path} has no arrays; give a group that has some.")
        try:
            shapes = {name: group[name].shape for name in self.names}
            lengths = {name: shape[0] for name, shape in shapes.items()}
        except (KeyError, AttributeError, IndexError) as error:
            raise DatasetError(
                f"{self.path} has not all of {self.names} as arrays of rows: {error!r}. It has "
                f"{sorted(dict(group.arrays()))}."
            ) from error
        self._length = _common_length(self.path, lengths)
        self._rows_together = max(group[name].chunks[0] for name in self.names)

    def open(self) -> _Opened:
        """Return the arrays of this process, and the chunks that were read last."""
        group = self._group()
        return {name: group[name] for name in self.names}, OrderedDict()

    def get_bytes(self, indices: Sequence[int]) -> list[Raw]:
        """Return rows."""
        return [{name: self._row(name, int(index)) for name in self.names} for index in indices]

    def recognised_by(self) -> tuple[object, ...]:
        """Return what tells these arrays from others: of files, size and time."""
        place = Path(self.path)
        found = islice(sorted(place.rglob("*")), _MOST_FILES) if place.is_dir() else [place]
        files = [named_status(path) for path in found if path.exists()]
        if not files:
            warnings.warn(
                f"A cache knows {self.path} by its name alone: if it changes, old rows may be "
                "handed out. Give the cache a key=... that you change when the arrays change.",
                FastDataWarning,
                stacklevel=2,
            )
        return self.path, self.names, files

    def _group(self) -> zarr.Group:
        zarr = imported("zarr", "ZarrSource")
        if not hasattr(zarr, "AsyncGroup"):
            raise OptionsError(f"ZarrSource needs zarr 3; there is {zarr.__version__}.")
        try:
            return zarr.open_group(self.path, mode="r", **self.storage_options)
        except Exception as error:
            raise DatasetError(
                f"{self.path} cannot be read as a Zarr group: {type(error).__name__}: {error}."
            ) from error

    def _row(self, name: str, index: int) -> NDArray[Any]:
        arrays, kept = self.opened()
        rows = arrays[name].chunks[0]
        key = name, index // rows
        if key in kept:
            kept.move_to_end(key)
        else:
            first = key[1] * rows
            kept[key] = np.asarray(arrays[name][first : first + rows])
            while len(kept) > _CHUNKS_KEPT * len(arrays):
                kept.popitem(last=False)
        # A copy, so that one row does not hold the chunk.
        return np.array(kept[key][index % rows])


def _common_length(path: str, lengths: dict[str, int]) -> int:
    if len(set(lengths.values())) > 1:
        raise DatasetError(f"The arrays of {path} differ in length: {lengths}. Name others.")
    return next(iter(lengths.values()))
