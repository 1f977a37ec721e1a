"""What a cache of samples costs and gains: torch, ours without one, and ours with one.

    python benchmarks/cache.py [--rounds 3] [--count 1500] [--json FILE]

A folder of photographs of about 480 x 375 px as JPEG, shuffled batches of 64, two workers wherever
a loader has some; a training is three epochs of ``FastDataModule(cache=folder)`` or of torch's
DataLoader with persistent workers. "fixed": Resize(256), CenterCrop(224), so that samples are kept
as they are. "random": Resize(256), RandomCrop(224), RandomHorizontalFlip, of which what the first
step makes is kept, and the others are the transform of the cache. "crops": random crops of 224 px,
mirrored or not, by torchvision from PIL's pictures, and by FastImageFolder from the files or from
pictures that ``cache_images`` keeps: whole, or with a shorter side of 256 px (which are other
pixels); these are there already in the first epoch. Images per second of the first epoch (which
fills the cache of a new folder, starting workers included), of the third, and of the third epoch of
a second training with the same cache.
"gathered" is a ColumnDataset over a memory map of the same numbers; LitData reads chunks that it
has written of the same tensors. Every batch is held against torch's, where there is an order.
"""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from collections.abc import Callable
from multiprocessing import get_context, set_start_method
from pathlib import Path

os.environ.setdefault("NO_ALBUMENTATIONS_UPDATE", "1")

import cv2
import numpy as np
import torch
import torchvision.transforms as T
import turns
from torch.utils.data import DataLoader
from torchvision.datasets import ImageFolder

from demo.photos import PHOTOGRAPHS, Cut, cut_photographs
from lightning_fastdata import CachedDataset, FastDataModule, FastImageFolder, LoaderOptions
from lightning_fastdata.data import ColumnDataset, cache_images

BATCH, WORKERS, EPOCHS = 64, 2, 3
STEPS = {
    "fixed": [T.Resize(256), T.CenterCrop(224), T.PILToTensor()],
    "random": [T.Resize(256), T.RandomCrop(224), T.RandomHorizontalFlip(), T.PILToTensor()],
    "crops": [T.RandomResizedCrop(224), T.RandomHorizontalFlip(), T.PILToTensor()],
}


def rates(loader) -> list[float]:
    """Images per second of each epoch; the first with the start of the workers."""
    found = []
    for _ in range(EPOCHS):
        began, count = time.perf_counter(), 0
        for images, _targets in loader:
            count += len(images)
        found.append(count / (time.perf_counter() - began))
    return found


class OfPicture:
    """Transforms the first part of a sample."""

    def __init__(self, transform) -> None:
        self.transform = transform

    def __call__(self, sample):
        return self.transform(sample[0]), sample[1]


def torchs(data) -> list[float]:
    return rates(
        DataLoader(data, BATCH, shuffle=True, num_workers=WORKERS, persistent_workers=True)
    )


def ours(data, cache=None, workers: int | str = WORKERS) -> list[float]:
    options = LoaderOptions(num_workers=workers)
    if cache is not None and isinstance(data, ImageFolder):
        steps = data.transform.transforms
        if steps == STEPS["random"]:
            fixed, drawn = ImageFolder(data.root, steps[0]), OfPicture(T.Compose(steps[1:]))
            data, cache = CachedDataset(fixed, cache, transform=drawn), None
    module = FastDataModule.from_datasets(data, batch_size=BATCH, options=options, cache=cache)
    return rates(module.train_dataloader())


def whole(data, folder: Path) -> Callable[[], ColumnDataset]:
    """What opens all samples, made once, as a memory map."""
    folder.mkdir()
    images = np.lib.format.open_memmap(
        folder / "x.npy", mode="w+", dtype=np.uint8, shape=(len(data), 3, 224, 224)
    )
    for number, (image, _) in enumerate(data):
        images[number] = image.numpy()
    images.flush()
    targets = np.array(data.targets)
    return lambda: ColumnDataset((np.load(folder / "x.npy", mmap_mode="r"), targets))


def litdata(data, folder: Path):
    """A training with LitData's own chunks; the reason where there is none."""
    try:
        import litdata as lit
    except ImportError:
        return "not installed"
    os.environ["DATA_OPTIMIZER_CACHE_FOLDER"] = str(folder / "work")
    os.environ["DATA_OPTIMIZER_DATA_CACHE_FOLDER"] = str(folder / "data")
    process = get_context("fork").Process(target=_write_chunks, args=(data, folder / "chunks"))
    process.start()  # apart, because it changes how the processes of a program start
    process.join()
    chunks = lit.StreamingDataset(str(folder / "chunks"), shuffle=True)
    loader = lit.StreamingDataLoader(
        chunks, batch_size=BATCH, num_workers=WORKERS, persistent_workers=True
    )
    return lambda: rates(loader)


def _write_chunks(data, folder: Path) -> None:
    import litdata as lit

    lit.optimize(
        _Sample(data),
        list(range(len(data))),
        output_dir=str(folder),
        chunk_bytes="64MB",
        num_workers=1,
        verbose=False,
    )


class _Sample:
    def __init__(self, data) -> None:
        self.data = data

    def __call__(self, index: int):
        return self.data[index]


def same_content(data, cache: Path) -> None:
    """Hold every sample with a cache against the dataset's, twice."""
    module = FastDataModule.from_datasets(None, data, batch_size=BATCH, cache=cache)
    for _ in range(2):
        theirs = DataLoader(data, BATCH)
        for ours_, torchs_ in zip(module.val_dataloader(), theirs, strict=True):
            assert all(torch.equal(a, b) for a, b in zip(ours_, torchs_, strict=True))


def folders(root: Path, scratch: Path) -> dict[str, FastImageFolder]:
    """FastImageFolder from the files and from what is kept, made anew with each call."""

    def folder(**options) -> FastImageFolder:
        return FastImageFolder(root, size=224, horizontal_flip=0.5, **options)

    return {
        "from the files": folder(),
        "256 px, from the files": folder(shorter_side=256),
        "whole": cache_images(folder(), scratch),
        "256 px": cache_images(folder(shorter_side=256), scratch),
    }


def _room_mb(folder: Path) -> float:
    return sum(path.stat().st_blocks for path in folder.iterdir()) * 512 / 1e6


def per_core(root: Path, scratch: Path, rounds: int) -> None:
    """Print how many samples one thread makes in a second of its CPU time."""
    found: dict[str, list[float]] = {}
    datasets = folders(root, scratch)
    out = np.empty((224, 224, 3), np.uint8)
    cv2.setNumThreads(1)
    for epoch in range(rounds + 1):
        for name, data in datasets.items():
            data.set_epoch(epoch)
            order = np.random.default_rng(epoch).permutation(len(data)).tolist()
            began = time.thread_time()
            for index in order:
                data.write_into(index, out)
            if epoch:  # the first one makes what is kept, and looks at the files whole
                rate = len(data) / (time.thread_time() - began)
                found.setdefault(name, []).append(rate)
    print("| one thread, CPU time | samples a second | x the files | MB |")
    print("| --- | ---: | ---: | ---: |")
    for name, rates_ in found.items():
        ratios = sorted(a / b for a, b in zip(rates_, found["from the files"], strict=True))
        middle = sorted(rates_)[len(rates_) // 2]
        kept = datasets[name].pictures
        size = "" if kept is None else f"{_room_mb(kept.folder):,.0f}"
        print(f"| {name} | {middle:,.0f} | {ratios[len(ratios) // 2]:.2f} | {size} |")
    print(flush=True)


def measure(kind: str, root: Path, scratch: Path, rounds: int) -> dict[str, list[list[float]]]:
    data = ImageFolder(root, T.Compose(STEPS[kind]))
    contenders = {"torch, 2 workers": lambda: torchs(data)}
    if kind == "crops":
        for name in folders(root, scratch / "pictures"):
            contenders[f"ours, {name}"] = lambda name=name: ours(
                folders(root, scratch / "pictures")[name]
            )
    else:
        contenders |= samples_kept(kind, data, scratch)
    found: dict[str, list[list[float]]] = {}
    for number in range(rounds + 1):
        for name, run in contenders.items():
            result = run()
            if number:
                found.setdefault(name, []).append(result)
    return found


def samples_kept(kind: str, data: ImageFolder, scratch: Path) -> dict[str, Callable]:
    """Those that keep what the dataset returns, or the fixed part of it."""
    kept = scratch / f"kept-{kind}"
    ours(data, kept)
    contenders = {
        "ours, 2 workers": lambda: ours(data),
        "ours, new cache": lambda: ours(data, Path(tempfile.mkdtemp(dir=scratch))),
        "ours, second training": lambda: ours(data, kept),
        "ours, second training, automatic": lambda: ours(data, kept, "auto"),
    }
    if kind == "fixed":
        same_content(data, scratch / "compared")
        gathered = whole(data, scratch / "npy")
        contenders["ours, gathered from a .npy"] = lambda: ours(gathered(), None, "auto")
        chunks = litdata(data, scratch / "lit")
        if isinstance(chunks, str):
            print(f"LitData is absent: {chunks}")
        else:
            contenders["LitData, chunks of tensors"] = chunks
    return contenders


def main() -> None:
    parser = turns.arguments(__doc__.partition("\n")[0], rounds=3)
    parser.add_argument("--count", type=int, default=1500, help="number of photographs")
    parser.add_argument("--kinds", default=",".join(STEPS), help="some of these")
    options = parser.parse_args()
    torch.set_num_threads(1)
    set_start_method("fork")  # for all contenders
    about = turns.machine()
    print("\n".join(f"{name}: {value}" for name, value in about.items()), end="\n\n")
    per_class = -(-options.count // len(PHOTOGRAPHS))
    cut = Cut(train_per_class=per_class, val_per_class=1, shortest_px=375, longest_px=480)
    root = cut_photographs(Path(tempfile.gettempdir()) / f"fastdata-benchmark-{per_class}", cut)
    scratch = Path(tempfile.mkdtemp())
    figures = {}
    try:
        for kind in options.kinds.split(","):
            found = figures[kind] = measure(kind, root / "train", scratch, options.rounds)
            base = [epochs[-1] for epochs in found["torch, 2 workers"]]
            print(f"| {kind} | first epoch | third epoch | x torch's third | min-max |")
            print("| --- | ---: | ---: | ---: | ---: |")
            for name, rounds in found.items():
                first = sorted(epochs[0] for epochs in rounds)[len(rounds) // 2]
                third = sorted(epochs[-1] for epochs in rounds)[len(rounds) // 2]
                ratios = sorted(epochs[-1] / b for epochs, b in zip(rounds, base, strict=True))
                spread = f"{ratios[0]:.1f}-{ratios[-1]:.1f}"
                middle = ratios[len(ratios) // 2]
                print(f"| {name} | {first:,.0f} | {third:,.0f} | {middle:.1f} | {spread} |")
            print(flush=True)
            if kind == "crops":
                per_core(root / "train", scratch / "pictures", options.rounds)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    if options.json:
        turns.write(options.json, "cache", figures)


if __name__ == "__main__":
    main()
