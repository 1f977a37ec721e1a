"""A callable that gives a whole batch to torchvision, which draws once for it, is warned of."""

from __future__ import annotations

import random
import warnings

import numpy as np
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
    prefetch,
)
from lightning_fastdata.augment.mixing import CutMix, mixed
from lightning_fastdata.device.shared_draws import told_of_shared_draws

torch.set_num_threads(1)

PHOTO = torch.from_numpy(photographs(24, 32)[0]).permute(2, 0, 1).contiguous()
COUNT = 6


def batch(images=None):
    images = torch.stack([PHOTO.roll(one, 2) for one in range(COUNT)]) if images is None else images
    return [images, torch.arange(len(images))]


def of_images(function):
    return lambda given: [function(given[0]), given[1]]


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
    "one of some": of_images(v2.RandomChoice([FLIPS, v2.Identity()])),
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
    "nothing drawn": of_images(v2.Resize((16, 16))),
    "drawn in vain": of_images(lambda images: (torch.rand(1), images)[1]),
    "mixtures of equal images": lambda given: v2.MixUp(num_classes=COUNT)(
        given[0].float() / 255, given[1]
    ),
    "pasted": lambda given: v2.CutMix(num_classes=COUNT)(*given),
    "noise of torchvision": of_images(lambda images: v2.GaussianNoise()(images.float() / 255)),
    "always flipped": of_images(v2.RandomHorizontalFlip(1.0)),
    "code of the user's": of_images(v2.RandomApply([each_flipped])),
    "as many channels as samples": lambda given: [each_flipped(given[0][:3]), given[1][:3]],
}


def told(transform, given, calls):
    """Return how many warnings each of so many calls of a transform gives."""
    transform, counts = as_batch_transform(transform), []
    for _ in range(calls):
        with warnings.catch_warnings(record=True) as said, told_of_shared_draws(transform, given):
            warnings.simplefilter("always")
            transform.apply(given)
        counts.append(len(said))
    return counts


def seen(transform, given=None):
    """Return whether a transform is warned of at its first call, and of no more at its second."""
    first, second = told(transform, batch() if given is None else given, 2)
    assert second == 0
    return first == 1


@each("name", ONCE)
def test_what_draws_once_for_a_batch_is_seen(name):
    assert seen(ONCE[name])


@each("name", BY_SAMPLE)
def test_what_does_not_is_not(name):
    given = batch()
    if name == "as many channels as samples":
        given = [one[:3] for one in given]
    assert not seen(BY_SAMPLE[name], given)


def test_a_tuple_as_long_as_the_batch_may_be_the_arguments():
    def flipped_together(given):
        return FLIPS({"image": given}, {"second": given, "size": (24, 32)})[0]["image"]

    assert seen(flipped_together, batch()[0][:2])


class Late:
    """Flips from a certain call on, as one that draws whether to do anything may happen to."""

    def __init__(self, first):
        self.first, self.calls = first, 0

    def __call__(self, given):
        self.calls += 1
        return flipped(given) if self.calls >= self.first else given


@each("first", [2, 8])
def test_calls_that_happen_to_draw_nothing_hide_none_that_does(first):
    assert told(Late(first), batch(), 10) == [call == first for call in range(1, 11)]


def test_a_callable_in_which_nothing_was_found_is_looked_at_no_more():
    late = Late(9)
    assert told(late, batch(), 20) == [0] * 20
    assert late.calls == 20


def test_a_compiled_callable_is_compiled_with_and_without_the_look_and_no_more():
    compilations = []

    def as_it_is(graph, inputs):
        compilations.append(graph)
        return graph

    changed = torch.compile(v2.Normalize([0.5] * 3, [0.5] * 3), backend=as_it_is)
    try:
        told(lambda given: [changed(given[0] / 255), given[1]], batch(), 12)
        assert len(compilations) == 2
    finally:
        torch.compiler.reset()


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


def test_the_trial_leaves_the_callable_and_all_generators_as_they_were():
    sizes = []

    def counts(given):
        sizes.append(len(given[0]))
        return [FLIPS(given[0]), given[1]]

    def drawn(function):
        torch.manual_seed(3)
        random.seed(3)
        np.random.seed(3)
        function()
        return torch.rand(3).tolist(), random.random(), np.random.rand()

    given = batch()
    before = given[0].clone()
    assert drawn(lambda: seen(counts, given)) == drawn(lambda: [counts(given), counts(given)])
    assert sizes == [COUNT] * 4
    assert torch.equal(given[0], before)


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
        elif front_door == "prefetch":
            batches = list(prefetch(DataLoader(Photos(), COUNT), "cpu", transform))
            return batches, texts_of(said)
        else:
            data = FastDataModule.from_datasets(
                Photos(), batch_size=COUNT, num_workers=0, augment=transform, seed=1
            )
            quiet_trainer(tmp_path).fit(model, datamodule=data)
    return model.seen, texts_of(said)


def texts_of(said):
    return [str(one.message) for one in said if one.category is FastDataWarning]


@each("front_door", ["module", "callback", "prefetch"])
def test_it_is_said_once_with_what_to_do(front_door, tmp_path):
    batches, said = train(tmp_path, front_door, ONCE["v2 in a lambda"])
    assert len(batches) == 2
    (text,) = said
    assert "<lambda> draws once for a whole batch" in text
    assert "__getitem__" in text
    assert "v2.Compose([<lambda>])" in text


@each("front_door", ["module", "callback", "prefetch"])
@each("transform", [BY_SAMPLE["each by itself"], mixed(CutMix(), num_classes=99)])
def test_nothing_is_said_of_others(front_door, transform, tmp_path):
    assert train(tmp_path, front_door, transform)[1] == []


def test_a_single_sample_is_not_told_of():
    assert not seen(ONCE["v1"], [one[:1] for one in batch()])
