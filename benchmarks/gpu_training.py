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


def measure_guard(run):
    if not run.cuda:
        raise Skipped("a memory limit needs a CUDA device")
    from lightning_fastdata.plugin.guard.memory import (
        CudaMemoryReader,
        is_out_of_memory,
        reserve_bytes,
    )
    from lightning_fastdata.plugin.guard.prediction import (
        Probe,
        decide,
        predict_peak_bytes,
        probe_sizes,
    )

    device, asked = torch.device("cuda", run.device.index or 0), 1 << 16
    reader = CudaMemoryReader(device)

    def measure(rows):
        reader.reset_peak()
        try:
            _convolution_steps(device, rows)
            return Probe(rows, reader.peak_bytes())
        except (RuntimeError, torch.OutOfMemoryError) as error:
            if not is_out_of_memory(error):
                raise
            return Probe(rows, None)

    for fraction in (0.02, 0.05, 0.1):
        name = f"guard, {fraction:.0%} of the device"
        if run.left_s() < 45:
            run.add(name, "all", None, "", "no time was left")
            continue
        torch.cuda.empty_cache()
        torch.cuda.set_per_process_memory_fraction(fraction, device)
        try:
            at = time.perf_counter()
            probes = probe_sizes(asked, measure)
            budget = reader.free_bytes() - reserve_bytes(reader.total_bytes())
            choice = decide(asked=asked, probes=probes, budget_bytes=budget, policy="reduce")
            run.add(name, "time to decide", time.perf_counter() - at, "s")
            low, high = 1, 2  # rows that train, and that do not
            while measure(high).peak_bytes is not None:
                low, high = high, 2 * high
            while high - low > max(1, low // 100):
                middle = (low + high) // 2
                trains = measure(middle).peak_bytes is not None
                low, high = (middle, high) if trains else (low, middle)
            peak = measure(low).peak_bytes
        finally:
            torch.cuda.set_per_process_memory_fraction(1.0, device)
        run.add(name, "the most that trains", low, "rows", "by bisection, to 1 %")
        chosen = choice.batch_size if choice.action == "reduce" else None
        run.add(name, "chosen", chosen, "rows", choice.action)
        if chosen is not None:
            run.add(name, "chosen of the most", chosen / low, "")
        predicted = predict_peak_bytes(probes, low)
        if predicted and peak:
            run.add(name, "error of the prediction at the most", predicted / peak - 1, "")


def _convolution_steps(device, rows):
    torch.manual_seed(0)
    layers = [nn.Conv2d(3, 48, 3, padding=1)]
    for _ in range(4):
        layers += [nn.ReLU(), nn.Conv2d(48, 48, 3, padding=1)]
    model = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten()).to(device)
    optimizer = torch.optim.AdamW(model.parameters())
    images = torch.randn(rows, 3, 128, 128, device=device)
    for _ in range(2):
        loss = model(images).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    torch.cuda.synchronize(device)


def measure_training(run):
    missing = [name for name in ("torchvision", "skimage", "sklearn") if find_spec(name) is None]
    if missing:
        raise Skipped(f"not installed: {', '.join(missing)}")
    from lightning_fastdata.demo.photos import Cut, cut_photographs

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
