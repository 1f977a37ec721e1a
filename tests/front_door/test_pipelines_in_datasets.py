"""A dataset that calls its own Albumentations pipeline is read as it is; explain() can move it."""

from __future__ import annotations

from functools import partial

import albumentations as A
import numpy as np
import pytest
import torch
from torch.utils.data import ConcatDataset, Dataset, Subset
from torchvision.transforms import v2
from trainers import Learner, quiet_trainer

from lightning_fastdata import FastDataLoader, FastDataModule, FastDataWarning, LoaderOptions
from lightning_fastdata.randomness.seeds import reseed
from lightning_fastdata.types import SampleKey

COUNT, SEED = 12, 5
IMAGES = np.random.default_rng(0).integers(0, 256, (COUNT, 20, 18, 3), np.uint8)
MOVED = "that runs in the workers. To have it computed on the device"


def pipeline(*middle):
    steps = [A.RandomCrop(16, 8), A.HorizontalFlip(), A.RandomBrightnessContrast(p=0.8)]
    return A.Compose([*steps, *middle, A.ToTensorV2()])


class Photos(Dataset):
    """Photographs, each with its number, through a pipeline of the dataset's own."""

    def __init__(self, transform=None):
        self.transform = transform

    def __len__(self):
        return COUNT

    def __getitem__(self, index):
        image = IMAGES[index]
        if self.transform is not None:
            image = self.transform(image=image)["image"]
        return {"image": image, "index": index}


class Keeps(Learner):
    def validation_step(self, batch, batch_idx, dataloader_idx=0):
        pass


def fit(module, folder):
    model = Keeps(lambda batch: batch["image"].clone())
    quiet_trainer(folder, max_epochs=2).fit(model, datamodule=module)
    return torch.cat(model.seen)


def drawn(transform, epoch):
    """Return what Albumentations makes of each image under its key."""
    made = []
    for index, image in enumerate(IMAGES):
        reseed((transform,), SampleKey(SEED, epoch, index))
        made.append(transform(image=image)["image"])
    return torch.stack(made)


# -- it is read as it is ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("executor", "workers"), [("torch", 0), ("torch", 2), ("inline", 0), ("workers", 2)]
)
def test_samples_are_albumentations_own_under_their_keys_whoever_reads(executor, workers):
    loader = FastDataLoader(
        Photos(pipeline()), 4, seed=SEED, executor=executor, num_workers=workers
    )
    for epoch in range(2):
        read = torch.cat([batch["image"] for batch in loader])
        assert torch.equal(read, drawn(pipeline(), epoch))
    loader.close()


def another_transform(dataset):
    dataset.transform.transforms.insert(3, A.Solarize(p=1))


def another_pipeline(dataset):
    dataset.transform = pipeline(A.Solarize(p=1))


@pytest.mark.parametrize("change", [another_transform, another_pipeline])
def test_a_pipeline_that_was_changed_between_epochs_is_keyed_as_well(change):
    dataset = Photos(pipeline())
    loader = FastDataLoader(dataset, 4, seed=SEED)
    assert torch.equal(torch.cat([b["image"] for b in loader]), drawn(pipeline(), 0))
    change(dataset)
    read = torch.cat([b["image"] for b in loader])
    assert torch.equal(read, drawn(pipeline(A.Solarize(p=1)), 1))


def test_a_dataset_gets_plain_tensors_from_its_pipeline_and_its_pipeline_stays_as_it_is(tmp_path):
    kinds = []

    class Looks(Photos):
        def __getitem__(self, index):
            sample = super().__getitem__(index)
            kinds.append(type(sample["image"]))
            return sample

    dataset = Looks(pipeline())
    nodes = [dataset.transform, *dataset.transform.transforms]
    before = [vars(node).keys() for node in nodes]
    options = LoaderOptions(num_workers=0)
    fit(FastDataModule.from_datasets(dataset, batch_size=4, options=options), tmp_path)
    assert set(kinds) == {torch.Tensor}
    assert [vars(node).keys() for node in nodes] == before


def test_a_pipeline_of_the_data_module_runs_behind_that_of_the_dataset(tmp_path):
    made = []
    for where in ("cpu", "gpu"):
        dataset = Photos(A.Compose([A.RandomCrop(16, 8), A.ToTensorV2()]))
        how = {"augment": A.Compose([A.HorizontalFlip(p=1)]), "augment_on": where}
        data = FastDataModule.from_datasets(dataset, batch_size=4, seed=SEED, **how)
        made.append(fit(data, tmp_path))
    assert torch.equal(*made)


def test_a_pipeline_that_was_moved_draws_other_numbers_the_same_in_both_places(tmp_path):
    of = partial(FastDataModule.from_datasets, batch_size=4, seed=SEED, shuffle=False)
    dataset = Photos(pipeline())
    inside = fit(of(dataset), tmp_path)
    compose, dataset.transform = dataset.transform, None
    outside = [
        fit(of(dataset, augment=compose, augment_on=where), tmp_path) for where in ("cpu", "gpu")
    ]
    assert torch.equal(*outside)
    assert not torch.equal(inside, outside[0])


# -- explain() names the line to write -------------------------------------------------------------


class Wraps(Dataset):
    def __init__(self, inner):
        self.inner = inner

    def __len__(self):
        return len(self.inner)

    def __getitem__(self, index):
        return self.inner[index]


class Several(Photos):
    def __init__(self):
        super().__init__()
        self.views = [A.Compose([A.HorizontalFlip()]), A.VerticalFlip()]
        self.by_name = {"hard": pipeline()}


HELD = {
    "an attribute": (lambda: Photos(pipeline()), ["Compose"]),
    "a subset": (lambda: Subset(Subset(Photos(pipeline()), range(8)), range(4)), ["Compose"]),
    "two joined": (
        lambda: ConcatDataset([Photos(pipeline()), Subset(Photos(pipeline()), [1])]),
        ["Compose", "Compose"],
    ),
    "a wrapper of the user's": (lambda: Wraps(Photos(pipeline())), ["Compose"]),
    "lists and dicts": (Several, ["Compose", "VerticalFlip", "Compose"]),
    "one in two places": (lambda: ConcatDataset([Photos(SHARED), Photos(SHARED)]), ["Compose"]),
    "torchvision's": (lambda: Photos(v2.Compose([v2.RandomHorizontalFlip()])), ["Compose"]),
}
SHARED = pipeline()


@pytest.mark.parametrize("held", HELD)
def test_explain_says_how_a_pipeline_is_moved(held):
    dataset, kinds = HELD[held]
    text = FastDataModule.from_datasets(dataset()).explain()
    for kind in kinds:
        library = "torchvision" if held == "torchvision's" else "albumentations"
        assert f" is a {kind} of {library} {MOVED}" in text
    assert text.count(MOVED) == len(kinds)


def test_it_does_so_for_each_stage_and_each_dataset(tmp_path):
    data = FastDataModule.from_datasets(
        Photos(pipeline()), {"a": Photos(), "b": Photos(pipeline())}, batch_size=4
    )
    for _ in range(2):  # before the first run and after it
        text = data.explain()
        assert "val_dataset()['b'].transform is a Compose of albumentations" in text
        assert text.count(MOVED) == 2
        assert "write augment=dataset.transform, and give the dataset transform=None" in text
        assert "write augment={'val': dataset.transform}, and give" in text
        fit(data, tmp_path)


class Opens(Photos):
    """Has a pipeline behind what would open something, or run code of the user's."""

    @property
    def transform(self):
        raise AssertionError("a property was read")

    @transform.setter
    def transform(self, value):
        self.function = lambda image: value(image=image)

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        raise AssertionError(f"{name} was asked for")


def test_no_code_of_a_dataset_is_run_or_read_for_it():
    assert MOVED in FastDataModule.from_datasets(Opens(pipeline())).explain()


@pytest.mark.parametrize(
    ("dataset", "options"),
    [(Photos(), {"augment": pipeline()}), (Photos(pipeline()), {"augment_on": "cpu"})],
    ids=["moved", "wanted in the workers"],
)
def test_there_is_no_such_line_where_there_is_nothing_to_move(dataset, options):
    assert MOVED not in FastDataModule.from_datasets(dataset, **options).explain()


def test_who_asks_for_the_device_is_warned_of_a_pipeline_that_runs_in_the_workers(tmp_path):
    def module(where):
        return FastDataModule.from_datasets(
            Photos(pipeline()), batch_size=4, seed=SEED, augment_on=where
        )

    wanted = fit(module("cpu"), tmp_path)
    with pytest.warns(FastDataWarning, match=r'"gpu": .*write augment=dataset\.transform'):
        assert torch.equal(fit(module("gpu"), tmp_path), wanted)
