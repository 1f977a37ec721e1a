from __future__ import annotations

import albumentations as A
import numpy as np
from augment.batches import flat, in_worker, on_device, pipeline
from misses import each
from scipy import stats

# Weak enough that values are not cut off at a level of 128.
ADDED = {
    "gauss": A.GaussNoise((0.04, 0.09), p=1),
    "gauss, off center": A.GaussNoise((0.02, 0.05), (-0.2, 0.2), p=1),
    "gauss, all channels alike": A.GaussNoise((0.02, 0.09), per_channel=False, p=1),
    "gauss, coarse": A.GaussNoise((0.04, 0.09), noise_scale_factor=0.3, p=1),
}


def residuals(transform, count=6, channels=3, seed=0):
    """Return what both ways add to flat images: float64 ``[count, H, W, C]`` each."""
    items = flat(count, (64, 64), channels)
    if channels == 1:
        items = [{"image": item["image"][..., 0]} for item in items]
    whole = pipeline(transform)
    want = np.stack([one["image"] for one in in_worker(whole, items, seed)])
    got = on_device(whole, items, seed)[0]["image"].numpy()
    assert got.dtype == want.dtype == np.uint8
    before = np.stack([item["image"] for item in items])
    shape = (*before.shape[:3], channels)
    return tuple((image.astype(np.float64) - before).reshape(shape) for image in (want, got))


def spread(values):
    return values.std((1, 2, 3))


@each("name", ADDED)
def test_added_noise_has_the_law_and_the_drawn_strength_of_albumentations(name):
    want, got = residuals(ADDED[name])
    assert (want != got).mean() > 0.5
    # The same strength in every sample, to four standard errors: neighbours and channels that go
    # together leave fewer independent numbers, and Laplace's vary more.
    loose = 0.12 if "coarse" in name or "laplace" in name else 0.07 if "alike" in name else 0.035
    np.testing.assert_allclose(spread(got), spread(want), rtol=loose)
    np.testing.assert_allclose(
        got.mean((1, 2, 3)), want.mean((1, 2, 3)), atol=1.5 * loose * spread(want).max()
    )
    step = 4 if "coarse" in name else 1
    one, two = (v[:, ::step, ::step].copy() for v in (want, got))
    channels = slice(0, 1) if "alike" in name or name == "laplace" else slice(None)
    pooled = [v[..., channels].ravel() for v in (one, two)]
    assert stats.ks_2samp(*pooled).pvalue > 1e-3


@each("name", ADDED)
def test_added_noise_goes_together_where_albumentations_noise_does(name):
    want, got = residuals(ADDED[name], count=4)

    def together(noise):
        noise = noise - noise.mean((1, 2, 3), keepdims=True)
        noise = noise / noise.std((1, 2, 3), keepdims=True)
        shifted = [(noise[:, :, lag:], noise[:, :, :-lag]) for lag in (1, 3)]
        shifted += [(noise[:, 2:], noise[:, :-2]), (noise[..., :2], noise[..., 1:])]
        shifted.append((noise[:-1], noise[1:]))
        return np.array([(a * b).mean() for a, b in shifted])

    np.testing.assert_allclose(together(got), together(want), atol=0.05)


@each("channels", [1, 4])
@each("name", ["gauss", "gauss, all channels alike", "gauss, coarse"])
def test_added_noise_takes_any_number_of_channels(name, channels):
    want, got = residuals(ADDED[name], channels=channels)
    np.testing.assert_allclose(spread(got), spread(want), rtol=0.2 if "coarse" in name else 0.1)
