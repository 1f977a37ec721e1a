"""Whatever changes dtype or range, in some samples or in all: Albumentations' values."""

from __future__ import annotations

import warnings

import albumentations as A
import numpy as np
import pytest
import torch
from augment.batches import collated, in_worker, keys, left_to_device
from augment.parity import both, photographs
from augment.trees import trees
from hypothesis import HealthCheck, given
from hypothesis import strategies as st
from misses import each
from thoroughness import max_examples

from benchmarks.parity import examples, make_example
from lightning_fastdata.augment.albumentations.plan import FLOATS, analyse, takes_dtype
from lightning_fastdata.augment.ops import DEVICE_OPS
from lightning_fastdata.augment.transform import as_batch_transform
from lightning_fastdata.errors import BatchError
from lightning_fastdata.types import SampleKey

SIDE = 40
KEY = SampleKey(3, 1, 40)


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
    lambda p: A.Perspective(p=p),
    lambda p: A.Affine(rotate=(-30, 30), p=p),
    lambda p: A.Affine(rotate=(-30, 30), interpolation=2, p=p),
    lambda p: A.CoarseDropout(fill=200, p=p),
    lambda p: A.GaussianBlur(p=p),
]
composes = st.builds(
    lambda middle, end: A.Compose([A.RandomCrop(32, 32), *middle, *end]),
    trees(CASTS + COLOURS + MOVES, 4),
    st.sampled_from([[], [A.ToTensorV2()]]),
)
DTYPES = [np.uint8, np.float32, np.float64, np.uint16]


def images_of(dtype):
    images = photographs(SIDE, SIDE) * 2
    if dtype == np.uint16:
        return [image.astype(dtype) * 257 for image in images]
    return [image if dtype == np.uint8 else (image / 255).astype(dtype) for image in images]


def deferred(transform, samples):
    """Return the images after worker and device."""
    left, draws = left_to_device(transform, samples, keys(len(samples)))
    return transform.apply({"image": stacked(left)}, draws)["image"]


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
    assert_close(deferred(transform.for_samples(samples), samples), wanted)


def assert_close(made, wanted):
    """Assert that two batches are of one form and at most four levels apart."""
    assert made.dtype == wanted.dtype
    assert made.shape == wanted.shape
    assert torch.equal(made.isnan(), wanted.isnan())
    gap = torch.nan_to_num(made.double() - wanted.double()).abs().max()
    assert float(gap) * levels(wanted) <= 4.01


@max_examples(40, suppress_health_check=list(HealthCheck))
@given(composes, st.sampled_from(DTYPES))
def test_any_pipeline_gives_what_albumentations_gives_for_any_dtype(compose, dtype):
    samples = [{"image": image} for image in images_of(dtype)]
    with warnings.catch_warnings(), np.errstate(all="ignore"):
        warnings.simplefilter("ignore")
        assert_same(compose, samples)


@max_examples(30, suppress_health_check=list(HealthCheck))
@given(composes, st.sampled_from(DTYPES))
def test_batches_of_any_dtype_are_carried_out_as_albumentations_does(compose, dtype):
    images = torch.from_numpy(np.stack(images_of(dtype)))
    with warnings.catch_warnings(), np.errstate(all="ignore"):
        warnings.simplefilter("ignore")
        try:
            wanted = collated(compose, {"image": images}, KEY, on_device=False)
        except Exception:
            return
        made = collated(compose, {"image": images}, KEY, on_device=True)
        assert_close(made["image"], wanted["image"])


def sized(name, arguments):
    """Return an operation for images of 48 x 48 pixels."""
    smaller = {"min_max_height": (20, 40)} if name == "RandomSizedCrop" else {}
    return make_example(name, {**arguments, **smaller, **dict.fromkeys(
        {"height", "width"} & arguments.keys(), 40)})  # fmt: skip


@each(("name", "arguments"), examples())
def test_operations_that_take_floats_take_those_of_any_range(name, arguments):
    transform, op = sized(name, arguments), DEVICE_OPS[name]
    if not takes_dtype(op, FLOATS):
        return
    images = [(image / 60 - 2).astype(np.float32) for image in photographs(48, 48)]
    with np.errstate(all="ignore"):
        found = both(transform, images, seeds=[0])
        assert len(found) == len(images)
        for want, made, *_ in found:
            assert np.array_equal(np.isnan(want), np.isnan(made))
            np.testing.assert_allclose(made, want, rtol=0, atol=1.01 / 255)


@each("casts", [A.ToFloat(p=0.5), A.OneOf([A.InvertImg(), A.Normalize()])])
def test_a_pipeline_that_ends_with_two_dtypes_leaves_nothing_to_the_device(casts):
    plan = analyse(A.Compose([A.HorizontalFlip(), casts, A.ToTensorV2()]), DEVICE_OPS)
    assert not plan.defers
    reason = "the pipeline may change the dtype of some samples only, and a batch has one"
    assert {place.why for place in plan.placements} == {reason}


@each("operation", [A.ColorJitter(p=1), A.GaussNoise(p=1), A.Blur(p=1)])
def test_colours_blurs_and_noise_of_floats_are_left_to_albumentations(operation):
    samples = [{"image": image} for image in photographs(SIDE, SIDE, dtype=np.float32)]
    transform = as_batch_transform(A.Compose([A.HorizontalFlip(p=1), operation, A.ToTensorV2()]))
    fitted = transform.for_samples(samples)
    assert [place.where for place in fitted.plan.placements] == ["either", "worker", "device"]
    made, wanted = deferred(fitted, samples), stacked(in_worker(transform, samples))
    assert torch.equal(made, wanted)
