"""Records of each format are those of the library that wrote them."""

from __future__ import annotations

import io
import itertools
import os
import pickle
import shutil
import tarfile
from pathlib import Path

import numpy as np
import pytest
import torch
from alike import alike

import lightning_fastdata as ld
from lightning_fastdata import sources
from lightning_fastdata.errors import DatasetError, FastDataWarning, OptionsError
from tests.sources.test_source_dataset import COUNT, decode, in_archives, in_database, record


def test_shards_of_webdataset_are_grouped_by_name(tmp_path):
    with tarfile.open(tmp_path / "s.tar", "w") as archive:
        for index in range(6):
            for extension, text in (("cls", str(index)), ("seg.png", "m"), ("jpg", f"i{index}")):
                (tmp_path / "one").write_text(text)
                archive.add(tmp_path / "one", f"./{index:03}.{extension}")
    source = sources.TarSource(tmp_path / "s.tar", parts=("jpg", "cls"))
    assert len(source) == 6
    assert source.get_bytes([4, 0]) == [{"jpg": b"i4", "cls": b"4"}, {"jpg": b"i0", "cls": b"0"}]
    assert source.name_of(4).endswith("s.tar:./004.jpg")
    with pytest.raises(DatasetError, match=r"s\.tar:\./000 has cls, jpg, seg\.png, and no 'txt'"):
        sources.TarSource(tmp_path / "s.tar", parts=("jpg", "txt"))
    in_archive(tmp_path / "s.tar", [("README", b""), ("x/._1.jpg", b""), ("x/1.jpg", b"one")])
    source = sources.TarSource(tmp_path / "s.tar", parts=["jpg"])
    assert source.get_bytes(range(len(source))) == [{"jpg": b"one"}]
    in_archive(tmp_path / "s.tar", [("README", b"")])
    with pytest.raises(DatasetError, match=r"no file with an extension: 'README'"):
        sources.TarSource(tmp_path / "s.tar", parts=["jpg"])


def in_archive(path, members):
    """Write an archive; of a link, its type and target stand in the place of its bytes."""
    with tarfile.open(path, "w") as archive:
        for name, data, *link in members:
            member = tarfile.TarInfo(name)
            if link:
                member.type, member.linkname = data, link[0]
                archive.addfile(member)
            else:
                member.size = len(data)
                archive.addfile(member, io.BytesIO(data))
    return path


def test_links_in_an_archive_are_the_files_that_they_lead_to(tmp_path):
    hard, symbolic, folder = tarfile.LNKTYPE, tarfile.SYMTYPE, tarfile.DIRTYPE
    members = [
        ("a", folder, ""),
        ("./a/1.jpg", b"one"),
        ("a/hard.jpg", hard, "a/1.jpg"),
        ("b/to a later one.jpg", symbolic, "../c/2.jpg"),
        ("b/to a link.jpg", symbolic, "to a later one.jpg"),
        ("b/to a hard one.jpg", symbolic, "../a/hard.jpg"),
        ("c/2.jpg", b"two"),
        ("a/1.jpg", b"new"),
        ("a/hard again.jpg", hard, "a/1.jpg"),
        ("empty", folder, ""),
        ("a folder", symbolic, "a"),
        ("an empty folder", symbolic, "empty"),
    ]
    with tarfile.open(in_archive(tmp_path / "s.tar", members)) as archive:
        opened = [(each.name, archive.extractfile(each)) for each in archive]
        wanted = [(name, file.read()) for name, file in opened if file is not None]
    source = sources.TarSource(tmp_path / "s.tar")
    found = [source.name_of(index).partition(".tar:")[2] for index in range(len(source))]
    assert list(zip(found, source.get_bytes(range(len(found))), strict=True)) == wanted
    # A folder that is only known by what is in it.
    in_archive(tmp_path / "s.tar", [("a/1.jpg", b"one"), ("a folder", symbolic, "a")])
    assert len(sources.TarSource(tmp_path / "s.tar")) == 1
    for target in ("nothing.jpg", "itself.jpg"):
        in_archive(tmp_path / "s.tar", [("itself.jpg", symbolic, target)])
        with pytest.raises(DatasetError, match=rf"s\.tar:itself\.jpg is a link to {target}.*deref"):
            sources.TarSource(tmp_path / "s.tar")


def test_a_compressed_archive_says_what_to_do(tmp_path):
    (tmp_path / "one").write_text("x" * 1000)
    with tarfile.open(tmp_path / "s.tar.gz", "w:gz") as archive:
        archive.add(tmp_path / "one", "one")
    with pytest.raises(DatasetError, match=r"Unpack a compressed one"):
        sources.TarSource(tmp_path / "s.tar.gz")


def test_columns_of_one_name_are_refused_unless_they_are_left_out(tmp_path):
    import pyarrow
    import pyarrow.parquet

    table = pyarrow.Table.from_arrays([pyarrow.array([number]) for number in range(3)], [*"aba"])
    pyarrow.parquet.write_table(table, tmp_path / "x.parquet")
    for columns in (None, ["b", "a"]):
        with pytest.raises(DatasetError, match="has 2 columns of the name 'a'"):
            sources.ParquetSource(tmp_path / "x.parquet", columns)
    assert sources.ParquetSource(tmp_path / "x.parquet", ["b"]).get_bytes([0]) == [{"b": 1}]


def test_what_is_no_archive_says_what_to_give(tmp_path):
    (tmp_path / "empty.tar").touch()
    for name in ("nope.tar", "*.tar", "empty.tar", ""):
        with pytest.raises(DatasetError, match=r"Give the paths of archives; patterns") as told:
            sources.TarSource(tmp_path / name)
        assert "compressed one" not in str(told.value)


def test_a_file_that_is_not_stored_in_one_piece_is_refused(tmp_path):
    data = b"1\n0\n512\n".ljust(512, b"\0") + 512 * b"x"  # one part, and a hole behind it
    headers = {"major": "1", "minor": "0", "name": "a.bin", "realsize": "4096"}
    with tarfile.open(tmp_path / "s.tar", "w", format=tarfile.PAX_FORMAT) as archive:
        member = tarfile.TarInfo("a.bin")
        member.pax_headers = {f"GNU.sparse.{name}": text for name, text in headers.items()}
        member.size = len(data)
        archive.addfile(member, io.BytesIO(data))
    with pytest.raises(DatasetError, match=r"s\.tar:a\.bin is stored without.*--sparse"):
        sources.TarSource(tmp_path / "s.tar")


def test_an_archive_that_has_become_shorter_is_named(tmp_path):
    source = in_archives(tmp_path)
    os.truncate(tmp_path / "1.tar", 2000)
    with pytest.raises(DatasetError, match=r"1\.tar:deep/047\.bin ends early"):
        pickle.loads(pickle.dumps(source)).get_bytes([47])


@pytest.mark.parametrize("in_place", [False, True])
def test_of_an_archive_that_was_written_anew_each_file_is_read_or_named(tmp_path, in_place):
    path, other = tmp_path / "s.tar", tmp_path / "other.tar"

    def write(members):
        if in_place:
            in_archive(path, members)
        else:
            os.replace(in_archive(other, members), path)
        os.utime(path, ns=(next(times), next(times)))  # a clock may not have moved on

    members, times = [(name, name.encode()) for name in "abcd"], itertools.count(1)
    source = sources.TarSource(in_archive(path, members))
    if in_place:
        assert source.get_bytes([0]) == [b"a"]  # it is open from here on
    write([("a", b"A"), ("b", b"B"), ("c", b"cc"), ("0", 600 * b"-"), ("d", b"d"), ("e", b"e")])
    assert source.get_bytes([1, 0]) == [b"B", b"A"]
    for index, name in ((2, "c"), (3, "d")):
        with pytest.raises(DatasetError, match=rf"s\.tar:{name} is no longer where it was"):
            source.get_bytes([index])
    write(members)
    anew = source if in_place else pickle.loads(pickle.dumps(source))
    assert anew.get_bytes(range(4)) == [b"a", b"b", b"c", b"d"]


def test_a_table_that_was_written_anew_in_other_groups_is_named(tmp_path):
    import pyarrow as pa
    import pyarrow.parquet

    def write(rows, group):
        pa.parquet.write_table(pa.table({"x": rows}), tmp_path / "t.parquet", row_group_size=group)

    def read():
        return pickle.loads(pickle.dumps(source)).get_bytes(range(10))

    write(range(10), 5)
    source = sources.ParquetSource(tmp_path / "t.parquet")
    write(range(100, 115), 5)
    assert read() == [{"x": value} for value in range(100, 110)]
    write(range(100, 120), 10)
    with pytest.raises(DatasetError, match=r"t\.parquet has other groups of rows"):
        read()


@pytest.mark.parametrize(("cut_at", "left"), [(3072, 2), (3100, 2), (4608, 3)])
def test_an_archive_that_was_cut_off_behind_a_file_is_told(tmp_path, cut_at, left):
    members = [(name, 700 * b"x") for name in "abc"]  # each takes 1,536 bytes
    whole = in_archive(tmp_path / "s.tar", members).read_bytes()
    (tmp_path / "s.tar").write_bytes(whole[:cut_at])
    with pytest.warns(FastDataWarning, match=rf"s\.tar has no end behind its {left} members"):
        assert len(sources.TarSource(tmp_path / "s.tar")) == left
    (tmp_path / "s.tar").write_bytes(whole[:5120])  # the first of the zero blocks is enough
    assert len(sources.TarSource(tmp_path / "s.tar")) == 3


def test_parquet_rows_are_those_of_pyarrow(tmp_path):
    import pyarrow as pa
    import pyarrow.parquet

    for number in range(2):
        table = pa.table(
            {
                "image": [record(index) for index in range(number * 24, number * 24 + 24)],
                "label": list(range(number * 24, number * 24 + 24)),
                "box": [{"left": index, "right": [1]} for index in range(24)],
                "unused": [0.5] * 24,
            }
        )
        pyarrow.parquet.write_table(table, tmp_path / f"{number}.parquet", row_group_size=5)
    paths = [tmp_path / "0.parquet", tmp_path / "1.parquet"]
    source = sources.ParquetSource(paths, columns=["image", "label"])
    order = [47, 0, 23, 24, 4, 5, 31, 0]
    rows = source.get_bytes(order)
    assert rows == [{"image": record(index), "label": index} for index in order]
    assert source.name_of(25).endswith("1.parquet:row 1")
    assert source.block_starts() == [0, 5, 10, 15, 20, 24, 29, 34, 39, 44]
    dataset = sources.SourceDataset(source, lambda row, index: decode(row["image"], index))
    loader = ld.FastDataLoader(dataset, 7, num_workers=2, shuffle=True)
    assert sorted(torch.cat(list(loader))[:, 2].tolist()) == list(range(COUNT))
    within = sources.ParquetSource(paths, columns=["box.left", "label"])
    assert within.get_bytes([25]) == [{"box": {"left": 1}, "label": 25}]
    for wrong in ("imgae", "box.lef", "box.left.x", "lab"):
        with pytest.raises(DatasetError, match=rf"no column '{wrong}'. It has \['image', 'label'"):
            sources.ParquetSource(paths, columns=["image", wrong])
    (tmp_path / "no").write_bytes(b"PAR1 no")
    with pytest.raises(DatasetError, match="as Parquet"):
        sources.ParquetSource(tmp_path / "no")


def test_hdf5_rows_are_those_of_h5py(tmp_path):
    import h5py

    with h5py.File(tmp_path / "x.h5", "w") as file:
        file["x"] = np.arange(COUNT * 6).reshape(COUNT, 2, 3)
        file["y"] = np.arange(COUNT)
        file["short"] = np.arange(3)
        file["scalar"] = 3
        file["scans/1"] = np.arange(COUNT)
    source = sources.Hdf5Source(tmp_path / "x.h5", ["x", "y"])
    order = [40, 3, 4, 5, 3]
    for index, row in zip(order, source.get_bytes(order), strict=True):
        assert row["y"] == index
        assert (row["x"] == np.arange(COUNT * 6).reshape(COUNT, 2, 3)[index]).all()
    dataset = sources.SourceDataset(source, lambda row, _: (row["x"], int(row["y"])))
    dataset[0]  # opened here first
    loader = ld.FastDataLoader(dataset, 7, num_workers=2, executor="workers")
    assert torch.cat([y for _, y in loader]).tolist() == list(range(COUNT))
    with pytest.raises(DatasetError, match=r"differ in length: \{'x': 48, 'short': 3\}"):
        sources.Hdf5Source(tmp_path / "x.h5", ["x", "short"])
    assert sources.Hdf5Source(tmp_path / "x.h5", ["scans/1"]).get_bytes([4]) == [{"scans/1": 4}]
    with pytest.raises(OptionsError, match="got no names"):
        sources.Hdf5Source(tmp_path / "x.h5", [])
    for name in ("z", "scans", "scalar"):
        named = rf"has not all of \['{name}'\].*\['scalar', 'scans/1', 'short', 'x', 'y'\]"
        with pytest.raises(DatasetError, match=named):
            sources.Hdf5Source(tmp_path / "x.h5", [name])


def test_zarr_rows_are_those_of_zarr(tmp_path):
    zarr = pytest.importorskip("zarr", minversion="3")
    group = zarr.open_group(tmp_path / "x.zarr", mode="w")
    values = np.random.default_rng(0).random((30, 4, 3), np.float32)
    group.create_array("values", data=values, chunks=(4, 2, 3))
    group.create_array("number", data=np.arange(30), chunks=(2,), shards=(10,))
    group.create_array("short", data=np.arange(3))
    group.create_array("scalar", data=np.array(3))
    source = sources.ZarrSource(tmp_path / "x.zarr", ["number", "values"])
    order = [17, 3, 0, 29, 3]
    for index, row in zip(order, source.get_bytes(order), strict=True):
        assert alike(row, {"number": np.array(index), "values": values[index]})
    every = list(range(30))  # more chunks than are kept
    assert [row["number"].item() for row in source.get_bytes(every)] == every
    assert source.name_of(2).endswith("x.zarr:number,values[2]")
    dataset = sources.SourceDataset(source, lambda row, _: int(row["number"]))
    dataset[0]  # opened here first
    loader = ld.FastDataLoader(dataset, 7, num_workers=2, executor="workers")
    assert torch.cat(list(loader)).tolist() == every
    with pytest.raises(DatasetError, match=r"differ in length: \{'number': 30, 'short': 3\}"):
        sources.ZarrSource(tmp_path / "x.zarr", ["number", "short"])
    with pytest.raises(OptionsError, match="names is 'values'; give a list of names"):
        sources.ZarrSource(tmp_path / "x.zarr", "values")
    for names in (["other"], ["scalar"]):
        with pytest.raises(DatasetError, match=r"has not all of .*'number', 'scalar', 'short'"):
            sources.ZarrSource(tmp_path / "x.zarr", names)
    with pytest.raises(DatasetError, match="as a Zarr group"):
        sources.ZarrSource(tmp_path / "none.zarr")


@pytest.mark.parametrize(
    ("kind", "argument"), [("ParquetSource", "columns"), ("Hdf5Source", "names")]
)
def test_a_text_in_the_place_of_names_is_refused(tmp_path, kind, argument):
    with pytest.raises(OptionsError, match=f"{argument} is 'x'; give a list of names"):
        getattr(sources, kind)(tmp_path / "none", **{argument: "x"})


@pytest.mark.parametrize(
    ("kind", "arguments", "named"),
    [
        ("TarSource", {"paths": None}, "paths is None; give a list of paths"),
        ("FileSource", {"paths": None}, "paths is None; give a list of paths"),
        ("FileSource", {"paths": "a.jpg"}, r"paths is 'a.jpg'; .* such as \['a.jpg'\]"),
        ("FileSource", {"paths": ["a.jpg", 3]}, "give a list of paths"),
        ("ParquetSource", {"paths": 3}, "paths is 3; give a list of paths"),
        ("ParquetSource", {"paths": "x", "columns": [3]}, "columns is .3.; give a list of names"),
        ("TarSource", {"paths": "x", "parts": "jpg"}, r"list of extensions, such as \['jpg'\]"),
        ("TarSource", {"paths": "x", "parts": ()}, "parts is empty"),
        ("LmdbSource", {"path": "x", "keys": b"ab"}, "keys is b'ab'; give a list of bytes"),
        ("LmdbSource", {"path": "x", "keys": ["b"]}, "give a list of bytes"),
        ("Hdf5Source", {"path": "x", "names": None}, "names is None; give a list of names"),
        ("ObjectSource", {"url": "file:///x", "keys": "a"}, "keys is 'a'; give a list of keys"),
        ("ObjectSource", {"url": Path("x")}, r"url is .*; allowed are addresses"),
        ("ObjectSource", {"url": "file:///x", "suffix": None}, "suffix is None"),
        ("ObjectSource", {"url": "file:///x", "parallel_reads": 0}, "parallel_reads is 0"),
        ("TarSource", {"paths": ""}, "There is no path, or an empty one"),
    ],
)
def test_what_is_no_list_is_refused_before_anything_is_read(kind, arguments, named):
    with pytest.raises(OptionsError, match=named):
        getattr(sources, kind)(**arguments)


def test_lists_may_be_iterators_arrays_and_paths(tmp_path):
    in_archives(tmp_path)
    for paths in (
        tmp_path.glob("*.tar"),
        np.array([str(tmp_path / "0.tar"), str(tmp_path / "1.tar")]),
        [os.fsencode(tmp_path / "0.tar"), tmp_path / "1.tar"],
    ):
        assert len(sources.TarSource(paths, np.array(["bin"]))) == COUNT
    assert sources.FileSource(path for path in [tmp_path / "0.tar"]).name_of(0).endswith("0.tar")
    assert len(sources.FileSource([])) == 0


def test_a_database_that_was_written_anew_is_read_by_a_source_made_anew(tmp_path):
    lmdb = pytest.importorskip("lmdb")

    def made_of(value):
        shutil.rmtree(tmp_path / "db", ignore_errors=True)
        written = lmdb.open(str(tmp_path / "db"), map_size=1 << 20)
        with written, written.begin(write=True) as transaction:
            transaction.put(b"key", value)
        return sources.LmdbSource(tmp_path / "db")

    old = made_of(b"old")
    assert old.get_bytes([0]) == [b"old"]
    assert made_of(b"new").get_bytes([0]) == [b"new"]
    assert old.get_bytes([0]) == [b"old"]  # as of any file that is open


def test_a_database_has_one_environment_by_whichever_path(tmp_path):
    source = in_database(tmp_path)
    (tmp_path / "link").symlink_to(source.path)
    assert sources.LmdbSource(tmp_path / "link").get_bytes([3]) == source.get_bytes([3])


def test_lmdb_keys_that_are_missing_are_named(tmp_path):
    in_database(tmp_path)
    source = sources.LmdbSource(tmp_path / "db", [b"003", b"nothing"])
    assert bytes(source.get_bytes([0])[0]) == record(3)
    with pytest.raises(DatasetError, match=r"b'nothing' is not there"):
        source.get_bytes([1])
