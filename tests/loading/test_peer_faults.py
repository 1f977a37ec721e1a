"""What other loaders are known to get wrong, as laws that every executor keeps."""

from __future__ import annotations

import multiprocessing
import os
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch.utils.data import DataLoader, Dataset, default_collate
from torchvision.datasets import ImageFolder
from torchvision.transforms import v2

from lightning_fastdata.errors import DatasetError
from lightning_fastdata.images.folder import FastImageFolder
from lightning_fastdata.loading.loader import FastDataLoader

torch.set_num_threads(1)
ALL = ("inline", "workers", "sidecar")
SIDE = ("workers", "sidecar")
PICTURES = 18


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """18 pictures without a black pixel, of three classes and many sizes."""
    rng = np.random.default_rng(0)
    for number in range(PICTURES):
        where = tmp_path / "pictures" / f"class{number % 3}"
        where.mkdir(parents=True, exist_ok=True)
        coarse = rng.integers(90, 250, (7, 9, 3), np.uint8)
        size = (60 + 7 * number, 50 + 5 * number)
        Image.fromarray(coarse).resize(size, Image.Resampling.BICUBIC).save(
            where / f"{number:02d}.jpg", quality=92, subsampling="4:2:0"
        )
    return tmp_path / "pictures"


def pictures(folder: Path, **how: Any) -> FastImageFolder:
    return FastImageFolder(folder, **{"size": 32, "horizontal_flip": 0.5, "seed": 4, **how})


def loader_of(dataset: Any, executor: str, **how: Any) -> FastDataLoader:
    settings = {"batch_size": 3, "num_workers": 2, "executor": executor, **how}
    return FastDataLoader(dataset, **settings)


def truncated(data: bytes) -> bytes:
    return data[: len(data) // 2]


def garbled(data: bytes) -> bytes:
    scan = data.index(b"\xff\xda") + 14
    noise = np.random.default_rng(1).integers(0, 255, 60, np.uint8).tobytes()
    return data[: scan + 40] + noise + data[scan + 100 :]


def emptied(data: bytes) -> bytes:
    return b""


def a_web_page(data: bytes) -> bytes:
    return b"<html>404 Not Found</html>"


def read_on(epoch: Any) -> tuple[list[Any], list[Exception]]:
    """Read an epoch to its end, past every error."""
    batches, errors = [], []
    while True:
        try:
            batches.append(next(epoch))
        except StopIteration:
            return batches, errors
        except Exception as error:
            errors.append(error)


@pytest.mark.parametrize("executor", ALL)
@pytest.mark.parametrize("damage", [truncated, garbled, emptied, a_web_page])
def test_a_damaged_picture_is_named_and_costs_its_batch_alone(folder, executor, damage) -> None:
    data = pictures(folder)
    path = Path(data.samples[7][0])
    good = path.read_bytes()
    path.write_bytes(damage(good))
    loader = loader_of(data, executor, persistent_workers=True)
    for _ in range(2):
        batches, errors = read_on(iter(loader))
        assert len(batches) == PICTURES // 3 - 1
        assert all(int(images.min()) > 0 for images, _ in batches)  # nothing came out black
        [error] = errors
        assert isinstance(error, DatasetError)
        assert str(path) in str(error)
    path.write_bytes(good)
    assert len(list(loader)) == PICTURES // 3
    loader.close()


class Faulty(Dataset):
    """A user's own dataset whose transform fails for one sample."""

    def __init__(self, error: Exception) -> None:
        self.error = error

    def __len__(self) -> int:
        return 24

    def __getitem__(self, index: int) -> torch.Tensor:
        if index == 10:
            raise self.error
        return torch.full((4,), index)


class Awkward(Exception):
    """An exception that cannot be made again from its arguments, nor pickled."""

    def __init__(self, code: int, *, where: str) -> None:
        super().__init__(f"code {code} at {where}")
        self.lock = threading.Lock()


class FaultyAndAwkward(Faulty):
    def __init__(self) -> None:
        self.error = None

    def __getitem__(self, index: int) -> torch.Tensor:
        if index == 10:
            raise Awkward(7, where="the licence server")
        return super().__getitem__(index)


FAULTS = {
    "value": (lambda: Faulty(ValueError("bad box")), "bad box"),
    "key": (lambda: Faulty(KeyError("label")), "label"),
    "stop": (lambda: Faulty(StopIteration("no more")), "no more"),
    "awkward": (FaultyAndAwkward, "code 7 at the licence server"),
}


@pytest.mark.parametrize("executor", ALL)
@pytest.mark.parametrize(
    ("fault", "persistent"),
    [("value", False), ("value", True), ("key", True), ("stop", False), ("awkward", True)],
)
def test_a_transform_that_raises_is_told_with_its_sample_and_hangs_nothing(
    executor, fault, persistent
) -> None:
    make, said = FAULTS[fault]
    loader = loader_of(make(), executor, batch_size=4, persistent_workers=persistent)
    for _ in range(3):
        epoch = iter(loader)
        seen = [next(epoch), next(epoch)]
        with pytest.raises(Exception, match=said) as raised:
            next(epoch)
        assert not isinstance(raised.value, StopIteration)  # it would end the epoch
        told = "\n".join([str(raised.value), *getattr(raised.value, "__notes__", [])])
        assert "sample 10" in told
        seen += epoch
        assert torch.cat(seen)[:, 0].tolist() == [*range(8), *range(12, 24)]
    loader.close()


class Plain(Dataset):
    def __init__(self, length: int, start: int = 0, side: int = 40) -> None:
        self.length, self.start, self.side = length, start, side

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        value = self.start + index
        return torch.full((self.side, self.side), value, dtype=torch.int32), value


def failing_collate(samples: list[Any]) -> Any:
    if samples[0][1] == 6:
        raise RuntimeError("cannot stack these")
    return default_collate(samples)


@pytest.mark.parametrize("executor", ALL)
def test_a_collate_function_that_raises_hangs_nothing(executor) -> None:
    loader = loader_of(Plain(15), executor, collate_fn=failing_collate, persistent_workers=True)
    for _ in range(2):
        batches, errors = read_on(iter(loader))
        assert [labels.tolist() for _, labels in batches] == [
            [i, i + 1, i + 2] for i in (0, 3, 9, 12)
        ]
        assert ["cannot stack these" in str(error) for error in errors] == [True]
    loader.close()


@pytest.mark.parametrize("executor", ALL)
@pytest.mark.parametrize("persistent", [False, True])
def test_what_is_kept_of_a_batch_outlives_epochs_and_the_loader(executor, persistent) -> None:
    loader = loader_of(Plain(60), executor, batch_size=4, persistent_workers=persistent)
    kept = []
    for _ in range(3):
        for images, labels in loader:
            kept.append((images[1:], images[2].numpy(), labels.tolist()))
    loader.close()
    del loader, images, labels
    assert len(kept) == 45
    for rows, array, values in kept:
        assert rows[:, 5, 5].tolist() == values[1:]
        assert (rows.amin((1, 2)) == rows.amax((1, 2))).all()
        assert (array == values[2]).all()


@pytest.mark.parametrize("executor", SIDE)
def test_batches_that_are_kept_take_no_open_files(executor) -> None:
    loader = loader_of(Plain(900), executor, batch_size=2)
    kept, counts = [], []
    for batch in loader:
        kept.append(batch)
        counts.append(len(os.listdir("/proc/self/fd")))
    # Beyond a few slots that the pool opens while it grows; torch's workers take one a tensor.
    assert counts[-1] <= counts[100] < counts[0] + 40
    assert [int(labels[0]) for _, labels in kept] == list(range(0, 900, 2))


@pytest.mark.parametrize("executor", SIDE)
@pytest.mark.parametrize("finished", [False, True])
def test_iterators_made_again_leave_nothing_behind(executor, finished) -> None:
    loader = loader_of(Plain(12), executor)

    def held() -> tuple[int, ...]:
        epoch = iter(loader)
        batches = list(epoch) if finished else [next(epoch)]
        assert batches[0][1].tolist() == [0, 1, 2]
        del epoch, batches
        mappings = Path("/proc/self/maps").read_text().count("memfd")
        children = len(multiprocessing.active_children())
        return len(os.listdir("/proc/self/fd")), mappings, threading.active_count(), children

    first = [held() for _ in range(3)]
    last = [held() for _ in range(9)]
    assert max(last[-3:]) <= max(first)


class Uneven(Plain):
    def __getitem__(self, index: int) -> Any:
        if index % 7 == 0:
            time.sleep(0.03)
        return super().__getitem__(index)


@pytest.mark.parametrize("executor", SIDE)
@pytest.mark.parametrize("workers", [2, 3])
def test_slow_samples_change_neither_the_order_nor_the_batches(executor, workers) -> None:
    loader = loader_of(Uneven(100), executor, num_workers=workers, batch_size=6)
    labels = [batch.tolist() for _, batch in loader]
    assert labels == [list(range(i, min(100, i + 6))) for i in range(0, 100, 6)]


@pytest.mark.parametrize("executor", ALL)
@pytest.mark.parametrize(("workers", "batch_size"), [(1, 4), (3, 4), (2, 7)])
def test_crops_are_uint8_and_depend_on_the_sample_alone(
    folder, executor, workers, batch_size
) -> None:
    data = pictures(folder)
    wanted = {}
    for epoch in range(2):
        data.set_epoch(epoch)
        wanted[epoch] = [data[i][0] for i in range(PICTURES)]
    order = torch.randperm(PICTURES, generator=torch.Generator().manual_seed(workers)).tolist()
    loader = loader_of(
        pictures(folder), executor, num_workers=workers, batch_size=batch_size, sampler=order
    )
    for epoch in range(2):
        images = torch.cat([images for images, _ in loader])
        assert images.dtype == torch.uint8
        assert torch.equal(images, torch.stack([wanted[epoch][i] for i in order]))
    assert not torch.equal(wanted[0][0], wanted[1][0])


@pytest.mark.parametrize("workers", [1, 2, 3])
def test_torchvisions_own_random_crops_depend_on_the_sample_alone(folder, workers) -> None:
    crop = v2.Compose([v2.RandomResizedCrop(16), v2.RandomHorizontalFlip(), v2.PILToTensor()])
    how = {"seed": 3, "batch_size": 5}
    inline = loader_of(ImageFolder(folder, crop), "inline", **how)
    aside = loader_of(ImageFolder(folder, crop), "workers", num_workers=workers, **how)
    epochs = [torch.cat([images for images, _ in loader]) for loader in (inline, aside)]
    assert epochs[0].dtype == torch.uint8
    assert torch.equal(*epochs)


@pytest.mark.parametrize("executor", SIDE)
def test_side_processes_that_die_between_epochs_are_replaced(folder, executor) -> None:
    before = set(multiprocessing.active_children())
    loader = loader_of(pictures(folder), executor, persistent_workers=True)
    assert len(list(loader)) == PICTURES // 3
    for child in set(multiprocessing.active_children()) - before:
        child.kill()
        child.join(20)
    data = pictures(folder)
    data.set_epoch(1)
    assert torch.equal(
        torch.cat([images for images, _ in loader]),
        torch.stack([data[i][0] for i in range(PICTURES)]),
    )
    loader.close()


@pytest.mark.parametrize("executors", [("workers", "workers"), ("sidecar", "workers")])
def test_loaders_side_by_side_do_not_meet(executors) -> None:
    one, two = (
        loader_of(Plain(60, start), name, persistent_workers=True)
        for start, name in zip((0, 1000), executors, strict=True)
    )
    for _ in range(2):
        for first, second in zip(one, two, strict=True):
            assert (first[1] + 1000).tolist() == second[1].tolist()
            assert first[0][:, 0, 0].tolist() == first[1].tolist()
            assert second[0][:, 0, 0].tolist() == second[1].tolist()
    running = iter(two)
    next(running)
    one.close()
    assert sum(len(labels) for _, labels in running) == 57
    two.close()


PROGRAM = """
import sys, torch
from lightning_fastdata.loading.loader import FastDataLoader
class Data(torch.utils.data.Dataset):
    def __len__(self):
        return 400
    def __getitem__(self, index):
        return torch.full((500,), index + int(sys.argv[1]))
if __name__ == "__main__":
    how = {"batch_size": 8, "num_workers": 2, "executor": sys.argv[2]}
    for loader in (FastDataLoader(Data(), **how), FastDataLoader(Data(), **how)):
        seen = torch.cat(list(loader))
        assert seen.eq(torch.arange(400)[:, None] + int(sys.argv[1])).all()
    print("right")
"""


def test_programs_at_the_same_time_do_not_meet(tmp_path: Path) -> None:
    script = tmp_path / "program.py"
    script.write_text(textwrap.dedent(PROGRAM))
    programs = [
        subprocess.Popen(
            [sys.executable, str(script), str(start), executor],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for start, executor in ((0, "workers"), (1000, "sidecar"))
    ]
    assert [program.communicate(timeout=100)[0].strip() for program in programs] == ["right"] * 2


class Meeting(Dataset):
    """In the second batch, the first sample ends only after the last one was begun."""

    def __init__(self, sign: Path) -> None:
        self.sign = sign

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> int:
        time.sleep(0.005)  # cheap samples may share a thread
        if index == 7:
            self.sign.touch()
        until = time.monotonic() + 20
        while index == 4 and not self.sign.exists():
            if time.monotonic() > until:
                raise TimeoutError("sample 7 was not begun while sample 4 was under way")
            time.sleep(0.001)
        return index


@pytest.mark.parametrize("executor", SIDE)
def test_a_slow_sample_does_not_hold_up_the_rest_of_its_batch(tmp_path, executor) -> None:
    batches = list(loader_of(Meeting(tmp_path / "sign"), executor, batch_size=4))
    assert torch.cat(batches).tolist() == list(range(8))


def test_the_damages_are_such_that_image_folder_delivers_a_wrong_picture(folder) -> None:
    path = Path(ImageFolder(folder).samples[7][0])
    crop = v2.Compose([v2.Resize((32, 32)), v2.PILToTensor()])
    right = ImageFolder(folder, crop)[7][0]
    path.write_bytes(garbled(path.read_bytes()))
    [(wrong, _)] = DataLoader(torch.utils.data.Subset(ImageFolder(folder, crop), [7]), batch_size=1)
    assert not torch.equal(wrong[0], right)
