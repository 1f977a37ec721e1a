"""Workers read rightly what the training process has open, whenever it opened it."""

from __future__ import annotations

import os
import tarfile
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import Dataset

from lightning_fastdata import FastDataLoader, FastDataModule, FastDataWarning, LoaderOptions
from lightning_fastdata.host.system_calls import files_being_read, open_anew

SAMPLES = 400
ROW = 64  # bytes: a few hundred rows are more than one buffer holds


def row(index: int) -> bytes:
    return f"{index:0{ROW}d}".encode()


def write_plain(path: Path) -> None:
    path.write_bytes(b"".join(map(row, range(SAMPLES))))


def write_zip(path: Path) -> None:
    with zipfile.ZipFile(path, "w") as archive:
        for index in range(SAMPLES):
            archive.writestr(str(index), row(index))


def write_tar(path: Path) -> None:
    member = path.with_suffix(".row")
    with tarfile.open(path, "w") as archive:
        for index in range(SAMPLES):
            member.write_bytes(row(index))
            archive.add(member, str(index))


def hdf5(path: Path, mode: str = "r") -> Any:
    return pytest.importorskip("h5py").File(path, mode)


def write_hdf5(path: Path) -> None:
    with hdf5(path, "w") as file:
        file["rows"] = [row(index) for index in range(SAMPLES)]


def of_file(file: Any, index: int) -> bytes:
    file.seek(index * ROW)
    return file.read(ROW)


def of_descriptor(descriptor: int, index: int) -> bytes:
    os.lseek(descriptor, index * ROW, os.SEEK_SET)
    return os.read(descriptor, ROW)


FOUND_BY_SEEKING = {
    "unbuffered": (write_plain, lambda path: path.open("rb", buffering=0), of_file),
    "buffered": (write_plain, lambda path: path.open("rb"), of_file),
    "descriptor": (write_plain, lambda path: os.open(path, os.O_RDONLY), of_descriptor),
    "zip": (write_zip, zipfile.ZipFile, lambda archive, index: archive.read(str(index))),
    "tar": (write_tar, tarfile.open, lambda tar, index: tar.extractfile(str(index)).read()),
    "hdf5": (write_hdf5, hdf5, lambda file, index: file["rows"][index]),
}
"""How rows are written, opened and read."""


class Rows(Dataset):
    """Rows of one file, found by a position that is moved to and then read from."""

    def __init__(self, path: Path, how: str, *, at_once: bool = False) -> None:
        self.path, self.how = path, how
        write, open_, _ = FOUND_BY_SEEKING[how]
        write(path)
        self.file = open_(path) if at_once else None

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> torch.Tensor:
        _, open_, found_in = FOUND_BY_SEEKING[self.how]
        if self.file is None:
            self.file = open_(self.path)
        found = found_in(self.file, index)
        return torch.tensor([int(found), len(found)])


WANTED = [[index, ROW] for index in range(SAMPLES)]
pytestmark = pytest.mark.filterwarnings("ignore:The dataset Rows holds an open h5py")


def read(loader) -> list[list[int]]:
    return [row for batch in loader for row in batch.tolist()]


@pytest.mark.cases(3)
@pytest.mark.parametrize("executor", ["workers", "torch"])
@pytest.mark.parametrize("how", FOUND_BY_SEEKING)
@pytest.mark.parametrize("at_once", [False, True], ids=["on first use", "at once"])
def test_the_training_process_reads_before_and_beside_the_workers(executor, how, at_once, tmp_path):
    dataset = Rows(tmp_path / "rows", how, at_once=at_once)
    assert dataset[7].tolist() == WANTED[7]
    loader = FastDataLoader(
        dataset, 8, num_workers=3, executor=executor, multiprocessing_context="fork"
    )
    for _ in range(2):
        found = []
        for batch in loader:
            found += batch.tolist()
            for index in (len(found) % SAMPLES, 3):
                assert dataset[index].tolist() == WANTED[index]
        assert found == WANTED
    loader.close()


@pytest.mark.cases(2)
@pytest.mark.parametrize("how", FOUND_BY_SEEKING)
def test_planning_reads_a_file_that_is_open_and_moves_nothing(how, tmp_path):
    rows = Rows(tmp_path / "rows", how, at_once=True)
    assert rows[0].tolist() == WANTED[0]
    data = FastDataModule.from_datasets(
        rows, rows, batch_size=8, options=LoaderOptions(executor="workers", num_workers=2)
    )
    assert sorted(read(data.train_dataloader())) == WANTED
    assert read(data.val_dataloader()) == WANTED
    assert rows[5].tolist() == WANTED[5]
    assert "forkserver" not in data.explain()
    data.teardown("fit")


@pytest.mark.parametrize("at_once", [False, True], ids=["on first use", "at once"])
def test_workers_that_come_later_have_positions_of_their_own(at_once, tmp_path):
    dataset = Rows(tmp_path / "rows", "unbuffered", at_once=at_once)
    loader = FastDataLoader(dataset, 8, num_workers=1, executor="workers")
    found = []
    for number, batch in enumerate(loader):
        found += batch.tolist()
        assert dataset[number].tolist() == WANTED[number]  # the training process opens it, too
        if number == 10:
            loader.set_workers(4)
    assert found == WANTED
    loader.close()


def test_a_worker_in_the_place_of_a_dead_one_has_positions_of_its_own(tmp_path):
    class Dying(Rows):
        def __getitem__(self, index):
            if index == 200 and not (tmp_path / "died").exists() and os.getpid() != training:
                (tmp_path / "died").touch()
                os._exit(9)
            return super().__getitem__(index)

    training = os.getpid()
    dataset = Dying(tmp_path / "rows", "unbuffered")
    loader = FastDataLoader(dataset, 8, num_workers=2, executor="workers")
    found = []

    def read():
        for number, batch in enumerate(loader):
            found.extend(batch.tolist())
            assert dataset[number].tolist() == WANTED[number]

    # What an open file has been read for cannot be compared.
    with pytest.warns(FastDataWarning, match="the new one may read other samples"):
        read()
    assert found == WANTED
    assert (tmp_path / "died").exists()
    loader.close()


def test_a_file_that_was_deleted_since_is_read_as_well(tmp_path):
    dataset = Rows(tmp_path / "rows", "unbuffered", at_once=True)
    dataset.path.unlink()
    loader = FastDataLoader(dataset, 8, num_workers=3, executor="workers")
    assert read(loader) == WANTED
    loader.close()


@pytest.mark.parametrize("more", [0, getattr(os, "O_NOFOLLOW", 0)], ids=["plain", "SQLite's"])
def test_positions_and_flags_stay_and_what_is_written_to_is_left_alone(tmp_path, more):
    path = tmp_path / "rows"
    path.write_bytes(bytes(100))
    descriptors = []
    for how in ("rb", "r+b", "ab", "wb"):
        other = path if how == "rb" else tmp_path / "other"
        other.touch()
        descriptors.append(
            os.open(other, {"rb": os.O_RDONLY, "r+b": os.O_RDWR}.get(how, os.O_WRONLY) | more)
        )
    os.lseek(descriptors[0], 42, os.SEEK_SET)
    ours = {each.descriptor: each for each in files_being_read()}
    assert descriptors[0] in ours
    assert not ours.keys() & set(descriptors[1:])
    twin = os.dup(descriptors[0])  # shares the position, as a fork's copy does
    open_anew([ours[descriptors[0]]])
    assert os.lseek(descriptors[0], 0, os.SEEK_CUR) == 42
    assert os.get_inheritable(descriptors[0]) is False
    os.lseek(twin, 5, os.SEEK_SET)
    assert os.lseek(descriptors[0], 0, os.SEEK_CUR) == 42
    for each in (*descriptors, twin):
        os.close(each)


def test_a_file_that_cannot_be_opened_anew_is_named(tmp_path, monkeypatch):
    path = tmp_path / "rows"
    path.write_bytes(bytes(100))
    with path.open("rb") as file:
        (ours,) = [each for each in files_being_read() if each.descriptor == file.fileno()]
        monkeypatch.setattr(os, "open", lambda *_: (_ for _ in ()).throw(PermissionError(13, "no")))
        with pytest.warns(UserWarning, match=f"(?s){path} is open.*open it on first use"):
            open_anew([ours])


@pytest.mark.parametrize("now", ["nothing", "a pipe", "another file"])
def test_a_descriptor_that_is_something_else_by_now_is_left_alone(tmp_path, now):
    """A thread may close a file during a fork, and what is opened next gets its number."""
    path, other = tmp_path / "rows", tmp_path / "other"
    path.write_bytes(bytes(100))
    other.write_bytes(bytes(100))
    descriptor = os.open(path, os.O_RDONLY)
    os.lseek(descriptor, 42, os.SEEK_SET)
    (ours,) = [each for each in files_being_read() if each.descriptor == descriptor]
    os.close(descriptor)
    makes = {
        "nothing": list,
        "a pipe": os.pipe,
        "another file": lambda: [os.open(other, os.O_RDONLY)],
    }
    opened = makes[now]()
    if opened and descriptor not in opened:
        os.dup2(opened[0], descriptor)
    open_anew([ours])
    if now == "a pipe":
        os.write(opened[1], b"whole")
        assert os.read(descriptor, 5) == b"whole"
    elif now == "another file":
        assert os.lseek(descriptor, 0, os.SEEK_CUR) == 0
    for each in opened:
        os.close(each)
