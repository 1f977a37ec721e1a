"""What mixing does to labels, and to images of any dtype and memory format."""

from __future__ import annotations

import albumentations as A
import numpy as np
import pytest
import torch
from augment.parity import photographs
from misses import each

from lightning_fastdata.augment.mixing import (
    CutMix,
    MixUp,
    mixed,
)
from lightning_fastdata.errors import BatchError, TransformError
from lightning_fastdata.types import SampleKey

torch.set_num_threads(1)

COUNT, HEIGHT, WIDTH = 8, 40, 48
KEY = SampleKey(3, 1, 0)


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


@each("name", ["boxes", "bboxes", "mask", "masks"])
def test_boxes_and_masks_do_not_stay_behind(name):
    batch = {"image": images(), name: [torch.zeros(1, 4)] * COUNT}
    with pytest.raises(BatchError, match=rf"'{name}'.*stays=\['{name}'\]"):
        mixed(CutMix()).apply_unprepared(batch, KEY)
    out = mixed(CutMix(), stays=name).apply_unprepared(batch, KEY)
    assert out[name] is batch[name]


INDICES = torch.tensor([0, 2, 1, 2, 0, 1, 1, 0])
LABELS = {
    "classes": INDICES,
    "classes of 32 bits": INDICES.int(),
    "one-hot": torch.eye(3)[INDICES],
    "one-hot of whole numbers": torch.eye(3, dtype=torch.long)[INDICES],
    "one-hot of booleans": torch.eye(3, dtype=torch.bool)[INDICES],
    "one-hot in half precision": torch.eye(3, dtype=torch.bfloat16)[INDICES],
}
STEPS = [MixUp(0.8), CutMix()]


def images(dtype=torch.float32):
    photos = torch.from_numpy(np.stack(photographs(HEIGHT, WIDTH) * 3)[:COUNT]).permute(0, 3, 1, 2)
    photos = photos.contiguous()
    return photos if dtype == torch.uint8 else (photos / 255).to(dtype)


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
