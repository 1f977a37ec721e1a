from __future__ import annotations

import albumentations as A
import numpy as np
import pytest
from augment.batches import alike
from misses import each

from benchmarks.parity import examples, make_example
from lightning_fastdata.augment.albumentations.plan import Size, analyse, size_after
from lightning_fastdata.augment.ops import DEVICE_OPS
from lightning_fastdata.randomness.seeds import reseeder
from lightning_fastdata.types import SampleKey


def where(*transforms, size=None, **options) -> str:
    """Return one letter per leaf: worker, device, either."""
    plan = analyse(A.Compose(list(transforms), **options), DEVICE_OPS, size=size)
    return "".join(placement.where[0] for placement in plan.placements)


H, V, NORM, TENSOR = A.HorizontalFlip, A.VerticalFlip, A.Normalize, A.ToTensorV2


class Custom(A.DualTransform):
    def apply(self, img, **params):
        return img


class HorizontalFlip(A.ImageOnlyTransform):
    """Shares a name with a transform of Albumentations, and nothing else."""

    def apply(self, img, **params):
        return img


class Unusual(A.HorizontalFlip):
    def __call__(self, *args, force_apply=False, **data):
        return data


@each(
    ("expected", "transforms"),
    [
        # The operation that makes the size static, and what is before it, stays in the worker.
        ("wddd", [A.RandomResizedCrop((32, 32)), H(), NORM(), TENSOR()]),
        ("wwd", [H(), A.Resize(32, 32), V()]),
        ("wwwd", [A.LongestMaxSize(32), H(), A.PadIfNeeded(32, 32), V()]),
        ("wwd", [A.OneOf([A.Resize(32, 32), A.RandomCrop(32, 32)], p=1), H()]),
        ("wwwd", [A.RandomScale(), H(), A.RandomCrop(8, 8), V()]),
        ("wwd", [A.Sequential([H(), A.Resize(8, 8)], p=1), V()]),
        # Nothing makes the size static, so the images have one size already.
        ("ddd", [H(), NORM(), TENSOR()]),
        ("dd", [A.ColorJitter(), H()]),
        ("wd", [A.Resize(8, 8, p=0.5), H()]),
        # A size that varies again is made static again.
        ("wwwd", [A.Resize(8, 8), A.Rotate(crop_border=True), A.Resize(4, 4), H()]),
        ("wwwd", [A.Resize(8, 8), Custom(), A.Resize(4, 4), H()]),
        ("wd", [A.Resize(8, 9), A.Rotate()]),
        ("wwwd", [A.Resize(8, 8), A.Affine(fit_output=True), A.Resize(4, 4), H()]),
        ("wwwd", [A.Resize(8, 8), A.Pad((1, 2)), A.Resize(4, 4), H()]),
        ("wdd", [A.Resize(40, 40), A.PadIfNeeded(None, None, 32, 32), H()]),
        ("ww", [A.PadIfNeeded(None, None, 32, 32), A.Resize(8, 8)]),
        ("wwwd", [A.Resize(8, 8), A.Crop(1, 1, 9, 5), A.Resize(4, 4), H()]),
        # Quarter turns keep the size of square images only.
        ("wd", [A.Resize(8, 8), A.RandomRotate90()]),
        ("ww", [A.Resize(8, 9), A.RandomRotate90()]),
        ("w", [A.RandomRotate90()]),
        # No device form: the ones before go with it, but only in samples that drew it.
        ("wewd", [A.Resize(8, 8), H(), A.CLAHE(), V()]),
        ("wed", [A.Resize(8, 8), A.RandomBrightnessContrast(brightness_by_max=False), H()]),
        # A batch must stay one tensor.
        ("ww", [H(), NORM(p=0.5)]),
        ("www", [NORM(p=0.5), NORM(), TENSOR()]),
        ("www", [H(), A.OneOf([NORM((0, 0, 0)), NORM()], p=1)]),
        ("eww", [H(), NORM(), A.CLAHE()]),
        (
            "wwe",
            [
                A.Resize(9, 9),
                A.RandomCrop(8, 8),
                A.RandomBrightnessContrast(brightness_by_max=False),
            ],
        ),
        ("wdd", [A.Resize(9, 9), A.RandomCrop(8, 8), H()]),
        ("ew", [H(), A.ToGray(num_output_channels=1)]),
        ("dd", [H(), A.ToGray(p=1)]),
        # Behind Normalize everything must have a form for float images.
        ("eww", [H(), NORM(), A.ColorJitter()]),
        # A class of the user's own never inherits a device form.
        ("w", [HorizontalFlip()]),
        ("ww", [H(), Unusual()]),
        ("wd", [A.SelectiveChannelTransform([H()], channels=(0,)), V()]),
        ("wwd", [A.RandomOrder([V(), Unusual()], n=2), H()]),
        ("", []),
    ],
)
def test_each_operation_runs_where_the_rules_say(expected, transforms) -> None:
    assert where(*transforms) == expected


def test_a_pipeline_that_may_be_skipped_makes_no_size_static() -> None:
    assert where(A.Resize(8, 8), H(), V(), p=0.5) == "wdd"
    assert where(A.Resize(8, 8), H(), NORM(), p=0.5) == "www"


def test_images_of_a_known_size_need_no_operation_that_makes_them_so() -> None:
    assert where(A.RandomRotate90(), A.Resize(4, 4), NORM(), size=(8, 8)) == "ddd"


def drawn_for(transform, data):
    """Return the parameters that a transform draws for a sample, from a fixed state."""
    transform.set_random_seed(3)
    params = transform.update_transform_params(transform.get_params(), data)
    return params | transform.get_params_dependent_on_data(params, data)


@pytest.mark.cases(5)
@each(("name", "arguments"), list(examples()))
def test_a_sampler_that_is_given_no_pixels_needs_none(name, arguments):
    transform = make_example(name, arguments)
    rng = np.random.default_rng(0)
    images = [*rng.integers(0, 256, (2, 160, 150, 3), np.uint8), np.zeros((160, 150, 3), np.uint8)]
    plan = analyse(A.Compose([transform]), DEVICE_OPS, size=(160, 150))
    params = [drawn_for(transform, {"image": one, "mask": one[..., 0]}) for one in images]
    assert plan.sees_pixels[0] or all(alike(params[0], one) for one in params)


def test_a_sampler_that_needs_pixels_is_known():
    for transform in (
        A.RandomBrightnessContrast(brightness_by_max=False),
        A.Equalize(mask=lambda image, **_: image[..., 0] > 9),
    ):
        assert analyse(A.Compose([transform]), DEVICE_OPS, size=(8, 8)).sees_pixels == (True,)


ARGUMENTS = {
    "AtLeastOneBBoxRandomCrop": {"height": 20, "width": 24},
    "CenterCrop": {"height": 20, "width": 24},
    "Crop": {"x_max": 30, "y_max": 22},
    "CropAndPad": {"px": (-3, 5)},
    "CropNonEmptyMaskIfExists": {"height": 20, "width": 24},
    "FDA": {"metadata_key": "images_of_another_kind"},
    "GridElasticDeform": {"num_grid_xy": (3, 3), "magnitude": 4},
    "HistogramMatching": {"metadata_key": "images_of_another_kind"},
    "LongestMaxSize": {"max_size": 33},
    "MixUp": {"metadata_key": "mix"},
    "Mosaic": {"target_size": (30, 36), "metadata_key": "none"},
    "OverlayElements": {"metadata_key": "none"},
    "Pad": {"padding": 3},
    "PadIfNeeded": {"min_height": 60, "min_width": 58},
    "PixelDistributionAdaptation": {"metadata_key": "images_of_another_kind"},
    "RandomCrop": {"height": 20, "width": 24},
    "RandomCropNearBBox": {"max_part_shift": 0.3},
    "RandomResizedCrop": {"size": (20, 24)},
    "RandomSizedBBoxSafeCrop": {"height": 20, "width": 24},
    "RandomSizedCrop": {"min_max_height": (10, 20), "size": (20, 24)},
    "Resize": {"height": 20, "width": 24},
    "SmallestMaxSize": {"max_size": 33},
    "XYMasking": {
        "num_masks_x": 1,
        "num_masks_y": 1,
        "mask_x_length": 3,
        "mask_y_length": 3,
    },
}
ON_IMAGES = sorted(
    name
    for name, kind in vars(A).items()
    if isinstance(kind, type)
    and issubclass(kind, A.ImageOnlyTransform | A.DualTransform)
    and kind not in {A.ImageOnlyTransform, A.DualTransform}
    # These need a font, words, or volumes.
    and name not in {"TextImage", "Lambda", "Transform3D"}
    and not issubclass(kind, A.Transform3D)
)


@pytest.mark.cases(56)
@pytest.mark.filterwarnings("ignore")
@each("name", ON_IMAGES)
@each("size", [(48, 48), (48, 56)])
def test_what_is_said_of_the_size_after_a_transform_holds(name, size):
    transform = getattr(A, name)(**ARGUMENTS.get(name, {}), p=1)
    rng = np.random.default_rng(0)
    image = rng.integers(0, 256, (*size, 3), np.uint8)
    more = {
        "mask": (image[..., 0] > 128).astype(np.uint8),
        "images_of_another_kind": [image[::-1].copy()],
        "none": [],
        "cropping_bbox": [5, 6, 30, 32],
        "bboxes": [[4, 4, 30, 30]],
    }
    pipeline = A.Compose([transform], bbox_params=A.BboxParams("pascal_voc", label_fields=[]))
    # Without boxes where a transform takes none.
    if "bboxes" not in transform.available_keys or name in {"OverlayElements", "Mosaic"}:
        pipeline, more = A.Compose([transform]), {k: v for k, v in more.items() if k != "bboxes"}
    said = size_after(transform, Size(size, size)).exact
    found = set()
    for index in range(4):
        reseeder(pipeline)(SampleKey(0, 0, index))
        result = np.asarray(pipeline(image=image.copy(), **more)["image"])
        found.add(result.shape[1:] if name.startswith("ToTensor") else result.shape[:2])
    assert said is None or found == {said}
