"""The GPU benchmark's training steps: the batch-size guard, and a whole training on photographs."""

from __future__ import annotations

import tempfile
import time
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import torch
from gpu_run import Skipped, new_trainer
from torch import nn

from lightning_fastdata.device.backend import is_out_of_memory
from lightning_fastdata.plugin.guard.prediction import predict_peak_bytes


def measure_guard(run):
    if not run.cuda:
        raise Skipped("a memory limit needs a CUDA device")
    device = torch.device("cuda", run.device.index or 0)
    for fraction in (0.02, 0.05, 0.1):
        name = f"guard, {fraction:.0%} of the device"
        if run.left_s() < 45:
            run.add(name, "all", None, "", "no time was left")
            continue
        torch.cuda.empty_cache()
        torch.cuda.set_per_process_memory_fraction(fraction, device)
        try:
            decision, took_s, peak = fit_convolutions(run, 1 << 16, guard="reduce", steps=200)
            run.add(name, "time to decide", took_s, "s")
            low, high = 1, 2  # rows that train, and that do not
            while _trains(run, high):
                low, high = high, 2 * high
            while high - low > max(1, low // 50):
                middle = (low + high) // 2
                low, high = (middle, high) if _trains(run, middle) else (low, middle)
        finally:
            torch.cuda.set_per_process_memory_fraction(1.0, device)
        run.add(name, "the most that trains", low, "rows", "by bisection, to 2 %")
        chosen = decision.batch_size
        run.add(name, "chosen, trained 200 steps", chosen, "rows", decision.action)
        run.add(name, "chosen of the most", chosen / low, "")
        predicted = predict_peak_bytes(decision.probes, chosen)
        if predicted and peak:
            run.add(name, "error of the prediction", predicted / peak - 1, "", "of the training")


def _trains(run, rows):
    try:
        fit_convolutions(run, rows, guard="off", steps=3)
    except RuntimeError as error:
        if not is_out_of_memory(error):
            raise
        return False
    return True


def fit_convolutions(run, batch_size, *, guard, steps):
    """Return the guard's decision (None: "off"), its seconds, and the peak of the training."""
    import lightning.pytorch as pl

    from lightning_fastdata import FastDataModule, LoaderOptions
    from lightning_fastdata.plugin.bindings import BatchSizeGuard

    class Convolutions(pl.LightningModule):
        def __init__(self):
            super().__init__()
            layers = [nn.Conv2d(3, 48, 3, padding=1)]
            for _ in range(4):
                layers += [nn.ReLU(), nn.Conv2d(48, 48, 3, padding=1)]
            self.network = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten())

        def training_step(self, batch, _):
            return self.network(batch).square().mean()

        def configure_optimizers(self):
            return torch.optim.AdamW(self.parameters())

    class Same(torch.utils.data.Dataset):
        image = torch.randn(3, 128, 128)

        def __len__(self):
            return 1 << 20

        def __getitem__(self, index):
            return self.image

    class Timed(BatchSizeGuard):
        took_s = 0.0

        def on_fit_start(self, trainer, pl_module):
            began_s = time.perf_counter()
            super().on_fit_start(trainer, pl_module)
            self.took_s = time.perf_counter() - began_s

    timed = Timed()
    data = FastDataModule.from_datasets(
        Same(), batch_size=batch_size, guard=guard, options=LoaderOptions(num_workers=0)
    )
    with tempfile.TemporaryDirectory() as folder:
        trainer = new_trainer(run, folder, max_steps=steps, callbacks=[timed])
        trainer.fit(Convolutions(), datamodule=data)
    peak = torch.cuda.max_memory_allocated(run.device) if run.cuda else 0
    return timed.decision, timed.took_s, peak


def measure_training(run):
    missing = [name for name in ("torchvision", "skimage", "sklearn") if find_spec(name) is None]
    if missing:
        raise Skipped(f"not installed: {', '.join(missing)}")
    from demo.photos import Cut, cut_photographs

    side, batch_size = (64, 8) if run.quick else (224, 128)
    name = f"resnet18, {side} px, batch {batch_size}"
    with tempfile.TemporaryDirectory() as folder:
        cut = Cut(train_per_class=4 if run.quick else 384, val_per_class=1)
        photos = cut_photographs(Path(folder) / "photos", cut) / "train"
        for way in ("plain DataLoader", "FastDataModule"):
            if run.left_s() < 40 and not run.quick:
                run.add(name, way, None, "images/s", "no time was left")
                continue
            rate, stall = _train_resnet(run, folder, photos, way, side, batch_size)
            run.add(name, way, rate, "images/s", "last epoch")
            run.add(name, f"{way}, stalled", stall, "", "share of a step")


def _train_resnet(run, folder, photos, way, side, batch_size):
    import lightning.pytorch as pl
    from albumentations import (
        ColorJitter,
        Compose,
        HorizontalFlip,
        Normalize,
        RandomResizedCrop,
        ToTensorV2,
    )
    from torchvision.datasets import ImageFolder
    from torchvision.models import resnet18

    from lightning_fastdata import DataThroughputCallback, FastDataModule
    from lightning_fastdata.host.cpu import read_cpu_limit

    recipe = Compose(
        [
            RandomResizedCrop((side, side), scale=(0.3, 1.0)),
            HorizontalFlip(),
            ColorJitter(),
            Normalize(),
            ToTensorV2(),
        ]
    )

    class Classifier(pl.LightningModule):
        def __init__(self):
            super().__init__()
            self.network = resnet18(num_classes=16)

        def training_step(self, batch, batch_idx):
            images, labels = batch
            return nn.functional.cross_entropy(self.network(images), labels)

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), 1e-2, momentum=0.9)

    class Clock(pl.Callback):
        def on_train_epoch_start(self, trainer, pl_module):
            run.settle()
            self.began = time.perf_counter()

        def on_train_epoch_end(self, trainer, pl_module):
            run.settle()
            self.took_s = time.perf_counter() - self.began

    workers = max(1, read_cpu_limit().usable_cpus)
    images = ImageFolder(photos)
    if way == "plain DataLoader":
        augmented = ImageFolder(photos, lambda image: recipe(image=np.asarray(image))["image"])
        data = {
            "train_dataloaders": torch.utils.data.DataLoader(
                augmented,
                batch_size,
                shuffle=True,
                num_workers=workers,
                pin_memory=run.cuda,
                persistent_workers=True,
                drop_last=True,
                multiprocessing_context="fork",
            )
        }
    else:
        data = {
            "datamodule": FastDataModule.from_datasets(
                images, batch_size=batch_size, augment=recipe, guard="off", drop_last=True
            )
        }
    clock, watch = Clock(), DataThroughputCallback(summary=False, report=False)
    precision = "bf16-mixed" if run.cuda else "32-true"
    epochs = 2 if run.quick else 4
    new_trainer(run, folder, max_epochs=epochs, precision=precision, callbacks=[clock, watch]).fit(
        Classifier(), **data
    )
    rows = len(images) // batch_size * batch_size
    return rows / clock.took_s, watch.report.stages[0].stall_share
