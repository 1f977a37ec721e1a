"""Training on JPEG photographs: the usual loaders and ours, in turn, in one process.

    python benchmarks/train.py [--rounds 5] [--steps 40]

Prints, per way of loading, the median samples per second over the rounds (wall clock from the first
to the last step), its ratio to the first row within the same round, and the share of the step spent
waiting for data. DataLoader and the first FastDataModule read the very same dataset, which calls
its Albumentations pipeline itself; the others read an image folder and are given the pipeline. The
network is that of the demo. Each way trains once before it is measured. Without a GPU the model
computes on half of the CPUs where there are workers, also for DataLoader.
"""

from __future__ import annotations

import argparse
import logging
import os
import statistics
import sys
import tempfile
import warnings
from pathlib import Path

os.environ.setdefault("NO_ALBUMENTATIONS_UPDATE", "1")

import lightning.pytorch as lightning
import torch
from albumentations import Compose
from torch.utils.data import DataLoader

from demo.photos import cut_photographs
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
from lightning_fastdata.host.machine import describe_machine, read_versions


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


def ours(folder: Path) -> dict:
    module = FastDataModule.from_datasets(
        photo_folder(folder), batch_size=BATCH_SIZE, augment=train_augmentation()
    )
    return {"datamodule": module}


def ours_folder(folder: Path) -> dict:
    crops = FastImageFolder(folder, size=IMAGE_PX, scale=CROP_SCALE)
    after_crop = Compose(train_augmentation().transforms[1:])
    module = FastDataModule.from_datasets(crops, batch_size=BATCH_SIZE, augment=after_crop)
    return {"datamodule": module}


def train(data: dict, steps: int, threads: int) -> tuple[float, float]:
    """Return samples per second of wall time and the share of the step spent waiting."""
    torch.set_num_threads(threads)
    callback = DataThroughputCallback(summary=False, report=False)
    trainer = lightning.Trainer(
        max_steps=steps,
        accelerator="auto",
        devices=1,
        logger=False,
        callbacks=[callback],
        enable_checkpointing=False,
        enable_model_summary=False,
        enable_progress_bar=False,
        limit_val_batches=0,
    )
    trainer.fit(PhotoClassifier(), **data)
    stage = callback.report.stages[0]
    return stage.samples / stage.duration_s, stage.stall_share or 0.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=40)
    arguments = parser.parse_args()
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", module="lightning")

    cpus = read_cpu_limit().usable_cpus
    with tempfile.TemporaryDirectory() as folder:
        photos = cut_photographs(Path(folder) / "photos") / "train"
        ways = {
            "DataLoader, no workers": lambda: plain(photos, 0),
            f"DataLoader, {cpus} workers": lambda: plain(photos, cpus),
            "FastDataModule, the very same dataset": lambda: same(photos),
            "FastDataModule, ImageFolder and augment=": lambda: ours(photos),
            "FastDataModule, FastImageFolder and augment=": lambda: ours_folder(photos),
        }
        # Without a GPU the model's threads and the workers share the CPUs. Both ways with workers
        # leave them half; without workers torch's default is best.
        half = max(1, cpus // 2)
        on_gpu = torch.cuda.is_available()
        threads = {
            name: cpus if on_gpu or name == "DataLoader, no workers" else half for name in ways
        }
        speeds: dict[str, list[float]] = {name: [] for name in ways}
        waits: dict[str, list[float]] = {name: [] for name in ways}
        for round_ in range(arguments.rounds + 1):
            for name, way in ways.items():
                speed, wait = train(way(), arguments.steps, threads[name])
                if round_:
                    speeds[name].append(speed)
                    waits[name].append(wait)
    first = next(iter(speeds.values()))
    print(
        f"machine {describe_machine(torch.device('cuda' if torch.cuda.is_available() else 'cpu'))}"
    )
    print(f"versions {read_versions()}")
    print(f"{arguments.rounds} rounds of {arguments.steps} steps, batch {BATCH_SIZE}\n")
    print("| training on JPEG photographs | samples/s | ratio | wait for data |")
    print("| --- | ---: | ---: | ---: |")
    for name, values in speeds.items():
        ratio = statistics.median(a / b for a, b in zip(values, first, strict=True))
        wait = statistics.median(waits[name])
        print(f"| {name} | {statistics.median(values):.0f} | {ratio:.2f} | {wait:.0%} |")


if __name__ == "__main__":
    sys.exit(main())
