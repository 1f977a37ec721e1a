from __future__ import annotations

import pickle
from concurrent.futures import ThreadPoolExecutor

import albumentations as A
import numpy as np
import pytest
import torch
from augment.batches import collated
from misses import each
from torch.utils.data import default_collate

from lightning_fastdata.augment.pipeline.fields import Fields
from lightning_fastdata.augment.transform import BatchTransform, as_batch_transform
from lightning_fastdata.errors import BatchError, TransformError
from lightning_fastdata.types import SampleKey

torch.set_num_threads(1)


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


PIPELINE = [
    A.RandomResizedCrop((16, 16)),
    A.HorizontalFlip(),
    A.OneOf([A.CLAHE(), A.RandomGamma()], p=0.6),
    A.RandomRotate90(),
    A.Normalize(),
    A.ToTensorV2(),
]


def test_images_of_different_sizes_and_read_only_ones_are_welcome() -> None:
    items = [samples(1, height=20 + 3 * index, width=40)[0] for index in range(4)]
    for item in items:
        item["image"].flags.writeable = False
    transform = BatchTransform(A.Compose(PIPELINE), Fields())
    assert_same(*both_ways(transform, items))
    bare = BatchTransform(A.Compose([A.HorizontalFlip(p=0.5)]), Fields())
    assert_same(*both_ways(bare, items[:1]))


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
    transform = BatchTransform(A.Compose([A.VerticalFlip(p=1)]), fields)
    sample, tape = transform.in_worker(on_device=True)(sample, SampleKey(0, 0, 0))
    draws = transform.in_worker(on_device=True).collate([tape])
    batch = transform.apply(default_collate([sample]), draws)
    image = batch if form == "bare" else batch["picture" if form == "named" else 0]
    assert torch.equal(image[0], torch.from_numpy(array).flip(0))


def test_threads_do_not_disturb_each_others_draws() -> None:
    transform = BatchTransform(A.Compose(PIPELINE), Fields())
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
    both_ways(BatchTransform(compose, Fields()), samples())
    assert "apply_with_params" not in vars(flip)
    assert flip.random_generator.bit_generator.state == before


@each("layout", ["nchw", "nhwc"])
@each("tail", [(), (A.Normalize, A.ToTensorV2)])
@each("there", [False, True])
def test_a_foreign_batch_gets_what_each_of_its_samples_would(layout, tail, there) -> None:
    operations = [A.HorizontalFlip(), A.RandomGamma(), A.CLAHE(p=0.4)]
    compose = A.Compose([*operations, *(make() for make in tail)])
    items = samples(6)
    images = torch.stack([torch.from_numpy(item["image"]) for item in items])
    masks = torch.stack([torch.from_numpy(item["mask"]) for item in items])
    batch = {"image": images if layout == "nhwc" else images.permute(0, 3, 1, 2), "mask": masks}
    key = SampleKey(3, 1, 40)
    result = collated(compose, batch, key, on_device=there)
    oracle, _ = both_ways(BatchTransform(compose, Fields()), items, key)
    expected = oracle["image"]
    if layout == "nchw" and not tail:
        expected = expected.permute(0, 3, 1, 2)
    assert torch.equal(result["image"], expected)
    assert torch.equal(result["mask"], oracle["mask"])


def test_a_normalised_foreign_batch_is_refused() -> None:
    transform = as_batch_transform(A.Compose([A.HorizontalFlip()]))
    with pytest.raises(BatchError, match="look normalised already"):
        transform.apply_unprepared((torch.randn(2, 3, 8, 8), 0), SampleKey(0, 0, 0))


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
    transform = BatchTransform(A.Compose([A.HorizontalFlip(p=1)]), Fields())
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


@each("wrong", [3, A.Compose, None])
def test_what_cannot_transform_a_batch_is_an_error(wrong) -> None:
    with pytest.raises(TransformError, match="cannot transform a batch"):
        as_batch_transform(wrong)


def test_explain_is_an_aligned_table_of_where_and_why() -> None:
    lines = BatchTransform(A.Compose(PIPELINE), Fields()).explain().splitlines()
    assert len(lines) == 1 + 7
    column = lines[0].index("where")
    assert [line[column:].split()[0] for line in lines[1:]] == [
        *("worker", "either", "worker", "device", "device", "device", "device")
    ]
