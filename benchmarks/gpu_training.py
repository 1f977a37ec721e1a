"""Sections of tools/gpu.py that train: the guard's memory, the start, overhead, photographs."""

from __future__ import annotations

import os
import tempfile
import time
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import torch
from gpu_run import Skipped, new_trainer
from torch import nn

from lightning_fastdata.device import is_out_of_memory

WAYS = ("off", "auto")
_FRACTION = 0.05
_ASKED = 16_384


def measure_guard(run):
    """Compare the guard's choice with the most that trains, and its measured peak with others."""
    if not run.cuda:
        fit_convolutions(run, 4, guard="off", steps=1)
        raise Skipped("a memory limit needs a CUDA device")
    device = torch.device("cuda", run.device.index or 0)
    name = f"guard, {_FRACTION:.0%} of the device"
    torch.cuda.set_per_process_memory_fraction(_FRACTION, device)
    try:
        decision, took_s, _ = fit_convolutions(run, _ASKED, guard="accumulate", steps=1)
        chosen = decision.batch_size
        run.add(name, "time to decide", took_s, "s")
        run.add(name, f"chosen, trained {_ASKED:,} rows", chosen, "rows", decision.action)
        tried = decision.probes[-1].peak_bytes
        for way in WAYS:
            _, _, peak = fit_convolutions(run, chosen, guard="off", steps=20, prefetch=way)
            run.add(name, f"peak, prefetch={way!r}", peak / 2**20, "MiB")
            if tried:
                run.add(name, f"tried of it, prefetch={way!r}", tried / peak, "")
        low, high = 1, 2  # rows that train, and that do not
        while _trains(run, high):
            low, high = high, 2 * high
        while high - low > max(1, low // 50):
            middle = (low + high) // 2
            low, high = (middle, high) if _trains(run, middle) else (low, middle)
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0, device)
    run.add(name, "the most that trains", low, "rows", "by bisection, to 2 %")
    run.add(name, "chosen of the most", chosen / low, "")


def _trains(run, rows):
    try:
        fit_convolutions(run, rows, guard="off", steps=3)
    except RuntimeError as error:
        if not is_out_of_memory(error):
            raise
        return False
    return True


def fit_convolutions(run, batch_size, *, guard, steps, prefetch="off"):
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
        Same(),
        batch_size=batch_size,
        guard=guard,
        prefetch=prefetch,
        options=LoaderOptions(num_workers=0),
    )
    if run.cuda:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(run.device)
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
    clock, watch = epoch_clock(run), DataThroughputCallback(summary=False, report=False)
    precision = "bf16-mixed" if run.cuda else "32-true"
    epochs = 2 if run.quick else 4
    new_trainer(run, folder, max_epochs=epochs, precision=precision, callbacks=[clock, watch]).fit(
        Classifier(), **data
    )
    rows = len(images) // batch_size * batch_size
    return rows / clock.took_s, watch.report.stages[0].stall_share


def measure_overhead(run):
    from lightning_fastdata.insight.measure.metrics import EventClock, StepTimeline

    name, steps = "overhead", 100 if run.quick else 2000
    timeline = StepTimeline(device=EventClock() if run.cuda else None)

    def one_step():
        timeline.wait_began()
        timeline.wait_ended()
        timeline.transfer_began()
        timeline.augment_began()
        timeline.augment_ended()
        timeline.transfer_ended()
        timeline.compute_ended(32)

    for _ in range(100):
        one_step()
    run.settle()
    at = time.perf_counter()
    for _ in range(steps):
        one_step()
    took_us = (time.perf_counter() - at) * 1e6 / steps
    run.add(name, "all marks of a step, host time", took_us, "us")

    pairs = [
        [_trainer_step_us(run, watched, steps // 2) for watched in (False, True)]
        for _ in range(1 if run.quick else 5)
    ]
    plain, watched = (min(times) for times in zip(*pairs, strict=True))
    run.add(name, "a step of a tiny model", plain, "us", "Trainer alone, best run")
    run.add(name, "the same with the callback", watched, "us", "best run")
    run.add(name, "the callback adds", watched - plain, "us", f"{len(pairs)} runs each")


def epoch_clock(run):
    """Return a callback that times the last epoch (``took_s``), the device's work included."""
    import lightning.pytorch as pl

    class Clock(pl.Callback):
        def on_train_epoch_start(self, trainer, pl_module):
            run.settle()
            self.began = time.perf_counter()

        def on_train_epoch_end(self, trainer, pl_module):
            run.settle()
            self.took_s = time.perf_counter() - self.began

    return Clock()


def _trainer_step_us(run, watched, steps):
    import lightning.pytorch as pl

    from lightning_fastdata import DataThroughputCallback

    class Tiny(pl.LightningModule):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(64, 1)

        def training_step(self, batch, batch_idx):
            return self.layer(batch).mean()

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), 1e-3)

    clock = epoch_clock(run)
    watching = [DataThroughputCallback(summary=False, report=False)] if watched else []
    batches = torch.utils.data.DataLoader(torch.randn(steps, 8, 64), batch_size=None)
    # Of two epochs the second is kept.
    with tempfile.TemporaryDirectory() as folder:
        new_trainer(run, folder, max_epochs=2, callbacks=[clock, *watching]).fit(Tiny(), batches)
    return clock.took_s * 1e6 / steps


class Pictures(torch.utils.data.Dataset):
    """Random images and classes, here for worker processes to import."""

    def __init__(self, count=64, side=48):
        self.images = np.random.default_rng(0).integers(0, 256, (count, side, side, 3), np.uint8)

    def __len__(self):
        return len(self.images)

    def __getitem__(self, index):
        return self.images[index], index % 4


def fit_pictures(run, *, compiled=False, plain=False, steps=8, **arguments):
    """Return the seconds from the call of fit to the end of the first step of a small training.

    ``arguments`` are those of a ``FastDataModule``; ``plain``: torch's loader, without one.
    """
    import albumentations as A
    import lightning.pytorch as pl

    from lightning_fastdata import FastDataModule, LoaderOptions

    class Small(pl.LightningModule):
        def __init__(self):
            super().__init__()
            layers = [nn.Conv2d(3, 8, 3, 2), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 4)]
            network = nn.Sequential(*layers)
            self.network = torch.compile(network) if compiled else network

        def training_step(self, batch, _):
            images, labels = batch
            if images.shape[-1] == 3:  # without a pipeline that ends with ToTensorV2
                images = images.permute(0, 3, 1, 2) / 255
            return nn.functional.cross_entropy(self.network(images), labels)

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), 1e-2)

    class Clock(pl.Callback):
        took_s = None

        def on_train_batch_end(self, *_):
            if self.took_s is None:
                run.settle()
                self.took_s = time.perf_counter() - began_s

    clock, steps_of = Clock(), [A.HorizontalFlip(), A.ColorJitter(), A.Affine(p=0.5)]
    if plain:
        data = {"train_dataloaders": torch.utils.data.DataLoader(Pictures(), 8)}
    else:
        recipe = A.Compose([*steps_of, A.Normalize(), A.ToTensorV2()])
        given = {"augment": recipe, "guard": "off", "options": LoaderOptions(num_workers=0)}
        module = FastDataModule.from_datasets(Pictures(), batch_size=8, **(given | arguments))
        data = {"datamodule": module}
    with tempfile.TemporaryDirectory() as folder:
        trainer = new_trainer(run, folder, max_steps=steps, callbacks=[clock])
        began_s = time.perf_counter()
        trainer.fit(Small(), **data)
    return clock.took_s


def measure_start(run):
    """Measure what comes before the end of the first step, each in turn with a new cache."""
    ways = {
        "torch's DataLoader": {"plain": True},
        "FastDataModule": {"augment_on": "cpu"},
        "with the guard": {"augment_on": "cpu", "guard": "accumulate"},
        "with torch.compile": {"augment_on": "cpu", "compiled": True},
        "with both": {"augment_on": "cpu", "guard": "accumulate", "compiled": True},
        "augmenting on the device, kernels compiled": {"augment_on": "gpu"},
        "augmenting on the device, kernels known": {"augment_on": "gpu"},
    }
    fit_pictures(run, plain=True)  # CUDA starts, Lightning is imported
    with tempfile.TemporaryDirectory() as cache:
        os.environ["TRITON_CACHE_DIR"] = cache
        for what, how in ways.items():
            if how.get("compiled") and not run.cuda:
                continue
            took_s = fit_pictures(run, **how)
            run.add("start", f"fit to the end of the first step, {what}", took_s, "s")
