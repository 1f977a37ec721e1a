"""How many times a batch is handed to the device, and that nobody waits for it there."""

from __future__ import annotations

import inspect
import warnings

import albumentations as A
import numpy as np
import pytest
import torch
from augment.batches import keys, left_to_device
from misses import each

from lightning_fastdata.augment.ops import DEVICE_OPS
from lightning_fastdata.augment.replay.torch import replay
from lightning_fastdata.augment.transform import as_batch_transform

BATCH = 32

with warnings.catch_warnings():
    # ShiftScaleRotate warns that it is a special case of Affine, and people use it all the same.
    warnings.simplefilter("ignore")
    USUAL = {
        "light": (
            [A.Resize(32, 32), A.HorizontalFlip(), A.Normalize(), A.ToTensorV2()],
            1,
        ),
        "imagenet": (
            [
                A.Resize(40, 40),
                A.RandomResizedCrop((32, 32)),
                A.HorizontalFlip(),
                A.ColorJitter(p=0.8),
                A.Normalize(),
                A.ToTensorV2(),
            ],
            2,
        ),
        "kaggle": (
            [
                A.Resize(40, 40),
                A.RandomResizedCrop((32, 32)),
                A.HorizontalFlip(),
                A.VerticalFlip(),
                A.ShiftScaleRotate(p=0.5),
                A.RandomBrightnessContrast(p=0.5),
                A.HueSaturationValue(p=0.5),
                A.OneOf([A.MotionBlur(), A.Blur(5), A.GaussianBlur()], p=0.4),
                A.CoarseDropout(p=0.5),
                A.Normalize(),
                A.ToTensorV2(),
            ],
            3,
        ),
        "kaggle, affine and blur": (
            [
                A.Resize(32, 32),
                A.RandomRotate90(),
                A.Affine(p=0.5),
                A.ColorJitter(p=0.5),
                A.Blur(p=0.2),
                A.CoarseDropout(p=0.5),
                A.Normalize(),
                A.ToTensorV2(),
            ],
            4,
        ),
    }
"""Each with the launches of its runs. A size that is known lets the operations behind it run on the
device; the Resize itself is done by the worker, whose images differ in size."""


def drawn(compose, given, seed=1):
    """Return the images and the draws of a batch."""
    with warnings.catch_warnings():
        # What Albumentations thinks of a draw is not for us to say.
        warnings.filterwarnings("ignore", category=UserWarning, module="albumentations")
        own_keys = keys(len(given), seed)
        left, draws = left_to_device(as_batch_transform(compose), given, own_keys)
    return [one["image"] for one in left], draws


def many(size=None, count=BATCH):
    rng = np.random.default_rng(3)
    sizes = [size or (40 + number, 44) for number in range(count)]
    return [{"image": rng.integers(0, 256, (*one, 3), dtype=np.uint8)} for one in sizes]


@each("name", USUAL)
def test_a_usual_pipeline_takes_few_launches(name):
    transforms, expected = USUAL[name]
    images, draws = drawn(A.Compose(transforms), many())
    program = draws.programs["image"]
    steps = {number for run in program.runs for number in range(run.first, run.last + 1)}
    assert sum(1 + run.contrasts for run in program.runs if not run.idle) == expected
    # Blurs alone are left to torch.
    left = {step.name for number, step in enumerate(program.steps) if number not in steps}
    assert left <= {"Blur", "GaussianBlur", "MotionBlur"}
    assert images[0].shape[-1] == 3


@each("name", USUAL)
def test_the_launches_of_a_run_are_known_without_a_value_of_the_device(name):
    """A meta tensor has no values: whoever wants one gets an error instead of a stalled queue."""
    images, draws = drawn(A.Compose(USUAL[name][0]), many())
    program, blob = draws.programs["image"], draws.blob.to("meta")
    batch = torch.stack(images).to("meta")
    for run in program.runs:
        assert run.takes(batch)
        batch, made = run.prepare(blob, batch)
        assert len(made) == 1 + run.contrasts
        assert batch.device.type == "meta"
    assert batch.shape == (BATCH, 3, 32, 32)
    assert batch.dtype == torch.float32


def compiled_for(launch):
    """Return what Triton compiles a kernel for, apart from where tensors lie."""
    from lightning_fastdata.ext.kernels.fused import fused_kernel

    kernel = fused_kernel
    options = getattr(kernel, "kwargs", None) or vars(kernel)  # of the interpreter, or the compiler
    if "do_not_specialize" not in options:
        pytest.skip("the interpreter of this Triton does not tell")
    free = options["do_not_specialize"]
    given = zip(inspect.signature(kernel.fn).parameters, launch.arguments, strict=False)
    return (
        *launch.constants.items(),
        *(
            one.dtype if isinstance(one, torch.Tensor) else (name, one == 1, one % 16 == 0)
            for name, one in given
            if name not in free
        ),
    )


@each("name", ["imagenet", "kaggle, affine and blur"])
def test_what_is_drawn_does_not_make_a_training_wait_for_another_kernel(name):
    pytest.importorskip("triton")
    seen = {}
    for seed in range(6):
        images, draws = drawn(A.Compose(USUAL[name][0]), many(count=8 + seed), seed)
        batch = torch.stack(images)
        for run in draws.programs["image"].runs:
            batch, made = run.prepare(draws.blob, batch)
            for launch in made:
                constants = (*launch.constants.items(), launch.arguments[1].dtype)
                seen.setdefault(constants, set()).add(compiled_for(launch))
    assert {len(kinds) for kinds in seen.values()} == {1}


def test_large_images_and_many_small_ones_are_within_the_limits_of_a_grid():
    flip = A.Compose([A.HorizontalFlip(p=1)])
    for shape in [(1, 20_000, 20_000, 3), (70_000, 4, 4, 3), (3, 16_384, 16_384, 3)]:
        count = shape[0]
        _, draws = drawn(flip, many((4, 4), count=min(count, 3)))
        (run,) = draws.programs["image"].runs
        batch = torch.empty(shape, dtype=torch.uint8, device="meta")
        assert run.takes(batch)
        (launch,) = run.prepare(draws.blob.to("meta"), batch)[1]
        (programs,) = launch.grid
        pixels = count * shape[1] * shape[2]
        assert pixels <= programs * launch.constants["BLOCK"] < 1 << 40
        assert programs < 1 << 31  # the first dimension of a grid; the others have 65535


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@each("name", USUAL)
def test_a_gpu_is_not_waited_for_and_makes_the_bytes_of_the_cpu(name):
    images, draws = drawn(A.Compose(USUAL[name][0]), many())
    program, batch = draws.programs["image"], torch.stack(images)
    wanted = replay(program, draws.blob, batch, DEVICE_OPS)
    blob, batch = draws.blob.cuda(), batch.cuda()
    # Kernels are compiled when they are first launched.
    replay(program, blob, batch, DEVICE_OPS)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        made = replay(program, blob, batch, DEVICE_OPS)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert torch.equal(made.cpu(), wanted)
