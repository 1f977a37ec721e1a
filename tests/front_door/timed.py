"""Rows and a model that take times of the clock: what is trained where a report is looked at."""

from __future__ import annotations

import torch
from torch.utils.data import Dataset
from trainers import Learner

from lightning_fastdata.host import clock


class Rows(Dataset):
    """So many rows of their index, each of which takes so long to read; one of them may raise."""

    def __init__(self, count=32, read_s=0.0, *, missing=None):
        self.count, self.read_s, self.missing = count, read_s, missing

    def __len__(self):
        return self.count

    def __getitem__(self, index):
        if index == self.missing:
            raise KeyError("no such picture")
        clock.sleep(self.read_s)
        return torch.full((4,), float(index))


class Model(Learner):
    """Takes so long for a step of training and of evaluation, and logs something of both."""

    def __init__(self, step_s=0.0, evaluate_s=0.0):
        super().__init__(lambda _: clock.sleep(step_s))
        self.evaluate_s = evaluate_s

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        self.log("own/loss", loss)
        return loss

    def validation_step(self, batch, batch_idx, dataloader_idx=0):
        self.log("own/val", self.predict_step(batch, batch_idx), batch_size=1)

    def predict_step(self, batch, batch_idx, dataloader_idx=0):
        clock.sleep(self.evaluate_s)
        return 1.0

    test_step = validation_step
