"""What this package costs where it has nothing to do.

    python benchmarks/overhead.py [--steps 2000] [--pairs 9]

Trains a model of a few weights on the CPU, in pairs of runs: plain Lightning, and the same with
something of ours. A pair's difference is CPU time of the process per step, from the tenth step to
the last, so that other programs on the machine matter little; the table shows the median pair and
the quartiles. Import times are wall times of fresh interpreters.
"""

from __future__ import annotations

import argparse
import logging
import statistics
import subprocess
import sys
import tempfile
import time
import warnings

import torch
from lightning.pytorch import Callback, LightningDataModule, LightningModule, Trainer
from lightning.pytorch.loggers import TensorBoardLogger
from torch.utils.data import DataLoader, Dataset

from lightning_fastdata import DataThroughputCallback, FastDataModule, LoaderOptions
from lightning_fastdata.host.machine import describe_machine, read_versions

_FIRST_TIMED_STEP = 10


class Rows(Dataset):
    def __init__(self, length):
        self.rows = torch.randn(length, 4)

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, i):
        return self.rows[i]


class Tiny(LightningModule):
    def __init__(self, steps):
        super().__init__()
        self.layer = torch.nn.Linear(4, 1)
        self.last_step = steps - 1
        self.began_ns = self.ended_ns = 0

    def training_step(self, batch, batch_idx):
        if batch_idx == _FIRST_TIMED_STEP:
            self.began_ns = time.process_time_ns()
        elif batch_idx == self.last_step:
            self.ended_ns = time.process_time_ns()
        return self.layer(batch).mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=1e-3)


class Plain(LightningDataModule):
    def __init__(self, steps):
        super().__init__()
        self.steps = steps

    def train_dataloader(self):
        return DataLoader(Rows(self.steps), batch_size=1, shuffle=True)


def ours(steps):
    return FastDataModule.from_datasets(
        Rows(steps), batch_size=1, options=LoaderOptions(num_workers=0)
    )


def identity(batch):
    return batch


def callback(**arguments):
    return DataThroughputCallback(summary=False, report=False, **arguments)


# name: (data, callbacks, logger), target in microseconds
CASES = {
    "any callback (an empty one)": ((Plain, lambda: [Callback()], False), None),
    "FastDataModule": ((ours, list, False), None),
    "callback, plain loader": ((Plain, lambda: [callback()], False), None),
    "both, nothing registered": ((ours, lambda: [callback()], False), 20),
    "both, transform, TensorBoard": ((ours, lambda: [callback(augment=identity)], True), 100),
}


def us_per_step(case, steps, folder):
    """Return the CPU time per step of one run, in microseconds."""
    data, callbacks, logger = case
    model = Tiny(steps)
    trainer = Trainer(
        max_epochs=1,
        accelerator="cpu",
        devices=1,
        callbacks=callbacks(),
        logger=TensorBoardLogger(folder) if logger else False,
        log_every_n_steps=50,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=folder,
    )
    trainer.fit(model, datamodule=data(steps))
    return (model.ended_ns - model.began_ns) / 1e3 / (steps - 1 - _FIRST_TIMED_STEP)


def paired(case, steps, pairs, folder):
    """Return the quartiles of the differences to plain Lightning, and the plain median."""
    plain_case = (Plain, list, case[2])
    plain, differences = [], []
    for i in range(pairs):
        order = (plain_case, case) if i % 2 == 0 else (case, plain_case)
        values = [us_per_step(each, steps, folder) for each in order]
        without, with_ours = values if i % 2 == 0 else values[::-1]
        plain.append(without)
        differences.append(with_ours - without)
    return statistics.quantiles(differences, n=4), statistics.median(plain)


def import_ms(before, statement, times=7):
    """Return the median wall time of an import in fresh interpreters, in milliseconds."""
    code = (
        f"{before}; import time; t = time.perf_counter(); {statement}; "
        "print(1e3 * (time.perf_counter() - t))"
    )
    found = [
        float(subprocess.check_output([sys.executable, "-c", code], text=True).splitlines()[-1])
        for _ in range(times)
    ]
    return statistics.median(found)


def verdict(value, target):
    return "" if target is None else f"target {target:g}: {'met' if value < target else 'MISSED'}"


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--pairs", type=int, default=9)
    arguments = parser.parse_args()
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", module="lightning")
    torch.set_num_threads(1)

    facts = describe_machine(torch.device("cpu")) | read_versions()
    print("  ".join(f"{name} {value}" for name, value in facts.items()))
    print(f"\nCPU time per step over plain Lightning, us; {arguments.pairs} pairs of runs")
    print(f"{'':30} {'median':>8} {'quartiles':>17} {'plain':>8}")
    with tempfile.TemporaryDirectory() as folder:
        us_per_step((ours, lambda: [callback()], True), 50, folder)  # imports
        for name, (case, target) in CASES.items():
            (low, median, high), plain = paired(case, arguments.steps, arguments.pairs, folder)
            print(
                f"{name:30} {median:8.1f} {f'{low:.1f} .. {high:.1f}':>17} {plain:8.1f}  "
                f"{verdict(median, target)}",
                flush=True,
            )
    print("\nimport, ms")
    light = import_ms("import torch", "import lightning_fastdata")
    print(f"{'lightning_fastdata':30} {light:8.1f}   over torch             {verdict(light, 50)}")
    names = "from lightning_fastdata import FastDataModule, DataThroughputCallback"
    heavy = import_ms("import torch, lightning.pytorch", names)
    print(f"{'its public classes':30} {heavy:8.1f}   over torch, lightning")


if __name__ == "__main__":
    main()
