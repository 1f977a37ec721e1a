"""Inputs that nobody means to have: Albumentations' pixels, or its own refusal."""

from __future__ import annotations

import os

os.environ.setdefault("NO_ALBUMENTATIONS_UPDATE", "1")

import albumentations as A
import cv2
import numpy as np
import pytest
import torch
from augment.batches import in_worker, keys, on_device, pipeline
from augment.joined import carry_out, names, noise, record
from augment.parity import photographs

from lightning_fastdata.augment.geometry import join_tapes
from lightning_fastdata.augment.transform import BatchTransform, as_batch_transform


def assert_same(transform, samples):
    batch, _ = on_device(transform, samples)
    wanted = in_worker(transform, samples)
    for name, values in batch.items():
        for got, want in zip(values, wanted, strict=True):
            np.testing.assert_array_equal(got.numpy(), want[name])


def assert_refused_by_both(transform, samples, error, text):
    for sample, key in zip(samples, keys(len(samples)), strict=True):
        for on in (True, False):
            with pytest.raises(error, match=text):
                transform.in_worker(on_device=on)(sample, key)


@pytest.mark.parametrize(
    ("size", "grid", "shift"), [((7, 57), (27, 3), None), ((40, 7), (2, 19), (14, 2))]
)
def test_a_grid_of_more_cells_than_pixels_drops_what_albumentations_drops(size, grid, shift):
    dropout = A.GridDropout(
        0.08, random_offset=shift is None, holes_number_xy=grid, shift_xy=shift or (0, 0),
        fill=9, fill_mask=1, p=1,
    )  # fmt: skip
    samples = [
        {"image": image, "mask": image[..., 0].copy()}
        for image in photographs(*size, dtype=np.uint8)
    ]
    assert_same(pipeline(dropout), samples)


def test_erasing_that_finds_no_place_is_refused_as_in_albumentations():
    samples = [{"image": image} for image in photographs(2, 32)]
    erasing = pipeline(A.Erasing((0.6, 0.8), (5, 6), p=1))
    assert_refused_by_both(erasing, samples, TypeError, "seed")


def test_a_large_median_of_two_channels_is_refused_as_in_opencv():
    samples = [{"image": image} for image in photographs(20, 30, 2)]
    assert_refused_by_both(pipeline(A.MedianBlur((7, 7), p=1)), samples, cv2.error, "medianBlur")
    assert_same(pipeline(A.MedianBlur((3, 5), p=1)), samples)


@pytest.mark.parametrize("size", [(1, 9), (7, 1), (1, 1)])
def test_images_of_one_line_can_be_turned_in_the_worker(size):
    samples = [{"image": image, "mask": image[..., 0]} for image in photographs(*size)]
    turned = A.Compose([A.VerticalFlip(p=1), A.HorizontalFlip(p=1), A.Lambda(p=1)])
    assert_same(as_batch_transform(turned), samples)


def test_a_batch_of_lines_is_turned_as_its_samples_are():
    images = torch.from_numpy(np.stack(photographs(1, 9))).permute(0, 3, 1, 2)
    turned = BatchTransform.from_albumentations(A.Compose([A.VerticalFlip(p=1), A.D4(p=0)]))
    assert torch.equal(turned(images), images)


@pytest.mark.parametrize("dtype", [np.uint8, np.float32])
def test_one_warp_of_two_channels_is_the_same_joined_or_not(dtype):
    image = noise(dtype, channels=2)
    tapes = record([A.Rotate(p=0.5), A.Perspective(p=0.5)], image, count=12)
    ones = [row for row, tape in enumerate(tapes) if len(names(tape)) < 2]
    assert 0 < len(ones) < 12
    exact, fused = carry_out(tapes, image), carry_out(join_tapes(tapes), image)
    np.testing.assert_array_equal(exact[ones], fused[ones])
