"""Datasets of which only what they give matters: a function makes it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils.data import Dataset, IterableDataset


class Samples(Dataset):
    """So many samples, which a function makes of their index."""

    def __init__(self, make: Callable[[int], Any], length: int) -> None:
        self.make, self.length = make, length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> Any:
        return self.make(index)


class Costly(Dataset):
    """Each sample is its number, and costs what a function of it does: sleeps, computes, waits."""

    def __init__(self, length: int, cost: Callable[[int], Any] = lambda index: None) -> None:
        self.length, self.cost = length, cost

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> torch.Tensor:
        self.cost(index)
        return torch.tensor(index)


class Stream(IterableDataset):
    """Iterates over what a function returns."""

    def __init__(self, make: Callable[[], Any]) -> None:
        self.make = make

    def __iter__(self) -> Any:
        return self.make()
