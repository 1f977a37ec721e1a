"""torchvision's own CutMix and MixUp, in a pipeline or a collate_fn, by the key of the batch."""

from __future__ import annotations

import albumentations as A
import pytest
import torch
from augment.loaders import COUNT as CLASSES
from augment.loaders import (
    IMAGES,
    SEED,
    SIZE,
    WAYS,
    Pictures,
    batches,
    module_of,
    rest_of_epoch,
    same,
    trained,
    trained_by_callback,
)
from misses import each
from torch.utils.data import DataLoader, default_collate
from torchvision.transforms import v2

from lightning_fastdata import SampleKey, prefetch
from lightning_fastdata.augment.mixing import CutMix, mixed
from lightning_fastdata.augment.transform import as_batch_transform
from lightning_fastdata.errors import BatchError, TransformError
from lightning_fastdata.randomness.seeds import derived_seed, seed_global_generators, torch_seed

torch.set_num_threads(1)

FIRST = [v2.RandomResizedCrop(16, antialias=True), v2.RandomHorizontalFlip()]
MIXES = {
    "CutMix": v2.CutMix(num_classes=CLASSES),
    "MixUp": v2.MixUp(alpha=0.4, num_classes=CLASSES),
    "either": v2.RandomChoice(
        [v2.CutMix(num_classes=CLASSES), v2.MixUp(num_classes=CLASSES)], p=[0.3, 0.7]
    ),
    "sometimes": v2.RandomApply([v2.MixUp(num_classes=CLASSES)], p=0.5),
    "or nothing": v2.RandomChoice([v2.MixUp(num_classes=CLASSES), v2.Identity()]),
}


def with_label_first(index):
    return {"number": torch.tensor(3.0), "label": index, "image": IMAGES[index]}


def with_mask(index):
    return {"image": IMAGES[index], "label": index, "mask": IMAGES[index, 0]}


@each("mix", MIXES)
def test_a_batch_is_what_torchvision_makes_of_it_under_its_key(mix):
    for epoch in (0, 1):
        plain = batches(v2.Compose(FIRST), epoch=epoch)
        wanted = []
        for number, batch in enumerate(plain):
            torch.manual_seed(torch_seed(SampleKey(SEED, epoch, (-1, SIZE * number))))
            wanted.append(MIXES[mix](*batch))
        assert same(batches(v2.Compose([*FIRST, MIXES[mix]]), epoch=epoch), wanted)


@each("way", WAYS)
def test_workers_and_places_change_nothing(way):
    pipeline = v2.Compose([*FIRST, MIXES["either"]])
    assert same(batches(pipeline, **WAYS[way]), batches(pipeline))


def test_an_epoch_that_is_resumed_goes_on_with_the_same_draws():
    pipeline = v2.Compose([*FIRST, MIXES["either"]])
    whole, rest = batches(pipeline), rest_of_epoch(pipeline, 1)
    assert rest
    assert same(rest, whole[-len(rest) :])


@each("workers", [0, 2])
def test_in_a_collate_fn_it_draws_by_the_key_of_the_batch_other_numbers(workers):
    def collate(samples):
        return MIXES["either"](*default_collate(samples))

    for first in (v2.Compose(FIRST), None):
        wanted = []
        for number, batch in enumerate(batches(first, place="workers")):
            seed_global_generators(SEED, 0, (-1, SIZE * number))
            wanted.append(MIXES["either"](*batch))
        given = batches(first, place="workers", collate_fn=collate, workers=workers)
        assert same(given, wanted)
    assert not same(given, batches(MIXES["either"]))


def test_image_and_label_are_found_whatever_their_order():
    [batch, *_] = batches(MIXES["CutMix"], Pictures(with_label_first))
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
        batches(MIXES["CutMix"], Pictures(with_mask))


def test_a_training_gets_the_same_in_both_places_and_from_any_loader(tmp_path):
    pipeline = v2.Compose([*FIRST, MIXES["either"]])
    wanted = batches(pipeline)
    # Resized on the batch, floats differ in their last bits.
    assert same(trained(tmp_path, module_of(pipeline, "gpu")), wanted, gap=1e-5)
    assert same(trained(tmp_path, module_of(pipeline, "cpu")), wanted)
    assert trained_by_callback(tmp_path, pipeline)[0][1].shape == (SIZE, CLASSES)
    plain = DataLoader(Pictures(), batch_size=SIZE)
    own = batches(pipeline, seed=derived_seed(SEED, "prefetch", 0))
    assert same(prefetch(plain, "cpu", pipeline, seed=SEED), own, gap=1e-5)


def test_behind_another_library_it_draws_by_the_number_of_the_batch(tmp_path):
    first = A.Compose([A.HorizontalFlip(), A.ToTensorV2()])
    plain = trained(tmp_path, module_of(first))

    def seen():
        data = module_of(first)
        data.register_transform(MIXES["CutMix"])
        return trained(tmp_path, data)

    once = seen()
    torch.rand(3)
    assert same(once, seen())
    for (image, shares), (before, labels) in zip(once, plain, strict=True):
        assert torch.allclose(shares.sum(1), torch.ones(SIZE))
        # Each pixel is that of the sample or of the one before it.
        from_own, from_other = ((image == one).all(1) for one in (before, before.roll(1, 0)))
        assert (from_own | from_other).all()
        own = shares.gather(1, labels[:, None])[:, 0]
        assert torch.allclose(own, from_own.float().mean((1, 2)), atol=0.02)


@each("mix", MIXES)
def test_behind_another_pipeline_whose_image_is_named_labels_are_mixed_too(mix):
    batch = {"number": torch.ones(4), "scan": IMAGES[:4], "label": torch.arange(4)}
    behind = as_batch_transform(MIXES[mix], image="scan").behind()
    torch.manual_seed(3)
    image, label = MIXES[mix](IMAGES[:4], torch.arange(4))
    torch.manual_seed(3)
    made = behind.apply(batch, None)
    assert same([list(made.values())], [[torch.ones(4), image, label]])
    with pytest.raises(BatchError, match="no field 'scan'"):
        behind.apply({"label": torch.arange(4)}, None)


def test_the_packages_own_mixing_runs_behind_a_v2_pipeline():
    own = mixed(v2.Compose(FIRST), CutMix(), num_classes=CLASSES)
    made = batches(own)
    assert same(made, batches(own, place="workers", workers=2))
    for (image, shares), (plain, _) in zip(made, batches(v2.Compose(FIRST)), strict=True):
        assert torch.allclose(shares.sum(1), torch.ones(SIZE))
        assert ((image[:, None] == plain[None]).all(2).any(1)).all()
