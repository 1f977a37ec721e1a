"""Files of coming samples are brought into memory; what is no such file is left alone."""

from __future__ import annotations

import ctypes
import mmap
import os
import pickle
import threading

import numpy as np
import pytest
import torch
from processes import until
from torch.utils.data import Dataset, IterableDataset, Subset

import lightning_fastdata as ld
from lightning_fastdata import sources
from lightning_fastdata.caches.identity import identity
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


def in_memory(path):
    """Return whether the middle of a file is, by mincore(2), which does not begin to read it."""
    with open(path, "rb") as file:
        size = os.fstat(file.fileno()).st_size
        mapped = mmap.mmap(file.fileno(), size, access=mmap.ACCESS_COPY)
    address = ctypes.addressof(ctypes.c_char.from_buffer(mapped))
    pages = (ctypes.c_ubyte * -(-size // mmap.PAGESIZE))()
    assert not ctypes.CDLL(None).mincore(ctypes.c_void_p(address), ctypes.c_size_t(size), pages)
    return bool(pages[len(pages) // 2] & 1)


def evict(path):
    descriptor = os.open(path, os.O_RDONLY)
    os.fsync(descriptor)
    os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(descriptor)


@pytest.fixture
def paths(tmp_path):
    made = [tmp_path / f"{index:03}.bin" for index in range(COUNT)]
    for index, path in enumerate(made):
        path.write_bytes(np.random.default_rng(index).bytes(40_000))
    return made


@pytest.fixture
def evicted(paths):
    if not ADVISABLE:
        pytest.skip("needs posix_fadvise and RWF_NOWAIT")
    for path in paths:
        evict(path)
    if any(map(in_memory, paths)):
        pytest.skip("this file system keeps its files in memory")
    return paths


def come_into_memory(paths):
    until(lambda: all(map(in_memory, paths)))


def test_files_that_a_dataset_lists_come_into_memory_before_they_are_read(evicted):
    ListedFiles(Listed(evicted)).begin(list(range(8)))
    come_into_memory(evicted[1:8])
    assert not any(map(in_memory, evicted[8:]))
    ListedFiles(Subset(Listed(evicted), range(20, 30))).begin([np.int64(1), 3, 2])
    come_into_memory(evicted[22:24])


def test_those_of_a_source_do_so_when_samples_are_announced(evicted):
    dataset = sources.SourceDataset(sources.FileSource(evicted), lambda raw, _: raw)
    dataset.read_ahead([3, 4, 5])
    come_into_memory(evicted[3:6])
    assert not any(map(in_memory, evicted[6:]))


def test_records_of_an_archive_do_so_too(tmp_path, evicted):
    import tarfile

    with tarfile.open(tmp_path / "x.tar", "w") as archive:
        for path in evicted:
            archive.add(path, path.name)
    evict(tmp_path / "x.tar")
    if in_memory(tmp_path / "x.tar"):
        pytest.skip("this file system keeps its files in memory")
    source = sources.TarSource(tmp_path / "x.tar", parts=("bin",))
    evict(tmp_path / "x.tar")
    source.will_read([20, 19, 21])  # about the middle of the archive
    come_into_memory([tmp_path / "x.tar"])
    assert source.get_bytes([20]) == [{"bin": evicted[20].read_bytes()}]


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


def test_an_unchanged_dataset_of_cold_files_is_read_right(evicted):
    data = Listed(evicted)
    loader = ld.FastDataLoader(data, 8, num_workers=2, shuffle=True, executor="workers")
    assert sorted(torch.cat(list(loader)).tolist()) == sorted(
        sum(path.read_bytes()) for path in evicted
    )


def test_a_source_of_files_is_the_same_whatever_was_read(paths):
    source = sources.FileSource(paths)
    before = identity(source)
    source.will_read([1, 2])
    assert identity(source) == before
    assert pickle.loads(pickle.dumps(source)).get_bytes([3]) == [paths[3].read_bytes()]
