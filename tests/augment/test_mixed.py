"""Mixing behind a pipeline: in workers, in the training, in batches of other loaders."""

from __future__ import annotations

from collections import namedtuple

import albumentations as A
import numpy as np
import pytest
import torch
from augment.batches import in_worker, keys
from augment.loaders import WAYS, Pictures, batches, loader_of, module_of, trained
from augment.parity import photographs
from misses import each
from torchvision.transforms import v2
from trainers import Keeps

from lightning_fastdata.augment.mixing import CutMix, MixUp, mixed
from lightning_fastdata.augment.stage_transform import StageTransform
from lightning_fastdata.augment.transform import as_batch_transform
from lightning_fastdata.errors import BatchError, OptionsError, TransformError
from lightning_fastdata.types import SampleKey

torch.set_num_threads(1)

CLASSES, COUNT, HEIGHT, WIDTH = 4, 8, 40, 48
KEY = SampleKey(3, 1, 0)
STEPS = [MixUp(0.8), CutMix()]
PIPELINE = A.Compose(
    [A.RandomResizedCrop((32, 40)), A.HorizontalFlip(), A.Normalize(), A.ToTensorV2()]
)
IMAGES = [*photographs(60, 70), *photographs(52, 66)]
Named = namedtuple("Named", ["x", "y"])


def pair(index):
    return IMAGES[index % len(IMAGES)], index % CLASSES


def own_class(index):
    return IMAGES[index % len(IMAGES)], index


def by_name(index):
    image, label = pair(index)
    return {"image": image, "label": label, "index": index}


def images(dtype=torch.float32):
    photos = torch.from_numpy(np.stack(photographs(HEIGHT, WIDTH) * 3)[:COUNT]).permute(0, 3, 1, 2)
    photos = photos.contiguous()
    return photos if dtype == torch.uint8 else (photos / 255).to(dtype)


def test_a_mixed_transform_is_a_batch_transform():
    transform = mixed(PIPELINE, CutMix(), num_classes=CLASSES)
    assert isinstance(transform, StageTransform)
    assert as_batch_transform(transform) is transform
    lines = transform.explain().splitlines()
    assert [line.split()[:2] for line in lines[1:]] == [
        ["RandomResizedCrop", "worker"],
        ["HorizontalFlip", "device"],
        ["Normalize", "device"],
        ["ToTensorV2", "device"],
        ["CutMix", "batch"],
    ]


def test_the_pipeline_draws_what_it_would_draw_alone():
    samples = [{"image": image} for image in IMAGES]
    alone = in_worker(as_batch_transform(PIPELINE), samples)
    part = mixed(PIPELINE, CutMix(p=0)).in_worker(on_device=False)
    for sample, key, want in zip(samples, keys(6), alone, strict=True):
        assert torch.equal(part(sample, key)[0]["image"], want["image"])


def test_each_sample_meets_another_one_and_each_once_whatever_their_order():
    transform = mixed(PIPELINE, MixUp(1.0), num_classes=12)
    turned = [4, 2, 0, 5, 1, 3, 10, 9, 6, 8, 7]
    (image, labels), (other, others) = (
        batches(transform, Pictures(own_class), size=11, sampler=order)[0]
        for order in (range(11), turned)
    )
    partners = (labels * (1 - torch.eye(11, 12))) > 0
    assert partners.sum(1).tolist() == [1] * 11
    assert partners.sum(0).tolist() == [1] * 11 + [0]
    assert torch.equal(other, image[turned])
    assert torch.equal(others, labels[turned])


@each(("make", "step"), [(pair, MixUp()), (by_name, CutMix())])
@each("way", WAYS)
def test_workers_and_places_change_nothing(make, step, way):
    transform, names = mixed(PIPELINE, step, num_classes=CLASSES), ("image", "label")
    names = names if make is by_name else (0, 1)
    wanted = batches(transform, Pictures(make), place=WAYS[way].get("place", "device"))
    found = batches(transform, Pictures(make), **WAYS[way])
    assert len(found) == 3
    for one, want in zip(found, wanted, strict=True):
        assert one[names[0]].shape == (4, 3, 32, 40)
        assert one[names[1]].shape == (4, CLASSES)
        assert all(torch.equal(one[name], want[name]) for name in names)


@each("classes", [0, -1, 2.5, "10"])
def test_a_number_of_classes_that_is_none_is_refused(classes):
    with pytest.raises(OptionsError, match=f"num_classes is {classes!r}"):
        mixed(PIPELINE, MixUp(), num_classes=classes)


def test_mixing_needs_batches():
    transform = mixed(PIPELINE, MixUp(), num_classes=CLASSES)
    with pytest.raises(OptionsError, match="batch_size"):
        next(iter(loader_of(transform, Pictures(pair), size=None, place="workers")))


class Validates(Keeps):
    def validation_step(self, batch, batch_idx):
        assert batch[1].ndim == 1


@each("augment_on", ["cpu", "gpu"])
def test_the_training_gets_mixed_batches_and_the_validation_does_not(augment_on, tmp_path):
    pipelines = {
        "train": mixed(PIPELINE, CutMix(), num_classes=CLASSES),
        "val": A.Compose([A.Resize(32, 40), A.Normalize(), A.ToTensorV2()]),
    }
    data = module_of(pipelines, augment_on, Pictures(pair), val=Pictures(pair))
    seen = trained(tmp_path, data, Validates())
    assert len(seen) == 3
    for image, labels in seen:
        assert image.shape == (4, 3, 32, 40)
        assert labels.shape == (4, CLASSES)
        assert torch.allclose(labels.sum(1), torch.ones(4))
    assert any((labels.amax(1) < 1).any() for _, labels in seen)


def test_batches_of_other_loaders_draw_by_their_place():
    transform = mixed(CutMix(), MixUp(1.0), num_classes=CLASSES)
    image = torch.rand(6, 3, 20, 24)
    batch = (image, torch.arange(6) % CLASSES)
    mixed_image, labels = transform.apply_unprepared(batch, SampleKey(0, 0, 12))
    assert labels.shape == (6, CLASSES)
    again, _ = transform.apply_unprepared(batch, SampleKey(0, 0, 12))
    other, _ = transform.apply_unprepared(batch, SampleKey(0, 0, 18))
    assert torch.equal(mixed_image, again)
    assert not torch.equal(mixed_image, other)


def test_a_pipeline_before_runs_on_batches_of_other_loaders_too():
    transform = mixed(A.Compose([A.Normalize(), A.ToTensorV2()]), CutMix(), num_classes=CLASSES)
    image = torch.from_numpy(np.stack(IMAGES[:3]))
    out, labels = transform.apply_unprepared((image, torch.arange(3)), SampleKey(0, 0, 0))
    assert out.shape == (3, 3, 60, 70)
    assert out.dtype == torch.float32
    assert labels.shape == (3, CLASSES)


@each("step", STEPS)
@each("shape", [(5, 3, 20, 24), (5, 20, 24, 3), (5, 20, 24)])
def test_any_layout_of_images_is_kept_and_nothing_is_written_to_what_was_given(step, shape):
    image = torch.rand(shape)
    before = image.clone()
    batch = {"image": image, "target": torch.eye(5), "name": list("abcde")}
    out = mixed(step).apply_unprepared(batch, SampleKey(0, 0, 0))
    assert torch.equal(image, before)
    assert out["image"].shape == shape
    assert out["name"] == list("abcde")
    assert out["target"].shape == (5, 5)
    assert image.ndim == 3 or not torch.equal(out["image"], image)


@each(
    ("steps", "said"),
    [
        ((), "There is nothing that mixes"),
        ((PIPELINE,), "There is nothing that mixes"),
        ((CutMix(), PIPELINE), "does not mix"),
        ((mixed(PIPELINE, CutMix()), CutMix()), r"at once: mixed\(compose, MixUp\(\), CutMix"),
        ((torch.nn.Identity(), CutMix()), "Register a callable by itself"),
    ],
)
def test_what_cannot_be_put_together_is_refused(steps, said):
    with pytest.raises(TransformError, match=said):
        mixed(*steps)


@each(
    ("batch", "options", "said"),
    [
        ((torch.rand(2, 3, 8, 8), torch.arange(2)), {}, "num_classes"),
        ((torch.rand(2, 3, 8, 8), torch.tensor([[1], [0]])), {"num_classes": 2}, "rows of 1, "),
        ((torch.rand(2, 3, 8, 8), torch.rand(2, 4)), {"num_classes": 3}, "rows of 4, "),
        ((torch.rand(2, 3, 8, 8), torch.tensor([1j, 0])), {"num_classes": 2}, "complex64"),
        ((torch.rand(2, 3, 8, 8), torch.rand(2)), {"num_classes": 2}, "float32"),
        ((torch.rand(2, 3, 8, 8), ["a", "b"]), {}, "label="),
        ({"image": torch.rand(2, 3, 8, 8)}, {"label": "y"}, "no field 'y'"),
        (Named(torch.rand(2, 3, 8, 8), torch.arange(2)), {"label": "y"}, "its position, 1"),
    ],
)
def test_a_batch_that_cannot_be_mixed_says_what_it_holds(batch, options, said):
    with pytest.raises(BatchError, match=said):
        mixed(CutMix(), **options).apply_unprepared(batch, SampleKey(0, 0, 0))


def test_a_collate_that_loses_samples_is_noticed():
    transform = mixed(CutMix())
    part = transform.in_worker(on_device=True)
    drawn = [part({"image": IMAGES[0]}, key)[1] for key in keys(3)]
    with pytest.raises(BatchError, match="drawn for 3"):
        transform.apply({"image": torch.rand(2, 3, 8, 8)}, part.collate(drawn))


FLIP = [A.HorizontalFlip()]
BOXES = A.BboxParams("pascal_voc", label_fields=["kinds"])


@each("step", [MixUp(), CutMix()])
@each(
    ("pipeline", "said"),
    [
        (A.Compose(FLIP, bbox_params=BOXES), "transforms boxes"),
        (A.Compose(FLIP, keypoint_params=A.KeypointParams("xy")), "transforms keypoints"),
        (A.Compose(FLIP, additional_targets={"second": "image"}), "additional targets second"),
    ],
)
def test_what_a_pipeline_moves_does_not_stay_behind_when_images_are_mixed(step, pipeline, said):
    with pytest.raises(TransformError, match=said):
        mixed(pipeline, step)


@each("step", STEPS)
@each("name", ["boxes", "bboxes", "mask", "masks", "of the size of the images"])
def test_boxes_and_masks_do_not_stay_behind(step, name):
    masks = torch.zeros(COUNT, HEIGHT, WIDTH)
    batch = {"image": images(), name: masks if " " in name else [torch.zeros(1, 4)] * COUNT}
    with pytest.raises(BatchError, match=rf"'{name}'.*stays=\['{name}'\]") as told:
        mixed(step).apply_unprepared(batch, KEY)
    assert "A.Compose" not in str(told.value)
    out = mixed(step, stays=name).apply_unprepared(batch, KEY)
    assert out[name] is batch[name]


INDICES = torch.tensor([0, 2, 1, 2, 0, 1, 1, 0])
UNFOUND = {
    "key": ({"image": images(), "fine_label": INDICES}, "fine_label"),
    "before the image": ((INDICES, images()), 0),
    "one-hot": ({"image": images(), "y": torch.eye(3)[INDICES]}, "y"),
}


@each("step", STEPS)
@each("form", UNFOUND)
@each("num_classes", [3, None])
def test_labels_that_are_not_found_do_not_stay_behind(step, form, num_classes):
    batch, place = UNFOUND[form]
    with pytest.raises(BatchError, match=rf"No labels were found.*label=.*stays=\[{place!r}\]"):
        mixed(step, num_classes=num_classes).apply_unprepared(batch, KEY)
    if num_classes is None:
        out = mixed(step, stays=place).apply_unprepared(batch, KEY)
        assert out[place] is batch[place]
    else:
        out = mixed(step, label=place, num_classes=3).apply_unprepared(batch, KEY)
        _, shares = mixed(step, num_classes=3).apply_unprepared((images(), INDICES), KEY)
        assert torch.equal(out[place], shares)


def test_where_classes_are_told_of_each_sample_has_a_label():
    part = mixed(CutMix(), num_classes=3).in_worker(on_device=True)
    for sample in (IMAGES[0], {"image": IMAGES[0]}, {"image": IMAGES[0], "y": 2}, (2, IMAGES[0])):
        with pytest.raises(BatchError, match=r"No labels .* leave num_classes=3 out"):
            part(sample, KEY)


LABELS = {
    "classes": INDICES,
    "classes of 32 bits": INDICES.int(),
    "one-hot": torch.eye(3)[INDICES],
    "one-hot of whole numbers": torch.eye(3, dtype=torch.long)[INDICES],
    "one-hot of booleans": torch.eye(3, dtype=torch.bool)[INDICES],
    "one-hot in half precision": torch.eye(3, dtype=torch.bfloat16)[INDICES],
}


@each("step", STEPS)
@each("form", LABELS)
def test_labels_of_any_form_become_the_same_shares(step, form):
    transform = mixed(step, num_classes=3)
    _, shares = transform.apply_unprepared((images(), LABELS[form]), KEY)
    _, wanted = transform.apply_unprepared((images(), LABELS["classes"]), KEY)
    assert shares.dtype == torch.float32
    assert torch.equal(shares, wanted)
    assert torch.allclose(shares.sum(1), torch.ones(COUNT))
    assert not torch.equal(shares, torch.eye(3)[INDICES])


def test_a_label_that_is_no_class_is_told_where_it_is_read():
    part = mixed(CutMix(), num_classes=3).in_worker(on_device=True)
    image = np.zeros((8, 8, 3), np.uint8)
    part((image, 2), KEY)
    for number in (3, 255, -1, -100):
        for wrong in (number, np.int64(number), np.array(number), torch.tensor(number)):
            with pytest.raises(BatchError, match=rf"{number}, but .* means classes 0 to 2"):
                part((image, wrong), KEY)
        batch = images(), INDICES.index_fill(0, torch.tensor([4]), number)
        with pytest.raises(BatchError, match=rf"{number}, but .* means classes 0 to 2"):
            mixed(MixUp(), num_classes=3).apply_unprepared(batch, KEY)
        with pytest.raises(BatchError, match="label 'y'"):
            mixed(CutMix(), label="y", num_classes=3).in_worker(on_device=True)(
                {"image": image, "y": number}, KEY
            )


@each("dtype", [torch.float32, torch.float64, torch.float16])
@each("num_classes", [3, None])
def test_numbers_that_are_no_integers_are_told_by_their_dtype(dtype, num_classes):
    dtype_name = str(dtype).removeprefix("torch.")
    with pytest.raises(BatchError, match=rf"{dtype_name}.*Classes are integers") as told:
        mixed(MixUp(), num_classes=num_classes).apply_unprepared((images(), INDICES.to(dtype)), KEY)
    assert "num_classes" not in str(told.value)
    # The remedy for a regression works.
    rows = INDICES.to(dtype)[:, None]
    _, made = mixed(MixUp(0.8)).apply_unprepared((images(), rows), KEY)
    assert made.shape == (COUNT, 1)
    assert made.min() >= rows.min()
    assert not torch.equal(made, rows.float())


@each("step", STEPS)
@each("dtype", [torch.uint8, torch.float32, torch.float16, torch.bfloat16])
@each("form", ["tuple", "dict"])
def test_images_keep_their_dtype_in_any_memory_format(step, dtype, form):
    given = images(dtype)
    usual = one_image(step, given, form)
    other = one_image(step, given.contiguous(memory_format=torch.channels_last), form)
    assert usual.dtype == other.dtype == dtype
    assert torch.equal(usual, other)
    assert not torch.equal(usual, given)


def one_image(step, image, form):
    batch = {"tuple": (image, INDICES), "dict": {"image": image, "label": INDICES}}
    out = mixed(step, num_classes=3).apply_unprepared(batch[form], KEY)
    return out[0] if form == "tuple" else out["image"]


@each("place", ["workers", "device"])
@each("before", [[], [v2.Compose([v2.RandomHorizontalFlip(), v2.CenterCrop(20)])]])
@each("dtype", [torch.float16, torch.bfloat16])
def test_a_dataset_may_return_images_in_half_precision(dtype, before, place):
    transform, photos = mixed(*before, CutMix(), num_classes=COUNT), images(dtype)
    transform.check_sample((photos[0], 0))
    half, full = (
        batches(transform, Pictures(lambda at, own=own: (own[at], at), COUNT), place=place)
        for own in (photos, photos.float())
    )
    for (image, labels), (wanted, shares) in zip(half, full, strict=True):
        assert torch.equal(image, wanted.to(dtype))
        assert torch.equal(labels, shares)


@each("step", STEPS)
@each("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_is_mixed_as_full_precision_and_rounded_once(step, dtype):
    given = images(dtype)
    half, full = (
        mixed(step, num_classes=3).apply_unprepared((image, INDICES), KEY)
        for image in (given, given.float())
    )
    assert torch.equal(half[0], full[0].to(dtype))
    assert torch.equal(half[1], full[1])
