"""Whatever changes dtype or range, in some samples or in all: Albumentations' values."""

from __future__ import annotations

import itertools
import warnings

import albumentations as A
import numpy as np
import pytest
import torch
from augment.batches import in_worker, keys
from augment.parity import both, photographs
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lightning_fastdata.augment.ops import DEVICE_OPS
from lightning_fastdata.augment.parity import examples, make_example
from lightning_fastdata.augment.plan import analyse
from lightning_fastdata.augment.transform import as_batch_transform
from lightning_fastdata.augment.values import (
    BYTES,
    Values,
    follow_values,
    takes_any_range,
    takes_dtype,
    values_after,
)
from lightning_fastdata.errors import BatchError

SIDE = 40
FLOATS = Values(np.dtype(np.float32))


class Halves(A.ImageOnlyTransform):
    """Makes float64 of uint8, as people's own transforms do."""

    def apply(self, img, **params):
        return img * 0.5


CASTS = [
    lambda p: A.ToFloat(p=p),
    lambda p: A.ToFloat(max_value=65535, p=p),
    lambda p: A.FromFloat(p=p),
    lambda p: A.Normalize(p=p),
    lambda p: A.Normalize(normalization="min_max", p=p),
    lambda p: A.Normalize(normalization="image", p=p),
    lambda p: Halves(p=p),
]
COLOURS = [
    lambda p: A.InvertImg(p=p),
    lambda p: A.ColorJitter(p=p),
    lambda p: A.RandomGamma(p=p),
    lambda p: A.HueSaturationValue(p=p),
    lambda p: A.RandomBrightnessContrast(p=p),
    lambda p: A.RandomBrightnessContrast(brightness_by_max=False, p=p),
    lambda p: A.UnsharpMask(p=p),
    lambda p: A.ToGray(p=p),
    lambda p: A.ImageCompression(p=p),
]
MOVES = [
    lambda p: A.HorizontalFlip(p=p),
    lambda p: A.RandomCrop(32, 32, p=p if p == 1 else 0),
    lambda p: A.Affine(rotate=(-30, 30), p=p),
    lambda p: A.Affine(rotate=(-30, 30), interpolation=2, p=p),
    lambda p: A.CoarseDropout(fill=200, p=p),
    lambda p: A.GaussianBlur(p=p),
]
leaves = st.builds(
    lambda make, p: make(p), st.sampled_from(CASTS + COLOURS + MOVES), st.sampled_from([0.5, 1.0])
)
nodes = st.one_of(
    leaves,
    st.builds(lambda of, p: A.OneOf(of, p=p), st.lists(leaves, min_size=1, max_size=3),
              st.sampled_from([0.6, 1.0])),
    st.builds(lambda of, p: A.SomeOf(of, n=len(of) - 1, p=p),
              st.lists(leaves, min_size=2, max_size=3), st.sampled_from([0.6, 1.0])),
    st.builds(lambda of, p: A.Sequential(of, p=p), st.lists(leaves, min_size=1, max_size=3),
              st.sampled_from([0.6, 1.0])),
)  # fmt: skip
DTYPES = [np.uint8, np.float32, np.float64, np.uint16]


def images_of(dtype):
    images = photographs(SIDE, SIDE) * 2
    if dtype == np.uint16:
        return [image.astype(dtype) * 257 for image in images]
    return [image if dtype == np.uint8 else (image / 255).astype(dtype) for image in images]


def deferred(transform, samples):
    """Return the images after worker and device."""
    part = transform.in_worker(on_device=True)
    drawn = [part(one, key) for one, key in zip(samples, keys(len(samples)), strict=True)]
    batch = {"image": stacked([one for one, _ in drawn])}
    return transform.apply(batch, part.collate([tape for _, tape in drawn]))["image"]


def stacked(samples):
    return torch.stack([torch.as_tensor(sample["image"]) for sample in samples])


def levels(batch):
    """Return how many of 255 levels a difference of 1 in a batch is, roughly."""
    if not batch.is_floating_point():
        return 255 / torch.iinfo(batch.dtype).max
    batch = torch.nan_to_num(batch)
    return 255 / max(float(batch.amax() - batch.amin()), 1e-3)


def assert_same(compose, samples):
    """Assert that worker and device make of samples what Albumentations makes of them."""
    transform = as_batch_transform(compose)
    try:
        wanted = stacked(in_worker(transform, samples))
    except Exception as error:
        # What Albumentations refuses is refused.
        with pytest.raises((type(error), BatchError)):
            deferred(transform.for_samples(samples), samples)
        return
    made = deferred(transform.for_samples(samples), samples)
    assert made.dtype == wanted.dtype
    assert made.shape == wanted.shape
    assert torch.equal(made.isnan(), wanted.isnan())
    gap = torch.nan_to_num(made.double() - wanted.double()).abs().max()
    assert float(gap) * levels(wanted) <= 4.01


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.lists(nodes, min_size=1, max_size=4), st.sampled_from(DTYPES), st.booleans())
def test_any_pipeline_gives_what_albumentations_gives_for_any_dtype(middle, dtype, ends):
    samples = [{"image": image} for image in images_of(dtype)]
    with warnings.catch_warnings(), np.errstate(all="ignore"):
        warnings.simplefilter("ignore")
        assert_same(A.Compose([*middle, *([A.ToTensorV2()] if ends else [])]), samples)
