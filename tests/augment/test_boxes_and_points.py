"""Boxes and keypoints are where the pixels go that the device moves."""

from __future__ import annotations

import pickle

import albumentations as A
import numpy as np
from torch.utils.data import default_collate

from lightning_fastdata.augment.transform import as_batch_transform
from lightning_fastdata.types import SampleKey


def through_worker(transforms, sample, count=6, **options):
    """Return the batch of images, and what the worker made of the rest of each sample."""
    transform = as_batch_transform(A.Compose(transforms, **options))
    part = pickle.loads(pickle.dumps(transform.in_worker(on_device=True)))
    drawn = [part(sample, SampleKey(5, 0, index)) for index in range(count)]
    images = default_collate([{"image": one["image"]} for one, _ in drawn])
    draws = part.collate([tape for _, tape in drawn])
    return transform.apply(images, draws)["image"].numpy(), [one for one, _ in drawn]


def test_boxes_are_where_their_painted_pixels_go() -> None:
    image = np.zeros((64, 64, 3), np.uint8)
    image[20:41, 14:33] = 255
    sample = {"image": image, "bboxes": [[14, 20, 33, 41]], "classes": [1]}
    move = {"scale": (0.7, 1.2), "translate_px": (-7, 7), "p": 1}
    images, rest = through_worker(
        [A.Affine(**move), A.HorizontalFlip(), A.VerticalFlip(), A.Affine(**move)],
        sample,
        12,
        bbox_params=A.BboxParams("pascal_voc", label_fields=["classes"]),
    )
    for out, one in zip(images, rest, strict=True):
        rows, columns = np.nonzero(out[..., 0] > 127)
        painted = [columns.min(), rows.min(), columns.max() + 1, rows.max() + 1]
        assert np.abs(np.asarray(one["bboxes"][0]) - painted).max() <= 1


def test_keypoints_are_where_their_pixels_go() -> None:
    y, x = np.mgrid[:64, :64].astype(np.float32)
    image = np.stack([x, y, x * 0], -1) / 64
    points = [(20.0, 30.0), (40.0, 22.0), (31.0, 44.0)]
    images, rest = through_worker(
        [
            A.HorizontalFlip(),
            A.Affine(scale=(0.8, 1.3), rotate=(-40, 40), shear=(-8, 8), p=1),
            A.Rotate(p=1),
            A.Perspective(p=1),
        ],
        {"image": image, "keypoints": points},
        keypoint_params=A.KeypointParams("xy", remove_invisible=False),
    )
    for out, one in zip(images, rest, strict=True):
        for point, moved in zip(points, one["keypoints"], strict=True):
            column, row = (round(float(where)) for where in moved)
            found = out[row, column, :2] * 64
            # Half a pixel of rounding and half of conventions, in an image scaled by 0.7 at least.
            assert np.hypot(*(found - point)) <= 1.5
