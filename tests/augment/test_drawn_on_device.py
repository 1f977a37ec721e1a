"""Operations that draw less in the worker than Albumentations: where and how they run."""

from __future__ import annotations

import copy

import albumentations as A
import numpy as np
import pytest
import torch
from augment.batches import in_worker, keys, on_device, pipeline
from augment.parity import photographs
from misses import each

from lightning_fastdata.augment.ops import DEVICE_OPS
from lightning_fastdata.augment.pipeline.plan import analyse
from lightning_fastdata.augment.record.tape import Recorder
from lightning_fastdata.randomness.seeds import reseed

ALL = {
    "gauss": A.GaussNoise(p=1),
    "gauss, coarse": A.GaussNoise(noise_scale_factor=0.4, p=1),
    "elastic": A.ElasticTransform(60, 4, p=1),
}


def unchanged(image, **_):
    return image


def samples(size=(32, 41), channels=3):
    items = [{"image": photo} for photo in photographs(*size, channels)]
    return [item | {"mask": item["image"][..., 0] // 16} for item in items]


@each("name", ALL)
def test_a_sample_is_the_same_whether_or_not_a_later_operation_needs_its_pixels(name):
    alone = pipeline(ALL[name])
    flushed = pipeline(ALL[name], A.Lambda(image=unchanged, p=1))
    images = [on_device(one, samples())[0]["image"].numpy() for one in (alone, flushed)]
    apart = np.abs(images[0].astype(int) - images[1])
    assert apart.max() == 0


@each("name", ALL)
def test_a_sample_depends_on_its_key_alone(name):
    transform, items = pipeline(ALL[name]), samples()
    together, _ = on_device(transform, items)
    again, _ = on_device(transform, items)
    for index in range(3):
        assert torch.equal(together["image"][index], again["image"][index])
    alone, _ = on_device(transform, items[:1])
    assert torch.equal(alone["image"][0], together["image"][0])
    other, _ = on_device(transform, items, seed=1)
    assert not torch.equal(other["image"], together["image"])
    first, second = (on_device(transform, [items[0]] * 2)[0]["image"] for _ in range(2))
    assert torch.equal(first, second)
    assert not torch.equal(first[0], first[1])


@each("name", ALL)
def test_the_same_operation_again_draws_again(name):
    compose = A.Compose([copy.deepcopy(ALL[name]) for _ in range(5)])
    recorder = Recorder(compose, analyse(compose, DEVICE_OPS), DEVICE_OPS)
    reseed((recorder.compose,), keys(1)[0])
    _, tape = recorder(samples()[0])
    seeds = {op.encoded.arrays["seed"].tobytes() for op in tape["image"].ops}
    assert len(seeds) == 5


@each("name", ALL)
def test_two_images_of_a_sample_share_what_was_drawn(name):
    compose = pipeline(ALL[name], additional_targets={"other": "image"})
    items = [item | {"other": item["image"].copy()} for item in samples()]
    batch, _ = on_device(compose, items)
    assert torch.equal(batch["image"], batch["other"])


def test_with_same_pixels_nothing_is_drawn_on_the_device():
    places = pipeline(*ALL.values(), same_pixels=True).plan.placements
    where = {place.name: place.where for place in places}
    laws = {type(transform).__name__ for transform in ALL.values()}
    assert {name for name, place in where.items() if place == "worker"} >= laws
    assert "same distribution" in pipeline(A.GaussNoise(p=1), same_pixels=True).explain()
    for name, transform in ALL.items():
        strict, items = pipeline(transform, A.HorizontalFlip(p=1), same_pixels=True), samples()
        batch, _ = on_device(strict, items)
        for index, one in enumerate(in_worker(strict, items)):
            np.testing.assert_array_equal(batch["image"][index].numpy(), one["image"], name)


@each("name", ALL)
def test_the_plan_says_that_the_device_draws(name):
    for rest in ([], [A.ImageCompression(p=0.5)]):
        why = pipeline(ALL[name], *rest).plan.placements[0].why
        assert why.endswith("draws numbers for every pixel there")


@each("name", ["gauss"])
def test_noise_behind_normalize_stays_in_the_worker(name):
    transform = pipeline(A.Normalize((0, 0, 0), (1, 1, 1)), ALL[name], A.ToTensorV2())
    # Its device form keeps to [0, 1], which other means and deviations leave.
    assert [place.where for place in transform.plan.placements][:2] == ["worker", "worker"]


@each("name", ["elastic"])
def test_operations_behind_normalize_take_floats(name):
    transform = pipeline(A.Normalize((0, 0, 0), (1, 1, 1)), ALL[name], A.ToTensorV2())
    assert all(place.where == "device" for place in transform.plan.placements)
    batch, _ = on_device(transform, samples())
    assert batch["image"].dtype == torch.float32
    assert 0 <= batch["image"].min() <= batch["image"].max() <= 1


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@each("name", ALL)
def test_a_gpu_gives_the_pixels_of_the_cpu(name):
    transform = pipeline(ALL[name])
    part = transform.in_worker(on_device=True)
    drawn = [part(one, key) for one, key in zip(samples(), keys(3), strict=True)]
    draws = part.collate([tape for _, tape in drawn])
    batch = {"image": torch.stack([one["image"] for one, _ in drawn])}
    here = transform.apply(batch, draws)["image"]
    batch, draws = {"image": batch["image"].cuda()}, draws.to("cuda")
    transform.apply(batch, draws)  # compiles kernels, and makes constants
    with torch.cuda.device(0):
        torch.cuda.set_sync_debug_mode("error")
        try:
            there = transform.apply(batch, draws)["image"]
        finally:
            torch.cuda.set_sync_debug_mode("default")
    apart = (here.int() - there.cpu().int()).abs()
    assert (apart > 0).float().mean() < 1e-3
    assert apart.max() <= 1
