"""Each operation of a pipeline is tried alone, by its largest difference, in every branch."""

import dataclasses
import os

os.environ.setdefault("NO_ALBUMENTATIONS_UPDATE", "1")

import albumentations as A
import numpy as np
from misses import each

from lightning_fastdata.augment.ops import DEVICE_OPS
from lightning_fastdata.augment.pipeline.plan import analyse
from lightning_fastdata.augment.pipeline.trial import try_operations, turns

GIVEN = {"image": np.random.default_rng(0).integers(20, 200, (24, 24, 3), np.uint8)}


def off_by(name, levels):
    """Return device forms of which one has a single value that is so many levels off."""
    op = DEVICE_OPS[name]

    def image(batch, static, arrays):
        made = op.image(batch, static, arrays).clone()
        made[0, 3, 4, 1] += levels
        return made

    return {**DEVICE_OPS, name: dataclasses.replace(op, image=image)}


def tried(transforms, ops, **options):
    compose = A.Compose([*transforms, A.Normalize(), A.ToTensorV2()])
    return try_operations(compose, GIVEN, analyse(compose, ops), ops, **options)


def faults(found):
    return {one.name for one in found if one.fault is not None}


@each(
    ("name", "transform", "allowed"),
    [
        ("RandomGamma", lambda: A.RandomGamma(p=0.01), 0),
        ("HueSaturationValue", lambda: A.HueSaturationValue(p=0.01), 1),
        ("ColorJitter", lambda: A.ColorJitter(p=0.01), 3),
    ],
)
def test_one_value_beyond_the_bound_is_a_fault(name, transform, allowed):
    assert faults(tried([transform()], off_by(name, allowed + 4))) == {name}
    assert faults(tried([transform()], DEVICE_OPS)) == set()


def test_every_branch_has_its_turn():
    inner = A.OneOf([A.RandomGamma(), A.Sequential([A.Posterize(), A.Solarize()])], p=0.1)
    some = A.SomeOf([A.InvertImg(), A.HorizontalFlip(), A.CLAHE()], n=1, p=0.1)
    other = A.OneOrOther(A.VerticalFlip(), A.RandomBrightnessContrast(), p=0.9)
    names = {one.name for one in tried([A.OneOf([inner, A.ToSepia()]), some, other], DEVICE_OPS)}
    assert names == {
        *("RandomGamma", "Posterize", "Solarize", "ToSepia", "InvertImg", "HorizontalFlip"),
        *("CLAHE", "VerticalFlip", "RandomBrightnessContrast", "Normalize", "ToTensorV2"),
    }
    assert turns(A.OneOf([inner, A.ToSepia()])) == 3


def test_nothing_is_tried_when_the_time_is_over():
    ticks = iter(range(100))
    found = tried([A.RandomGamma()], DEVICE_OPS, budget_s=2.5, clock_s=lambda: next(ticks))
    assert len(found) < 3


def test_the_pipeline_and_what_it_is_given_stay_as_they_are():
    compose = A.Compose([A.OneOf([A.Equalize(), A.HorizontalFlip()], p=0.1), A.ToTensorV2()])
    image = GIVEN["image"].copy()
    before = compose.to_dict()
    try_operations(compose, {"image": image}, analyse(compose, DEVICE_OPS), DEVICE_OPS)
    assert compose.to_dict() == before
    assert np.array_equal(image, GIVEN["image"])
