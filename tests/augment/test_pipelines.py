"""Whole training pipelines, on photographs, against what Albumentations makes of them."""

from __future__ import annotations

import functools
import warnings

import cv2
import numpy as np
from augment.batches import in_worker, on_device
from augment.bounds import bound_of
from augment.pipelines import RECIPES, Recipe
from misses import each

from demo.photos import PHOTOGRAPHS, open_photograph
from lightning_fastdata.augment.albumentations.plan import MOST_PER_LEVEL, list_leaves, may_differ
from lightning_fastdata.augment.ops import DEVICE_OPS
from lightning_fastdata.augment.transform import as_batch_transform

cv2.setNumThreads(1)


@functools.cache
def picture(name: str) -> np.ndarray:
    """Return a photograph, made smaller: the short side is 150 to 190 px."""
    photograph = open_photograph(name)
    short = 150 + 4 * list(PHOTOGRAPHS).index(name)
    scale = short / min(photograph.size)
    return np.asarray(photograph.resize([round(side * scale) for side in photograph.size]))


def samples(recipe: Recipe) -> list[dict]:
    """Return one sample of every photograph."""
    found = []
    for number, name in enumerate(PHOTOGRAPHS):
        image = picture(name)
        image = np.ascontiguousarray(image if recipe.any_size else image[:144, :148])
        height, width = image.shape[:2]
        sample: dict = {"image": image}
        if recipe.kind == "mask":
            sample["mask"] = (image.mean(2) // 64).astype(np.uint8)
        elif recipe.kind == "two images":
            sample["image2"] = np.ascontiguousarray(image[::-1])
        elif recipe.kind == "boxes":
            sample["bboxes"] = [[5, 7, width // 2, height // 3], [40, 50, width - 3, height - 9]]
            sample["classes"] = [number, 99]
        elif recipe.kind == "keypoints":
            sample["keypoints"] = [(9, 12), (width // 2, height // 2), (width - 4, 30)]
            sample["joints"] = ["ear", "nose", "hand"]
        found.append(sample)
    return found


EQUAL = frozenset(
    {
        *("CenterCrop", "CoarseDropout", "D4", "Erasing", "HorizontalFlip", "Normalize"),
        *("PadIfNeeded", "RandomBrightnessContrast", "RandomCrop", "RandomGamma"),
        *("RandomRotate90", "Resize", "ToFloat", "ToGray", "ToTensorV2", "Transpose"),
        "VerticalFlip",
    }
)
"""Operations whose pixels are equal to Albumentations', as the documentation says."""


def differences(compose, wanted, got) -> np.ndarray:
    """Return how many of 256 levels each value of two batches is apart."""
    unit: np.ndarray | float = 1.0
    for leaf in list_leaves(compose):
        if type(leaf.transform).__name__ == "Normalize":
            unit = 255 * np.broadcast_to(leaf.transform.std, 3)[:, None, None]
        elif type(leaf.transform).__name__ == "ToFloat":
            unit = 255.0
    gaps = []
    for want, image in zip(map(np.asarray, wanted), got, strict=True):
        assert image.shape == want.shape
        assert image.numpy().dtype == want.dtype
        gaps.append((np.abs(want.astype(np.float64) - image.numpy()) * unit).ravel())
    # Float pipelines end in float32: less than a thousandth of a level is no difference.
    gap = np.concatenate(gaps)
    return np.where(gap < 1e-3, 0, gap)


def run_both(recipe):
    """Return the batch after worker and device, the worker's rest, and Albumentations' samples."""
    transform = as_batch_transform(recipe.compose)
    given = samples(recipe)
    with warnings.catch_warnings():
        # What Albumentations thinks of a draw is not for us to say.
        warnings.filterwarnings("ignore", category=UserWarning, module="albumentations")
        batch, rest = on_device(transform, given, seed=1)
        return batch, rest, in_worker(transform, given, seed=1)


@each("name", RECIPES)
def test_each_operation_of_a_real_pipeline_has_a_place_and_a_reason(name):
    recipe = RECIPES[name]
    transform = as_batch_transform(recipe.compose)
    placements = transform.plan.placements
    assert " ".join(one.name for one in placements if one.where == "worker") == recipe.worker
    # Nothing that has a device form is called one that has none.
    for one in placements:
        assert (one.why == "no device form") <= (one.name not in DEVICE_OPS)
    head, *lines = transform.explain().splitlines()
    assert [line.split()[0] for line in lines] == [one.name for one in placements]
    columns = [line[head.index("where") :].split()[0] for line in lines]
    assert columns == [one.where for one in placements]
    assert all(len(line.split()) > 2 for line in lines)


@each("name", RECIPES)
def test_a_real_pipeline_makes_albumentations_own_pixels(name):
    recipe = RECIPES[name]
    batch, rest, wanted = run_both(recipe)
    placements = as_batch_transform(recipe.compose).plan.placements
    leaves = [
        leaf.transform
        for leaf, one in zip(list_leaves(recipe.compose), placements, strict=True)
        if one.where != "worker"
    ]
    on_the_batch = {type(leaf).__name__ for leaf in leaves}
    off = [bound_of(leaf).largest for leaf in leaves if may_differ(leaf)]
    for field in ("image", "image2") if recipe.kind == "two images" else ("image",):
        gap = differences(recipe.compose, [one[field] for one in wanted], batch[field])
        if on_the_batch <= EQUAL:
            assert gap.max() == 0
        assert gap.max() <= MOST_PER_LEVEL * sum(off)
        assert (gap == 0).mean() >= 0.998
        assert (gap < 1.5).mean() >= 0.999
        assert gap.mean() <= 0.01
    if recipe.kind == "mask":
        wrong = sum(
            np.count_nonzero(np.asarray(one["mask"]) != mask.numpy())
            for one, mask in zip(wanted, batch["mask"], strict=True)
        )
        assert wrong == 0
    same_rest(rest, wanted)


def same_rest(rest, wanted):
    """Check boxes, keypoints and labels, which Albumentations itself moves in the worker."""
    for ours, theirs in zip(rest, wanted, strict=True):
        for field in ("bboxes", "classes", "keypoints", "joints"):
            assert (field in ours) == (field in theirs)
            if field in theirs:
                assert np.array_equal(ours[field], theirs[field])
