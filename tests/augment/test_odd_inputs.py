"""Inputs that nobody means to have: Albumentations' pixels, or its own refusal."""

from __future__ import annotations

import albumentations as A
import cv2
import numpy as np
import pytest
import torch
from augment.batches import assert_both_ways_agree, in_worker, keys, on_device, pipeline
from augment.loaders import IMAGES, Pictures, module_of, trained
from augment.parity import both, photographs
from misses import each
from torch.utils.data import default_collate
from torchvision.transforms import v2

from benchmarks.parity import pixel_parity
from lightning_fastdata.augment.albumentations.plan import analyse
from lightning_fastdata.augment.ops import DEVICE_OPS
from lightning_fastdata.augment.transform import as_batch_transform
from lightning_fastdata.errors import BatchError

FLIP = A.Compose([A.HorizontalFlip(p=1), A.ToTensorV2()])


def assert_refused_by_both(transform, samples, error, text):
    for sample, key in zip(samples, keys(len(samples)), strict=True):
        for on in (True, False):
            with pytest.raises(error, match=text):
                transform.in_worker(on_device=on)(sample, key)


def test_erasing_that_finds_no_place_is_refused_as_in_albumentations():
    samples = [{"image": image} for image in photographs(2, 32)]
    erasing = pipeline(A.Erasing((0.6, 0.8), (5, 6), p=1))
    assert_refused_by_both(erasing, samples, TypeError, "seed")


@each("size", [(1, 9), (7, 1), (1, 1)])
def test_images_of_one_line_can_be_turned_in_the_worker(size):
    samples = [{"image": image, "mask": image[..., 0]} for image in photographs(*size)]
    turned = A.Compose([A.VerticalFlip(p=1), A.HorizontalFlip(p=1), A.Lambda(p=1)])
    assert_both_ways_agree(as_batch_transform(turned), samples)


@each(
    "transform",
    [
        A.Downscale((0.4, 0.4), {"downscale": 3, "upscale": 1}, p=1),
        A.Crop(13, 22, 25, 40, True, "bottom_right", fill=(1, 2, 3, 4, 5, 6), p=1),
    ],
)
def test_what_opencv_takes_for_four_channels_alone_is_refused_for_six(transform):
    samples = [{"image": image} for image in photographs(24, 30, 6)]
    part = as_batch_transform(A.Compose([A.Resize(24, 30), transform]))
    assert_refused_by_both(part, samples, cv2.error, "OpenCV")


def test_crops_that_are_made_smaller_by_areas_in_some_samples_stay_in_the_worker():
    images = photographs(60, 50)
    crop = A.RandomResizedCrop((40, 30), scale=(0.1, 1), area_for_downscale="image", p=1)
    assert analyse(A.Compose([crop]), DEVICE_OPS, size=(60, 50)).placements[0].where == "worker"
    assert pixel_parity(crop, images, draws=6).largest == 0


def test_masks_of_crops_are_means_of_areas_where_images_are_made_larger():
    crop = A.RandomResizedCrop((90, 80), area_for_downscale="image_mask", p=1)
    samples = [
        {"image": image, "mask": image[..., 0].astype(np.float32)} for image in photographs(40, 50)
    ]
    assert_both_ways_agree(pipeline(A.Resize(90, 80, interpolation=0), crop), samples)


def test_a_pipeline_whose_sampler_fails_is_planned():
    fails = A.Posterize(num_bits=[(1, 7), (6, 7)], p=0)
    compose = A.Compose([A.Resize(20, 20), A.ToFloat(p=1), fails])
    assert len(analyse(compose, DEVICE_OPS, size=(30, 30)).placements) == 3


@each("channels", [1, 2, 3, 4, 5, 6])
@each("dtype", [np.uint8, np.float32])
def test_halves_are_rounded_as_in_opencv_for_any_number_of_channels(channels, dtype):
    images = photographs(24, 30, channels, dtype)
    masks = [(image * (1 if dtype == np.uint8 else 255)).astype(np.int16) for image in images]
    halves = A.Resize(12, 15, mask_interpolation=1, p=1)
    found = both(halves, images, masks, seeds=[0])
    assert len(found) == len(images)
    for want, got, want_mask, mask in found:
        np.testing.assert_allclose(got, want, rtol=0, atol=0 if dtype == np.uint8 else 1e-6)
        np.testing.assert_array_equal(mask, want_mask)


@each("varies", [A.Pad((9, 7), p=0.5), A.RandomScale((0, 0.5), p=1), A.PadIfNeeded(60, 70, p=0.5)])
def test_images_of_different_sizes_are_cut_to_one_in_the_worker(varies):
    compose = A.Compose([varies, A.HorizontalFlip(), A.Crop(3, 4, 30, 32, p=1), A.VerticalFlip()])
    samples = [{"image": image, "mask": image[..., 0]} for image in photographs(40, 50) * 3]
    assert_both_ways_agree(as_batch_transform(compose), samples)
    plan = analyse(compose, DEVICE_OPS, size=(40, 50))
    assert [place.where for place in plan.placements][2:] == ["worker", "device"]


@each("kind", [FLIP, v2.RandomHorizontalFlip(1.0)])
@each("place", ["cpu", "gpu"])
@each("missing", [0, 5])
@pytest.mark.filterwarnings("ignore")
def test_a_sample_that_is_none_is_for_the_collate_fn_to_leave_out(tmp_path, kind, place, missing):
    def those_that_are_there(samples):
        return default_collate([sample for sample in samples if sample is not None])

    pictures = Pictures(lambda index: None if index == missing else (IMAGES[index], index), 8)
    data = module_of(kind, place, pictures, collate_fn=those_that_are_there)
    made = trained(tmp_path, data)
    images, numbers = (torch.cat(parts) for parts in zip(*made, strict=True))
    assert numbers.tolist() == [number for number in range(8) if number != missing]
    assert torch.equal(images, IMAGES[numbers].flip(-1))


@each("device", ["cpu", "meta"])
def test_a_batch_without_samples_is_refused_wherever_it_lies(device):
    transform = pipeline(A.Resize(8, 8), A.Normalize())
    nothing = torch.zeros(0, 3, 16, 16, dtype=torch.uint8, device=device)
    with pytest.raises(BatchError, match="at least one sample"):
        transform.apply_unprepared({"image": nothing}, keys(1)[0])


@each("channels", [1, 3, 4])
@each("kind", [A.Pad, A.Affine])
def test_a_border_of_five_values_is_refused_for_images_of_fewer_channels(kind, channels):
    samples = [{"image": image} for image in photographs(24, 30, channels)]
    size = {"padding": 3} if kind is A.Pad else {"rotate": 9}
    transform = pipeline(kind(**size, fill=(1, 2, 3, 4, 5), p=1))
    assert_refused_by_both(transform, samples, cv2.error, "OpenCV")


@each(
    "again",
    [
        A.Resize(12, 20, area_for_downscale="image", p=1),
        A.Resize(48, 30, interpolation=3, p=1),
        A.Resize(10, 11, p=1),
        A.RandomResizedCrop((12, 12), area_for_downscale="image", p=1),
    ],
)
def test_images_that_are_resized_twice_have_the_second_size(again):
    compose = A.Compose([A.Resize(22, 26, p=1), A.HorizontalFlip(), again, A.ToTensorV2()])
    samples = [{"image": image, "mask": image[..., 0]} for image in photographs(24, 30) * 2]
    transform = as_batch_transform(compose).for_samples(samples)
    wanted = torch.stack([sample["image"] for sample in in_worker(transform, samples)])
    batch, _ = on_device(transform, samples)
    assert batch["image"].shape == wanted.shape
    assert (batch["image"].int() - wanted).abs().max() <= 1


@each("fill", ["inpaint_telea", "inpaint_ns"])
def test_gray_images_that_some_samples_inpaint_are_one_batch(fill):
    samples = [{"image": image} for image in photographs(24, 30, 1) * 4]
    dropout = A.CoarseDropout(fill=fill, p=0.5)
    assert_both_ways_agree(
        pipeline(A.HorizontalFlip(), dropout, A.InvertImg(), A.ToTensorV2()), samples
    )


@each("channels", [4, 5])
@each("operation", [A.ColorJitter(p=1), A.HueSaturationValue(p=1), A.ToGray(p=1)])
def test_colours_of_images_that_are_not_rgb_are_refused_as_in_albumentations(operation, channels):
    image = photographs(24, 30, channels)[0]
    with pytest.raises((TypeError, ValueError, NotImplementedError)) as theirs:
        operation(image=image.copy())
    assert_refused_by_both(pipeline(operation), [{"image": image}], type(theirs.value), "")


@each("on_device", [False, True])
@each(
    "operation",
    [A.Equalize(p=1), A.Normalize(0.5, 0.25, normalization="min_max_per_channel")],
)
@each("channels", [0, 1, 3])
def test_what_writes_to_its_image_leaves_the_dataset_as_it_is(operation, channels, on_device):
    image = photographs(24, 30)[0][..., : channels or 1].copy()
    image = image if channels else image[..., 0].copy()
    image = image / np.float32(255) if isinstance(operation, A.Normalize) else image
    before, worker = image.copy(), pipeline(operation).in_worker(on_device=on_device)
    for key in keys(2):
        worker({"image": image}, key)
    assert np.array_equal(image, before)
