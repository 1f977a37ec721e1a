"""Operations on whole batches, with parameters of each sample's own, are torchvision's kernels."""

from __future__ import annotations

import pickle
from dataclasses import replace

import numpy as np
import pytest
import torch
from augment.v2_pipelines import assert_same, eager, samples_of, worked
from torchvision import tv_tensors
from torchvision.transforms import InterpolationMode, v2

from lightning_fastdata import FastDataWarning, as_batch_transform
from lightning_fastdata.augment.replay.compiled import Compiled
from lightning_fastdata.augment.torchvision.forms import (
    FORMS,
    crop,
    hue,
    resized_crop,
    window_numbers,
)
from lightning_fastdata.batches.collate import collate_samples

NEAREST, BILINEAR = InterpolationMode.NEAREST, InterpolationMode.BILINEAR
COLOUR = {tv_tensors.Image: [1, 2, 3], "others": 5}
SHEAR = (-9, 9, -5, 5)
OPERATIONS = {
    "brightness, contrast": v2.ColorJitter(0.9, 0.9),
    "saturation, hue": v2.ColorJitter(saturation=(0, 3), hue=0.5),
    "distort": v2.RandomPhotometricDistort(p=0.8),
    "channels": v2.RandomChannelPermutation(),
    "blur": v2.GaussianBlur((5, 9), (0.1, 3)),
    "erase": v2.RandomErasing(0.9, value=(0.2, 0.5, 0.7)),
    "crop": v2.RandomCrop((30, 20)),
    "crop, padded": v2.RandomCrop(60, padding=(4, 9), pad_if_needed=True, fill=7),
    "crop, mirrored": v2.RandomCrop(44, padding=6, padding_mode="reflect"),
    "resized crop": v2.RandomResizedCrop((32, 20)),
    "resized crop, enlarged": v2.RandomResizedCrop(70, antialias=False),
    "resized crop, nearest": v2.RandomResizedCrop(24, interpolation=NEAREST),
    "resize": v2.Resize((24, 60)),
    "rotation": v2.RandomRotation(180, fill=0.5),
    "rotation, between": v2.RandomRotation(45, BILINEAR, center=(3, 8)),
    "affine": v2.RandomAffine(30, (0.2, 0.1), (0.5, 1.5), 10),
    "affine, between": v2.RandomAffine(30, (0.2, 0.1), (0.5, 1.5), SHEAR, BILINEAR, COLOUR),
    "perspective": v2.RandomPerspective(0.6, p=0.9),
    "perspective, nearest": v2.RandomPerspective(0.6, p=0.9, interpolation=NEAREST, fill=9),
}
POLICIES = {
    "RandAugment": v2.RandAugment(3, 12),
    "TrivialAugmentWide": v2.TrivialAugmentWide(interpolation=BILINEAR, fill=(9, 8, 7)),
    "AutoAugment": v2.AutoAugment(),
}
COUNT = 8
STEPS = {"brightness, contrast": 3, "saturation, hue": 3, "distort": 6}
"""How often operations of one transform may take turns, where samples have orders of their own."""


def photos(count, dtype=torch.uint8, form="masks"):
    return samples_of(count, 40, 44, form, dtype)


def deferred(pipeline, samples):
    """Return a transform that leaves all to the device, what its worker leaves, and its draws."""
    transform = as_batch_transform(pipeline).for_samples(samples[:2])
    worker = transform.in_worker(on_device=True)
    made, tapes = worked(worker, samples)
    assert worker.stacks(made, tapes)
    return transform, collate_samples(made), worker.collate(tapes)


def assert_v2s_own(pipeline, samples, **how):
    """Return the steps of the device, which makes of samples what v2 makes of them."""
    transform, batch, draws = deferred(pipeline, samples)
    assert_same(transform.apply(batch, draws), collate_samples(eager(pipeline, samples)), **how)
    return draws.programs["image" if isinstance(samples[0], dict) else 0,].steps


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float32])
@pytest.mark.parametrize("name", [*OPERATIONS, *POLICIES])
def test_operations_are_torchvisions_on_images_and_masks(name, dtype):
    samples = photos(COUNT, dtype, "tuple" if name in POLICIES else "masks")
    assert_v2s_own(v2.Compose([(OPERATIONS | POLICIES)[name]]), samples, floats=1e-5)


@pytest.mark.parametrize("planes", [0, slice(1), slice(3)])
@pytest.mark.parametrize("name", [*OPERATIONS, "flip", "pad", "middle"])
def test_a_mask_is_moved_as_one_where_it_becomes_a_plain_tensor_behind_that(name, planes):
    others = {"flip": v2.RandomHorizontalFlip(), "pad": v2.Pad(4), "middle": v2.CenterCrop(28)}
    steps = [(OPERATIONS | others)[name], v2.ToPureTensor()]
    samples = [
        {"mask": tv_tensors.Mask(image[planes] // 64), "image": image}
        for image in (one["image"] for one in photos(4))
    ]
    for end in ([], [v2.RandomVerticalFlip(1.0)]):  # to v2 the first plain tensor is the image
        assert_v2s_own(v2.Compose([*steps, *end]), samples)


@pytest.mark.parametrize("name", OPERATIONS)
def test_a_transform_is_one_call_whatever_each_sample_drew(name):
    _, _, draws = deferred(v2.Compose([OPERATIONS[name]]), photos(4) * 8)
    for program in draws.programs.values():
        for step in program.steps:
            assert step.name in FORMS
            assert len(step.parts) == 1
        names = [step.name for step in program.steps]
        assert max(map(names.count, names)) <= STEPS.get(name, 1)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float32])
@pytest.mark.parametrize("name", POLICIES)
def test_policies_leave_to_torchvision_what_has_no_magnitude_of_a_sample(name, dtype):
    _, _, draws = deferred(v2.Compose([POLICIES[name]]), photos(16, dtype, "tuple") * 16)
    steps = draws.programs[0,].steps
    own = {
        pickle.loads(dict(part.static)["call"])[0][0]
        for step in steps
        if step.name not in FORMS
        for part in step.parts
    }
    assert own <= {"AutoContrast", "Equalize", "Invert", "Rotate"}  # by quarters
    assert {"posterize", "solarize", "sharpness"} <= {step.name for step in steps}


@pytest.mark.parametrize("size", [(3, 5), (40, 44), (90, 61)])
@pytest.mark.parametrize("dtype", [torch.uint8, torch.float32])
def test_windows_of_any_size_are_resized_as_torchvision_does(size, dtype):
    """Of one pixel, of one row, of the size that is asked for, and of the whole image."""
    boxes = [
        (0, 0, 40, 44),
        (3, 4, 1, 1),
        (39, 0, 1, 44),
        (0, 2, 33, 2),
        (1, 2, *size),
        (5, 9, 20, 31),
    ]
    boxes = [(top, left, min(h, 40 - top), min(w, 44 - left)) for top, left, h, w in boxes]
    batch = torch.stack([one["image"] for one in photos(len(boxes), dtype)])
    for mode, smooth in ((BILINEAR, True), (BILINEAR, False), (NEAREST, False)):
        wanted = [
            v2.functional.resized_crop(one, *box, list(size), interpolation=mode, antialias=smooth)
            for one, box in zip(batch, boxes, strict=True)
        ]
        name = "nearest" if mode is NEAREST else "antialias" if smooth else "bilinear"
        floats = dtype.is_floating_point
        numbers = [window_numbers(box, (40, 44), size, name, floats=floats) for box in boxes]
        arrays = {
            key: torch.from_numpy(np.stack([one[key] for one in numbers])) for key in numbers[0]
        }
        run, static = (crop, {"padding": None}) if mode is NEAREST else (resized_crop, {})
        made = run(batch, static, arrays)
        assert made.dtype == dtype
        gaps = (made.double() - torch.stack(wanted).double()).abs()
        assert float(gaps.max()) <= (1e-6 if dtype.is_floating_point else 0)


@pytest.mark.parametrize("odd", [torch.nan, torch.inf])
@pytest.mark.parametrize("size", [(9, 12), (60, 70)])
def test_a_pixel_that_is_no_number_spreads_as_far_as_in_torchvision(odd, size):
    boxes = [(0, 0, 40, 44), (5, 9, 20, 31), (1, 2, 9, 20), (8, 8, 9, 12)]
    batch = torch.stack([one["image"] for one in photos(len(boxes), torch.float32)])
    batch[:, :, ::11, ::13] = odd
    wanted = [
        v2.functional.resized_crop(one, *box, list(size), antialias=True)
        for one, box in zip(batch, boxes, strict=True)
    ]
    numbers = [window_numbers(box, (40, 44), size, "antialias", floats=True) for box in boxes]
    arrays = {key: torch.from_numpy(np.stack([one[key] for one in numbers])) for key in numbers[0]}
    made = resized_crop(batch, {}, arrays)
    torch.testing.assert_close(made, torch.stack(wanted), rtol=0, atol=1e-6, equal_nan=True)


LEFT = {
    "noise": v2.RandomErasing(1, value="random"),
    "quarters": v2.RandomRotation((90, 90)),
    "bicubic": v2.RandomResizedCrop(9, interpolation=InterpolationMode.BICUBIC),
    "exactly the nearest": v2.RandomResizedCrop(9, interpolation=InterpolationMode.NEAREST_EXACT),
    "flip": v2.RandomHorizontalFlip(),
    "sharpness": v2.RandomAdjustSharpness(2),
    "gray": v2.RandomGrayscale(0.5),
}


def test_a_batch_whose_compiled_form_is_refused_is_torchvisions_and_a_warning_says_so(monkeypatch):
    def refuse(run):
        raise RuntimeError("no compiler")

    refused = Compiled(hue, compiler=refuse, suits=lambda batch: True)
    monkeypatch.setitem(FORMS, "hue", replace(FORMS["hue"], image=refused))
    pipeline = v2.Compose([v2.RandomHorizontalFlip(), v2.ColorJitter(0.1, hue=0.1)])
    transform, batch, draws = deferred(pipeline, photos(COUNT))
    with pytest.warns(FastDataWarning, match="Operators of torch compute hue on cpu.*no compiler"):
        made = transform.apply(batch, draws)
    assert_same(made, collate_samples(eager(pipeline, photos(COUNT))), floats=1e-5)


def test_what_has_no_form_is_torchvisions_own_kernel_for_equal_parameters():
    pipeline = v2.Compose([LEFT["noise"], LEFT["quarters"]])
    steps = assert_v2s_own(pipeline, photos(COUNT, form="tuple"))
    assert [len(step.parts) for step in steps] == [COUNT, 1]


LEVELS = {
    "posterize": v2.RandomPosterize(3, p=1),
    "solarize": v2.RandomSolarize(0.5, p=1),
    "policy": v2.RandAugment(1, 12),
    "bytes": v2.ToDtype(torch.uint8, scale=True),
    "halves": v2.ToDtype(torch.float16),
    "bytes of images": v2.ToDtype({tv_tensors.Image: torch.uint8, "others": None}, scale=True),
}


@pytest.mark.parametrize("name", LEVELS)
def test_what_rounds_behind_a_resized_float_gets_torchvisions_last_bit(name):
    pipeline = v2.Compose([v2.RandomResizedCrop(9), LEVELS[name]])
    steps = assert_v2s_own(pipeline, photos(COUNT, torch.float32, "tuple"))
    assert "resized_crop" not in [step.name for step in steps]


def test_floats_are_resized_in_one_call_where_nothing_rounds_them():
    floats = v2.ToDtype({tv_tensors.Image: torch.float32, tv_tensors.Mask: torch.int64})
    for steps in ([v2.RandomResizedCrop(9), floats], [LEVELS["posterize"], v2.Resize((9, 9))]):
        _, _, draws = deferred(v2.Compose(steps), photos(2, torch.float32))
        assert "resized_crop" in [step.name for step in draws.programs["image",].steps]
