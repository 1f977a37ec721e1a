"""A run moves masks as its operations do one after the other, whatever their dtype.

Without a GPU the kernels run in Triton's interpreter, which `conftest.py` turns on.
"""

from __future__ import annotations

import albumentations as A
import cv2
import numpy as np
import pytest
import torch
from augment.batches import keys
from augment.test_fused import DEVICE, photographs, tape_of
from augment.test_warped_positions import matrix_of
from hypothesis import given
from hypothesis import strategies as st
from misses import each
from thoroughness import max_examples

from lightning_fastdata.augment.ops import DEVICE_OPS
from lightning_fastdata.augment.ops.operation import Track
from lightning_fastdata.augment.pipeline.bounds import opencv_major
from lightning_fastdata.augment.replay.program import compile_tapes, launches
from lightning_fastdata.augment.replay.torch import replay
from lightning_fastdata.augment.replay.triton import is_movable, prepare, takes
from lightning_fastdata.augment.transform import as_batch_transform

pytest.importorskip("triton")

DTYPES = [torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64]
WILD = {"scale": (0.3, 2), "rotate": (-90, 90), "translate_percent": (-0.5, 0.5)}
POOL = {
    "mirror": lambda: A.HorizontalFlip(p=0.5),
    "turn": lambda: A.D4(p=0.6),
    "affine": lambda: A.Affine(**WILD, fill_mask=9, p=0.6),
    "wrapped": lambda: A.Affine(**WILD, border_mode=cv2.BORDER_WRAP, p=0.6),
    "rotate": lambda: A.Rotate(border_mode=cv2.BORDER_REFLECT_101, fill_mask=3.5, p=0.5),
    "perspective": lambda: A.Perspective((0.1, 0.4), fill_mask=7, p=0.5),
    "holes": lambda: A.CoarseDropout(fill_mask=5, p=0.6),
    "holes of images": lambda: A.CoarseDropout(p=0.6),
    "colours": lambda: A.ColorJitter(p=0.6),
    "blur": lambda: A.OneOf([A.MotionBlur(), A.GaussianBlur()], p=0.8),
    "padded": lambda: A.Pad((2, 3), border_mode=cv2.BORDER_CONSTANT, fill_mask=4, p=1),
    "reflected": lambda: A.Pad(3, border_mode=cv2.BORDER_REFLECT, p=1),
    "cropped": lambda: A.RandomCrop(5, 5, p=1),
    "resized": lambda: A.Resize(9, 7, p=1),
    "resized crop": lambda: A.RandomResizedCrop((8, 8), p=1),
    "in torch": lambda: A.ElasticTransform(60, 4, p=0.5),
}


def prepared(pipeline, size, seed, count=3):
    worker = as_batch_transform(A.Compose(pipeline)).in_worker(on_device=True)
    given = [{"image": image, "mask": image[:, :, 0]} for image in photographs(count, *size)]
    drawn = [worker(one, key) for one, key in zip(given, keys(count, seed), strict=True)]
    return torch.stack([one["mask"] for one, _ in drawn]), worker.collate([t for _, t in drawn])


def both_ways(program, blob, masks):
    masks, blob = masks.to(DEVICE), blob.to(DEVICE)
    before = masks.clone()
    results = [
        replay(program, blob, masks, DEVICE_OPS, kernels=kernels) for kernels in (True, False)
    ]
    assert torch.equal(masks, before)
    return results


@pytest.mark.timeout(600)  # on a GPU each kind of run compiles a kernel
@max_examples(25)
@given(
    names=st.lists(st.sampled_from(sorted(POOL)), min_size=1, max_size=4),
    size=st.sampled_from([(14, 14), (11, 16), (6, 6)]),
    dtype=st.sampled_from(DTYPES),
    channels=st.sampled_from([None, 1, 2, 5]),
    seed=st.integers(0, 100),
)
def test_any_pipeline_moves_masks_alike(names, size, dtype, channels, seed):
    if "turn" in names:
        # What turns an image on its side needs square ones, or a batch would be of two sizes.
        size, names = (14, 14), [name for name in names if name not in {"padded", "resized"}]
    pipeline = [POOL[name]() for name in names]
    masks, draws = prepared([A.Resize(*size), *pipeline, A.ToTensorV2()], size, seed)
    program = draws.programs.get("mask")
    if program is None:
        return
    masks = (masks.to(torch.int64) - (0 if dtype == torch.uint8 else 128)).to(dtype)
    if channels is not None:
        masks = torch.stack([masks.roll(number, 1) for number in range(channels)], -1)
    fused, single = both_ways(program, draws.blob, masks)
    assert fused.dtype == single.dtype
    assert fused.shape == single.shape
    assert torch.equal(fused, single)


@pytest.mark.slow
@pytest.mark.skipif(opencv_major() < 5, reason="warps are in no run of a kernel")
@each("role", ["image", "mask"])
@each("projective", [False, True])
def test_a_kernel_finds_the_nearest_pixel_in_the_columns_behind_opencvs_vectors(role, projective):
    height, width, count = 11, 29, 48
    nearest = A.Affine(interpolation=cv2.INTER_NEAREST)
    if projective:
        nearest = A.Perspective(interpolation=cv2.INTER_NEAREST, keep_size=False)
    name, rng = type(nearest).__name__, np.random.default_rng(5)
    size = {"output_shape": (height, width), "max_height": height, "max_width": width}
    tapes = []
    for _ in range(count):
        params = {"matrix": matrix_of(rng, projective=projective), **size}
        tapes.append({role: Track(role, (tape_of(name, nearest, params, (height, width, 3)),))})
    draws = compile_tapes(tapes, DEVICE_OPS)
    pixels = torch.from_numpy(rng.permuted(np.arange(count * height * width * 3)))
    batch = (pixels % 251).to(torch.uint8).view(count, height, width, 3)
    program = draws.programs[role]
    assert takes(program.runs[0], batch)
    fused, single = both_ways(program, draws.blob, batch)
    assert torch.equal(fused, single)


def test_what_changes_images_alone_costs_masks_nothing():
    pipeline = [A.Resize(8, 8), A.ColorJitter(p=1), A.Blur(p=1), A.Normalize(), A.ToTensorV2()]
    masks, draws = prepared(pipeline, (8, 8), 0)
    program = draws.programs["mask"]
    assert launches(program) == 0
    assert replay(program, draws.blob, masks, DEVICE_OPS, kernels=True) is masks


def test_masks_of_a_usual_pipeline_take_a_launch_for_each_geometry():
    pipeline = [
        *(A.Resize(12, 12), A.RandomResizedCrop((8, 8)), A.HorizontalFlip()),
        *(A.Affine(p=0.5), A.RandomBrightnessContrast(), A.GaussianBlur(), A.CoarseDropout()),
        *(A.Normalize(), A.ToTensorV2()),
    ]
    masks, draws = prepared(pipeline, (12, 12), 0, count=16)
    program = draws.programs["mask"]
    assert launches(program) == 2
    blob, masks = draws.blob.to("meta"), masks.to("meta")
    for run in program.runs:
        assert takes(run, masks)
        masks, made = prepare(run, blob, masks)
        assert len(made) == run.launches
    assert masks.shape == (16, 8, 8)


@each("dtype", [torch.bool, torch.float32])
def test_other_masks_take_one_step_after_the_other(dtype):
    assert not is_movable(torch.zeros(2, 8, 8, dtype=dtype))
    assert is_movable(torch.zeros(2, 8, 8, dtype=torch.int64))
