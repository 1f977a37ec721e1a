"""Before a dataset's own pipeline is left to the device it is tried out, however rare its parts."""

import copy
import functools
import os

os.environ.setdefault("NO_ALBUMENTATIONS_UPDATE", "1")

import albumentations as A
import lightning as L
import numpy as np
import pytest
import torch
from torch.utils.data import Dataset

from lightning_fastdata import FastDataModule, LoaderOptions
from lightning_fastdata.augment import register

COUNT = 24
IMAGES = np.random.default_rng(0).integers(90, 96, (COUNT, 24, 24, 3), np.uint8)


class Photos(Dataset):
    def __init__(self, *operations):
        self.transform = A.Compose([*operations, A.Normalize(), A.ToTensorV2()])

    def __len__(self):
        return COUNT

    def __getitem__(self, index):
        return self.transform(image=IMAGES[index])["image"], index


class Keeps(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.scale = torch.nn.Parameter(torch.ones(()))
        self.seen = []

    def training_step(self, batch, _):
        self.seen.append(batch[0].clone())
        return self.scale * batch[0].mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.0)


def train(dataset, augment_on, folder, **options):
    data = FastDataModule.from_datasets(
        dataset,
        batch_size=4,
        augment_on=augment_on,
        seed=1,
        options=LoaderOptions(num_workers=0),
        **options,
    )
    module = Keeps()
    L.Trainer(
        max_epochs=1,
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=folder,
    ).fit(module, datamodule=data)
    return module.seen, data.explain()


class Moody(A.ImageOnlyTransform):
    """Changes each value alike, and otherwise for images of hardly any contrast."""

    def apply(self, img, **_):
        return 255 - img if img.std() < 5 else img


@pytest.mark.parametrize(
    "operations",
    [
        lambda: [Moody(p=0.1)],
        lambda: [A.OneOf([A.HorizontalFlip(), A.Sequential([Moody(p=0.2)], p=1)], p=0.3)],
        lambda: [A.SomeOf([A.HorizontalFlip(), A.VerticalFlip(), Moody()], n=1, p=0.2)],
    ],
)
def test_an_operation_that_is_seldom_drawn_is_tried_as_well(operations, tmp_path):
    remove = register(Moody, table=True)
    try:
        wanted, _ = train(Photos(*operations()), "cpu", tmp_path)
        seen, told = train(Photos(*operations()), "gpu", tmp_path)
    finally:
        remove()
    assert "tried out by itself on the device, Moody: an image was" in told
    assert all(map(torch.equal, wanted, seen))


def test_rare_operations_that_are_as_they_should_be_are_left_to_the_device(tmp_path):
    def rare():
        some = [A.RandomGamma(p=0.01), A.OneOf([A.Posterize(), A.CoarseDropout()], p=0.02)]
        return Photos(*some, A.ShiftScaleRotate(p=0.01), A.CLAHE(p=0.01), A.GaussNoise(p=0.01))

    _, told = train(rare(), "gpu", tmp_path)
    assert "on the device: [0]; 3 samples tried, and 8 operations alone" in told


class Remembering(Photos):
    def __init__(self):
        super().__init__(A.HorizontalFlip(), A.RandomBrightnessContrast())
        self.kept = {}

    def __getitem__(self, index):
        if index not in self.kept:
            self.kept[index] = super().__getitem__(index)
        return self.kept[index]


class Cached(Photos):
    def __init__(self):
        super().__init__(A.HorizontalFlip(), A.RandomBrightnessContrast())

    @functools.lru_cache(maxsize=64)  # noqa: B019 - as people write it
    def read(self, index):
        return super().__getitem__(index)

    def __getitem__(self, index):
        return self.read(index)


@pytest.mark.parametrize("kind", [Remembering, Cached])
def test_a_dataset_that_keeps_augmented_samples_computes_them_in_the_workers(kind, tmp_path):
    _, told = train(kind(), "gpu", tmp_path)
    assert "it keeps what its pipeline returns" in told


def test_a_trial_leaves_the_pipeline_as_it_was(tmp_path):
    dataset = Photos(A.OneOf([A.HorizontalFlip(), A.Posterize()], p=0.1), A.RandomGamma(p=0.1))
    before = copy.deepcopy(dataset.transform)
    train(dataset, "gpu", tmp_path)
    assert str(before) == str(dataset.transform)
    assert before.transforms[0].transforms_ps == dataset.transform.transforms[0].transforms_ps
    assert vars(before.transforms[1]).keys() == vars(dataset.transform.transforms[1]).keys()
