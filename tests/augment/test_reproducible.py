"""The tensors of a sample depend on seed, epoch and its index, however the epoch is run."""

from __future__ import annotations

import albumentations as A
import numpy as np
import pytest
import torch
from misses import each
from torch.utils.data import BatchSampler, Dataset, DistributedSampler

from lightning_fastdata.augment.transform import as_batch_transform
from lightning_fastdata.loading.loader import FastDataLoader

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


class Pictures(Dataset):
    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> dict:
        rng = np.random.default_rng(index)
        image = rng.integers(0, 256, (24, 28, 3), np.uint8)
        return {"image": image, "mask": image[..., 0] // 64, "index": index}


def tensors(epoch=0, seed=3, on_device=True, **how) -> dict[int, tuple[bytes, bytes]]:
    """Run an epoch; return the bytes of image and mask of every sample."""
    transform = as_batch_transform(A.Compose(PIPELINE))
    options = {"batch_size": 8, "num_workers": 0} | how
    loader = FastDataLoader(
        Pictures(),
        seed=seed,
        epoch=lambda: epoch,
        transform=transform,
        on_device=on_device,
        staged="train",
        **options,
    )
    found = {}
    for staged in loader:
        batch = transform.apply(staged.batch, staged.draws)
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
        {"num_workers": 2, "multiprocessing_context": "fork"},
        {"num_workers": 4, "multiprocessing_context": "fork", "persistent_workers": True},
        {"num_workers": 2, "multiprocessing_context": "spawn", "batch_size": 32},
        {"batch_size": 32},
        {"batch_size": 1},
        {"batch_size": 7, "drop_last": False, "num_workers": 1},
        {"shuffle": True},
        {"shuffle": True, "num_workers": 2, "batch_size": 5},
        {"sampler": list(reversed(range(SAMPLES)))},
        {"executor": "inline"},
        {"executor": "workers", "num_workers": 2},
        {"executor": "workers", "num_workers": 3, "batch_size": 16, "shuffle": True},
    ],
)
@pytest.mark.filterwarnings("ignore:This DataLoader will create")
def test_an_epoch_makes_the_same_tensors_however_it_is_run(expected, how):
    assert tensors(**how) == expected


@each("ranks", [2, 3])
def test_ranks_make_the_tensors_of_a_single_process(expected, ranks):
    shares = [
        tensors(
            sampler=DistributedSampler(Pictures(), ranks, rank, shuffle=True, seed=9),
            num_workers=rank,
        )
        for rank in range(ranks)
    ]
    assert sum(map(len, shares)) == SAMPLES
    joined: dict = {}
    for share in shares:
        joined |= share
    assert joined == expected


@each("workers", [0, 2])
def test_the_rest_of_an_epoch_is_what_it_would_have_been(expected, workers):
    order = np.random.default_rng(0).permutation(SAMPLES).tolist()
    rest = list(BatchSampler(order, 8, drop_last=False))[3:]
    found = tensors(batch_sampler=rest, batch_size=1, num_workers=workers)
    assert found == {index: expected[index] for index in order[24:]}


@each("other", [{"epoch": 1}, {"seed": 4}])
def test_another_epoch_or_seed_makes_other_tensors(expected, other):
    found = tensors(**other)
    assert found.keys() == expected.keys()
    assert not [index for index in found if found[index][0] == expected[index][0]]


def test_no_two_samples_of_one_picture_get_the_same_tensors():
    class Same(Pictures):
        def __getitem__(self, index):
            return super().__getitem__(0) | {"index": index}

    transform = as_batch_transform(A.Compose(PIPELINE))
    loader = FastDataLoader(
        Same(), batch_size=16, transform=transform, on_device=True, staged="train"
    )
    images = [transform.apply(staged.batch, staged.draws)["image"] for staged in loader]
    assert len({one.numpy().tobytes() for one in torch.cat(images)}) == SAMPLES


def test_the_workers_alone_draw_what_worker_and_device_draw(expected):
    # Masks show it: their pixels are equal wherever they are moved.
    whole = tensors(on_device=False)
    assert all(whole[index][1] == expected[index][1] for index in whole)
