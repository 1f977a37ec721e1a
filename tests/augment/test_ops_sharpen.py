from __future__ import annotations

import albumentations as A
import numpy as np
import pytest
from augment.parity import both, extremes, parity, photographs
from misses import each

from lightning_fastdata.augment.ops import DEVICE_OPS

EXACT = {
    "median": A.MedianBlur(p=1),
}
CONVOLUTIONS = {
    "sharpen": A.Sharpen(p=1),
    "sharpen, strong": A.Sharpen((0.8, 1.0), (0.0, 2.0), p=1),
    "emboss": A.Emboss(p=1),
    "emboss, strong": A.Emboss((0.8, 1.0), (0.0, 2.0), p=1),
    "defocus": A.Defocus(p=1),
    "defocus, wide": A.Defocus((1, 14), (0.1, 2.0), p=1),
}
SIZES = [(1, 1), (1, 9), (9, 1), (3, 2), (40, 33)]


@each("channels", [1, 3, 4])
@each("name", list(EXACT))
def test_order_statistics_equal_albumentations(name, channels):
    transform = EXACT[name]
    assert parity(transform, photographs(67, 94, channels), range(3)).largest == 0
    for size in SIZES:
        assert parity(transform, extremes(*size, channels), range(3)).largest == 0


@each("name", list(EXACT))
def test_order_statistics_of_float_images_equal_albumentations(name):
    images = [*photographs(40, 33, dtype=np.float32), *extremes(40, 33, dtype=np.float32)]
    assert parity(EXACT[name], images).largest == 0


@each("name", ["median", "sharpen"])
def test_pixel_filters_leave_masks_alone(name):
    transform = EXACT["median"] if name == "median" else CONVOLUTIONS[name]
    masks = [photo[..., 0] for photo in photographs(40, 33)]
    for _, _, want, got in both(transform, photographs(40, 33), masks, seeds=[0]):
        np.testing.assert_array_equal(got, want)


@pytest.mark.cases(11)
@each("channels", [1, 3, 4])
@each("name", list(CONVOLUTIONS))
def test_convolutions_are_at_most_one_level_off(name, channels):
    transform = CONVOLUTIONS[name]
    for images in (photographs(67, 94, channels), extremes(40, 33, channels)):
        found = parity(transform, images, seeds=range(3))
        assert found.largest <= 1
        assert found.exact >= 0.999


@each("size", SIZES[:4])
@each("transform", [CONVOLUTIONS["defocus"], CONVOLUTIONS["sharpen"]])
def test_kernels_may_be_wider_than_the_image(transform, size):
    assert parity(transform, photographs(*size)).largest <= 1


@each("name", list(CONVOLUTIONS))
def test_float_images_agree_to_a_small_part_of_a_level(name):
    transform = CONVOLUTIONS[name]
    found = parity(transform, photographs(67, 94, dtype=np.float32), seeds=range(2))
    assert found.largest <= 1e-5


@each(
    ("transform", "channels"),
    [(A.MedianBlur((9, 9), p=1), 3), (A.Sharpen(method="gaussian", p=1), 1)],
)
def test_parameters_without_a_device_form_are_declined(transform, channels):
    image = photographs(40, 40, channels)[0]
    transform(image=image)
    op = DEVICE_OPS[type(transform).__name__]
    assert op.encode(transform, transform.params, image.shape, image.dtype) is None
