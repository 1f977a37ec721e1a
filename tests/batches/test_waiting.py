"""What a collate_fn makes of images that wait for the device is made of finished ones.

The oracle is the same collate_fn on samples that the workers have finished.
"""

from __future__ import annotations

import copy
import functools
import pickle
import random
import warnings
from collections import namedtuple
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import albumentations as A
import numpy as np
import pytest
import torch
from misses import each
from skimage import data
from torch.utils.data import default_collate
from torchvision import tv_tensors
from torchvision.transforms import v2

from lightning_fastdata import as_batch_transform, tree
from lightning_fastdata.batches import staged
from lightning_fastdata.batches.staged import FirstOfPairs, StagedBatch, StagingCollate
from lightning_fastdata.errors import FastDataWarning
from lightning_fastdata.torch_internals import set_worker_info
from lightning_fastdata.types import SampleKey

torch.set_num_threads(1)

PHOTOGRAPH = np.ascontiguousarray(data.astronaut()[100:140, 200:248])
PHOTOGRAPHS = [np.roll(PHOTOGRAPH, 5 * number, 1) for number in range(4)]
MASKS = [(image[..., 0] // 50).astype(np.uint8) for image in PHOTOGRAPHS]
Samples = list[dict[str, Any]]
T = torch.as_tensor


def of_arrays(number: int) -> dict[str, Any]:
    return {"image": PHOTOGRAPHS[number].copy(), "mask": MASKS[number].copy(), **beside(number)}


def of_tensors(number: int) -> dict[str, Any]:
    image = torch.from_numpy(PHOTOGRAPHS[number].copy()).permute(2, 0, 1)
    mask = torch.from_numpy(MASKS[number].copy())
    return {"image": tv_tensors.Image(image), "mask": tv_tensors.Mask(mask), **beside(number)}


def beside(number: int) -> dict[str, Any]:
    known = {"size": torch.ones(2) * number, "anns": [{"id": number, "seg": [1]}]}
    return {"label": number, "t": {**known, "array": np.ones(3) * number}}


FINISHED = [A.Normalize(), A.ToTensorV2()]
KINDS: dict[str, tuple[Any, Callable[[int], dict[str, Any]]]] = {
    "Albumentations": (
        A.Compose([A.RandomCrop(32, 32), A.HorizontalFlip(), A.VerticalFlip(), *FINISHED]),
        of_arrays,
    ),
    "Albumentations, arrays": (A.Compose([A.HorizontalFlip(), A.VerticalFlip()]), of_arrays),
    "torchvision": (
        v2.Compose(
            [
                v2.RandomCrop(32),
                v2.RandomHorizontalFlip(),
                v2.RandomVerticalFlip(),
                v2.ToDtype({tv_tensors.Image: torch.float32, "others": None}, scale=True),
                v2.Normalize([0.5] * 3, [0.2] * 3),
            ]
        ),
        of_tensors,
    ),
}


@functools.cache
def workers(kind: str) -> tuple[Any, Any, Any]:
    """Return a transform, what computes all of it in a worker, and what leaves some of it."""
    augment, sample = KINDS[kind]
    # Images of one size, as the pipeline may leave a crop to the device only then.
    transform = as_batch_transform(augment).for_samples([sample(0), sample(1)])
    return transform, transform.in_worker(on_device=False), transform.in_worker(on_device=True)


def made(
    kind: str, collate_fn: Callable[[Samples], Any], *, rounds: int = 2
) -> tuple[list[Any], list[Any], list[StagedBatch]]:
    """Return some batches as workers make them alone, as a device completes them, and staged."""
    sample = KINDS[kind][1]
    transform, whole, part = workers(kind)
    wanted, found, on_the_way = [], [], []
    alone = FirstOfPairs(copy.deepcopy(collate_fn), whole, single=False)
    both = StagingCollate(copy.deepcopy(collate_fn), part, "train")
    for n in range(rounds):
        keys = [SampleKey(3, n, index) for index in range(4)]
        pairs = [whole(sample(key.index), key) for key in keys]
        wanted.append(drawing(alone, pairs))
        pairs = [part(sample(key.index), key) for key in keys]
        on_the_way.append(drawing(both, pairs))
        batch, draws = on_the_way[-1].batch, on_the_way[-1].draws
        found.append(batch if batch is None else transform.apply(batch, draws))
    return wanted, found, on_the_way


def drawing(collate: Callable[[Any], Any], pairs: list[Any]) -> Any:
    random.seed(1)
    np.random.seed(1)
    torch.manual_seed(1)
    return collate(pairs)


def assert_alike(one: Any, other: Any) -> None:
    assert type(one) is type(other)
    if isinstance(one, torch.Tensor):
        assert (one.dtype, one.layout) == (other.dtype, other.layout)
        one, other = one.to_dense(), other.to_dense()
        torch.testing.assert_close(one, other, rtol=0, atol=1e-5)
    elif isinstance(one, np.ndarray):
        np.testing.assert_allclose(one, other, atol=1e-5)
    elif isinstance(one, dict):
        assert one.keys() == other.keys()
        assert_alike(list(one.values()), list(other.values()))
    elif isinstance(one, list | tuple):
        assert len(one) == len(other)
        for part, part_ in zip(one, other, strict=True):
            assert_alike(part, part_)
    elif hasattr(one, "__dict__"):
        assert_alike(vars(one), vars(other))
    else:
        assert one == (pytest.approx(other, abs=1e-5) if isinstance(one, float) else other)


def stacks(samples: Samples) -> dict[str, Any]:
    images, masks = ([T(sample[name]) for sample in samples] for name in ("image", "mask"))
    return {
        "image": torch.stack(images),
        "mask": torch.stack(masks),
        "label": T([sample["label"] for sample in samples]),
    }


Named = namedtuple("Named", "image mask names")


@dataclass
class Fields:
    image: torch.Tensor
    mask: torch.Tensor
    label: torch.Tensor


class Meta:
    def __init__(self, value: Any) -> None:
        self.value = value


def named(samples: Samples) -> Any:
    batch = stacks(samples)
    return Named(batch["image"], batch["mask"], [str(sample["label"]) for sample in samples])


def targets_in_lists(samples: Samples) -> Any:
    for sample in samples:
        sample["t"]["array"] += 1
        sample["t"]["size"] /= 4
        sample["t"]["anns"].append(sample["t"]["anns"].pop()["id"])
    return {**stacks(samples), "t": [sample["t"] for sample in samples]}


def in_memory_of_its_own(samples: Samples) -> Any:
    images = [T(sample["image"]) for sample in samples]
    return {**stacks_masks(samples), "image": torch.stack(images, out=torch.empty(0).to(images[0]))}


def stacks_masks(samples: Samples) -> dict[str, Any]:
    return {"mask": torch.stack([T(sample["mask"]) for sample in samples])}


def torchs_own(samples: Samples) -> Any:
    return default_collate([{k: v for k, v in one.items() if k != "t"} for one in samples])


def collated_twice(samples: Samples) -> Any:
    images = [T(sample["image"]) for sample in samples]
    return {**torchs_own(samples), "again": default_collate(images), "too": default_collate(images)}


STACKS: dict[str, Callable[[Samples], Any]] = {
    "torch.stack": stacks,
    "default_collate": torchs_own,
    "a named tuple": lambda samples: named(samples)._asdict(),
    "targets written to": targets_in_lists,
}


@each("kind", ["Albumentations", "torchvision"])
@each("name", STACKS)
def test_images_that_are_only_stacked_are_left_to_the_device(kind, name):
    wanted, found, on_the_way = made(kind, STACKS[name])
    assert_alike(found, wanted)
    assert all(one.draws is not None and one.draws.programs for one in on_the_way)


@pytest.mark.filterwarnings("ignore")
@each("whole", [True, False])
def test_torchs_collation_into_shared_memory_counts_as_stacking_of_all_samples_alone(whole):
    from torch.utils.data._utils import worker

    set_worker_info(number=0, workers=1, seed=0, dataset=[])
    try:
        collate = torchs_own if whole else lambda samples: torchs_own(samples[1:])
        wanted, found, on_the_way = made("Albumentations", collate)
    finally:
        worker._worker_info = None
    assert_alike(found, wanted)
    assert all((one.draws is not None and bool(one.draws.programs)) == whole for one in on_the_way)


@torch.jit.script
def scripted(images: torch.Tensor) -> torch.Tensor:
    return images.float().mean()


class Counting:
    def __init__(self) -> None:
        self.calls, self.before = 0, torch.zeros(())

    def __call__(self, samples: Samples) -> Any:
        self.calls += 1
        images = torch.stack([T(sample["image"]) for sample in samples])
        before, self.before = self.before, images.clone()
        return {"image": images, "calls": self.calls, "before": before}


class Keeping:
    """Keeps some of each batch, and looks at it in the next one."""

    def __init__(self, kept: Callable[[Samples, dict[str, Any]], Any]) -> None:
        self.kept, self.before = kept, list[Any]()

    def __call__(self, samples: Samples) -> Any:
        before, batch = self.before, stacks(samples)
        self.before = [self.kept(samples, batch)]
        tensors = (one for one in tree.leaves(before) if isinstance(one, torch.Tensor))
        return {**batch, "before": [float(one.double().mean()) for one in tensors]}


KEPT: dict[str, Callable[[Samples, dict[str, Any]], Any]] = {
    "images": lambda samples, batch: batch["image"],
    "an image": lambda samples, batch: samples[1]["image"],
    "samples": lambda samples, batch: samples,
    "a sample": lambda samples, batch: samples[0],
    "a batch": lambda samples, batch: batch,
}


def padded(samples: Samples) -> Any:
    images = [T(sample["image"]) for sample in samples]
    page = images[0].new_zeros(len(images), *images[0].shape[:-1], 50)
    padding = torch.ones(len(images), 50, dtype=torch.bool)
    for at, image in enumerate(images):
        page[at, ..., : image.shape[-1]].copy_(image)
        padding[at, : image.shape[-1]] = False
    return page, padding


def converted(samples: Samples) -> Any:
    images = [sample["image"] for sample in samples]
    arrays = isinstance(images[0], np.ndarray)
    images = [torch.from_numpy(one).permute(2, 0, 1) / 255 for one in images] if arrays else images
    return {"image": torch.stack(images), "kind": type(samples[0]["image"]).__name__}


def last_first(samples: Samples) -> Any:
    samples.sort(key=lambda sample: -sample["label"])
    return stacks(samples)


def one_left_out(samples: Samples) -> Any:
    return stacks([sample for sample in samples if sample["label"] != 2])


def drawn(samples: Samples) -> Any:
    numbers = random.random(), float(np.random.rand()), torch.rand(2)
    return {"image": [T(sample["image"]) for sample in samples], "drawn": numbers}


def popped(samples: Samples) -> Any:
    images = []
    while samples:
        images.append(T(samples.pop()["image"]))
    return {"image": images}


def on_the_same_pixels(samples: Samples) -> Any:
    bare = [T(sample["image"]).as_subclass(torch.Tensor) for sample in samples]
    batch = stacks(samples)
    return {**batch, "mean": batch["image"].float().mean(), "bare": bare}


def with_extra(make: Callable[[torch.Tensor, torch.Tensor], Any]) -> Callable[[Samples], Any]:
    def collate(samples: Samples) -> Any:
        batch = stacks(samples)
        masks = [T(sample["mask"]) for sample in samples]
        return {**batch, "of stacks": make(batch["image"], batch["mask"]), "of one": one(masks)}

    def one(masks: list[torch.Tensor]) -> Any:
        return [make(mask, mask) for mask in masks]

    return collate


EXTRA: dict[str, Callable[[torch.Tensor, torch.Tensor], Any]] = {
    "the same": lambda image, mask: image,
    "a copy": lambda image, mask: copy.deepcopy(image),
    "nonzero": lambda image, mask: mask.nonzero().shape[0],
    "indexed": lambda image, mask: len(mask[mask == 1]),
    "unique": lambda image, mask: len(image.unique()),
    "in": lambda image, mask: 1 in mask,
    "format": lambda image, mask: f"{mask.float().mean():.3f}",
    "str": lambda image, mask: str(mask.float().mean()),
    "equal": lambda image, mask: torch.equal(image, image.flip(-1)),
    "allclose": lambda image, mask: torch.allclose(image.float(), torch.zeros(()), atol=2.0),
    "pickle": lambda image, mask: pickle.loads(pickle.dumps(image)),
    "scripted": lambda image, mask: scripted(image),
    "aten": lambda image, mask: torch.ops.aten.amax(image, [1]),
    "of a class": lambda image, mask: Meta(image.float().mean()),
    "in a class": lambda image, mask: Meta(image),
    "in a set": lambda image, mask: {float(mask.float().mean())},
    "sparse": lambda image, mask: mask.float().to_sparse(),
    "nested": lambda image, mask: torch.nested.nested_tensor([mask.float()]).to_padded_tensor(0),
    "storage": lambda image, mask: mask.contiguous().untyped_storage()[500],
    "item": lambda image, mask: image.flatten()[0].item(),
    "array": lambda image, mask: np.asarray(image).copy(),
    "object array": lambda image, mask: np.array([image, None], dtype=object).tolist(),
    "shape": lambda image, mask: torch.ones(image.shape, dtype=torch.bool),
    "size": lambda image, mask: image.size(-1),
    "dtype": lambda image, mask: torch.zeros(2, dtype=image.dtype),
    "floating": lambda image, mask: 1.0 if image.is_floating_point() else 255.0,
    "form": lambda image, mask: (image.numel(), image.ndim, image.nbytes, str(image.dtype)),
    "out": lambda image, mask: torch.mean(image.float(), 0, out=torch.empty(0)),
    "data": lambda image, mask: torch.nn.Parameter(image.float(), requires_grad=False).data,
    "vmap": lambda image, mask: torch.vmap(lambda one: one.float().mean())(image),
    "where": lambda image, mask: torch.bincount(torch.where(mask == 4)[0]),
    "float": lambda image, mask: image.float(),
    "view": lambda image, mask: image[::2],
    "channels last": lambda image, mask: image.contiguous(),
    "bare": lambda image, mask: image.as_subclass(torch.Tensor).float().mean(),
}
PROGRAMS: dict[str, Callable[[Samples], Any]] = {
    **{f"extra: {name}": with_extra(make) for name, make in EXTRA.items()},
    **{f"kept: {name}": Keeping(kept) for name, kept in KEPT.items()},
    "in lists": lambda samples: tuple(
        zip(*[(s["image"], s["label"]) for s in samples], strict=True)
    ),
    "samples": lambda samples: [{"image": T(s["image"])} for s in samples],
    "stacked into memory": in_memory_of_its_own,
    "collated in another order": lambda samples: torchs_own(samples[::-1]),
    "some collated": lambda samples: torchs_own(samples[:1]),
    "collated twice each": lambda samples: torchs_own([s for s in samples for _ in range(2)]),
    "collated twice": collated_twice,
    "a batch collated": lambda samples: default_collate([torchs_own(samples)]),
    "called once": Counting(),
    "DETR": padded,
    "if it is an array": converted,
    "sorted": last_first,
    "one left out": one_left_out,
    "popped": popped,
    "drawing": drawn,
    "none": lambda samples: None,
    "subclasses": on_the_same_pixels,
    "joined": lambda samples: torch.cat([T(s["image"])[None] for s in samples]),
    "renamed": lambda samples: {"pixels": torch.stack([T(s["image"]) for s in samples])},
    "stacked behind": lambda samples: torch.stack([T(s["image"]) for s in samples], -1),
    "a dataclass": lambda samples: Fields(**stacks(samples)),
    "masks long": lambda samples: {**stacks(samples), "mask": stacks(samples)["mask"].long()},
    "targets in lists": lambda samples: (
        [s["image"] for s in samples],
        targets_in_lists(samples)["t"],
    ),
}


@pytest.mark.filterwarnings("ignore")
@each("kind", KINDS)
@each("name", PROGRAMS)
def test_whatever_a_collate_fn_does_with_images_it_does_with_finished_ones(kind, name):
    wanted, found, _ = made(kind, PROGRAMS[name])
    assert_alike(found, wanted)


def test_a_collate_fn_that_looks_at_images_is_called_once_a_batch_and_told_of_once():
    calls = []

    def looking(samples: Samples) -> Any:
        calls.append(len(samples))
        return {**stacks(samples), "height": samples[0]["image"].shape[-2]}

    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always", FastDataWarning)
        _, _, on_the_way = made("torchvision", looking, rounds=3)
    assert len(calls) == 6  # three of them are the oracle's
    assert not any(one.draws is not None and one.draws.programs for one in on_the_way)
    assert [str(one.message) for one in told] == [staged._FINISHED_HERE]
