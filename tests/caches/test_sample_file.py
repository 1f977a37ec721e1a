"""What is in a cache is whole, whatever happens to those who write it."""

from __future__ import annotations

import itertools
import multiprocessing
import os
import resource
import signal

import numpy as np
import pytest
import torch
from misses import each

from lightning_fastdata.caches.sample_file import SampleFile, locked
from lightning_fastdata.caches.sample_form import taken_apart
from lightning_fastdata.errors import DatasetError
from lightning_fastdata.host.system_calls import SharedFlags

COUNT = 400


def sample_of(index, *, varies):
    """A sample that shows by itself whether it is whole."""
    rows = 20 + index % 7 if varies else 20
    return torch.full((rows, 50), index, dtype=torch.int32), index


def is_whole(sample, index, *, varies):
    wanted = sample_of(index, varies=varies)
    return torch.equal(sample[0], wanted[0]) and sample[1] == index


def create(folder, *, varies, max_bytes=1 << 30, count=COUNT):
    folder.mkdir(exist_ok=True)
    form = None if varies else taken_apart(sample_of(0, varies=False))[0]
    with locked(folder):
        return SampleFile.create(
            folder, count, SharedFlags(count), form=form, max_bytes=max_bytes, about={}
        )


def reopened(folder, count=COUNT):
    return SampleFile.open(folder, count, SharedFlags(count))


def _write_for_ever(folder, varies, seed, count, end):
    file = reopened(folder)
    order = np.random.default_rng(seed)
    for number in itertools.count():
        index = int(order.integers(COUNT))
        file.write(index, sample_of(index, varies=varies))
        if number == count:
            end.send_bytes(b"written")


@pytest.mark.parametrize("varies", [False, True], ids=["columns", "any form"])
def test_killed_writers_leave_whole_samples(tmp_path, varies):
    create(tmp_path / "c", varies=varies).close()
    context = multiprocessing.get_context("fork")
    for number in range(6):
        writers = []
        for seed in (2 * number, 2 * number + 1):
            ours, theirs = context.Pipe(duplex=False)
            arguments = tmp_path / "c", varies, seed, 11 * number, theirs
            writers.append((context.Process(target=_write_for_ever, args=arguments), ours))
            writers[-1][0].start()
        for _, ours in writers:
            ours.recv_bytes()
        for writer, _ in writers:
            os.kill(writer.pid, signal.SIGKILL)  # whatever they do now
            writer.join()
        file = reopened(tmp_path / "c")
        for index in range(COUNT):
            there, sample = file.read(index)
            assert not there or is_whole(sample, index, varies=varies)
        file.close()
    assert reopened(tmp_path / "c").stored() > 20


@pytest.mark.parametrize("varies", [False, True], ids=["columns", "any form"])
@pytest.mark.parametrize("what", ["changed", "cut off"])
def test_damaged_samples_are_not_handed_out(tmp_path, varies, what):
    file = create(tmp_path / "c", varies=varies)
    for index in range(COUNT):
        assert file.write(index, sample_of(index, varies=varies))
    file.flush()
    path = file.paths[0]
    data = bytearray(path.read_bytes())
    middle = len(data) // 2
    if what == "changed":
        for at in range(middle, middle + 30_000, 997):
            data[at] ^= 0xFF
    else:
        del data[middle:]
    path.write_bytes(bytes(data))
    again, lost = reopened(tmp_path / "c"), 0
    for index in range(COUNT):
        there, sample = again.read(index)
        lost += not there
        assert not there or is_whole(sample, index, varies=varies)
    assert 3 < lost < COUNT
    # What was lost can be written again.
    for index in range(COUNT):
        if not again.has(index):
            again.write(index, sample_of(index, varies=varies))
    assert again.stored() == COUNT


@pytest.mark.parametrize("varies", [False, True], ids=["columns", "any form"])
def test_no_more_is_written_than_allowed(tmp_path, varies):
    file = create(tmp_path / "c", varies=varies, max_bytes=100_000)
    written = [file.write(index, sample_of(index, varies=varies)) for index in range(COUNT)]
    assert 10 < sum(written) < COUNT
    assert file.used_bytes() <= 100_000
    for index in range(COUNT):
        assert file.read(index)[0] == written[index]
    assert file.columns() is None


def test_another_form_is_not_written_to_columns(tmp_path):
    file = create(tmp_path / "c", varies=False)
    assert not file.write(3, sample_of(3, varies=True))
    assert not file.write(4, (torch.zeros(20, 50, dtype=torch.int64), 4))
    assert file.stored() == 0


def test_columns_are_there_when_all_samples_are(tmp_path):
    file = create(tmp_path / "c", varies=False)
    for index in range(COUNT):
        assert file.columns() is None
        file.write(index, sample_of(index, varies=False))
    images, numbers = file.columns()
    assert images.shape == (COUNT, 20, 50)
    assert numbers.tolist() == list(range(COUNT))
    assert (images[:, 3, 4] == numbers).all()


def _write_all(file):
    for index in range(COUNT):
        file.write(index, sample_of(index, varies=True))


def test_a_disk_that_is_full_is_an_error_of_the_system(tmp_path):
    file = create(tmp_path / "c", varies=True)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, before[1]))
    try:
        with pytest.raises(OSError, match="File too large"):
            _write_all(file)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)
    for index in range(COUNT):
        there, sample = file.read(index)
        assert not there or is_whole(sample, index, varies=True)


@each("manifest", ["", "{", "[]", '{"format": 99, "samples": 400}', '{"a": 1}'])
def test_a_folder_that_cannot_be_read_is_named(tmp_path, manifest):
    create(tmp_path / "c", varies=False).close()
    (tmp_path / "c" / "manifest.json").write_text(manifest)
    with pytest.raises(DatasetError, match=r"cannot be read.*Delete the folder"):
        reopened(tmp_path / "c")


def test_a_cache_of_another_length_is_refused(tmp_path):
    create(tmp_path / "c", varies=False).close()
    with pytest.raises(DatasetError, match=r"400 samples in format \d, not 401"):
        reopened(tmp_path / "c", 401)


def test_a_folder_without_a_manifest_is_no_cache(tmp_path):
    create(tmp_path / "c", varies=False).close()
    (tmp_path / "c" / "manifest.json").unlink()
    assert reopened(tmp_path / "c") is None


@pytest.mark.skipif(not os.path.isdir("/proc/self/fd"), reason="needs /proc (Linux)")
def test_a_cache_that_is_no_longer_held_leaves_no_file_open(tmp_path):
    create(tmp_path / "c", varies=False).close()
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(3):
        assert reopened(tmp_path / "c").stored() == 0
    (tmp_path / "c" / "column-1.bin").unlink()
    assert reopened(tmp_path / "c") is None
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_sample_without_bytes_is_there(tmp_path):
    (tmp_path / "c").mkdir()
    form, _ = taken_apart((None, torch.empty(0)))
    file = SampleFile.create(tmp_path / "c", 2, SharedFlags(2), form=form, max_bytes=100, about={})
    assert file.write(1, (None, torch.empty(0)))
    assert file.read(0) == (False, None)
    there, sample = file.read(1)
    assert there
    assert sample[0] is None
