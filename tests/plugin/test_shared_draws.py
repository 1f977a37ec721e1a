"""A callable that draws once for a whole batch is found by what it does, and warned of."""

from __future__ import annotations

import random
import warnings

import numpy as np
import pytest
import torch
from augment.parity import photographs
from misses import each
from torch.utils.data import DataLoader, Dataset
from torchvision import transforms as v1
from torchvision.transforms import v2
from trainers import Keeps, quiet_trainer

from lightning_fastdata import (
    DataThroughputCallback,
    FastDataModule,
    FastDataWarning,
    as_batch_transform,
)
from lightning_fastdata.augment.mixing import CutMix, mixed
from lightning_fastdata.plugin.placing.shared_draws import draws_once, told_of_shared_draws

torch.set_num_threads(1)

PHOTO = torch.from_numpy(photographs(24, 32)[0]).permute(2, 0, 1).contiguous()
COUNT = 6


def batch(images=None):
    images = torch.stack([PHOTO.roll(one, 2) for one in range(COUNT)]) if images is None else images
    return [images, torch.arange(len(images))]


def of_images(function):
    return lambda given: [function(given[0]), given[1]]


def sometimes_dark(images):
    return images // 2 if random.random() < 0.5 else images


def shifted(images):
    return torch.roll(images, int(np.random.randint(8)), 3)


FLIPS = v2.RandomHorizontalFlip()


def flipped(given):
    return FLIPS(given)


ONCE = {
    "v2 in a lambda": lambda given: [v2.RandomHorizontalFlip()(given[0]), given[1]],
    "v2 crop": of_images(v2.RandomResizedCrop(16, antialias=True)),
    "v1": of_images(v1.RandomVerticalFlip()),
    "v1 compose": of_images(v1.Compose([v1.RandomRotation(40), v1.ColorJitter(0.4)])),
    "in a Sequential": of_images(torch.nn.Sequential(torch.nn.Identity(), v2.RandomAffine(30))),
    "rarely": of_images(v2.RandomHorizontalFlip(0.2)),
    "drawn by random": of_images(sometimes_dark),
    "drawn by NumPy": of_images(shifted),
    "whole batch": flipped,
    "the field": as_batch_transform(flipped, image=0),
}


def each_flipped(images):
    return torch.stack([FLIPS(one) for one in images])


def noisy(images):
    return images + torch.randn_like(images.float())


def of_some_size(images):
    # One of three sizes: a batch has one anyhow.
    side = [16, 20, 24][int(torch.randint(3, ()))]
    return torch.nn.functional.interpolate(images.float(), (side, side))


BY_SAMPLE = {
    "each by itself": of_images(each_flipped),
    "noise": of_images(noisy),
    "a size for the batch": of_images(of_some_size),
    "nothing drawn": of_images(v2.Normalize([0.5] * 3, [0.25] * 3)),
    "drawn in vain": of_images(lambda images: (torch.rand(1), images)[1]),
    "mixtures of equal images": lambda given: v2.MixUp(num_classes=COUNT)(
        given[0].float() / 255, given[1]
    ),
    "pasted": lambda given: v2.CutMix(num_classes=COUNT)(*given),
    "no tensors": lambda given: [str(torch.rand(1)), given],
    "fails on copies": lambda given: [given[0][[0, 5]], torch.rand(len(given[0].unique()) - 9)],
}


def seen(transform, given=None):
    return draws_once(as_batch_transform(transform), batch() if given is None else given)


@each("name", ONCE)
def test_what_draws_once_for_a_batch_is_seen(name):
    assert seen(ONCE[name])


@each("name", BY_SAMPLE)
def test_what_does_not_is_not(name):
    assert not seen(BY_SAMPLE[name])


@each(
    "given",
    [
        {"image": batch()[0], "boxes": [torch.ones(k, 4) for k in range(COUNT)], "name": "x"},
        (batch()[0], {"image": batch()[0].float(), "number": torch.arange(COUNT)}),
    ],
)
def test_batches_of_any_form_are_tried(given):
    def flips(batch):
        image = FLIPS(batch["image"] if isinstance(batch, dict) else batch[1]["image"])
        return {"image": image}

    assert seen(flips, given)


class Counts(torch.nn.Module):
    """Has all that a trial could change: buffers, a list, a generator, a variable outside."""

    def __init__(self, told):
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))
        self.generator = torch.Generator().manual_seed(3)
        self.told = told

    def forward(self, given):
        self.calls += 1
        self.told.append(len(given[0]))
        own = torch.rand((), generator=self.generator).item()
        return [FLIPS(given[0]), torch.full((len(given[0]),), own)]


def test_the_trial_leaves_the_callable_and_all_generators_as_they_were():
    told = []
    counts, given = Counts(told), batch()
    transform = as_batch_transform(counts)
    before = given[0].clone()
    states = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state()
    assert draws_once(transform, given)
    assert random.getstate() == states[0]
    assert np.random.get_state()[1].tolist() == states[1]
    assert torch.equal(torch.get_rng_state(), states[2])
    assert (counts.calls, told) == (0, [])
    assert torch.equal(torch.rand(1, generator=counts.generator), torch.rand(1, generator=fresh()))
    assert torch.equal(given[0], before)


def fresh():
    return torch.Generator().manual_seed(3)


class Photos(Dataset):
    def __len__(self):
        return 2 * COUNT

    def __getitem__(self, index):
        return PHOTO.float() / 255, index


def train(tmp_path, front_door, transform):
    """Return what an epoch of two batches saw, and what was said."""
    model = Keeps()
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always", FastDataWarning)
        if front_door == "callback":
            callback = DataThroughputCallback(transform, report=False, summary=False)
            trainer = quiet_trainer(tmp_path, callbacks=[callback])
            trainer.fit(model, DataLoader(Photos(), COUNT))
        else:
            data = FastDataModule.from_datasets(
                Photos(), batch_size=COUNT, num_workers=0, augment=transform, seed=1
            )
            quiet_trainer(tmp_path).fit(model, datamodule=data)
    return model.seen, [str(one.message) for one in said if one.category is FastDataWarning]


@each("front_door", ["module", "callback"])
def test_it_is_said_once_with_what_to_do(front_door, tmp_path):
    batches, said = train(tmp_path, front_door, ONCE["v2 in a lambda"])
    assert len(batches) == 2
    (text,) = said
    assert "<lambda> draws once for a whole batch" in text
    assert "__getitem__" in text
    assert "v2.Compose([<lambda>])" in text


@each("front_door", ["module", "callback"])
@each("transform", [BY_SAMPLE["each by itself"], mixed(CutMix(), num_classes=99)])
def test_nothing_is_said_of_others(front_door, transform, tmp_path):
    assert train(tmp_path, front_door, transform)[1] == []


def test_what_draws_nothing_and_single_samples_cost_no_process(monkeypatch):
    def refuse(*_):
        pytest.fail("it was tried")

    monkeypatch.setattr("lightning_fastdata.plugin.placing.shared_draws.draws_once", refuse)
    alone = [one[:1] for one in batch()]
    for function, given in ((BY_SAMPLE["nothing drawn"], batch()), (ONCE["v1"], alone)):
        transform = as_batch_transform(function)
        with told_of_shared_draws(transform, given):
            transform.apply([given[0].float(), given[1]])
