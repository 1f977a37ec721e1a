"""A dataset with a cache gives what it gives without one, and makes each sample once."""

from __future__ import annotations

import copy
import fcntl
import io
import itertools
import multiprocessing
import os
import pickle
import random
import shutil
import signal
import textwrap
import warnings
from pathlib import Path
from types import SimpleNamespace

import albumentations as A
import numpy as np
import pytest
import torch
from alike import alike
from caches.made import Made
from lightning.pytorch import Trainer
from misses import each
from PIL import ExifTags, Image, ImageOps
from PIL.PngImagePlugin import PngInfo
from programs import run_program
from torch.utils.data import (
    ConcatDataset,
    DataLoader,
    Dataset,
    IterableDataset,
    StackDataset,
    Subset,
)
from torchvision.transforms import v2

import lightning_fastdata as ld
from lightning_fastdata.caches import folders
from lightning_fastdata.errors import DatasetError, OptionsError
from lightning_fastdata.executors.columns import rows_of
from lightning_fastdata.tree import find_instances


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "data").mkdir()
    return tmp_path / "data"


def ragged(samples):
    return [sample["x"].sum().item() for sample in samples], [sample["y"] for sample in samples]


@pytest.mark.cases(3)
@pytest.mark.parametrize("varies", [False, True])
@pytest.mark.parametrize("executor", ["inline", "workers", "torch"])
def test_loaders_deliver_the_same_with_a_cache(tmp_path, folder, varies, executor):
    data = Made(folder, varies=varies)
    arguments = {"batch_size": 8, "collate_fn": ragged if varies else None, "executor": executor}
    arguments["num_workers"] = 0 if executor == "inline" else 2
    theirs = list(DataLoader(data, 8, collate_fn=arguments["collate_fn"]))
    cached = ld.CachedDataset(data, tmp_path / "cache")
    for _ in range(2):
        assert alike(list(ld.FastDataLoader(cached, **arguments)), theirs)
    assert cached.stored == len(data)
    data.forget()
    # In a later run nothing is made but what is compared.
    again = ld.CachedDataset(Made(folder, varies=varies), tmp_path / "cache")
    assert alike(list(ld.FastDataLoader(again, **arguments)), theirs)
    assert len(set(data.made())) <= 8


def test_each_sample_is_made_once(tmp_path, folder):
    data = Made(folder)
    cached = ld.CachedDataset(data, tmp_path / "cache")
    cached[0]  # opens the cache, which tries some
    data.forget()
    for index in [*range(1, 40), *range(40)]:
        assert alike(cached[index], {"x": torch.full((3, 4), float(index)), "y": index})
    assert sorted(data.made()) == list(range(1, 40))


@pytest.mark.parametrize("num_workers", [0, 2])
def test_fill_makes_what_is_missing_and_a_training_makes_nothing_more(
    tmp_path, folder, num_workers
):
    data = Made(folder)
    cached = ld.CachedDataset(data, tmp_path / "cache", transform=lambda _: 1 / 0)
    cached.fill(num_workers)
    assert cached.stored == len(data)
    data.forget()
    cached.fill(num_workers)
    later = ld.CachedDataset(data, tmp_path / "cache")
    assert alike([later[i] for i in range(40)], [Made(tmp_path)[i] for i in range(40)])
    # A run compares some with the dataset when it opens the cache.
    assert len(set(data.made())) <= 8


def test_fill_ends_where_no_more_finds_room(tmp_path, folder):
    data = Made(folder, 400, varies=True)
    cached = ld.CachedDataset(data, tmp_path / "cache", max_bytes=2000)
    cached.fill()
    assert 0 < cached.stored < 40
    assert max(data.made()[-32:]) < 100


class Wide(Made):
    """Samples of several thousand bytes."""

    def __getitem__(self, index):
        sample = super().__getitem__(index)
        return {**sample, "x": sample["x"].repeat(1, 100)}


@pytest.mark.parametrize("kind", [Made, Wide])
def test_a_complete_cache_of_rows_is_gathered(tmp_path, folder, kind):
    data = kind(folder)
    cached = ld.CachedDataset(data, tmp_path / "cache")
    assert rows_of(cached) is None
    theirs = list(DataLoader(data, 8))
    assert alike(list(ld.FastDataLoader(cached, 8)), theirs)
    loader = ld.FastDataLoader(ld.CachedDataset(data, tmp_path / "cache"), 8, num_workers="auto")
    assert loader.executor == "gather"
    assert alike(list(loader), theirs)
    part = Subset(ld.CachedDataset(data, tmp_path / "cache"), range(5, 21))
    part = ld.FastDataLoader(part, 8, num_workers="auto")
    assert part.executor == "gather"
    assert alike(list(part), list(DataLoader(Subset(data, range(5, 21)), 8)))
    # What runs on each sample is not left out.
    more = ld.CachedDataset(data, tmp_path / "cache", transform=lambda sample: sample["y"])
    assert rows_of(more) is None
    assert more[7] == 7


class Draws(Dataset):
    def __init__(self, how):
        self.how = how
        self.own = np.random.default_rng(3)
        self.numbers = itertools.count()
        self.compose = A.Compose([A.RandomBrightnessContrast(p=0.01)])
        self.flip = v2.Compose([v2.Identity(), v2.RandomHorizontalFlip(0.01)])

    def __len__(self):
        return 10

    def __getitem__(self, index):
        return {
            "torch": lambda: torch.rand(3),
            "numpy": lambda: np.random.rand(3),
            "random": random.random,
            "rarely": lambda: index if random.random() < 0.999 else -1,
            "own generator": lambda: self.own.random(3),
            "pipeline": lambda: self.compose(image=np.zeros((8, 8, 3), np.uint8))["image"],
            "torchvision": lambda: self.flip(torch.zeros(3, 8, 8)),
            "counts": lambda: next(self.numbers),
        }[self.how]()


HOW = ["torch", "numpy", "random", "rarely", "own generator", "pipeline", "torchvision", "counts"]


@each("how", HOW)
def test_random_samples_are_refused(tmp_path, how):
    with pytest.raises(DatasetError, match=r"Draws draws at random.*transform="):
        ld.CachedDataset(Draws(how), tmp_path)[0]


def test_the_user_may_say_that_samples_are_always_the_same(tmp_path):
    cached = ld.CachedDataset(Draws("rarely"), tmp_path, always_same=True)
    assert [cached[index] for index in range(10)] == list(range(10))


def _read_all(data, folder, barrier):
    barrier.wait()
    cached = ld.CachedDataset(data, folder)
    for index in range(len(cached)):
        cached[index]


@pytest.mark.parametrize("varies", [False, True])
def test_processes_that_begin_at_once_make_one_cache(tmp_path, folder, varies):
    context = multiprocessing.get_context("fork")
    barrier = context.Barrier(4)
    data = Made(folder, varies=varies)
    processes = [
        context.Process(target=_read_all, args=(data, tmp_path / "cache", barrier))
        for _ in range(4)
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
        assert process.exitcode == 0
    cached = ld.CachedDataset(data, tmp_path / "cache")
    assert cached.stored == len(data)
    assert all(alike(cached[index], data[index]) for index in range(len(data)))
    assert len(list((tmp_path / "cache").iterdir())) == 1


def _read_for_ever(cached, count, end):
    for number in itertools.count():
        cached[number % len(cached)]
        if number == count:
            end.send_bytes(b"read")


@pytest.mark.parametrize("varies", [False, True])
def test_a_killed_process_leaves_a_cache_that_is_right(tmp_path, folder, varies):
    data = Made(folder, count=300, varies=varies)
    context = multiprocessing.get_context("fork")
    for number in range(10):
        cached = ld.CachedDataset(data, tmp_path / "cache")
        ours, theirs = context.Pipe(duplex=False)
        process = context.Process(target=_read_for_ever, args=(cached, 31 * number, theirs))
        process.start()
        ours.recv_bytes()
        os.kill(process.pid, signal.SIGKILL)  # whatever it does now
        process.join()
    cached = ld.CachedDataset(data, tmp_path / "cache")
    assert all(alike(cached[index], data[index]) for index in range(len(data)))


@pytest.mark.parametrize("varies", [False, True])
def test_samples_that_find_no_room_are_made(tmp_path, folder, varies):
    data = Made(folder, varies=varies)
    stored = [0]
    for max_bytes in (700, None, 1500, 700, 10**6):  # None: as when it was made
        cached = ld.CachedDataset(data, tmp_path / "cache", max_bytes=max_bytes)
        assert all(alike(cached[index], data[index]) for index in range(40))
        stored.append(cached.stored)
    assert 0 < stored[1] == stored[2] < stored[3] == stored[4] < stored[5] == 40


@pytest.mark.parametrize("way", [copy.deepcopy, lambda it: pickle.loads(pickle.dumps(it))])
def test_a_copy_reads_the_same_cache(tmp_path, folder, way):
    data = Made(folder)
    cached = ld.CachedDataset(data, tmp_path / "cache")
    cached[1]
    assert alike(way(cached)[1], cached[1])
    assert alike(way(cached)[-1], data[39])
    for index in (40, -41):
        with pytest.raises(IndexError):
            way(cached)[index]


class Endless(IterableDataset):
    def __iter__(self):
        yield 1


@pytest.mark.parametrize(
    ("arguments", "error", "named"),
    [
        ({"dataset": Endless()}, DatasetError, "Endless has no length"),
        *(
            ({"max_bytes": value}, OptionsError, f"max_bytes is {value!r}")
            for value in (0, "1GB", float("nan"), True, 1.5)
        ),
        ({"key": 3}, OptionsError, "key is 3"),
        ({"key": b"a"}, OptionsError, "key is b'a'"),
        ({"folder": "a\0b"}, OptionsError, r"The place of a cache is 'a\\x00b'"),
        ({"transform": 3}, OptionsError, "transform is 3"),
        ({"key": "../x"}, OptionsError, r"key is '\.\./x'"),
        ({"key": ""}, OptionsError, "key is ''"),
    ],
)
def test_impossible_arguments_are_named(tmp_path, folder, arguments, error, named):
    with pytest.raises(error, match=named):
        ld.CachedDataset(**{"dataset": Made(folder), "folder": tmp_path, **arguments})


def test_numbers_may_be_of_numpy_and_those_of_workers_are_checked(tmp_path, folder):
    for most in (np.int64(10**6), 1e6):
        cached = ld.CachedDataset(Made(folder), tmp_path / str(most), max_bytes=most)
        cached.fill(np.int64(0))
        assert cached.stored == 40
    for number in ("auto", -1, 1.5, None):
        with pytest.raises(OptionsError, match="num_workers is "):
            cached.fill(number)


def test_a_folder_that_cannot_be_made_is_named(folder):
    with pytest.raises(OptionsError, match=r"/proc/nowhere.*LIGHTNING_FASTDATA_CACHE"):
        ld.CachedDataset(Made(folder), "/proc/nowhere")[0]


IN_MEMORY = """
import os, sys
sys.path.insert(0, {here!r})
from made import Made
import lightning_fastdata as ld
from lightning_fastdata.caches import folders
from pathlib import Path
folders._SHARED_MEMORY = Path({memory!r})
cached = ld.CachedDataset(Made({folder!r}), "ram")
loader = ld.FastDataLoader(cached, 8, num_workers=2)
list(loader), list(loader)
print(cached.folder.exists(), cached.stored, len(list(cached.folder.parent.parent.glob("of-*"))))
if {killed}:
    os.kill(os.getpid(), 9)
"""


@pytest.mark.cases(1)
@pytest.mark.skipif(not folders._SHARED_MEMORY.is_dir(), reason="needs /dev/shm")
def test_a_cache_in_memory_ends_with_its_processes(tmp_path, folder):
    memory = tmp_path / "shm"
    memory.mkdir()

    def run(killed):
        script = IN_MEMORY.format(
            here=str(Path(__file__).parent), memory=str(memory), folder=str(folder), killed=killed
        )
        return run_program("-c", textwrap.dedent(script))

    run(killed=True)
    (left,) = memory.glob("*/of-*")
    held = os.open(left, os.O_RDONLY)
    fcntl.flock(held, fcntl.LOCK_EX)  # until its last worker is gone
    os.close(held)
    done = run(killed=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["True", "40", "1"]
    assert [path.name for path in memory.glob("*/*")] == ["lock"]


def test_a_link_in_the_place_of_caches_in_memory_is_refused(tmp_path, monkeypatch):
    """It may have been put there by anybody, to have a cache written elsewhere."""
    (tmp_path / f"lightning_fastdata-ram-{os.getuid()}").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.setattr(folders, "_SHARED_MEMORY", tmp_path)
    folders._memory_root.cache_clear()
    with pytest.raises(OptionsError, match="it is no folder"):
        folders.cache_root("ram")
    assert list((tmp_path / "elsewhere").iterdir()) == []


def test_ranks_of_a_host_share_out_the_room_of_caches_in_memory(tmp_path, folder, monkeypatch):
    """Each has its own; a cache in a folder is one for all."""
    monkeypatch.setattr(folders, "_SHARED_MEMORY", tmp_path)
    monkeypatch.setattr(folders.shutil, "disk_usage", lambda _: SimpleNamespace(free=10_000))
    memory = SimpleNamespace(available_bytes=4_000)
    monkeypatch.setattr(folders, "read_host_memory", lambda: memory)
    own = tmp_path / f"lightning_fastdata-ram-{os.getuid()}" / "of-me" / "cache"
    rooms = [folders.room_bytes(each, 4) for each in (own, tmp_path / "all", Path("/"))]
    assert rooms == [250, 1000, 5000]
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    cached = ld.CachedDataset(Made(folder), tmp_path / "of-torchrun")
    assert cached.ranks == 4
    monkeypatch.delenv("LOCAL_WORLD_SIZE")
    # Lightning's own launcher sets no such variable, and its trainer knows.
    trainer = Trainer(accelerator="cpu", devices=2, strategy="ddp", logger=False)
    own = ld.CachedDataset(Made(folder), tmp_path / "own")
    for dataset, options in (
        (Made(folder), {"cache": tmp_path / "of-lightning"}),
        (own, {}),
        (ConcatDataset([Made(folder), own]), {}),
    ):
        own.ranks = 1
        data = ld.FastDataModule.from_datasets(dataset, num_workers=0, **options)
        data.trainer = trainer
        read = data.train_dataloader().dataset
        assert [each.ranks for each in find_instances(read, (ld.CachedDataset,))] == [2]


def test_what_its_process_removes_as_another_one_looks_at_it_is_no_error(tmp_path):
    folders._remove_if_free(tmp_path / "of-one-that-has-ended")


class Forms(Made):
    """Samples of one form, but for one that is not among those tried."""

    def __getitem__(self, index):
        sample = super().__getitem__(index)
        return {**sample, "x": sample["x"].long()} if index == 1 else sample


def test_a_sample_of_another_form_is_made_each_time(tmp_path, folder):
    data = Forms(folder)
    cached = ld.CachedDataset(data, tmp_path / "cache")
    for _ in range(2):
        assert all(alike(cached[index], data[index]) for index in range(40))
    assert cached.stored == 39
    assert cached.columns() is None


class Empty(Made):
    def __getitem__(self, index):
        return None, torch.empty(0)


def test_samples_without_bytes_are_kept(tmp_path, folder):
    cached = ld.CachedDataset(Empty(folder), tmp_path / "cache")
    cached.fill()
    assert cached.stored == 40
    assert alike(cached[3], (None, torch.empty(0)))


def saved(form, mode="RGB", **options):
    """Return a picture as it comes from a file of a form."""
    exif = Image.Exif()
    exif[ExifTags.Base.Orientation] = 6
    file = io.BytesIO()
    Image.effect_noise((7, 5), 50).convert(mode).save(file, form, exif=exif, **options)
    return Image.open(file).convert(mode)


def test_pictures_carry_what_they_did(tmp_path):
    text = PngInfo()
    text.add_itxt("place", "Köln")
    made = [
        saved("jpeg", icc_profile=b"colours", dpi=(72, 72), comment=b"behind"),
        saved("png", transparency=(1, 2, 3), pnginfo=text),
        saved("png", "L", transparency=7),
        saved("tiff", dpi=(300, 300)),
        saved("bmp"),
    ]
    cached = ld.CachedDataset(made, tmp_path, key="made")
    turned = ld.CachedDataset(made, tmp_path, key="made", transform=ImageOps.exif_transpose)
    for _ in range(2):
        assert [cached[index] for index in range(5)] == made
        assert [turned[index].size for index in range(5)] == 4 * [(5, 7)] + [(7, 5)]
    assert cached.stored == 5
    assert cached[1].info["transparency"] == (1, 2, 3)
    assert cached[3].info["dpi"] == (300, 300)


def test_a_cache_of_another_length_is_refused(tmp_path, folder):
    ld.CachedDataset(Made(folder), tmp_path, key="mine").fill()
    with pytest.raises(DatasetError, match=r"40 samples in format \d, not 41.*Delete the folder"):
        ld.CachedDataset(Made(folder, 41), tmp_path, key="mine")[0]


@pytest.mark.skipif(not os.path.isdir("/proc/self/fd"), reason="needs /proc (Linux)")
def test_a_cache_that_is_no_longer_held_leaves_no_file_of_samples_open(tmp_path, folder):
    def read():
        assert ld.CachedDataset(Made(folder), tmp_path / "cache")[0]["y"] == 0
        return len(os.listdir("/proc/self/fd"))

    assert read() == read() == read()


class Broken(Dataset):
    """A dataset of which some samples cannot be read."""

    def __init__(self, broken, error=ValueError):
        self.broken, self.error = broken, error

    def __len__(self):
        return 100

    def __getitem__(self, index):
        if index in self.broken:
            raise self.error(f"sample {index} is broken")
        return torch.tensor(index)


@pytest.mark.parametrize("error", [ValueError, IndexError])
@pytest.mark.parametrize("broken", [(0,), (99,), range(60)])
def test_a_sample_that_cannot_be_read_fails_at_its_own_index_alone(tmp_path, broken, error):
    data = Broken(broken, error)
    for _ in range(2):  # the cache is made, and found
        cached = ld.CachedDataset(data, tmp_path)
        for index in (*set(range(100)).difference(broken), broken[0]):
            if index in broken:
                with pytest.raises(error, match=f"sample {index} is broken"):
                    cached[index]
            else:
                assert cached[index] == index


def test_bad_samples_are_replaced_beside_a_cache(tmp_path):
    cached = ld.CachedDataset(Broken((99,)), tmp_path)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it says that one was replaced
        batches = list(ld.FastDataLoader(cached, 10, on_bad_sample="replace"))
    assert len(torch.cat(batches)) == 100
    assert torch.equal(torch.cat(batches)[:99], torch.arange(99))


def test_a_cache_of_samples_none_of_which_can_be_read_names_those_that_were_tried(tmp_path):
    cached = ld.CachedDataset(Broken(range(100), IndexError), tmp_path)
    with pytest.raises(DatasetError, match=r"\[0, 14, .*Sample 0 raised IndexError: sample 0 is"):
        list(cached)


class Labels(Dataset):
    """A dataset that a program may relabel."""

    def __init__(self):
        self.labels = list(range(20))

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, index):
        return self.labels[index]


@pytest.mark.parametrize(
    "read",
    [
        lambda cached: [cached[index] for index in range(20)],
        lambda cached: torch.cat(list(DataLoader(cached, 4, num_workers=1))).tolist(),
    ],
)
def test_a_change_before_the_first_sample_is_seen_without_a_loader_of_this_package(tmp_path, read):
    data = Labels()
    cached = ld.CachedDataset(data, tmp_path)
    data.labels[5] = -1
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a worker warns in its own process
        assert read(cached) == data.labels
    assert cached.stored == 0
    assert read(ld.CachedDataset(Labels(), tmp_path)) == list(range(20))


@pytest.mark.parametrize("varies", [False, True])
def test_a_cache_is_as_long_as_its_dataset(tmp_path, folder, varies):
    data = Made(folder, varies=varies)
    cached = ld.CachedDataset(data, tmp_path / "cache")
    cached.fill()
    assert (cached.columns() is None) == varies
    for count in (43, 37):
        data.count = count
        assert cached.columns() is None
        assert alike(list(DataLoader(cached, None)), list(DataLoader(data, None)))
        assert alike(cached[-1], data[count - 1])
        with pytest.raises(IndexError, match=f"the dataset has {count}"):
            cached[43]


@each("index", [2.5, 2.0, "2", None])
def test_what_is_no_whole_number_is_no_index(tmp_path, folder, index):
    with pytest.raises(TypeError, match="interpreted as an integer"):
        ld.CachedDataset(Made(folder), tmp_path / "cache")[index]


@each(
    "ordered",
    [
        lambda: ld.Mixture({"one": list(range(20)), "other": list(range(100, 110))}),
        lambda: ld.pack([[number] * 3 for number in range(20)], tokens=6),
    ],
)
def test_what_has_an_order_of_its_own_is_refused_in_any_wrapper(tmp_path, ordered):
    wrapped = Subset(ordered(), range(8)), ConcatDataset([ordered()]), StackDataset(one=ordered())
    for data in (ordered(), *wrapped):
        with pytest.raises(DatasetError, match="other samples at each index in each epoch"):
            ld.CachedDataset(data, tmp_path)


def itself(cached):
    return cached


@pytest.mark.parametrize(("num_workers", "way"), [(0, itself), (2, itself), (0, copy.deepcopy)])
def test_a_file_of_many_that_is_replaced_is_read_anew_and_told(tmp_path, num_workers, way):
    class Numbers(Dataset):
        def __init__(self):
            self.paths = [str(tmp_path / f"{number}.npy") for number in range(40)]

        def __len__(self):
            return len(self.paths)

        def __getitem__(self, index):
            return int(np.load(self.paths[index]))

    for number in range(40):
        np.save(tmp_path / f"{number}.npy", number)
    data = Numbers()
    cached = way(ld.CachedDataset(data, tmp_path))
    loader = ld.FastDataLoader(cached, 8, num_workers=num_workers)
    assert torch.cat([*loader, *loader]).tolist() == [*range(40), *range(40)]
    np.save(tmp_path / "other.npy", np.full((), 99))
    (tmp_path / "other.npy").replace(data.paths[7])
    os.utime(data.paths[7], ns=(1, 1))  # a clock may not have moved on
    with pytest.warns(ld.FastDataWarning, match=r"Numbers \(.*7\.npy is no longer as it was"):
        assert torch.cat(list(loader)).tolist() == [*range(7), 99, *range(8, 40)]
    with warnings.catch_warnings():
        warnings.simplefilter("error", ld.FastDataWarning)
        assert torch.cat(list(loader)).tolist() == [*range(7), 99, *range(8, 40)]


def forty(labels, change):
    """Return a dataset whose class closes over its labels, and what changes them."""

    class Closed(Dataset):
        def __len__(self):
            return 40

        def __getitem__(self, index):
            return labels[index]

    return Closed(), change


def closing(_folder):
    labels = list(range(40))
    return forty(labels, lambda _: labels.__setitem__(5, -1))


def patching(_folder):
    return forty(list(range(40)), lambda data: setattr(type(data), "__getitem__", negative))


def negative(_self, index):
    return -index


class Held(Dataset):
    def __init__(self, labels, path=None):
        self.labels, self.path, self.opened = labels, path, None

    def __len__(self):
        return 40

    def __getitem__(self, index):
        if self.path and not self.opened:
            self.opened = open(self.path, "rb")  # noqa: SIM115
        return int(self.labels[index])


def writing_to_its_own_map(folder):
    np.save(folder / "labels.npy", np.arange(40))
    labels = np.load(folder / "labels.npy", mmap_mode="c")
    return Held(labels), lambda _: labels.__setitem__(5, -1)


def having_opened_a_file(_folder):
    return Held(list(range(40)), __file__), lambda data: data.labels.__setitem__(5, -1)


def having_opened_a_file_in_a_subset(_folder):
    data = Subset(Held(list(range(40)), __file__), range(40))
    return data, lambda data: data.dataset.labels.__setitem__(5, -1)


CHANGES = [closing, patching, writing_to_its_own_map]
CHANGES += [having_opened_a_file, having_opened_a_file_in_a_subset]


@each("made", CHANGES)
def test_a_change_is_seen_wherever_it_is(folder, made):
    data, change = made(folder)
    cached = ld.CachedDataset(data, folder / "cache")
    assert cached[0] == 0
    loader = ld.FastDataLoader(cached, 8)
    with warnings.catch_warnings():
        warnings.simplefilter("error", ld.FastDataWarning)
        assert torch.cat([*loader, *loader]).tolist() == [*range(40), *range(40)]
    assert cached.stored == 40
    change(data)
    with pytest.warns(ld.FastDataWarning, match="has changed"):
        assert torch.cat(list(loader)).tolist() == [data[index] for index in range(40)]


class DrawsRarely(Dataset):
    """Its sixth sample is drawn, as one in the place of a file that cannot be read."""

    def __init__(self, generator):
        self.generator = generator

    def __len__(self):
        return 40

    def __getitem__(self, index):
        return self.generator.randrange(10**9) if index == 5 else index


@each("generator", [random, random.Random(3)])
def test_a_sample_that_was_drawn_is_not_kept(tmp_path, generator):
    data = DrawsRarely(generator)
    cached = ld.CachedDataset(data, tmp_path)
    loader, plain = ld.FastDataLoader(cached, 8), ld.FastDataLoader(data, 8)
    found = [torch.cat(list(loader)).tolist() for _ in range(3)]
    assert found == [torch.cat(list(plain)).tolist() for _ in range(3)]
    assert len({epoch[5] for epoch in found}) == 3
    assert cached.stored == 39
    kept = ld.CachedDataset(data, tmp_path, always_same=True)
    assert kept[5] == kept[5]


def test_a_folder_that_is_removed_meanwhile_leaves_what_was_kept(tmp_path, folder):
    cached = ld.CachedDataset(Wide(folder), tmp_path / "cache")
    cached.fill()
    wanted = list(DataLoader(Wide(folder), 8))
    shutil.rmtree(tmp_path / "cache")
    assert alike(list(ld.FastDataLoader(cached, 8, executor="gather")), wanted)
