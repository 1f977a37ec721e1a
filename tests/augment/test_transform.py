from __future__ import annotations

import multiprocessing
import threading
from collections import defaultdict
from collections.abc import Mapping, MutableMapping
from concurrent.futures import ThreadPoolExecutor

import albumentations as A
import numpy as np
import pytest
import torch
from augment.batches import assert_both_ways_agree, keys, left_to_device, on_device, pipeline
from misses import each
from PIL import Image
from torch.utils.data import default_collate

from lightning_fastdata.augment.transform import BatchTransform, as_batch_transform
from lightning_fastdata.errors import BatchError, OptionsError
from lightning_fastdata.types import SampleKey

torch.set_num_threads(1)

KEY = SampleKey(0, 0, 0)
PIPELINE = [
    A.RandomResizedCrop((16, 16)),
    A.HorizontalFlip(),
    A.OneOf([A.CLAHE(), A.RandomGamma()], p=0.6),
    A.RandomRotate90(),
    A.Normalize(),
    A.ToTensorV2(),
]


def samples(count: int = 5) -> list[dict]:
    """Return images of different sizes, with masks."""
    rng = np.random.default_rng(count)
    sizes = [(20 + 3 * index, 40) for index in range(count)]
    return [
        {
            "image": rng.integers(0, 256, (*size, 3), np.uint8),
            "mask": rng.integers(0, 400, size).astype(np.int32),
        }
        for size in sizes
    ]


@each(("operations", "count"), [(PIPELINE, 4), ([A.HorizontalFlip(p=0.5)], 1)])
def test_read_only_images_are_welcome(operations, count) -> None:
    items, transform = samples(count), pipeline(*operations)
    for item in items:
        item["image"].flags.writeable = False
    assert_both_ways_agree(transform, items)


class _Band(A.DualTransform):
    """Writes to what it is given."""

    def apply(self, img, **_):
        img[:4] = 0
        return img

    def apply_to_mask(self, mask, **_):
        return self.apply(mask)


@each(
    ("operation", "modes"), [(_Band(p=1), ["RGB", "RGBA", "L", "F"]), (A.AutoContrast(p=1), ["L"])]
)
@each("on_device", [False, True])
def test_images_and_masks_of_pil_become_arrays_that_may_be_written_to(
    operation, modes, on_device
) -> None:
    gray = Image.fromarray(samples(1)[0]["image"][..., 0])
    part = as_batch_transform(A.Compose([operation])).in_worker(on_device=on_device)
    for image in map(gray.convert, modes):
        want = A.Compose([operation])(image=np.array(image), mask=np.array(gray))
        made, _ = part({"image": image, "mask": gray}, KEY)
        assert np.array_equal(made["image"], want["image"])
        assert np.array_equal(made["mask"], want["mask"])


ARRAY = samples(1)[0]["image"]


@each(
    ("sample", "place"),
    [
        ((ARRAY, 3), 0),
        (ARRAY, None),
        ((Image.fromarray(ARRAY), 3), 0),
        ((torch.from_numpy(ARRAY).permute(2, 0, 1), 3), 0),
        ({"picture": ARRAY, "y": 3}, "picture"),
    ],
)
def test_the_image_is_found_in_the_usual_samples(sample, place) -> None:
    transform = as_batch_transform(A.VerticalFlip(p=1), image=place)
    left, draws = left_to_device(transform, [sample], [KEY])
    batch = transform.apply(default_collate(left), draws)
    image = batch if place is None else batch[place]
    assert torch.equal(image[0], torch.from_numpy(ARRAY).flip(0))


class _Record(dict):
    def __init__(self, image, label):
        super().__init__(image=image, label=label)


class _Attributes(dict):
    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.__dict__ = self


class _Fixed(Mapping):
    """Takes other arguments than its items, and cannot be changed."""

    def __init__(self, image, label):
        self.items_ = {"image": image, "label": label}

    def __getitem__(self, key):
        return self.items_[key]

    def __iter__(self):
        return iter(self.items_)

    def __len__(self):
        return len(self.items_)


class _Held(_Fixed, MutableMapping):
    """Shares its items with its shallow copies."""

    def __setitem__(self, key, value):
        self.items_[key] = value

    def __delitem__(self, key):
        del self.items_[key]


class _List(list):
    def __init__(self, image, label):
        super().__init__([image, label])


class _Tuple(tuple):
    def __new__(cls, image, label):
        return super().__new__(cls, (image, label))


class _Holding(A.ImageOnlyTransform):
    """Holds what cannot be copied, also within what can be."""

    def __init__(self, held):
        super().__init__(p=1)
        self.held = held
        self.calls = []

    def apply(self, img, **_):
        self.calls.append(self.held)
        return img[:, ::-1].copy()


UNCOPIED = {
    "lock": threading.Lock,
    "number that processes share": lambda: multiprocessing.get_context("fork").Value("i", 0),
    "module": lambda: np,
    "generator": lambda: iter([] for _ in range(2)),
    "in a list in a dict": lambda: {"locks": [threading.Lock()], "numbers": [1]},
}


@each("form", UNCOPIED)
def test_a_pipeline_shares_with_its_copies_what_cannot_be_copied(form) -> None:
    held = UNCOPIED[form]()
    transform = _Holding(held)
    given = as_batch_transform(A.Compose([A.OneOf([transform]), A.Normalize()]))
    left, draws = left_to_device(given, [{"image": ARRAY}], [KEY])
    batch = {"image": torch.from_numpy(ARRAY)[None]}
    made = [
        given.in_worker(on_device=False)({"image": ARRAY}, KEY)[0]["image"],
        given.apply(default_collate(left), draws)["image"][0],
        given.apply_unprepared(batch, KEY)["image"][0],
    ]
    for image in made:
        assert np.allclose(image, A.Normalize()(image=ARRAY[:, ::-1])["image"], atol=1e-6)
    assert (transform.held, transform.calls) == (held, [])


CONTAINERS = [
    (lambda image, label: defaultdict(list, image=image, label=label), defaultdict),
    (_Record, _Record),
    (lambda image, label: _Attributes(image=image, label=label), _Attributes),
    (_Fixed, dict),
    (_Held, dict),
    (_List, _List),
    (_Tuple, tuple),
]


@each(("make", "kind"), CONTAINERS)
@each("replay", [False, True])
def test_samples_of_classes_with_their_own_constructors_are_as_welcome_as_in_torch(
    make, kind, replay
) -> None:
    sample = make(ARRAY, 3)
    compose = (A.ReplayCompose if replay else A.Compose)([A.VerticalFlip(p=1)])
    made, _ = as_batch_transform(compose).in_worker(on_device=False)(sample, KEY)
    assert type(made) is kind
    image, label = ("image", "label") if isinstance(sample, Mapping) else (0, 1)
    assert np.array_equal(made[image], ARRAY[::-1])
    assert made[label] == 3
    assert sample[image] is ARRAY
    if kind is _Attributes:
        assert made.image is made["image"]


def test_threads_do_not_disturb_each_others_draws() -> None:
    worker = pipeline(*PIPELINE).in_worker(on_device=True)
    item, own_keys = samples(1)[0], keys(60)
    expected = [worker(item, key)[0]["image"] for key in own_keys]
    with ThreadPoolExecutor(4) as threads:
        drawn = list(threads.map(lambda key: worker(item, key)[0]["image"], own_keys))
    assert all(map(torch.equal, expected, drawn))


def test_the_users_pipeline_is_never_changed() -> None:
    compose = A.Compose([A.HorizontalFlip(), A.CLAHE()])
    flip = compose.transforms[0]
    before = flip.random_generator.bit_generator.state
    on_device(as_batch_transform(compose), samples(1))
    assert "apply_with_params" not in vars(flip)
    assert flip.random_generator.bit_generator.state == before


@each("place", [1.5, ["image"], None])
def test_what_is_no_place_of_a_field_is_refused(place) -> None:
    for name in ("image", "mask"):
        if place is not None:
            with pytest.raises(OptionsError, match=f"{name} is .*a key of the samples"):
                as_batch_transform(pipeline(A.HorizontalFlip()).compose, **{name: place})
    with pytest.raises(OptionsError, match="stays is "):
        as_batch_transform(pipeline(A.HorizontalFlip()).compose, stays=[place])


@each("key", [5, (0, 1, 2), SampleKey(0, 1, 2.5), SampleKey(None, 0, 0)])
def test_what_is_no_key_or_no_size_is_refused_before_anything_is_drawn(key) -> None:
    transform = BatchTransform.from_albumentations(A.Compose([A.HorizontalFlip()]))
    with pytest.raises(OptionsError, match=r"^key is "):
        transform(torch.zeros(2, 3, 8, 8, dtype=torch.uint8), key=key)
    with pytest.raises(OptionsError, match=r"^size is 224"):
        transform.explain(size=224)


def test_a_foreign_batch_of_other_floats_is_refused_with_what_it_looks_like() -> None:
    flip, noise = pipeline(A.HorizontalFlip()), torch.randn(2, 3, 8, 8)
    with pytest.raises(BatchError, match="look normalised already"):
        flip.apply_unprepared((noise, 0), KEY)
    with pytest.raises(BatchError, match=r"to 255\. .*: return bytes as uint8, or divide them by"):
        flip.apply_unprepared((torch.linspace(0, 255, 384).reshape(2, 3, 8, 8), 0), KEY)


@each(
    ("sample", "message"),
    [
        ({"x": np.zeros((4, 4)), "y": 1}, r"No image was found in \{'x': array\[float64: 4, 4\]"),
        ((np.zeros((4, 4, 3), complex), 1), r"array\[complex128: 4, 4, 3\], int"),
        ({"image": np.zeros((4, 4, 3), complex)}, r"array\[complex128: 4, 4, 3\].*such as uint8"),
        ((torch.zeros(3, 4, 4).bfloat16(), 1), r"tensor\[bfloat16: 3, 4, 4\].*such as uint8"),
        ({"image": np.zeros((1, 1, 4, 4, 3), np.uint8)}, "2 or 3 dimensions"),
        ({"image": np.zeros(4, np.uint8)}, "2 or 3 dimensions"),
        ({"image": None, "y": 1}, "The image is NoneType. Expected a PIL image"),
        ({"image": np.zeros((4, 4, 3), np.uint8), "mask": 3}, "The mask is int"),
        *(
            (
                {"image": torch.zeros(3, 4, 5), "mask": make((channels, 4, 5))},
                rf"mask is {kind}\[.*: {channels}, 4, 5\], with its channels first.*return mask\[0",
            )
            for channels in (1, 3)
            for make, kind in ((torch.zeros, "tensor"), (np.zeros, "array"))
        ),
    ],
)
def test_a_sample_without_a_usable_image_is_an_error_that_quotes_it(sample, message) -> None:
    with pytest.raises(BatchError, match=message):
        pipeline(A.HorizontalFlip()).in_worker(on_device=False)(sample, KEY)


def test_a_batch_that_lost_samples_on_the_way_is_an_error() -> None:
    transform = pipeline(A.HorizontalFlip(p=1))
    _, draws = left_to_device(transform, samples(3), keys(3))
    with pytest.raises(BatchError, match="tensor of 3 samples"):
        transform.apply({"image": torch.zeros(2, 8, 8, 3)}, draws)
