"""Datasets as people write them, for ``auto.py``: what they read, and in which batches."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset, TensorDataset

FILES = 192
"""Pictures in the folder; epochs that are longer go through it several times."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """A dataset and its batches."""

    name: str
    make: Callable[[Path, int], Any]
    """Returns the dataset with so many samples; files go to the folder, and are made once."""
    batch_size: int
    collate_fn: Callable[[list[Any]], Any] | None = None


def spin(ms: float) -> None:
    """Compute for so many milliseconds of CPU time."""
    until = time.thread_time_ns() + int(ms * 1e6)
    while time.thread_time_ns() < until:
        pass


class Timed(Dataset):
    """Samples of 64 numbers that compute and wait for as long as a function of the index says."""

    def __init__(self, length: int, times_ms: Callable[[int], tuple[float, float]]) -> None:
        self.length, self.times_ms = length, times_ms
        self.numbers = torch.arange(64.0)

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        computes_ms, waits_ms = self.times_ms(index)
        if computes_ms:
            spin(computes_ms)
        if waits_ms:
            time.sleep(waits_ms / 1000)
        return self.numbers + index, index % 10


def timed(name: str, batch_size: int, times_ms: Callable[[int], tuple[float, float]]) -> Workload:
    return Workload(
        name=name, make=lambda _, length: Timed(length, times_ms), batch_size=batch_size
    )


class Each(Dataset):
    """Samples that a function makes of an index."""

    def __init__(self, length: int, read: Callable[[int], Any]) -> None:
        self.length, self.read = length, read

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> Any:
        return self.read(index)


@cache
def tokens(folder: Path) -> np.ndarray:
    path = folder / "tokens.bin"
    np.random.default_rng(0).integers(0, 50_000, 20_000_000).astype(np.uint16).tofile(path)
    return np.memmap(path, np.uint16, "r")


def token_windows(folder: Path, length: int) -> Dataset:
    text = tokens(folder)

    def read(index: int) -> tuple[torch.Tensor, torch.Tensor]:
        start = index * 64 % (len(text) - 1025)
        window = torch.from_numpy(text[start : start + 1025].astype(np.int64))
        return window[:-1], window[1:]

    return Each(length, read)


def drawn_windows(folder: Path, length: int) -> Dataset:
    text = tokens(folder)

    def read(_: int) -> tuple[torch.Tensor, torch.Tensor]:
        start = int(torch.randint(len(text) - 1025, ()))
        window = torch.from_numpy(text[start : start + 1025].astype(np.int64))
        return window[:-1], window[1:]

    return Each(length, read)


class Batched(Dataset):
    """Rows that are read with one call for a batch."""

    def __init__(self, length: int) -> None:
        self.table = np.random.default_rng(0).random((length, 128), np.float32)

    def __len__(self) -> int:
        return len(self.table)

    def __getitem__(self, index: int) -> np.ndarray:
        return self.table[index]

    def __getitems__(self, indices: list[int]) -> list[tuple[np.ndarray, int]]:
        rows = np.log1p(self.table[indices])
        return [(row, index) for row, index in zip(rows, indices, strict=True)]


def arrays(_: Path, length: int) -> Dataset:
    table = np.random.default_rng(0).random((1024, 16), np.float32)
    labels = np.arange(1024) % 10
    return Each(length, lambda index: (table[index % 1024], labels[index % 1024]))


def tuples(_: Path, length: int) -> Dataset:
    numbers = torch.rand(1024, 4)
    return Each(length, lambda index: (numbers[index % 1024], index % 10))


def ragged(_: Path, length: int) -> Dataset:
    lengths = np.random.default_rng(0).integers(20, 300, length).tolist()
    return Each(length, lambda index: (list(range(lengths[index])), index % 2))


def padded(samples: list[tuple[list[int], int]]) -> dict[str, torch.Tensor]:
    rows = [torch.tensor(row) for row, _ in samples]
    return {
        "ids": torch.nn.utils.rnn.pad_sequence(rows, batch_first=True),
        "lengths": torch.tensor([len(row) for row in rows]),
        "labels": torch.tensor([label for _, label in samples]),
    }


class Table(Dataset):
    """A table as most people write it."""

    def __init__(self, length: int) -> None:
        rows = np.random.default_rng(0)
        self.features = rows.random((length, 32), np.float32)
        self.target = rows.random(length, np.float32)

    def __len__(self) -> int:
        return len(self.features)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.from_numpy(self.features[index]), torch.tensor(self.target[index])


@cache
def pictures(folder: Path) -> Path:
    """Return a folder of smooth pictures with some noise, which are as dear as photographs."""
    from PIL import Image

    generator = np.random.default_rng(0)
    for number in range(FILES):
        small = generator.integers(0, 256, (12, 15, 3), np.uint8)
        large = np.asarray(Image.fromarray(small).resize((480, 375), Image.Resampling.BICUBIC))
        noise = generator.integers(-12, 13, large.shape)
        path = folder / "pictures" / str(number % 4) / f"{number}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(np.clip(large + noise, 0, 255).astype(np.uint8)).save(path, quality=90)
    return folder / "pictures"


class Repeated(Dataset):
    """A dataset gone through several times in one epoch."""

    def __init__(self, dataset: Any, length: int) -> None:
        self.dataset, self.length = dataset, length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> Any:
        return self.dataset[index % len(self.dataset)]


def fast_folder(folder: Path, _: int) -> Dataset:
    from lightning_fastdata import FastImageFolder

    return FastImageFolder(pictures(folder), size=160)


def fast_float_folder(folder: Path, _: int) -> Dataset:
    from lightning_fastdata import FastImageFolder

    return FastImageFolder(pictures(folder), size=160, normalize=True)


def image_folder(folder: Path, length: int) -> Dataset:
    from torchvision.datasets import ImageFolder
    from torchvision.transforms import v2

    transform = v2.Compose(
        [
            v2.RandomResizedCrop(160),
            v2.RandomHorizontalFlip(),
            v2.PILToTensor(),
            v2.ToDtype(torch.float32, scale=True),
            v2.Normalize((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)),
        ]
    )
    return Repeated(ImageFolder(pictures(folder), transform), length)


@cache
def mapped(folder: Path) -> np.ndarray:
    path = folder / "images.npy"
    np.save(path, np.random.default_rng(0).integers(0, 256, (4096, 64, 64, 3), np.uint8))
    return np.load(path, mmap_mode="r")


def mapped_images(folder: Path, length: int) -> Dataset:
    images = mapped(folder)
    return Each(length, lambda index: (torch.from_numpy(images[index % 4096].copy()), index % 10))


def dicts(_: Path, length: int) -> Dataset:
    def read(index: int) -> dict[str, Any]:
        return {
            "image": torch.full((3, 32, 32), float(index)),
            "meta": {"index": index, "weight": 0.5, "size": torch.tensor([32, 32])},
            "boxes": np.full((8, 4), index, np.float32),
        }

    return Each(length, read)


def huge(_: Path, length: int) -> Dataset:
    volume = torch.rand(2, 64, 128, 128)
    return Each(length, lambda index: (volume + index, index))


def hugging_face(_: Path, length: int) -> Dataset:
    import datasets

    rows = np.random.default_rng(0)
    table = {
        "input_ids": rows.integers(0, 30_000, (length, 64)).tolist(),
        "text": [f"sentence {number}" for number in range(length)],
        "label": rows.integers(0, 2, length).tolist(),
    }
    return datasets.Dataset.from_dict(table)


def tensors_of(samples: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    return {
        "input_ids": torch.tensor([sample["input_ids"] for sample in samples]),
        "label": torch.tensor([sample["label"] for sample in samples]),
    }


def augmented(_: Path, length: int) -> Dataset:
    import albumentations as A

    images = np.random.default_rng(0).integers(0, 256, (64, 96, 96, 3), np.uint8)
    pipeline = A.Compose([A.HorizontalFlip(), A.RandomBrightnessContrast(), A.Normalize()])
    return Augmented(length, images, pipeline)


class Augmented(Dataset):
    """Pictures in memory and an Albumentations pipeline of the dataset's own."""

    def __init__(self, length: int, images: np.ndarray, pipeline: Any) -> None:
        self.length, self.images, self.pipeline = length, images, pipeline

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        image = self.pipeline(image=self.images[index % len(self.images)])["image"]
        return torch.from_numpy(image.transpose(2, 0, 1)), index % 10


class Kept(Dataset):
    """Pictures that are decoded when they are first read, and kept."""

    def __init__(self, folder: Path, length: int) -> None:
        self.paths = sorted(pictures(folder).rglob("*.jpg"))
        self.length = length
        self.kept: dict[int, torch.Tensor] = {}

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        from PIL import Image

        place = index % len(self.paths)
        if place not in self.kept:
            picture = Image.open(self.paths[place]).convert("RGB").resize((96, 96))
            self.kept[place] = torch.from_numpy(np.array(picture))
        return self.kept[place].float() / 255, place


WORKLOADS = [
    timed("sleeps 5 ms", 16, lambda _: (0, 5)),
    timed("sleeps 50 ms", 4, lambda _: (0, 50)),
    timed("reads 2 ms, computes 1 ms", 16, lambda _: (1, 2)),
    timed("stragglers: 3 % wait 60 ms", 16, lambda i: (0.3, 60 if i * 7919 % 100 < 3 else 0)),
    timed("stragglers: 2 % compute 20 ms", 16, lambda i: (20 if i * 7919 % 100 < 2 else 0.1, 0)),
    timed("bursts: 1 shard of 8 waits 10 ms", 16, lambda i: (0.1, 10 if i // 16 % 8 == 3 else 0)),
    timed("computes 0.02 ms", 32, lambda _: (0.02, 0)),
    timed("computes 0.1 ms", 32, lambda _: (0.1, 0)),
    timed("computes 0.5 ms", 32, lambda _: (0.5, 0)),
    timed("computes 5 ms", 8, lambda _: (5, 0)),
    Workload(name="token windows", make=token_windows, batch_size=16),
    Workload(name="token windows, drawn", make=drawn_windows, batch_size=16),
    Workload(name="__getitems__", make=lambda _, n: Batched(n), batch_size=256),
    Workload(name="rows of arrays", make=arrays, batch_size=256),
    Workload(name="tiny tuples", make=tuples, batch_size=32),
    Workload(name="tiny tuples, batches of 4", make=tuples, batch_size=4),
    Workload(name="ragged, padded by collate_fn", make=ragged, batch_size=32, collate_fn=padded),
    Workload(name="hand-written table, 512", make=lambda _, n: Table(n), batch_size=512),
    Workload(name="hand-written table, 32,768", make=lambda _, n: Table(n), batch_size=32_768),
    Workload(name="scalars, 4,096", make=lambda _, n: Each(n, float), batch_size=4096),
    Workload(
        name="TensorDataset, 256",
        make=lambda _, n: TensorDataset(torch.rand(n, 32), torch.arange(n)),
        batch_size=256,
    ),
    Workload(name="dicts", make=dicts, batch_size=64),
    Workload(name="huge samples, 8 MB", make=huge, batch_size=2),
    Workload(
        name="Hugging Face, collate_fn", make=hugging_face, batch_size=64, collate_fn=tensors_of
    ),
    Workload(name="memory-mapped images", make=mapped_images, batch_size=64),
    Workload(name="FastImageFolder images, uint8", make=fast_folder, batch_size=16),
    Workload(name="FastImageFolder images, float32", make=fast_float_folder, batch_size=16),
    Workload(name="ImageFolder images, PIL", make=image_folder, batch_size=16),
    Workload(name="Albumentations images", make=augmented, batch_size=32),
    Workload(name="images kept when decoded", make=Kept, batch_size=32),
]
