"""Samples are those of their records, whatever reads them, and errors name the record."""

from __future__ import annotations

import multiprocessing
import pickle
import tarfile
import threading

import lmdb
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from thoroughness import max_examples
from torch.utils.data import ConcatDataset, DataLoader, Subset

import lightning_fastdata as ld
from lightning_fastdata import sources
from lightning_fastdata.errors import DatasetError, FastDataWarning, OptionsError
from lightning_fastdata.sources.source import read_ahead, reads_ahead

COUNT = 48


def record(index):
    """Bytes that show which record they are."""
    return bytes([index]) * (20 + index % 9)


def in_files(folder):
    paths = [folder / f"{index:03}.bin" for index in range(COUNT)]
    for index, path in enumerate(paths):
        path.write_bytes(record(index))
    return sources.FileSource(paths)


def in_archives(folder):
    for number in range(2):
        with tarfile.open(folder / f"{number}.tar", "w") as archive:
            for index in range(number * COUNT // 2, (number + 1) * COUNT // 2):
                (folder / "one").write_bytes(record(index))
                archive.add(folder / "one", f"deep/{index:03}.bin")
    return sources.TarSource([folder / "0.tar", folder / "1.tar"])


def in_database(folder):
    environment = lmdb.open(str(folder / "db"), map_size=1 << 24)
    with environment.begin(write=True) as transaction:
        for index in range(COUNT):
            transaction.put(f"{index:03}".encode(), record(index))
    environment.close()
    return sources.LmdbSource(folder / "db")


MAKERS = {
    "files": in_files,
    "tar": in_archives,
    "lmdb": in_database,
}


@pytest.fixture(params=MAKERS)
def source(request, tmp_path):
    return MAKERS[request.param](tmp_path)


def decode(raw, index):
    assert bytes(raw) == record(index)
    return torch.tensor([len(raw), raw[0], index])


@max_examples(25)
@given(data=st.data())
def test_records_come_in_any_order(tmp_path_factory, data):
    name = data.draw(st.sampled_from(list(MAKERS)))
    source = MAKERS[name](tmp_path_factory.mktemp("records"))
    order = data.draw(st.lists(st.integers(0, COUNT - 1), max_size=30))
    assert len(source) == COUNT
    assert [bytes(raw) for raw in source.get_bytes(order)] == [record(index) for index in order]


@pytest.mark.cases(3)
@pytest.mark.parametrize("executor", ["inline", "workers", "torch"])
def test_every_executor_delivers_the_records(source, executor):
    dataset = sources.SourceDataset(source, decode)
    dataset[3]  # opened here first
    workers = 0 if executor == "inline" else 2
    loader = ld.FastDataLoader(dataset, 5, num_workers=workers, executor=executor)
    for _ in range(2):
        rows = torch.cat(list(loader))
        assert rows[:, 2].tolist() == list(range(COUNT))


@pytest.mark.parametrize("method", ["spawn", "forkserver"])
@pytest.mark.slow
def test_other_start_methods_deliver_the_records(source, method):
    dataset = sources.SourceDataset(source, decode)
    loader = DataLoader(dataset, 5, num_workers=1, multiprocessing_context=method)
    assert torch.cat(list(loader))[:, 2].tolist() == list(range(COUNT))


def test_a_source_that_was_read_here_can_be_pickled(source):
    dataset = sources.SourceDataset(source, decode)
    dataset[3]
    again = pickle.loads(pickle.dumps(dataset))
    assert torch.equal(again[-1], dataset[COUNT - 1])


def test_wrapped_datasets_read_ahead_too(source, tmp_path, monkeypatch):
    dataset, asked = sources.SourceDataset(source, decode), []
    monkeypatch.setattr(sources.SourceDataset, "read_ahead", lambda _, more: asked.extend(more))
    for wrapped, indices, wanted in [
        (dataset, [3, 5], [3, 5]),
        (Subset(dataset, [7, 9, 11]), [2, 0], [11, 7]),
        (ConcatDataset([Subset(dataset, range(4)), dataset]), [1, 6], [1, 2]),
        (ld.CachedDataset(dataset, tmp_path / "cache", key="k"), [8], [8]),
    ]:
        assert reads_ahead(wrapped)
        asked.clear()
        read_ahead(wrapped, indices)
        assert asked == wanted
    assert not reads_ahead(torch.utils.data.TensorDataset(torch.zeros(3)))


class Slow:
    """A source that counts what it is asked for, and may keep one answer back."""

    def __init__(self, *, parallel_reads=8, fails=(), late=None):
        self.parallel_reads = parallel_reads
        self.fails = fails
        self.late = late
        self.other = threading.Event()
        self.asked = []

    def __len__(self):
        return COUNT

    def get_bytes(self, indices):
        self.asked.append(list(indices))
        for index in indices:
            if index in self.fails:
                raise ValueError("no such thing")
        known = [number for asked in self.asked for number in asked]
        if self.late in indices and known.count(self.late) == 1:
            assert self.other.wait(60), "it was not asked for again"
        return [record(index) for index in indices]

    def name_of(self, index):
        return f"thing {index}"


def test_records_of_a_batch_are_asked_for_at_once():
    all_asked = threading.Barrier(8, timeout=60)

    class Together(Slow):
        def get_bytes(self, indices):
            found = super().get_bytes(indices)
            all_asked.wait()
            return found

    source = Together()
    dataset = sources.SourceDataset(source, decode)
    dataset.read_ahead(range(8))
    for index in range(8):
        dataset[index]
    assert sorted(source.asked) == [[index] for index in range(8)]


def test_records_that_need_no_waiting_are_asked_for_in_one_call():
    source = Slow(parallel_reads=1)
    dataset = sources.SourceDataset(source, decode)
    dataset.read_ahead([4, 2, 4, -1])
    assert [dataset[index][2].item() for index in (4, 2, COUNT - 1)] == [4, 2, COUNT - 1]
    assert source.asked == [[4, 2, COUNT - 1]]


def test_a_record_that_never_comes_is_an_error():
    source = Slow(late=3)
    with pytest.raises(TimeoutError, match=r"thing 3 has not come within 0\.2 s \(timeout_s\)"):
        sources.SourceDataset(source, decode, timeout_s=0.2)[3]
    source.other.set()  # else this process would wait for the thread that reads it


@pytest.mark.parametrize("parallel_reads", [1, 8])
def test_an_error_names_the_record_and_spares_the_others(parallel_reads):
    source = Slow(fails=(5,), parallel_reads=parallel_reads)
    dataset = sources.SourceDataset(source, decode)
    dataset.read_ahead(range(8))
    for index in range(8):
        if index == 5:
            with pytest.raises(DatasetError, match="Cannot read thing 5: ValueError: no such"):
                dataset[index]
        else:
            assert dataset[index][2] == index


def test_bad_records_are_replaced_as_bad_samples_are(tmp_path):
    source = in_files(tmp_path)
    (tmp_path / "007.bin").unlink()
    loader = ld.FastDataLoader(
        sources.SourceDataset(source, lambda raw, index: torch.tensor([index, len(raw)])),
        6,
        num_workers=2,
        executor="workers",
        on_bad_sample=ld.BadSamples("replace", 0.5),
    )
    with pytest.warns(FastDataWarning, match=r"007\.bin"):
        rows = torch.cat(list(loader))
    assert len(rows) == COUNT
    assert 7 not in rows[:, 0].tolist()


def test_a_worker_asks_for_the_next_batch_before_it_decodes_one(tmp_path):
    handed_out = multiprocessing.get_context("fork").Event()

    def log(what, indices):
        with (tmp_path / "log").open("a") as file:
            file.writelines(f"{what} {index}\n" for index in indices)

    class Told(sources.SourceDataset):
        def read_ahead(self, indices):
            log("ask", indices)
            super().read_ahead(indices)

    def decode_when_all_is_handed_out(raw, index):
        assert handed_out.wait(60)
        log("decode", [index])
        return decode(raw, index)

    def batches():
        for first in range(0, COUNT, 6):
            if first + 6 == COUNT:
                handed_out.set()
            yield list(range(first, first + 6))

    class Batches:
        def __iter__(self):
            return batches()

        def __len__(self):
            return COUNT // 6

    loader = ld.FastDataLoader(
        Told(Slow(), decode_when_all_is_handed_out),
        batch_sampler=Batches(),
        num_workers=1,
        executor="workers",
        multiprocessing_context="fork",
        prefetch_factor=8,
    )
    assert torch.cat(list(loader))[:, 2].tolist() == list(range(COUNT))
    said = (tmp_path / "log").read_text().splitlines()
    at = {line: place for place, line in reversed(list(enumerate(said)))}
    early = [at[f"ask {first + 5}"] < at[f"decode {first - 1}"] for first in range(12, COUNT, 6)]
    assert sum(early) > len(early) / 2


def test_threads_of_one_process_keep_their_reads_apart():
    dataset = sources.SourceDataset(Slow(), decode)
    wrong = []

    def read(numbers):
        for _ in range(10):
            dataset.read_ahead(numbers)
            wrong.extend(n for n in numbers if dataset[n][2] != n)

    threads = [threading.Thread(target=read, args=(range(8 * n, 8 * n + 8),)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


@pytest.mark.parametrize("index", [COUNT, -COUNT - 1])
def test_a_record_that_is_not_there_is_an_error(index):
    with pytest.raises(IndexError, match="has 48"):
        sources.SourceDataset(Slow(), decode)[index]


def test_what_is_no_whole_number_is_no_record():
    with pytest.raises(TypeError, match="interpreted as an integer"):
        sources.SourceDataset(Slow(), decode)[2.5]


def test_an_impossible_argument_is_named():
    for wrong in (0, float("nan"), "x", None):
        with pytest.raises(OptionsError, match=f"timeout_s is {wrong!r}"):
            sources.SourceDataset(Slow(), decode, timeout_s=wrong)
    for wrong in ([1, 2], ("a.tar", decode), "a.tar", None):
        with pytest.raises(OptionsError, match="source is "):
            sources.SourceDataset(wrong, decode)
    for wrong in (None, "decode", 3):
        with pytest.raises(OptionsError, match="decode is "):
            sources.SourceDataset(Slow(), wrong)
    assert sources.SourceDataset(Slow(), decode, timeout_s=np.float32(5))[1][2] == 1
