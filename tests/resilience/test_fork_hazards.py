"""What a dataset has open and forked workers would share is told before they are forked."""

from __future__ import annotations

import io
import socket
import sqlite3
import sys
import tarfile
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from resilience.runs import warned
from torch.utils.data import Dataset, Subset

from lightning_fastdata import FastDataLoader

SAMPLES = 40


class Holds(Dataset):
    """Reads nothing of what it holds, so that only what it is can be seen."""

    def __init__(self, handle: Any) -> None:
        self.of_each_kind = {"train": [handle]}

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor(index)


def a_file(folder: Path) -> Path:
    path = folder / "samples"
    path.write_bytes(bytes(range(SAMPLES)))
    return path


def an_archive(folder: Path) -> Any:
    with zipfile.ZipFile(folder / "a.zip", "w") as archive:
        archive.writestr("a", "b")
    return zipfile.ZipFile(folder / "a.zip")


def a_tar(folder: Path) -> Any:
    with tarfile.open(folder / "a.tar", "w") as archive:
        archive.add(a_file(folder), "a")
    return tarfile.open(folder / "a.tar")


def an_hdf5_file(folder: Path) -> Any:
    h5py = pytest.importorskip("h5py")
    file = h5py.File(folder / "a.h5", "w")
    file.create_dataset("x", data=np.arange(3))
    return file


OPEN = {
    "an open connection": lambda _: socket.socketpair(),
    "an open sqlite3.Connection": lambda folder: sqlite3.connect(folder / "a.db"),
    "an open h5py.File": an_hdf5_file,
    "an open h5py.Dataset": lambda folder: an_hdf5_file(folder)["x"],
    "an open lmdb.Environment": lambda folder: pytest.importorskip("lmdb").open(
        str(folder / "lmdb")
    ),
}


def closed(handle: Any) -> Any:
    handle.close()
    return handle


FINE = {
    "a file, which workers open anew": lambda folder: a_file(folder).open("rb"),
    "an archive": an_archive,
    "a tar": a_tar,
    "a closed connection to a program": lambda _: closed(socket.socketpair()[0]),
    "a closed connection": lambda folder: closed(sqlite3.connect(folder / "a.db")),
    "a closed HDF5 file": lambda folder: closed(an_hdf5_file(folder)),
    "a log": lambda folder: (folder / "log").open("w"),
    "memory": lambda _: io.BytesIO(b"x"),
    "the terminal": lambda _: sys.stdout,
    "a memory map": lambda folder: np.memmap(a_file(folder), np.uint8),
    "tensors": lambda _: torch.zeros(3),
    "a path": a_file,
}


def told(dataset: Dataset) -> list[str]:
    """Return what is said of a dataset before its workers have read anything."""
    with warned() as texts:
        loader = FastDataLoader(
            dataset, 8, num_workers=1, executor="workers", multiprocessing_context="fork"
        )
        assert len(list(loader)) == SAMPLES // 8
        loader.close()
    return texts


@pytest.mark.parametrize("what", OPEN)
def test_what_must_not_be_shared_is_named_with_the_remedy(what, tmp_path):
    (text,) = told(Subset(Holds(OPEN[what](tmp_path)), range(SAMPLES)))
    assert what.strip() in text
    assert "on first use in __getitem__" in text
    assert 'multiprocessing_context="forkserver"' in text


@pytest.mark.parametrize("what", FINE)
def test_of_all_else_nothing_is_said(what, tmp_path):
    assert told(Holds(FINE[what](tmp_path))) == []
