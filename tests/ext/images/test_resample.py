"""Exact means torchvision's pixels; fast means near them, for no more work."""

from __future__ import annotations

import numpy as np
import pytest
from ext.images.torchvision_pixels import psnr_db, torchvision_sample
from misses import each
from PIL import Image

from lightning_fastdata.ext.images.decoders import choose_decoder, open_image
from lightning_fastdata.ext.images.resized_crop import (
    Box,
    CropRule,
    Placement,
    ResamplePlan,
    keyed_uniform,
    plan_resample,
    render,
)
from lightning_fastdata.types import SampleKey

SIZE = 96


@pytest.fixture(scope="module")
def big(tmp_path_factory, china, encode):
    """A photograph of 1600x1068, so that crops of it shrink a lot."""
    path = tmp_path_factory.mktemp("big") / "big.jpg"
    large = china.resize((1600, 1068), Image.Resampling.LANCZOS)
    path.write_bytes(encode(large, format="JPEG", quality=92))
    return path


def rendered(path, placement, plan, size=SIZE):
    out = np.full((size, size, 3), 255, np.uint8)
    render(open_image(str(path), decoder=choose_decoder()), placement, plan, out)
    return out


@pytest.mark.cases(6)
@each("crop", ["random_resized", "center", "stretch"])
@each("name", ["china", "rocket", "retina", "coffee"])
def test_exact_samples_are_torchvisions_to_the_last_bit(crop, name, photos):
    rule = CropRule(size=SIZE, crop=crop, horizontal_flip=0.5)
    image = open_image(str(photos[name]), decoder=choose_decoder())
    for index in range(8):
        uniform = keyed_uniform(SampleKey(0, 0, index))
        placement = rule.place(image.height, image.width, uniform)
        plan = plan_resample(placement, "exact", scalable=True)
        ours = rendered(photos[name], placement, plan)
        on_tensor = torchvision_sample(str(photos[name]), placement, SIZE, "tensor")
        np.testing.assert_array_equal(ours, on_tensor)
        # PIL and torch round differently, by one level.
        assert psnr_db(ours, torchvision_sample(str(photos[name]), placement, SIZE)) > 50


@each(
    ("name", "size", "reference", "plans", "median", "least"),
    [
        ("big", SIZE, "tensor", {2, 4, 8}, 32, 25),
        # What shrinks a little is linear.
        ("china", 400, "pil", {(1, "linear")}, 38, 32),
    ],
)
def test_fast_samples_stay_near_torchvisions(
    big, photos, name, size, reference, plans, median, least
):
    path = str(big if name == "big" else photos[name])
    image, rule = (
        open_image(path, decoder=choose_decoder()),
        CropRule(size=size, horizontal_flip=0.5),
    )
    decibels, seen = [], set()
    for index in range(40):
        placement = rule.place(image.height, image.width, keyed_uniform(SampleKey(0, 0, index)))
        plan = plan_resample(placement, "auto", scalable=True)
        wanted = torchvision_sample(path, placement, size, reference)
        decibels.append(psnr_db(rendered(path, placement, plan, size), wanted))
        seen |= {plan.scale, plan}
    assert plans <= seen
    assert name == "big" or seen == {1, *plans}
    assert np.median(decibels) > median
    assert min(decibels) > least


@each("how", ["linear", "antialias"])
@each("shape", [(200, 300), (96, 96), (50, 40), (200, 50), (50, 200)])
def test_a_flip_mirrors_the_sample_and_nothing_else(how, shape, photos):
    placement = Placement(Box(30, 40, *shape), SIZE, SIZE, 0, 0, False)
    plan = ResamplePlan(1, how)
    plain = rendered(photos["china"], placement, plan)
    mirrored = rendered(photos["china"], placement._replace(flip=True), plan)
    np.testing.assert_array_equal(mirrored, plain[:, ::-1])
