"""A dataset that tells what it made; a program of its own has it without heavy libraries."""

from __future__ import annotations

import os
from pathlib import Path

import torch
from torch.utils.data import Dataset


class Made(Dataset):
    """Writes down in a folder which samples it makes."""

    def __init__(self, folder, count=40, *, varies=False):
        self.folder = str(folder)
        self.count = count
        self.varies = varies

    def __len__(self):
        return self.count

    def __getitem__(self, index):
        if not 0 <= index < self.count:
            raise IndexError(index)
        log = os.open(f"{self.folder}/made", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.write(log, b"%d\n" % index)
        os.close(log)
        rows = 3 + index % 5 if self.varies else 3
        return {"x": torch.full((rows, 4), index, dtype=torch.float32), "y": index}

    def made(self):
        path = Path(self.folder) / "made"
        return [int(line) for line in path.read_text().split()] if path.exists() else []

    def forget(self):
        (Path(self.folder) / "made").unlink(missing_ok=True)
