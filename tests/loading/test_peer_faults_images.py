"""What other loaders do to pictures, and to runs whose processes die: laws of every executor."""

from __future__ import annotations

import multiprocessing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch.utils.data import DataLoader, Subset
from torchvision.datasets import ImageFolder
from torchvision.transforms import v2

from lightning_fastdata import FastImageFolder
from lightning_fastdata.errors import DatasetError
from lightning_fastdata.loading.loader import FastDataLoader

torch.set_num_threads(1)
ALL = ("inline", "workers")
SIDE = ("workers",)
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


@pytest.mark.cases(5)
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


@pytest.mark.cases(6)
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


def test_the_damages_are_such_that_image_folder_delivers_a_wrong_picture(folder) -> None:
    path = Path(ImageFolder(folder).samples[7][0])
    crop = v2.Compose([v2.Resize((32, 32)), v2.PILToTensor()])
    right = ImageFolder(folder, crop)[7][0]
    path.write_bytes(garbled(path.read_bytes()))
    [(wrong, _)] = DataLoader(Subset(ImageFolder(folder, crop), [7]), batch_size=1)
    assert not torch.equal(wrong[0], right)
