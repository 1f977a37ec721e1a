from __future__ import annotations

import albumentations as A
import numpy as np
import pytest
from augment.parity import both, extremes, parity, photographs
from misses import each

from lightning_fastdata.augment.ops import DEVICE_OPS

CONVOLUTIONS = {
    "sharpen": A.Sharpen(p=1),
    "sharpen, strong": A.Sharpen((0.8, 1.0), (0.0, 2.0), p=1),
}
SIZES = [(1, 1), (1, 9), (9, 1), (3, 2), (40, 33)]


def test_pixel_filters_leave_masks_alone():
    masks = [photo[..., 0] for photo in photographs(40, 33)]
    for _, _, want, got in both(CONVOLUTIONS["sharpen"], photographs(40, 33), masks, seeds=[0]):
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
@each("transform", [A.Blur((7, 9), p=1), CONVOLUTIONS["sharpen"]])
def test_kernels_may_be_wider_than_the_image(transform, size):
    assert parity(transform, photographs(*size)).largest <= 1


def test_sharpening_by_a_gaussian_is_declined():
    transform, image = A.Sharpen(method="gaussian", p=1), photographs(40, 40, 1)[0]
    transform(image=image)
    op = DEVICE_OPS["Sharpen"]
    assert op.encode(transform, transform.params, image.shape, image.dtype) is None
