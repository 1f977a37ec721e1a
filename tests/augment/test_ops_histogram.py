from __future__ import annotations

import albumentations as A
import numpy as np
from augment.parity import extremes, parity, photographs
from misses import each

from lightning_fastdata.augment.ops import DEVICE_OPS

TRANSFORMS = {
    "equalize": A.Equalize(p=1),
    "equalize, pil": A.Equalize(mode="pil", p=1),
}


@each("channels", [1, 3])
@each("name", list(TRANSFORMS))
def test_histogram_operations_equal_albumentations_on_photographs(name, channels):
    for size in ((131, 170), (128, 170), (120, 105)):
        images = photographs(*size, channels)
        assert parity(TRANSFORMS[name], images, seeds=[1, 2]).largest == 0


@each("size", [(1, 1), (3, 1), (7, 5), (40, 33)])
@each("channels", [1, 3])
@each("name", list(TRANSFORMS))
def test_histogram_operations_equal_albumentations_on_extreme_images(name, channels, size):
    assert parity(TRANSFORMS[name], extremes(*size, channels), seeds=[0]).largest == 0


@each(
    "transform",
    [
        A.Equalize(mask=np.ones((40, 50), np.uint8), p=1),
        A.Equalize(mask=lambda image: (image[..., 0] > 9).astype(np.uint8), p=1),
        A.Equalize(by_channels=False, p=1),
    ],
)
def test_equalizing_under_a_mask_or_by_luminance_is_left_to_the_cpu(transform):
    image = photographs(40, 50)[0]
    transform(image=image)
    op = DEVICE_OPS["Equalize"]
    assert op.encode(transform, transform.params, image.shape, image.dtype) is None
