"""A source whose records are kept returns the same records, and is asked for each once."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import signal
import tarfile
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import numpy as np
import pytest
import torch
from programs import run_program

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


def objects(server, keys=None):
    keys = [f"{index:03}" for index in range(COUNT)] if keys is None else keys
    return sources.ObjectSource(server.url, keys, client_options={"allow_http": True})


def files_of(server):
    return sources.FsspecSource([f"{server.url}/{index:03}" for index in range(COUNT)])


@pytest.mark.parametrize("source_of", [objects, files_of])
def test_that_given_files_are_known_by_their_names_is_said(server, source_of):
    pytest.importorskip("obstore")
    pytest.importorskip("fsspec.implementations.http")
    with pytest.warns(FastDataWarning, match=r"40 files by their names alone.*key="):
        CachedSource(source_of(server))
    CachedSource(source_of(server), key="photos-1")  # whose user tells of changes


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


def _fill(log, folder, end):
    cached = CachedSource(Records(log), folder)
    for index in range(COUNT):
        cached.get_bytes([index])
        end.send_bytes(b"read")
    signal.pause()


@pytest.mark.parametrize("at", [1, 9, 30])
def test_a_kill_leaves_whole_records_or_none(at, log, tmp_path):
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=_fill, args=(log, tmp_path / "cache", theirs))
    process.start()
    for _ in range(at):
        ours.recv_bytes()
    process.kill()  # whatever it does now
    process.join()
    cached = CachedSource(Records(log), tmp_path / "cache")
    assert cached.stored >= at
    assert cached.get_bytes(range(COUNT)) == [record(index) for index in range(COUNT)]


def test_a_damaged_record_is_read_again(log, tmp_path):
    cached = CachedSource(Records(log), tmp_path / "cache")
    cached.get_bytes(range(COUNT))
    cached.flush()
    with (cached.folder / "samples.bin").open("r+b") as file:
        file.seek(2000)
        file.write(b"\xff" * 40)
    log.unlink()
    again = CachedSource(Records(log), tmp_path / "cache")
    assert again.get_bytes(range(COUNT)) == [record(index) for index in range(COUNT)]
    assert len(asked(log)) <= 10


@pytest.mark.skipif(not os.path.isdir("/dev/shm"), reason="needs /dev/shm")
def test_in_memory(log):
    cached = CachedSource(Records(log), "ram")
    for _ in range(2):
        assert cached.get_bytes([2, 1]) == [record(2), record(1)]
    assert asked(log) == [2, 1]


TRAINED = """
import sys, warnings
import torch, lightning_fastdata as ld
from lightning.pytorch import LightningModule, Trainer
from lightning_fastdata import sources
url, folder = sys.argv[1:]

def decode(raw, index):
    return torch.tensor([float(len(raw)), float(index)]) + torch.rand(1)

class Data(ld.FastDataModule):
    def train_dataset(self):
        keys = [f"{index:03}" for index in range(40)]
        source = sources.ObjectSource(url, keys, client_options={"allow_http": True})
        return sources.SourceDataset(source, decode)

class Model(LightningModule):
    def __init__(self):
        super().__init__()
        self.layer, self.seen = torch.nn.Linear(2, 1), []
    def training_step(self, batch, _):
        self.seen += batch[:, 1].int().tolist()
        return self.layer(batch).mean()
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.0)

if __name__ == "__main__":
    model = Model()
    data = Data(batch_size=5, seed=1, cache=folder, options=ld.LoaderOptions(num_workers=2))
    Trainer(max_epochs=3, accelerator="cpu", logger=False, enable_checkpointing=False,
            enable_progress_bar=False, enable_model_summary=False).fit(model, data)
    print(sorted(model.seen) == sorted(3 * list(range(40))))
"""


def test_a_training_asks_the_server_for_each_object_once(tmp_path):
    pytest.importorskip("obstore")
    server = ObjectServer({f"{index:03}": record(index) for index in range(COUNT)})
    (tmp_path / "train.py").write_text(TRAINED)
    try:
        for most in (COUNT, 0):  # a second run finds what the first one kept
            server.requests = 0
            run = run_program(tmp_path / "train.py", server.url, tmp_path / "cache")
            assert run.stdout.strip().endswith("True"), run.stderr
            # Each process compares eight; those that are late may be asked for twice.
            assert server.requests <= most + 16 + 3
    finally:
        server.close()


@pytest.mark.parametrize("num_workers", [0, 2])
def test_fill_asks_for_what_is_missing_once(tmp_path, log, num_workers):
    cached = CachedSource(Records(log), tmp_path / "kept")
    cached.get_bytes([3, 5])
    cached.fill(num_workers)
    assert sorted(asked(log)) == list(range(COUNT))
    cached.fill(num_workers)
    assert cached.get_bytes(range(COUNT)) == [record(index) for index in range(COUNT)]
    assert len(asked(log)) == COUNT
