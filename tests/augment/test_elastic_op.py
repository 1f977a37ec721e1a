from __future__ import annotations

import albumentations as A
import cv2
import numpy as np
import torch
from albumentations.augmentations.geometric import functional
from augment.batches import BOXES, boxed, in_worker, on_device, pipeline
from augment.parity import photographs
from misses import each
from scipy import stats

from lightning_fastdata.augment.ops.positions.elastic import displacements, smoothing

SIZE = (61, 74)


@each("length", [1, 2, 9, 64])
@each("sigma", [1.0, 3.7, 50.0])
def test_smoothing_is_opencvs_gaussian(length, sigma):
    noise = np.random.default_rng(0).normal(size=(length, 33)).astype(np.float32)
    radius = round(sigma * 8 + 1) // 2
    want = cv2.GaussianBlur(noise, (0, 0), sigma, borderType=cv2.BORDER_REPLICATE)
    rows, columns = (smoothing(n, sigma, radius, torch.device("cpu")).float() for n in noise.shape)
    got = rows @ torch.from_numpy(noise) @ columns.mT
    np.testing.assert_allclose(got.numpy(), want, atol=2e-6)
    fixed = cv2.GaussianBlur(noise, (17, 17), sigma, borderType=cv2.BORDER_REPLICATE)
    rows, columns = (smoothing(n, sigma, 8, torch.device("cpu")).float() for n in noise.shape)
    got = rows @ torch.from_numpy(noise) @ columns.mT
    np.testing.assert_allclose(got.numpy(), fixed, atol=2e-6)


def fields(count, same=False, approximate=False, sigma=4.0):
    """Return displacements ``[count, 2, H, W]`` of Albumentations and of the device."""
    radius = 8 if approximate else round(sigma * 8 + 1) // 2
    want = []
    for seed in range(count):
        pair = functional.generate_displacement_fields(
            SIZE,
            30,
            sigma,
            same_dxdy=same,
            kernel_size=(17, 17) if approximate else (0, 0),
            random_generator=np.random.default_rng(seed),
            noise_distribution="gaussian",
        )
        want.append(np.stack(pair))
    static = {"same": same, "radius": radius, "sigma": sigma, "alpha": 30.0}
    seeds = torch.tensor([[seed, 1] for seed in range(count)])
    got = displacements(static, seeds, SIZE).expand(-1, 2, -1, -1)
    return np.stack(want).astype(np.float64), got.double().numpy()


@each("approximate", [False, True])
def test_fields_have_the_law_and_the_smoothness_of_albumentations(approximate):
    want, got = fields(40, approximate=approximate)
    np.testing.assert_allclose(got.std(), want.std(), rtol=0.04)
    # Far enough apart to be independent.
    assert stats.ks_2samp(want[..., ::20, ::20].ravel(), got[..., ::20, ::20].ravel()).pvalue > 1e-3
    for axis in (2, 3):
        for lag in (1, 4, 8, 16):
            pairs = [
                np.corrcoef(
                    np.delete(field, range(lag), axis).ravel(),
                    np.delete(field, range(-lag, 0), axis).ravel(),
                )[0, 1]
                for field in (want, got)
            ]
            assert abs(pairs[0] - pairs[1]) < 0.05
    # Both fields are smoothed in one image, so they meet where one ends and the other begins.
    for field in (want, got):
        assert stats.pearsonr(field[:, 0, -1].ravel(), field[:, 1, 0].ravel())[0] > 0.5


def test_both_directions_are_independent_unless_they_are_to_be_one():
    for same in (False, True):
        for field in fields(20, same=same):
            together = stats.pearsonr(
                field[:, 0, ::16, ::16].ravel(), field[:, 1, ::16, ::16].ravel()
            )
            assert (together[0] > 0.999) if same else (abs(together[0]) < 0.2)


@each("interpolation", [0, 1])
def test_a_mask_moves_with_its_image(interpolation):
    photos = photographs(61, 74)
    items = [{"image": photo, "mask": photo[..., 0].copy()} for photo in photos]
    transform = pipeline(A.ElasticTransform(80, 4, interpolation, p=1))
    batch, _ = on_device(transform, items)
    image, mask = batch["image"][..., 0].numpy(), batch["mask"].numpy()
    assert (mask != np.stack([item["mask"] for item in items])).mean() > 0.3
    if interpolation == 0:
        np.testing.assert_array_equal(image, mask)
    else:
        assert stats.pearsonr(image.ravel().astype(float), mask.ravel().astype(float))[0] > 0.97


def test_boxes_and_keypoints_are_moved_by_the_very_field_of_their_image():
    transform = pipeline(A.ElasticTransform(90, 5, p=1), **BOXES)
    items = [
        boxed({"image": photo, "mask": photo[..., 0]}, 61, 74) for photo in photographs(61, 74)
    ]
    batch, rest = on_device(transform, items)
    for index, one in enumerate(in_worker(transform, items)):
        np.testing.assert_array_equal(batch["image"][index].numpy(), one["image"])
        np.testing.assert_array_equal(batch["mask"][index].numpy(), one["mask"])
        np.testing.assert_array_equal(rest[index]["bboxes"], one["bboxes"])
        np.testing.assert_array_equal(rest[index]["keypoints"], one["keypoints"])


@each("law", ["gaussian", "uniform"])
def test_a_field_of_uniform_noise_is_albumentations_own(law):
    transform = pipeline(A.ElasticTransform(60, 4, noise_distribution=law, p=1))
    items = [{"image": photo} for photo in photographs(61, 74)]
    batch, _ = on_device(transform, items)
    apart = [
        np.abs(batch["image"][index].numpy().astype(int) - one["image"]).max()
        for index, one in enumerate(in_worker(transform, items))
    ]
    assert max(apart) <= 1 if law == "uniform" else min(apart) > 20
    assert transform.plan.placements[0].where == "device"
