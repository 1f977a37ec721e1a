"""What a pipeline costs a worker, whole and with its pixels left to the device.

    python benchmarks/augment.py [--rounds 7] [--json FILE] [--skip loader] [--publish]

Four tables, each measured in turn, round by round, after a round that is not counted:

* worker: CPU time of 2 workers per image, to read, augment, collate and hand over, with the whole
  pipeline in the worker ("whole"), and with only the draws there ("tape"). Once over JPEG files of
  about 480 x 375 px, once over decoded images of 256 x 256 px in a memory map, which are cropped on
  the device. "torch, whole" are torch's workers, the others ours.
* loader: images per second in the same epochs; with the tape a device would take the pixels, here
  nobody does: what the workers deliver at most.
* peers: images per second of one thread that augments 64 decoded images: Albumentations per sample,
  torchvision v2 per sample and per batch, Kornia eager and compiled, fuse-augmentations. They need
  not draw the same, nor in the same way: torchvision takes one draw for the whole batch.
  triton-augment needs a GPU: it is only named, and in gpu.py.
* v2: images per second with two workers over decoded images, for torchvision v2 pipelines: in the
  dataset with torch's workers, as ``augment=`` in ours, and with only the draws there.
  ``--publish`` writes this table into the documentation.
"""

from __future__ import annotations

import os

os.environ.setdefault("NO_ALBUMENTATIONS_UPDATE", "1")

import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import albumentations as A
import cv2
import numpy as np
import psutil
import torch
from peers import MEAN, STD, or_reason
from torch.utils.data import Dataset, default_collate
from torchvision import tv_tensors
from torchvision.transforms import v2
from turns import arguments, in_turn, ratio, spread, write
from v2_pipelines import PIPELINES

from demo.photos import PHOTOGRAPHS, Cut, cut_photographs, open_photograph
from lightning_fastdata.augment.transform import as_batch_transform
from lightning_fastdata.loading.loader import FastDataLoader

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
V2 = ("classification, train", "classification, RandAugment", "SimCLR")
V2_WAYS = ("eager, torch's workers", "augment=, in the workers", "augment=, draws alone")
PAGE = Path(__file__).resolve().parents[1] / "docs/comparison.md"
BEGIN, END = "<!-- v2 speed -->", "<!-- /v2 speed -->"
TARGETS = {"light, jpeg": 1.3, "imagenet, jpeg": 1.5, "imagenet, decoded": 5.0}
"""Whole over tape, CPU time of the workers per image."""
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


def rate_of(work: Callable[[], Any], images: int) -> Callable[[], float]:
    """Return what measures images per second of wall time."""

    def measure() -> float:
        began = time.perf_counter()
        work()
        return images / (time.perf_counter() - began)

    return measure


class Epochs:
    """Runs epochs of a loader; in between its workers wait."""

    def __init__(
        self, data: Photographs, recipe: list[Any], *, ours: bool, on_device: bool
    ) -> None:
        self._loader = FastDataLoader(
            data, BATCH, shuffle=True, num_workers=2, executor="workers" if ours else "torch",
            persistent_workers=True, transform=transform_for(data, recipe), on_device=on_device,
            staged="train",
        )  # fmt: skip
        others = set(psutil.Process().children())
        self._epoch()
        self._workers = set(psutil.Process().children()) - others
        self.worker_ms: list[float] = []

    def __call__(self) -> float:
        """Return the images per second, and note the workers' CPU time per image."""
        images = len(self._loader.dataset)
        before_ms = self._cpu_ms()
        rate = rate_of(self._epoch, images)()
        self.worker_ms.append((self._cpu_ms() - before_ms) / images)
        return rate

    def _epoch(self) -> None:
        for _ in self._loader:
            pass

    def _cpu_ms(self) -> float:
        # The kernel's own account in ns; that of psutil is in ticks of 10 ms.
        threads = [
            t for worker in self._workers for t in Path(f"/proc/{worker.pid}/task").iterdir()
        ]
        return sum(int((t / "schedstat").read_text().split()[0]) for t in threads) / 1e6


class Views(Photographs):
    """The same as torchvision has them: images ``[3, H, W]``, through a pipeline or as they are."""

    def __init__(self, decoded: np.ndarray, pipeline: Any = None) -> None:
        super().__init__(decoded=decoded)
        self.pipeline = pipeline

    def __getitem__(self, index: int) -> tuple[Any, int]:
        image = torch.from_numpy(np.array(self.decoded[index])).permute(2, 0, 1).contiguous()
        given = tv_tensors.Image(image)
        return (given if self.pipeline is None else self.pipeline(given)), index


def epochs_of(data: Views, pipeline: Any = None, *, on_device: bool = False) -> Callable[[], Any]:
    """Return what runs an epoch in two workers: torch's, if there is no ``augment=``."""
    ours = pipeline is not None
    transform: Any = as_batch_transform(pipeline) if ours else None
    loader = FastDataLoader(
        data, BATCH, shuffle=True, num_workers=2, executor="workers" if ours else "torch",
        persistent_workers=True, on_device=on_device, staged="train" if on_device else None,
        transform=transform and transform.for_samples(data[i] for i in range(8)),
    )  # fmt: skip
    list(loader)
    return lambda: sum(1 for _ in loader)


def v2_table(decoded: np.ndarray, rounds: int) -> dict[str, dict[str, Any]]:
    """Measure torchvision v2 with two workers; print images per second."""
    found: dict[str, dict[str, Any]] = {}
    for name in V2:
        pipeline = PIPELINES[name].build(255.0)
        epochs = (
            epochs_of(Views(decoded, pipeline)),
            epochs_of(Views(decoded), pipeline),
            epochs_of(Views(decoded), pipeline, on_device=True),
        )
        ways = zip(V2_WAYS, epochs, strict=True)
        found[name] = in_turn({way: rate_of(e, len(decoded)) for way, e in ways}, rounds=rounds)
    print("\n" + "\n".join(v2_lines(found)))
    return found


def v2_lines(found: Mapping[str, Mapping[str, list[float]]]) -> list[str]:
    """Return the table of torchvision v2."""
    lines = [f"| images/s, two workers | {' | '.join(V2_WAYS)} |", "|---|---:|---:|---:|"]
    for title, rates in found.items():
        lines.append(f"| {title} | {' | '.join(map(spread, rates.values()))} |")
    return lines


def publish_v2(found: Mapping[str, Any], page: Path = PAGE) -> None:
    """Write the table into a page of the documentation."""
    before, rest = page.read_text().split(BEGIN)
    lines = "\n".join(v2_lines(found))
    page.write_text(f"{before}{BEGIN}\n{lines}\n{END}{rest.split(END)[1]}")


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
    parser.add_argument("--images", type=int, default=1024, help="images in a round")
    parser.add_argument("--skip", default="", help="tables to leave out: loader,peers,v2")
    parser.add_argument("--publish", action="store_true", help=f"write the table v2 to {PAGE.name}")
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
        if "loader" not in skipped:
            found["loader"] = loader_tables(sources, options.rounds)
        if "peers" not in skipped:
            found["peers"] = peers_table(decoded, options.rounds)
        if "v2" not in skipped:
            found["v2"] = v2_table(decoded, options.rounds)
            if options.publish:
                publish_v2(found["v2"])
    write(options.json, "augment", found)


def loader_tables(sources: Mapping[str, Photographs], rounds: int) -> dict[str, Any]:
    found = {
        f"{name}, {source}": turn(data, recipe, rounds)
        for source, data in sources.items()
        for name, recipe in RECIPES.items()
    }
    print("\n| recipe, data, ms an image | torch, whole | whole | tape | torch | whole | target |")
    print("|---|---|---|---|---:|---:|---:|")
    for title, turns in found.items():
        print(row(title, turns["worker_ms"], costs=True), TARGETS.get(title, ""), "|")
    print("\n| recipe, data, images/s | torch, whole | whole | tape | of torch's | of whole |")
    print("|---|---|---|---|---:|---:|")
    for title, turns in found.items():
        print(row(title, turns["images_per_s"], costs=False))
    return found


def turn(data: Photographs, recipe: list[Any], rounds: int) -> dict[str, dict[str, list[float]]]:
    """Run epochs of the three ways in turn."""
    loaders = {name: Epochs(data, recipe, **way) for name, way in WAYS.items()}
    rates = in_turn(loaders, rounds=rounds)
    costs = {name: loader.worker_ms[-rounds:] for name, loader in loaders.items()}
    return {"images_per_s": rates, "worker_ms": costs}


def row(title: str, values: Mapping[str, list[float]], *, costs: bool) -> str:
    """Return a row with the gains of the tape over the other two ways."""
    gains = [
        ratio(values[way], values["tape"]) if costs else ratio(values["tape"], values[way])
        for way in ("torch, whole", "whole")
    ]
    cells = [*map(spread, values.values()), *(f"{gain:.2f}" for gain in gains)]
    return f"| {title} | {' | '.join(cells)} |"


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
