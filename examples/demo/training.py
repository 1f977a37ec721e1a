"""The demo: one training on real photographs, loaded by torch's DataLoader and by FastDataModule.

All trainings have the same photographs, augmentation, network, seed and number of epochs, and are
measured by the same callback. torch's loader has as many workers as suit it best: before, an epoch
is trained with 0, 1, 2 and 4 of them. Without a GPU the model computes on half of the CPUs where
there are workers. What is compared is the wall time of whole trainings.
"""

from __future__ import annotations

import importlib
import logging
import os
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, TypeAlias

import lightning.pytorch as lightning
import numpy as np
import torch
from lightning.pytorch.loggers import TensorBoardLogger
from torch import nn
from torch.utils.data import DataLoader, Dataset

from demo.photos import PHOTOGRAPHS, Cut, cut_photographs
from lightning_fastdata import DataThroughputCallback, FastDataModule, FastImageFolder
from lightning_fastdata.errors import FastDataError, require
from lightning_fastdata.host.cpu import read_cpu_limit
from lightning_fastdata.insight.report import RunReport, bar

if TYPE_CHECKING:
    from albumentations import Compose
    from lightning.pytorch.utilities.types import OptimizerLRScheduler
    from torchvision.datasets import ImageFolder

IMAGE_PX = 112
BATCH_SIZE = 64
CROP_SCALE = (0.3, 1.0)
TORCH_WORKERS = (0, 1, 2, 4)
"""Numbers of workers that torch's loader is tried with."""
_SEED = 7

_LabelledImages: TypeAlias = "tuple[torch.Tensor, torch.Tensor]"
"""Images, and labels int64 ``[n]``."""


def train_augmentation(size_px: int = IMAGE_PX) -> Compose:
    """Return a pipeline as people write it for training on photographs."""
    albumentations = _albumentations()
    return albumentations.Compose(
        [
            albumentations.RandomResizedCrop((size_px, size_px), scale=CROP_SCALE),
            albumentations.HorizontalFlip(),
            albumentations.ColorJitter(),
            albumentations.Normalize(),
            albumentations.ToTensorV2(),
        ]
    )


def val_augmentation(size_px: int = IMAGE_PX) -> Compose:
    """Return the pipeline that brings photographs to one size, unchanged else."""
    albumentations = _albumentations()
    steps = albumentations.Resize(size_px, size_px), albumentations.Normalize()
    return albumentations.Compose([*steps, albumentations.ToTensorV2()])


class AugmentedPhotos(Dataset[tuple[torch.Tensor, int]]):
    """An image folder whose samples go through Albumentations one by one, the usual way."""

    def __init__(self, folder: str | Path, transform: Callable[..., Any]) -> None:
        self._photos = photo_folder(folder)
        self._transform = transform

    def __len__(self) -> int:
        return len(self._photos)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        image, label = self._photos[index]
        return self._transform(image=np.asarray(image))["image"], label


class PhotoClassifier(lightning.LightningModule):
    """A small convolutional network that tells which photograph a crop comes from.

    Input: float32 ``[n, 3, H, W]``, normalized, ``H`` and ``W`` multiples of 16. Output: logits
    ``[n, classes]``. Logs ``train_loss`` and ``val_accuracy`` (0 to 1).
    """

    def __init__(self, classes: int = len(PHOTOGRAPHS), learning_rate: float = 6e-3) -> None:
        super().__init__()
        self.learning_rate = learning_rate
        self.network = nn.Sequential(
            *_convolution(3, 32, size=4, stride=4),
            *_convolution(32, 64, size=3, stride=2),
            *_convolution(64, 128, size=3, stride=2),
            nn.AdaptiveAvgPool2d(1),
            nn.Flatten(),
            nn.Linear(128, classes),
        )

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Return the logits of normalized images."""
        logits: torch.Tensor = self.network(images)
        return logits

    def training_step(self, batch: _LabelledImages) -> torch.Tensor:
        """Return the cross entropy of a batch."""
        images, labels = batch
        loss = nn.functional.cross_entropy(self(images), labels)
        self.log("train_loss", loss)
        return loss

    def validation_step(self, batch: _LabelledImages) -> None:
        """Log the accuracy of a batch."""
        images, labels = batch
        accuracy = (self(images).argmax(1) == labels).float().mean()
        self.log("val_accuracy", accuracy, prog_bar=True, batch_size=len(labels))

    def configure_optimizers(self) -> OptimizerLRScheduler:
        """Return AdamW on a one-cycle schedule over the whole training."""
        optimizer = torch.optim.AdamW(self.parameters(), self.learning_rate)
        steps = int(self.trainer.estimated_stepping_batches)
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, self.learning_rate, steps)
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": schedule, "interval": "step"},
        }


def photo_folder(folder: str | Path) -> ImageFolder:
    """Return torchvision's data set of a folder of class folders."""
    from torchvision.datasets import ImageFolder

    return ImageFolder(str(folder))


def run_demo(
    data: str | Path = "demo_data/photos",
    logs: str | Path = "demo_logs",
    *,
    epochs: int = 3,
    crops: int = 192,
    say: Callable[[str], object] = lambda text: sys.stdout.write(text + "\n"),
) -> dict[str, RunReport]:
    """Train three times, print the comparison, and return the report of each training by name.

    Before, an epoch with each number of torch's workers tells which one suits it best.

    Args:
        data: Folder for the photographs; reused when it is complete.
        logs: Folder for the TensorBoard files.
        epochs: Epochs of each training.
        crops: Training crops of each photograph; validation has about a fifth of it.
        say: Prints one text.

    Raises:
        DatasetError: A photograph is missing, or ``data`` holds other files.
        MissingPackageError: A package of ``lightning-fastdata[demo]`` is not installed.
    """
    for package in ("albumentations", "torchvision", "PIL"):
        require(package, extra="demo", what="The demo")
    cut = Cut(train_per_class=crops, val_per_class=max(8, crops * 5 // 24))
    photos = cut_photographs(data, cut)
    train, val = photos / "train", photos / "val"
    pipelines = {"train": train_augmentation(), "val": val_augmentation()}
    classes = len(PHOTOGRAPHS)
    say(
        f"{classes} photographs, cut into {classes * cut.train_per_class} "
        f"training and {classes * cut.val_per_class} validation JPEG files: {photos}"
    )
    reports = {}

    say("\n1  torch's DataLoader, Albumentations sample by sample; first an epoch each, to choose")
    tried = {}
    for workers in (TORCH_WORKERS[0], *TORCH_WORKERS):  # what comes once counts for none
        with _model_leaves_cpus_to_workers(workers > 0):
            report, _ = _train(logs, None, 1, **_usual(train, val, workers))
        tried[workers] = 0.0 if report.wall is None else report.wall.total_s
    best = min(tried, key=tried.__getitem__)
    took = ", ".join(f"{workers}: {wall_s:.1f} s" for workers, wall_s in tried.items())
    say(f"   num_workers {took}; {best} it is")
    with _model_leaves_cpus_to_workers(best > 0):
        reports[f"DataLoader, {best} workers"], _ = _train(
            logs, "usual", epochs, **_usual(train, val, best)
        )

    say("\n2  FastDataModule, all options automatic, the same photographs and pipeline")
    module = FastDataModule.from_datasets(
        photo_folder(train),
        photo_folder(val),
        batch_size=BATCH_SIZE,
        augment=pipelines,
    )
    with _model_leaves_cpus_to_workers():
        reports["FastDataModule"], _ = _train(logs, "fastdata", epochs, datamodule=module)
    say(module.explain())

    compose = _albumentations().Compose
    say("\n3  the same, and FastImageFolder decodes, crops and resizes")
    module = FastDataModule.from_datasets(
        FastImageFolder(train, size=IMAGE_PX, scale=CROP_SCALE),
        FastImageFolder(val, size=IMAGE_PX, crop="stretch"),
        batch_size=BATCH_SIZE,
        augment={stage: compose(each.transforms[1:]) for stage, each in pipelines.items()},
    )
    with _model_leaves_cpus_to_workers():
        reports["+ FastImageFolder"], accuracy = _train(logs, "folder", epochs, datamodule=module)

    if not torch.cuda.is_available():
        say("\nno GPU: where there are workers, the model has half of the CPUs")
    say("\n" + comparison_text(reports))
    say(f"\nvalidation accuracy of the last: {accuracy:.1%}")
    say(f"TensorBoard files: {logs}   (tensorboard --logdir {logs})")
    return reports


def comparison_text(reports: Mapping[str, RunReport]) -> str:
    """Return a bar of samples/s for each run, with its stall and its ratio to the first run.

    Samples of training over the wall time of the whole run, with validation, starts of workers and
    all that is no step.
    """
    rates = [
        report.wall.samples_per_s or 0.0 if report.wall else 0.0 for report in reports.values()
    ]
    names, length = max(map(len, reports)), 24
    lines = ["the same training"]
    for (name, report), rate in zip(reports.items(), rates, strict=True):
        share = report.stages[0].stall_share if report.stages else None
        stall = "" if share is None else f"wait {share:>4.0%}"
        drawn = bar(rate / max(rates) if rate else 0.0, length)
        ratio = rate / rates[0] if rates[0] else 0.0
        lines.append(
            f" {name:<{names}} {drawn:<{length}} {rate:6.0f} samples/s {ratio:5.2f}x  {stall}"
        )
    return "\n".join(lines)


def _usual(train: Path, val: Path, workers: int) -> dict[str, DataLoader[Any]]:
    """Return torch's loaders as ``trainer.fit`` takes them."""
    kept: dict[str, Any] = {"num_workers": workers, "persistent_workers": workers > 0}
    photos = AugmentedPhotos(train, train_augmentation())
    val_photos = AugmentedPhotos(val, val_augmentation())
    with warnings.catch_warnings():
        # torch warns of more workers than CPUs, which are to be tried, too.
        warnings.filterwarnings("ignore", message=".*worker processes in total.*")
        return {
            "train_dataloaders": DataLoader(photos, BATCH_SIZE, shuffle=True, **kept),
            "val_dataloaders": DataLoader(val_photos, BATCH_SIZE, **kept),
        }


@contextmanager
def _model_leaves_cpus_to_workers(workers: bool = True) -> Iterator[None]:
    """Without a GPU, let the model compute on half of the CPUs while workers load.

    The threads of the model wait for each other, so that a worker on one of their CPUs slows all
    of them down. torch's default, as many threads as CPUs, suits a training without workers.
    """
    threads = torch.get_num_threads()
    if torch.cuda.is_available() or not workers:
        yield
        return
    torch.set_num_threads(max(1, read_cpu_limit().usable_cpus // 2))
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def _train(
    logs: str | Path, name: str | None, epochs: int, **loaders: Any
) -> tuple[RunReport, float]:
    """Return the report and the accuracy of a training; one without a name leaves nothing."""
    logging.getLogger("lightning.pytorch").setLevel(logging.WARNING)
    lightning.seed_everything(_SEED, verbose=False)
    shown = name is not None
    throughput = DataThroughputCallback(summary=shown, report=shown)
    with warnings.catch_warnings():
        # Some trainings are to have too few workers.
        warnings.filterwarnings("ignore", message=".*does not have many workers.*")
        # Lightning 2.6 with torch 2.9 and newer; nothing that a reader of the demo can change.
        warnings.filterwarnings("ignore", message=".*treespec, LeafSpec.*")
        trainer = lightning.Trainer(
            max_epochs=epochs,
            accelerator="gpu" if torch.cuda.is_available() else "cpu",
            devices=1,
            logger=TensorBoardLogger(str(logs), name=name) if shown else False,
            callbacks=[throughput],
            enable_checkpointing=False,
            enable_model_summary=False,
            enable_progress_bar=shown and sys.stdout.isatty(),
            num_sanity_val_steps=0,
            log_every_n_steps=5,
        )
        trainer.fit(PhotoClassifier(), **loaders)
    if throughput.report is None:
        raise FastDataError(f"The training {name!r} ended before its first step was measured.")
    return throughput.report, float(trainer.callback_metrics["val_accuracy"])


def _convolution(channels: int, filters: int, *, size: int, stride: int) -> list[nn.Module]:
    return [
        nn.Conv2d(channels, filters, size, stride, padding=int(size == 3), bias=False),
        nn.BatchNorm2d(filters),
        nn.ReLU(inplace=True),
    ]


def _albumentations() -> ModuleType:
    # Albumentations asks the network for its newest version at import unless this is set.
    os.environ.setdefault("NO_ALBUMENTATIONS_UPDATE", "1")
    return importlib.import_module("albumentations")
