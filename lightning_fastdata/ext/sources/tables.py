"""Records in databases and tables: LMDB and Parquet."""

from __future__ import annotations

import os
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from lightning_fastdata.errors import DatasetError
from lightning_fastdata.ext.sources.opened import (
    OpenedInEachProcess,
    Paths,
    as_list,
    imported,
    named_status,
)
from lightning_fastdata.sources.source import Raw

if TYPE_CHECKING:
    import lmdb
    import pyarrow

_GROUPS_KEPT: Final = 8
_environments: dict[str, tuple[int, lmdb.Environment | None]] = {}
"""Of LMDB, by path, with the process that opened it."""


class LmdbSource(OpenedInEachProcess["lmdb.Environment"]):
    """The values of an LMDB database, by lmdb.

    Args:
        path: Of the database.
        keys: Of the values; None: all, in the order of the database.

    Raises:
        OptionsError: lmdb is not installed.
        DatasetError: The database cannot be read.
    """

    parallel_reads = 1

    def __init__(self, path: str | os.PathLike[str], keys: Iterable[bytes] | None = None) -> None:
        self.path = os.fspath(path)
        if keys is None:
            with self.open().begin() as transaction:
                keys = list(transaction.cursor().iternext(values=False))
        self.keys = list(keys)

    def __len__(self) -> int:
        return len(self.keys)

    def open(self) -> lmdb.Environment:
        """Return the environment of this process, read-only and without locks.

        lmdb opens a database once in a process, so sources of one path share it.
        """
        library = imported("lmdb", "LmdbSource")
        process, environment = _environments.get(self.path, (0, None))
        if process == os.getpid() and environment is not None:
            return environment
        if environment is not None:
            environment.close()  # of the process that this one was forked from
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
        _environments[self.path] = os.getpid(), opened
        return opened

    def get_bytes(self, indices: Sequence[int]) -> list[Raw]:
        """Return values.

        Raises:
            DatasetError: A key is not there.
        """
        with self.opened().begin() as transaction:
            found = [transaction.get(self.keys[index]) for index in indices]
        return [self._there(index, value) for index, value in zip(indices, found, strict=True)]

    def _there(self, index: int, value: bytes | None) -> Raw:
        if value is None:
            raise DatasetError(f"{self.name_of(index)} is not there.")
        return value

    def name_of(self, index: int) -> str:
        """Return the database and the key."""
        return f"{self.path}:{self.keys[index]!r}"

    def recognised_by(self) -> tuple[object, ...]:
        """Return what tells these values from others: of the database's file, size and time."""
        place = Path(self.path)
        return named_status(place / "data.mdb" if place.is_dir() else place), self.keys


class ParquetSource(
    OpenedInEachProcess["tuple[list[pyarrow.parquet.ParquetFile], OrderedDict[int, pyarrow.Table]]"]
):
    """The rows of Parquet files, by pyarrow: dicts of values by column.

    Rows are stored in groups, each of which is read whole, so a shuffled order reads a group for
    nearly every row. The last eight groups are kept in each process. Use ``shuffle="blocks"``, or
    write files with small groups (``row_group_size``), or cache the samples.

    Args:
        paths: Of the files.
        columns: To read; None: all.

    Raises:
        OptionsError: pyarrow is not installed.
        DatasetError: A file cannot be read.
    """

    parallel_reads = 1

    def __init__(self, paths: Paths, columns: Sequence[str] | None = None) -> None:
        self.paths = as_list(paths)
        self.columns = None if columns is None else list(columns)
        groups = []
        for number, path in enumerate(self.paths):
            try:
                about = _parquet().read_metadata(path)
            except (OSError, ValueError) as error:
                raise DatasetError(f"{path} cannot be read as Parquet: {error}.") from error
            rows = (about.row_group(group).num_rows for group in range(about.num_row_groups))
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

    def open(self) -> tuple[list[pyarrow.parquet.ParquetFile], OrderedDict[int, pyarrow.Table]]:
        """Return the files of this process, and the groups that were read last."""
        return [_parquet().ParquetFile(path) for path in self.paths], OrderedDict()

    def get_bytes(self, indices: Sequence[int]) -> list[Raw]:
        """Return rows."""
        group_of = np.searchsorted(self._ends, np.asarray(indices), side="right")
        rows: list[Raw] = []
        for index, group in zip(indices, group_of.tolist(), strict=True):
            table = self._group(group)
            at = index - int(self._ends[group] - self._groups[group, 2])
            rows.append({name: table.column(name)[at].as_py() for name in table.schema.names})
        return rows

    def name_of(self, index: int) -> str:
        """Return the file and the number of the row in it."""
        group = int(np.searchsorted(self._ends, index, side="right"))
        file = int(self._groups[group, 0])
        first = int(self._groups[self._groups[:, 0] < file, 2].sum())
        return f"{self.paths[file]}:row {index - first}"

    def _group(self, group: int) -> pyarrow.Table:
        files, kept = self.opened()
        if group in kept:
            kept.move_to_end(group)
        else:
            file, number, _ = self._groups[group].tolist()
            kept[group] = files[file].read_row_group(number, columns=self.columns)
            while len(kept) > _GROUPS_KEPT:
                kept.popitem(last=False)
        return kept[group]


def _parquet() -> Any:
    return imported("pyarrow.parquet", "ParquetSource")
