"""Trainings whose samples or batches take a CPU: decoding, transforms, collation, crowds."""

from __future__ import annotations

import random
import re
import struct
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch.utils.data import ConcatDataset, Dataset, default_collate

from trainings.parts import Accepted, Load, Made, Model, several


class Records(Dataset[torch.Tensor]):
    """Records of a format of one's own, parsed field by field in Python."""

    def __init__(self, count: int, fields: int) -> None:
        self.count = count
        self.record = b"".join(struct.pack("<BH", n % 7, n % 999) for n in range(fields))

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> torch.Tensor:
        values = []
        for offset in range(0, len(self.record), 3):
            kind, value = struct.unpack_from("<BH", self.record, offset)
            values.append(value / 10 if kind % 2 else float(value))
        return torch.tensor(values)


class Images(Dataset[torch.Tensor]):
    """Photographs from files, decoded and made smaller by PIL."""

    def __init__(self, folder: Path, count: int, size_px: int, suffix: str, heavy: bool) -> None:
        from sklearn.datasets import load_sample_images

        self.count, self.heavy = count, heavy
        self.paths = []
        for number, photo in enumerate(load_sample_images().images):
            self.paths.append(folder / f"photo{number}.{suffix}")
            picture = Image.fromarray(photo).resize((size_px, size_px * 2 // 3))
            picture.save(self.paths[-1])

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> torch.Tensor:
        with Image.open(self.paths[index % len(self.paths)]) as opened:
            picture = np.asarray(opened.convert("RGB").resize((96, 96)))
        if self.heavy:
            picture = elastic(picture)
        return torch.from_numpy(picture.copy())


def elastic(picture: np.ndarray) -> np.ndarray:
    """Bend an image, as augmentation libraries do on the CPU."""
    from scipy.ndimage import gaussian_filter, map_coordinates

    draw = np.random.default_rng(0)
    moves = [gaussian_filter(draw.uniform(-1, 1, picture.shape[:2]), 6) * 30 for _ in "xy"]
    grid = np.meshgrid(*map(np.arange, picture.shape[:2]), indexing="ij")
    where = [at + move for at, move in zip(grid, moves, strict=True)]
    return np.stack([map_coordinates(picture[..., c], where, order=1) for c in range(3)], -1)


class Texts(Dataset[torch.Tensor]):
    """Texts, cut into words and pieces of words by regular expressions."""

    def __init__(self, count: int, words: int) -> None:
        draw = random.Random(0)
        letters = "etaoinshrdlu"
        vocabulary = ["".join(draw.choices(letters, k=draw.randint(2, 11))) for _ in range(3000)]
        self.text = " ".join(draw.choices(vocabulary, k=words))
        self.pieces = {word[:k]: n for n, word in enumerate(vocabulary) for k in range(1, 5)}
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> torch.Tensor:
        tokens = []
        for word in re.findall(r"\w+|[^\w\s]", self.text):
            rest = word
            while rest:
                size = next((k for k in (4, 3, 2, 1) if rest[:k] in self.pieces), 1)
                tokens.append(self.pieces.get(rest[:size], 0))
                rest = rest[size:]
        return torch.tensor(tokens)


def decoding(
    folder: Path, kind: str, form: Any, workers: int, batches: int, step_s: float = 0.01,
    on: Any = "device", batch_size: int = 16, size: int = 0, **options: Any,
) -> Made:  # fmt: skip
    count = batch_size * batches
    dataset: Any = {
        "records": lambda: Records(count, size),
        "jpeg": lambda: Images(folder, count, size, "jpg", heavy=False),
        "png": lambda: Images(folder, count, size, "png", heavy=False),
        "elastic": lambda: Images(folder, count, size, "jpg", heavy=True),
        "texts": lambda: Texts(count, size),
    }[kind]()
    options = {"num_workers": workers, **options}
    load = Load(dataset=dataset, form=form, batch_size=batch_size, options=options)
    return Made(load=load, model=Model(step_s, on))


class Sentences(Dataset[list[int]]):
    """Lists of numbers, of different lengths."""

    def __init__(self, count: int, longest: int) -> None:
        draw = random.Random(0)
        self.rows = [list(range(draw.randint(longest // 4, longest))) for _ in range(256)]
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> list[int]:
        return self.rows[index % len(self.rows)]


def padded(rows: list[list[int]]) -> dict[str, torch.Tensor]:
    """Pad to the longest, with a mask, number by number."""
    longest = max(map(len, rows))
    filled = torch.zeros(len(rows), longest, dtype=torch.long)
    mask = torch.zeros(len(rows), longest, dtype=torch.bool)
    for i, row in enumerate(rows):
        for j, value in enumerate(row):
            if j % 8 == 0:
                mask[i, j : j + 8] = True
            filled[i, j] = value
    return {"tokens": filled, "mask": mask}


class MosaicCollate:
    """Mixes the samples of a batch with each other."""

    def __init__(self, rounds: int) -> None:
        self.rounds = rounds

    def __call__(self, samples: list[torch.Tensor]) -> torch.Tensor:
        batch = default_collate(samples).float()
        for _ in range(self.rounds):
            batch = 0.5 * batch + 0.5 * batch[torch.randperm(len(batch))].roll(1, -1)
        return batch


class Rows(Dataset[torch.Tensor]):
    """Rows in memory."""

    def __init__(self, count: int, floats: int) -> None:
        self.count, self.row = count, torch.rand(floats)

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> torch.Tensor:
        return self.row


def collating(
    _: Path, kind: str, form: Any, workers: int, batches: int, size: int, step_s: float = 0.005,
    batch_size: int = 16,
) -> Made:  # fmt: skip
    count = batch_size * batches
    dataset: Any = Sentences(count, size) if kind == "padded" else Rows(count, 20_000)
    collate_fn = padded if kind == "padded" else MosaicCollate(size)
    options = {"num_workers": workers, "collate_fn": collate_fn}
    load = Load(dataset=dataset, form=form, batch_size=batch_size, options=options)
    return Made(load=load, model=Model(step_s))


def big_batches(_: Path, form: Any, workers: int, floats: int, batches: int) -> Made:
    load = Load(dataset=Rows(16 * batches, floats), form=form, options={"num_workers": workers})
    return Made(load=load, model=Model(0.005))


def shrunk(picture: Image.Image) -> torch.Tensor:
    return torch.from_numpy(np.asarray(picture.resize((64, 64))).copy())


def one_huge_file(folder: Path, form: Any, workers: int, size_px: int, batches: int) -> Made:
    """A folder of small pictures, with a scan of a poster between them."""
    from sklearn.datasets import load_sample_images
    from torchvision.datasets import ImageFolder

    (folder / "posters").mkdir()
    photo = Image.fromarray(load_sample_images().images[0])
    for number in range(160):
        photo.resize((96, 64)).save(folder / "posters" / f"photo-{number:03}.jpg")
    photo.resize((size_px, size_px)).save(folder / "posters" / "photo-077-scan.png")
    dataset: Any = ConcatDataset([ImageFolder(str(folder), shrunk)] * (batches // 10))
    if form == "module":
        dataset = ImageFolder(str(folder), shrunk)
        dataset.samples *= batches // 10
    load = Load(dataset=dataset, form=form, options={"num_workers": workers})
    return Made(load=load, model=Model(0.006))


READING = Accepted(codes=("FD305",))
COLLATION = Accepted(codes=("FD307",))

DECODING = [
    *several(
        "decoding in Python", READING, decoding,
        {
            "4000 fields, 1 worker": {
                "kind": "records", "form": "fast", "workers": 1, "size": 4000, "batches": 70,
            },
            "6000 fields, our worker": {
                "kind": "records", "form": "fast", "workers": 1, "size": 6000, "batches": 80,
                "executor": "workers",
            },
        },
    ),
    *several(
        "decoding in Python, no workers",
        Accepted(codes=("FD101", "FD305"), words=("num_workers",)), decoding,
        {
            "6000 fields": {
                "kind": "records", "form": "fast", "workers": 0, "size": 6000, "batches": 40,
            },
            "3000 fields, module's own": {
                "kind": "records", "form": "own", "workers": 0, "size": 3000, "batches": 70,
            },
        },
    ),
    *several(
        "decoding in Python, torch's loader",
        Accepted(codes=("FD101", "FD102", "FD305"), words=("num_workers",)), decoding,
        {
            "5000 fields, 1 worker": {
                "kind": "records", "form": "torch", "workers": 1, "size": 5000, "batches": 100,
            },
            "4000 fields, no workers, module's own": {
                "kind": "records", "form": "torch", "workers": 0, "size": 4000, "batches": 90,
            },
        },
    ),
    *several(
        "JPEG decoding", READING, decoding,
        {
            "640 px, 1 worker": {
                "kind": "jpeg", "form": "fast", "workers": 1, "size": 640, "batches": 70,
            },
            "1000 px, FastDataModule": {
                "kind": "jpeg", "form": "module", "workers": 1, "size": 1000, "batches": 40,
            },
        },
    ),
    *several(
        "one huge file among small ones",
        Accepted(codes=("FD302",), words=("photo-077-scan.png",)), one_huge_file,
        {
            "1800 px, FastDataModule": {
                "form": "module", "workers": 1, "size_px": 1800, "batches": 120,
            },
            "2400 px, ConcatDataset": {
                "form": "fast", "workers": 2, "size_px": 2400, "batches": 120,
            },
        },
    ),
    *several(
        "huge PNGs", READING, decoding,
        {
            "2400 px, 1 worker": {
                "kind": "png", "form": "fast", "workers": 1, "size": 2400, "batches": 30,
                "batch_size": 2,
            },
            "1500 px, module's own loader": {
                "kind": "png", "form": "own", "workers": 2, "size": 1500, "batches": 60,
                "batch_size": 4, "step_s": 0.02,
            },
        },
    ),
    *several(
        "elastic transform", READING, decoding,
        {
            "1 worker": {
                "kind": "elastic", "form": "fast", "workers": 1, "size": 128, "batches": 60,
            },
            "FastDataModule, 2 workers": {
                "kind": "elastic", "form": "module", "workers": 2, "size": 96, "batches": 80,
            },
        },
    ),
    *several(
        "tokenizer in Python", READING, decoding,
        {
            "1500 words, 1 worker": {
                "kind": "texts", "form": "fast", "workers": 1, "size": 1500, "batches": 80,
            },
            "800 words, 2 workers": {
                "kind": "texts", "form": "fast", "workers": 2, "size": 800, "batches": 200,
                "step_s": 0.003,
            },
        },
    ),
    *several(
        "collate_fn that mixes", COLLATION, collating,
        {
            "8 rounds, 1 worker": {
                "kind": "mosaic", "form": "fast", "workers": 1, "size": 8, "batches": 120,
            },
            "24 rounds, FastDataModule": {
                "kind": "mosaic", "form": "module", "workers": 2, "size": 24, "batches": 80,
            },
        },
    ),
    *several(
        "padding in collate_fn", COLLATION, collating,
        {
            "400 numbers, 1 worker": {
                "kind": "padded", "form": "fast", "workers": 1, "size": 400, "batches": 100,
            },
            "1000 numbers, 2 workers": {
                "kind": "padded", "form": "own", "workers": 2, "size": 1000, "batches": 80,
            },
        },
    ),
    *several(
        "batches of 25 and 50 MB", Accepted(codes=("FD307", "FD308")), big_batches,
        {
            "25 MB, 2 workers": {
                "form": "fast", "workers": 2, "floats": 400_000, "batches": 120,
            },
            "50 MB, 1 worker": {"form": "fast", "workers": 1, "floats": 800_000, "batches": 60},
        },
    ),
]  # fmt: skip
