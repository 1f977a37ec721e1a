"""Datasets that the conformance tests share.

Without Lightning, which takes seconds to import: spawned workers import this module.
"""

from __future__ import annotations

import torch
from torch.utils.data import Dataset

from lightning_fastdata.host import clock


class Rows(Dataset):
    """``length`` samples ``(float32[4] filled with the index, index)``."""

    def __init__(self, length=32, sleep_s=None):
        self.length = length
        self.sleep_s = sleep_s or {}

    def __len__(self):
        return self.length

    def __getitem__(self, i):
        clock.sleep(self.sleep_s.get(i, 0))
        return torch.full((4,), float(i)), i


class Images(Dataset):
    """``length`` uint8 images HWC whose pixels depend on the index, with a label."""

    def __init__(self, length=16, height=12, width=10):
        self.shape = (height, width, 3)
        self.length = length

    def __len__(self):
        return self.length

    def __getitem__(self, i):
        generator = torch.Generator().manual_seed(i)
        return torch.randint(0, 256, self.shape, dtype=torch.uint8, generator=generator).numpy(), i
