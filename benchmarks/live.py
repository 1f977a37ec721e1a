"""What it costs a training that `fastdata top` can show it: CPU time a step, and a second.

    python benchmarks/live.py

trains for some seconds on the CPU with four workers, and then times what the callback does for
`fastdata top`, in the training as it stands.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from dataclasses import asdict
from pathlib import Path

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch.utils.data import TensorDataset

from lightning_fastdata import DataThroughputCallback, FastDataModule, LoaderOptions
from lightning_fastdata.host.system_calls import write_atomically


class Model(LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(4, 1)

    def training_step(self, batch, _):
        time.sleep(0.005)
        return self.layer(batch[0]).mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.01)


class Timed(Callback):
    """Times the parts once the training has come far enough."""

    def __init__(self, at_step: int, folder: Path):
        self.at_step, self.folder = at_step, folder

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        if trainer.global_step != self.at_step:
            return
        ours = next(each for each in trainer.callbacks if isinstance(each, DataThroughputCallback))
        live = ours._run.live
        path = self.folder / "status.json"

        def noted():
            live._watched.pace._due_s = 0.0
            live.step_ended()

        def not_due():
            live._watched.pace._due_s = float("inf")
            live.step_ended()

        look_around = lambda: live._watched.status(*live._facts())  # noqa: E731
        told = look_around()
        per_step, per_note = timed(not_due, 20_000), timed(noted, 200)
        look, write = (
            timed(look_around, 500),
            timed(lambda: write_atomically(path, json.dumps(asdict(told))), 500),
        )
        print(f"{path.stat().st_size} bytes of status")
        print(f"each step: {per_step * 1e6:.2f} us")
        print(f"each second, where a step ends: {per_note * 1e6:.0f} us")
        print(
            f"each second, in the other thread: {look * 1e6:.0f} us to look around, "
            f"{write * 1e6:.0f} us to write"
        )
        second = per_note + look + write
        print(f"together {second * 1e6:.0f} us a second: {second:.3%} of a CPU")


def timed(call, times: int) -> float:
    """Return the median CPU seconds of a call, over parts of the calls."""
    part = max(1, times // 20)
    took = []
    for _ in range(20):
        began_s = time.thread_time()
        for _ in range(part):
            call()
        took.append((time.thread_time() - began_s) / part)
    return statistics.median(took)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=1500)
    arguments = parser.parse_args()
    data = FastDataModule.from_datasets(
        TensorDataset(torch.zeros(32 * (arguments.steps + 50), 4)),
        batch_size=32,
        num_workers=4,
        options=LoaderOptions(executor="workers"),
    )
    with tempfile.TemporaryDirectory() as folder:
        Trainer(
            accelerator="cpu",
            max_epochs=1,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            default_root_dir=folder,
            callbacks=[
                DataThroughputCallback(report=False, summary=False),
                Timed(arguments.steps, Path(folder)),
            ],
        ).fit(Model(), data)


if __name__ == "__main__":
    main()
