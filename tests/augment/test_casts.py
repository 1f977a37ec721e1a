"""Operations that change the dtype, alone and with others behind them."""

from __future__ import annotations

import albumentations as A
import numpy as np
from augment.batches import in_worker, on_device, pipeline
from augment.parity import photographs
from misses import each


def own(kind):
    return A.Normalize(normalization=kind, p=1)


PIPELINES = {
    "to float and back": (A.ToFloat(), A.RandomGamma(p=1), A.FromFloat(), A.InvertImg(p=1)),
    "to fewer levels": (A.ToFloat(), A.FromFloat(max_value=100), A.HorizontalFlip(p=1)),
    "by range, then a tensor": (A.RandomGamma(p=1), own("min_max"), A.ToTensorV2()),
    "by mean, then moved": (own("image_per_channel"), A.HorizontalFlip(p=0.5), A.ToTensorV2()),
    "by range, then blurred": (own("min_max"), A.GaussianBlur(p=1), A.HorizontalFlip(p=1)),
    "by range, and back": (own("min_max"), A.FromFloat(), A.HorizontalFlip(p=1)),
    "to another dtype": (A.ToFloat(), A.FromFloat("uint16"), A.ToFloat(), A.HorizontalFlip(p=1)),
    "gray to rgb": (A.RandomGamma(p=1), A.ToRGB(), A.Normalize(), A.ToTensorV2()),
}


@each("name", PIPELINES)
def test_pipelines_that_change_the_dtype_yield_what_albumentations_yields(name):
    gray = name.startswith("gray")
    images = photographs(48, 40)
    items = [{"image": image[..., 0] if gray else image} for image in images]
    transform = pipeline(*PIPELINES[name])
    got = on_device(transform, items)[0]["image"].numpy()
    for one, want in zip(got, in_worker(transform, items), strict=True):
        expected = np.asarray(want["image"])
        assert (one.shape, one.dtype) == (expected.shape, expected.dtype)
        np.testing.assert_allclose(
            one.astype(np.float64), expected.astype(np.float64), rtol=1e-5, atol=1e-5
        )
