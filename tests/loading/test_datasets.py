"""Datasets of other libraries load as they do with torch's DataLoader."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torchvision
from PIL import Image
from torch.utils.data import DataLoader, Dataset, Subset

from lightning_fastdata import FastDataLoader


class Batched(Dataset):
    """Answers ``__getitems__`` and notes how it was asked."""

    def __init__(self):
        self.calls = []

    def __len__(self):
        return 12

    def __getitem__(self, i):
        raise AssertionError("asked for a single sample")

    def __getitems__(self, indices):
        self.calls.append(list(indices))
        return [torch.tensor(i) for i in indices]


@pytest.fixture
def folder(tmp_path):
    generator = np.random.default_rng(0)
    for name in ("cat", "dog"):
        (tmp_path / name).mkdir()
        for i in range(3):
            pixels = generator.integers(0, 256, (20, 24, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(tmp_path / name / f"{i}.png")
    return tmp_path


def same(ours, theirs):
    for a, b in zip(theirs, ours, strict=True):
        pairs = ((a[k], b[k]) for k in a) if isinstance(a, dict) else zip(a, b, strict=True)
        assert all(torch.equal(x, y) for x, y in pairs)


@pytest.mark.parametrize("workers", [0, 1])
def test_batched_fetching_is_honoured_also_through_a_subset(workers):
    dataset = Subset(Batched(), [5, 1, 7, 2])
    batches = list(FastDataLoader(dataset, batch_size=2, num_workers=workers))
    assert [b.tolist() for b in batches] == [[5, 1], [7, 2]]
    if workers == 0:
        assert dataset.dataset.calls == [[5, 1], [7, 2]]


def test_torchvision_folders_load_alike(folder):
    dataset = torchvision.datasets.ImageFolder(folder, torchvision.transforms.ToTensor())
    same(FastDataLoader(dataset, batch_size=4), DataLoader(dataset, batch_size=4))


@pytest.mark.parametrize("workers", [0, 1])
def test_hugging_face_datasets_in_torch_format_load_alike(workers):
    datasets = pytest.importorskip("datasets")
    dataset = datasets.Dataset.from_dict(
        {"x": [[float(i), i + 0.5] for i in range(10)], "label": list(range(10))}
    ).with_format("torch")
    ours = FastDataLoader(dataset, batch_size=4, num_workers=workers)
    same(ours, DataLoader(dataset, batch_size=4))
