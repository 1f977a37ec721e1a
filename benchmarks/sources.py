"""What a random read costs through each source, beside the library of its format alone.

    python benchmarks/sources.py [--rounds 5] [--json FILE]

1,000 records of 43 kB in the page cache, read one by one in a random order that is the same for
both: microseconds of CPU time a record in one process, threads of the library included, and their
ratio. Parquet has groups of 10 rows, and is read in blocks of 10 groups, too; Zarr has chunks of
one row. Formats whose library is not installed (zarr) are left out.
"""

from __future__ import annotations

import tarfile
import tempfile
import time
from importlib.util import find_spec
from pathlib import Path

import h5py
import lmdb
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import turns

from lightning_fastdata import sources
from lightning_fastdata.data import BlockShuffleSampler

COUNT, SIZE = 1000, 43_000


def make(folder: Path) -> None:
    """Write the same records in every format."""
    records = [np.random.default_rng(i).bytes(SIZE) for i in range(COUNT)]
    for index, record in enumerate(records):
        (folder / f"{index:04}.bin").write_bytes(record)
    with tarfile.open(folder / "x.tar", "w") as archive:
        for index in range(COUNT):
            archive.add(folder / f"{index:04}.bin", f"{index:04}.bin")
    environment = lmdb.open(str(folder / "lmdb"), map_size=1 << 28)
    with environment.begin(write=True) as transaction:
        for index, record in enumerate(records):
            transaction.put(b"%04d" % index, record)
    environment.close()
    pq.write_table(pa.table({"x": records}), folder / "x.parquet", row_group_size=10)
    with h5py.File(folder / "x.h5", "w") as file:
        file["x"] = np.frombuffer(b"".join(records), np.uint8).reshape(COUNT, SIZE)


def make_others(folder: Path) -> None:
    """Write the records in those formats whose libraries are there."""
    records = [(folder / f"{index:04}.bin").read_bytes() for index in range(COUNT)]
    if find_spec("zarr"):
        import zarr

        rows = np.frombuffer(b"".join(records), np.uint8).reshape(COUNT, SIZE)
        group = zarr.open_group(folder / "x.zarr", mode="w")
        group.create_array("x", data=rows, chunks=(1, SIZE))


def others(folder: Path) -> dict:
    """Ours and the library's way to read record i, of those formats that were written."""
    found = {}
    if (folder / "x.zarr").exists():
        import zarr

        array = zarr.open_group(folder / "x.zarr", mode="r")["x"]
        found["Zarr"] = sources.ZarrSource(folder / "x.zarr"), lambda index: array[index]
    return found


def pairs(folder: Path) -> dict:
    """Ours and the library's way to read record i, by format."""
    paths = [folder / f"{index:04}.bin" for index in range(COUNT)]
    tar = tarfile.open(folder / "x.tar")  # noqa: SIM115 - open until the end
    members = [tar.getmember(path.name) for path in paths]
    ours = {
        "files": sources.FileSource(paths),
        "tar": sources.TarSource(folder / "x.tar"),
        "LMDB": sources.LmdbSource(folder / "lmdb"),
        "Parquet": sources.ParquetSource(folder / "x.parquet"),
        "HDF5": sources.Hdf5Source(folder / "x.h5", ["x"]),
    }
    environment = ours["LMDB"].open()
    table, hdf5 = pq.ParquetFile(folder / "x.parquet"), h5py.File(folder / "x.h5", "r")

    def from_lmdb(index):
        with environment.begin() as transaction:
            return transaction.get(b"%04d" % index)

    theirs = {
        "files": lambda index: paths[index].read_bytes(),
        "tar": lambda index: tar.extractfile(members[index]).read(),
        "LMDB": from_lmdb,
        "Parquet": lambda i: table.read_row_group(i // 10).column("x")[i % 10].as_py(),
        "HDF5": lambda index: hdf5["x"][index],
    }
    for name, (source, read) in others(folder).items():
        ours[name], theirs[name] = source, read
    found = {}
    for name, source in ours.items():
        found[name] = (lambda index, source=source: source.get_bytes([index])[0]), theirs[name]
    return found


def cost_us(read, order) -> float:
    began = time.process_time()
    for index in order:
        read(index)
    return (time.process_time() - began) / len(order) * 1e6


def main() -> None:
    options = turns.arguments(__doc__.partition("\n")[0]).parse_args()
    folder = Path(tempfile.mkdtemp())
    make(folder)
    make_others(folder)
    contenders, orders = {}, {}
    shuffled = np.random.default_rng(0).permutation(COUNT).tolist()
    for name, (ours, theirs) in pairs(folder).items():
        contenders[name, "ours"], contenders[name, "library"] = ours, theirs
        orders[name] = shuffled
    blocks = list(BlockShuffleSampler(range(COUNT), 10, blocks_at_once=8))
    for who in ("ours", "library"):
        contenders["Parquet, in blocks", who] = contenders["Parquet", who]
    orders["Parquet, in blocks"] = blocks
    runs = {
        key: (lambda read=read, order=orders[key[0]]: cost_us(read, order))
        for key, read in contenders.items()
        if read is not None
    }
    found = turns.in_turn(runs, rounds=options.rounds)
    print("| 43 kB a record | ours, us | library, us | ratio |")
    print("| --- | ---: | ---: | ---: |")
    for name in orders:
        mine, others = found[name, "ours"], found.get((name, "library"))
        ours = sorted(mine)[len(mine) // 2]
        if others is None:
            print(f"| {name} | {ours:.0f} | | |")
            continue
        library = sorted(others)[len(others) // 2]
        print(f"| {name} | {ours:.0f} | {library:.0f} | {turns.ratio(mine, others):.2f} |")
    turns.write(options.json, "sources", {" ".join(key): value for key, value in found.items()})


if __name__ == "__main__":
    main()
