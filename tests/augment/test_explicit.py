from __future__ import annotations

import copy
import pickle

import albumentations as A
import numpy as np
import pytest
import torch
from augment.batches import by_albumentations
from augment.oracle_cases import USUAL
from augment.own_transforms import Steps
from hypothesis import given
from hypothesis import strategies as st
from misses import each
from thoroughness import max_examples

from lightning_fastdata import BatchTransform
from lightning_fastdata.augment.stage_transform import StageTransform
from lightning_fastdata.errors import BatchError, TransformError
from lightning_fastdata.types import SampleKey

torch.set_num_threads(1)

HEIGHT, WIDTH, COUNT = 20, 28, 5
RNG = np.random.default_rng(11)
IMAGES = torch.from_numpy(RNG.integers(0, 256, (COUNT, HEIGHT, WIDTH, 3), np.uint8))
MASKS = torch.from_numpy(RNG.integers(0, 400, (COUNT, HEIGHT, WIDTH)).astype(np.int32))
DEPTH = torch.from_numpy(RNG.random((COUNT, HEIGHT, WIDTH), np.float32))
KEY = SampleKey(3, 1, 40)

EQUAL = [
    lambda p: A.HorizontalFlip(p=p),
    lambda p: A.VerticalFlip(p=p),
    lambda p: A.RandomGamma(p=p),
    lambda p: A.RandomBrightnessContrast(p=p),
    lambda p: A.CoarseDropout(p=p, fill_mask=3),
    lambda p: A.OneOf([A.InvertImg(p=1), A.RandomGamma(p=1), A.NoOp(p=1)], p=p),
]
"""Operations whose device form is equal to Albumentations, bit by bit, and one without a form."""
HEADS = [(), (A.RandomCrop(16, 12),), (A.CenterCrop(14, 14),)]
TAILS = [(), (A.Normalize(),), (A.Normalize(), A.ToTensorV2()), (A.ToTensorV2(),)]
equal = st.lists(
    st.builds(lambda make, p: make(p), st.sampled_from(EQUAL), st.sampled_from([0.5, 1.0])),
    min_size=1,
    max_size=4,
)


@pytest.fixture(scope="module", autouse=True, params=["albumentations", "torch"])
def on_cpu(request):
    """What makes pixels on the CPU: Albumentations, or what makes them on a device."""
    CHOSEN["on_cpu"] = request.param
    yield request.param
    CHOSEN.clear()


CHOSEN = {}


def explicit(compose, **options):
    return BatchTransform.from_albumentations(compose, **CHOSEN, **options)


def oracle(compose, key=KEY, **arrays):
    """Return what Albumentations makes of every sample, stacked, by name."""
    compose = A.Compose([compose]) if not isinstance(compose, A.Compose) else compose
    samples = [{n: array[row].numpy() for n, array in arrays.items()} for row in range(COUNT)]
    own_keys = [key._replace(index=key.index + row) for row in range(COUNT)]
    rows = by_albumentations(compose, samples, own_keys)
    return {name: torch.stack([torch.as_tensor(one[name]) for one in rows]) for name in arrays}


def chw(images):
    return images.permute(0, 3, 1, 2).contiguous()


def same(one, other) -> None:
    assert one.dtype == other.dtype
    assert torch.equal(one, other)


@max_examples(25)
@given(st.sampled_from(HEADS), equal, st.sampled_from(TAILS), st.booleans(), st.integers(0, 2**40))
def test_images_and_masks_come_out_as_albumentations_makes_them(
    head, middle, tail, first, seed
) -> None:
    compose = A.Compose([*head, *middle, *tail])
    aug = explicit(compose)
    key = SampleKey(seed, 0, 7)
    images, masks = aug(chw(IMAGES) if first else IMAGES, MASKS, key=key)
    expected = oracle(compose, key, image=IMAGES, mask=MASKS)
    turned = first and not (tail and isinstance(tail[-1], A.ToTensorV2))
    same(images, chw(expected["image"]) if turned else expected["image"])
    same(masks, expected["mask"])


PIPELINE = A.Compose(
    [
        A.RandomResizedCrop((16, 16), interpolation=0),
        A.HorizontalFlip(),
        A.OneOf([A.RandomGamma(p=1), A.VerticalFlip(p=1)], p=0.6),
        A.Normalize(),
        A.ToTensorV2(),
    ]
)


@each("form", ["dict", "tuple", "named", "bare"])
def test_a_batch_of_any_structure_gets_the_draws_at_its_place(form) -> None:
    labels = torch.arange(COUNT)
    batch, options, place = {
        "dict": ({"image": IMAGES, "mask": MASKS, "label": labels}, {}, "image"),
        "tuple": ((IMAGES, labels), {}, 0),
        "named": ({"x": IMAGES, "m": MASKS, "y": labels}, {"image": "x", "mask": "m"}, "x"),
        "bare": (IMAGES, {}, None),
    }[form]
    aug = explicit(PIPELINE, **options)
    expected = oracle(PIPELINE, image=IMAGES, mask=MASKS)
    done = aug(batch, key=KEY)
    assert type(done) is type(batch)
    same(done if place is None else done[place], expected["image"])
    if isinstance(batch, dict):
        same(done["m" if form == "named" else "mask"], expected["mask"])
        assert (done["y" if form == "named" else "label"]) is labels


@each("masks", [DEPTH, DEPTH[..., None].repeat(1, 1, 1, 2), MASKS])
def test_the_same_key_gives_other_tensors_the_same_draws(masks) -> None:
    aug = explicit(PIPELINE)
    student, teacher = aug(IMAGES, key=KEY), aug(255 - IMAGES, key=KEY)
    same(student, oracle(PIPELINE, image=IMAGES)["image"])
    same(teacher, oracle(PIPELINE, image=255 - IMAGES)["image"])
    _, moved = aug(IMAGES, masks, key=KEY)
    same(moved, oracle(PIPELINE, image=IMAGES, mask=masks)["mask"])


@each("transpose", [False, True])
def test_masks_with_channels_keep_their_layout_unless_the_pipeline_turns_them(transpose) -> None:
    compose = A.Compose([A.VerticalFlip(p=0.5), A.ToTensorV2(transpose_mask=transpose)])
    masks = torch.stack([MASKS, MASKS * 2], -1)
    aug = explicit(compose)
    expected = oracle(compose, image=IMAGES, mask=masks)["mask"]
    for first in (False, True):
        given_masks = chw(masks) if first else masks
        turned = chw(expected) if first and not transpose else expected
        same(aug(IMAGES, given_masks, key=KEY)[1], turned)


@each("bands", [8, 20])
def test_a_square_may_have_more_bands_than_rows(bands) -> None:
    compose = A.Compose([A.HorizontalFlip(p=0.5), A.CoarseDropout(p=1)])
    images = torch.from_numpy(np.random.default_rng(0).integers(0, 256, (COUNT, 6, 6, bands)))
    images = images.byte()
    made = explicit(compose)(chw(images), key=KEY)
    same(made, chw(oracle(compose, image=images)["image"]))


def test_without_a_key_each_sample_draws_once_from_torchs_seed() -> None:
    aug = explicit(PIPELINE)
    before = aug(IMAGES)
    twin, other = copy.copy(aug), copy.copy(aug)
    with torch.random.fork_rng():
        torch.manual_seed(2**35 + 1)
        drawn = torch.cat([aug(IMAGES[:2]), aug((IMAGES[2:3], 0))[0], aug(IMAGES[3:])])
        same(drawn, twin(IMAGES))
        torch.manual_seed(2)
        assert not torch.equal(drawn, other(IMAGES))
    assert not torch.equal(drawn, before)


def test_objects_without_a_key_draw_for_themselves() -> None:
    one, other = explicit(PIPELINE), explicit(PIPELINE)
    assert not torch.equal(one(IMAGES), other(IMAGES))
    same(one(IMAGES, key=KEY), other(IMAGES, key=KEY))


def test_a_pipeline_with_boxes_says_who_moves_them() -> None:
    params = A.BboxParams("pascal_voc", label_fields=["labels"])
    aug = explicit(A.Compose([A.HorizontalFlip()], bbox_params=params))
    with pytest.raises(TransformError, match=r"bboxes.*let FastDataModule load the data"):
        aug(IMAGES)


def test_a_pipeline_of_nothing_returns_what_it_was_given() -> None:
    aug = explicit(A.Compose([]))
    same(aug(IMAGES), IMAGES)


@each("wrong", [torch.nn.Identity(), A.Compose, None])
def test_what_is_no_pipeline_is_refused(wrong) -> None:
    with pytest.raises(TransformError, match="no albumentations pipeline"):
        explicit(wrong)


def test_masks_beside_a_batch_are_refused() -> None:
    aug = explicit(PIPELINE)
    with pytest.raises(BatchError, match="put the masks into that batch"):
        aug({"image": IMAGES}, MASKS)


def test_a_single_transform_and_a_transform_that_was_used_may_be_pickled() -> None:
    aug = explicit(A.HorizontalFlip(p=0.5))
    assert isinstance(aug, StageTransform)
    before = aug(IMAGES, key=KEY)
    same(pickle.loads(pickle.dumps(aug))(IMAGES, key=KEY), before)


def test_explain_knows_that_images_of_one_batch_have_one_size() -> None:
    aug = explicit(PIPELINE)
    assert "worker" in aug.explain()
    assert "worker" not in aug.explain(size=(HEIGHT, WIDTH))


@each("name", [name for name in USUAL if "brightness_by_max" not in name])  # looks at pixels
def test_images_and_masks_on_a_device_stay_there(name) -> None:
    """A meta tensor has no values: whoever wants one gets an error instead of a stalled queue."""
    images = torch.empty((2, 170, 170, 3), dtype=torch.uint8, device="meta")
    masks = torch.empty((2, 170, 170), dtype=torch.int64, device="meta")
    for made in explicit(USUAL[name])(images, masks, key=KEY):
        assert (made.device.type, len(made)) == ("meta", 2)


class InPlace(A.ImageOnlyTransform):
    """Writes to the image that it is given."""

    def apply(self, img, **_):
        img[:4] = 0
        return img


@each("pipeline", [PIPELINE, A.Compose([InPlace(p=1), A.HorizontalFlip(p=0.5)])])
def test_nothing_that_is_given_is_written_to(pipeline) -> None:
    images, masks = IMAGES.clone(), MASKS.clone()
    explicit(pipeline)(images, masks, key=KEY)
    assert torch.equal(images, IMAGES)
    assert torch.equal(masks, MASKS)


def test_tensors_made_in_inference_mode_can_be_trained_on() -> None:
    layer = torch.nn.Conv2d(3, 4, 1)
    aug = explicit(PIPELINE)
    with torch.inference_mode():
        made = aug(IMAGES)
    layer(made).sum().backward()
    assert layer.weight.grad is not None


RGBA = torch.cat([IMAGES, IMAGES[..., :1]], -1)


@each(
    ("images", "operations"),
    [
        *(
            (IMAGES, [A.HorizontalFlip(), needs_pixels, A.VerticalFlip(p=0.5)])
            for needs_pixels in (
                A.ImageCompression(p=0.5),
                Steps(p=0.5),
                A.RandomBrightnessContrast(brightness_by_max=False),
            )
        ),
        # Their form changes before that.
        (RGBA, [A.ToGray(3, "average", p=1), A.ImageCompression(p=0.5)]),
        (RGBA, [A.HorizontalFlip(), A.ToGray(3, "average", p=1), A.GlassBlur(p=0.5)]),
        (IMAGES[..., :1], [A.ToRGB(p=1), A.ImageCompression(p=0.5), A.VerticalFlip()]),
        (IMAGES, [A.ToFloat(p=1), A.GlassBlur(p=0.5), A.HorizontalFlip()]),
    ],
)
def test_where_some_samples_need_pixels_they_are_albumentations_own(images, operations) -> None:
    compose = A.Compose(operations)
    same(explicit(compose)(images, key=KEY), oracle(compose, image=images)["image"])


@each(
    ("images", "operations"),
    [
        (IMAGES, [A.RandomCrop(16, 12, p=0.5), A.HorizontalFlip(p=1)]),
        (IMAGES, [A.RandomCrop(16, 12, p=0.5), A.ImageCompression(p=1)]),
        (IMAGES, [A.RandomScale((-0.5, 0.5), p=1)]),
        (IMAGES, [A.PadIfNeeded(30, 30, p=0.5)]),
        (IMAGES, [A.Transpose(p=0.5)]),
        (IMAGES, [A.ToTensorV2(p=0.5)]),
        (IMAGES[..., :1], [A.ToRGB(p=0.5)]),
        (RGBA, [A.ToGray(3, "average", p=0.5), A.ImageCompression(p=0.5)]),
    ],
)
def test_samples_of_several_forms_are_refused_wherever_they_are_computed(images, operations):
    with pytest.raises(TransformError, match="images of different shapes of one batch"):
        explicit(A.Compose(operations))(images, key=KEY)


@each("masks", [MASKS[:3], list(MASKS), [*MASKS[1:], None]])
def test_masks_that_some_samples_of_a_batch_lack_are_refused(masks):
    flip = explicit(A.Compose([A.HorizontalFlip()]))
    with pytest.raises(BatchError, match=f"Expected a tensor of {COUNT} samples"):
        flip({"image": IMAGES, "mask": masks}, key=KEY)
