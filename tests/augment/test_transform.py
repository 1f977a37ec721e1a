from __future__ import annotations

import pickle
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import albumentations as A
import numpy as np
import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from misses import each
from thoroughness import max_examples
from torch.utils.data import default_collate

from lightning_fastdata.augment.collated_batches import ForeignBatches, replay_all, run_each
from lightning_fastdata.augment.ops.operation import DeviceOp, Encoded
from lightning_fastdata.augment.pipeline.fields import Fields
from lightning_fastdata.augment.stage_transform import StageTransform
from lightning_fastdata.augment.transform import (
    BatchTransform,
    as_batch_transform,
)
from lightning_fastdata.errors import BatchError, TransformError
from lightning_fastdata.types import SampleKey

torch.set_num_threads(1)


def _nothing(transform, params, shape, dtype):
    return Encoded((), {})


def _flip(axis):
    return lambda batch, static, arrays: batch.flip(axis)


def _encode_rotation(transform, params, shape, dtype):
    return Encoded((("turns", int(params["factor"])),), {})


def _rotate(batch, static, arrays):
    return torch.rot90(batch, static["turns"], (1, 2))


def _encode_table(transform, params, shape, dtype):
    if dtype != np.uint8:
        return None
    ramp = np.arange(256, dtype=np.uint8).reshape(16, 16, 1).repeat(3, 2)
    table = transform.apply(ramp, **{**params, "shape": ramp.shape})
    return Encoded((), {"table": table[..., 0].reshape(256).copy()})


def _look_up(batch, static, arrays):
    flat = batch.reshape(len(batch), -1).long()
    return arrays["table"].gather(1, flat).reshape(batch.shape)


def _encode_crop(transform, params, shape, dtype):
    corner = np.asarray(params["crop_coords"][:2], np.int64)
    return Encoded((("size", (transform.height, transform.width)),), {"corner": corner})


def _crop(batch, static, arrays):
    height, width = static["size"]
    corners = arrays["corner"].tolist()
    rows = zip(batch, corners, strict=True)
    return torch.stack([image[y : y + height, x : x + width] for image, (x, y) in rows])


def _encode_normalize(transform, params, shape, dtype):
    mean, gain = (np.float32(transform.mean_np), np.float32(transform.denominator))
    return Encoded((), {"mean": mean, "gain": gain})


def _normalize(batch, static, arrays):
    mean, gain = (arrays[name][:, None, None] for name in ("mean", "gain"))
    return (batch.float() - mean) * gain


def _op(name, encode, image, **rest):
    return DeviceOp(name=name, encode=encode, image=image, **rest)


OPS = {
    op.name: op
    for op in (
        _op("HorizontalFlip", _nothing, _flip(2), mask=_flip(2)),
        _op("VerticalFlip", _nothing, _flip(1), mask=_flip(1)),
        _op("RandomRotate90", _encode_rotation, _rotate, mask=_rotate),
        _op("InvertImg", _encode_table, _look_up),
        _op("RandomBrightnessContrast", _encode_table, _look_up),
        _op("RandomGamma", _encode_table, _look_up),
        _op(
            "RandomCrop",
            _encode_crop,
            _crop,
            mask=_crop,
            out_shape=lambda t, _p, shape: (t.height, t.width, *shape[2:]),
        ),
        _op("Normalize", _encode_normalize, _normalize, out_dtype=lambda *_: np.dtype(np.float32)),
        _op(
            "ToTensorV2",
            _nothing,
            lambda batch, _s, _a: batch.permute(0, 3, 1, 2).contiguous(),
            out_shape=lambda _t, _p, s: (s[2] if len(s) > 2 else 1, s[0], s[1]),
        ),
    )
}


class RollRows(A.DualTransform):
    """A user's own transform: draws from its pixels, moves image, mask and boxes."""

    def get_params_dependent_on_data(self, params, data):
        return {"rows": int(data["image"].sum()) % 5 + self.py_random.randint(0, 3)}

    def apply(self, img, rows, **params):
        return np.roll(img, rows, 0)

    def apply_to_mask(self, mask, rows, **params):
        return np.roll(mask, rows, 0)

    def apply_to_bboxes(self, bboxes, **params):
        return bboxes

    def apply_to_keypoints(self, keypoints, **params):
        return keypoints


DEVICE = [
    lambda p: A.HorizontalFlip(p=p),
    lambda p: A.VerticalFlip(p=p),
    lambda p: A.RandomRotate90(p=p),
    lambda p: A.InvertImg(p=p),
    lambda p: A.RandomBrightnessContrast(p=p),
    lambda p: A.RandomGamma(p=p),
    lambda p: A.RandomBrightnessContrast(brightness_by_max=False, p=p),
]
BARRIERS = [
    lambda p: A.CLAHE(p=p),
    lambda p: A.ImageCompression(quality_range=(40, 60), p=p),
    lambda p: RollRows(p=p),
    lambda p: A.Lambda(image=lambda img, **_: img // 2, p=p),
    lambda p: A.MedianBlur(p=p),
    lambda p: A.SelectiveChannelTransform([A.InvertImg(p=p)], channels=(0, 2), p=p),
]
chances = st.sampled_from([0.3, 0.5, 1.0])


def trees(leaves):
    one = st.builds(lambda make, p: make(p), st.sampled_from(leaves), chances)

    def groups(children):
        several = st.lists(children, min_size=1, max_size=3)
        return st.one_of(
            st.builds(lambda t, p: A.OneOf(t, p=p), several, chances),
            st.builds(lambda t, p: A.Sequential(t, p=p), several, chances),
            st.builds(lambda t, p: A.Compose(t, p=p), several, chances),
            st.builds(lambda t, p: A.SomeOf(t, n=2, replace=True, p=p), several, chances),
            st.builds(lambda t, p: A.RandomOrder(t, n=len(t), p=p), several, chances),
            st.builds(lambda a, b, p: A.OneOrOther(a, b, p=p), children, children, chances),
        )

    return st.lists(st.recursive(one, groups, max_leaves=5), min_size=1, max_size=4)


HEADS = st.sampled_from([(), (A.RandomCrop, 16, 16), (A.RandomResizedCrop, (16, 16))])
TAILS = st.sampled_from([(), (A.Normalize,), (A.Normalize, A.ToTensorV2), (A.ToTensorV2,)])


def assemble(head, middle, tail, **options):
    first = [head[0](*head[1:])] if head else []
    return A.Compose([*first, *middle, *(make() for make in tail)], **options)


def samples(count: int = 5, height: int = 24, width: int = 24) -> list[dict]:
    rng = np.random.default_rng(count)
    return [
        {
            "image": rng.integers(0, 256, (height, width, 3), np.uint8),
            "mask": rng.integers(0, 400, (height, width)).astype(np.int32),
            "label": index,
        }
        for index in range(count)
    ]


KEY = SampleKey(3, 1, 0)


def both_ways(transform, items, key=KEY):
    """Return the batch as the workers alone make it, and as worker and device make it."""
    whole, part = (transform.in_worker(on_device=flag) for flag in (False, True))
    keys = [key._replace(index=key.index + index) for index in range(len(items))]
    oracle = default_collate([whole(item, k)[0] for item, k in zip(items, keys, strict=True)])
    drawn = [part(item, k) for item, k in zip(items, keys, strict=True)]
    draws = pickle.loads(pickle.dumps(part.collate([tape for _, tape in drawn])))
    return oracle, transform.apply(default_collate([sample for sample, _ in drawn]), draws)


def assert_same(one, other) -> None:
    assert one.keys() == other.keys()
    for name in one:
        assert one[name].dtype == other[name].dtype
        assert torch.equal(one[name], other[name]), name


@max_examples(50)
@given(HEADS, trees(DEVICE), TAILS, st.integers(0, 2**40))
def test_any_pipeline_split_over_worker_and_device_gives_what_albumentations_gives(
    head, middle, tail, seed
) -> None:
    transform = BatchTransform(assemble(head, middle, tail), Fields(), OPS)
    assert_same(*both_ways(transform, samples(), SampleKey(seed, 0, 0)))


@max_examples(50)
@given(HEADS, trees(DEVICE + BARRIERS), TAILS, st.integers(0, 2**40))
def test_operations_without_a_device_form_change_nothing_wherever_they_stand(
    head, middle, tail, seed
) -> None:
    transform = BatchTransform(assemble(head, middle, tail), Fields(), OPS)
    assert_same(*both_ways(transform, samples(), SampleKey(seed, 0, 0)))


@max_examples(25)
@given(trees([*DEVICE, BARRIERS[0], BARRIERS[2]]), st.integers(0, 2**40))
def test_boxes_labels_and_keypoints_are_albumentations_own(middle, seed) -> None:
    compose = A.Compose(
        [A.RandomCrop(16, 16), *middle, A.Normalize()],
        bbox_params=A.BboxParams("pascal_voc", label_fields=["classes"], min_visibility=0.3),
        keypoint_params=A.KeypointParams("xy", label_fields=["joints"]),
    )
    transform = BatchTransform(compose, Fields(), OPS)
    whole, part = (transform.in_worker(on_device=flag) for flag in (False, True))
    for index, item in enumerate(samples(3)):
        item |= {
            "bboxes": [[1, 2, 12, 13], [3, 3, 22, 20], [20, 20, 23, 23]],
            "classes": [4, 5, 6],
            "keypoints": [(2, 3), (20, 21), (9, 9)],
            "joints": ["a", "b", "c"],
        }
        (one, _), (other, _) = (way(item, SampleKey(seed, 0, index)) for way in (whole, part))
        for name in ("bboxes", "classes", "keypoints", "joints"):
            assert np.array_equal(one[name], other[name])


def test_the_shipped_device_forms_give_what_albumentations_gives() -> None:
    compose = A.Compose(
        [
            A.RandomResizedCrop((20, 20)),
            A.D4(p=1),
            A.OneOf([A.RandomGamma(), A.Posterize(), A.ImageCompression("jpeg", (40, 60))], p=0.7),
            A.HorizontalFlip(),
            A.RandomCrop(16, 16),
            A.RandomBrightnessContrast(),
            A.Normalize(),
            A.ToTensorV2(),
        ]
    )
    transform = as_batch_transform(compose)
    assert isinstance(transform, BatchTransform)
    assert [place.where for place in transform.plan.placements].count("worker") == 2
    oracle, batch = both_ways(transform, samples(24))
    assert torch.equal(oracle["mask"], batch["mask"])
    assert torch.allclose(oracle["image"], batch["image"], atol=1e-5)


def test_each_sample_gets_the_filters_that_it_drew_and_no_others() -> None:
    compose = A.Compose(
        [
            A.RandomCrop(16, 16),
            A.OneOf([A.Posterize(), A.Equalize()], p=0.7),
            A.SomeOf([A.RandomGamma(), A.CoarseDropout(), A.Solarize()], n=2, p=0.7),
            A.OneOf([A.Sharpen(method="gaussian"), A.InvertImg()], p=0.7),
        ]
    )
    transform = as_batch_transform(compose)
    assert isinstance(transform, BatchTransform)
    assert [place.where for place in transform.plan.placements].count("worker") == 2
    items = samples(40)
    assert_same(*both_ways(transform, items))


def test_additional_images_and_masks_ride_along() -> None:
    compose = A.Compose(
        [A.RandomCrop(16, 16), A.HorizontalFlip(), A.CLAHE(p=0.3), A.RandomGamma(), A.Normalize()],
        additional_targets={"depth": "image", "parts": "mask", "index": "mask"},
    )
    items = samples()
    for item, other in zip(items, samples(5), strict=True):
        item |= {
            "depth": other["image"][::-1].copy(),
            "parts": other["mask"],
            "index": item["mask"],
        }
    assert_same(*both_ways(BatchTransform(compose, Fields(), OPS), items))


def test_lists_of_masks_are_done_in_the_worker() -> None:
    compose = A.Compose([A.HorizontalFlip(p=0.5), A.RandomCrop(16, 16), A.VerticalFlip()])
    items = [item | {"masks": [item["mask"], item["mask"] * 2]} for item in samples()]
    oracle, batch = both_ways(BatchTransform(compose, Fields(), OPS), items)
    assert torch.equal(oracle["image"], batch["image"])
    assert all(map(torch.equal, oracle["masks"], batch["masks"]))


PIPELINE = [
    A.RandomResizedCrop((16, 16)),
    A.HorizontalFlip(),
    A.OneOf([A.CLAHE(), A.RandomGamma()], p=0.6),
    A.RandomRotate90(),
    A.Normalize(),
    A.ToTensorV2(),
]


def test_a_sample_does_not_depend_on_its_batch() -> None:
    transform = BatchTransform(A.Compose(PIPELINE), Fields(), OPS)
    items = samples(8)
    _, together = both_ways(transform, items)
    for index in (0, 3, 7):
        _, alone = both_ways(transform, items[index : index + 1], SampleKey(3, 1, index))
        assert torch.equal(alone["image"][0], together["image"][index])


def test_images_of_different_sizes_and_read_only_ones_are_welcome() -> None:
    items = [samples(1, height=20 + 3 * index, width=40)[0] for index in range(4)]
    for item in items:
        item["image"].flags.writeable = False
    transform = BatchTransform(A.Compose(PIPELINE), Fields(), OPS)
    assert_same(*both_ways(transform, items))
    bare = BatchTransform(A.Compose([A.HorizontalFlip(p=0.5)]), Fields(), OPS)
    assert_same(*both_ways(bare, items[:1]))


def test_a_pipeline_that_a_sample_skips_leaves_it_alone() -> None:
    compose = A.Compose([A.HorizontalFlip(p=1), A.InvertImg(p=1)], p=0.5)
    assert_same(*both_ways(BatchTransform(compose, Fields(), OPS), samples(12)))


def test_gray_images_of_two_dimensions_keep_them() -> None:
    compose = A.Compose([A.HorizontalFlip(p=0.5), A.VerticalFlip(p=0.5)])
    items = [{"image": item["image"][..., 0].copy()} for item in samples(8)]
    oracle, batch = both_ways(BatchTransform(compose, Fields(), OPS), items)
    assert batch["image"].shape == (8, 24, 24)
    assert_same(oracle, batch)


@each("form", ["tuple", "bare", "pil", "chw", "named"])
def test_the_image_is_found_in_the_usual_samples(form) -> None:
    from PIL import Image

    array = samples(1)[0]["image"]
    sample, fields = {
        "tuple": ((array, 3), Fields()),
        "bare": (array, Fields()),
        "pil": ((Image.fromarray(array), 3), Fields()),
        "chw": ((torch.from_numpy(array).permute(2, 0, 1), 3), Fields()),
        "named": ({"picture": array, "y": 3}, Fields(image="picture")),
    }[form]
    transform = BatchTransform(A.Compose([A.VerticalFlip(p=1)]), fields, OPS)
    sample, tape = transform.in_worker(on_device=True)(sample, SampleKey(0, 0, 0))
    draws = transform.in_worker(on_device=True).collate([tape])
    batch = transform.apply(default_collate([sample]), draws)
    image = batch if form == "bare" else batch["picture" if form == "named" else 0]
    assert torch.equal(image[0], torch.from_numpy(array).flip(0))


def test_the_worker_part_survives_pickling_and_draws_the_same() -> None:
    compose = A.Compose([A.RandomCrop(8, 8), A.Rotate(p=0.7), A.GaussNoise()])
    worker = as_batch_transform(compose).in_worker(on_device=False)
    sample, key = samples(1)[0], SampleKey(0, 0, 0)
    before = worker(sample, key)[0]
    after = pickle.loads(pickle.dumps(worker))(sample, key)[0]
    assert np.array_equal(before["image"], after["image"])


@pytest.mark.slow
def test_a_fresh_process_draws_the_same() -> None:
    compose = A.Compose([A.RandomCrop(8, 8), A.HorizontalFlip(), A.Rotate(p=0.7)])
    worker = as_batch_transform(compose).in_worker(on_device=True)
    sample, key = samples(1)[0], SampleKey(0, 0, 0)
    here = worker(sample, key)
    code = (
        "import pickle, sys; worker, *arguments = pickle.load(sys.stdin.buffer);"
        "sys.stdout.buffer.write(pickle.dumps(worker(*arguments)))"
    )
    process = subprocess.run(
        [sys.executable, "-c", code],
        input=pickle.dumps((worker, sample, key)),
        capture_output=True,
        check=True,
        timeout=280,
    )
    there = pickle.loads(process.stdout)
    assert torch.equal(torch.as_tensor(here[0]["image"]), torch.as_tensor(there[0]["image"]))
    programs = [worker.collate([tape]) for _, tape in (here, there)]
    assert programs[0].programs == programs[1].programs
    assert torch.equal(programs[0].blob, programs[1].blob)


def test_threads_do_not_disturb_each_others_draws() -> None:
    transform = BatchTransform(A.Compose(PIPELINE), Fields(), OPS)
    worker = transform.in_worker(on_device=True)
    item = samples(1)[0]
    keys = [SampleKey(0, 0, index) for index in range(60)]
    expected = [worker(item, key)[0]["image"] for key in keys]
    with ThreadPoolExecutor(4) as threads:
        drawn = list(threads.map(lambda key: worker(item, key)[0]["image"], keys))
    assert all(map(torch.equal, expected, drawn))


def test_the_users_pipeline_is_never_changed() -> None:
    compose = A.Compose([A.HorizontalFlip(), A.CLAHE()])
    flip = compose.transforms[0]
    before = flip.random_generator.bit_generator.state
    both_ways(BatchTransform(compose, Fields(), OPS), samples())
    assert "apply_with_params" not in vars(flip)
    assert flip.random_generator.bit_generator.state == before


@each("layout", ["nchw", "nhwc"])
@each("tail", [(), (A.Normalize, A.ToTensorV2)])
@each("on_cpu", ["albumentations", "torch"])
def test_a_foreign_batch_gets_what_each_of_its_samples_would(layout, tail, on_cpu) -> None:
    compose = assemble((), [A.HorizontalFlip(), A.RandomGamma(), A.CLAHE(p=0.4)], tail)
    items = samples(6)
    images = torch.stack([torch.from_numpy(item["image"]) for item in items])
    masks = torch.stack([torch.from_numpy(item["mask"]) for item in items])
    batch = {"image": images if layout == "nhwc" else images.permute(0, 3, 1, 2), "mask": masks}
    transform = BatchTransform(compose, Fields(), OPS, on_cpu=on_cpu)
    key = SampleKey(3, 1, 40)
    result = transform.apply_unprepared(batch, key)
    oracle, _ = both_ways(transform, items, key)
    expected = oracle["image"]
    if layout == "nchw" and not tail:
        expected = expected.permute(0, 3, 1, 2)
    assert torch.equal(result["image"], expected)
    assert torch.equal(result["mask"], oracle["mask"])


@max_examples(30)
@given(trees(DEVICE + BARRIERS[:5]), TAILS, st.booleans())
def test_a_foreign_batch_replayed_where_it_lies_equals_one_run_on_the_cpu(
    middle, tail, crop
) -> None:
    compose = assemble((A.RandomCrop, 16, 16) if crop else (), middle, tail)
    items = samples(4)
    tensors = {
        name: torch.stack([torch.from_numpy(item[name]) for item in items])
        for name in ("image", "mask")
    }
    key = SampleKey(9, 0, 0)
    oracle, oracle_is_chw = run_each(tensors, key, compose)
    recorder = ForeignBatches(compose, OPS, None).recorder((24, 24))
    assume(recorder is not None)
    results, is_chw = replay_all(tensors, key, recorder, OPS)
    assert_same(oracle, results)
    assert is_chw == oracle_is_chw


def test_a_normalised_foreign_batch_is_refused() -> None:
    transform = as_batch_transform(A.Compose([A.HorizontalFlip()]))
    with pytest.raises(BatchError, match="look normalised already"):
        transform.apply_unprepared((torch.randn(2, 3, 8, 8), 0), SampleKey(0, 0, 0))


def test_a_foreign_batch_of_boxes_is_refused() -> None:
    transform = as_batch_transform(
        A.Compose([A.HorizontalFlip()], bbox_params=A.BboxParams("coco", label_fields=[]))
    )
    with pytest.raises(TransformError, match=r"bboxes.*FastDataModule\(augment="):
        transform.apply_unprepared({"image": torch.zeros(2, 3, 8, 8)}, SampleKey(0, 0, 0))


@each(
    ("sample", "message"),
    [
        ({"x": np.zeros((4, 4)), "y": 1}, r"No image was found in \{'x': array\[float64: 4, 4\]"),
        ((np.zeros((4, 4, 3), complex), 1), r"array\[complex128: 4, 4, 3\], int"),
        ({"image": np.zeros((4, 4, 3), complex)}, r"array\[complex128: 4, 4, 3\].*such as uint8"),
        ({"image": np.zeros((1, 1, 4, 4, 3), np.uint8)}, "2 or 3 dimensions"),
        ({"image": np.zeros(4, np.uint8)}, "2 or 3 dimensions"),
        ({"image": "a.jpg"}, "The image is str"),
        ({"image": np.zeros((4, 4, 3), np.uint8), "mask": 3}, "The mask is int"),
    ],
)
def test_a_sample_without_a_usable_image_is_an_error_that_quotes_it(sample, message) -> None:
    worker = as_batch_transform(A.Compose([A.HorizontalFlip()])).in_worker(on_device=False)
    with pytest.raises(BatchError, match=message):
        worker(sample, SampleKey(0, 0, 0))


def test_a_field_that_does_not_exist_is_an_error_that_names_it() -> None:
    transform = as_batch_transform(A.Compose([A.HorizontalFlip()]), image="img")
    with pytest.raises(BatchError, match=r"no field 'img' \(given as image=\)"):
        transform.in_worker(on_device=False)({"image": 0}, SampleKey(0, 0, 0))


def test_a_batch_that_lost_samples_on_the_way_is_an_error() -> None:
    transform = BatchTransform(A.Compose([A.HorizontalFlip(p=1)]), Fields(), OPS)
    worker = transform.in_worker(on_device=True)
    tapes = [worker(item, SampleKey(0, 0, 0))[1] for item in samples(3)]
    with pytest.raises(BatchError, match="tensor of 3 samples"):
        transform.apply({"image": torch.zeros(2, 8, 8, 3)}, worker.collate(tapes))


def test_a_callable_gets_the_batch_or_the_named_field() -> None:
    batch = {"image": torch.ones(2, 3, 4, 4), "y": torch.zeros(2)}
    whole = as_batch_transform(lambda b: b["image"].sum())
    assert whole.apply(batch, None) == 96
    field = as_batch_transform(torch.nn.Flatten(), image="image")
    assert field.apply(batch, None)["image"].shape == (2, 48)
    assert field.apply_unprepared(batch, SampleKey(0, 0, 0))["y"] is batch["y"]
    assert field.in_worker(on_device=True) is None
    assert "Flatten" in field.explain()


def test_tensors_made_during_validation_can_be_trained_on() -> None:
    layer = torch.nn.Conv2d(3, 4, 1)
    transform = BatchTransform(A.Compose(PIPELINE), Fields(), OPS)
    with torch.inference_mode():
        _, batch = both_ways(transform, samples(3))
    layer(batch["image"]).sum().backward()
    assert layer.weight.grad is not None


@each("wrong", [3, A.Compose, None])
def test_what_cannot_transform_a_batch_is_an_error(wrong) -> None:
    with pytest.raises(TransformError, match="cannot transform a batch"):
        as_batch_transform(wrong)


@each("make", [lambda: A.Compose(PIPELINE), A.HorizontalFlip, torch.nn.Identity])
def test_every_kind_of_transform_keeps_the_contract(make) -> None:
    transform = as_batch_transform(make())
    assert isinstance(transform, StageTransform)
    assert as_batch_transform(transform) is transform
    assert transform.name


def test_explain_is_an_aligned_table_of_where_and_why() -> None:
    lines = BatchTransform(A.Compose(PIPELINE), Fields(), OPS).explain().splitlines()
    assert len(lines) == 1 + 7
    column = lines[0].index("where")
    assert [line[column:].split()[0] for line in lines[1:]] == [
        *("worker", "either", "worker", "device", "device", "device", "device")
    ]
