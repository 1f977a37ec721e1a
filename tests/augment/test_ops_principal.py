from __future__ import annotations

import itertools

import albumentations as A
import numpy as np
import pytest
import torch
from augment.parity import extremes, photographs
from misses import each

from lightning_fastdata.augment.ops import DEVICE_OPS
from lightning_fastdata.augment.ops.colors.statistics import principal_axes
from lightning_fastdata.augment.transform import as_batch_transform

OP = DEVICE_OPS["FancyPCA"]


def ours(image, strength):
    params = {"alpha_vector": np.asarray(strength, np.float32)}
    encoded = OP.encode(A.FancyPCA(p=1), params, image.shape, image.dtype)
    arrays = {name: torch.from_numpy(array[None]) for name, array in encoded.arrays.items()}
    return OP.image(torch.from_numpy(image[None]), dict(encoded.static), arrays)[0].numpy()


def closest_signs(image, strength):
    """Return our image, and Albumentations' with the signs of the axes that come closest."""
    got = ours(image, strength)
    wanted = [
        A.FancyPCA(p=1).apply(image.copy(), np.float32(strength) * np.float32(signs))
        for signs in itertools.product((1, -1), repeat=len(strength))
    ]
    return got, min(wanted, key=lambda one: np.abs(one.astype(np.float64) - got).sum())


@pytest.mark.cases(8)
@each("dtype", [np.uint8, np.float32])
@each("channels", [1, 3, 4, 5])
@each("alpha", [0.1, 1.0])
def test_fancy_pca_is_albumentations_up_to_the_signs_of_the_axes(alpha, channels, dtype):
    rng = np.random.default_rng(3)
    for image in photographs(90, 110, channels, dtype):
        strength = rng.normal(0, alpha, channels)
        got, wanted = closest_signs(image, strength)
        assert got.shape == wanted.shape
        gap = np.abs(got.astype(np.float64) - wanted)
        if dtype == np.uint8:
            assert gap.max() <= 1
            assert (gap == 0).mean() >= 0.999
        else:
            assert gap.max() < 1e-5
    # With strength 1 the colours do move.
    moved = np.abs(got.astype(np.float64) - image).max()
    assert alpha < 1 or moved > (1 if dtype == np.uint8 else 1 / 255)


@each("dtype", [np.uint8, np.float32])
@each("channels", [1, 3])
def test_images_without_colours_or_contrast_are_no_special_case(channels, dtype):
    for image in extremes(20, 24, channels, dtype):
        got, wanted = closest_signs(image, [7.0] * channels)
        assert np.isfinite(got).all()
        # Where two axes are equally strong, any pair of directions across is as principal.
        if len(np.unique(image)) > 4 or image.std() == 0:
            assert np.abs(got.astype(np.float64) - wanted).max() <= (
                1 if dtype == np.uint8 else 0.1
            )


@each("count", [2, 3, 4, 5])
def test_principal_axes_are_numpys_eigenvectors(count):
    rng = np.random.default_rng(count)
    roots = rng.normal(size=(500, count, count)) * 10.0 ** rng.uniform(-3, 0, (500, 1, count))
    matrices = roots @ roots.transpose(0, 2, 1)
    values, vectors = (one.numpy() for one in principal_axes(torch.from_numpy(matrices)))
    wanted = np.linalg.eigvalsh(matrices)[:, ::-1]
    scale = wanted[:, :1]
    np.testing.assert_allclose(values / scale, wanted / scale, atol=1e-14)
    rebuilt = vectors * values[:, None] @ vectors.transpose(0, 2, 1)
    np.testing.assert_allclose(rebuilt / scale[..., None], matrices / scale[..., None], atol=1e-13)
    largest = np.take_along_axis(vectors, np.abs(vectors).argmax(1)[:, None], 1)
    assert (largest > 0).all()


@each("count", [2, 3, 5])
def test_principal_axes_of_a_diagonal_or_empty_matrix_are_the_channels(count):
    diagonal = torch.diag(torch.arange(count, 0, -1, dtype=torch.float64))
    values, vectors = principal_axes(torch.stack([diagonal, torch.zeros_like(diagonal)]))
    assert torch.equal(values, torch.stack([diagonal.diagonal(), torch.zeros(count)]))
    assert torch.equal(vectors[0], torch.eye(count, dtype=torch.float64))


def test_more_channels_than_have_a_device_form_are_declined():
    image = photographs(20, 24, 7)[0]
    params = {"alpha_vector": np.zeros(7, np.float32)}
    assert OP.encode(A.FancyPCA(), params, image.shape, image.dtype) is None


def test_who_wants_the_same_pixels_gets_them_from_the_worker():
    [place] = as_batch_transform(A.Compose([A.FancyPCA()])).plan.placements
    assert (place.where, "signs of the principal axes" in place.why) == ("device", True)
    [place] = as_batch_transform(A.Compose([A.FancyPCA()]), same_pixels=True).plan.placements
    assert place.where == "worker"
