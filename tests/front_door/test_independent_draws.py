"""What draws for different things draws other numbers: dataset, ``augment=``, loaders, ranks."""

from __future__ import annotations

import json
import random
from contextlib import contextmanager
from itertools import chain
from pathlib import Path

import albumentations as A
import numpy as np
import pytest
import torch
from conformance.forked_ranks import launched
from misses import each
from torch.utils.data import DataLoader, Dataset
from torchvision.transforms import v2
from trainers import Learner, quiet_trainer, trained

from lightning_fastdata import (
    BatchTransform,
    DataThroughputCallback,
    FastDataLoader,
    FastDataModule,
    prefetch,
)

COUNT, SIZE = 8, 4


class Drawing(A.ImageOnlyTransform):
    """Writes to each image two numbers that it draws as Albumentations does."""

    def __init__(self):
        super().__init__(p=1)

    def apply(self, img, **params):
        drawn = [self.py_random.random(), self.random_generator.random(), 1.0]
        return np.ones_like(img) * np.float32(drawn)


def drawing(image):
    """Return an image, or images, with numbers from all global generators."""
    drawn = [random.random(), np.random.rand(), float(torch.rand(()))]
    return torch.ones_like(image) * torch.tensor(drawn)[:, None, None]


def of_albumentations():
    return A.Compose([Drawing(), A.ToTensorV2()])


class DrawingToo(v2.Transform):
    """Does so as a transform of v2."""

    def transform(self, inpt, params):
        return drawing(inpt)


def of_v2():
    return v2.Compose([DrawingToo()])


def a_function():
    return lambda batch: {**batch, "image": drawing(batch["image"])}


WAYS = {"Albumentations": of_albumentations, "v2": of_v2, "a function": a_function}


class Drawn(Dataset):
    """Images, and beside each what a transform of the dataset itself draws for it."""

    def __init__(self, way):
        self.pipeline = of_albumentations() if way == "Albumentations" else None

    def __len__(self):
        return COUNT

    def __getitem__(self, index):
        if self.pipeline is None:
            image = torch.zeros(3, 4, 4)
            return {"image": image, "drawn": drawing(image)}
        image = np.zeros((4, 4, 3), np.float32)
        return {"image": image, "drawn": self.pipeline(image=image)["image"]}


def numbers(images):
    """Return the numbers in images ``[n, 3, H, W]`` that were drawn, once each."""
    return set(images[:, :, 0, 0].flatten().tolist()) - {0.0, 1.0}


def alone(batches, name="image"):
    return set().union(*(numbers(batch[name]) for batch in batches))


def apart(*draws):
    """Return whether all of these draw, and none a number that another one draws, too."""
    return all(draws) and len(set(chain(*draws))) == sum(map(len, draws))


def given(way, dataset=None, **options):
    made = {"augment": WAYS[way](), "batch_size": SIZE, "num_workers": 0, **options}
    return FastDataModule.from_datasets(Drawn(way) if dataset is None else dataset, **made)


@each("way", WAYS)
def test_a_dataset_and_augment_draw_other_numbers(way, tmp_path):
    for where in ("cpu", "gpu"):
        seen = trained(given(way, augment_on=where), folder=tmp_path)
        assert apart(alone(seen), alone(seen, "drawn"))


def by_callbacks(folder, way, callbacks=1, rank=0):
    """Return the batches of a training whose callbacks augment those of a loader of its own."""
    added = [
        DataThroughputCallback(WAYS[way](), summary=False, report=False) for _ in range(callbacks)
    ]
    trainer, model = quiet_trainer(folder, callbacks=added), Learner()
    trainer.strategy.global_rank = rank
    trainer.fit(model, FastDataLoader(Drawn(way), SIZE, seed=0))
    return model.seen


@each("way", WAYS)
def test_a_loader_and_what_augments_its_batches_draw_other_numbers(way, tmp_path, monkeypatch):
    monkeypatch.setenv("PL_GLOBAL_SEED", "0")
    one, two = by_callbacks(tmp_path, way), by_callbacks(tmp_path, way, 2)
    sent = list(prefetch(FastDataLoader(Drawn(way), SIZE, seed=0), "cpu", WAYS[way]()))
    augmented = alone(trained(given(way, seed=0, shuffle=False), folder=tmp_path))
    assert alone(one, "drawn") == alone(two, "drawn") == alone(sent, "drawn")
    assert apart(alone(one, "drawn"), alone(one), alone(two), alone(sent), augmented)


def test_pipelines_that_are_called_without_a_key_draw_other_numbers():
    images = torch.zeros(COUNT, 3, 4, 4)
    made = [BatchTransform.from_albumentations(of_albumentations()) for _ in range(3)]
    assert apart(*(numbers(transform(images)) for transform in made))


@contextmanager
def as_rank(rank):
    """Be in a process group of two ranks, of which there is this one."""
    fake = pytest.importorskip("torch.testing._internal.distributed.fake_pg")
    torch.distributed.init_process_group("fake", rank=rank, world_size=2, store=fake.FakeStore())
    try:
        yield
    finally:
        torch.distributed.destroy_process_group()


@each("way", WAYS)
def test_ranks_with_loaders_of_their_own_draw_other_numbers(way, tmp_path, monkeypatch):
    monkeypatch.setenv("PL_GLOBAL_SEED", "0")
    by_callback = [alone(by_callbacks(tmp_path, way, rank=rank)) for rank in range(2)]
    assert apart(*by_callback)
    sent = []
    for rank in range(2):
        with as_rank(rank):
            loader = DataLoader(Drawn(way), SIZE)
            sent.append(alone(prefetch(loader, "cpu", WAYS[way]())))
    assert apart(*sent)


# -- several training loaders ----------------------------------------------------------------------


class Numbered(Drawn):
    """Images of the dataset, with their numbers, as the model sees in which order they come."""

    def __getitem__(self, index):
        return super().__getitem__(index) | {"number": index}


def of_two(way, **options):
    """Return a data module of two sets of images that have no relation to each other."""
    both = {name: Numbered(way) for name in ("photos", "paintings")}
    return given(way, both, **{"seed": 3, **options})


def order(batches):
    return torch.cat([batch["number"] for batch in batches]).tolist()


def by_loader(seen):
    return [[batch[name] for batch in seen] for name in ("photos", "paintings")]


@each("way", WAYS)
@each("workers", [0, 1])
def test_two_training_loaders_are_shuffled_and_draw_apart(way, workers, tmp_path):
    seen = trained(of_two(way, num_workers=workers), folder=tmp_path, max_epochs=2)
    photos, paintings = by_loader(seen)
    assert order(photos) != order(paintings)
    assert apart(*(alone(one, name) for one in (photos, paintings) for name in ("image", "drawn")))
    only = trained(given(way, Numbered(way), seed=3), folder=tmp_path, max_epochs=2)
    assert order(only) == order(photos)  # the first draws as it does alone
    assert alone(only) == alone(photos)


def test_loaders_of_one_length_that_come_from_torch_are_shuffled_apart(tmp_path):
    both = {
        name: DataLoader(Numbered("v2"), SIZE, shuffle=True) for name in ("photos", "paintings")
    }
    photos, paintings = by_loader(trained(FastDataModule.from_loaders(both), folder=tmp_path))
    assert order(photos) != order(paintings)
    assert apart(alone(photos, "drawn"), alone(paintings, "drawn"))


def test_the_order_of_a_loader_that_has_a_seed_follows_from_it_as_its_draws_do(tmp_path):
    of_its_own = FastDataLoader(Numbered("v2"), SIZE, shuffle=True, seed=3)
    data = FastDataModule.from_loaders(of_its_own)
    seen = trained(data, folder=tmp_path)
    assert data.batch_at(1).batch["number"].tolist() == order(seen[1:])
    other = FastDataLoader(Numbered("v2"), SIZE, shuffle=True, seed=8)
    again = trained(FastDataModule.from_loaders(other, seed=3), folder=tmp_path)
    assert order(seen) == order(again)
    assert alone(seen, "drawn") == alone(again, "drawn")


@each("way", WAYS)
@each("seed", [3, None])
def test_each_of_two_loaders_goes_on_in_its_own_order(way, seed, tmp_path, monkeypatch):
    monkeypatch.setenv("PL_GLOBAL_SEED", "11")
    whole = by_loader(trained(of_two(way, seed=seed), folder=tmp_path, max_epochs=2))
    first = quiet_trainer(tmp_path, max_epochs=2, max_steps=3)
    first.fit(Learner(), datamodule=of_two(way, seed=seed))
    first.save_checkpoint(tmp_path / "at.ckpt")
    monkeypatch.setenv("PL_GLOBAL_SEED", "12")
    rest = by_loader(
        trained(
            of_two(way, seed=seed), folder=tmp_path, max_epochs=2, resume=str(tmp_path / "at.ckpt")
        )
    )
    for one, other in zip(whole, rest, strict=True):
        assert order(one[3:]) == order(other)
        for name in ("image", "drawn"):
            assert alone(one[3:], name) == alone(other, name)


def test_ranks_that_compute_one_model_together_read_and_draw_alike(tmp_path):
    launched(Path(__file__).with_name("one_model_on_ranks.py"), str(tmp_path))
    one, other = (json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(2))
    assert one.keys() == other.keys()
    for name, steps in one.items():
        assert other[name] == steps, name
        read = sorted(index for indices, _ in steps for index in indices)
        assert read == sorted([*range(24)] * 2), name
