"""An image folder whose pictures are kept gives the samples that it gives without a cache."""

from __future__ import annotations

import os
import shutil
import warnings
from functools import partial

import numpy as np
import pytest
import torch
from PIL import Image
from torch.utils.data import DataLoader, Subset
from torchvision.datasets import ImageFolder

import lightning_fastdata as ld
from lightning_fastdata.caches.cached import cache_of
from lightning_fastdata.data import cache_images
from lightning_fastdata.errors import DatasetError, OptionsError
from lightning_fastdata.ext.images.decoders import StoredPicture


@pytest.fixture
def root(tmp_path):
    """Twelve pictures in two classes, JPEG and PNG, of several sizes."""
    order = np.random.default_rng(0)
    for name in "ab":
        (tmp_path / "photos" / name).mkdir(parents=True)
        for number in range(6):
            small = order.integers(0, 256, (7, 8, 3), np.uint8)
            size = (90 + 7 * number, 70 + 9 * number)
            picture = Image.fromarray(small).resize(size, Image.Resampling.BICUBIC)
            ending = "jpg" if number % 2 else "png"
            picture.save(tmp_path / "photos" / name / f"{number}.{ending}")
    return tmp_path / "photos"


def folder_of(root, **options):
    return ld.FastImageFolder(root, size=32, horizontal_flip=0.5, **options)


def all_of(dataset, epoch=0):
    dataset.set_epoch(epoch)
    return torch.stack([dataset[index][0] for index in range(len(dataset))])


@pytest.mark.parametrize("shorter_side", [None, 48])
@pytest.mark.parametrize("normalize", [False, True])
def test_pixels_are_those_without_a_cache(root, tmp_path, shorter_side, normalize):
    options = {"shorter_side": shorter_side, "resample": "exact", "normalize": normalize}
    plain = folder_of(root, **options)
    kept = cache_images(folder_of(root, **options), tmp_path / "kept")
    for epoch in range(3):  # the first is made, the others are read
        assert torch.equal(all_of(plain, epoch), all_of(kept, epoch))
    assert kept.targets == plain.targets
    assert cache_of(kept).stored == len(plain)


@pytest.mark.parametrize("options", [{}, {"resample": "exact"}, {"shorter_side": 48}, {"size": 64}])
def test_a_warning_says_once_where_kept_pictures_make_other_pixels(root, tmp_path, options):
    options = {"size": 16, **options}
    plain = ld.FastImageFolder(root, **options)
    kept = cache_images(ld.FastImageFolder(root, **options), tmp_path / "kept")
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        pairs = [(all_of(plain, epoch), all_of(kept, epoch)) for epoch in range(3)]
    others = not all(torch.equal(first, second) for first, second in pairs)
    assert others == (options == {"size": 16})
    assert ['resample="exact"' in str(one.message) for one in said] == [True] * others


def test_files_are_read_once(root, tmp_path):
    kept = cache_images(folder_of(root, shorter_side=48), tmp_path / "kept")
    wanted = all_of(kept, 1)
    shutil.rmtree(root)
    assert torch.equal(wanted, all_of(kept, 1))


@pytest.mark.parametrize(
    ("loader", "method"),
    [
        (DataLoader, "fork"),
        (ld.FastDataLoader, "fork"),
        # They import everything anew.
        pytest.param(ld.FastDataLoader, "spawn", marks=pytest.mark.slow),
        pytest.param(DataLoader, "spawn", marks=pytest.mark.slow),
    ],
)
def test_workers_share_what_is_kept(root, tmp_path, method, loader):
    kept = cache_images(folder_of(root, shorter_side=48), tmp_path / "kept")
    plain = folder_of(root, shorter_side=48, resample="exact")
    exact = cache_images(plain, tmp_path / "kept")
    for data in (kept, exact):
        data.set_epoch(0)
        batches = loader(data, 5, num_workers=2, multiprocessing_context=method)
        found = torch.cat([images for images, _ in batches])
        assert torch.equal(found, all_of(data, 0))
    assert cache_of(kept).stored == len(plain)


def test_a_cache_belongs_to_the_files_and_the_side_alone(root, tmp_path):
    def path(**options):
        return cache_of(cache_images(folder_of(root, **options), tmp_path / "kept")).folder

    small = path(shorter_side=48)
    assert path(shorter_side=48, scale=(0.5, 1.0), seed=3, normalize=True) == small
    assert path(shorter_side=40) != small
    os.utime(root / "a" / "0.png", (1, 1))
    assert path(shorter_side=48) != small


def test_impossible_options_are_refused(root):
    with pytest.raises(OptionsError, match="of a FastImageFolder, and this is a ImageFolder"):
        cache_images(ImageFolder(root))
    with pytest.raises(OptionsError, match=r"shorter_side is 0; .* from 1"):
        folder_of(root, shorter_side=0)
    with pytest.raises(OptionsError, match=r"shorter_side is 32; .* from 37"):
        folder_of(root, crop="center", shorter_side=32)


def test_a_damaged_file_is_named(root, tmp_path):
    (root / "a" / "0.png").write_bytes(b"nothing")
    kept = cache_images(folder_of(root, shorter_side=48), tmp_path / "kept")
    with pytest.raises(DatasetError, match=r"a/0\.png"):
        kept[0]


photos = partial(ld.FastDataModule.from_datasets, batch_size=4, seed=7)


def epochs_of(module):
    loader = module.train_dataloader()
    return [[batch[0].clone() for batch in loader] for _ in range(3)]


@pytest.mark.parametrize("part", [False, True])
def test_a_data_module_keeps_pictures_where_crops_are_random(root, tmp_path, part):
    def data():
        whole = folder_of(root, shorter_side=48, resample="exact")
        return Subset(whole, range(1, 10)) if part else whole

    plain = epochs_of(photos(data()))
    module = photos(data(), cache=tmp_path / "kept")
    for ours, theirs in zip(epochs_of(module), plain, strict=True):
        assert all(map(torch.equal, ours, theirs))
    assert "pictures, shorter side 48" in module.explain()


def test_fill_keeps_the_pictures_of_a_training(root, tmp_path):
    kept = cache_images(folder_of(root, shorter_side=48), tmp_path / "kept")
    kept.pictures.fill()
    assert cache_of(kept).stored == len(kept)
    module = photos(folder_of(root, shorter_side=48), cache=tmp_path / "kept")
    loader = module.train_dataloader()
    assert cache_of(loader.dataset).stored == len(kept)


def test_views_of_a_cache_can_not_be_written_to(root, tmp_path):
    kept = cache_images(folder_of(root, shorter_side=48), tmp_path / "kept")
    all_of(kept)
    picture = kept.pictures.open(0)
    assert isinstance(picture, StoredPicture)
    assert not picture.pixels.flags.writeable


def test_samples_that_are_others_in_each_epoch_are_refused(root, tmp_path):
    with pytest.raises(DatasetError, match="FastImageFolder draws at random"):
        ld.CachedDataset(folder_of(root), tmp_path / "kept")[0]
