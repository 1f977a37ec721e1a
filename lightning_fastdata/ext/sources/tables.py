"""Values and rows in databases, tables and arrays: LMDB, Parquet, HDF5 and Zarr."""

from __future__ import annotations

import importlib
import os
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import lru_cache
from itertools import islice
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from lightning_fastdata.errors import DatasetError, FastDataWarning, OptionsError
from lightning_fastdata.ext.sources import (
    Handle,
    OpenedInEachProcess,
    Paths,
    as_list,
    each_of,
)
from lightning_fastdata.host.system_calls import size_and_time
from lightning_fastdata.sources.source import Raw

if TYPE_CHECKING:
    import h5py
    import lmdb
    import pyarrow
    import zarr
    from numpy.typing import NDArray

_KEPT: Final = 8
"""Number of groups of rows, or of chunks of each array, that are kept: the last ones read."""
_MOST_FILES: Final = 20_000
_environments: dict[tuple[int, int], tuple[int, lmdb.Environment | None]] = {}
"""Open LMDB environments by device and inode of their data, each with the number of the process
that opened it. While one is open, no other file gets its number."""


class LmdbSource(OpenedInEachProcess["lmdb.Environment"]):
    """The values of an LMDB database, by lmdb.

    Args:
        path: Path of the database.
        keys: Keys of the values; None: all keys, in the order of the database.

    Raises:
        OptionsError: lmdb is not installed, or ``keys`` is no list of bytes.
        DatasetError: The database cannot be read.
    """

    parallel_reads = 1

    def __init__(self, path: str | os.PathLike[str], keys: Iterable[bytes] | None = None) -> None:
        self.path = os.fspath(path)
        if keys is None:
            with self.open().begin() as transaction:
                keys = list(transaction.cursor().iternext(values=False))
        self.keys = list(each_of("keys", keys, "bytes", bytes, bytearray, memoryview))

    def __len__(self) -> int:
        return len(self.keys)

    def open(self) -> lmdb.Environment:
        """Return the environment of this process, read-only and without locks.

        lmdb opens a database once in a process, so sources of one database share it. One that was
        written anew at the same path is another database.
        """
        library = imported("lmdb", "LmdbSource")
        file = self._data_file()
        status = file.stat() if file.exists() else None  # of what is not there, lmdb says why
        known = (0, 0) if status is None else (status.st_dev, status.st_ino)
        process, environment = _environments.get(known, (0, None))
        if process == os.getpid() and environment is not None:
            return environment
        if environment is not None:
            environment.close()  # the parent process, from which this one was forked, opened it
        try:
            environment = library.open(
                self.path,
                readonly=True,
                lock=False,
                readahead=False,
                subdir=Path(self.path).is_dir(),
            )
        except library.Error as error:
            raise DatasetError(f"{self.path} cannot be read as LMDB: {error}.") from error
        opened: lmdb.Environment = environment
        _environments[known] = os.getpid(), opened
        return opened

    def get_bytes(self, indices: Sequence[int]) -> list[Raw]:
        """Return values.

        Raises:
            DatasetError: A key is not there.
        """
        with self.opened().begin() as transaction:
            found: list[Any] = [transaction.get(self.keys[index]) for index in indices]
        if None in found:
            raise DatasetError(f"{self.name_of(indices[found.index(None)])} is not there.")
        return found

    def name_of(self, index: int) -> str:
        """Return the database and the key."""
        return f"{self.path}:{self.keys[index]!r}"

    def recognised_by(self) -> tuple[object, ...]:
        """Return what identifies these values: size and time of the database, and the keys."""
        file = self._data_file()
        return (str(file), *(size_and_time(file) or ())), self.keys

    def _data_file(self) -> Path:
        place = Path(self.path)
        return place / "data.mdb" if place.is_dir() else place


class ParquetSource(OpenedInEachProcess["Callable[[int], pyarrow.Table]"]):
    """The rows of Parquet files, by pyarrow: dicts of values by column.

    Rows are stored in groups, and a group is read whole, so that a shuffled order reads a group for
    nearly every row. The last eight groups are kept in each process. Use ``shuffle="blocks"``, or
    write files with small groups (``row_group_size``), or cache the samples.

    Args:
        paths: Paths of the files.
        columns: Columns to read; None: all.

    Raises:
        OptionsError: pyarrow is not installed, or ``columns`` is no list of names.
        DatasetError: A file cannot be read, has not all of the columns, or has two of one name.
    """

    parallel_reads = 1

    def __init__(self, paths: Paths, columns: Sequence[str] | None = None) -> None:
        self.paths = as_list(paths)
        self.columns = None if columns is None else list(each_of("columns", columns, "names", str))
        groups = []
        for number, path in enumerate(self.paths):
            rows = self._rows_of_groups(path, _opened_by_pyarrow(path).metadata)
            groups += [(number, group, count) for group, count in enumerate(rows)]
        self._groups = np.array(groups, np.int64).reshape(-1, 3)
        self._ends = np.cumsum(self._groups[:, 2])

    def __len__(self) -> int:
        return int(self._ends[-1]) if len(self._ends) else 0

    def block_starts(self) -> list[int]:
        """Return the first row of each group."""
        counts = self._groups[:, 2]
        starts: list[int] = (self._ends - counts)[counts > 0].tolist()
        return starts

    def open(self) -> Callable[[int], pyarrow.Table]:
        """Return a function that reads a group in this process, and keeps the last groups.

        Raises:
            DatasetError: A file has other groups of rows than when the source was made.
        """
        files = [_opened_by_pyarrow(path) for path in self.paths]
        groups, columns = self._groups, self.columns
        for number, (path, file) in enumerate(zip(self.paths, files, strict=True)):
            then = groups[groups[:, 0] == number, 2].tolist()
            if self._rows_of_groups(path, file.metadata)[: len(then)] != then:
                raise DatasetError(
                    f"{path} has other groups of rows than when the source was made: it has "
                    "changed since. Make the source anew."
                )

        @lru_cache(_KEPT)
        def read(group: int) -> pyarrow.Table:
            file, number, _ = groups[group].tolist()
            return files[file].read_row_group(number, columns=columns)

        return read

    def _rows_of_groups(self, path: str, about: pyarrow.FileMetaData) -> list[int]:
        _check_columns(path, self.columns or (), about.schema)
        return [about.row_group(group).num_rows for group in range(about.num_row_groups)]

    def get_bytes(self, indices: Sequence[int]) -> list[Raw]:
        """Return rows."""
        group_of = np.searchsorted(self._ends, np.asarray(indices), side="right")
        read, rows = self.opened(), list[Raw]()
        for index, group in zip(indices, group_of.tolist(), strict=True):
            table = read(group)
            at = index - int(self._ends[group] - self._groups[group, 2])
            rows.append({name: table.column(name)[at].as_py() for name in table.schema.names})
        return rows

    def name_of(self, index: int) -> str:
        """Return the file and the number of the row in it."""
        group = int(np.searchsorted(self._ends, index, side="right"))
        file = int(self._groups[group, 0])
        first = int(self._groups[self._groups[:, 0] < file, 2].sum())
        return f"{self.paths[file]}:row {index - first}"


def _check_columns(path: str, columns: Sequence[str], schema: pyarrow.ParquetSchema) -> None:
    """Raise DatasetError if columns are missing or doubled.

    Of one that is missing pyarrow would read nothing; of two of one name a row can hold only one.
    A column may also be a field within one: ``"box.left"``.
    """
    paths = [schema.column(number).path for number in range(len(schema))]
    missing = [
        name for name in columns if not any(f"{each}.".startswith(f"{name}.") for each in paths)
    ]
    names = schema.to_arrow_schema().names
    if missing:
        raise DatasetError(f"{path} has no column {', '.join(map(repr, missing))}. It has {names}.")
    for name in set(names):
        read = not columns or any(f"{each}.".startswith(f"{name}.") for each in columns)
        if read and names.count(name) > 1:
            raise DatasetError(
                f"{path} has {names.count(name)} columns of the name {name!r}, and a row can hold "
                "one. Rename them, or leave the name out of columns."
            )


def _opened_by_pyarrow(path: str) -> Any:
    library = imported("pyarrow.parquet", "ParquetSource")
    try:
        return library.ParquetFile(path)
    except (OSError, ValueError) as error:
        raise DatasetError(f"{path} cannot be read as Parquet: {error}.") from error


class _Rows(OpenedInEachProcess[Handle]):
    """Rows of several arrays of one length, by the names of the arrays."""

    parallel_reads = 1
    path: str
    names: list[str]

    def _measure(self, arrays: Mapping[str, Any], found: Callable[[], Iterable[str]]) -> None:
        """Note the length of the arrays, and how many rows their chunks have.

        ``found`` returns the names of all arrays that there are.
        """
        try:
            lengths = {name: arrays[name].shape[0] for name in self.names}
            chunks = [(arrays[name].chunks or [1])[0] for name in self.names]
        except (KeyError, TypeError, AttributeError, IndexError) as error:  # no array, or no rows
            raise DatasetError(
                f"{self.path} has not all of {self.names} as arrays of rows: {error!r}. It has "
                f"{sorted(found())}."
            ) from error
        if len(set(lengths.values())) > 1:
            raise DatasetError(
                f"The arrays of {self.path} differ in length: {lengths}. Name others."
            )
        self._length: int = lengths[self.names[0]]
        self._rows_together: int = max(chunks)
        """Rows of a chunk, in the array whose chunks have most rows; 1: there are no chunks."""

    def __len__(self) -> int:
        return self._length

    def block_starts(self) -> Sequence[int] | None:
        """Return the first row of each chunk; None: chunks hold one row, or there are no chunks."""
        together = self._rows_together
        return range(0, self._length, together) if together > 1 else None

    def name_of(self, index: int) -> str:
        """Return the file or group, and the number of the row."""
        return f"{self.path}:{','.join(self.names)}[{index}]"


class Hdf5Source(_Rows["h5py.File"]):
    """Rows of datasets in an HDF5 file, by h5py: dicts of arrays by name.

    Args:
        path: Path of the file.
        names: Names of datasets in it, all of one length.

    Raises:
        OptionsError: h5py is not installed, there is no name, or ``names`` is no list of names.
        DatasetError: The file cannot be read, or its datasets differ in length.
    """

    def __init__(self, path: str | os.PathLike[str], names: Sequence[str]) -> None:
        self.path = os.fspath(path)
        self.names = list(each_of("names", names, "names", str))
        if not self.names:
            raise OptionsError("Hdf5Source got no names; give those of datasets in the file.")

        def found() -> list[str]:
            names: list[str] = []
            file.visititems(
                lambda name, item: names.append(name) if hasattr(item, "chunks") else None
            )
            return names

        with self.open() as file:
            self._measure(file, found)

    def open(self) -> h5py.File:
        """Return the file of this process."""
        h5py = imported("h5py", "Hdf5Source")
        try:
            return h5py.File(self.path, "r")
        except OSError as error:
            raise DatasetError(f"{self.path} cannot be read as HDF5: {error}.") from error

    def get_bytes(self, indices: Sequence[int]) -> list[Raw]:
        """Return rows; consecutive rows are read in one call."""
        file = self.opened()
        order = np.unique(np.asarray(indices, np.int64))
        rows: dict[int, dict[str, Any]] = {index: {} for index in order.tolist()}
        for run in np.split(order, np.flatnonzero(np.diff(order) > 1) + 1):
            for name in self.names if len(run) else ():
                block = file[name][run[0] : run[-1] + 1]
                for index, row in zip(run.tolist(), block, strict=True):
                    rows[index][name] = np.array(row)  # a copy, which does not keep the block
        return [rows[index] for index in indices]


class ZarrSource(_Rows["Callable[[str, int], NDArray[Any]]"]):
    """Rows of the arrays in a Zarr group, by zarr 3: dicts of arrays by name.

    Arrays are stored in chunks of rows, and a chunk is read whole. The last eight chunks of each
    array are kept in each process; see :class:`ParquetSource` for the cost of a shuffled order.

    Args:
        path: Path of the group, or an address that zarr opens.
        names: Names of arrays in it, all of one length; None: all arrays.
        **storage_options: Options of ``zarr.open_group``.

    Raises:
        OptionsError: zarr is not installed or older than version 3, or ``names`` is no list of
            names.
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
        names = sorted(dict(group.arrays())) if names is None else names
        self.names = list(each_of("names", names, "names", str))
        if not self.names:
            raise DatasetError(f"{self.path} has no arrays; give a group that has some.")
        self._measure(group, lambda: dict(group.arrays()))

    def open(self) -> Callable[[str, int], NDArray[Any]]:
        """Return a function that reads a row of an array, and keeps the last chunks."""
        group = self._group()
        arrays = {name: group[name] for name in self.names}

        @lru_cache(_KEPT * len(arrays))
        def chunk(name: str, first: int) -> NDArray[Any]:
            return np.asarray(arrays[name][first : first + arrays[name].chunks[0]])

        def row(name: str, index: int) -> NDArray[Any]:
            at = index % arrays[name].chunks[0]
            # A copy, so that one row does not keep the whole chunk.
            return np.array(chunk(name, index - at)[at])

        return row

    def get_bytes(self, indices: Sequence[int]) -> list[Raw]:
        """Return rows."""
        row = self.opened()
        return [{name: row(name, int(index)) for name in self.names} for index in indices]

    def recognised_by(self) -> tuple[object, ...]:
        """Return what identifies these arrays: their names, and size and time of their files."""
        place = Path(self.path)
        found = islice(sorted(place.rglob("*")), _MOST_FILES) if place.is_dir() else [place]
        files = [(str(path), *now) for path in found if (now := size_and_time(path)) is not None]
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


def imported(name: str, asked: str) -> ModuleType:
    """Return a module by its name.

    Raises:
        OptionsError: Its package is not installed.
    """
    try:
        return importlib.import_module(name)
    except ImportError as error:
        top = name.partition(".")[0]
        raise OptionsError(f"{asked} needs {top}: pip install {top}.") from error
