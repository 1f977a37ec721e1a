"""torchvision v2 pipelines as people write them, for ``parity_v2.py``.

Modelled on torchvision's reference trainings, and on kinds of pipelines that are common in public
repositories, papers and courses: the operations and their order are theirs.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import nn
from torchvision import tv_tensors
from torchvision.transforms import InterpolationMode, v2

Kind = Literal["image", "mask", "boxes", "boxes and masks", "keypoints", "video"]
MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
BICUBIC, BILINEAR = InterpolationMode.BICUBIC, InterpolationMode.BILINEAR


@dataclass(frozen=True, slots=True, kw_only=True)
class Pipeline:
    """One pipeline, and what its samples hold beside the image."""

    build: Callable[[float], nn.Module]
    """Returns it for images whose brightest value is so much: 255 or 1."""
    kind: Kind = "image"


def floats() -> v2.Transform:
    return v2.ToDtype(torch.float32, scale=True)


def normalised() -> list[v2.Transform]:
    return [floats(), v2.Normalize(MEAN, STD)]


def finished(normalise: bool = True) -> list[v2.Transform]:
    """How torchvision's references for detection and segmentation end."""
    types = {tv_tensors.Image: torch.float32, tv_tensors.Mask: torch.int64, "others": None}
    last = [v2.Normalize(MEAN, STD)] if normalise else []
    return [v2.ToDtype(types, scale=True), *last, v2.ToPureTensor()]


def images(*steps: Any) -> Pipeline:
    """A pipeline of an image, the same for bytes and floats."""
    return Pipeline(build=lambda _: v2.Compose(list(steps)))


def by_range(build: Callable[[float], nn.Module]) -> Pipeline:
    """A pipeline of an image that names a value of the pixels."""
    return Pipeline(build=build)


def beside(kind: Kind, *steps: Any) -> Pipeline:
    return Pipeline(build=lambda _: v2.Compose(list(steps)), kind=kind)


class MultiCrop(nn.Module):
    """Two large views and four small ones of one image, as DINO and SwAV take them."""

    def __init__(self, large: nn.Module, small: nn.Module) -> None:
        super().__init__()
        self.large, self.small = large, small

    def forward(self, image: Any) -> list[Any]:
        views = [self.large(image) for _ in range(2)]
        return views + [self.small(image) for _ in range(4)]


def rrc(size: int | tuple[int, int] = 224, **options: Any) -> v2.Transform:
    return v2.RandomResizedCrop(size, antialias=True, **options)


def resize(size: int | tuple[int, int], **options: Any) -> v2.Transform:
    return v2.Resize(size, antialias=True, **options)


def simclr_colours(s: float = 1.0) -> list[v2.Transform]:
    jitter = v2.ColorJitter(0.8 * s, 0.8 * s, 0.8 * s, 0.2 * s)
    return [v2.RandomApply([jitter], p=0.8), v2.RandomGrayscale(p=0.2)]


H, V, BLUR = v2.RandomHorizontalFlip, v2.RandomVerticalFlip, v2.GaussianBlur
QUARTERS = [v2.RandomRotation((angle, angle)) for angle in (0, 90, 180, 270)]

REFERENCES: dict[str, Pipeline] = {
    "classification, train": images(rrc(), H(), *normalised()),
    "classification, AutoAugment": images(
        rrc(), H(), v2.AutoAugment(v2.AutoAugmentPolicy.IMAGENET), *normalised()
    ),
    "classification, RandAugment": images(rrc(), H(), v2.RandAugment(), *normalised()),
    "classification, TrivialAugmentWide": images(
        rrc(176), H(), v2.TrivialAugmentWide(), *normalised(), v2.RandomErasing(0.1)
    ),
    "classification, AugMix": images(rrc(), H(), v2.AugMix(), *normalised()),
    "classification, erasing": images(rrc(), H(), *normalised(), v2.RandomErasing(0.25)),
    "classification, bicubic": images(rrc(interpolation=BICUBIC), H(), *normalised()),
    "classification, evaluation": images(resize(256), v2.CenterCrop(224), *normalised()),
    "detection, flip": beside("boxes", H(), *finished(normalise=False)),
    "detection, large scale jitter": beside(
        "boxes and masks",
        v2.ScaleJitter((320, 320), antialias=True),
        v2.RandomCrop((320, 320), pad_if_needed=True, fill=114),
        H(),
        v2.SanitizeBoundingBoxes(),
        *finished(normalise=False),
    ),
    "detection, several sizes": beside(
        "boxes",
        v2.RandomShortestSize([160, 192, 224, 256], max_size=400, antialias=True),
        H(),
        *finished(normalise=False),
    ),
    "detection, SSD": beside(
        "boxes",
        v2.RandomPhotometricDistort(),
        v2.RandomZoomOut(fill={tv_tensors.Image: (123, 117, 104), "others": 0}),
        v2.RandomIoUCrop(),
        H(),
        v2.SanitizeBoundingBoxes(),
        *finished(normalise=False),
    ),
    "detection, SSD Lite": beside(
        "boxes",
        v2.RandomIoUCrop(),
        H(),
        v2.SanitizeBoundingBoxes(),
        resize((320, 320)),
        *finished(normalise=False),
    ),
    "segmentation, train": beside(
        "mask",
        v2.RandomResize(112, 300, antialias=True),
        H(),
        v2.RandomCrop(224, pad_if_needed=True, fill={tv_tensors.Mask: 255, "others": 0}),
        *finished(),
    ),
    "segmentation, evaluation": beside("mask", resize((224, 224)), *finished()),
    "video, train": beside(
        "video",
        resize((128, 171)),
        H(),
        v2.RandomCrop((112, 112)),
        floats(),
        v2.Normalize((0.43216, 0.394666, 0.37645), (0.22803, 0.22145, 0.216989)),
    ),
}

SELF_SUPERVISED: dict[str, Pipeline] = {
    "SimCLR": images(rrc(), H(), *simclr_colours(), BLUR(23, (0.1, 2.0)), *normalised()),
    "SimCLR, CIFAR": images(rrc(32), H(), *simclr_colours(0.5), *normalised()),
    "MoCo v2": images(
        rrc(scale=(0.2, 1.0)),
        v2.RandomApply([v2.ColorJitter(0.4, 0.4, 0.4, 0.1)], p=0.8),
        v2.RandomGrayscale(p=0.2),
        v2.RandomApply([BLUR(23, (0.1, 2.0))], p=0.5),
        H(),
        *normalised(),
    ),
    "BYOL, first view": images(
        rrc(interpolation=BICUBIC),
        H(),
        v2.RandomApply([v2.ColorJitter(0.4, 0.4, 0.2, 0.1)], p=0.8),
        v2.RandomGrayscale(0.2),
        BLUR(23, (0.1, 2.0)),
        *normalised(),
    ),
    "BYOL, second view": by_range(
        lambda one: v2.Compose(
            [
                rrc(interpolation=BICUBIC),
                H(),
                v2.RandomApply([v2.ColorJitter(0.4, 0.4, 0.2, 0.1)], p=0.8),
                v2.RandomGrayscale(0.2),
                v2.RandomApply([BLUR(23, (0.1, 2.0))], p=0.1),
                v2.RandomSolarize(one / 2, p=0.2),
                *normalised(),
            ]
        )
    ),
    "DINO, views": images(
        MultiCrop(
            v2.Compose([rrc(scale=(0.4, 1.0), interpolation=BICUBIC), H(), *simclr_colours(0.5)]),
            v2.Compose([rrc(96, scale=(0.05, 0.4), interpolation=BICUBIC), H(), BLUR(9)]),
        ),
        *normalised(),
    ),
    "MAE": images(rrc(scale=(0.2, 1.0), interpolation=BICUBIC), H(), *normalised()),
    "Barlow Twins": by_range(
        lambda one: v2.Compose(
            [rrc(), H(), *simclr_colours(0.5), v2.RandomSolarize(one / 2, p=0.1), *normalised()]
        )
    ),
    "SupCon": images(rrc(96, scale=(0.2, 1.0)), H(), *simclr_colours(0.5), *normalised()),
    "MixMatch, weak": images(H(), v2.RandomCrop(96, padding=12, padding_mode="reflect")),
    "FixMatch, strong": images(
        H(),
        v2.RandomCrop(96, padding=12, padding_mode="reflect"),
        v2.RandAugment(num_ops=2, magnitude=10),
        v2.RandomErasing(1.0, scale=(0.05, 0.2), value=0),
        *normalised(),
    ),
}

COURSES: dict[str, Pipeline] = {
    "CIFAR": images(resize((32, 32)), v2.RandomCrop(32, padding=4), H(), *normalised()),
    "CIFAR, AutoAugment": images(
        resize((32, 32)),
        v2.RandomCrop(32, padding=4, fill=128),
        H(),
        v2.AutoAugment(v2.AutoAugmentPolicy.CIFAR10),
        *normalised(),
    ),
    "SVHN, AutoAugment": images(
        resize((32, 32)), v2.AutoAugment(v2.AutoAugmentPolicy.SVHN), *normalised()
    ),
    "CIFAR, cutout": images(
        resize((32, 32)),
        v2.RandomCrop(32, padding=4),
        H(),
        *normalised(),
        v2.RandomErasing(0.5, scale=(0.02, 0.4), ratio=(0.3, 3.3), value=0),
    ),
    "digits": images(
        v2.Grayscale(), resize((28, 28)), v2.RandomAffine(15, (0.1, 0.1), (0.9, 1.1)), floats()
    ),
    "pets": images(resize((224, 224)), H(), v2.RandomRotation(15), *normalised()),
    "flowers": images(
        v2.RandomRotation(30), rrc(), H(), V(), v2.ColorJitter(0.2, 0.2, 0.2), *normalised()
    ),
    "food": images(rrc(scale=(0.7, 1.0)), H(), v2.TrivialAugmentWide(fill=0), *normalised()),
    "birds": images(
        resize(256), v2.RandomCrop(224), H(), v2.ColorJitter(0.25, 0.25), *normalised()
    ),
    "plants": images(
        resize((224, 224)),
        H(),
        V(),
        v2.RandomRotation(45, interpolation=BILINEAR),
        v2.RandomAdjustSharpness(2),
        v2.RandomAutocontrast(),
        *normalised(),
    ),
    "traffic signs": images(
        resize((64, 64)),
        v2.RandomAffine(10, (0.1, 0.1), (0.8, 1.2), 5, interpolation=BILINEAR),
        v2.RandomPerspective(0.2, p=0.3),
        v2.ColorJitter(0.5, 0.5),
        *normalised(),
    ),
    "everything, in any order": by_range(
        lambda one: v2.Compose(
            [
                resize((160, 160)),
                v2.RandomOrder(
                    [v2.RandomInvert(0.2), v2.RandomEqualize(0.2), v2.RandomAutocontrast(0.3)]
                ),
                v2.RandomChoice([v2.RandomPosterize(4), v2.RandomSolarize(one / 2), BLUR(5)]),
                v2.RandomApply(nn.ModuleList([v2.RandomChannelPermutation()]), p=0.3),
                floats(),
            ]
        )
    ),
    "Sequential": Pipeline(
        build=lambda _: nn.Sequential(resize((128, 128)), H(), v2.ColorJitter(0.3), *normalised())
    ),
    "noise": images(rrc(128), H(), floats(), v2.GaussianNoise(0, 0.05), v2.Normalize(MEAN, STD)),
    "photometric": images(resize((128, 128)), v2.RandomPhotometricDistort(), *normalised()),
}

MEDICINE: dict[str, Pipeline] = {
    "chest X-ray": images(
        v2.Grayscale(3),
        resize((224, 224)),
        v2.RandomAffine(10, (0.05, 0.05), (0.95, 1.05), interpolation=BILINEAR),
        v2.ColorJitter(0.1, 0.1),
        *normalised(),
    ),
    "tissue": images(
        v2.RandomCrop(96),
        H(),
        V(),
        v2.RandomChoice(QUARTERS),
        v2.ColorJitter(0.2, 0.2, 0.2, 0.05),
        *normalised(),
    ),
    "tissue, elastic": images(v2.RandomCrop(96), H(), v2.ElasticTransform(30.0, 4.0), floats()),
    "skin": images(
        resize(256),
        v2.RandomCrop(224),
        H(),
        V(),
        v2.RandomRotation(90),
        v2.ColorJitter(0.1, 0.1, 0.1, 0.02),
        *normalised(),
        v2.RandomErasing(0.2),
    ),
    "retina": images(
        v2.CenterCrop(160), resize((224, 224)), v2.RandomRotation(180), H(), *normalised()
    ),
    "organs": beside(
        "mask",
        resize((160, 160)),
        H(),
        v2.RandomAffine(15, (0.1, 0.1), (0.9, 1.1), interpolation=BILINEAR),
        *finished(),
    ),
    "organs, elastic": beside(
        "mask", resize((128, 128)), v2.RandomApply([v2.ElasticTransform(40.0)], 0.5), *finished()
    ),
    "cells, masks": beside("mask", v2.RandomCrop(96), H(), V(), v2.RandomChoice(QUARTERS)),
    "cells, boxes": beside(
        "boxes",
        resize((192, 192)),
        H(),
        V(),
        v2.ColorJitter(0.2, 0.2),
        v2.SanitizeBoundingBoxes(),
        *finished(),
    ),
}

FROM_ABOVE: dict[str, Pipeline] = {
    "EuroSAT": images(resize((64, 64)), H(), V(), v2.RandomChoice(QUARTERS), *normalised()),
    "scenes": images(
        rrc(scale=(0.6, 1.0), interpolation=BICUBIC), H(), V(), v2.RandomRotation(20), *normalised()
    ),
    "land cover": beside(
        "mask", v2.RandomCrop(96), H(), V(), v2.ColorJitter(0.2, 0.2, 0.2), *finished()
    ),
    "buildings": beside(
        "mask",
        v2.RandomResizedCrop((128, 128), scale=(0.5, 1.0), antialias=True),
        v2.RandomRotation(90, fill={tv_tensors.Mask: 255, "others": 0}),
        *finished(),
    ),
    "ships": beside(
        "boxes",
        v2.RandomAffine(0, (0.1, 0.1), (0.8, 1.2)),
        H(),
        V(),
        v2.ClampBoundingBoxes(),
        v2.SanitizeBoundingBoxes(min_size=4),
        v2.ConvertBoundingBoxFormat("CXCYWH"),
        *finished(),
    ),
}

TEXT: dict[str, Pipeline] = {
    "text lines": images(
        v2.RandomPerspective(0.1, p=0.5, fill=1),
        v2.RandomAffine(2, shear=(-10, 10)),
        v2.Grayscale(),
        resize((32, 128)),
        v2.RandomApply([BLUR(3)], p=0.2),
        v2.RandomInvert(0.1),
        floats(),
        v2.Normalize((0.5,), (0.5,)),
    ),
    "documents": images(
        v2.RandomRotation(3, interpolation=BILINEAR, fill=1),
        v2.ColorJitter(0.3, 0.3),
        v2.RandomAdjustSharpness(0.5),
        resize((224, 224), interpolation=BICUBIC),
        *normalised(),
    ),
    "handwriting": images(
        v2.Grayscale(),
        resize((64, 192)),
        v2.RandomApply([v2.ElasticTransform(20.0, 4.0)], p=0.5),
        v2.RandomAffine(2, (0.02, 0.02), (0.9, 1.1), 5),
        floats(),
    ),
    "receipts, points": beside(
        "keypoints",
        resize((192, 192)),
        v2.RandomRotation(5),
        v2.RandomPerspective(0.1),
        *finished(),
    ),
    "scans": images(
        v2.Pad(8, fill=0), v2.RandomCrop(96), v2.RandomAutocontrast(), v2.RandomEqualize(), floats()
    ),
}

FACES: dict[str, Pipeline] = {
    "face recognition": images(
        resize((112, 112)),
        H(),
        v2.RandomApply([v2.ColorJitter(0.2, 0.2, 0.2, 0.05)], p=0.5),
        v2.RandomGrayscale(0.01),
        floats(),
        v2.Normalize((0.5,) * 3, (0.5,) * 3),
        v2.RandomErasing(0.2, scale=(0.02, 0.1)),
    ),
    "attributes": images(v2.CenterCrop(160), resize(128), H(), *normalised()),
    "landmarks": beside(
        "keypoints",
        resize((160, 160)),
        v2.RandomAffine(20, (0.1, 0.1), (0.8, 1.2), interpolation=BILINEAR),
        v2.ColorJitter(0.3, 0.3, 0.3),
        *finished(),
    ),
    "persons": images(
        resize((128, 64)),
        H(),
        v2.Pad(10),
        v2.RandomCrop((128, 64)),
        *normalised(),
        v2.RandomErasing(0.5, scale=(0.02, 0.4), value="random"),
    ),
    "anomalies": images(resize((144, 144)), v2.CenterCrop(128), *normalised()),
}

DETECTORS: dict[str, Pipeline] = {
    "DETR": beside(
        "boxes",
        H(),
        v2.RandomChoice(
            [
                v2.RandomShortestSize([160, 192, 224], max_size=320, antialias=True),
                v2.Compose(
                    [
                        v2.RandomShortestSize([120, 160], antialias=True),
                        v2.RandomCrop((96, 96)),
                        v2.SanitizeBoundingBoxes(),
                        v2.RandomShortestSize([160, 192], max_size=320, antialias=True),
                    ]
                ),
            ]
        ),
        *finished(),
    ),
    "RT-DETR": beside(
        "boxes",
        v2.RandomPhotometricDistort(p=0.5),
        v2.RandomZoomOut(fill=0),
        v2.RandomApply([v2.RandomIoUCrop()], p=0.8),
        v2.SanitizeBoundingBoxes(),
        H(),
        resize((256, 256)),
        v2.SanitizeBoundingBoxes(),
        v2.ConvertBoundingBoxFormat("CXCYWH"),
        *finished(normalise=False),
    ),
    "YOLO": beside(
        "boxes",
        resize((224, 224)),
        v2.RandomAffine(5, (0.1, 0.1), (0.5, 1.5), 2, fill=114),
        v2.ColorJitter(0.4, 0.4, 0.7, 0.015),
        H(),
        v2.ClampBoundingBoxes(),
        v2.SanitizeBoundingBoxes(),
        *finished(normalise=False),
    ),
    "instances": beside(
        "boxes and masks",
        resize((192, 192)),
        H(),
        v2.RandomApply([v2.ColorJitter(0.2, 0.2)], p=0.5),
        v2.SanitizeBoundingBoxes(),
        *finished(),
    ),
    "clips": beside(
        "video",
        v2.UniformTemporalSubsample(4),
        rrc(112),
        H(),
        v2.ColorJitter(0.3, 0.3),
        *normalised(),
    ),
    "streets": beside(
        "mask",
        v2.RandomCrop((128, 128), pad_if_needed=True, fill={tv_tensors.Mask: 255, "others": 0}),
        H(),
        v2.RandomPhotometricDistort(),
        *finished(),
    ),
}

PIPELINES: dict[str, Pipeline] = {
    **REFERENCES,
    **SELF_SUPERVISED,
    **COURSES,
    **MEDICINE,
    **FROM_ABOVE,
    **TEXT,
    **FACES,
    **DETECTORS,
}
