"""Whatever samples and ``collate_fn`` are: what trains in one place trains in the other, alike.

The oracle is ``augment_on="cpu"``: Albumentations makes all pixels before samples are collated.
"""

from __future__ import annotations

import copy
import random
from typing import TYPE_CHECKING, Any

import albumentations as A
import numpy as np
import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from misses import each
from samples import Samples
from skimage import data
from trainers import trained

from lightning_fastdata import FastDataModule, LoaderOptions, as_batch_transform
from lightning_fastdata.data import ListsOf
from lightning_fastdata.errors import BatchError, FastDataWarning, OptionsError

if TYPE_CHECKING:
    from collections.abc import Callable

torch.set_num_threads(1)

PHOTOGRAPH = np.ascontiguousarray(data.astronaut()[:48, :64])
PHOTOGRAPHS = [np.roll(PHOTOGRAPH, 5 * number, 1) for number in range(8)]
MASKS = [(image[..., 0] // 50).astype(np.uint8) for image in PHOTOGRAPHS]
RGBA = [np.dstack([image, image[..., :1]]) for image in PHOTOGRAPHS]
PAIRS = [{"image": i, "mask": m} for i, m in zip(PHOTOGRAPHS, MASKS, strict=True)]
SOME_MASKS = [pair if n % 3 else {"image": pair["image"]} for n, pair in enumerate(PAIRS)]
SIZES = [{"image": image[: 40 + n % 3]} for n, image in enumerate(PHOTOGRAPHS)]
FRAMES = np.stack(PHOTOGRAPHS[:3])


def by_name(values: list[np.ndarray], name: str = "image") -> list[dict[str, Any]]:
    return [{name: value} for value in values]


def in_lists(samples: list[dict[str, Any]]) -> dict[str, list[Any]]:
    return {name: [sample.get(name) for sample in samples] for name in ("image", "mask")}


def stacked(samples: list[dict[str, Any]]) -> torch.Tensor:
    return torch.stack([torch.as_tensor(sample["image"]) for sample in samples])


def masks_in_lists(samples: list[dict[str, Any]]) -> dict[str, Any]:
    return {"image": stacked(samples), "mask": [sample.get("mask") for sample in samples]}


def masks_made_up(samples: list[dict[str, Any]]) -> dict[str, Any]:
    none = np.zeros((48, 64), np.uint8)
    masks = [torch.as_tensor(sample.get("mask", none)) for sample in samples]
    return {"image": stacked(samples), "mask": torch.stack(masks)}


def padded(samples: list[dict[str, Any]]) -> dict[str, Any]:
    images = [torch.as_tensor(sample["image"]) for sample in samples]
    page = torch.zeros((len(images), 64, 64, 64), dtype=images[0].dtype)
    for place, image in zip(page, images, strict=True):
        place[: image.shape[0], : image.shape[1], : image.shape[2]] = image
    return {"image": page}


def sorted_by_level(samples: list[dict[str, Any]]) -> dict[str, Any]:
    samples = sorted(samples, key=lambda sample: float(torch.as_tensor(sample["image"])[5, 5, 0]))
    return {"image": stacked(samples)}


def renamed(samples: list[dict[str, Any]]) -> dict[str, Any]:
    return {"pixels": stacked(samples)}


def halved(samples: list[dict[str, Any]]) -> dict[str, Any]:
    return {"image": stacked(samples) / 2}


def from_arrays(samples: list[dict[str, Any]]) -> dict[str, Any]:
    return {"image": torch.stack([torch.from_numpy(sample["image"]) for sample in samples])}


class Drawing:
    """Draws from every global generator and from some of its own, and then makes a batch."""

    def __init__(self, collate_fn: Callable[[list[Any]], dict[str, Any]]) -> None:
        self.collate_fn = collate_fn
        self.generators = [np.random.default_rng(5), np.random.RandomState(5), random.Random(5)]
        self.torch = torch.Generator().manual_seed(5)

    def __call__(self, samples: list[dict[str, Any]]) -> dict[str, Any]:
        drawn = [random.random(), float(np.random.rand()), float(torch.rand(()))]
        drawn += [float(generator.random()) for generator in self.generators]
        drawn += [float(torch.rand((), generator=self.torch))]
        return {"drawn": drawn, **self.collate_fn(samples)}


def alternating(one: list[Any], other: list[Any]) -> list[Any]:
    return [pair[n % 2] for n, pair in enumerate(zip(one, other, strict=True))]


FLIPS = [A.HorizontalFlip(), A.VerticalFlip()]
END = [A.Normalize(), A.ToTensorV2()]
FINISHED = A.Compose([*FLIPS, *END])
BOXES = A.Compose([*FLIPS, *END], bbox_params=A.BboxParams("pascal_voc", label_fields=["labels"]))
BOXED = [
    {"image": image, "bboxes": [[2, 3, 20, 20 + n]] * (n % 3), "labels": [n] * (n % 3)}
    for n, image in enumerate(PHOTOGRAPHS)
]
NOTED = A.ReplayCompose(
    [A.HorizontalFlip(), A.VerticalFlip()], bbox_params=BOXES.processors["bboxes"].params
)
GRAY = A.ToGray(3, "average", p=1)
CAST = A.OneOf([A.InvertImg(p=1), A.ToFloat(p=1)], p=1)
CASES: dict[str, tuple[list[Any], Any, Callable[[list[Any]], Any] | None]] = {
    "some masks": (SOME_MASKS, FINISHED, masks_in_lists),
    "some masks, no tensor": (SOME_MASKS, A.Compose(FLIPS), masks_in_lists),
    "some masks, made up": (SOME_MASKS, FINISHED, masks_made_up),
    "sizes": (SIZES, FINISHED, in_lists),
    "sizes, not stacked": (SIZES, FINISHED, None),
    "sizes, padded": (SIZES, FINISHED, padded),
    "padded": (by_name(PHOTOGRAPHS), FINISHED, padded),
    "sorted": (by_name(PHOTOGRAPHS), A.Compose(FLIPS), sorted_by_level),
    "renamed": (PAIRS, FINISHED, renamed),
    "converted": (by_name(PHOTOGRAPHS), FINISHED, halved),
    "made of arrays": (PAIRS, A.Compose(FLIPS), from_arrays),
    "a dtype that nobody had seen before": (
        by_name([*PHOTOGRAPHS[:4], PHOTOGRAPHS[4] / np.float32(255), *PHOTOGRAPHS, *PHOTOGRAPHS]),
        A.Compose(FLIPS),
        None,
    ),
    "cast in some samples": (by_name(PHOTOGRAPHS), A.Compose([CAST, A.ToTensorV2()]), None),
    "cast in some, then of one dtype": (
        by_name(PHOTOGRAPHS),
        A.Compose([CAST, A.Normalize(), A.HorizontalFlip(), A.ToTensorV2()]),
        None,
    ),
    "of several dtypes": (
        by_name(alternating(PHOTOGRAPHS, [image / np.float32(255) for image in PHOTOGRAPHS])),
        A.Compose([A.HorizontalFlip(), A.ToFloat(), A.ToTensorV2()]),
        None,
    ),
    "uint16": (
        by_name([image.astype(np.uint16) * 257 for image in PHOTOGRAPHS]),
        A.Compose([A.RandomCrop(40, 40), *FLIPS, A.Normalize(max_pixel_value=65535), *END[1:]]),
        None,
    ),
    "gray and RGB": (
        by_name(alternating([i[..., :1] for i in PHOTOGRAPHS], PHOTOGRAPHS)),
        A.Compose([*FLIPS, A.ToRGB(), *END]),
        None,
    ),
    "RGB and RGBA": (by_name(alternating(RGBA, PHOTOGRAPHS)), A.Compose([GRAY, *END]), None),
    "RGBA to gray before what has no form": (
        by_name(RGBA),
        A.Compose([GRAY, A.ImageCompression(p=0.5), *END]),
        None,
    ),
    "some to gray": (by_name(RGBA), A.Compose([A.ToGray(3, "average", p=0.5), *FLIPS]), None),
    "some cropped": (PAIRS, A.Compose([A.RandomCrop(40, 40, p=0.5), *FLIPS]), None),
    "some cropped, in lists": (PAIRS, A.Compose([A.RandomCrop(40, 40, p=0.5), *END]), in_lists),
    "lists beside images": (BOXED, BOXES, ListsOf("bboxes", "labels")),
    "the masks in a list": (PAIRS, FINISHED, ListsOf("mask")),
    "frames": (by_name([FRAMES] * 4, "images"), A.Compose(FLIPS), None),
    "frames by name": (
        by_name([FRAMES] * 4, "images"),
        as_batch_transform(A.Compose(FLIPS), image="images"),
        None,
    ),
    "frames in lists": (by_name([list(FRAMES)] * 4, "images"), A.Compose(FLIPS), None),
    "three gray frames": (by_name([FRAMES[..., 0]] * 4, "images"), A.Compose(FLIPS), None),
    "an image called frames": (
        by_name(PHOTOGRAPHS, "images"),
        as_batch_transform(FINISHED, image="images"),
        None,
    ),
    "volumes and their masks": (
        [{"volume": FRAMES[..., 0], "mask3d": FRAMES[..., 1] // 50}] * 4,
        A.Compose(FLIPS),
        None,
    ),
    "frames in some samples, images in others": (
        alternating(by_name(PHOTOGRAPHS), by_name([FRAMES] * 8, "images")),
        A.Compose(FLIPS),
        list,
    ),
    "masks of float64, warped": (
        [{**pair, "mask": pair["mask"] / 255} for pair in PAIRS],
        A.Compose([A.Affine(rotate=(-40, 40), interpolation=0, p=1), A.Perspective(0, p=1)]),
        None,
    ),
}


REFUSED = {"sizes, not stacked", "some to gray", "some cropped"}
"""No batch can be made of them in either place."""


def outcome(
    samples: list[Any], augment: Any, collate_fn: Callable[[list[Any]], Any] | None, place: str
) -> list[Any] | type[Exception]:
    """Return the batches of an epoch, or the class of the error that ended it."""
    dataset = Samples(lambda index: dict(samples[index]), len(samples))
    try:
        return batches_of(dataset, augment, collate_fn, place)
    except Exception as error:
        return type(error)


def batches_of(dataset: Any, augment: Any, collate_fn: Any, place: str) -> list[Any]:
    how = {"augment": augment, "augment_on": place, "collate_fn": collate_fn, "seed": 3}
    how["options"] = LoaderOptions(executor="inline")
    return trained(FastDataModule.from_datasets(dataset, batch_size=4, **how))


def assert_equal(one: Any, other: Any) -> None:
    assert type(one) is type(other)
    if isinstance(one, torch.Tensor):
        assert one.dtype == other.dtype
        torch.testing.assert_close(one, other, rtol=0, atol=1e-6)
    elif isinstance(one, np.ndarray):
        np.testing.assert_array_equal(one, other)
    elif isinstance(one, dict):
        assert one.keys() == other.keys()
        for name in one:
            assert_equal(one[name], other[name])
    elif isinstance(one, list | tuple):
        assert len(one) == len(other)
        for each_, other_ in zip(one, other, strict=True):
            assert_equal(each_, other_)
    else:
        assert one == other


@pytest.mark.cases(15)
@pytest.mark.filterwarnings("ignore")
@each("name", CASES)
def test_what_trains_in_the_workers_trains_alike_on_the_device(name):
    wanted, found = (outcome(*CASES[name], place) for place in ("cpu", "gpu"))
    assert_equal(found, wanted)
    assert isinstance(wanted, list) == (name not in REFUSED)


@pytest.mark.filterwarnings("ignore")
@each("collate_fn", [masks_in_lists, halved, from_arrays])
def test_what_a_collate_fn_draws_is_the_same_whether_or_not_it_stacks(collate_fn):
    case = by_name(PHOTOGRAPHS), A.Compose(FLIPS), Drawing(collate_fn)
    wanted, found = (outcome(*case, place) for place in ("cpu", "gpu"))
    assert len(wanted) == 2
    assert_equal(found, wanted)


def test_only_a_collate_fn_of_the_users_keeps_images_from_the_device():
    boxed = Samples(BOXED.__getitem__, len(BOXED))
    batches = batches_of(boxed, BOXES, ListsOf("bboxes", "labels"), "gpu")
    counts = [len(boxes) for batch in batches for boxes in batch["bboxes"]]
    assert sorted(counts) == [0, 0, 0, 1, 1, 1, 2, 2]
    with pytest.warns(FastDataWarning, match="gets finished images"):
        batches_of(boxed, BOXES, in_lists, "gpu")
    with pytest.raises(BatchError, match="no field 'boxes'"):
        batches_of(boxed, BOXES, ListsOf("boxes"), "gpu")


@each("place", ["cpu", "gpu"])
def test_what_a_pipeline_notes_of_its_draws_is_a_list_beside_lists_too(place):
    boxed = Samples(BOXED.__getitem__, len(BOXED))
    batches = batches_of(boxed, NOTED, ListsOf("bboxes", "labels"), place)
    names = [[note["__class_fullname__"] for note in batch["replay"]] for batch in batches]
    assert names == [["ReplayCompose"] * 4] * 2


def test_lists_are_kept_by_the_places_of_fields_in_tuples_too():
    images, labels = ListsOf(1)([(torch.zeros(2), [1]), (torch.ones(2), [])])
    assert images.tolist() == [[0, 0], [1, 1]]
    assert labels == [[1], []]
    with pytest.raises(BatchError, match="no field 2"):
        ListsOf(2)([(torch.zeros(2), [1])])
    with pytest.raises(OptionsError, match=r"field of ListsOf is \['boxes'\]"):
        ListsOf(["boxes"])


def beside(make: Callable[[torch.Tensor], Any]) -> Callable[[list[Any]], dict[str, Any]]:
    """Return a collate_fn that stacks the images, and puts what it makes of them beside."""

    def collate(samples: list[dict[str, Any]]) -> dict[str, Any]:
        images = stacked(samples)
        return {"image": images, "made": make(images)}

    return collate


def halves_in_place(images: torch.Tensor) -> torch.Tensor:
    made = torch.zeros(images.shape)
    made[:2] = images[:2]
    return made.div_(2)


MADE: dict[str, Callable[[torch.Tensor], Any]] = {
    "the same": lambda images: images,
    "a second view": torch.clone,
    "a thumbnail": lambda images: images[:, ::2, ::2],
    "means": lambda images: images.float().mean((1, 2, 3)),
    "a number": lambda images: images[0, 0, 0, 0].item(),
    "an array": lambda images: np.asarray(images)[..., 0].copy(),
    "what is written in place": halves_in_place,
}


@pytest.mark.filterwarnings("ignore")
@each("name", MADE)
def test_what_a_collate_fn_makes_beside_stacked_images_is_made_of_finished_ones(name):
    case = by_name(PHOTOGRAPHS), A.Compose([A.HorizontalFlip(p=1)]), beside(MADE[name])
    wanted, found = (outcome(*case, place) for place in ("cpu", "gpu"))
    assert len(wanted) == 2
    assert_equal(found, wanted)


def written_one_by_one(samples: list[dict[str, Any]]) -> dict[str, Any]:
    images = torch.empty((len(samples), *samples[0]["image"].shape), dtype=torch.uint8)
    for place, sample in zip(images, samples, strict=True):
        place.copy_(torch.as_tensor(sample["image"]))
    return {"image": images, "sizes": [tuple(image.shape) for image in images]}


def joined(samples: list[dict[str, Any]]) -> dict[str, Any]:
    images = torch.cat([torch.as_tensor(sample["image"])[None] for sample in samples])
    return {"image": images.contiguous(), "rows": torch.arange(len(images))}


@pytest.mark.filterwarnings("ignore")
@each("collate_fn", [masks_in_lists, written_one_by_one, joined])
def test_a_collate_fn_that_stacks_images_however_it_does_is_called_once(collate_fn):
    calls = 0

    def counting(samples: list[dict[str, Any]]) -> dict[str, Any]:
        nonlocal calls
        calls += 1
        return collate_fn(samples)

    case = by_name(PHOTOGRAPHS), A.Compose(FLIPS), counting
    found = outcome(*case, "gpu")
    assert calls == len(found) == 2
    assert_equal(found, outcome(*case, "cpu"))


def taking_out(samples: list[dict[str, Any]]) -> dict[str, Any]:
    labels = [sample.pop("label") for sample in samples]
    levels = [sample["notes"].pop("level") for sample in samples]
    return {"image": stacked(samples) / 2, "label": labels, "level": levels}


@pytest.mark.filterwarnings("ignore")
def test_a_collate_fn_may_take_fields_out_of_samples():
    images = enumerate(PHOTOGRAPHS)
    samples = [{"image": i, "label": n, "notes": {"level": n}} for n, i in images]
    fresh = Samples(lambda index: copy.deepcopy(samples[index]), len(samples))
    wanted, found = (batches_of(fresh, A.Compose(FLIPS), taking_out, p) for p in ("cpu", "gpu"))
    assert_equal(found, wanted)


class Loops(Callback):
    """Loops over the loader of a run, first as it is, and then as the error says."""

    told = ""

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        try:
            self.images = [batch["image"] for batch in trainer.train_dataloader]
        except BatchError as error:
            self.told = str(error)
            move = trainer.strategy.batch_to_device
            self.images = [move(batch)["image"] for batch in trainer.train_dataloader]


@each("place", ["gpu", "cpu"])
def test_a_loop_of_ones_own_within_a_run_is_told_how_to_get_the_batches_of_the_steps(place):
    loops = Loops()
    module = FastDataModule.from_datasets(
        by_name(PHOTOGRAPHS),
        batch_size=4,
        num_workers=0,
        shuffle=False,
        augment=A.Compose([A.HorizontalFlip(p=1)]),
        augment_on=place,
    )
    seen = trained(module, callbacks=[loops])
    assert all(map(torch.equal, loops.images, [batch["image"] for batch in seen]))
    assert ("batch = trainer.strategy.batch_to_device(batch)" in loops.told) == (place == "gpu")
