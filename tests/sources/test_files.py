"""Files of coming samples are brought into memory; what is no such file is left alone."""

from __future__ import annotations

import os
import pickle
import tarfile
import threading
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.utils.data import ConcatDataset, Dataset, IterableDataset, Subset
from virtual_time import virtual_time

import lightning_fastdata as ld
from lightning_fastdata import sources
from lightning_fastdata.caches.folders import identity
from lightning_fastdata.host import clock
from lightning_fastdata.sources.files import ADVISABLE, ColdFiles, ListedFiles

COUNT = 40
needs_advice = pytest.mark.skipif(not ADVISABLE, reason="needs posix_fadvise and RWF_NOWAIT")


class Listed(Dataset):
    """A dataset that lists its files as torchvision's folders do."""

    def __init__(self, paths):
        self.samples = [(os.fspath(path), 0) for path in paths]

    def __len__(self):
        return len(self.samples)

    def __getitem__(self, index):
        with open(self.samples[index][0], "rb") as file:
            return torch.frombuffer(bytearray(file.read()), dtype=torch.uint8).sum()


class PageCache:
    """What the kernel has of files in memory, pretended: the real one may drop what it was told."""

    def __init__(self, monkeypatch):
        self.cold = set()
        self.asked = []  # (name of the file, offset, bytes)
        self._preadv = os.preadv
        monkeypatch.setattr(os, "preadv", self.preadv)
        monkeypatch.setattr(os, "posix_fadvise", self.posix_fadvise)

    def preadv(self, descriptor, buffers, offset, flags=0):
        if flags & os.RWF_NOWAIT and os.fstat(descriptor).st_ino in self.cold:
            raise BlockingIOError
        return self._preadv(descriptor, buffers, offset)

    def posix_fadvise(self, descriptor, offset, size, advice):
        assert advice == os.POSIX_FADV_WILLNEED
        self.cold.discard(os.fstat(descriptor).st_ino)
        self.asked.append((Path(f"/proc/self/fd/{descriptor}").readlink().name, offset, size))

    def evict(self, *paths):
        self.cold |= {path.stat().st_ino for path in paths}

    @property
    def files(self):
        return [name for name, _, _ in self.asked]


@pytest.fixture
def cache(monkeypatch):
    if not ADVISABLE:
        pytest.skip("needs posix_fadvise and RWF_NOWAIT")
    return PageCache(monkeypatch)


@pytest.fixture
def quick(cache):
    """The cache in a time in which to open a file takes none."""
    with virtual_time():
        yield cache


@pytest.fixture
def paths(tmp_path):
    made = [tmp_path / f"{index:03}.bin" for index in range(COUNT)]
    for index, path in enumerate(made):
        path.write_bytes(np.random.default_rng(index).bytes(40_000))
    return made


def names(paths):
    return [path.name for path in paths]


def test_files_that_a_dataset_lists_come_into_memory_before_they_are_read(quick, paths):
    quick.evict(*paths)
    ListedFiles(Listed(paths)).begin(list(range(8)))
    assert quick.files == names(paths[1:8])  # the first one is read at once anyway
    assert {(offset, size) for _, offset, size in quick.asked} == {(0, 40_000)}
    ListedFiles(Subset(Listed(paths), range(20, 30))).begin([np.int64(1), 3, 2])
    assert quick.files[7:] == names([paths[23], paths[22]])


def test_those_of_a_source_do_so_when_samples_are_announced(quick, paths):
    quick.evict(*paths)
    dataset = sources.SourceDataset(sources.FileSource(paths), lambda raw, _: raw)
    dataset.read_ahead([3, 4, 5])
    assert quick.files == names(paths[3:6])


def test_records_of_an_archive_do_so_too(tmp_path, cache, paths):
    with tarfile.open(tmp_path / "x.tar", "w") as archive:
        for path in paths:
            archive.add(path, path.name)
    with tarfile.open(tmp_path / "x.tar") as archive:
        begins = [archive.getmember(path.name).offset_data for path in paths[19:22]]
    source = sources.TarSource(tmp_path / "x.tar", parts=("bin",))
    source.will_read([20, 19, 21])
    assert sorted(cache.asked) == [("x.tar", begin, 40_000) for begin in begins]
    assert source.get_bytes([20]) == [{"bin": paths[20].read_bytes()}]


def test_files_that_are_in_memory_are_not_asked_for(quick, paths):
    sources.FileSource(paths).will_read([3, 4, 5])
    assert not quick.asked
    quick.evict(paths[5])  # by the first of eight it is known
    sources.FileSource(paths).will_read([3, 4, 5])
    assert not quick.asked


def test_where_to_open_a_file_takes_long_none_is_opened_for_that(quick, paths, monkeypatch):
    quick.evict(*paths)
    stat = os.stat

    def asks_a_server(path, **options):
        clock.sleep(0.001)
        return stat(path, **options)

    monkeypatch.setattr(os, "stat", asks_a_server)
    source = sources.FileSource(paths)
    source.will_read([3, 4, 5])
    monkeypatch.setattr(os, "stat", stat)
    source.will_read([6, 7, 8])  # which is not looked at again
    assert not quick.asked


@needs_advice
def test_pipes_folders_and_files_that_are_missing_are_left_alone(tmp_path, paths):
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    got = []
    reader = threading.Thread(target=lambda: got.append(pipe.read_bytes()), daemon=True)
    ColdFiles().begin([os.fspath(pipe)] * 8)  # would wait for a writer
    ColdFiles().begin([os.fspath(tmp_path), os.fspath(paths[0])])
    reader.start()
    pipe.write_bytes(b"whole")
    reader.join(10)
    assert got == [b"whole"]
    cold = ColdFiles()
    cold.begin([os.fspath(tmp_path / "missing")])
    cold.begin([os.fspath(paths[0])])  # gives up, in silence


class Stream(IterableDataset):
    samples = "no files"

    def __iter__(self):
        return iter(range(3))


@pytest.mark.parametrize(
    "dataset",
    [Stream(), [1, 2, 3], Listed([]), torch.utils.data.TensorDataset(torch.zeros(3))],
    ids=lambda dataset: type(dataset).__name__,
)
def test_datasets_without_files_are_left_alone(dataset):
    ahead = ListedFiles(dataset)
    for indices in ([0, 1, 2], [], [0], 3, [(1, 2), "x"], None):
        ahead.begin(indices)


def test_an_unchanged_dataset_of_cold_files_is_read_right(cache, paths):
    cache.evict(*paths)
    data = Listed(paths)
    loader = ld.FastDataLoader(data, 8, num_workers=2, shuffle=True, executor="workers")
    assert sorted(torch.cat(list(loader)).tolist()) == sorted(
        sum(path.read_bytes()) for path in paths
    )


def test_a_source_of_files_is_the_same_whatever_was_read(paths):
    source = sources.FileSource(paths)
    before = identity(source)
    source.will_read([1, 2])
    assert identity(source) == before
    assert pickle.loads(pickle.dumps(source)).get_bytes([3]) == [paths[3].read_bytes()]


class Broken(Listed):
    def __getitem__(self, index):
        raise ValueError("no picture")


def test_an_error_names_the_file_of_a_sample_that_is_counted_from_the_end(paths):
    joined = ConcatDataset([Listed(paths[:3]), Broken(paths[3:5])])
    loader = ld.FastDataLoader(joined, 1, sampler=[-1], num_workers=1, executor="workers")
    with pytest.raises(ValueError, match=f"reading sample -1 .*{paths[4].name}"):
        next(iter(loader))
    loader.close()
