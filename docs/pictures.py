"""Make the pictures of the documentation anew: needs Chromium, and two minutes.

    python docs/pictures.py [--browser chromium]

A training whose storage answers in 3 ms is read by one worker; its page and TensorBoard's are shown
to a browser without a window.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
import urllib.request
from pathlib import Path

import torch
from torch.utils.data import Dataset

DOCS = Path(__file__).parent
BROWSER = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
    "--hide-scrollbars",
)
BOARD = {
    "tensorboard-scalars.png": ("#scalars&tagFilter=%5Edata%2F", (1400, 900)),
    "tensorboard-charts.png": ("#custom_scalars", (1400, 700)),
    "tensorboard.png": ("#images", (1400, 700)),
}


class Scans(Dataset):
    """Samples from a storage that answers in 3 ms."""

    def __len__(self) -> int:
        return 8000

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        time.sleep(0.003)
        return torch.rand(3, 32, 32), index % 10


def train(folder: str) -> Path:
    """Train, and return the page of the report."""
    from lightning.pytorch import LightningModule, Trainer
    from lightning.pytorch.loggers import TensorBoardLogger

    from lightning_fastdata import DataThroughputCallback, FastDataModule

    class Model(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(3 * 32 * 32, 10)

        def training_step(self, batch):
            images, labels = batch
            time.sleep(0.02)
            return torch.nn.functional.cross_entropy(self.layer(images.flatten(1)), labels)

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), 0.01)

    trainer = Trainer(
        max_epochs=3,
        limit_train_batches=150,
        accelerator="cpu",
        logger=TensorBoardLogger(folder),
        callbacks=[DataThroughputCallback(scalars="all")],
        log_every_n_steps=10,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    data = FastDataModule.from_datasets(Scans(), batch_size=16, num_workers=1)
    trainer.fit(Model(), datamodule=data)
    return Path(str(trainer.log_dir)) / "report.html"


def show(browser: str, address: str, file: str, size: tuple[int, int]) -> None:
    with tempfile.TemporaryDirectory() as own:
        subprocess.run(
            [
                *(browser, *BROWSER, f"--user-data-dir={own}"),
                f"--window-size={size[0]},{size[1]}",
                "--virtual-time-budget=20000",
                f"--screenshot={DOCS / file}",
                address,
            ],
            check=True,
            timeout=120,
            capture_output=True,
        )
    print(f"{DOCS / file} written.")


def wait_for(address: str, seconds: float = 60) -> None:
    until_s = time.monotonic() + seconds
    while True:
        try:
            urllib.request.urlopen(address, timeout=5).read()
            return
        except OSError:
            if time.monotonic() > until_s:
                raise
            time.sleep(0.5)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--browser", default="chromium")
    parser.add_argument("--port", type=int, default=6017)
    options = parser.parse_args()
    if shutil.which(options.browser) is None:
        sys.exit(f"There is no {options.browser!r}; give another one with --browser.")
    os.environ.setdefault("NO_ALBUMENTATIONS_UPDATE", "1")
    with tempfile.TemporaryDirectory() as folder:
        page = train(folder)
        show(options.browser, page.as_uri(), "report.png", (1000, 1300))
        board = subprocess.Popen(
            [
                *(sys.executable, "-m", "tensorboard.main", "--logdir", "."),
                *("--port", str(options.port), "--load_fast=false"),
            ],
            cwd=folder,  # the page shows what --logdir is
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        try:
            address = f"http://localhost:{options.port}/"
            wait_for(address)
            time.sleep(10)
            for file, (tab, size) in BOARD.items():
                show(options.browser, address + tab, file, size)
        finally:
            board.terminate()
            board.wait(20)


if __name__ == "__main__":
    main()
