"""Trainings that open a file anew, or unpack all of it, for each sample."""

from __future__ import annotations

import io
import sqlite3
import zipfile
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import torch
from torch.utils.data import Dataset

from trainings.parts import Accepted, Load, Made, Model, several


class Sqlite(Dataset[torch.Tensor]):
    """Rows of a database that is opened for each of them."""

    def __init__(self, file: Path, count: int, rows: int = 20_000) -> None:
        self.file, self.count, self.rows = str(file), count, rows
        with sqlite3.connect(self.file) as base:
            base.execute("create table samples (key text, value blob)")
            base.execute("create index by_key on samples (key)")
            values = ((f"sample-{n:06}", bytes(2000)) for n in range(rows))
            base.executemany("insert into samples values (?, ?)", values)

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> torch.Tensor:
        base = sqlite3.connect(self.file)
        key = f"sample-{index % self.rows:06}"
        (value,) = base.execute("select value from samples where key = ?", (key,)).fetchone()
        base.close()
        return torch.frombuffer(bytearray(value), dtype=torch.uint8)


class Zipped(Dataset[torch.Tensor]):
    """Members of an archive that is opened for each of them."""

    def __init__(self, file: Path, count: int, members: int) -> None:
        self.file, self.count, self.members = file, count, members
        with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive:
            for number in range(members):
                archive.writestr(f"{number}.bin", np.arange(500, dtype=np.uint8).tobytes())

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> torch.Tensor:
        with zipfile.ZipFile(self.file) as archive:
            data = archive.read(f"{index % self.members}.bin")
        return torch.frombuffer(bytearray(data), dtype=torch.uint8)


class Hdf5(Dataset[torch.Tensor]):
    """Rows of a compressed HDF5 file, whose chunks hold many rows, opened for each of them."""

    def __init__(self, file: Path, count: int, rows_in_chunk: int) -> None:
        self.file, self.count = file, count
        rows = np.random.default_rng(0).integers(0, 99, (4096, 512), dtype=np.int32)
        with h5py.File(file, "w") as opened:
            opened.create_dataset("x", data=rows, chunks=(rows_in_chunk, 512), compression="gzip")

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> torch.Tensor:
        with h5py.File(self.file) as opened:
            return torch.from_numpy(opened["x"][index * 577 % 4096])


class Npz(Dataset[torch.Tensor]):
    """Rows of a compressed .npz, which is unpacked as a whole for each of them."""

    def __init__(self, file: Path, count: int, rows: int) -> None:
        self.file, self.count, self.rows = file, count, rows
        values = np.random.default_rng(0).integers(0, 99, (rows, 512), dtype=np.int16)
        np.savez_compressed(file, x=values)

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> torch.Tensor:
        data = np.load(io.BytesIO(self.file.read_bytes()))["x"]
        return torch.from_numpy(data[index % self.rows].copy())


def opened_anew(
    folder: Path, kind: str, form: Any, workers: int, batches: int, **size: Any
) -> Made:
    batch = size.pop("batch_size", 16)
    step_s = size.pop("step_s", 0.005)
    count = batch * batches
    dataset: Any = {
        "sqlite": lambda: Sqlite(folder / "samples.db", count),
        "zip": lambda: Zipped(folder / "samples.zip", count, **size),
        "hdf5": lambda: Hdf5(folder / "samples.h5", count, **size),
        "npz": lambda: Npz(folder / "samples.npz", count, **size),
    }[kind]()
    load = Load(dataset=dataset, form=form, batch_size=batch, options={"num_workers": workers})
    return Made(load=load, model=Model(step_s))


READING = Accepted(codes=("FD305",))

OPENED = [
    *several(
        "sqlite opened anew", READING, opened_anew,
        {
            "1 worker": {
                "kind": "sqlite", "form": "fast", "workers": 1, "batches": 150, "batch_size": 128,
            },
            "no step to speak of, 1 worker": {
                "kind": "sqlite", "form": "own", "workers": 1, "batches": 150, "batch_size": 64,
                "step_s": 0.001,
            },
        },
    ),
    *several(
        "zip opened anew", READING, opened_anew,
        {
            "500 members, 1 worker": {
                "kind": "zip", "form": "fast", "workers": 1, "batches": 60, "members": 500,
            },
            "3000 members, FastDataModule": {
                "kind": "zip", "form": "module", "workers": 1, "batches": 40, "members": 3000,
                "batch_size": 4,
            },
        },
    ),
    *several(
        "HDF5 opened anew", READING, opened_anew,
        {
            "256 rows a chunk, 1 worker": {
                "kind": "hdf5", "form": "fast", "workers": 1, "batches": 60, "rows_in_chunk": 256,
            },
            "64 rows a chunk, 1 worker": {
                "kind": "hdf5", "form": "own", "workers": 1, "batches": 100, "rows_in_chunk": 64,
            },
        },
    ),
    *several(
        "npz unpacked for a row", READING, opened_anew,
        {
            "1000 rows, 1 worker": {
                "kind": "npz", "form": "fast", "workers": 1, "batches": 50, "rows": 1000,
            },
            "300 rows, FastDataModule": {
                "kind": "npz", "form": "module", "workers": 1, "batches": 80, "rows": 300,
            },
        },
    ),
]  # fmt: skip
