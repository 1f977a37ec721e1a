"""One training as a script has it, for ``benchmarks/prove.py``; what was recommended is written in.

    python benchmarks/provable.py NAME [--turns JSON --out FILE]

The loaders are torch's. ``--turns`` are fits, one after the other, with what ``fastdata prove``
recommended as one would write it: arguments of the DataLoader, a CachedDataset around the dataset,
or ``FastDataModule.from_loaders`` in the call of ``trainer.fit``. The wall time of each epoch, from
the start of one to the start of the next, goes to ``--out``.
"""

from __future__ import annotations

import argparse
import gc
import json
import logging
import tempfile
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import lightning.pytorch as lightning
import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, TensorDataset
from trainings.parts import Load, Made
from trainings.registry import TRAININGS

from lightning_fastdata import CachedDataset, FastDataLoader, FastDataModule

PHOTOS = Path(tempfile.gettempdir()) / "fastdata-prove-photos"


@dataclass(kw_only=True)
class Script:
    """What a script of a user makes before it fits."""

    model: lightning.LightningModule
    dataset: Any
    arguments: dict[str, Any]
    """Of the training loader."""
    val: Any = None
    val_arguments: dict[str, Any] = field(default_factory=dict)
    callbacks: tuple[Any, ...] = ()
    trainer: dict[str, Any] = field(default_factory=dict)


def loader(dataset: Any, arguments: dict[str, Any], change: dict[str, Any]) -> Any:
    """Return a loader with what was recommended, as it is written by hand."""
    given = dict(arguments)
    if change.get("cache"):
        dataset = CachedDataset(dataset, change["cache"])
    if change.get("fast") and change.get("cache"):
        for name in ("num_workers", "persistent_workers", "prefetch_factor", "pin_memory"):
            given.pop(name, None)
        return FastDataLoader(dataset, num_workers="auto", **given)
    if change.get("num_workers") is not None:
        given["num_workers"] = change["num_workers"]
    if change.get("persistent_workers"):
        given["persistent_workers"] = True
    return DataLoader(dataset, **given)


class Epochs(lightning.Callback):
    """Takes the wall time of each epoch, from its start to the start of the next."""

    def __init__(self) -> None:
        self.at_s: list[float] = []

    def on_train_epoch_start(self, *_: Any) -> None:
        self.at_s.append(time.perf_counter())

    def on_train_end(self, *_: Any) -> None:
        self.at_s.append(time.perf_counter())


class Classifier(lightning.LightningModule):
    """A network of an installed package, and the cross entropy."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def loss_of(self, batch: Any) -> torch.Tensor:
        inputs, labels = batch
        found = self.network(inputs)
        found = found["out"] if isinstance(found, dict) else found
        return nn.functional.cross_entropy(found, labels)

    def training_step(self, batch: Any, _: int) -> torch.Tensor:
        loss = self.loss_of(batch)
        self.log("loss", loss)
        return loss

    def validation_step(self, batch: Any, _: int) -> None:
        self.log("val_loss", self.loss_of(batch))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=1e-3)


# -- real ones -------------------------------------------------------------------------------------


def photos(train_per_class: int = 40) -> Path:
    from demo.photos import Cut, cut_photographs

    return cut_photographs(PHOTOS, Cut(train_per_class=train_per_class, val_per_class=8))


def albumentations_photos(workers: int) -> Script:
    from demo.training import (
        AugmentedPhotos,
        PhotoClassifier,
        train_augmentation,
        val_augmentation,
    )

    folder = photos()
    return Script(
        model=PhotoClassifier(),
        dataset=AugmentedPhotos(folder / "train", train_augmentation()),
        arguments={"batch_size": 16, "shuffle": True, "num_workers": workers},
        val=AugmentedPhotos(folder / "val", val_augmentation()),
        val_arguments={"batch_size": 16, "num_workers": workers},
    )


def torchvision_photos(network: str, workers: int, size_px: int) -> Script:
    from torchvision import models, transforms
    from torchvision.datasets import ImageFolder

    folder = photos()
    steps = [
        transforms.RandomResizedCrop(size_px),
        transforms.RandomHorizontalFlip(),
        transforms.ToTensor(),
    ]
    plain = [transforms.Resize((size_px, size_px)), transforms.ToTensor()]
    train = ImageFolder(str(folder / "train"), transforms.Compose(steps))
    return Script(
        model=Classifier(getattr(models, network)(num_classes=len(train.classes))),
        dataset=train,
        arguments={"batch_size": 16, "shuffle": True, "num_workers": workers},
        val=ImageFolder(str(folder / "val"), transforms.Compose(plain)),
        val_arguments={"batch_size": 16, "num_workers": workers},
    )


def digits(workers: int, repeated: int = 12) -> Script:
    from sklearn.datasets import load_digits

    found = load_digits()
    inputs = torch.tensor(found.data, dtype=torch.float32).repeat(repeated, 1)
    labels = torch.tensor(found.target).repeat(repeated)
    network = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))
    return Script(
        model=Classifier(network),
        dataset=TensorDataset(inputs, labels),
        arguments={"batch_size": 128, "shuffle": True, "num_workers": workers},
    )


class Frame(Dataset[Any]):
    """Rows of a table, one at a time, as they are read by many."""

    def __init__(self, count: int) -> None:
        draw = np.random.default_rng(0)
        self.columns = {f"x{n}": draw.random(count).astype(np.float32) for n in range(24)}
        self.labels = draw.integers(0, 2, count)

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> Any:
        row = [float(column[index]) for column in self.columns.values()]
        return torch.tensor(row), int(self.labels[index])


def table(workers: int) -> Script:
    network = nn.Sequential(nn.Linear(24, 64), nn.ReLU(), nn.Linear(64, 2))
    return Script(
        model=Classifier(network), dataset=Frame(20_000),
        arguments={"batch_size": 100, "shuffle": True, "num_workers": workers},
    )  # fmt: skip


class Signals(Dataset[Any]):
    """Sounds of a second, of which the spectrum is learned."""

    def __len__(self) -> int:
        return 1600

    def __getitem__(self, index: int) -> Any:
        draw = np.random.default_rng(index)
        sound = draw.standard_normal(16_000).astype(np.float32)
        frames = np.lib.stride_tricks.sliding_window_view(sound, 400)[::160] * np.hanning(400)
        spectrum = np.log1p(np.abs(np.fft.rfft(frames))).astype(np.float32)
        return torch.from_numpy(spectrum).mean(0), index % 4


def sounds(workers: int) -> Script:
    network = nn.Sequential(nn.Linear(201, 256), nn.ReLU(), nn.Linear(256, 4))
    return Script(
        model=Classifier(network), dataset=Signals(),
        arguments={"batch_size": 32, "shuffle": True, "num_workers": workers},
    )  # fmt: skip


def language(workers: int) -> Script:
    from lightning.pytorch.demos import Transformer

    class Learner(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = Transformer(vocab_size=500, ninp=64, nhid=128, nlayers=1)

        def training_step(self, batch: Any, _: int) -> torch.Tensor:
            inputs, targets = batch
            output = self.model(inputs, targets)
            return nn.functional.nll_loss(output, targets.view(-1))

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), lr=0.01)

    tokens = torch.randint(500, (1280, 33))
    dataset = TensorDataset(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous())
    return Script(
        model=Learner(), dataset=dataset,
        arguments={"batch_size": 16, "shuffle": True, "num_workers": workers},
    )  # fmt: skip


class Masked(Dataset[Any]):
    """Photographs and masks, in memory."""

    def __init__(self) -> None:
        from sklearn.datasets import load_sample_images

        self.images = [
            torch.from_numpy(image[:128, :128].copy()).permute(2, 0, 1).float() / 255
            for image in load_sample_images().images
        ]

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> Any:
        image = self.images[index % len(self.images)]
        return image, (image[0] > 0.5).long()


def segmentation(workers: int) -> Script:
    from torchvision.models.segmentation import lraspp_mobilenet_v3_large

    network = lraspp_mobilenet_v3_large(weights=None, weights_backbone=None, num_classes=2)
    return Script(
        model=Classifier(network), dataset=Masked(),
        arguments={"batch_size": 8, "shuffle": True, "num_workers": workers},
    )  # fmt: skip


REAL: dict[str, Callable[[], Script]] = {
    "real: photographs, Albumentations, no workers": lambda: albumentations_photos(0),
    "real: photographs, Albumentations, 1 worker": lambda: albumentations_photos(1),
    "real: photographs, squeezenet of torchvision, no workers": (
        lambda: torchvision_photos("squeezenet1_1", 0, 64)
    ),
    "real: photographs, squeezenet of torchvision, 4 workers": (
        lambda: torchvision_photos("squeezenet1_1", 4, 64)
    ),
    "real: digits, TensorDataset, no workers": lambda: digits(0),
    "real: digits, TensorDataset, 2 workers": lambda: digits(2),
    "real: rows of a table, no workers": lambda: table(0),
    "real: rows of a table, 4 workers": lambda: table(4),
    "real: spectra of sounds, no workers": lambda: sounds(0),
    "real: spectra of sounds, 1 worker": lambda: sounds(1),
    "real: Transformer of Lightning, no workers": lambda: language(0),
    "real: lraspp of torchvision, no workers": lambda: segmentation(0),
    "real: mobilenet of torchvision, 2 workers": (
        lambda: torchvision_photos("mobilenet_v3_small", 2, 64)
    ),
}


def planted(name: str, folder: Path) -> Script:
    """Return a training of ``benchmarks/trainings`` with torch's loaders."""
    made: Made = TRAININGS[name].make(folder)
    assert isinstance(made.load, Load)
    plain = made.load.plain()
    arguments = dict(plain.options)
    if "batch_sampler" not in arguments:
        arguments["batch_size"] = plain.batch_size
    torch.set_num_threads(TRAININGS[name].threads)
    return Script(
        model=made.model,
        dataset=plain.dataset,
        arguments=arguments,
        val=None if made.val is None else made.val.dataset,
        val_arguments={} if made.val is None else {
            "batch_size": made.val.batch_size, **made.val.plain().options,
        },
        callbacks=made.callbacks,
        trainer=made.trainer,
    )  # fmt: skip


def fitted(name: str, change: dict[str, Any], max_epochs: int | None) -> list[float]:
    """Make everything anew and fit; return the wall times of the epochs."""
    gc.collect()  # what the fit before has left makes each start of a worker dearer
    with tempfile.TemporaryDirectory() as folder:
        make = REAL.get(name)
        script = planted(name, Path(folder)) if make is None else make()
        epochs = Epochs()
        options = {
            "accelerator": "cpu", "devices": 1, "max_epochs": 3, "logger": False,
            "enable_checkpointing": False, "enable_progress_bar": False,
            "enable_model_summary": False, "default_root_dir": folder, **script.trainer,
        }  # fmt: skip
        if max_epochs is not None:
            options["max_epochs"] = max_epochs
        trainer = lightning.Trainer(**options, callbacks=[*script.callbacks, epochs])
        train = loader(script.dataset, script.arguments, change)
        val = None if script.val is None else loader(script.val, script.val_arguments, change)
        if change.get("fast") and not change.get("cache"):
            data = FastDataModule.from_loaders(train, val, num_workers="auto")
            trainer.fit(script.model, datamodule=data)
        else:
            trainer.fit(script.model, train, val)
    return [b - a for a, b in zip(epochs.at_s, epochs.at_s[1:], strict=False)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("name", choices=(*REAL, *TRAININGS))
    parser.add_argument("--turns", type=json.loads, default=[[{}, None]], help="changes, epochs")
    parser.add_argument("--out", type=Path)
    chosen = parser.parse_args()
    warnings.simplefilter("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    torch.manual_seed(0)
    spent = [fitted(chosen.name, change, epochs) for change, epochs in chosen.turns]
    if chosen.out is not None:
        chosen.out.write_text(json.dumps(spent))


if __name__ == "__main__":
    main()
