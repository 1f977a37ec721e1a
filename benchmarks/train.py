"""Training on JPEG photographs: torch's loaders and ours, in turn, in one process.

    python benchmarks/train.py [--rounds 5] [--epochs 3] [--publish]

Each round trains once in each way: torch's DataLoader with 0, 1, 2 and 4 workers, kept between
epochs, and ours. Told is the wall time of the whole run, from making the loader to the end of
``trainer.fit``: starts of workers, what is tried beforehand and first batches are in it. A ratio is
over the best of torch's, chosen in the other rounds (``published.py``). torch and the first of ours
read the very same dataset, which calls its Albumentations pipeline itself; the others read an image
folder and are given the pipeline. The network is that of the demo. A first round is not counted.
Rounds in which known work took longer than in others do not count (``turns.py``), but in the shares
of waiting and idle CPUs. Without a GPU the model computes on half of the CPUs where there are
workers, also for torch.
"""

from __future__ import annotations

import argparse
import logging
import os
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path

os.environ.setdefault("NO_ALBUMENTATIONS_UPDATE", "1")

import lightning.pytorch as lightning
import psutil
import torch
from albumentations import Compose
from published import TORCH_WORKERS, add_publish, over_best, publish
from torch.utils.data import DataLoader
from turns import in_turn, known_work_s, machine, spread

from demo.photos import Cut, cut_photographs
from demo.training import (
    BATCH_SIZE,
    CROP_SCALE,
    IMAGE_PX,
    AugmentedPhotos,
    PhotoClassifier,
    photo_folder,
    train_augmentation,
)
from lightning_fastdata import DataThroughputCallback, FastDataModule, FastImageFolder
from lightning_fastdata.host.cpu import read_cpu_limit


def plain(folder: Path, workers: int) -> dict:
    dataset = AugmentedPhotos(folder, train_augmentation())
    loader = DataLoader(
        dataset,
        BATCH_SIZE,
        shuffle=True,
        num_workers=workers,
        persistent_workers=workers > 0,
        pin_memory=torch.cuda.is_available(),
    )
    return {"train_dataloaders": loader}


def same(folder: Path) -> dict:
    dataset = AugmentedPhotos(folder, train_augmentation())
    return {"datamodule": FastDataModule.from_datasets(dataset, batch_size=BATCH_SIZE)}


def with_augment(folder: Path) -> dict:
    module = FastDataModule.from_datasets(
        photo_folder(folder), batch_size=BATCH_SIZE, augment=train_augmentation()
    )
    return {"datamodule": module}


def with_folder(folder: Path) -> dict:
    crops = FastImageFolder(folder, size=IMAGE_PX, scale=CROP_SCALE)
    after_crop = Compose(train_augmentation().transforms[1:])
    module = FastDataModule.from_datasets(crops, batch_size=BATCH_SIZE, augment=after_crop)
    return {"datamodule": module}


def train(way: Callable[[], dict], epochs: int, threads: int) -> tuple[float, float, float]:
    """Return the seconds of the whole run, the share of a step spent waiting, and idle CPUs."""
    torch.set_num_threads(threads)
    callback = DataThroughputCallback(summary=False, report=False)
    began, idle = time.perf_counter(), psutil.cpu_times().idle
    trainer = lightning.Trainer(
        max_epochs=epochs,
        accelerator="auto",
        devices=1,
        logger=False,
        callbacks=[callback],
        enable_checkpointing=False,
        enable_model_summary=False,
        enable_progress_bar=False,
        limit_val_batches=0,
    )
    trainer.fit(PhotoClassifier(), **way())
    spent_s = time.perf_counter() - began
    idle_cpus = (psutil.cpu_times().idle - idle) / spent_s
    return spent_s, callback.report.stages[0].stall_share or 0.0, idle_cpus


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--crops", type=int, default=192, help="of each photograph")
    add_publish(parser)
    arguments = parser.parse_args()
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", module="lightning")

    cpus = read_cpu_limit().usable_cpus
    with tempfile.TemporaryDirectory() as folder:
        cut = Cut(train_per_class=arguments.crops, val_per_class=1)
        photos = cut_photographs(Path(folder) / "photos", cut) / "train"
        torchs = {
            f"DataLoader, {workers} workers": partial(plain, photos, workers)
            for workers in TORCH_WORKERS
        }
        ours = {
            "same dataset": partial(same, photos),
            "augment": partial(with_augment, photos),
            "FastImageFolder": partial(with_folder, photos),
        }
        # Without a GPU the model's threads and the workers share the CPUs. All ways with workers
        # leave them half; without workers torch's default is best.
        half = cpus if torch.cuda.is_available() else max(1, cpus // 2)
        waits: dict[str, list[float]] = {name: [] for name in (*torchs, *ours)}
        idle: dict[str, list[float]] = {name: [] for name in waits}

        def one(name: str, way: Callable[[], dict]) -> float:
            threads = cpus if name == "DataLoader, 0 workers" else half
            spent_s, wait, idle_cpus = train(way, arguments.epochs, threads)
            waits[name].append(wait)
            idle[name].append(idle_cpus)
            return spent_s

        contenders = {name: partial(one, name, way) for name, way in {**torchs, **ours}.items()}
        spent = in_turn(contenders, rounds=arguments.rounds, pace_s=known_work_s)
    print(f"{arguments.rounds} rounds of {arguments.epochs} epochs, batch {BATCH_SIZE}\n")
    print("| training on photographs | s, lowest / median / highest | wait | idle CPUs |")
    print("| --- | ---: | ---: | ---: |")
    for name, values in spent.items():
        wait, free = (statistics.median(each[name][1:]) for each in (waits, idle))
        print(f"| {name} | {spread(values)} | {wait:.0%} | {free:.2f} |")
    by_workers = {workers: spent[f"DataLoader, {workers} workers"] for workers in TORCH_WORKERS}
    found = {f"train/{name}": over_best(spent[name], by_workers) for name in ours}
    publish(found, machine(), asked=arguments.publish)


if __name__ == "__main__":
    sys.exit(main())
