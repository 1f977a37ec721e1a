"""Every operation with any number of channels: Albumentations' pixels, or its own refusal."""

from __future__ import annotations

import albumentations as A
import numpy as np
import pytest
from augment.parity import photographs
from misses import each

from benchmarks.parity import (
    both_ways,
    examples,
    make_example,
    pixel_parity,
)
from lightning_fastdata.augment.ops import DEVICE_OPS
from lightning_fastdata.augment.pipeline.dtypes import takes_dtype
from lightning_fastdata.types import SampleKey

CASES = [
    pytest.param(name, arguments, id=f"{name} {number}")
    for number, (name, arguments) in enumerate(examples())
]
REFUSED_BY_ALBUMENTATIONS = {
    **dict.fromkeys((1, 3), frozenset()),
    **{
        count: {
            *{"ColorJitter", "Equalize", "HueSaturationValue"},
            "ToGray",
        }
        for count in (4, 5)
    },
}
"""Channels -> operations that Albumentations has no meaning for; it raises."""


def on_the_cpu(name, channels, dtype):
    """Whether the transform has no device form for such images: Albumentations makes them."""
    known = takes_dtype(DEVICE_OPS[name], np.dtype(dtype))
    return not known or (channels == 1 and name == "ColorJitter")


def sample(name, arguments, channels, dtype):
    """Return the operation, and images that it can be applied to."""
    if name == "Normalize" and not arguments:
        arguments = {"mean": [0.1 * (one + 1) for one in range(channels)], "std": [0.2] * channels}
    return make_example(name, arguments), photographs(140, 140, channels, dtype)[:3]


@pytest.mark.cases(49)
@pytest.mark.filterwarnings("ignore:This augmenter is very slow", "ignore:The image is already")
@each("dtype", [np.uint8, np.float32])
@each("channels", [1, 3, 4, 5])
@each(("name", "arguments"), CASES)
def test_no_number_of_channels_is_wrong_silently(name, arguments, channels, dtype):
    transform, images = sample(name, arguments, channels, dtype)
    if name in REFUSED_BY_ALBUMENTATIONS[channels]:
        with pytest.raises((TypeError, ValueError, NotImplementedError)) as theirs:
            transform(image=images[0].copy())
        with pytest.raises(type(theirs.value)):
            pixel_parity(transform, images)
        return
    if DEVICE_OPS[name].draws_pixels(transform):
        wanted, got, _ = both_ways(A.Compose([transform]), images, SampleKey(0, 0, 0))
        unit = 1 if dtype == np.uint8 else 255
        for want, image in zip(wanted, got, strict=True):
            assert (image.shape, image.dtype) == (want.shape, want.dtype)
            # Each channel gets the same, not only the first three.
            apart = (image.astype(np.float64) - want).mean((0, 1)) * unit
            assert np.abs(apart).max() < 8
            spread = want.astype(np.float64).std((0, 1)) * unit
            np.testing.assert_allclose(image.std((0, 1)) * unit, spread, rtol=0.1, atol=1)
        return
    found = pixel_parity(transform, images, draws=2)
    # Contrast and saturation behind the hue make two or three levels of one.
    assert found.largest <= (3 if name == "ColorJitter" else 1) + 1e-4
    assert found.equal >= (0.998 if dtype == np.uint8 else 0.9)
    if dtype == np.float32:
        assert found.largest < 0.6
    assert found.on_device == (0 if on_the_cpu(name, channels, dtype) else 1)


def test_every_registered_operation_is_tried():
    assert {name for name, _ in examples()} == set(DEVICE_OPS)


def test_an_image_that_albumentations_writes_to_is_compared_all_the_same():
    """Equalizing a gray image by its Pillow formula changes the array that was given."""
    transform = make_example("Equalize", {"mode": "pil"})
    image = photographs(60, 70, 1)[0]
    before = image.copy()
    assert pixel_parity(transform, [image], draws=3).largest == 0
    np.testing.assert_array_equal(image, before)
