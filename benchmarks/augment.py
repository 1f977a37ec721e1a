"""What an Albumentations pipeline costs a worker, whole and with its pixels left to the device.

    python benchmarks/augment.py [--rounds 7] [--json FILE] [--skip loader]

Three tables, each measured in turn, round by round, after a round that is not counted:

* worker: time of one thread per image to read, augment and collate, with the whole pipeline in the
  worker ("whole"), and with only the draws there ("tape"). Once over JPEG files of about 480 x 375
  px, once over decoded images of 256 x 256 px in a memory map, which are cropped on the device.
  CPU time of the thread. Each in a process of its own: "torch, whole" allocates as torch's workers
  do, the others as ours, which keep what they free.
* peers: images per second of one thread that augments 64 decoded images: Albumentations per sample,
  torchvision v2 per sample and per batch, Kornia eager and compiled, fuse-augmentations. They need
  not draw the same, nor in the same way: torchvision takes one draw for the whole batch.
  triton-augment needs a GPU: it is only named, and in gpu.py.
* loader: images per second of a whole loader with 2 workers, torch's or ours; and when a device
  takes the pixels, here nobody: what the workers deliver at most.
"""

from __future__ import annotations

import os

os.environ.setdefault("NO_ALBUMENTATIONS_UPDATE", "1")

import multiprocessing
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import albumentations as A
import cv2
import numpy as np
import torch
from peers import MEAN, STD, or_reason
from torch.utils.data import Dataset, default_collate
from torchvision.transforms import v2
from turns import arguments, in_turn, ratio, spread, write

from lightning_fastdata.augment.transform import as_batch_transform
from lightning_fastdata.host.allocator import keep_freed_memory
from lightning_fastdata.loading.loader import FastDataLoader
from lightning_fastdata.photos import PHOTOGRAPHS, Cut, cut_photographs, open_photograph
from lightning_fastdata.types import SampleKey

BATCH, SIZE = 64, 224
LAST = [A.Normalize(), A.ToTensorV2()]
JITTER = A.ColorJitter((0.8, 1.2), (0.8, 1.2), (0.8, 1.2), (-0.1, 0.1), p=0.8)
RECIPES = {
    "light": [A.RandomResizedCrop((SIZE, SIZE)), A.HorizontalFlip(), *LAST],
    "imagenet": [A.RandomResizedCrop((SIZE, SIZE)), A.HorizontalFlip(), JITTER, *LAST],
    "kaggle": [
        A.Resize(SIZE, SIZE),
        A.HorizontalFlip(),
        A.VerticalFlip(),
        A.Affine(rotate=(-30, 30), scale=(0.8, 1.2), translate_percent=(-0.1, 0.1), p=0.5),
        A.RandomBrightnessContrast(p=0.5),
        A.HueSaturationValue(p=0.5),
        A.GaussianBlur(p=0.3),
        A.CoarseDropout(p=0.5),
        *LAST,
    ],
}
RECIPES["kaggle, noise"] = [*RECIPES["kaggle"][:-2], A.GaussNoise(p=0.5), *LAST]
TARGETS = {"light, jpeg": 1.3, "imagenet, jpeg": 1.5, "imagenet, decoded": 5.0}
"""Whole over tape, worker time per image."""
WAYS = {
    "torch, whole": {"ours": False, "on_device": False},
    "whole": {"ours": True, "on_device": False},
    "tape": {"ours": True, "on_device": True},
}


class Photographs(Dataset):
    """uint8 RGB images, from JPEG files or from a memory map."""

    def __init__(self, files: list[Path] | None = None, decoded: np.ndarray | None = None) -> None:
        self.files, self.decoded = files, decoded

    def __len__(self) -> int:
        return len(self.files if self.decoded is None else self.decoded)

    def __getitem__(self, index: int) -> dict[str, np.ndarray]:
        if self.decoded is not None:
            return {"image": np.array(self.decoded[index])}
        image = cv2.imread(str(self.files[index]), cv2.IMREAD_COLOR_RGB)
        return {"image": image}


def transform_for(data: Photographs, recipe: list[Any]) -> Any:
    """Return the transform as FastDataModule has it, which looks at eight samples."""
    transform: Any = as_batch_transform(A.Compose(recipe))
    return transform.for_samples(data[i] for i in range(8))


def worker_ms(
    data: Photographs, recipe: list[Any], *, ours: bool, on_device: bool
) -> Callable[[], float]:
    """Return what measures the milliseconds of one thread per image, batches of 64."""
    if ours:
        keep_freed_memory()  # as the loader's workers do
    worker = transform_for(data, recipe).in_worker(on_device=on_device)

    def work() -> float:
        began = time.thread_time()
        for first in range(0, len(data), BATCH):
            pairs = [
                worker(data[i], SampleKey(seed=0, epoch=0, index=i))
                for i in range(first, min(first + BATCH, len(data)))
            ]
            default_collate([sample for sample, _ in pairs])
            if on_device:
                worker.collate([tape for _, tape in pairs])
        return 1e3 * (time.thread_time() - began) / len(data)

    return work


def rate_of(work: Callable[[], Any], images: int) -> Callable[[], float]:
    """Return what measures images per second of wall time."""

    def measure() -> float:
        began = time.perf_counter()
        work()
        return images / (time.perf_counter() - began)

    return measure


class Apart:
    """Has a measurement made in a process of its own."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        context = multiprocessing.get_context("fork")
        self._here, there = context.Pipe()
        self._process = context.Process(target=_serve, args=(there, arguments, options))
        self._process.start()

    def __call__(self) -> float:
        self._here.send(True)
        return float(self._here.recv())

    def close(self) -> None:
        self._here.send(False)
        self._process.join()


def _serve(pipe: Any, arguments: tuple[Any, ...], options: Mapping[str, Any]) -> None:
    measure = worker_ms(*arguments, **options)
    while pipe.recv():
        pipe.send(measure())


def loader_rate(
    data: Photographs, recipe: list[Any], *, ours: bool, on_device: bool
) -> Callable[[], float]:
    loader = FastDataLoader(
        data, BATCH, shuffle=True, num_workers=2, executor="workers" if ours else "torch",
        persistent_workers=True, transform=transform_for(data, recipe), on_device=on_device,
        staged="train",
    )  # fmt: skip

    def epoch() -> None:
        for _ in loader:
            pass

    return rate_of(epoch, len(data))


def per_sample(recipe: list[Any], images: np.ndarray) -> Callable[[], None]:
    compose = A.Compose(recipe)
    return lambda: default_collate([compose(image=image)["image"] for image in images])


def torchvision_steps() -> list[Any]:
    return [
        v2.RandomResizedCrop(SIZE, antialias=True),
        v2.RandomHorizontalFlip(),
        v2.RandomApply([v2.ColorJitter(0.2, 0.2, 0.2, 0.1)], 0.8),
    ]


def torchvision_last() -> list[Any]:
    mean, std = (MEAN / 255).tolist(), (STD / 255).tolist()
    return [v2.ToDtype(torch.float32, scale=True), v2.Normalize(mean, std)]


@or_reason
def kornia(batch: torch.Tensor, *, compiled: bool) -> Callable[[], Any]:
    import kornia.augmentation as K

    mean, std = torch.tensor(MEAN / 255), torch.tensor(STD / 255)
    augment: Any = K.AugmentationSequential(
        K.RandomResizedCrop((SIZE, SIZE)),
        K.RandomHorizontalFlip(),
        K.ColorJiggle(0.2, 0.2, 0.2, 0.1, p=0.8),
        K.Normalize(mean, std),
        data_keys=["input"],
    )
    augment = torch.compile(augment) if compiled else augment
    augment(batch.float() / 255)
    return lambda: augment(batch.float() / 255)


@or_reason
def fuse_augmentations(batch: torch.Tensor) -> Callable[[], Any]:
    from fuse_augmentations import Compose, ReorderPolicy

    augment = Compose([*torchvision_steps(), *torchvision_last()[1:]], reorder=ReorderPolicy.NONE)
    augment(batch.float() / 255)
    return lambda: augment(batch.float() / 255)


def peers_rates(decoded: np.ndarray) -> Mapping[str, Any]:
    """Return who augments 64 images of the ImageNet recipe, or why they cannot."""
    images = decoded[:BATCH]
    batch = torch.from_numpy(images).permute(0, 3, 1, 2).contiguous()
    first, last = v2.Compose(torchvision_steps()), v2.Compose(torchvision_last())
    return {
        "Albumentations, per sample": per_sample(RECIPES["imagenet"], images),
        "torchvision v2, per sample": lambda: torch.stack([last(first(one)) for one in batch]),
        "torchvision v2, one draw a batch": lambda: last(first(batch)),
        "Kornia": kornia(batch, compiled=False),
        "Kornia, compiled": kornia(batch, compiled=True),
        "fuse-augmentations": fuse_augmentations(batch),
        "triton-augment": "needs a CUDA device",
    }


def decoded_photographs(folder: Path, count: int) -> np.ndarray:
    """Return a memory map of photographs, 256 x 256 px."""
    whole = [np.asarray(open_photograph(name).convert("RGB")) for name in PHOTOGRAPHS]
    images = np.lib.format.open_memmap(
        folder / "decoded.npy", mode="w+", dtype=np.uint8, shape=(count, 256, 256, 3)
    )
    for i in range(count):
        images[i] = cv2.resize(whole[i % len(whole)], (256, 256), interpolation=cv2.INTER_AREA)
    return images


def main() -> None:
    parser = arguments(__doc__.splitlines()[0], rounds=7)
    parser.add_argument("--images", type=int, default=512, help="images in a round")
    parser.add_argument("--skip", default="", help="tables to leave out: worker,peers,loader")
    options = parser.parse_args()
    skipped = set(options.skip.split(","))
    torch.set_num_threads(1)
    cv2.setNumThreads(0)
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        per_class = -(-options.images // len(PHOTOGRAPHS))
        cut_photographs(folder / "photos", Cut(train_per_class=per_class, val_per_class=1))
        files = sorted((folder / "photos").rglob("train/**/*.jpg"))[: options.images]
        decoded = decoded_photographs(folder, options.images)
        sources = {"jpeg": Photographs(files=files), "decoded": Photographs(decoded=decoded)}
        if "worker" not in skipped:
            found["worker"] = worker_table(sources, options.rounds)
        if "loader" not in skipped:
            found["loader"] = loader_table(sources, options.rounds)
        if "peers" not in skipped:
            found["peers"] = peers_table(decoded, options.rounds)
    write(options.json, "augment", found)


def worker_table(sources: Mapping[str, Photographs], rounds: int) -> dict[str, Any]:
    print("\n| recipe, data, ms an image | torch, whole | whole | tape | torch | whole | target |")
    print("|---|---|---|---|---:|---:|---:|")
    return {
        title: turn(title, Apart, data, recipe, rounds, costs=True)
        for title, data, recipe in cases(sources)
    }


def loader_table(sources: Mapping[str, Photographs], rounds: int) -> dict[str, Any]:
    print("\n| recipe, data, images/s | torch, whole | whole | tape | of torch's | of whole |")
    print("|---|---|---|---|---:|---:|")
    return {
        title: turn(title, loader_rate, data, recipe, rounds, costs=False)
        for title, data, recipe in cases(sources)
    }


def cases(sources: Mapping[str, Photographs]) -> list[tuple[str, Photographs, list[Any]]]:
    return [
        (f"{name}, {source}", data, recipe)
        for source, data in sources.items()
        for name, recipe in RECIPES.items()
    ]


def turn(
    title: str,
    measure: Any,
    data: Photographs,
    recipe: list[Any],
    rounds: int,
    *,
    costs: bool,
) -> dict[str, Any]:
    """Measure the three ways in turn; the gains are those of the tape over the other two."""
    contenders = {name: measure(data, recipe, **way) for name, way in WAYS.items()}
    values = in_turn(contenders, rounds=rounds)
    for contender in contenders.values():
        if isinstance(contender, Apart):
            contender.close()
    gains = {}
    for name in ("torch, whole", "whole"):
        pair = (values[name], values["tape"]) if costs else (values["tape"], values[name])
        gains[name] = ratio(*pair)
    cells = [*map(spread, values.values()), *(f"{gain:.2f}" for gain in gains.values())]
    cells += [str(TARGETS.get(title, ""))] if costs else []
    print(f"| {title} | {' | '.join(cells)} |", flush=True)
    return {**values, "gains": gains}


def peers_table(decoded: np.ndarray, rounds: int) -> dict[str, Any]:
    ways = peers_rates(decoded)
    able = {name: rate_of(way, BATCH) for name, way in ways.items() if callable(way)}
    values = in_turn(able, rounds=rounds)
    base = next(iter(able))
    print("\n| one thread, ImageNet recipe | images/s | of Albumentations |")
    print("|---|---|---:|")
    for name, way in ways.items():
        if name in able:
            share = ratio(values[name], values[base])
            print(f"| {name} | {spread(values[name])} | {share:.2f} |")
        else:
            print(f"| {name} | {way} | |")
    return {**values, **{name: str(way) for name, way in ways.items() if name not in able}}


if __name__ == "__main__":
    main()
