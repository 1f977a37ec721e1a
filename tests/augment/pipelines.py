"""Training pipelines as people write them, for Albumentations 2.0.

Each is modelled on a kind of pipeline that is common in public repositories, competitions and
papers: the operations and their order are theirs, the sizes are smaller.
"""

from __future__ import annotations

import os
import warnings
from dataclasses import dataclass
from typing import Literal

os.environ.setdefault("NO_ALBUMENTATIONS_UPDATE", "1")

import albumentations as A
import numpy as np

Kind = Literal["image", "mask", "boxes", "keypoints", "two images"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """One training pipeline."""

    compose: A.Compose
    """The pipeline."""
    kind: Kind = "image"
    """What a sample holds beside its image."""
    any_size: bool = True
    """Whether it takes images of different sizes and makes them one size."""
    worker: str = ""
    """Operations that always stay in the worker, in the order in which they are written."""


class Vignette(A.ImageOnlyTransform):
    """What a user would write: darkens the corners."""

    def apply(self, img, **params):
        down, across = np.ogrid[-1 : 1 : img.shape[0] * 1j, -1 : 1 : img.shape[1] * 1j]
        shade = 1 - 0.3 * (down**2 + across**2)
        return (img * shade[..., None]).astype(img.dtype)


def _boxes(style="pascal_voc", **options):
    return A.BboxParams(style, label_fields=["classes"], **options)


def _points(**options):
    return A.KeypointParams("xy", label_fields=["joints"], **options)


H, V, R90 = A.HorizontalFlip, A.VerticalFlip, A.RandomRotate90
RBC, HSV, GAMMA = A.RandomBrightnessContrast, A.HueSaturationValue, A.RandomGamma
NOISE, BLUR = A.GaussNoise, A.GaussianBlur
OneOf, Norm, Tensor = A.OneOf, A.Normalize, A.ToTensorV2


def SSR(*arguments, **options):
    """It warns that it is a special case of Affine, and people use it all the same."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return A.ShiftScaleRotate(*arguments, **options)


def recipe(*transforms, worker, kind="image", any_size=True, **options):
    compose = A.Compose([*transforms], **options)
    return Recipe(compose=compose, worker=worker, kind=kind, any_size=any_size)


RECIPES: dict[str, Recipe] = {
    "classification: imagenet with colours": recipe(
        A.RandomResizedCrop((96, 96)),
        H(),
        A.ColorJitter(p=0.8),
        Norm(),
        Tensor(),
        worker="RandomResizedCrop",
    ),
    "classification: self-supervised": recipe(
        A.RandomResizedCrop((96, 96), scale=(0.2, 1)),
        A.ColorJitter(0.4, 0.4, 0.4, 0.1, p=0.8),
        A.ToGray(p=0.2),
        BLUR((5, 9), (0.1, 2), p=0.5),
        A.Solarize(p=0.2),
        H(),
        Norm(),
        Tensor(),
        worker="RandomResizedCrop Solarize",
    ),
    "classification: skin lesions": recipe(
        A.Transpose(),
        V(),
        H(),
        RBC((-0.2, 0.2), (-0.2, 0.2), p=0.75),
        OneOf([A.MotionBlur(5), A.MedianBlur(5), BLUR((3, 5)), NOISE()], p=0.7),
        OneOf([A.OpticalDistortion(1.0), A.GridDistortion(5, 1.0), A.ElasticTransform(3)], p=0.7),
        A.CLAHE(4.0, p=0.7),
        HSV(10, 20, 10),
        SSR(0.1, 0.1, 15, border_mode=0, p=0.85),
        A.Resize(112, 112),
        A.CoarseDropout((1, 1), (0.37, 0.37), (0.37, 0.37), p=0.7),
        Norm(),
        Tensor(),
        worker=(
            "Transpose VerticalFlip HorizontalFlip RandomBrightnessContrast MotionBlur "
            "MedianBlur GaussianBlur GaussNoise OpticalDistortion GridDistortion "
            "ElasticTransform CLAHE HueSaturationValue ShiftScaleRotate Resize"
        ),
    ),
    "classification: colours of every kind": recipe(
        A.Resize(112, 112),
        R90(),
        A.D4(p=0.5),
        BLUR(),
        A.ColorJitter(),
        Vignette(p=0.3),
        Norm(),
        Tensor(),
        worker="Resize GaussianBlur Vignette",
    ),
    "segmentation: camera and street": recipe(
        H(),
        SSR(0.1, 0.5, 0, border_mode=0, p=1),
        A.PadIfNeeded(112, 112, border_mode=0),
        A.RandomCrop(112, 112),
        NOISE(p=0.2),
        A.Perspective(p=0.5),
        OneOf([A.CLAHE(p=1), RBC(p=1), GAMMA(p=1)], p=0.9),
        OneOf([A.Sharpen(p=1), A.Blur(3, p=1), A.MotionBlur(3, p=1)], p=0.9),
        OneOf([RBC(p=1), HSV(p=1)], p=0.9),
        worker=(
            "HorizontalFlip ShiftScaleRotate PadIfNeeded RandomCrop GaussNoise Perspective "
            "CLAHE Sharpen Blur MotionBlur"
        ),
        kind="mask",
    ),
    "segmentation: elastic": recipe(
        A.ElasticTransform(20, 5),
        H(),
        NOISE(),
        GAMMA(),
        RBC(),
        BLUR(),
        Tensor(),
        worker="ElasticTransform GaussNoise",
        kind="mask",
        any_size=False,
    ),
    "segmentation: tumours": recipe(
        OneOf([A.CropNonEmptyMaskIfExists(96, 96), A.RandomCrop(96, 96)], p=1),
        H(),
        V(),
        A.Affine(scale=(0.9, 1.1), rotate=(-20, 20)),
        A.ElasticTransform(20, 5),
        A.CoarseDropout(fill=0, fill_mask=0),
        Tensor(),
        worker="CropNonEmptyMaskIfExists RandomCrop ElasticTransform",
        kind="mask",
    ),
    "satellite: eight symmetries": recipe(
        A.RandomCrop(112, 112), A.D4(p=1), Norm(), Tensor(), worker="RandomCrop", kind="mask"
    ),
    "satellite: change detection": recipe(
        H(),
        A.RandomCrop(112, 112),
        RBC(),
        GAMMA(),
        Norm(),
        Tensor(),
        worker="HorizontalFlip RandomCrop",
        kind="two images",
        additional_targets={"image2": "image"},
    ),
    "satellite: ships": recipe(
        A.RandomSizedCrop((80, 140), (112, 112)),
        A.D4(p=1),
        HSV(10, 15, 10),
        OneOf([A.RandomFog(), A.RandomShadow(), A.RandomSunFlare(src_radius=40)], p=0.3),
        Norm(),
        Tensor(),
        worker="RandomSizedCrop RandomFog RandomShadow RandomSunFlare",
        kind="mask",
    ),
    "detection: wheat heads": recipe(
        A.RandomSizedCrop((100, 150), (128, 128)),
        OneOf([HSV(20, 20, 20, p=0.9), RBC(p=0.9)], p=0.9),
        A.ToGray(p=0.01),
        H(),
        V(),
        A.CoarseDropout((8, 8), (8, 8), (8, 8), fill=0),
        A.ToFloat(255),
        Tensor(),
        worker="RandomSizedCrop",
        kind="boxes",
        bbox_params=_boxes(min_area=4),
    ),
    "detection: ultralytics": recipe(
        A.LongestMaxSize(128),
        A.PadIfNeeded(128, 128, fill=114),
        A.Blur(p=0.01),
        A.MedianBlur(p=0.01),
        A.ToGray(p=0.01),
        A.CLAHE(p=0.01),
        RBC(p=0.1),
        GAMMA(p=0.1),
        A.ImageCompression(quality_range=(75, 100), p=0.1),
        worker="LongestMaxSize PadIfNeeded MedianBlur CLAHE ImageCompression",
        kind="boxes",
        bbox_params=_boxes(),
    ),
    "detection: poses": recipe(
        A.LongestMaxSize(128),
        A.PadIfNeeded(128, 128),
        A.ColorJitter(),
        A.Affine(rotate=(-30, 30), scale=(0.8, 1.2)),
        Norm(),
        Tensor(),
        worker="LongestMaxSize PadIfNeeded",
        kind="keypoints",
        keypoint_params=_points(remove_invisible=False),
    ),
    "text: scans": recipe(
        A.Resize(128, 96),
        A.ToGray(p=1),
        A.Perspective((0.02, 0.05), fill=255, p=0.5),
        A.Morphological((2, 3), "dilation", p=0.3),
        A.Morphological((2, 3), "erosion", p=0.3),
        OneOf([A.Downscale((0.5, 0.9)), A.Sharpen()], p=0.4),
        RBC(),
        A.SaltAndPepper(p=0.3),
        Norm((0.5, 0.5, 0.5), (0.5, 0.5, 0.5)),
        Tensor(),
        worker="Resize Perspective Morphological Morphological Downscale Sharpen SaltAndPepper",
    ),
    "competitions: everything": recipe(
        A.Rotate(40),
        A.Affine(scale=(0.9, 1.1), translate_percent=(-0.1, 0.1)),
        NOISE((0.05, 0.1)),
        BLUR(),
        A.MedianBlur(3),
        RBC(),
        A.CLAHE(),
        A.ElasticTransform(20, 5),
        A.GridDistortion(),
        HSV(),
        worker="GaussNoise GaussianBlur MedianBlur CLAHE ElasticTransform GridDistortion",
        any_size=False,
    ),
    "competitions: random order": recipe(
        A.Resize(112, 112),
        A.RandomOrder([RBC(p=1), HSV(p=1), BLUR(p=1), A.Affine(rotate=(-15, 15), p=1)], n=3),
        A.Sequential([A.RGBShift(p=1), GAMMA(p=1)], p=0.5),
        OneOf([A.ISONoise(), A.ShotNoise(), A.AdditiveNoise()], p=0.5),
        A.Erasing(p=0.3),
        Norm(),
        Tensor(),
        worker="Resize GaussianBlur RGBShift ISONoise ShotNoise AdditiveNoise",
    ),
}
"""Field and name of each."""
