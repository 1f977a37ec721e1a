"""Pipelines that change dtype or range, on images of any dtype: the same in both places.

The oracle is Albumentations: with ``augment_on="cpu"`` it makes all pixels in the workers, with
draws that depend on seed, epoch and index alone, so that both places draw alike.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import albumentations as A
import lightning as L
import pytest
import torch
from skimage import data
from torch.utils.data import Dataset
from trainers import quiet_trainer

from lightning_fastdata import FastDataModule, LoaderOptions

if TYPE_CHECKING:
    import numpy as np

torch.set_num_threads(1)

NAMES = ("astronaut", "coffee", "chelsea", "rocket")
PHOTOGRAPHS = [getattr(data, name)()[60:124, 90:154].copy() for name in NAMES]
COUNT = 16
RANGES = {"uint8": 255, "uint16": 65535, "int32": 65535, "float32": 1, "float64": 1}


def photographs(dtype: str) -> list[np.ndarray]:
    images = PHOTOGRAPHS * (COUNT // len(PHOTOGRAPHS))
    if dtype == "uint8":
        return images
    scaled = [image / 255 * RANGES[dtype] for image in images]
    return [image.astype(dtype) for image in scaled]


class Photographs(Dataset):
    """Images beside their numbers."""

    def __init__(self, images: list[np.ndarray]) -> None:
        self.images = images

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> tuple[Any, int]:
        return self.images[index], index


class Keeps(L.LightningModule):
    """Keeps the batches that it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(()))
        self.batches: list[torch.Tensor] = []
        self.numbers: list[tuple[int, ...]] = []

    def training_step(self, batch: list[torch.Tensor], _: int) -> torch.Tensor:
        self.batches.append(batch[0].clone())
        self.numbers.append(tuple(batch[1].tolist()))
        return self.weight * 0

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), 0.1)


def trained(
    dataset: Dataset, place: str, augment: A.Compose, executor: str = "inline"
) -> tuple[Keeps, str]:
    """Return a module that has seen an epoch, and where everything ran."""
    data_module = FastDataModule.from_datasets(
        dataset,
        batch_size=4,
        augment=augment,
        augment_on=place,
        seed=3,
        options=LoaderOptions(executor=executor),
    )
    module = Keeps()
    trainer = quiet_trainer()
    trainer.fit(module, data_module)
    return module, data_module.explain()


def assert_alike(
    images: list[np.ndarray],
    pipeline: A.Compose,
    *,
    executors: Sequence[str] = ("inline", "inline"),
) -> str:
    """Train in both places, compare every batch, and return where everything ran."""
    seen = {}
    for place, executor in zip(("cpu", "gpu"), executors, strict=True):
        seen[place], explained = trained(Photographs(images), place, pipeline, executor)
    assert seen["cpu"].numbers == seen["gpu"].numbers
    for wanted, batch in zip(seen["cpu"].batches, seen["gpu"].batches, strict=True):
        assert batch.dtype == wanted.dtype
        assert batch.shape == wanted.shape
        # uint16 has no differences in torch.
        values = wanted.double()
        apart = float((batch.double() - values).abs().max())
        assert apart <= 4.01 * float(values.max() - values.min()) / 255
    return explained


TENSOR = A.ToTensorV2()
SOME = {
    "one of two": [A.OneOf([A.InvertImg(p=1), A.ToFloat(p=1)], p=1)],
    "half of them": [A.InvertImg(p=1), A.ToFloat(p=0.5), A.RandomGamma(p=1)],
    "normalized or not": [A.OneOf([A.Normalize(p=1), A.RandomGamma(p=1)], p=1), A.Solarize()],
    "some of three": [A.SomeOf([A.InvertImg(p=1), A.ToFloat(p=1), A.HorizontalFlip(p=1)], n=2)],
    "a pipeline that is skipped": [A.Sequential([A.InvertImg(p=1), A.Normalize()], p=0.5)],
}


@pytest.mark.parametrize("name", SOME)
def test_a_cast_of_some_samples_gives_both_places_the_same_batches(name: str) -> None:
    explained = assert_alike(photographs("uint8"), A.Compose([*SOME[name], TENSOR]))
    assert "the pipeline may change the dtype of some samples only" in explained


def test_what_follows_when_all_samples_have_one_dtype_again_is_left_to_the_device() -> None:
    casts = A.OneOf([A.InvertImg(p=1), A.ToFloat(p=1)], p=1)
    pipeline = A.Compose([casts, A.Normalize(), A.HorizontalFlip(), TENSOR])
    explained = assert_alike(photographs("uint8"), pipeline, executors=("workers", "workers"))
    assert "samples may be of several dtypes until Normalize gives all of them one" in explained
    flip = next(line for line in explained.splitlines() if "HorizontalFlip" in line)
    assert "device" in flip


BEHIND = {
    "colours behind Normalize": [A.Normalize(), A.ColorJitter(p=1)],
    "Normalize twice": [A.Normalize(normalization="min_max"), A.Normalize()],
    "ToFloat behind Normalize": [A.Normalize(normalization="image"), A.ToFloat()],
    "gamma behind a spline": [A.Affine(rotate=30, interpolation=2, p=1), A.ColorJitter(p=1)],
}


@pytest.mark.cases(4)
@pytest.mark.parametrize("dtype", ["uint8", "float32"])
@pytest.mark.parametrize("name", BEHIND)
def test_what_gets_values_of_another_range_gives_both_places_the_same(
    name: str, dtype: str
) -> None:
    assert_alike(photographs(dtype), A.Compose([*BEHIND[name], TENSOR]))


class Dimmed(A.ImageOnlyTransform):
    """Makes float64 of integers, as a transform of one's own may."""

    def apply(self, img: np.ndarray, **_: Any) -> np.ndarray:
        return img * 0.5


def test_a_cast_by_a_transform_of_ones_own_is_found_out() -> None:
    assert_alike(photographs("uint8"), A.Compose([A.RandomGamma(p=1), Dimmed(p=0.5), TENSOR]))


@pytest.mark.parametrize("dtype", ["uint16", "float64", "int32"])
def test_images_of_any_dtype_that_albumentations_takes_are_augmented(dtype: str) -> None:
    pipeline = A.Compose(
        [
            A.RandomCrop(48, 48),
            A.HorizontalFlip(),
            A.RandomRotate90(),
            A.Affine(rotate=(-30, 30), interpolation=0, p=0.5),
            A.Normalize(max_pixel_value=RANGES[dtype]),
            A.VerticalFlip(),
            TENSOR,
        ]
    )
    explained = assert_alike(photographs(dtype), pipeline)
    assert f"no device form for images of {dtype}" in explained
    assert "on the batch" in explained


@pytest.mark.parametrize("dtype", ["uint16", "float64"])
def test_warps_between_pixels_take_images_of_any_dtype(dtype: str) -> None:
    warped = A.Compose([A.Affine(rotate=(-30, 30), p=1), A.Perspective(p=0.5), TENSOR])
    assert_alike(photographs(dtype), warped)


def test_images_of_several_dtypes_are_made_one_in_the_workers() -> None:
    images = [
        photographs(("uint8", "float32", "uint16")[number % 3])[number] for number in range(COUNT)
    ]
    explained = assert_alike(images, A.Compose([A.HorizontalFlip(), A.ToFloat(), TENSOR]))
    assert "the samples hold images of several dtypes" in explained


def test_what_albumentations_refuses_is_refused_in_its_own_words() -> None:
    with pytest.raises(Exception, match=r"Unsupported dtype|KeyError|int32"):
        trained(Photographs(photographs("int32")), "cpu", A.Compose([A.RGBShift(p=1), TENSOR]))
