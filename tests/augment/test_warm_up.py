"""What was compiled before the training is all that its batches need."""

import albumentations as A
import numpy as np
import pytest
import torch
from augment.test_launches import compiled_for
from misses import each

from lightning_fastdata.augment.ops import DEVICE_OPS
from lightning_fastdata.augment.replay.triton import prepare, takes
from lightning_fastdata.augment.replay.warm_up import variants
from lightning_fastdata.augment.transform import as_batch_transform
from lightning_fastdata.types import SampleKey

pytest.importorskip("triton")

IMAGES = np.random.default_rng(0).integers(0, 256, (4, 24, 24, 3), np.uint8)
ENDS = A.Normalize(), A.ToTensorV2()
PIPELINES = {
    "flips": [A.HorizontalFlip(), *ENDS],
    "bytes": [A.HorizontalFlip(), A.RandomBrightnessContrast(p=0.3), A.ToTensorV2()],
    "no tensors": [A.HorizontalFlip(), A.Normalize()],
    "to float": [A.RandomRotate90(), A.ToFloat(p=1), A.ToTensorV2()],
    "warps and blurs": [
        A.HorizontalFlip(),
        A.Affine(rotate=(-20, 20), p=0.4),
        A.OneOf([A.GaussianBlur(), A.MedianBlur(3), A.MotionBlur()], p=0.4),
        A.ColorJitter(p=0.4),
        A.CoarseDropout(p=0.4),
        *ENDS,
    ],
    "two jitters and noise": [
        A.ColorJitter(p=0.5),
        A.GaussNoise(p=0.4),
        A.RandomGamma(p=0.4),
        A.ColorJitter(p=0.5),
        A.Sharpen(p=0.4),
        *ENDS,
    ],
    "behind a crop": [A.RandomCrop(15, 15), A.Rotate(p=0.3), A.CLAHE(p=0.3), *ENDS],
    "holes last": [A.Blur(p=0.5), A.Normalize(), A.CoarseDropout(p=0.5), A.ToTensorV2()],
}


def transform_of(name):
    return as_batch_transform(A.Compose(PIPELINES[name]))


def warmed(transform, **options):
    known = variants(transform.compose, transform.plan, DEVICE_OPS, **options)
    return {compiled_for(launch) for one in known for launch in one.launches()}


def needed(transform, target, batch):
    """Return what kernels one batch needs, by the launches that would carry out its runs."""
    worker = transform.in_worker(on_device=True)
    given = [{"image": image, "mask": image[..., 0]} for image in IMAGES]
    pairs = [worker(one, SampleKey(7, batch, row)) for row, one in enumerate(given)]
    draws = worker.collate([tape for _, tape in pairs])
    program = draws.programs.get(target)
    if program is None:
        return set()
    current = torch.stack([one[target] for one, _ in pairs])
    found = set()
    for run in program.runs:
        if run.idle or not takes(run, current):
            continue
        current = torch.zeros_like(current)  # only its form counts
        out, launches = prepare(run, draws.blob, current)
        found |= {compiled_for(launch) for launch in launches}
        current = out if out.dtype == torch.uint8 and not run.ending.channels_first else current
    return found


@pytest.mark.cases(2)
@each("name", PIPELINES)
def test_no_batch_needs_a_kernel_that_was_not_compiled(name):
    transform = transform_of(name)
    known = warmed(transform, masks=[torch.uint8])
    both = [(target, batch) for target in ("image", "mask") for batch in range(50)]
    asked = set().union(*(needed(transform, target, batch) for target, batch in both))
    assert asked
    assert asked <= known


def test_what_a_plan_does_not_need_is_not_compiled():
    assert len(warmed(transform_of("flips"))) == 1
    assert len(warmed(transform_of("bytes"))) == 1


def test_the_runs_can_be_launched():
    for name in PIPELINES:
        transform = transform_of(name)
        known = variants(transform.compose, transform.plan, DEVICE_OPS, masks=[torch.int64])
        assert known
        for one in known:
            one.launch(torch.device("cuda" if torch.cuda.is_available() else "cpu"))
