from __future__ import annotations

import dataclasses
import pickle

import albumentations as A
import cv2
import numpy as np
import pytest
import torch
from albumentations.pytorch import ToTensorV2
from augment.batches import BOXES, boxed, keys, pipeline
from conformance.pieces import Pixels, make_trainer
from hypothesis import given
from hypothesis import strategies as st
from misses import each
from thoroughness import max_examples
from torch import nn
from torch.utils.data import Dataset, default_collate

from lightning_fastdata import FastDataModule, LoaderOptions
from lightning_fastdata.augment.mixing import CutMix, mixed
from lightning_fastdata.augment.ops import DEVICE_OPS
from lightning_fastdata.augment.pipeline.fields import Fields
from lightning_fastdata.augment.transform import BatchTransform
from lightning_fastdata.batches.staged import spreading

USUAL = (30, 28)
"""Size of the images of a dataset, apart from a few."""
ODD = ((20, 23), (40, 33), (30, 44), (26, 28), (61, 60))
H, RBC, NORM = A.HorizontalFlip, A.RandomBrightnessContrast, A.Normalize

CROP = A.RandomResizedCrop((26, 24), interpolation=0, mask_interpolation=0)
"""By nearest pixels, which are the same in both places."""

EXACT = {
    "crop": [CROP, H(), RBC(p=0.8)],
    "smaller": [A.Resize(26, 24), A.CoarseDropout(p=0.8), NORM(), ToTensorV2()],
    "something before": [RBC(p=0.5), H(), A.PadIfNeeded(10, 10), A.Resize(26, 24)],
    "pixels for what comes before": [A.ImageCompression(p=0.5), CROP, H()],
}
"""Pipelines that make the same pixels in both places."""


def picture(height, width, seed):
    rng = np.random.default_rng(seed)
    noise = rng.integers(0, 256, (height, width, 3), dtype=np.uint8)
    return cv2.GaussianBlur(noise, (0, 0), 1.5) | np.uint8(seed % 2)


def dataset(sizes):
    return [
        {
            "image": (image := picture(*size, seed)),
            "mask": (image[..., 0] // 50).astype(np.int32),
            "label": seed,
        }
        for seed, size in enumerate(sizes)
    ]


def suited(transform, sizes=(USUAL,)):
    """Return the transform for a dataset of images of these sizes."""
    return transform.for_samples(dataset(sizes))


def where(transform):
    return " ".join(one.where[0] for one in transform.plan.placements)


def batch_of(transform, samples, seed):
    part = pickle.loads(pickle.dumps(transform.in_worker(on_device=True)))
    drawn = [part(one, key) for one, key in zip(samples, keys(len(samples), seed), strict=True)]
    draws = part.collate([tape for _, tape in drawn])
    return spreading(default_collate, part)([one for one, _ in drawn]), draws


def by_albumentations(transform, samples, seed):
    whole = transform.in_worker(on_device=False)
    drawn = [whole(one, key)[0] for one, key in zip(samples, keys(len(samples), seed), strict=True)]
    return default_collate(drawn)


@pytest.mark.cases(2)
@each("name", list(EXACT))
@max_examples(8)
@given(
    sizes=st.lists(st.sampled_from([USUAL, USUAL, *ODD]), min_size=1, max_size=6),
    seed=st.integers(0, 99),
)
def test_odd_ones_among_images_of_one_size_are_what_albumentations_makes_of_them(name, sizes, seed):
    transform = suited(pipeline(*EXACT[name]))
    assert transform.plan.crop >= 0
    samples = dataset(sizes)
    batch, draws = batch_of(transform, samples, seed)
    assert batch["image"].shape[1:3] == batch["mask"].shape[1:3] == USUAL
    got, want = transform.apply(batch, draws), by_albumentations(transform, samples, seed)
    assert got.keys() == want.keys()
    for key in got:
        torch.testing.assert_close(got[key], want[key], rtol=0, atol=1e-5)


def test_a_draw_behind_the_crop_that_needs_pixels_gets_them_from_the_worker():
    trained, asked = [], []

    def encode(transform, params, shape, dtype):
        if trained and params["alpha"] > 1:
            asked.append(shape)
            return None
        return table.encode(transform, params, shape, dtype)

    table = DEVICE_OPS["RandomBrightnessContrast"]
    ops = {**DEVICE_OPS, table.name: dataclasses.replace(table, encode=encode)}
    compose = A.Compose([H(), A.Resize(26, 24), RBC(p=1), A.VerticalFlip(), NORM(), ToTensorV2()])
    transform = suited(BatchTransform(compose, Fields(), ops))
    assert transform.plan.crop == 1
    trained.append(True)
    samples = dataset([USUAL] * 8 + [ODD[1]])
    part = transform.in_worker(on_device=True)
    drawn = [part(one, key) for one, key in zip(samples, keys(len(samples)), strict=True)]
    batch = default_collate([one for one, _ in drawn])
    got = transform.apply(batch, part.collate([tape for _, tape in drawn]))
    want = by_albumentations(transform, samples, 0)
    assert batch["image"].shape[1:3] == USUAL
    assert 0 < len(asked) < len(samples)
    for name in ("image", "mask"):
        torch.testing.assert_close(got[name], want[name], rtol=0, atol=1e-5)


def test_enlarged_crops_are_at_most_a_level_off():
    transform = suited(pipeline(A.RandomResizedCrop((26, 24)), H()))
    samples = dataset([USUAL, ODD[0], USUAL, ODD[1], ODD[4], *[USUAL] * 40])
    got = transform.apply(*batch_of(transform, samples, 0))
    want = by_albumentations(transform, samples, 0)
    gap = (got["image"].int() - want["image"].int()).abs()
    assert gap.max() <= 1
    assert (gap == 0).float().mean() >= 0.998
    assert torch.equal(got["mask"], want["mask"])


def test_boxes_and_points_are_albumentations_own():
    transform = pipeline(A.RandomResizedCrop((26, 24), scale=(0.3, 1)), H(), **BOXES)
    samples = [boxed(one, *one["image"].shape[:2]) for one in dataset([USUAL] * 8 + list(ODD))]
    part = transform.for_samples(samples[:8]).in_worker(on_device=True)
    whole = transform.in_worker(on_device=False)
    moved = 0
    for one, key in zip(samples, keys(len(samples)), strict=True):
        ours, theirs = part(one, key)[0], whole(one, key)[0]
        assert ours["image"].shape[:2] == USUAL
        for name in ("bboxes", "classes", "keypoints", "joints"):
            assert np.array_equal(ours[name], theirs[name])
        moved += len(ours["bboxes"]) > 0 and not np.array_equal(ours["bboxes"], one["bboxes"])
    assert moved > 4


@each(
    ("expected", "transforms"),
    [
        ("d d", [A.RandomResizedCrop((26, 24)), H()]),
        ("d d", [H(), A.Resize(26, 24)]),
        ("d d d", [A.ToGray(p=0.5), CROP, H()]),
        # To cut out a window costs the worker next to nothing.
        ("w d", [A.RandomCrop(26, 24), H()]),
        # As large as the image, or larger than 1.5 times what is left, or smaller.
        ("d d", [A.Resize(*USUAL), H()]),
        ("w d", [A.Resize(20, 20), H()]),
        ("w d", [A.Resize(34, 24), H()]),
        # Without a form for the device, or only in images that stay as large.
        ("w d", [A.Resize(26, 24, interpolation=cv2.INTER_CUBIC), H()]),
        ("w d", [A.Resize(26, 24, interpolation=cv2.INTER_AREA), H()]),
        ("w d", [A.Resize(26, 24, area_for_downscale="image"), H()]),
        # What comes behind may need the pixels.
        ("w w", [CROP, A.ImageCompression(p=0.3)]),
        # Not every sample takes it.
        ("w w d", [A.OneOf([CROP, A.Resize(26, 24)], p=1), H()]),
        # Images no longer have one size before it, or another one.
        ("w w d", [A.RandomScale(p=0.5), CROP, H()]),
        ("w w d", [A.Pad(4), A.Resize(30, 30), H()]),
        ("w w d", [A.RandomRotate90(), CROP, H()]),
        # Images have another dtype by then, or may have other channels.
        ("w w", [NORM(), CROP]),
        ("w w d", [A.ToRGB(p=0), CROP, H()]),
    ],
)
def test_the_crop_is_left_to_the_device_only_where_it_can_run_and_pays(expected, transforms):
    transform = suited(pipeline(*transforms), [USUAL, USUAL])
    assert where(transform) == expected
    samples = dataset([USUAL, *(size for size in ODD if min(size) >= 26)])
    got = transform.apply(*batch_of(transform, samples, 3))
    assert len(got["image"]) == len(samples)


def test_all_samples_that_are_offered_are_read_as_each_may_have_another_size_or_dtype():
    read = []

    def samples(*sizes):
        for one in dataset(sizes):
            read.append(one["image"].shape[:2])
            yield one

    transform = pipeline(A.RandomResizedCrop((26, 24)), H())
    several = transform.for_samples(samples(USUAL, USUAL, ODD[0], USUAL))
    assert len(read) == 4
    assert several.plan.crop < 0
    read.clear()
    assert transform.for_samples(samples((60, 60), USUAL)).plan.crop < 0
    assert len(read) == 2
    assert transform.for_samples(samples()).plan.crop < 0
    assert transform.for_samples(samples(USUAL, USUAL)).plan.crop == 0
    assert transform.plan.crop < 0


def test_a_mask_of_another_size_than_its_image_keeps_the_crop_in_the_worker():
    transform = pipeline(CROP, H(), is_check_shapes=False)
    samples = dataset([USUAL])
    samples[0]["mask"] = np.zeros((40, 40), np.int32)
    assert transform.for_samples(samples).plan.crop < 0


def test_everything_runs_in_the_worker_where_no_device_takes_the_pixels():
    transform = suited(pipeline(CROP, H()))
    (sample,) = dataset([USUAL])
    drawn, tape = transform.in_worker(on_device=False)(sample, keys(1)[0])
    assert tape is None
    assert drawn["image"].shape[:2] == (26, 24)


def test_mixing_comes_behind_a_crop_on_the_device():
    compose = A.Compose([CROP, H(), ToTensorV2()])
    plain = mixed(compose, CutMix(), num_classes=2)
    samples = [{"image": one["image"], "label": 0} for one in dataset([USUAL, ODD[1], USUAL])]
    results = []
    for transform in (plain, plain.for_samples(samples[:1])):
        batch, draws = batch_of(transform, samples, 0)
        results.append((batch["image"].shape[1:3], transform.apply(batch, draws)["image"]))
    (cropped, want), (whole, got) = results
    assert (cropped, whole) == ((26, 24), USUAL)
    assert torch.equal(got, want)


class Photographs(Dataset):
    """Images of one size, apart from one."""

    def __init__(self, odd):
        self.odd, self.read = odd, []

    def __len__(self):
        return 40

    def __getitem__(self, i):
        return picture(*(ODD[4] if i == self.odd else USUAL), i), i


class Keeps(Pixels):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(1, 1)
        self.by_index = {}

    def training_step(self, batch, batch_idx):
        images, labels = batch
        self.by_index |= dict(zip(labels.tolist(), images.clone(), strict=True))
        return self.layer(images.float().mean().reshape(1, 1)).sum()


@pytest.mark.cases(2)
@each("odd", [0, 1, 2, 39])
def test_a_training_gets_the_same_images_whether_an_odd_one_was_seen_before_or_not(tmp_path, odd):
    found = {}
    for place in ("gpu", "cpu"):
        data = FastDataModule.from_datasets(
            Photographs(odd),
            batch_size=8,
            augment=A.Compose([A.Resize(26, 24), RBC(), ToTensorV2()]),
            augment_on=place,
            options=LoaderOptions(num_workers=0),
        )
        model = Keeps()
        make_trainer(tmp_path, max_epochs=1).fit(model, datamodule=data)
        found[place] = model.by_index
        crop = [row for row in data.explain().splitlines() if row.startswith("Resize")]
        wide = "30 x 28" in "".join(crop)
        assert wide == (place == "gpu" and odd in (1, 39))
    assert sorted(found["gpu"]) == list(range(40))
    for index, image in found["gpu"].items():
        assert torch.equal(image, found["cpu"][index])
