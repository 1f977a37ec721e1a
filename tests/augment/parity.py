"""Compare device forms with Albumentations on the same drawn parameters."""

from __future__ import annotations

import functools
import os
import warnings

os.environ.setdefault("NO_ALBUMENTATIONS_UPDATE", "1")

import albumentations as A
import numpy as np
import torch

from lightning_fastdata.augment.ops import DEVICE_OPS

torch.set_num_threads(1)


@functools.cache
def _photograph(name):
    from skimage import data

    return getattr(data, name)()


def photographs(height, width, channels=3, dtype=np.uint8):
    pictures = []
    for shift, name in enumerate(("astronaut", "coffee", "chelsea")):
        picture = _photograph(name)
        picture = picture[60 + 9 * shift :, 90:][:height, :width]
        assert picture.shape[:2] == (height, width)
        picture = np.concatenate([picture, 255 - picture[::-1], picture[:, ::-1]], 2)
        pictures.append(np.ascontiguousarray(picture[..., :channels]))
    if dtype == np.float32:
        return [(picture / 255).astype(np.float32) for picture in pictures]
    return pictures


def extremes(height, width, channels=3, dtype=np.uint8, seed=0):
    """Noise, constants, two values, few values, and one odd pixel."""
    rng = np.random.default_rng(seed)
    shape = (height, width, channels)
    lonely = np.full(shape, 9, np.uint8)
    lonely[-1, -1] = 200
    pictures = [
        rng.integers(0, 256, shape, dtype=np.uint8),
        *(np.full(shape, value, np.uint8) for value in (0, 77, 255)),
        rng.integers(0, 2, shape, dtype=np.uint8) * 255,
        rng.integers(100, 104, shape, dtype=np.uint8),
        lonely,
    ]
    if dtype == np.float32:
        return [(picture / 255).astype(np.float32) for picture in pictures]
    return pictures


def _form(encoded):
    shapes = tuple((name, array.shape, array.dtype) for name, array in encoded.arrays.items())
    return encoded.static, shapes


def encoded_by(transform, image):
    """Return the device form, what it notes of an image, and what Albumentations makes of it."""
    transform.set_random_seed(3)
    result = transform(image=image.copy())["image"]
    op = DEVICE_OPS[type(transform).__name__]
    return op, op.encode(transform, transform.params, image.shape, image.dtype), result


def both(transform, images, masks=None, seeds=range(4)):
    """Return what Albumentations and the device form make of every image for every seed.

    Returns a list of ``(expected image, actual image, expected mask, actual mask)``, without what
    has no device form.
    """
    op, compose, groups = DEVICE_OPS[type(transform).__name__], A.Compose([transform]), {}
    for seed in seeds:
        for number, image in enumerate(images):
            compose.set_random_seed(101 * seed + number)
            data = {"image": image}
            if masks is not None:
                data["mask"] = masks[number]
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                expected = compose(**{k: value.copy() for k, value in data.items()})
            encoded = op.encode(transform, transform.params, image.shape, image.dtype)
            if encoded is None:
                continue
            hash(encoded.static)
            assert np.asarray(expected["image"]).shape == tuple(
                op.out_shape(transform, transform.params, image.shape)
            )
            groups.setdefault(_form(encoded), []).append((encoded, data, expected))
    results = []
    for (static, _), members in groups.items():
        arrays = {
            name: torch.from_numpy(np.stack([one[0].arrays[name] for one in members]))
            for name in members[0][0].arrays
        }
        stacked = torch.from_numpy(np.stack([one[1]["image"] for one in members]))
        outs = op.image(stacked, dict(static), arrays).numpy()
        mask_outs = [None] * len(members)
        if masks is not None:
            mask_batch = torch.from_numpy(np.stack([one[1]["mask"] for one in members]))
            run = op.mask or (lambda m, *_: m)
            mask_outs = run(mask_batch, dict(static), arrays).numpy()
        for (_, _, expected), out, mask_out in zip(members, outs, mask_outs, strict=True):
            want = np.asarray(expected["image"])
            assert out.shape == want.shape
            assert out.dtype == want.dtype == op.out_dtype(transform, images[0].dtype)
            results.append((want, out, np.asarray(expected.get("mask")), mask_out))
    return results
