"""A fused run gives the bytes that its steps give one after the other.

Without a GPU the kernels run in Triton's interpreter, which `conftest.py` turns on.
"""

from __future__ import annotations

import sys

import albumentations as A
import cv2
import numpy as np
import pytest
import torch
from ext.kernels.test_launches import drawn
from hypothesis import given
from hypothesis import strategies as st
from misses import each
from thoroughness import max_examples

from lightning_fastdata import registry
from lightning_fastdata.augment.ops import DEVICE_OPS
from lightning_fastdata.augment.ops.operation import TapeOp, Track
from lightning_fastdata.augment.replay.program import compile_tapes
from lightning_fastdata.augment.replay.torch import replay
from lightning_fastdata.augment.replay.warm_up import has_kernels
from lightning_fastdata.ext.kernels.runs import fuse, is_fusible

interpreter = pytest.importorskip("triton.runtime.interpreter")


def fma(_, x, y, z):
    """Round a product and a sum once, as GPUs do; Triton's interpreter rounds the product, too."""
    exact = x.data.astype(np.float64) * y.data + z.data
    return interpreter.TensorHandle(exact.astype(z.data.dtype), z.dtype.scalar)


interpreter.InterpreterBuilder.create_fma = fma

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def photographs(count, height=41, width=50, seed=0):
    rng = np.random.default_rng(seed)
    rough = rng.integers(0, 256, (count, 7, 9, 3), dtype=np.uint8)
    return [cv2.resize(image, (width, height), interpolation=cv2.INTER_CUBIC) for image in rough]


def prepared(pipeline, images, seed=0):
    """Return the batch and the draws of a pipeline."""
    left, draws = drawn(A.Compose(pipeline), [{"image": image} for image in images], seed)
    return torch.stack(left), draws


def noted(*samples):
    """Return the draws of samples, each with its transforms, their numbers and input shapes."""
    tapes = []
    for operations in samples:
        track = []
        for leaf, (transform, params, shape) in enumerate(operations):
            name = type(transform).__name__
            encoded = DEVICE_OPS[name].encode(transform, params, shape, np.dtype(np.uint8))
            track.append(TapeOp(leaf=leaf, name=name, encoded=encoded))
        tapes.append({"image": Track("image", tuple(track))})
    return compile_tapes(tapes, fuse=fuse)


def assert_fused(draws, batch):
    """Return a batch after its fused runs: the bytes that its single steps give it."""
    program = draws.programs["image"]
    assert program.runs
    assert is_fusible(batch)
    batch, blob = batch.to(DEVICE), draws.blob.to(DEVICE)
    before = batch.clone()
    fused, single = (
        replay(program, blob, batch, DEVICE_OPS, kernels=kernels) for kernels in (True, False)
    )
    assert torch.equal(batch, before)
    assert fused.dtype == single.dtype
    assert torch.equal(fused, single)
    return fused


def stacked(images):
    return torch.from_numpy(np.stack(images))


def check(pipeline, *, count=3, seed=0, **size):
    batch, draws = prepared(pipeline, photographs(count, seed=seed, **size), seed)
    assert_fused(draws, batch)
    return draws.programs["image"]


JITTER = {
    "brightness": (0.5, 1.5),
    "contrast": (0.5, 1.5),
    "saturation": (0, 2),
    "hue": (-0.3, 0.3),
}
POOL = {
    "mirror": lambda: A.HorizontalFlip(p=0.5),
    "other mirror": lambda: A.VerticalFlip(p=0.5),
    "jitter": lambda: A.ColorJitter(**JITTER, p=0.8),
    "hsv": lambda: A.HueSaturationValue(p=0.7),
    "line": lambda: A.RandomBrightnessContrast(p=0.7),
    "gamma": lambda: A.RandomGamma(p=0.5),
    "gray": lambda: A.ToGray(p=0.3),
    "holes": lambda: A.CoarseDropout(p=0.6, fill=(10, 200, 30)),
    "one of": lambda: A.OneOf([A.RandomGamma(p=1), A.ToGray(p=1), A.HorizontalFlip(p=1)], p=0.8),
    "turn": lambda: A.RandomRotate90(p=0.5),
    "transpose": lambda: A.Transpose(p=0.5),
    "affine": lambda: A.Affine(rotate=(-60, 60), scale=(0.4, 2), fill=(9, 200.5, 31), p=0.6),
    "turned": lambda: A.Rotate(interpolation=cv2.INTER_NEAREST, border_mode=3, p=0.4),
    "gaussian": lambda: A.GaussianBlur((3, 5), (0.1, 2), p=0.6),
    "one of blurs": lambda: A.OneOf([A.MotionBlur((3, 3)), A.GaussianBlur((3, 3))], p=0.8),
}
ENDS = {
    "bytes": [],
    "floats": [A.Normalize()],
    "tensor": [A.Normalize(), A.ToTensorV2()],
    "tensor of bytes": [A.ToTensorV2()],
    "divided": [A.ToFloat(max_value=254.0), A.ToTensorV2()],
    "holes at last": [A.Normalize(), A.CoarseDropout(p=0.5), A.ToTensorV2()],
}


def test_the_usual_recipe_is_one_run():
    pipeline = [A.RandomResizedCrop((24, 24)), A.HorizontalFlip(), A.ColorJitter(p=0.8)]
    program = check([*pipeline, A.Normalize(), A.ToTensorV2()], count=6)
    assert [(run.first, run.last) for run in program.runs] == [(0, len(program.steps) - 1)]


@pytest.mark.timeout(600)  # on a GPU each kind of run compiles a kernel
@max_examples(20)
@given(
    names=st.lists(st.sampled_from(sorted(POOL)), min_size=1, max_size=4),
    end=st.sampled_from(sorted(ENDS)),
    size=st.sampled_from([(20, 20), (17, 24)]),
    seed=st.integers(0, 1000),
)
def test_any_pipeline_gives_the_same_bytes(names, end, size, seed):
    # What turns an image on its side needs square ones, or a batch would be of two sizes.
    size = (20, 20) if {"turn", "transpose"} & set(names) else size
    pipeline = [POOL[name]() for name in names]
    # The size is known from here on, so what turns squares runs on the device.
    pipeline = [A.Resize(*size), *pipeline]
    images = photographs(3, *size, seed=seed)
    batch, draws = prepared([*pipeline, *ENDS[end]], images, seed)
    program = draws.programs.get("image")
    if program is not None and program.runs:
        assert_fused(draws, batch)


@pytest.mark.cases(1)
@each("size", [(20, 30), (64, 70), (41, 50), (1, 1)])
def test_a_resize_before_the_pixels_reads_the_same_bytes(size):
    images = photographs(5)
    flip = A.HorizontalFlip(p=1), {}, (*size, 3)
    boxes = [(0, 0, 50, 41), (3, 4, 49, 40), (10, 10, 11, 11), (0, 5, 25, 41), (49, 40, 50, 41)]
    crops = [(A.RandomResizedCrop(size), {"crop_coords": b}, images[0].shape) for b in boxes]
    draws = noted(*([crop, flip] for crop in crops))
    assert draws.programs["image"].runs[0].reading.geometry == "resize"
    assert_fused(draws, stacked(images))


def test_a_crop_before_the_pixels_reads_the_same_bytes():
    gray = A.ToGray(p=1), {}, (20, 24, 3)
    boxes = [(x, y, x + 24, y + 20) for x, y in ((0, 0), (26, 21), (3, 7))]
    crops = [(A.RandomCrop(20, 24), {"crop_coords": box}, (41, 50, 3)) for box in boxes]
    draws = noted(*([crop, gray] for crop in crops))
    assert draws.programs["image"].runs[0].reading.geometry == "window"
    assert_fused(draws, stacked(photographs(3)))


@each(
    "pipeline",
    [[A.HorizontalFlip(p=1)], [A.RandomResizedCrop((9, 11), p=1)], [A.RandomCrop(5, 7, p=1)]],
)
def test_a_batch_is_read_at_any_address(pipeline):
    batch, draws = prepared([*pipeline, A.ToGray(p=0.5)], photographs(3, 13, 15))
    for offset in range(4):
        memory = torch.full((offset + batch.numel() + 7,), 170, dtype=torch.uint8, device=DEVICE)
        assert_fused(draws, memory[offset:][: batch.numel()].view(batch.shape).copy_(batch))


@pytest.mark.cases(1)
@each("contrast", [0.0, 1.0, 3.0])
def test_contrast_takes_the_mean_of_what_came_before_it(contrast):
    jitter = A.ColorJitter(**{**JITTER, "contrast": (contrast, contrast)}, p=1)
    program = check([A.RandomGamma(p=0.5), jitter])
    assert program.runs[0].contrasts == (contrast != 1.0)


def test_a_second_contrast_begins_another_run():
    jitter = {"brightness": 0, "contrast": (0.5, 0.6), "saturation": 0, "hue": 0, "p": 1}
    first, second = A.ColorJitter(**jitter), A.ColorJitter(**jitter)
    program = check([A.RandomGamma(p=1), first, second, A.HorizontalFlip(p=0.5)])
    assert len(program.runs) == 2
    assert all(run.contrasts for run in program.runs)


def test_holes_behind_normalize_are_a_step_of_their_own():
    late = A.CoarseDropout(fill=(0.5, -1.25, 3), p=1)
    program = check([A.HorizontalFlip(), A.Normalize(), late, A.ToTensorV2()])
    assert [(run.first, run.last) for run in program.runs] == [(0, 1)]


def test_no_run_begins_where_images_are_no_bytes():
    program = check([A.HorizontalFlip(), A.Normalize(), A.VerticalFlip(p=1), A.ToTensorV2()])
    assert [(run.first, run.last) for run in program.runs] == [(0, 1)]


@each(("dtype", "channels"), [(torch.float32, 3), (torch.uint8, 1), (torch.uint8, 4)])
def test_other_images_take_one_step_after_the_other(dtype, channels):
    assert not is_fusible(torch.zeros(2, 8, 8, channels, dtype=dtype))
    assert is_fusible(torch.zeros(2, 8, 8, 3, dtype=torch.uint8))


def test_the_cpu_takes_no_kernels_by_itself():
    assert not has_kernels(torch.device("cpu"))


def test_without_this_room_torch_carries_out_each_step(monkeypatch):
    for name in ("", ".runs"):
        monkeypatch.setitem(sys.modules, f"lightning_fastdata.ext.kernels{name}", None)
    pipeline, images = [A.HorizontalFlip(p=0.5), A.Normalize()], photographs(2)
    registry.fuse.cache_clear()
    try:
        batch, draws = prepared(pipeline, images)
    finally:
        registry.fuse.cache_clear()
    program = draws.programs["image"]
    assert program.runs == ()
    made = replay(program, draws.blob, batch, DEVICE_OPS, kernels=True)
    assert torch.equal(made, replay(program, draws.blob, batch, DEVICE_OPS, kernels=False))
