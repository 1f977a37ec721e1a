"""Objects are read whole and right, with latency, errors and throttling, by real requests."""

from __future__ import annotations

import multiprocessing
import pickle
import socket
import subprocess
import sys
from contextlib import suppress
from datetime import timedelta

import pytest
import torch
from conformance.pieces import Linear, make_trainer
from processes import until

import lightning_fastdata as ld
from lightning_fastdata import CachedDataset, sources
from lightning_fastdata.errors import DatasetError
from lightning_fastdata.host import clock
from tests.ext.sources.object_server import ObjectServer

obstore = pytest.importorskip("obstore")
boto3 = pytest.importorskip("boto3")
COUNT = 40


def record(index):
    return bytes([index]) * (3000 + 100 * index)


@pytest.fixture
def server():
    running = ObjectServer({f"data/{index:03}.bin": record(index) for index in range(COUNT)})
    yield running
    running.close()


def source_of(server, **more):
    keys = [f"data/{index:03}.bin" for index in range(COUNT)]
    return sources.ObjectSource(
        server.url, more.pop("keys", keys), client_options={"allow_http": True}, **more
    )


def decode(raw, index):
    if bytes(raw) != record(index):  # pytest would describe how they differ for a minute
        raise AssertionError(index)
    return torch.tensor([index, len(raw)])


def features(raw, index):
    return torch.full((4,), float(len(raw)))


def in_workers(source, workers=2, **options):
    """Read everything in workers: a client in this process would not survive later forks."""
    return read(sources.SourceDataset(source, decode), workers, **options)


def read(dataset, workers=2, **options):
    loader = ld.FastDataLoader(dataset, 8, num_workers=workers, executor="workers", **options)
    return torch.cat(list(loader))[:, 0].tolist()


def test_workers_read_objects_many_at_once(server):
    server.needs_at_once = 7
    assert in_workers(source_of(server)) == list(range(COUNT))
    assert server.most_at_once > 6


def test_answers_that_fail_are_asked_for_again(server):
    server.fail_share = 0.2
    soon, later = (timedelta(milliseconds=ms) for ms in (10, 50))
    backoff = {"init_backoff": soon, "max_backoff": later, "base": 2}
    retry = {"max_retries": 10, "backoff": backoff}
    assert in_workers(source_of(server, retry_config=retry)) == list(range(COUNT))
    assert server.requests > COUNT


@pytest.mark.parametrize("status", [503, 429])
def test_a_server_that_refuses_too_many_at_once_is_asked_again(server, status):
    server.needs_at_once, server.most_allowed, server.throttle_status = 7, 6, status
    assert in_workers(source_of(server)) == list(range(COUNT))
    assert server.throttled > 0


def test_a_missing_object_is_named(server):
    del server.objects["data/007.bin"]
    server.objects["data/007.bin"] = None
    with pytest.raises(FileNotFoundError, match=r"data/007\.bin"):
        in_workers(source_of(server))


def test_objects_of_a_folder_are_listed_in_order(tmp_path):
    for index in (2, 0, 1):
        (tmp_path / f"{index:03}.bin").write_bytes(record(index))
    (tmp_path / "other.txt").write_text("no")
    source = sources.ObjectSource(tmp_path.as_uri(), suffix=".bin")
    assert list(source.keys) == ["000.bin", "001.bin", "002.bin"]
    assert in_workers(source) == [0, 1, 2]
    assert source.name_of(1).endswith("001.bin")
    assert len(pickle.loads(pickle.dumps(source))) == 3


def test_what_cannot_be_listed_is_an_error(server):
    with pytest.raises(DatasetError, match=r"cannot be listed.*give their keys"):
        sources.ObjectSource("https://127.0.0.1:9/x", retry_config={"max_retries": 0})


def _read_here_and_below(source, queue):
    """Read in this process and in one that is forked from it."""
    source.get_bytes([0])
    context = multiprocessing.get_context("fork")
    child = context.Process(target=_read_below, args=(source, queue))
    child.start()
    child.join()


def _read_below(source, queue):
    try:
        source.get_bytes([1])
    except DatasetError as error:
        queue.put(str(error))


def test_a_forked_process_does_not_use_its_parents_client(server):
    context = multiprocessing.get_context("fork")
    queue = context.Queue()
    process = context.Process(target=_read_here_and_below, args=(source_of(server), queue))
    process.start()
    assert "forkserver" in queue.get(timeout=30)
    process.kill()
    process.join()


class Far(clock.Clock):
    """The same objects, whose answers take a second of this clock, which else stands."""

    parallel_reads = 8

    def __init__(self, source):
        self.source, self.now_ns = source, 0

    def monotonic_ns(self):
        return self.now_ns

    def thread_time_ns(self):
        return 0

    def __len__(self):
        return len(self.source)

    def get_bytes(self, indices):
        self.now_ns += 1_000_000_000
        return self.source.get_bytes(indices)

    def name_of(self, index):
        return self.source.name_of(index)


def test_a_training_without_settings_hides_the_latency(server):
    far = Far(source_of(server))
    module = ld.FastDataModule.from_datasets(sources.SourceDataset(far, decode), batch_size=4)
    with clock.installed(far):  # in the process that tries it, too
        loader = module.train_dataloader()
    assert sorted(torch.cat(list(loader))[:, 0].tolist()) == list(range(COUNT))
    assert loader.num_workers > 2


@pytest.mark.filterwarnings("ignore:A cache knows these")
def test_credentials_are_in_no_file_and_no_text(server, tmp_path, capfd):
    secret = "Bearer hunter2"
    options = {"allow_http": True, "default_headers": {"authorization": secret}}
    keys = [f"data/{index:03}.bin" for index in range(COUNT)]
    source = sources.ObjectSource(server.url, keys, client_options=options)
    module = ld.FastDataModule.from_datasets(
        sources.SourceDataset(source, features), batch_size=8, cache=tmp_path / "cache"
    )
    trainer = make_trainer(
        tmp_path, max_epochs=1, callbacks=[ld.DataThroughputCallback(report=tmp_path / "run.json")]
    )
    trainer.fit(Linear(), datamodule=module)
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert len(files) > 3
    for path in files:
        assert secret.encode() not in path.read_bytes()
    broken = sources.ObjectSource(server.url, ["data/none.bin"], client_options=options)
    with pytest.raises(FileNotFoundError) as caught:
        in_workers(broken)
    said = capfd.readouterr()
    for text in (said.out, said.err, str(caught.value), module.explain(), repr(source)):
        assert "hunter2" not in text


@pytest.fixture
def s3():
    """Moto's S3 server in a process of its own, with a bucket; keys of ObjectSource for it."""
    pytest.importorskip("moto.server")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "moto.server", "-p", str(port)]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    url, region = f"http://127.0.0.1:{port}", "us-east-1"
    keys = {"aws_access_key_id": "key", "aws_secret_access_key": "secret"}
    config = {"endpoint": url, "region": region, **keys}
    client = boto3.client("s3", endpoint_url=url, region_name=region, **keys)

    def answers():
        assert process.poll() is None
        with suppress(Exception):
            return client.create_bucket(Bucket="bucket")

    until(answers, 250)
    yield client, {"config": config, "client_options": {"allow_http": True}}
    process.kill()
    process.wait()


def test_objects_in_s3_are_listed_read_and_kept_until_they_change(s3, tmp_path):
    client, config = s3
    for index in range(COUNT):
        client.put_object(Bucket="bucket", Key=f"data/{index:03}.bin", Body=record(index))

    def cached():
        source = sources.ObjectSource("s3://bucket/data", suffix=".bin", **config)
        assert list(source.keys) == [f"{index:03}.bin" for index in range(COUNT)]
        return CachedDataset(sources.SourceDataset(source, decode), tmp_path)

    first = cached()
    assert read(first) == list(range(COUNT))
    again = cached()
    assert again.folder == first.folder
    assert again.stored == COUNT
    # Of the same length, as only its version tells.
    client.put_object(Bucket="bucket", Key="data/007.bin", Body=bytes(len(record(7))))
    changed = cached()
    assert changed.folder != first.folder
    with pytest.raises(AssertionError):  # decode() finds the new object
        read(changed)
