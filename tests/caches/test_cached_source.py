"""A source whose records are kept returns the same records, and is asked for each once."""

from __future__ import annotations

import os
import pickle
import tarfile
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import numpy as np
import pytest
import torch

import lightning_fastdata as ld
from lightning_fastdata import sources
from lightning_fastdata.data import CachedSource
from lightning_fastdata.errors import DatasetError, FastDataWarning, OptionsError
from tests.sources.object_server import ObjectServer

COUNT = 40


def record(index):
    return np.random.default_rng(index).integers(0, 256, 500 + 37 * index, np.uint8).tobytes()


class Records:
    """A source that writes down what it is asked for."""

    parallel_reads = 1

    def __init__(self, log, count=COUNT, salt=b""):
        self.log, self.count, self.salt = os.fspath(log), count, salt

    def __len__(self):
        return self.count

    def get_bytes(self, indices):
        with open(self.log, "a") as log:
            log.writelines(f"{index}\n" for index in indices)
        return [self.salt + record(index) for index in indices]

    def name_of(self, index):
        return f"record {index}"

    def recognised_by(self):
        return self.log, self.count


def asked(log):
    return [int(line) for line in log.read_text().split()] if log.exists() else []


@pytest.fixture
def log(tmp_path):
    return tmp_path / "log"


def test_each_record_is_asked_for_once(log, tmp_path):
    cached = CachedSource(Records(log), tmp_path / "cache")
    order = [3, 3, 0, 39, 7, 3]
    for _ in range(2):
        assert cached.get_bytes(order) == [record(index) for index in order]
    assert sorted(asked(log)) == [0, 3, 7, 39]
    again = CachedSource(Records(log), tmp_path / "cache")  # another run
    assert again.get_bytes([7, 8]) == [record(7), record(8)]
    assert again.stored == 5
    assert again.stored_bytes > 5 * 500
    assert "5 of 40" in again.explain()
    assert len(again) == 40
    assert again.name_of(3) == "record 3"


def test_workers_and_later_runs_share_what_is_kept(log, tmp_path):
    def epoch(executor="workers"):
        cached = CachedSource(Records(log), tmp_path / "cache")
        data = sources.SourceDataset(cached, lambda raw, index: torch.tensor([index, len(raw)]))
        loader = ld.FastDataLoader(data, 8, num_workers=2, executor=executor)
        rows = torch.cat(list(loader))
        assert rows.tolist() == [[index, len(record(index))] for index in range(COUNT)]

    epoch()
    assert sorted(asked(log)) == list(range(COUNT))
    log.unlink()
    epoch()
    # Eight are compared with the source by each process that opens the cache before another has.
    assert len(asked(log)) <= 2 * 8


def test_many_threads_open_one_cache(log, tmp_path):
    cached = CachedSource(Records(log), tmp_path / "cache")
    with ThreadPoolExecutor(16) as threads:
        found = list(threads.map(lambda index: cached.get_bytes([index])[0], range(COUNT)))
    assert found == [record(index) for index in range(COUNT)]


def test_a_copy_in_another_process_reads_the_same(log, tmp_path):
    cached = CachedSource(Records(log), tmp_path / "cache")
    cached.get_bytes(range(COUNT))
    copy = pickle.loads(pickle.dumps(cached))
    assert copy.get_bytes([5, 6]) == [record(5), record(6)]


def test_records_beyond_the_budget_are_read_where_they_are(log, tmp_path):
    cached = CachedSource(Records(log), tmp_path / "cache", max_bytes=10_000)
    for _ in range(2):
        assert cached.get_bytes(range(COUNT)) == [record(index) for index in range(COUNT)]
    assert 0 < cached.stored < COUNT
    assert cached.stored_bytes <= 10_000
    assert len(asked(log)) == 2 * COUNT - cached.stored
    with pytest.raises(OptionsError, match="max_bytes"):
        CachedSource(Records(log), tmp_path / "cache", max_bytes=0)


def test_records_of_several_parts_and_columns(tmp_path):
    with tarfile.open(tmp_path / "x.tar", "w") as archive:
        for index in range(12):
            for part in ("jpg", "cls"):
                (tmp_path / "one").write_bytes(record(index) + part.encode())
                archive.add(tmp_path / "one", f"{index:03}.{part}")
    source = sources.TarSource(tmp_path / "x.tar", parts=("jpg", "cls"))
    cached = CachedSource(source, tmp_path / "cache")
    for _ in range(2):
        assert cached.get_bytes([4, 2]) == source.get_bytes([4, 2])


def test_an_archive_that_was_written_again_has_another_cache(tmp_path):
    def packed(salt):
        (tmp_path / "one").write_bytes(salt + record(1))
        with tarfile.open(tmp_path / "x.tar", "w") as archive:
            archive.add(tmp_path / "one", "one")
        os.utime(tmp_path / "x.tar", (len(salt), ord(salt)))
        return CachedSource(sources.TarSource(tmp_path / "x.tar"), tmp_path / "cache")

    assert packed(b"a").get_bytes([0]) == [b"a" + record(1)]
    assert packed(b"b").get_bytes([0]) == [b"b" + record(1)]


def test_records_that_changed_under_one_name_are_told(log, tmp_path):
    CachedSource(Records(log), tmp_path / "cache").get_bytes(range(COUNT))
    changed = CachedSource(Records(log, salt=b"new"), tmp_path / "cache")
    with pytest.raises(DatasetError, match=r"does not hold what record 0 is now.*Delete"):
        changed.get_bytes([1])


def test_an_object_that_is_given_credentials_is_the_same_object():
    pytest.importorskip("obstore")

    def folder(**config):
        config = {"endpoint": "http://127.0.0.1:9", "aws_secret_access_key": "S", **config}
        never = {"max_retries": 0, "retry_timeout": timedelta(0)}
        source = sources.ObjectSource("s3://b/x", ["a"], config=config, retry_config=never)
        with pytest.warns(FastDataWarning, match=r"by their names alone.*key="):
            return CachedSource(source).folder

    one, two = folder(aws_access_key_id="A"), folder(aws_access_key_id="B")
    other = folder(aws_access_key_id="A", endpoint="http://127.0.0.1:10")
    assert one == two != other


@pytest.fixture
def server():
    running = ObjectServer({f"{index:03}": record(index) for index in range(COUNT)})
    yield running
    running.close()


def objects(server):
    keys = [f"{index:03}" for index in range(COUNT)]
    return sources.ObjectSource(server.url, keys, client_options={"allow_http": True})


def test_that_given_objects_are_known_by_their_names_is_said(server):
    pytest.importorskip("obstore")
    with pytest.warns(FastDataWarning, match=r"40 files by their names alone.*key="):
        CachedSource(objects(server))
    CachedSource(objects(server), key="photos-1")  # whose user tells of changes


def test_a_database_that_was_written_again_has_another_cache(tmp_path):
    lmdb = pytest.importorskip("lmdb")

    def folder(value):
        with (
            lmdb.open(str(tmp_path / "db"), map_size=1 << 20) as database,
            database.begin(write=True) as transaction,
        ):
            transaction.put(b"one", value)
        return CachedSource(sources.LmdbSource(tmp_path / "db", [b"one"])).folder

    assert folder(b"a") != folder(b"b")


def test_a_data_module_asks_for_each_record_once(log, tmp_path):
    def rows():
        source = Records(log)
        source.parallel_reads = 4
        data = sources.SourceDataset(source, lambda raw, index: torch.tensor([index, len(raw)]))
        options = ld.LoaderOptions(num_workers=2, executor="workers")
        module = ld.FastDataModule.from_datasets(
            data, batch_size=5, cache=tmp_path / "cache", options=options
        )
        loader = module.train_dataloader()
        found = [torch.cat(list(loader)).tolist() for _ in range(2)]
        assert sorted(found[0]) == sorted(found[1])
        assert "records of Records" in module.explain()
        return sorted(found[0])

    wanted = [[index, len(record(index))] for index in range(COUNT)]
    assert rows() == wanted
    # Eight are compared by each process that opens the cache before another one has.
    assert len(asked(log)) <= COUNT + 3 * 8
    log.unlink()
    assert rows() == wanted  # a second run finds what the first one kept
    assert len(asked(log)) <= 3 * 8
