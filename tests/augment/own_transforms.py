"""Transforms as users write them, at module level, so that spawned processes find them."""

from __future__ import annotations

import os

os.environ.setdefault("NO_ALBUMENTATIONS_UPDATE", "1")

import albumentations as A
import numpy as np
import torch

from lightning_fastdata.augment.ops.operation import Encoded


class Steps(A.ImageOnlyTransform):
    """Pointwise, drawn per image: rounds values down to a step."""

    def get_params(self):
        return {"step": self.py_random.randint(2, 60)}

    def apply(self, img, step, **params):
        return img // step * step


class BrightRow(A.ImageOnlyTransform):
    """Not pointwise: what becomes of a value depends on its row."""

    def apply(self, img, **params):
        out = img.copy()
        out[0] = 255
        return out


class Grayer(A.ImageOnlyTransform):
    """Not pointwise: every channel is made of all of them."""

    def apply(self, img, **params):
        return np.repeat(img.mean(2, keepdims=True).astype(np.uint8), 3, 2)


class Raises(A.ImageOnlyTransform):
    def apply(self, img, **params):
        raise ValueError("only portraits")


class RollRows(A.DualTransform):
    """Moves images and masks; draws without looking at pixels."""

    def get_params_dependent_on_data(self, params, data):
        return {"rows": self.py_random.randint(0, params["shape"][0])}

    def apply(self, img, rows, **params):
        return np.roll(img, rows, 0)

    def apply_to_mask(self, mask, rows, **params):
        return np.roll(mask, rows, 0)

    def apply_to_bboxes(self, bboxes, rows, **params):
        return bboxes

    def apply_to_keypoints(self, keypoints, **params):
        return keypoints


class RollByBrightness(RollRows):
    """Looks at the pixels to draw."""

    def get_params_dependent_on_data(self, params, data):
        return {"rows": int(data["image"].sum()) % 7 + self.py_random.randint(0, 3)}


class HorizontalFlip(A.HorizontalFlip):
    """Has a name of Albumentations', and does something else."""

    def apply(self, img, **params):
        return 255 - img

    def apply_to_mask(self, mask, **params):
        return mask


class Pad(RollRows):
    """Has a name of Albumentations' that changes sizes; looks at pixels before its sampler."""

    def update_transform_params(self, params, data):
        rows = int(data["image"].sum()) % 11
        return {**super().update_transform_params(params, data), "rows": rows}

    def get_params_dependent_on_data(self, params, data):
        return {}


def encode_roll(transform, params, shape, dtype):
    return Encoded((), {"rows": np.array([params["rows"]], np.int64)})


def roll(batch, static, arrays):
    height = batch.shape[1]
    rows = (torch.arange(height, device=batch.device) - arrays["rows"]) % height
    index = rows.view(len(batch), height, *[1] * (batch.ndim - 2)).expand(batch.shape)
    return batch.gather(1, index)
