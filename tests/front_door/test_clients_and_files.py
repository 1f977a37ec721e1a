"""Libraries that hold files, databases and threads, opened on first use or at once."""

from __future__ import annotations

import os
import sqlite3
import struct
import tempfile
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from front_door.clients import SAMPLES, Opening, WithRuntime, value_of
from trainers import Learner, quiet_trainer

from lightning_fastdata import FastDataModule
from lightning_fastdata.errors import DatasetError, FastDataWarning
from lightning_fastdata.loading.facts import try_apart


def fit(dataset, epochs: int = 2, **options) -> FastDataModule:
    got: dict[int, float] = {}
    module = Learner(
        lambda batch: got.update(zip(batch[1].tolist(), batch[0][:, 0].tolist(), strict=True))
    )
    data = FastDataModule.from_datasets(dataset, batch_size=8, **options)
    quiet_trainer(tempfile.gettempdir(), max_epochs=epochs).fit(module, datamodule=data)
    assert got == {index: value_of(index) for index in range(SAMPLES)}
    return data


class Sqlite(Opening):
    def prepare(self):
        with sqlite3.connect(self.folder / "a.db") as base:
            base.execute("create table numbers (id integer primary key, value real)")
            rows = [(i, value_of(i)) for i in range(SAMPLES)]
            base.executemany("insert into numbers values (?, ?)", rows)
        base.close()

    def open(self):
        return sqlite3.connect(self.folder / "a.db")

    def read(self, index):
        query = "select value from numbers where id = ?"
        return self.opened.execute(query, (index,)).fetchone()[0]


class Hdf5(Opening):
    def prepare(self):
        self.h5py = pytest.importorskip("h5py").__name__
        with self.library().File(self.folder / "a.h5", "w") as file:
            file["x"] = np.array([value_of(i) for i in range(SAMPLES)])

    def library(self):
        return __import__(self.h5py)

    def open(self):
        return self.library().File(self.folder / "a.h5")

    def read(self, index):
        return float(self.opened["x"][index])


class Lmdb(Opening):
    def prepare(self):
        base = pytest.importorskip("lmdb").open(str(self.folder / "a.lmdb"))
        with base.begin(write=True) as writing:
            for i in range(SAMPLES):
                writing.put(str(i).encode(), str(value_of(i)).encode())
        base.close()

    def open(self):
        return __import__("lmdb").open(str(self.folder / "a.lmdb"), readonly=True, lock=False)

    def read(self, index):
        with self.opened.begin() as reading:
            return float(reading.get(str(index).encode()))


class Arrow(Opening):
    def prepare(self):
        parquet = pytest.importorskip("pyarrow.parquet")
        table = __import__("pyarrow").table({"value": [value_of(i) for i in range(SAMPLES)]})
        parquet.write_table(table, self.folder / "a.parquet", row_group_size=8)

    def open(self):
        from pyarrow import parquet

        return parquet.ParquetFile(self.folder / "a.parquet")

    def read(self, index):
        return self.opened.read_row_group(index // 8)["value"][index % 8].as_py()


class Plain(Opening):
    """Seeks in a file, whose position forked workers would share."""

    def prepare(self):
        (self.folder / "a.bin").write_bytes(
            struct.pack(f"{SAMPLES}d", *map(value_of, range(SAMPLES)))
        )

    def open(self):
        return (self.folder / "a.bin").open("rb", buffering=0)

    def read(self, index):
        self.opened.seek(8 * index)
        sum(range(20_000))
        return struct.unpack("d", self.opened.read(8))[0]


class InClass(Plain):
    """Keeps its files with its class, shared by all, as some do."""

    files: dict[Path, Any] = {}  # noqa: RUF012

    def open(self):
        return self.files.setdefault(self.folder, super().open())


@pytest.mark.cases(8)
@pytest.mark.parametrize("workers", ["auto", 2])
@pytest.mark.parametrize("at_once", [False, True], ids=["on first use", "at once"])
@pytest.mark.parametrize("dataset", [Sqlite, Hdf5, Lmdb, Arrow, Plain, InClass])
def test_every_sample_is_the_one_that_was_asked_for(dataset, at_once, workers, tmp_path):
    shared = at_once and dataset in (Sqlite, Hdf5, Lmdb)
    with pytest.warns(FastDataWarning, match="holds an open") if shared else nullcontext():
        fit(dataset(tmp_path, at_once=at_once), num_workers=workers)


def test_threads_that_a_fork_loses_are_got_round(tmp_path, monkeypatch):
    # What hangs after a fork never ends, so that there is no need to wait for half a minute.
    quick = partial(try_apart, deadline_s=1.0)
    monkeypatch.setattr("lightning_fastdata.loading.facts.try_apart", quick)
    with pytest.warns(FastDataWarning, match=r"took more than .*here it is read as by torch"):
        data = fit(WithRuntime(tmp_path, at_once=True), epochs=1)
    assert "here it is read as by torch" in data.explain()


class NotForkSafe:
    """A client that refuses to work in a process forked from the one that made it."""

    def __init__(self) -> None:
        self.process = os.getpid()

    def read(self, index: int) -> float:
        if self.process != os.getpid():
            raise RuntimeError("This class is not fork-safe")
        return value_of(index)


class Refusing(WithRuntime):
    def open(self):
        return NotForkSafe()

    def __getstate__(self):
        raise TypeError("it holds a socket")


def test_a_client_that_reaches_no_other_process_is_used_in_the_training_process(tmp_path):
    assert "not fork-safe" in fit(Refusing(tmp_path, at_once=True)).explain()
    words = r"not fork-safe.*on first use in __getitem__"
    with pytest.raises(DatasetError, match=words):
        fit(Refusing(tmp_path, at_once=True), num_workers=1)
