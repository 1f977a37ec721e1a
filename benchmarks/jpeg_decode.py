"""What one core and two threads make of JPEG files: this package against PIL and torchvision.

    python benchmarks/jpeg_decode.py --rounds 15

Two folders of real photographs in the page cache: crops of 300 to 500 px as most data sets have
them, and 1600x1200 mosaics of photographs at their own resolution. Three tasks on every file:

- decode: bytes on disk to uint8 RGB
- train: decode, RandomResizedCrop(224), horizontal flip, to uint8 height x width x RGB
- val: decode, Resize(256), CenterCrop(224), to uint8 height x width x RGB

The sides take turns in every round, the first one first in every other round, because the machine
is not alone in the world; the ratio is the median over rounds, with its quartiles.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import cv2
import numpy as np
import torch
from PIL import Image
from torchvision.datasets import ImageFolder
from torchvision.datasets.folder import pil_loader
from torchvision.transforms import v2

from demo.photos import PHOTOGRAPHS, Cut, cut_photographs, open_photograph
from lightning_fastdata import FastImageFolder
from lightning_fastdata.ext.images.decoders import open_image


def write_mosaics(folder: Path, count: int) -> Path:
    random_state = np.random.default_rng(0)
    photographs = [open_photograph(name) for name in PHOTOGRAPHS]
    (folder / "mosaic").mkdir(parents=True)
    for number in range(count):
        canvas = Image.new("RGB", (1600, 1200))
        for top in range(0, 1200, 300):
            for left in range(0, 1600, 300):
                photograph = photographs[random_state.integers(len(photographs))]
                x = int(random_state.integers(photograph.width - 250))
                y = int(random_state.integers(photograph.height - 250))
                canvas.paste(photograph.crop((x, y, x + 300, y + 300)), (left, top))
        canvas.save(folder / "mosaic" / f"{number:03d}.jpg", quality=90, subsampling="4:2:0")
    return folder


def tasks(folder: Path) -> dict[str, dict[str, list]]:
    """Task -> side -> one call per file."""
    fast = FastImageFolder(folder, size=224, horizontal_flip=0.5)
    exact = FastImageFolder(folder, size=224, horizontal_flip=0.5, resample="exact")
    fast_val = FastImageFolder(folder, size=224, crop="center")
    crop = v2.Compose([v2.RandomResizedCrop(224), v2.RandomHorizontalFlip()])
    pil = ImageFolder(folder, crop)
    pil_val = ImageFolder(folder, v2.Compose([v2.Resize(256), v2.CenterCrop(224)]))
    paths = [path for path, _ in pil.samples]
    slot = torch.empty(len(paths), 224, 224, 3, dtype=torch.uint8).numpy()

    def decode(path):
        return open_image(path, decoder=fast.decoder).decode()

    def each(function, over):
        return [(function, argument) for argument in over]

    numbers = range(len(paths))
    return {
        "decode": {
            "ours": each(decode, paths),
            "pil": each(lambda path: np.asarray(pil_loader(path)), paths),
        },
        "train": {
            "ours": each(lambda i: fast.write_into(i, slot[i]), numbers),
            "ours exact": each(lambda i: exact.write_into(i, slot[i]), numbers),
            "pil": each(lambda i: np.copyto(slot[i], pil[i][0]), numbers),
        },
        "val": {
            "ours": each(lambda i: fast_val.write_into(i, slot[i]), numbers),
            "pil": each(lambda i: np.copyto(slot[i], pil_val[i][0]), numbers),
        },
    }


def seconds(calls: list, pool: ThreadPoolExecutor | None) -> float:
    start = time.perf_counter()
    if pool is None:
        for function, argument in calls:
            function(argument)
    else:
        for _ in pool.map(lambda call: call[0](call[1]), calls):
            pass
    return time.perf_counter() - start


def compare(sides: dict[str, list], rounds: int, threads: int) -> dict[str, list[float]]:
    """Side -> images per second, one per round."""
    rates: dict[str, list[float]] = {side: [] for side in sides}
    pool = ThreadPoolExecutor(threads) if threads > 1 else None
    for turn in range(rounds + 1):
        order = list(sides) if turn % 2 else list(reversed(sides))
        for side in order:
            rate = len(sides[side]) / seconds(sides[side], pool)
            if turn > 0:  # the first round warms caches and imports
                rates[side].append(rate)
    if pool is not None:
        pool.shutdown()
    return rates


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--small", type=int, default=110, help="number of small files")
    parser.add_argument("--big", type=int, default=24, help="number of 1600x1200 files")
    options = parser.parse_args()
    cv2.setNumThreads(0)
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as scratch:
        per_class = -(-options.small // len(PHOTOGRAPHS))
        cut = Cut(train_per_class=per_class, val_per_class=1)
        small = cut_photographs(Path(scratch) / "small", cut) / "train"
        big = write_mosaics(Path(scratch) / "big", options.big)
        print(f"{'files':7}{'task':8}{'threads':>8}{'side':>12}{'img/s':>8}{'x PIL':>7}  quartiles")
        for label, folder in (("small", small), ("big", big)):
            for task, sides in tasks(folder).items():
                for threads in (1, 2):
                    rates = compare(sides, options.rounds, threads)
                    for side, values in rates.items():
                        ratios = [a / b for a, b in zip(values, rates["pil"], strict=True)]
                        low, middle, high = statistics.quantiles(ratios, n=4)
                        print(
                            f"{label:7}{task:8}{threads:8}{side:>12}"
                            f"{statistics.median(values):8.0f}{middle:7.2f}  {low:.2f}-{high:.2f}",
                            flush=True,
                        )


if __name__ == "__main__":
    main()
