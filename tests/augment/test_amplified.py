"""Whole pipelines of any operations are off by what their operations are off, not by more."""

from __future__ import annotations

import warnings

import albumentations as A
import numpy as np
import torch
from augment.batches import collated
from augment.bounds import bound_of
from augment.parity import extremes, photographs
from hypothesis import example, given
from hypothesis import strategies as st
from misses import each
from thoroughness import max_examples

from benchmarks.parity import levels_per_unit
from lightning_fastdata import BatchTransform
from lightning_fastdata.augment import register
from lightning_fastdata.augment.albumentations.plan import (
    MOST_PER_LEVEL,
    analyse,
    list_leaves,
    may_differ,
)
from lightning_fastdata.augment.ops import DEVICE_OPS
from lightning_fastdata.types import SampleKey

SIZE = (60, 72)
OFF = {
    "hue": lambda: A.HueSaturationValue(15, 30, 30, p=1),
    "jitter": lambda: A.ColorJitter(p=1),
    "gaussian": lambda: A.GaussianBlur(p=1),
    "motion": lambda: A.MotionBlur(p=1),
    "blur": lambda: A.Blur(p=1),
    "warp": lambda: A.Affine(rotate=(-40, 40), p=1),
    "resize": lambda: A.Resize(50, 80, p=1),
    "crop": lambda: A.RandomResizedCrop((64, 56), p=1),
}
MORE = {
    "gamma": lambda: A.RandomGamma((30, 60), p=1),
    "harsh": lambda: A.RandomBrightnessContrast(contrast_limit=(2, 5), p=1),
}
MILD = {
    "mild": lambda: A.RandomBrightnessContrast(p=1),
    "gray": lambda: A.ToGray(p=0.5),
    "flip": lambda: A.HorizontalFlip(p=0.5),
    "no hue": lambda: A.ColorJitter(hue=0, p=1),
    "dropout": lambda: A.CoarseDropout(p=1),
}
GROUPS = {
    "all": list,
    "one of": lambda some: [A.OneOf(some, p=0.9)],
    "some of": lambda some: [A.SomeOf(some, 2, p=0.9)],
    "shuffled": lambda some: [A.RandomOrder(some, n=len(some), p=1)],
}
NAMES = st.sampled_from(sorted({**OFF, **MORE, **MILD}))
KEY = SampleKey(0, 0, 0)


def made(names):
    return [{**OFF, **MORE, **MILD}[name]() for name in names]


IMAGES = torch.from_numpy(np.stack([*photographs(*SIZE), *extremes(*SIZE)]))


def gap_and_most(compose):
    """Return the largest difference of the two places in levels, and the largest there may be."""
    outs = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for on_device in (False, True):
            batch = collated(compose, {"image": IMAGES.clone()}, KEY, on_device=on_device)
            outs.append(batch["image"].double())
    gap = float((outs[0] - outs[1]).abs().max()) * levels_per_unit(compose, np.uint8)
    plan = analyse(compose, DEVICE_OPS, size=SIZE)
    off = [
        bound_of(leaf.transform).largest
        for leaf, place in zip(list_leaves(compose), plan.placements, strict=True)
        if place.where != "worker" and may_differ(leaf.transform)
    ]
    return gap, MOST_PER_LEVEL * sum(off)


@max_examples(60)
@example(["gaussian", "hue"], "all")
@example(["flip", "warp", "jitter", "harsh"], "shuffled")
@given(st.lists(NAMES, min_size=2, max_size=5), st.sampled_from(sorted(GROUPS)))
def test_a_pipeline_is_off_by_no_more_than_its_operations(names, group):
    head, *tail = made(names)
    if len(tail) > 1 and not {"resize", "crop"} & set(names):  # a batch has one size
        tail = GROUPS[group](tail)
    gap, most = gap_and_most(A.Compose([head, *tail]))
    assert gap <= most


def places(*operations):
    compose = A.Compose(list(operations))
    return analyse(compose, DEVICE_OPS, size=SIZE).placements


@each("more", MORE)
@each("off", [name for name, make in OFF.items() if may_differ(make())])
def test_what_is_off_and_then_amplified_is_computed_in_the_worker(off, more):
    first, flip, last = places(OFF[off](), A.HorizontalFlip(), MORE[more]())
    assert (first.where, last.where) == ("worker", "device")
    assert f"{last.name} after it" in first.why
    assert flip.where == "device"
    # Nothing makes more of it where the two come the other way round, or never together.
    assert places(MORE[more](), OFF[off]())[1].where == "device"
    if off not in ("resize", "crop"):
        assert places(A.OneOf([OFF[off](), MORE[more]()]))[0].where == "device"


def test_contrast_and_gamma_of_usual_strengths_amplify_nothing():
    for mild in (A.RandomGamma(p=1), A.RandomBrightnessContrast(p=1)):
        assert places(A.GaussianBlur(p=1), mild)[0].where == "device"


@each("off", [name for name, make in OFF.items() if may_differ(make())])
def test_what_is_off_before_a_registered_form_is_computed_in_the_worker(off):
    """Posterizing has a threshold: a level that is off becomes a whole step."""
    first, last = OFF[off](), A.Posterize(num_bits=2, p=1)
    take_back = register(A.Posterize, table=True)
    try:
        want, got = (
            BatchTransform.from_albumentations(A.Compose([first, last]), on_cpu=place)(
                IMAGES.clone(), key=KEY
            )
            for place in ("albumentations", "torch")
        )
    finally:
        take_back()
    most = MOST_PER_LEVEL * bound_of(first).largest
    assert (want.double() - got.double()).abs().max() <= most
