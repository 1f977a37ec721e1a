"""torchvision's own CutMix and MixUp, in a pipeline or a collate_fn, by the key of the batch."""

from __future__ import annotations

from itertools import islice

import albumentations as A
import numpy as np
import pytest
import torch
from augment.parity import photographs
from misses import each
from torch.utils.data import DataLoader, Dataset, default_collate
from torchvision.transforms import v2
from trainers import Keeps, quiet_trainer

from lightning_fastdata import (
    DataThroughputCallback,
    FastDataLoader,
    FastDataModule,
    LoaderOptions,
    SampleKey,
    prefetch,
)
from lightning_fastdata.augment.mixing import CutMix, mixed
from lightning_fastdata.augment.transform import as_batch_transform
from lightning_fastdata.errors import BatchError, TransformError
from lightning_fastdata.randomness.seeds import torch_seed

torch.set_num_threads(1)

PHOTOS = [*photographs(24, 32), *(255 - one for one in photographs(24, 32))]
IMAGES = torch.from_numpy(np.stack([*PHOTOS, *PHOTOS])).permute(0, 3, 1, 2) / 255
CLASSES, SIZE, SEED = len(IMAGES), 4, 5
FIRST = [v2.RandomResizedCrop(16, antialias=True), v2.RandomHorizontalFlip()]
MIXES = {
    "CutMix": v2.CutMix(num_classes=CLASSES),
    "MixUp": v2.MixUp(alpha=0.4, num_classes=CLASSES),
    "either": v2.RandomChoice(
        [v2.CutMix(num_classes=CLASSES), v2.MixUp(num_classes=CLASSES)], p=[0.3, 0.7]
    ),
    "sometimes": v2.RandomApply([v2.MixUp(num_classes=CLASSES)], p=0.5),
}


class Pictures(Dataset):
    def __init__(self, form="tuple"):
        self.form = form

    def __len__(self):
        return CLASSES

    def __getitem__(self, index):
        if self.form == "label first":
            return {"number": torch.tensor(3.0), "label": index, "image": IMAGES[index]}
        if self.form == "mask":
            return {"image": IMAGES[index], "label": index, "mask": IMAGES[index][0]}
        return IMAGES[index], index


def loader_of(transform, data=None, *, place="device", workers=0, collate_fn=None, executor="auto"):
    return FastDataLoader(
        Pictures() if data is None else data,
        SIZE,
        num_workers=workers,
        executor=executor,
        seed=SEED,
        collate_fn=collate_fn,
        transform=None if transform is None else as_batch_transform(transform),
        on_device=place == "device" and transform is not None,
        staged="train" if place == "device" and transform is not None else None,
    )


def batches(*given, epoch=0, **options):
    loader = loader_of(*given, **options)
    made = loader if options.get("place") == "workers" else prefetch(loader, "cpu", seed=SEED)
    return [list(made) for _ in range(epoch + 1)][-1]


def same(some, others, *, gap=0.0):
    pairs = [pair for both in zip(some, others, strict=True) for pair in zip(*both, strict=True)]
    return all(torch.allclose(one, other, rtol=0, atol=gap) for one, other in pairs)


@each("mix", MIXES)
def test_a_batch_is_what_torchvision_makes_of_it_under_its_key(mix):
    for epoch in (0, 1):
        plain = batches(v2.Compose(FIRST), epoch=epoch)
        wanted = []
        for number, batch in enumerate(plain):
            torch.manual_seed(torch_seed(SampleKey(SEED, epoch, (-1, SIZE * number))))
            wanted.append(MIXES[mix](*batch))
        assert same(batches(v2.Compose([*FIRST, MIXES[mix]]), epoch=epoch), wanted)


WAYS = {
    "in the workers": {"place": "workers", "workers": 2},
    "drawn in the workers": {"workers": 2},
    "torch's workers": {"workers": 1, "executor": "torch"},
    "here": {"place": "workers"},
}


@each("way", WAYS)
def test_workers_and_places_change_nothing(way):
    pipeline = v2.Compose([*FIRST, MIXES["either"]])
    assert same(batches(pipeline, **WAYS[way]), batches(pipeline))


def test_an_epoch_that_is_resumed_goes_on_with_the_same_draws():
    pipeline = v2.Compose([*FIRST, MIXES["either"]])
    whole, loader = batches(pipeline), loader_of(pipeline)
    list(islice(iter(prefetch(loader, "cpu", seed=SEED)), 1))
    again = loader_of(pipeline)
    again.load_state_dict(loader.state_dict())
    rest = list(prefetch(again, "cpu", seed=SEED))
    assert rest
    assert same(rest, whole[-len(rest) :])


@each("workers", [0, 2])
def test_in_a_collate_fn_it_draws_the_same(workers):
    def collate(samples):
        return MIXES["either"](*default_collate(samples))

    first = v2.Compose(FIRST)
    given = batches(first, place="workers", collate_fn=collate, workers=workers)
    assert same(given, batches(v2.Compose([*FIRST, MIXES["either"]])))
    alone = batches(None, collate_fn=collate, workers=workers)
    assert same(alone, batches(MIXES["either"]))


def test_image_and_label_are_found_whatever_their_order():
    [batch, *_] = batches(MIXES["CutMix"], Pictures("label first"))
    [(image, shares), *_] = batches(MIXES["CutMix"])
    assert torch.equal(batch["image"], image)
    assert torch.equal(batch["label"], shares)
    assert torch.equal(batch["number"], torch.full((SIZE,), 3.0))
    assert list(batch) == ["number", "label", "image"]


def test_what_does_the_same_to_each_sample_may_stand_behind():
    normalise = v2.Normalize([0.5] * 3, [0.25] * 3)
    mixes = v2.Compose([*FIRST, v2.Compose([MIXES["MixUp"], normalise])])
    for (image, _), (before, _) in zip(
        batches(mixes), batches(v2.Compose([*FIRST, MIXES["MixUp"]])), strict=True
    ):
        assert torch.allclose(image, (before - 0.5) / 0.25, atol=1e-6)


@each(
    "wrong",
    [
        v2.Compose([MIXES["CutMix"], v2.RandomHorizontalFlip()]),
        v2.RandomChoice([MIXES["CutMix"], v2.RandomHorizontalFlip()]),
        v2.Compose([MIXES["CutMix"], lambda batch: batch]),
        v2.Compose([v2.RandomApply([v2.Compose([MIXES["MixUp"], v2.ColorJitter(0.1)])])]),
    ],
)
def test_what_would_draw_once_for_a_batch_is_refused(wrong):
    with pytest.raises(TransformError, match="would draw once for all of them"):
        as_batch_transform(wrong)


def test_a_mask_does_not_stay_behind():
    with pytest.raises(BatchError, match="mask"):
        batches(MIXES["CutMix"], Pictures("mask"))


def test_a_training_gets_the_same_in_both_places_and_from_any_loader(tmp_path):
    pipeline = v2.Compose([*FIRST, MIXES["either"]])

    def seen(**given):
        model = Keeps()
        quiet_trainer(tmp_path, callbacks=given.pop("callbacks", [])).fit(model, **given)
        return model.seen

    def module(place):
        options = LoaderOptions(num_workers=0)
        return FastDataModule.from_datasets(
            Pictures(), batch_size=SIZE, augment=pipeline, augment_on=place, options=options,
            shuffle=False, seed=SEED,
        )  # fmt: skip

    wanted = batches(pipeline)
    # Resized on the batch, floats differ in their last bits.
    assert same(seen(datamodule=module("gpu")), wanted, gap=1e-5)
    assert same(seen(datamodule=module("cpu")), wanted)
    watch = DataThroughputCallback(pipeline, report=False, summary=False)
    plain = DataLoader(Pictures(), batch_size=SIZE)
    others = seen(train_dataloaders=plain, callbacks=[watch])
    assert others[0][1].shape == (SIZE, CLASSES)
    assert same(prefetch(plain, "cpu", pipeline, seed=SEED), wanted, gap=1e-5)


def test_behind_another_library_it_draws_by_the_number_of_the_batch(tmp_path):
    def seen():
        model = Keeps()
        options = LoaderOptions(num_workers=0)
        first = A.Compose([A.HorizontalFlip(), A.ToTensorV2()])
        data = FastDataModule.from_datasets(
            Pictures(), batch_size=SIZE, augment=first, options=options, shuffle=False
        )
        data.register_transform(MIXES["CutMix"])
        quiet_trainer(tmp_path).fit(model, datamodule=data)
        return model.seen

    once = seen()
    torch.rand(3)
    assert same(once, seen())
    assert once[0][1].shape == (SIZE, CLASSES)


def test_the_packages_own_mixing_runs_behind_a_v2_pipeline():
    own = mixed(v2.Compose(FIRST), CutMix(), num_classes=CLASSES)
    made = batches(own)
    assert same(made, batches(own, place="workers", workers=2))
    for (image, shares), (plain, _) in zip(made, batches(v2.Compose(FIRST)), strict=True):
        assert torch.allclose(shares.sum(1), torch.ones(SIZE))
        assert ((image[:, None] == plain[None]).all(2).any(1)).all()
