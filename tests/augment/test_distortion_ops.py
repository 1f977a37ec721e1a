from __future__ import annotations

import warnings

import albumentations as A
import numpy as np
import pytest
from augment.parity import both, parity, photographs
from misses import each

from lightning_fastdata.augment.ops import DEVICE_OPS
from lightning_fastdata.augment.pipeline.bounds import fields, opencv_major

warnings.filterwarnings("ignore", message="This augmenter is very slow")

WARPS = {
    "grid": A.GridDistortion(p=1),
    "grid, leaving the image": A.GridDistortion(
        3, distort_limit=(-0.9, 0.9), normalized=False, fill=120.0, p=1
    ),
    "lens": A.OpticalDistortion((-0.6, 0.6), p=1),
    "fisheye": A.OpticalDistortion((-0.9, 0.9), mode="fisheye", fill=33.0, p=1),
    **{
        f"lens, border {mode}": A.OpticalDistortion(
            (0.3, 0.8), border_mode=mode, fill=77.0, fill_mask=9.0, p=1
        )
        for mode in range(5)
    },
}


def pictures(channels=3, dtype=np.uint8):
    return photographs(131, 170, channels, dtype)


@pytest.mark.cases(19)
@each("channels", [1, 3, 4])
@each("name", WARPS)
def test_distortions_are_at_most_one_level_off_on_photographs(name, channels):
    found = parity(WARPS[name], pictures(channels), seeds=range(2))
    assert found.largest <= (0 if name.startswith("grid") else fields().largest)
    assert found.exact >= 0.999


@each("name", WARPS)
def test_distortions_of_float_images_agree_to_a_small_part_of_a_level(name):
    found = parity(WARPS[name], pictures(dtype=np.float32), seeds=[3])
    # Wherever the fill is far from [0, 1], so is its edge with the image.
    near = 5e-3 if WARPS[name].fill else 1e-3
    assert found.largest <= (near if opencv_major() >= 5 else fields().of_floats / 255)


@pytest.mark.cases(20)
@each("dtype", [np.uint8, np.float32])
@each("name", WARPS)
def test_masks_take_the_field_of_their_image(name, dtype):
    images = pictures()
    masks = [(photo[..., 0] // 16).astype(dtype) for photo in images]
    for _, _, want, got in both(WARPS[name], images, masks, seeds=range(2)):
        assert got.dtype == want.dtype
        # A field that differs in the last bit may step over the half between two pixels.
        assert (got == want).mean() >= (1 if name.startswith("grid") else 0.999)


@each("shape", [(1, 1), (1, 9), (9, 1), (2, 3)])
@each("name", ["lens", "fisheye"])
def test_tiny_images_are_no_special_case(name, shape):
    assert parity(WARPS[name], photographs(*shape)).largest <= 1


@each(
    "transform",
    [
        A.GridDistortion(interpolation=4, p=1),
        A.OpticalDistortion(mask_interpolation=4, p=1),
    ],
)
def test_other_interpolations_are_declined_before_anything_is_drawn(transform):
    image = photographs(40, 50)[0]
    op = DEVICE_OPS[type(transform).__name__]
    transform.set_random_seed(3)
    before = transform.py_random.getstate()
    if op.draw is not None:
        assert op.draw(transform, {"shape": image.shape}, {"image": image}) is None
    assert transform.py_random.getstate() == before
    transform(image=image)
    assert op.encode(transform, transform.params, image.shape, image.dtype) is None
