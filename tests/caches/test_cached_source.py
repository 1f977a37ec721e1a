"""Records of a source that are kept, and decoded each time, are asked for once."""

from __future__ import annotations

import os
import tarfile
from datetime import timedelta

import numpy as np
import pytest
import torch
from misses import each

import lightning_fastdata as ld
from lightning_fastdata import sources
from lightning_fastdata.errors import DatasetError, FastDataWarning
from tests.ext.sources.object_server import ObjectServer

COUNT = 40


def record(index):
    return np.random.default_rng(index).integers(0, 256, 500 + 37 * index, np.uint8).tobytes()


class Records:
    """A source that writes down what it is asked for."""

    def __init__(self, log, salt=b"", parallel_reads=1):
        self.log, self.salt, self.parallel_reads = os.fspath(log), salt, parallel_reads

    def __len__(self):
        return COUNT

    def get_bytes(self, indices):
        with open(self.log, "a") as log:
            log.writelines(f"{index}\n" for index in indices)
        return [self.salt + record(index) for index in indices]

    def name_of(self, index):
        return f"record {index}"

    def recognised_by(self):
        return self.log


def asked(log):
    return [int(line) for line in log.read_text().split()] if log.exists() else []


def as_it_is(raw, index):
    return (raw if isinstance(raw, dict) else bytes(raw)), index


def kept(source, folder, **options):
    return ld.CachedDataset(sources.SourceDataset(source, as_it_is), folder, **options)


def length_of(sample):
    return torch.tensor([sample[1], len(sample[0])])


@pytest.fixture
def log(tmp_path):
    return tmp_path / "log"


@pytest.mark.parametrize("parallel_reads", [1, 4])
def test_workers_and_later_runs_share_what_is_kept(log, tmp_path, parallel_reads):
    def epochs():
        source = Records(log, parallel_reads=parallel_reads)
        data = kept(source, tmp_path / "cache", transform=length_of)
        loader = ld.FastDataLoader(data, 8, num_workers=2, executor="workers")
        for _ in range(2):
            rows = torch.cat(list(loader)).tolist()
            assert rows == [[index, len(record(index))] for index in range(COUNT)]

    epochs()
    # To see that they are always the same, and of which form, some are read up to three times.
    assert len(asked(log)) <= COUNT + 2 * 8 + 16 + 8
    log.unlink()
    epochs()
    # Eight are compared with the source by each process that opens the cache before another has.
    assert len(asked(log)) <= 2 * 8


def test_records_of_several_parts(tmp_path):
    with tarfile.open(tmp_path / "x.tar", "w") as archive:
        for index in range(12):
            for part in ("jpg", "cls"):
                (tmp_path / "one").write_bytes(record(index) + part.encode())
                archive.add(tmp_path / "one", f"{index:03}.{part}")
    source = sources.TarSource(tmp_path / "x.tar", parts=("jpg", "cls"))
    cached = kept(source, tmp_path / "cache")
    for _ in range(2):
        assert [cached[index][0] for index in (4, 2)] == source.get_bytes([4, 2])


def archive(folder, value):
    (folder / "one").write_bytes(bytes([value]))
    with tarfile.open(folder / "x.tar", "w") as file:
        file.add(folder / "one", "one")
    os.utime(folder / "x.tar", (1, value))
    return sources.TarSource(folder / "x.tar")


def database(folder, value):
    lmdb = pytest.importorskip("lmdb")
    with (
        lmdb.open(str(folder / "db"), map_size=1 << 20) as opened,
        opened.begin(write=True) as transaction,
    ):
        transaction.put(b"one", bytes([value]))
    return sources.LmdbSource(folder / "db", [b"one"])


def arrays(folder, value):
    zarr = pytest.importorskip("zarr", minversion="3")
    group = zarr.open_group(folder / "x.zarr", mode="w")
    group.create_array("number", data=np.full(9, value))
    return sources.ZarrSource(folder / "x.zarr")


@each("write", [archive, database, arrays])
def test_what_was_written_again_has_another_cache(tmp_path, write):
    one, two = (kept(write(tmp_path, value), tmp_path / "cache") for value in (1, 2))
    assert one.folder != two.folder


def test_records_that_changed_under_one_name_are_told(log, tmp_path):
    kept(Records(log), tmp_path / "cache").fill()
    changed = kept(Records(log, salt=b"new"), tmp_path / "cache")
    with pytest.raises(DatasetError, match=r"does not hold what sample 0 of .*Delete"):
        changed[1]


def test_an_object_that_is_given_credentials_is_the_same_object(tmp_path):
    pytest.importorskip("obstore")

    def folder(**config):
        config = {"endpoint": "http://127.0.0.1:9", "aws_secret_access_key": "S", **config}
        never = {"max_retries": 0, "retry_timeout": timedelta(0)}
        source = sources.ObjectSource("s3://b/x", ["a"], config=config, retry_config=never)
        with pytest.warns(FastDataWarning, match=r"by their names alone.*key="):
            return kept(source, tmp_path).folder

    one, two = folder(aws_access_key_id="A"), folder(aws_access_key_id="B")
    other = folder(aws_access_key_id="A", endpoint="http://127.0.0.1:10")
    assert one == two != other


@pytest.fixture
def server():
    running = ObjectServer({f"{index:03}": record(index) for index in range(COUNT)})
    yield running
    running.close()


def test_that_given_objects_are_known_by_their_names_is_said(server, tmp_path):
    pytest.importorskip("obstore")
    keys = [f"{index:03}" for index in range(COUNT)]
    objects = sources.ObjectSource(server.url, keys, client_options={"allow_http": True})
    with pytest.warns(FastDataWarning, match=r"40 files by their names alone.*key="):
        kept(objects, tmp_path)
    kept(objects, tmp_path, key="photos-1")  # whose user tells of changes
