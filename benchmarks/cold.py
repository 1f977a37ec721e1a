"""Epochs over files that are not in memory, and over the same files when they are.

    python benchmarks/cold.py [--images 4000] [--rounds 3] [--json FILE]

Before every other epoch the system is asked to drop the files from memory (POSIX_FADV_DONTNEED),
as they are in the first epoch of a run, and in all epochs over more data than memory. Each row is
one ``Trainer.fit`` with a module that does nothing, shuffled batches of 64: torchvision's unchanged
``ImageFolder`` with RandomResizedCrop(224), and the same photographs in a tar archive by
``TarSource``, decoded by PIL. "ours" is ``FastDataModule`` with nothing set by hand.
"""

from __future__ import annotations

import os
import shutil
import statistics
import tarfile
import tempfile
import time
from io import BytesIO
from pathlib import Path

os.environ.setdefault("NO_ALBUMENTATIONS_UPDATE", "1")

import lightning.pytorch as pl
import torch
import turns
from PIL import Image
from torch.utils.data import DataLoader
from torchvision.datasets import ImageFolder
from torchvision.transforms import v2

from demo.photos import PHOTOGRAPHS, Cut, cut_photographs
from lightning_fastdata import FastDataModule
from lightning_fastdata.sources import SourceDataset, TarSource

BATCH = 64
TRANSFORM = v2.Compose([v2.RandomResizedCrop(224), v2.PILToTensor()])


def forget(files):
    """Have the system drop files from memory."""
    os.sync()
    for file in files:
        descriptor = os.open(file, os.O_RDONLY)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)


def decode(raw, _index):
    return TRANSFORM(Image.open(BytesIO(raw)).convert("RGB"))


class Nothing(pl.LightningModule):
    """Trains on no image."""

    def __init__(self, files):
        super().__init__()
        self.files = files
        self.weight = torch.nn.Parameter(torch.zeros(1))
        self.epochs_s = []

    def on_train_epoch_start(self):
        if self.current_epoch % 2:
            forget(self.files)
        self.began_s = time.perf_counter()

    def training_step(self, batch, batch_idx):
        return self.weight * 0

    def on_train_epoch_end(self):
        self.epochs_s.append(time.perf_counter() - self.began_s)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.1)


def epochs(dataset, files, rounds, *, ours):
    """Return the samples a second of cold and of warm epochs."""
    module = Nothing(files)
    trainer = pl.Trainer(
        max_epochs=2 * rounds + 2,
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    if ours:
        data = FastDataModule.from_datasets(dataset, batch_size=BATCH)
        trainer.fit(module, datamodule=data)
    else:
        loader = DataLoader(
            dataset, BATCH, shuffle=True, num_workers=2, persistent_workers=True, drop_last=True
        )
        trainer.fit(module, loader)
    count = len(dataset) // BATCH * BATCH
    rates = [count / each_s for each_s in module.epochs_s]
    return rates[3::2], rates[2::2]


def photographs(folder, count):
    per_class = -(-count // len(PHOTOGRAPHS))
    cut = Cut(train_per_class=per_class, val_per_class=1, shortest_px=375, longest_px=480)
    root = cut_photographs(folder / "photographs", cut) / "train"
    return ImageFolder(root, TRANSFORM), [path for path, _ in ImageFolder(root).samples]


def archive(folder, files):
    file = folder / "photographs.tar"
    with tarfile.open(file, "w") as tar:
        for path in files:
            tar.add(path, arcname=os.path.relpath(path, folder))
    return SourceDataset(TarSource([file]), decode), [file]


def main() -> None:
    parser = turns.arguments(__doc__.partition("\n")[0], rounds=3)
    parser.add_argument("--images", type=int, default=4000)
    parser.add_argument("--folder", type=Path, default=Path.cwd() / "build", help="not in memory")
    options = parser.parse_args()
    torch.set_num_threads(1)
    options.folder.mkdir(exist_ok=True)
    folder = Path(tempfile.mkdtemp(dir=options.folder))
    results = {}
    print("| data | loader | cold, samples/s | warm, samples/s | cold / warm |")
    print("| --- | --- | ---: | ---: | ---: |")
    try:
        listed = photographs(folder, options.images)
        for name, made in (("ImageFolder", listed), ("tar", archive(folder, listed[1]))):
            for ours in (True, False):
                cold, warm = epochs(*made, options.rounds, ours=ours)
                label = "ours" if ours else "torch, 2 workers"
                results[f"{name}, {label}"] = {"cold": cold, "warm": warm}
                numbers = f"{statistics.median(cold):.0f} | {statistics.median(warm):.0f}"
                print(f"| {name} | {label} | {numbers} | {turns.ratio(cold, warm):.2f} |")
    finally:
        shutil.rmtree(folder)
    turns.write(options.json, "cold", results)


if __name__ == "__main__":
    main()
