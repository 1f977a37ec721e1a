"""Arrays of Zarr are read as its library does."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import lightning_fastdata as ld
from lightning_fastdata import CachedDataset, sources
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


def row(record, _index):
    return record


def test_zarr_that_was_written_again_has_another_cache(tmp_path):
    zarr = pytest.importorskip("zarr", minversion="3")

    def cached(value):
        group = zarr.open_group(tmp_path / "x.zarr", mode="w")
        group.create_array("number", data=np.full(9, value))
        data = sources.SourceDataset(sources.ZarrSource(tmp_path / "x.zarr"), row)
        return CachedDataset(data, tmp_path / "cache")

    assert cached(1)[4]["number"] == 1
    assert cached(2)[4]["number"] == 2
