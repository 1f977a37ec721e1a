"""The tensors of a sample depend on seed, epoch and its index, however the epoch is run."""

from __future__ import annotations

import albumentations as A
import numpy as np
import pytest
import torch
from augment.loaders import Pictures, batches
from misses import each
from torch.utils.data import BatchSampler

torch.set_num_threads(1)

SAMPLES = 48
# In the worker, by samples that drew it only, and on the device.
PIPELINE = [
    A.RandomResizedCrop((20, 20)),
    A.D4(p=0.7),
    A.OneOf([A.RandomGamma(), A.GlassBlur(max_delta=2, iterations=1), A.CLAHE()], p=0.7),
    A.SomeOf([A.CoarseDropout(), A.Affine(rotate=(-30, 30)), A.GaussNoise()], n=2),
    A.HueSaturationValue(p=0.5),
    A.ElasticTransform(alpha=30, sigma=5, p=0.3),
    A.Normalize(),
    A.ToTensorV2(),
]


def picture(index):
    image = np.random.default_rng(index).integers(0, 256, (24, 28, 3), np.uint8)
    return {"image": image, "mask": image[..., 0] // 64, "index": index}


def one_picture(index):
    return picture(0) | {"index": index}


def tensors(make=picture, *, batch_size=8, **how) -> dict[int, tuple[bytes, bytes]]:
    """Run an epoch; return the bytes of image and mask of every sample."""
    found = {}
    for batch in batches(A.Compose(PIPELINE), Pictures(make, SAMPLES), size=batch_size, **how):
        assert batch["image"].shape[1:] == (3, 20, 20)
        for index, image, mask in zip(batch["index"], batch["image"], batch["mask"], strict=True):
            assert int(index) not in found
            found[int(index)] = image.numpy().tobytes(), mask.numpy().tobytes()
    return found


@pytest.fixture(scope="module")
def expected():
    found = tensors()
    assert len(found) == SAMPLES
    return found


@pytest.mark.cases(2)
@each(
    "how",
    [
        {"workers": 2, "multiprocessing_context": "fork"},
        {"workers": 4, "multiprocessing_context": "fork", "persistent_workers": True},
        {"workers": 2, "multiprocessing_context": "spawn", "batch_size": 32},
        {"batch_size": 32},
        {"batch_size": 1},
        {"batch_size": 7, "drop_last": False, "workers": 1},
        {"shuffle": True},
        {"shuffle": True, "workers": 2, "batch_size": 5},
        {"sampler": list(reversed(range(SAMPLES)))},
        {"executor": "inline"},
        {"executor": "workers", "workers": 2},
        {"executor": "workers", "workers": 3, "batch_size": 16, "shuffle": True},
    ],
)
@pytest.mark.filterwarnings("ignore:This DataLoader will create")
def test_an_epoch_makes_the_same_tensors_however_it_is_run(expected, how):
    assert tensors(**how) == expected


@each("workers", [0, 2])
def test_the_rest_of_an_epoch_is_what_it_would_have_been(expected, workers):
    order = np.random.default_rng(0).permutation(SAMPLES).tolist()
    rest = list(BatchSampler(order, 8, drop_last=False))[3:]
    found = tensors(batch_sampler=rest, batch_size=1, workers=workers)
    assert found == {index: expected[index] for index in order[24:]}


@each("other", [{"epoch": 1}, {"seed": 4}])
def test_another_epoch_or_seed_makes_other_tensors(expected, other):
    found = tensors(**other)
    assert found.keys() == expected.keys()
    assert not [index for index in found if found[index][0] == expected[index][0]]


def test_no_two_samples_of_one_picture_get_the_same_tensors():
    assert len({image for image, _ in tensors(one_picture).values()}) == SAMPLES


def test_the_workers_alone_draw_what_worker_and_device_draw(expected):
    # Masks show it: their pixels are equal wherever they are moved.
    whole = tensors(place="workers")
    assert all(whole[index][1] == expected[index][1] for index in whole)
