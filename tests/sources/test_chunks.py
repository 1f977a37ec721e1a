"""Chunks of LitData, arrays of Zarr and rows of Lance are read as their libraries do."""

from __future__ import annotations

import importlib.util
import subprocess
import sys

import numpy as np
import pytest
import torch
from programs import run_program

import lightning_fastdata as ld
from lightning_fastdata import sources
from lightning_fastdata.errors import DatasetError

ORDER = [17, 3, 0, 29, 3]


def numbers_of(source, decode, **options):
    """Read everything in workers, after one record was read here; return the numbers it has."""
    dataset = sources.SourceDataset(source, decode)
    dataset[0]
    loader = ld.FastDataLoader(
        dataset, 7, num_workers=2, executor="workers", shuffle=True, **options
    )
    return sorted(torch.cat(list(loader)).tolist())


def assert_same(ours, theirs):
    assert ours.keys() == theirs.keys()
    for name, value in theirs.items():
        assert type(ours[name]) is type(value), name
        if isinstance(value, np.ndarray):
            assert ours[name].dtype == value.dtype, name
            np.testing.assert_array_equal(ours[name], value)
        else:
            assert ours[name] == value, name


def litdata_sample(index):
    noise = np.random.default_rng(index).integers(0, 256, 300 + index, np.uint8)
    return {"raw": noise.tobytes(), "number": index, "array": np.arange(index + 1)}


def number_of_row(row, _index):
    return row["number"]


@pytest.fixture(scope="module")
def litdata_folder(tmp_path_factory):
    pytest.importorskip("litdata")
    folder = tmp_path_factory.mktemp("litdata") / "optimized"
    # In a process of its own, as litdata leaves threads and settings behind.
    script = (
        "import sys, litdata; from tests.sources.test_chunks import litdata_sample\n"
        "if __name__ == '__main__':\n"
        "    litdata.optimize(litdata_sample, list(range(30)), output_dir=sys.argv[1],\n"
        "                     chunk_bytes=3000, num_workers=1)\n"
    )
    (folder.parent / "write.py").write_text(script)
    done = run_program(folder.parent / "write.py", folder)
    assert done.returncode == 0, done.stderr
    return folder


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
def test_litdata_samples_are_those_that_were_written(litdata_folder):
    source = sources.LitDataSource(litdata_folder)
    assert len(source) == 30
    assert len(list(litdata_folder.glob("*.bin"))) > 1
    for index, row in zip(ORDER, source.get_bytes(ORDER), strict=True):
        assert_same(row, litdata_sample(index))
    assert source.name_of(29).endswith("optimized:sample 29")
    assert numbers_of(source, number_of_row) == list(range(30))
    with pytest.raises(DatasetError, match=r"no index\.json"):
        sources.LitDataSource(litdata_folder.parent)


def number_of_zarr(row, _index):
    return int(row["number"])


def test_zarr_rows_are_those_of_zarr(tmp_path):
    zarr = pytest.importorskip("zarr", minversion="3")
    group = zarr.open_group(tmp_path / "x.zarr", mode="w")
    values = np.random.default_rng(0).random((30, 4, 3), np.float32)
    group.create_array("values", data=values, chunks=(4, 2, 3))
    group.create_array("number", data=np.arange(30), chunks=(2,), shards=(10,))
    group.create_array("short", data=np.arange(3))
    group.create_array("scalar", data=np.array(3))
    source = sources.ZarrSource(tmp_path / "x.zarr", ["number", "values"])
    for index, row in zip(ORDER, source.get_bytes(ORDER), strict=True):
        assert_same(row, {"number": np.array(index), "values": values[index]})
    every = list(range(30))  # more chunks than are kept
    assert [row["number"].item() for row in source.get_bytes(every)] == every
    assert source.name_of(2).endswith("x.zarr:number,values[2]")
    assert numbers_of(source, number_of_zarr) == every
    with pytest.raises(DatasetError, match=r"differ in length: \{'number': 30, 'short': 3\}"):
        sources.ZarrSource(tmp_path / "x.zarr", ["number", "short"])
    for names in (["other"], ["scalar"]):
        with pytest.raises(DatasetError, match=r"has not all of .*'number', 'scalar', 'short'"):
            sources.ZarrSource(tmp_path / "x.zarr", names)
    with pytest.raises(DatasetError, match="as a Zarr group"):
        sources.ZarrSource(tmp_path / "none.zarr")


def test_zarr_that_was_written_again_has_another_cache(tmp_path):
    zarr = pytest.importorskip("zarr", minversion="3")

    def cached(value):
        group = zarr.open_group(tmp_path / "x.zarr", mode="w")
        group.create_array("number", data=np.full(9, value))
        return ld.CachedSource(sources.ZarrSource(tmp_path / "x.zarr"), tmp_path / "cache")

    assert cached(1).get_bytes([4])[0]["number"] == 1
    assert cached(2).get_bytes([4])[0]["number"] == 2


LANCE = """
import sys
import pyarrow as pa
import torch
import lightning_fastdata as ld
from lightning_fastdata import sources
from lightning_fastdata.errors import DatasetError

def number_of_row(row, _index):
    assert row["raw"] == bytes([row["number"]]) * 50
    return row["number"]

def write(folder):
    import lance
    numbers = list(range(30))
    raws = [bytes([number]) * 50 for number in numbers]
    lance.write_dataset(pa.table({"number": numbers, "raw": raws, "unused": raws}), folder,
                        max_rows_per_file=8)

if __name__ == "__main__":
    folder = sys.argv[1]
    if sys.argv[2] == "write":
        write(folder)
        sys.exit()
    source = sources.LanceSource(folder, columns=["number", "raw"])
    print(len(source), source.name_of(3).endswith("row 3"))
    dataset = sources.SourceDataset(source, number_of_row)
    loader = ld.FastDataLoader(dataset, 7, num_workers=2, executor="workers", shuffle=True)
    print(sorted(torch.cat(list(loader)).tolist()) == list(range(30)))
    print([row["number"] for row in source.get_bytes([17, 3, 3])])
    print(len(sources.LanceSource(folder)), sorted(source.get_bytes([1])[0]))
    try:
        sources.LanceSource(folder + "no")
    except DatasetError as error:
        print("cannot be read as Lance" in str(error))
"""


@pytest.mark.slow
def test_lance_rows_are_read_in_forked_workers(tmp_path):
    """In processes of their own, as Lance does not survive the forks of other tests."""
    if importlib.util.find_spec("lance") is None:  # not imported, as it warns of each fork then
        pytest.skip("needs pylance")
    (tmp_path / "lanced.py").write_text(LANCE)

    def run(what):
        command = [sys.executable, tmp_path / "lanced.py", tmp_path / "x.lance", what]
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=280)
        assert done.returncode == 0, done.stderr
        return done

    run("write")
    read = run("read")
    assert read.stdout.split("\n")[:5] == [
        "30 True",
        "True",
        "[17, 3, 3]",
        "30 ['number', 'raw']",
        "True",
    ]
    assert "not fork-safe" not in read.stderr
