"""Kornia computes, and what it draws for a sample follows from the sample's key."""

from __future__ import annotations

import sys

import pytest
import torch
from augment import kornia_stand_in
from augment.loaders import (
    COUNT,
    IMAGES,
    PHOTOS,
    SEED,
    WAYS,
    Pictures,
    batches,
    loader_of,
    module_of,
    rest_of_epoch,
    trained,
    trained_by_callback,
)
from misses import each

from lightning_fastdata import SampleKey, prefetch
from lightning_fastdata.augment.transform import as_batch_transform
from lightning_fastdata.errors import BatchError, TransformError
from lightning_fastdata.randomness.seeds import torch_seed

torch.set_num_threads(1)


@pytest.fixture(params=["kornia", "stand-in"])
def K(request, monkeypatch):
    if request.param == "kornia":
        return pytest.importorskip("kornia.augmentation", reason="Kornia is not installed")
    monkeypatch.setitem(sys.modules, "kornia.augmentation", kornia_stand_in)
    return kornia_stand_in


def alike(index):
    return IMAGES[0], index


def with_masks(index):
    return IMAGES[index], IMAGES[index, :1], 1 - IMAGES[index, :1], index


def by_name(index):
    return {"image": IMAGES[index], "mask": IMAGES[index, :1], "label": index}


def of_several_sizes(index):
    return IMAGES[index, :, : 16 + index % 3], index


def of_bytes(index):
    return PHOTOS[index % len(PHOTOS)], index


def images(given):
    return torch.cat([batch[0] for batch in given])


def usual(K, **options):
    own = K is kornia_stand_in
    bright = K.RandomBrightness(p=0.8, **({} if own else {"brightness": (0.5, 1.5)}))
    contrast = K.RandomContrast(p=0.5, **({} if own else {"contrast": (0.5, 1.5)}))
    return K.AugmentationSequential(
        K.RandomHorizontalFlip(p=0.5), bright, contrast, data_keys=["input"], **options
    )


def jitter(K, **options):
    if K is kornia_stand_in:
        return K.ColorJitter(p=1.0, **options)
    return K.ColorJitter(0.3, 0.3, 0.3, 0.1, p=1.0, **options)


def test_a_batch_of_one_is_what_the_module_gives_under_the_key_of_the_sample(K):
    for epoch in (0, 1):
        made = images(batches(usual(K), size=1, epoch=epoch))
        for index in range(4):
            torch.manual_seed(torch_seed(SampleKey(SEED, epoch, index)))
            assert torch.equal(made[index], usual(K)(IMAGES[index][None])[0])


def test_a_sample_draws_for_itself_in_any_batch(K):
    alone = images(batches(usual(K), size=1))
    assert len({one.numpy().tobytes() for one in alone}) > len(PHOTOS)
    for size in (3, 4, COUNT):
        assert torch.equal(images(batches(usual(K), size=size)), alone)
    other = images(batches(usual(K), epoch=1))
    assert not torch.equal(other, alone)


@each("way", WAYS)
def test_workers_and_places_change_nothing(K, way):
    module = K.AugmentationSequential(*usual(K), jitter(K), data_keys=["input"])
    assert torch.equal(images(batches(module, **WAYS[way])), images(batches(module)))


def test_an_epoch_that_is_resumed_goes_on_with_the_same_draws(K):
    module = K.ImageSequential(jitter(K), K.RandomMixUpV2(p=1.0), random_apply=2)
    whole, rest = batches(module), rest_of_epoch(module, 2)
    assert rest
    assert torch.equal(images(rest), images(whole)[-sum(len(one[0]) for one in rest) :])


def test_what_is_the_same_on_a_batch_is_so_and_the_rest_is_not(K):
    same = batches(jitter(K, same_on_batch=True), Pictures(alike), size=COUNT // 2)
    for batch in same:
        assert torch.equal(batch[0], batch[0][:1].expand_as(batch[0]))
    assert not torch.equal(same[0][0], same[1][0])
    both = K.ImageSequential(jitter(K, same_on_batch=True), K.RandomHorizontalFlip(p=0.5))
    for batch in batches(both, Pictures(alike), size=COUNT // 2):
        assert len({one.numpy().tobytes() for one in batch[0]}) == 2


def test_what_mixes_draws_for_the_batch_by_the_key_of_its_first_sample(K):
    for epoch in (0, 1):
        for number, batch in enumerate(batches(K.RandomMixUpV2(p=1.0), size=4, epoch=epoch)):
            torch.manual_seed(torch_seed(SampleKey(SEED, epoch, (-1, 4 * number))))
            assert torch.equal(batch[0], K.RandomMixUpV2(p=1.0)(IMAGES[4 * number :][:4]))


@each("keys", [["input", "mask"], None])
def test_the_mask_moves_with_its_image(K, keys):
    module = K.AugmentationSequential(K.RandomHorizontalFlip(p=0.5), data_keys=keys)
    flipped = set()
    for batch in batches(module, Pictures(by_name)):
        assert torch.equal(batch["mask"], batch["image"][:, :1])
        for image, label in zip(batch["image"], batch["label"].tolist(), strict=True):
            forms = torch.equal(image, IMAGES[label]), torch.equal(image, IMAGES[label].flip(-1))
            assert any(forms)
            flipped.add(forms[1])
    assert flipped == {True, False}


def test_in_a_tuple_fields_follow_in_the_order_of_the_keys(K):
    module = K.AugmentationSequential(
        K.RandomHorizontalFlip(p=0.5), data_keys=["input", "mask", "mask"]
    )
    made = batches(module, Pictures(with_masks))
    for image, mask, other, _ in made:
        assert torch.equal(mask, image[:, :1])
        assert torch.equal(other, 1 - mask)
    assert not torch.equal(images(made), IMAGES)
    with pytest.raises(BatchError, match="mask, and there is none in"):
        batches(module, Pictures(by_name))


def test_a_field_of_the_images_size_does_not_stay_behind(K):
    transform = as_batch_transform(usual(K))
    with pytest.raises(BatchError, match=r"data_keys=\['input', 'mask'\]") as told:
        transform.check_sample(by_name(0))
    assert "A.Compose" not in str(told.value)
    still = as_batch_transform(K.ImageSequential(jitter(K)))
    still.check_sample(by_name(0))


def test_bytes_become_floats_with_the_channels_first(K):
    made = images(batches(usual(K), Pictures(of_bytes)))
    assert made.dtype == torch.float32
    assert torch.allclose(made, images(batches(usual(K))), atol=1e-6)


def padded(samples):
    images, labels = zip(*samples, strict=True)
    full = torch.zeros(len(images), 3, 24, 32)
    for row, image in zip(full, images, strict=True):
        row[:, : image.shape[1]] = image
    return full, torch.tensor(labels)


def test_what_a_collate_fn_pads_is_drawn_for_as_it_comes(K):
    module, data = usual(K), Pictures(of_several_sizes)
    made = batches(module, data, collate_fn=padded)
    assert torch.equal(
        images(made), images(batches(module, data, collate_fn=padded, place="workers"))
    )
    alone = images(batches(module, data, collate_fn=padded, size=1))
    assert torch.equal(images(made), alone)


def test_what_cannot_be_drawn_by_sample_is_refused_by_its_name(K):
    rain = {} if K is kornia_stand_in else {"drop_height": (2, 4), "drop_width": (-1, 1)}
    with pytest.raises(TransformError, match="RandomRain: coordinates_factor"):
        batches(K.ImageSequential(K.RandomRain(p=1.0, **rain)))
    patches = {} if K is kornia_stand_in else {"patchwise_apply": False}
    with pytest.raises(TransformError, match="PatchSequential of Kornia"):
        as_batch_transform(K.PatchSequential(K.RandomHorizontalFlip(), **patches))


def test_a_module_that_is_changed_between_epochs_is_followed(K):
    module = K.ImageSequential(K.RandomHorizontalFlip(p=0.0))
    given = prefetch(loader_of(module), "cpu", seed=SEED)
    assert torch.equal(images(given), IMAGES)
    module[0].p = 1.0
    assert torch.equal(images(given), IMAGES.flip(-1))


def test_a_training_gets_what_the_workers_would_make(K, tmp_path):
    for place in ("gpu", "cpu"):
        data = module_of(usual(K), place)
        assert "each sample draws" in str(data.explain()) or place == "cpu"
        assert torch.equal(images(trained(tmp_path, data)), images(batches(usual(K))))


def test_batches_of_other_loaders_draw_by_their_number(K, tmp_path):
    once = images(trained_by_callback(tmp_path, usual(K)))
    torch.rand(7)
    assert torch.equal(once, images(trained_by_callback(tmp_path, usual(K))))
    assert not torch.equal(once, IMAGES)
