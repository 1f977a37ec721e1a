"""Datasets that worker processes import anew, without Lightning, which takes seconds to import."""

from __future__ import annotations

import threading
from pathlib import Path

import torch
from torch.utils.data import Dataset

SAMPLES = 40


def value_of(index: int) -> float:
    return float(index * 37 % 251)


class Opening(Dataset):
    """Opens something and reads numbers from it."""

    def __init__(self, folder: Path, *, at_once: bool) -> None:
        self.folder = folder
        self.prepare()
        self.opened = self.open() if at_once else None

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index):
        if self.opened is None:
            self.opened = self.open()
        return torch.tensor([self.read(index)]), index


class Runtime:
    """A client whose threads are gone in a forked process, as those of async runtimes are."""

    def __init__(self) -> None:
        self.asked = threading.Semaphore(0)
        self.done = threading.Semaphore(0)
        self.question = 0
        self.answer = 0.0
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        while True:
            self.asked.acquire()
            self.answer = value_of(self.question)
            self.done.release()

    def read(self, index: int) -> float:
        self.question = index
        self.asked.release()
        self.done.acquire()
        return self.answer

    def __reduce__(self):
        return Runtime, ()


class WithRuntime(Opening):
    def prepare(self):
        pass

    def open(self):
        return Runtime()

    def read(self, index):
        sum(range(20_000))
        return self.opened.read(index)
