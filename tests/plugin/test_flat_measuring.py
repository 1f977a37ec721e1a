"""What is measured of a step is forgotten in time: many of them take no more memory."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
from thoroughness import LONG

MEBIBYTE = 2**20

READING = """
import gc, json, os, sys

def own_bytes():
    # Without program files: what other programs map of them changes the number.
    gc.collect()
    with open("/proc/self/smaps_rollup", encoding="ascii") as file:
        (line,) = [line for line in file if line.startswith("Pss_Anon:")]
    return int(line.split()[1]) * 1024
"""

# The parts that a step passes through, without a trainer, which is fifty times slower.
PARTS = (
    READING
    + """
import torch
from lightning_fastdata import FastDataLoader
from lightning_fastdata.insight.stage import StageMeter
from lightning_fastdata.stamps.batch_stamps import BatchStamps, TaskStamps

steps = int(sys.argv[1])
loader = FastDataLoader(torch.arange(4.0), batch_size=2)
meter = StageMeter("train", torch.device("cpu"))
meter.stamps.watch([loader])
batch = torch.zeros(2, 4)

def stamps(number):
    asked = 10_000_000 * number
    slow = 5_000_000 if number % 10 == 0 else 60_000
    task = TaskStamps(
        number % 3, asked - 1_000_000, asked + 5_000_000, 900_000, 1000, 2, 50_000 + slow, 9000,
        slow, number,
    )
    return BatchStamps(number, 2, asked, asked + 6_000_000, (task,), number % 1000 == 0)

def run(first, last):
    timeline = meter.timeline
    for number in range(first, last):
        if number % 1000 == 0:
            timeline.epoch_began()
        timeline.wait_began()
        timeline.wait_ended()
        timeline.transfer_began()
        timeline.augment_began()
        timeline.augment_ended()
        timeline.transfer_ended()
        loader.records.append(stamps(number))
        meter.step_ended(len(batch))
        if number < last // 2 and number % 50 == 0:  # without a logger nobody asks
            meter.metrics()
    return meter.summary()

run(0, steps // 10)
before = own_bytes()
summary = run(steps // 10, steps)
print(json.dumps([before, own_bytes(), summary.steps, summary.causes.batches]))
"""
)

TRAINER = (
    READING
    + """
import logging, warnings
import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.loggers import TensorBoardLogger
from lightning_fastdata import DataThroughputCallback, FastDataModule, LoaderOptions

steps, folder = int(sys.argv[1]), sys.argv[2]
torch.set_num_threads(1)
warnings.filterwarnings("ignore")
logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)

class Model(LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(4, 1)
        self.readings = []

    def training_step(self, batch, batch_idx):
        if batch_idx in (steps // 2, steps - 1):
            self.readings.append(own_bytes())
        return self.layer(batch).mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=1e-3)

model = Model()
Trainer(
    max_epochs=1, accelerator="cpu", devices=1, logger=TensorBoardLogger(folder),
    callbacks=[DataThroughputCallback(augment=lambda batch: batch, summary=False)],
    enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
).fit(model, datamodule=FastDataModule.from_datasets(
    list(torch.randn(steps, 4)), batch_size=1, options=LoaderOptions(num_workers=0)
))
print(json.dumps(model.readings))
"""
)


def said(script, *arguments):
    command = [sys.executable, "-c", script, *map(str, arguments)]
    text = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
    return json.loads(text.splitlines()[-1])


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_ten_times_as_many_steps_take_no_more_memory():
    asked = 1_000_000 if LONG else 200_000
    before, after, steps, waits = said(PARTS, asked)
    assert (steps, waits) == (asked, asked - asked // 1000)
    assert after - before < MEBIBYTE * asked / 1_000_000  # about a byte a step


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_training_with_everything_on_takes_no_more_memory_with_each_step(tmp_path):
    steps = 20_000 if LONG else 5_000
    before, after = said(TRAINER, steps, tmp_path)
    assert after - before < MEBIBYTE * steps / 36_000  # of the second half: 58 bytes a step
