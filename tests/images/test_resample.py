"""Exact means torchvision's pixels; fast means near them, for no more work."""

from __future__ import annotations

import numpy as np
import pytest
from images.torchvision_pixels import psnr_db, torchvision_sample
from misses import each
from PIL import Image
from torchvision.datasets.folder import pil_loader
from torchvision.transforms import v2

from lightning_fastdata.ext.images.decoders import choose_decoder
from lightning_fastdata.ext.images.reading import open_image
from lightning_fastdata.ext.images.resized_crop import (
    Box,
    CropRule,
    Placement,
    ResamplePlan,
    keyed_uniform,
    plan_resample,
    render,
    settle_resample,
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


@each("name", ["china", "rocket", "retina", "coffee"])
@each(("resize_to", "size"), [(256, 224), (100, 99), (64, 64)])
def test_validation_is_resize_then_center_crop_of_torchvision(name, resize_to, size, photos):
    rule = CropRule(size=size, crop="center", resize=resize_to)
    image = open_image(str(photos[name]), decoder=choose_decoder())
    placement = rule.place(image.height, image.width, float)
    plan = plan_resample(placement, settle_resample("auto", "center"), scalable=True)
    ours = rendered(photos[name], placement, plan, size)
    transform = v2.Compose([v2.Resize(resize_to, antialias=True), v2.CenterCrop(size)])
    loaded = pil_loader(str(photos[name]))
    on_tensor = transform(v2.functional.pil_to_tensor(loaded)).permute(1, 2, 0).numpy()
    np.testing.assert_array_equal(ours, on_tensor)
    # PIL rounds between its two passes, so its pixels differ by one level here and there.
    on_pil = np.array(transform(loaded))
    assert np.abs(ours.astype(int) - on_pil).max() <= 1


def test_fast_samples_stay_near_torchvisions(big):
    rule = CropRule(size=SIZE, horizontal_flip=0.5)
    decibels, scales = [], []
    for index in range(40):
        placement = rule.place(1068, 1600, keyed_uniform(SampleKey(0, 0, index)))
        plan = plan_resample(placement, "auto", scalable=True)
        wanted = torchvision_sample(str(big), placement, SIZE, "tensor")
        decibels.append(psnr_db(rendered(big, placement, plan), wanted))
        scales.append(plan.scale)
    assert {2, 4, 8} <= set(scales)
    assert np.median(decibels) > 32
    assert min(decibels) > 25


def test_a_small_shrink_is_linear_and_near_torchvision(photos):
    rule = CropRule(size=400)
    decibels = []
    for index in range(30):
        placement = rule.place(427, 640, keyed_uniform(SampleKey(0, 0, index)))
        plan = plan_resample(placement, "auto", scalable=True)
        assert plan == (1, "linear")
        wanted = torchvision_sample(str(photos["china"]), placement, 400)
        decibels.append(psnr_db(rendered(photos["china"], placement, plan, 400), wanted))
    assert np.median(decibels) > 38
    assert min(decibels) > 32


@each("how", ["linear", "antialias"])
@each("shape", [(200, 300), (96, 96), (50, 40), (200, 50), (50, 200)])
def test_a_flip_mirrors_the_sample_and_nothing_else(how, shape, photos):
    placement = Placement(Box(30, 40, *shape), SIZE, SIZE, 0, 0, False)
    plan = ResamplePlan(1, how)
    plain = rendered(photos["china"], placement, plan)
    mirrored = rendered(photos["china"], placement._replace(flip=True), plan)
    np.testing.assert_array_equal(mirrored, plain[:, ::-1])
