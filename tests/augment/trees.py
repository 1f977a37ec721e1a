"""Random trees of Albumentations' containers, and what is compared of them."""

from __future__ import annotations

import copy
import functools
import os
import re
import warnings

os.environ.setdefault("NO_ALBUMENTATIONS_UPDATE", "1")

import albumentations as A
import numpy as np
import pytest
import torch
from albumentations.augmentations.crops.transforms import CropSizeError
from augment.batches import alike
from hypothesis import strategies as st
from torch.utils.data import default_collate

from lightning_fastdata.augment.albumentations.plan import list_leaves, target_roles
from lightning_fastdata.augment.transform import as_batch_transform
from lightning_fastdata.randomness.seeds import reseeder
from lightning_fastdata.types import SampleKey

torch.set_num_threads(1)

SIDE = 44
TARGETS = {"other": "image", "part": "mask", "boxes": "bboxes", "points": "keypoints"}
CHANCES = st.sampled_from([0.0, 0.3, 0.5, 1.0])


def trees(makers, max_leaves=6):
    """Lists of transforms and containers of every kind, of leaves ``make(p)``."""
    one = st.builds(lambda make, p: make(p), st.sampled_from(makers), CHANCES)

    def containers(inner):
        some = st.lists(inner, min_size=1, max_size=3)
        count, flag = st.integers(1, 3), st.booleans()

        # OneOf weighs its children by their p, and needs one that is not 0.
        def one_of(children, p):
            weighed = [child for child in children if child.p > 0]
            return A.OneOf(weighed or [A.NoOp()], p=p)

        return st.one_of(
            st.builds(one_of, some, CHANCES),
            st.builds(lambda t, p: A.Sequential(t, p=p), some, CHANCES),
            st.builds(lambda t, p: A.Compose(t, p=p), some, CHANCES),
            st.builds(several, st.just(A.SomeOf), some, count, flag, CHANCES),
            st.builds(several, st.just(A.RandomOrder), some, count, flag, CHANCES),
            st.builds(lambda a, b, p: A.OneOrOther(a, b, p=p), inner, inner, CHANCES),
        )

    return st.lists(st.recursive(one, containers, max_leaves=max_leaves), min_size=1, max_size=4)


def several(kind, children, count, replace, p):
    return kind(children, min(count, len(children)), replace=replace, p=p)


BOX_FORMATS = ("coco", "pascal_voc", "albumentations", "yolo")
POINT_FORMATS = ("xy", "yx", "xya", "xys", "xyas", "xysa", "xyz")


@st.composite
def targets(draw):
    """Options of a pipeline that takes boxes and keypoints, and their formats."""
    boxes, points = draw(st.sampled_from(BOX_FORMATS)), draw(st.sampled_from(POINT_FORMATS))
    return {
        "bbox_params": A.BboxParams(
            boxes,
            label_fields=["classes", "weights"],
            min_area=draw(st.sampled_from([0.0, 20.0])),
            min_visibility=draw(st.sampled_from([0.0, 0.4])),
            min_width=draw(st.sampled_from([0.0, 3.0])),
            min_height=draw(st.sampled_from([0.0, 3.0])),
            clip=draw(st.booleans()),
            filter_invalid_bboxes=draw(st.booleans()),
            check_each_transform=draw(st.booleans()),
        ),
        "keypoint_params": A.KeypointParams(
            points,
            label_fields=["joints"],
            remove_invisible=draw(st.booleans()),
            angle_in_degrees=draw(st.booleans()),
            check_each_transform=draw(st.booleans()),
        ),
    }


def some_samples(count=3, side=SIDE, options=None):
    """Samples with every kind of target that ``options`` of a pipeline speak of."""
    options = options or {}
    rng = np.random.default_rng(side)
    found = []
    for _ in range(count):
        image, other = rng.integers(0, 256, (2, side, side, 3), np.uint8)
        mask = rng.integers(0, 9, (side, side), np.uint8)
        sample = {"image": image, "mask": mask, "masks": [mask[::-1].copy(), mask.T.copy()]}
        if options.get("additional_targets"):
            sample |= {"other": other, "part": other[..., 1].copy()}
        if "bbox_params" in options:
            sample |= {
                "bboxes": boxes_as(options["bbox_params"].format, side),
                "classes": ["a", "b", "c"],
                "weights": [0.5, 1, 2],
            }
        if "keypoint_params" in options:
            letters = options["keypoint_params"].format
            values = {"x": rng.uniform(1, side - 1, 4), "y": rng.uniform(1, side - 1, 4)}
            values |= {"a": rng.uniform(0, 3, 4), "s": rng.uniform(1, 4, 4), "z": np.ones(4)}
            sample |= {
                "keypoints": np.stack([values[letter] for letter in letters], 1).astype("f4"),
                "joints": np.arange(4),
            }
        found.append(sample)
    return found


def boxes_as(style, side):
    corners = np.array([[1, 2, 12, 13], [3, 3, side, side], [side - 4, side - 4, side, side]])
    if style == "coco":
        return np.concatenate([corners[:, :2], corners[:, 2:] - corners[:, :2]], 1).tolist()
    if style == "yolo":
        middle, extent = (corners[:, :2] + corners[:, 2:]) / 2, corners[:, 2:] - corners[:, :2]
        return (np.concatenate([middle, extent], 1) / side).tolist()
    return (corners / side if style == "albumentations" else corners).tolist()


def logged(compose):
    """Return a copy of a pipeline, and the list to which it adds the leaf that it applies."""
    compose, log = copy.deepcopy(compose), []

    def note(original, index, params, /, **data):
        log.append(index)
        return original(params, **data)

    for index, leaf in enumerate(list_leaves(compose)):
        original = leaf.transform.apply_with_params
        leaf.transform.apply_with_params = functools.partial(note, original, index)
    return compose, log


def compare(compose, samples, *, seed=0, pixels=True, fitted=False):
    """Run samples through Albumentations alone, and through worker and device; both must agree.

    Returns the transform, the batch's samples as Albumentations made them, and as we did.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        transform = as_batch_transform(compose)
        transform = transform.for_samples(samples[:1]) if fitted else transform
        part = transform.in_worker(on_device=True)
        real, log = logged(compose)
        wanted, left, tapes = [], [], []
        for index, sample in enumerate(samples):
            key = SampleKey(seed, 0, index)
            reseeder(real)(key)
            log.clear()
            try:
                want = real(**copy.deepcopy(sample))
            except (TypeError, ValueError, CropSizeError) as error:
                # What it refuses: boxes that it moved out of its own bounds, images that are
                # smaller than a crop or of other channels.
                with pytest.raises(type(error), match=re.escape(str(error))):
                    part(copy.deepcopy(sample), key)
                continue
            wanted.append(want)
            result, tape = part(copy.deepcopy(sample), key)
            left.append(result)
            tapes.append(tape)
            if tape is not None:
                noted = [op.leaf for op in tape["image"].ops] if "image" in tape else []
                assert noted == log[len(log) - len(noted) :]
    deferred = {name for name in target_roles(compose) if name in samples[0]}
    for want, got in zip(wanted, left, strict=True):
        assert want.keys() == got.keys()
        for name in want.keys() - deferred:
            assert alike(want[name], got[name]), name
    if len(forms(wanted, deferred)) == 1:
        assert len(forms(left, deferred)) == 1, "samples that could be a batch are none"
    finished = finish(transform, part, left, tapes, deferred)
    for want, got in zip(wanted, finished, strict=True):
        for name in deferred:
            expected, actual = np.asarray(want[name]), np.asarray(got[name])
            assert expected.shape == actual.shape, name
            assert expected.dtype == actual.dtype, name
            if pixels:
                # Floats only come from Normalize and the like, which are equal up to rounding.
                within = 2e-6 if expected.dtype.kind == "f" else 0
                assert np.abs(expected.astype("f8") - actual).max(initial=0) <= within, name
    return transform, wanted, finished


def forms(samples, names):
    """Return the different shapes and dtypes that images and masks of samples have."""
    found = [{name: np.asarray(one[name]) for name in sorted(names)} for one in samples]
    return {str([(one[name].shape, one[name].dtype) for name in one]) for one in found}


def finish(transform, part, left, tapes, names):
    """Return the samples with what was left to the device carried out, as one batch if they can."""
    pixels = [{name: one[name] for name in names} for one in left]
    one_size = len(forms(left, names)) <= 1
    groups = [list(range(len(left)))] if one_size else [[row] for row in range(len(left))]
    done = []
    for rows in filter(None, groups):
        batch = default_collate([pixels[row] for row in rows])
        if tapes[0] is not None:
            batch = transform.apply(batch, part.collate([tapes[row] for row in rows]))
        done += [{name: batch[name][at] for name in names} for at in range(len(rows))]
    return done
