"""Whatever happens to the files of a cache, batches are the dataset's, or an error names it.

The oracle is torch's DataLoader over the dataset without a cache.
"""

from __future__ import annotations

import errno
import math
import os
import shutil
import stat
import warnings
from pathlib import Path

import pytest
import torch
from alike import alike
from hypothesis import example, given
from hypothesis import strategies as st
from misses import each
from thoroughness import max_examples
from torch.utils.data import DataLoader, Dataset

from lightning_fastdata import CachedDataset, FastDataLoader, FastDataModule
from lightning_fastdata.errors import DatasetError, FastDataError, FastDataWarning, OptionsError

COUNT = 40
PAGE_BYTES = 64


class Rows(Dataset):
    """Samples of one form, which are columns."""

    def __len__(self):
        return COUNT

    def __getitem__(self, index):
        return torch.full((5,), float(index + 1)), index


class Mixed(Rows):
    """Samples of several forms, which are records."""

    def __getitem__(self, index):
        return {"x": torch.full((index % 7,), float(index)), "of": (f"name{index}", [b"\1" * 3])}


def as_list(samples):
    return samples


DATASETS = {"columns": Rows(), "records": Mixed()}
COLLATE = {"columns": None, "records": as_list}
WANTED = {kind: list(DataLoader(DATASETS[kind], 8, collate_fn=COLLATE[kind])) for kind in DATASETS}
WORKERS = {"inline": 0, "gather": 0, "workers": 1, "torch": 1}


def read(kind, root, executor):
    """Read two epochs through a loader, and hold them against torch's; return the cache."""
    cached = CachedDataset(DATASETS[kind], root)
    loader = FastDataLoader(
        cached, 8, collate_fn=COLLATE[kind], executor=executor, num_workers=WORKERS[executor]
    )
    for _ in range(2):
        assert alike(list(loader), WANTED[kind])
    return cached


@pytest.fixture(scope="module")
def complete(tmp_path_factory):
    """A complete cache of each kind: the folder in which it has its own."""
    roots = {kind: tmp_path_factory.mktemp(kind) for kind in DATASETS}
    for kind, root in roots.items():
        read(kind, root, "inline")
    return roots


def copied(root, place):
    shutil.rmtree(place, ignore_errors=True)
    shutil.copytree(root, place)
    (folder,) = (path for path in place.iterdir() if path.is_dir())
    return folder


def damage(path, how, at, bit):
    """Damage a file; ``at``: where, from 0 to 1."""
    data = bytearray(path.read_bytes())
    place = min(int(at * len(data)), len(data) - 1)
    if how == "flip":
        data[place] ^= 1 << bit
    elif how == "cut":
        del data[place:]
    elif how == "zeros":
        data[place : place + 16 * (bit + 1)] = bytes(len(data[place : place + 16 * (bit + 1)]))
    elif how == "more":
        data += bytes(data[place:])
    elif how == "moved":  # as a disk that writes a block elsewhere
        data[place:] = data[place // 2 : place // 2 + len(data) - place]
    path.unlink()
    if how != "lost":
        path.write_bytes(data)


def holds(kind, root, folder, executor):
    """The law; what was damaged is made again."""
    refused = None
    try:
        read(kind, root, executor)
    except FastDataError as error:
        refused = str(error)
    if refused and executor == "gather" and "complete cache" in refused:
        # It makes no sample itself; another executor does.
        read(kind, root, "inline")
        read(kind, root, executor)
    elif refused:
        assert str(folder) in refused
        assert "Delete the folder" in refused


DAMAGE = st.tuples(
    st.sampled_from(["flip", "flip", "flip", "cut", "zeros", "more", "moved", "lost"]),
    st.floats(0, 1),
    st.integers(0, 7),
)


@pytest.mark.parametrize(
    ("kind", "executor"), [("columns", "inline"), ("columns", "gather"), ("records", "inline")]
)
@max_examples(75)
@example(what=[(0, ("cut", 0.5, 0))])  # the samples as rows, or the index
@example(what=[(1, ("cut", 0.5, 0))])  # the index, or the manifest
@example(what=[(2, ("cut", 0.5, 0))])  # the manifest, or the samples as records
@example(what=[(0, ("flip", 0.5, 0))])
@example(what=[(2, ("flip", 0.5, 0))])
@given(what=st.lists(st.tuples(st.integers(0, 3), DAMAGE), min_size=1, max_size=2))
def test_no_damaged_byte_reaches_a_batch(complete, kind, executor, what):
    place = complete[kind].with_name(f"{kind}-{executor}")
    folder = copied(complete[kind], place)
    files = sorted(path for path in folder.iterdir() if path.stat().st_size)
    for number, (how, at, bit) in what:
        path = files[number % len(files)]
        if path.exists() and path.stat().st_size:
            damage(path, how, at, bit)
    holds(kind, place, folder, executor)


# (torch waits for five seconds for a worker that has raised an error.)
FROM_WORKERS = [
    ("columns", "workers", "*.bin", "flip"),
    ("columns", "torch", "*.bin", "flip"),
    ("records", "workers", "*.bin", "cut"),
    ("records", "torch", "*.bin", "flip"),
    ("columns", "workers", "manifest.json", "flip"),
]


@each(("kind", "executor", "file", "how"), FROM_WORKERS)
def test_no_damaged_byte_comes_from_workers(tmp_path, complete, kind, executor, file, how):
    folder = copied(complete[kind], tmp_path / "copy")
    for path in folder.glob(file):
        damage(path, how, 0.5 if path.name != "index.bin" else 0.3, 3)
        if how == "cut":
            break
    holds(kind, tmp_path / "copy", folder, executor)


def mixed_pages(old, new, chosen):
    """Return a file of which the disk has some pages as they are, and others as they were."""
    pages = []
    for number in range(math.ceil(len(new) / PAGE_BYTES)):
        at = number * PAGE_BYTES
        was = old[at : at + PAGE_BYTES].ljust(len(new[at : at + PAGE_BYTES]), b"\0")
        pages.append(was if chosen >> number % 64 & 1 else new[at : at + PAGE_BYTES])
    return b"".join(pages)


@pytest.mark.parametrize("kind", DATASETS)
@max_examples(36)
@given(
    order=st.permutations(range(COUNT)),
    before=st.integers(1, COUNT - 1),
    after=st.integers(1, COUNT),
    stale=st.lists(st.integers(0, 2**64 - 1), min_size=3, max_size=3),
    later=st.permutations(range(COUNT)),
)
def test_a_cache_of_pages_of_two_moments_is_believed_in_nothing(
    tmp_path_factory, kind, order, before, after, stale, later
):
    """So power loss leaves one that fills, or a copy of it: some pages are older than others."""
    root = tmp_path_factory.mktemp("c")
    cached = CachedDataset(DATASETS[kind], root)
    for index in order[:before]:
        cached[index]
    files = sorted(cached.folder.glob("*.bin"))
    old = [path.read_bytes() for path in files]
    for index in order[: before + after]:
        cached[index]
    for path, was, chosen in zip(files, old, stale, strict=False):
        path.write_bytes(mixed_pages(was, path.read_bytes(), chosen))
    again = CachedDataset(DATASETS[kind], root)
    for _ in range(2):
        for index in later:  # what is missing is written in between
            assert alike(again[index], DATASETS[kind][index])
    assert again.stored == COUNT


FULL = [("columns", "inline", 0), ("records", "inline", 0), ("records", "inline", 7)]
FULL += [("columns", "workers", 7), ("records", "torch", 7)]


@each(("kind", "executor", "room"), FULL)
def test_a_disk_that_is_full_changes_no_batch(tmp_path, monkeypatch, kind, executor, room):
    written, true_write = [], os.pwrite

    def pwrite(*arguments):
        written.append(1)
        if len(written) > room:
            raise OSError(28, "No space left on device")
        return true_write(*arguments)

    monkeypatch.setattr(os, "pwrite", pwrite)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        cached = read(kind, tmp_path, executor)
    assert cached.stored < COUNT
    if executor == "inline":
        assert any("No space left" in str(each.message) for each in told)


def file_above(root, _folder):
    shutil.rmtree(root)
    root.write_text("")


def linked(_root, folder):
    shutil.move(folder, folder.with_name("elsewhere"))
    folder.symlink_to("elsewhere")


def damaged_manifest(_root, folder):
    damage(folder / "manifest.json", "flip", 0.5, 0)


def cut_index(_root, folder):
    damage(folder / "index.bin", "cut", 0.5, 0)


def of_other_samples(root, folder):
    """Kept before a function changed that the dataset does not hold."""
    other = {Rows: Mixed, Mixed: Rows}[type(root.dataset)]()
    shutil.rmtree(folder)
    cached = CachedDataset(other, root, key=folder.name.removeprefix("key-"))
    for index in range(COUNT):
        cached[index]


class Place(type(Path())):
    """A folder, and whose cache it has."""

    dataset: object


UNUSABLE = [file_above, linked, damaged_manifest, cut_index, of_other_samples]
OWNERS = [Rows(), Mixed()]


def cache_in(root, owner, *, optional=False):
    cached = CachedDataset(owner, root, key="k")
    cached.optional = optional
    return cached


def all_of(data, *, looked_at=False):
    if looked_at:
        assert str(data.folder) in data.explain()
    return [data[index] for index in range(COUNT)]


@each("owner", OWNERS)
@each("break_it", UNUSABLE)
def test_a_cache_that_cannot_be_used_is_one_error_that_names_it(tmp_path, owner, break_it):
    root, cached = broken(tmp_path, owner, break_it)
    with pytest.raises(FastDataError, match=f"{cached.folder}.*(Delete|[Nn]ame another)") as told:
        all_of(cache_in(root, owner))
    assert isinstance(told.value, DatasetError | OptionsError)


def test_nobody_is_told_to_delete_a_cache_that_may_not_be_written(tmp_path, monkeypatch):
    all_of(cache_in(tmp_path, Rows()))

    def refused(path, *_, **__):
        raise PermissionError(errno.EROFS, "Read-only file system", str(path))

    monkeypatch.setattr("numpy.memmap", refused)  # root may write anywhere
    with pytest.raises(DatasetError, match=r"Read-only.*copy it to a folder") as told:
        all_of(cache_in(tmp_path, Rows()))
    assert "Delete" not in str(told.value)


@each("break_it", UNUSABLE)
@each("looked_at", [False, True])
def test_without_a_cache_that_is_optional_samples_are_made_and_that_is_said(
    tmp_path, break_it, looked_at
):
    root, _ = broken(tmp_path, Mixed(), None)
    cached = cache_in(root, Mixed(), optional=True)
    break_it(root, cached.folder)  # after it was decided to use it
    with pytest.warns(FastDataWarning, match="no cache can be used") as told:
        found = all_of(cached, looked_at=looked_at)
    assert alike(found, all_of(Mixed()))
    assert len(told) == 1


def broken(tmp_path, owner, break_it):
    """Return a root, and a complete cache in it to which something has happened."""
    root = Place(tmp_path / "root")
    root.dataset = owner
    cached = cache_in(root, owner)
    cached.fill()
    if break_it is not None:
        break_it(root, cached.folder)
    return root, cached


class Odd(Rows):
    """A sample is of a kind that cannot be kept."""

    def __getitem__(self, index):
        return super().__getitem__(index) if index != 5 else object


def test_a_sample_that_cannot_be_kept_ends_no_training_that_has_not_asked_for_it(tmp_path):
    cached = cache_in(tmp_path, Odd(), optional=True)
    with pytest.warns(FastDataWarning, match="at sample|as a sample"):
        assert alike(all_of(cached), all_of(Odd()))
    with pytest.raises(DatasetError, match="cannot be cached"):
        cache_in(tmp_path, Odd())[5]


@each("owner", OWNERS)
@each("whose", ["given to another", "seen by another"])
def test_a_folder_of_another_user_is_refused_before_anything_is_written(
    tmp_path, monkeypatch, owner, whose
):
    root, cached = broken(tmp_path, owner, None)
    user = os.getuid()
    if whose == "given to another":
        if user:
            pytest.skip("only root gives a folder to somebody else")
        os.chown(cached.folder, 65534, 65534)
    else:
        monkeypatch.setattr(os, "getuid", lambda: user + 1)
    cached.folder.chmod(0o777)
    before = {path: path.stat().st_mtime_ns for path in cached.folder.iterdir()}
    with pytest.raises(OptionsError, match=f"{cached.folder} belongs to user"):
        cache_in(root, owner)
    assert {path: path.stat().st_mtime_ns for path in cached.folder.iterdir()} == before


@each("owner", OWNERS)
def test_no_other_user_can_open_the_folder(tmp_path, owner):
    root, cached = broken(tmp_path, owner, None)
    cached.folder.chmod(0o755)
    all_of(cache_in(root, owner))
    assert stat.S_IMODE(cached.folder.stat().st_mode) == 0o700


NO_PLACES = ["s3://bucket/x", "gs://b", "file:///tmp/x", "hf://datasets/x", Path("s3://bucket/x")]
NO_PLACES += ["", "atuo", "Auto", "disc", "DISK", "dsik", "rma", "RAM", "ram ", True, 3, ["disk"]]
MAKERS = [
    lambda folder: CachedDataset(Rows(), folder),
    lambda folder: FastDataModule.from_datasets(Rows(), cache=folder),
]


@each("make", MAKERS)
@each("folder", NO_PLACES)
def test_what_is_no_place_of_this_machine_is_refused(tmp_path, monkeypatch, make, folder):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(OptionsError, match=r"The place of a cache is .*'disk', 'ram'"):
        make(folder)
    assert list(tmp_path.iterdir()) == []


@each("folder", ["c", "data", "./atuo", Path("disc"), "kept/auto", "photos-1"])
def test_folders_of_other_names_are_used(tmp_path, monkeypatch, folder):
    monkeypatch.chdir(tmp_path)
    all_of(CachedDataset(Rows(), folder))
    assert Path(folder).is_dir()


def test_an_address_in_the_environment_is_refused(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("LIGHTNING_FASTDATA_CACHE", "s3://bucket/x")
    with pytest.raises(
        OptionsError, match=r"The place of a cache is .*s3:.* LIGHTNING_FASTDATA_CACHE"
    ):
        CachedDataset(Rows(), "disk")


def test_auto_is_for_data_modules():
    FastDataModule.from_datasets(Rows(), cache="auto")
    with pytest.raises(OptionsError, match=r"'\./auto', if a folder of that name is meant"):
        CachedDataset(Rows(), "auto")


def test_without_a_home_the_variable_is_named(monkeypatch):
    for name in ("LIGHTNING_FASTDATA_CACHE", "XDG_CACHE_HOME", "HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(os, "getuid", lambda: 54321)  # of no entry in the list of users
    with pytest.raises(OptionsError, match="Set LIGHTNING_FASTDATA_CACHE"):
        CachedDataset(Rows(), "disk")
