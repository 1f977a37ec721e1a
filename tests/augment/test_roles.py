"""What lies beside an image moves with it, or it is said that it has no role."""

from __future__ import annotations

from collections import namedtuple
from dataclasses import make_dataclass

import albumentations as A
import numpy as np
import pytest
import torch
from augment.batches import by_albumentations, left_to_device
from augment.loaders import Pictures, module_of, trained, trained_by_callback
from augment.parity import photographs
from misses import each
from PIL import Image
from torch.utils.data import default_collate
from trainers import Keeps

from lightning_fastdata import BatchTransform, FastDataWarning, as_batch_transform
from lightning_fastdata.augment import fields
from lightning_fastdata.errors import BatchError
from lightning_fastdata.types import SampleKey

torch.set_num_threads(1)

HEIGHT, WIDTH = 24, 32
IMAGE, OTHER = photographs(HEIGHT, WIDTH)[:2]
MASK = (IMAGE[..., 0] > 100).astype(np.uint8)
TENSOR = torch.from_numpy(IMAGE).permute(2, 0, 1).contiguous()
KEY = SampleKey(3, 1, 5)


def moves(**arguments):
    """Return a pipeline of its own transforms, which keep the targets that they were given."""
    crop = [A.HorizontalFlip(p=1), A.RandomCrop(16, 20), A.ToFloat(255), A.ToTensorV2()]
    return A.Compose(crop, **arguments)


@pytest.fixture(autouse=True)
def nothing_was_told_yet():
    fields._warned.clear()


def in_worker(transform, sample):
    done, _ = transform.in_worker(on_device=False)(sample, KEY)
    return default_collate([done])


def on_device(transform, sample):
    left, draws = left_to_device(transform, [sample], [KEY])
    return transform.apply(default_collate(left), draws)


def of_a_loader(transform, sample):
    return transform.apply_unprepared(default_collate([sample]), KEY)


def called(transform, sample):
    return transform(default_collate([sample]), key=KEY)


WAYS = [in_worker, on_device, of_a_loader, called]
WITHOUT_ROLE = {
    "tuple": ((IMAGE, MASK), "1"),
    "tuple of tensors": ((TENSOR, torch.from_numpy(MASK)), "1"),
    "mask with channels first": ((TENSOR, torch.from_numpy(MASK)[None]), "1"),
    "int64 mask behind a class": ((IMAGE, 7, MASK.astype(np.int64)), "2"),
    "mask first": ((MASK.astype(np.int64), TENSOR), "0"),
    **{name: ({"image": IMAGE, name: MASK}, repr(name)) for name in ("label", "seg", "target")},
    "second image": ({"image": IMAGE, "before": OTHER}, "'before'"),
    "two views": ((IMAGE, OTHER), "1"),
    "target of a detector": ((IMAGE, {"masks": np.stack([MASK, MASK])}), r"\[1\]\['masks'\]"),
    "list of masks": ((IMAGE, [MASK, MASK]), r"\[1\]\[0\]"),
}


@each("way", WAYS)
@each("form", WITHOUT_ROLE)
def test_what_would_stay_behind_is_named_with_the_argument_that_gives_it_a_role(way, form):
    sample, named = WITHOUT_ROLE[form]
    transform = as_batch_transform(moves())
    with pytest.raises(BatchError, match=rf"The field {named} .*HorizontalFlip.*stays=\["):
        way(transform, sample)


@each("sample", [(Image.fromarray(IMAGE), Image.fromarray(MASK)), *[WITHOUT_ROLE["seg"][0]]])
def test_it_is_told_before_the_first_batch(sample):
    with pytest.raises(BatchError, match=r"mask=.*additional_targets"):
        as_batch_transform(moves()).check_sample(sample)


def test_what_would_stay_behind_is_named_in_a_dataclass_too():
    truth = make_dataclass("Truth", ["organ"])(MASK)
    with pytest.raises(BatchError, match=r"The field \[1\]\['organ'\] .*HorizontalFlip"):
        as_batch_transform(moves()).check_sample((IMAGE, truth))


def wanted(sample, names):
    """Return what Albumentations makes of the fields with a role, by its names for them."""
    compose = moves(additional_targets={n: k for n, (_, k) in names.items() if k})
    given = {name: sample[place] for name, (place, _) in names.items()}
    return by_albumentations(compose, [given], [KEY])[0]


ROLES = {
    "position of the mask": ((IMAGE, MASK), {"mask": 1}, {}, {"mask": (1, "")}),
    "position from the end": ((IMAGE, 7, MASK), {"mask": -1}, {}, {"mask": (2, "")}),
    "name of the mask": ({"image": IMAGE, "seg": MASK}, {"mask": "seg"}, {}, {"mask": ("seg", "")}),
    "named target": (
        {"image": IMAGE, "gt": MASK},
        {},
        {"gt": "mask"},
        {"gt": ("gt", "mask")},
    ),
    "target at a position": ((IMAGE, 7, MASK), {}, {"2": "mask"}, {"2": (2, "mask")}),
    "image at a position": ((IMAGE, OTHER), {}, {"1": "image"}, {"1": (1, "image")}),
    "mask and image at positions": (
        (IMAGE, MASK, OTHER),
        {"mask": 1},
        {"2": "image"},
        {"mask": (1, ""), "2": (2, "image")},
    ),
}


@each("way", WAYS)
@each("form", ROLES)
def test_what_has_a_role_is_what_albumentations_makes_of_it(way, form):
    sample, arguments, targets, names = ROLES[form]
    place = "image" if isinstance(sample, dict) else 0
    want = wanted(sample, {"image": (place, ""), **names})
    compose = moves(additional_targets=targets)
    made = way(as_batch_transform(compose, image=place, **arguments), sample)
    assert torch.equal(made[place][0], torch.as_tensor(want["image"]))
    for name, (where, _) in names.items():
        assert torch.equal(made[where][0], torch.as_tensor(want[name])), name


@each("way", WAYS)
@each("stays", ["before", ["before"], ("before", "absent")])
def test_what_is_said_to_stay_stays(way, stays):
    sample = {"image": IMAGE, "mask": MASK, "before": OTHER}
    for transform in (
        as_batch_transform(moves(), stays=stays),
        BatchTransform.from_albumentations(moves(), stays=stays),
    ):
        made = way(transform, sample)
        assert torch.equal(made["before"][0], torch.from_numpy(OTHER))
        assert made["mask"].shape == (1, 16, 20)


@each("way", WAYS)
@each(
    "form",
    [
        ({"image": IMAGE, "mask": MASK}, {}, "mask"),
        ({"image": IMAGE, "mask": MASK, "seg": MASK}, {"mask": "seg"}, "mask"),
        ({"image": IMAGE, "masks": MASK[None]}, {}, "masks"),
        ({"image": IMAGE, "gt": MASK}, {}, "gt"),
        ((IMAGE, 7, MASK), {}, -1),
    ],
)
def test_what_is_said_to_stay_stays_also_under_a_name_of_the_pipeline(way, form):
    sample, arguments, place = form
    compose = moves(additional_targets={"gt": "mask", "2": "mask"})
    made = way(as_batch_transform(compose, stays=place, **arguments), sample)
    assert torch.equal(made[place][0], torch.as_tensor(sample[place]))
    if arguments:
        assert made["seg"].shape == (1, 16, 20)


@each("way", [in_worker, on_device])
def test_a_mask_of_tokens_is_told_how_to_stay(way):
    sample = {"image": IMAGE, "mask": torch.ones(49)}
    with pytest.raises(BatchError, match=r"no mask of the image.*stays=\['mask'\]"):
        way(as_batch_transform(moves()), sample)
    assert torch.equal(
        way(as_batch_transform(moves(), stays=["mask"]), sample)["mask"][0], sample["mask"]
    )


class Brightened(A.ImageOnlyTransform):
    """Reads a field that none of Albumentations' targets is, and may do without."""

    def get_params_dependent_on_data(self, params, data):
        return {"added": data.get("brighter", 0)}

    def apply(self, img, added, **_):
        return img + np.uint8(added)


class Gained(A.Compose):
    """Takes an argument of its own from the sample."""

    def __call__(self, *args, gain=1, **data):
        result = super().__call__(*args, **data)
        return {**result, "image": result["image"] * gain}


@each("way", [in_worker, on_device])
@each("kind", [A.Compose, Gained])
def test_transforms_of_ones_own_read_any_field_of_a_sample(way, kind):
    sample = {"image": IMAGE // 4, "brighter": 20, "gain": 2, "params": "a name", "near": [1, 2]}
    pipeline = kind([A.HorizontalFlip(p=1), Brightened(p=1), A.ToTensorV2()])
    given = {name: value for name, value in sample.items() if name != "params"}
    wanted = {**sample, **pipeline(**given)}
    made = way(as_batch_transform(pipeline), sample)
    assert torch.equal(made["image"][0], wanted["image"])
    assert {name: made[name] for name in ("brighter", "gain", "params")} == {
        "brighter": torch.tensor([20]),
        "gain": torch.tensor([2]),
        "params": ["a name"],
    }
    stays = as_batch_transform(pipeline, stays=["brighter", "gain"])
    assert not torch.equal(way(stays, sample)["image"][0], wanted["image"])


def test_a_strict_pipeline_gets_its_targets_alone():
    pipeline = A.Compose([Brightened(p=1), A.ToTensorV2()], strict=True)
    made = in_worker(as_batch_transform(pipeline), {"image": IMAGE, "brighter": 20})
    assert torch.equal(made["image"][0], torch.from_numpy(IMAGE).permute(2, 0, 1))


def test_boxes_that_are_said_to_stay_stay():
    sample = {"image": IMAGE, "bboxes": [[1, 2, 5, 6]], "labels": [3]}
    params = A.BboxParams("pascal_voc", label_fields=["labels"])
    transform = as_batch_transform(moves(bbox_params=params), stays="bboxes")
    for device in (False, True):
        made, _ = transform.in_worker(on_device=device)(sample, KEY)
        assert made["bboxes"] == [[1, 2, 5, 6]]


@each("how", [{"mask": "organ"}, {"image": "scan", "mask": 1}])
@each("way", [in_worker, on_device, of_a_loader])
def test_a_field_of_a_namedtuple_that_is_given_by_its_name_is_told_by_its_position(way, how):
    sample = namedtuple("Scan", ["scan", "organ"])(IMAGE, MASK)
    position = 1 if "image" not in how else 0
    with pytest.raises(BatchError, match=f"exists: of a namedtuple its position, {position}"):
        way(as_batch_transform(moves(), **how), sample)
    assert way(as_batch_transform(moves(), mask=1), sample).organ.shape == (1, 16, 20)


@each("way", [in_worker, on_device, of_a_loader])
def test_a_mask_that_only_another_stage_has_is_told_what_helps(way):
    with pytest.raises(BatchError, match=r"no field 1 .*this stage .* without mask=1, in augment="):
        way(as_batch_transform(moves(), mask=1), IMAGE)
    assert way(as_batch_transform(moves()), IMAGE).shape[0] == 1


@each("way", WAYS)
def test_an_image_that_is_called_mask_is_no_mask(way):
    compose = A.Compose([A.HorizontalFlip(p=1), A.Normalize(), A.ToTensorV2()])
    made = way(as_batch_transform(compose, image="mask"), {"mask": IMAGE, "label": 3})
    assert torch.equal(made["mask"][0], compose(image=IMAGE)["image"])


ELSEWHERE = {
    "mask": ({"mask": 0}, {}, True),
    "mask from the end": ({"mask": -2}, {}, True),
    "what stays": ({"stays": 0}, {}, False),
    "target at a position": ({}, {"0": "mask"}, True),
}


@each("way", WAYS)
@each("operation", [A.HorizontalFlip(p=1), A.Normalize(0.5, 0.25, max_pixel_value=1)])
@each("dtype", [np.uint8, np.int16, np.int32, np.float64])
@each("form", ELSEWHERE)
def test_a_field_with_another_role_is_not_taken_for_the_image(way, operation, dtype, form):
    arguments, targets, moved = ELSEWHERE[form]
    scan = (IMAGE[..., 0] > 180).astype(dtype)
    want = A.Compose([operation])(image=scan, mask=MASK)
    pipeline = A.Compose([operation], additional_targets=targets)
    made = way(as_batch_transform(pipeline, **arguments), (MASK, scan))
    assert np.allclose(made[1][0], want["image"])
    assert np.array_equal(made[0][0], want["mask"] if moved else MASK)


BEFORE = {
    "boxes": np.ones((3, 4), np.float32),
    "a table": torch.rand(10, 32),
    "a mask": MASK,
}


@each("way", WAYS)
@each(
    ("operation", "dtype"),
    [
        (A.RandomBrightnessContrast(p=1), np.uint8),
        *((A.HorizontalFlip(p=1), dtype) for dtype in (np.uint8, np.int16, np.uint16)),
    ],
)
@each("form", BEFORE)
def test_what_has_two_dimensions_before_an_image_is_not_guessed_to_be_the_image(
    way, operation, dtype, form
):
    image = IMAGE.astype(dtype)
    sample = BEFORE[form], image, 3
    with pytest.raises(BatchError, match=r"is the image\? Say image=0 or image=1"):
        way(as_batch_transform(operation), sample)
    told = as_batch_transform(operation, image=1, stays=0)
    for transform in (told, as_batch_transform(operation, stays=0)):
        made = way(transform, sample)
        assert torch.equal(made[0][0], torch.as_tensor(BEFORE[form]))
        assert not torch.equal(made[1][0], torch.from_numpy(image))
    swapped = way(as_batch_transform(operation, stays=1), (image, BEFORE[form]))
    assert torch.equal(swapped[0][0], made[1][0])


LEAVES_PIXELS = [
    A.RandomBrightnessContrast(p=1),
    A.GaussNoise(p=1),
    A.CoarseDropout(p=1),
    A.GridDropout(p=1),
    A.PixelDropout(p=1),
    A.NoOp(),
    A.Normalize(),
]


@each("way", WAYS)
@each("operation", LEAVES_PIXELS)
def test_where_no_pixel_moves_nothing_needs_a_role(way, operation):
    transform = as_batch_transform(A.Compose([operation, A.ToTensorV2()]))
    made = way(transform, {"image": IMAGE, "seg": MASK, "boxes": np.ones((2, 4), np.float32)})
    assert torch.equal(made["seg"][0], torch.from_numpy(MASK))


@each("operation", [A.Affine(), A.Resize(8, 8), A.CoarseDropout(fill_mask=0), A.Morphological()])
@each("within", [lambda t: t, lambda t: A.OneOf([A.Blur(), t]), lambda t: A.Sequential([t])])
def test_whatever_would_change_a_mask_needs_its_role(operation, within):
    transform = as_batch_transform(A.Compose([A.Normalize(), within(operation)]))
    with pytest.raises(BatchError, match="'seg'"):
        transform.check_sample({"image": IMAGE, "seg": MASK})


@each("field", [np.zeros((HEIGHT,)), np.zeros((WIDTH, HEIGHT)), "name", [3] * 100, None, 2.5])
def test_what_has_another_size_needs_no_role(field):
    as_batch_transform(moves()).check_sample((IMAGE, field))


def test_rows_of_a_batch_are_not_the_height_of_an_image():
    batch = {"image": TENSOR[None, :, :16, :16].repeat(16, 1, 1, 1), "label": torch.zeros(16, 16)}
    as_batch_transform(A.HorizontalFlip(p=1)).apply_unprepared(batch, KEY)


def with_a_late_mask(index):
    return {"image": IMAGE, **({"seg": MASK} if index > 7 else {})}


@each("place", ["cpu", "gpu", "callback"])
def test_a_mask_that_comes_late_is_named_where_it_comes(place, tmp_path):
    model, data = Keeps(), Pictures(with_a_late_mask)
    train, given = trained_by_callback, (moves(), data)
    if place != "callback":
        train, given = trained, (module_of(moves(), place, data),)
    with pytest.raises(BatchError, match=r"mask='seg'"):
        train(tmp_path, *given, model)
    assert len(model.seen) == 2


BOXES = {
    "array": ({"image": IMAGE, "bboxes": np.ones((2, 4))}, "'bboxes'"),
    "with a class": ((IMAGE, torch.ones(3, 5)), "1"),
    "target of a detector": ((IMAGE, {"boxes": torch.ones(1, 4)}), r"\[1\]\['boxes'\]"),
    "lists": ({"image": IMAGE, "boxes": [[1, 2, 3, 4], [1, 2, 3, 5]]}, "'boxes'"),
}


@each("form", BOXES)
def test_boxes_that_would_stay_are_warned_of_once(form):
    sample, named = BOXES[form]
    fields._warned.clear()
    transform = as_batch_transform(moves())
    with pytest.warns(FastDataWarning, match=rf"The field {named} .*bbox_params") as told:
        transform.check_sample(sample)
    assert len(told) == 1
    for way in (in_worker, on_device):
        way(transform, sample)  # a second warning would be an error here


def test_boxes_that_move_or_are_said_to_stay_are_not_warned_of():
    moved = moves(bbox_params=A.BboxParams("pascal_voc", label_fields=["labels"]))
    sample = {"image": IMAGE, "bboxes": [[1, 2, 30, 20]], "labels": [1], "size": np.ones((1, 4))}
    as_batch_transform(moved).check_sample(sample)
    stays = as_batch_transform(moves(), stays=["bboxes", "size"])
    stays.check_sample(sample)


def test_boxes_at_a_position_move_and_are_not_warned_of():
    params = A.BboxParams("pascal_voc", label_fields=[])
    flip = A.Compose([A.HorizontalFlip(p=1)], params, additional_targets={"1": "bboxes"})
    sample = (IMAGE, [[1, 2, 30, 20]], "cat.jpg")
    as_batch_transform(flip).check_sample(sample)
    made, _ = as_batch_transform(flip).in_worker(on_device=False)(sample, KEY)
    assert np.allclose(made[1], flip(image=IMAGE, **{"1": sample[1]})["1"])
