"""Side processes that outlive an epoch."""

from __future__ import annotations

import random
from collections.abc import Iterable
from pathlib import Path

import pytest
import torch
from torch.utils.data import Dataset

from lightning_fastdata.loading.loader import FastDataLoader
from lightning_fastdata.order.samplers import ShuffleSampler


class Counted(Dataset):
    """Notes what is read in a file; knows the epoch it was told, as those of libraries are."""

    __module__ = "datasets"

    def __init__(self, file: Path | None = None, length: int = 40) -> None:
        self.file, self.length = file, length
        self.epoch = -1

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> tuple[int, int, float]:
        if self.file is not None:
            with self.file.open("ab") as file:
                file.write(bytes([index]))
        return index, self.epoch, self.drawn()

    def drawn(self) -> float:
        return random.random()


def make(dataset: Dataset, epoch, *, workers: int = 1) -> FastDataLoader:
    return FastDataLoader(
        dataset,
        4,
        sampler=ShuffleSampler(dataset, seed=3),
        num_workers=workers,
        persistent_workers=True,
        seed=3,
        epoch=epoch,
        executor="workers",
    )


def rows(batches: Iterable) -> list[tuple[float, ...]]:
    return [row for batch in batches for row in zip(*(x.tolist() for x in batch), strict=True)]


def test_nothing_is_read_ahead_of_an_epoch(tmp_path) -> None:
    class Plain(Counted):  # what draws is read once more at first
        def drawn(self) -> float:
            return 0.0

    file = tmp_path / "reads"
    loader = make(Plain(file), lambda: 0, workers=2)
    list(loader)
    loader.close()
    assert sorted(file.read_bytes()) == list(range(40))


def test_an_epoch_that_is_left_early_is_followed_by_a_whole_one() -> None:
    number = [0]
    loader = make(Counted(), lambda: number[0], workers=2)
    for number[0] in range(4):
        seen = []
        for batch in loader:
            seen += rows([batch])
            if number[0] % 2 == 0 and len(seen) == 12:
                break
        assert {row[1] for row in seen} == {number[0]}
        assert len({row[0] for row in seen}) == len(seen) == (12 if number[0] % 2 == 0 else 40)
    loader.close()


def test_side_processes_that_outlive_an_epoch_tell_their_dataset_of_the_next() -> None:
    loader = FastDataLoader(
        Counted(), 8, num_workers=2, persistent_workers=True, executor="workers", shuffle=True
    )
    for epoch in range(3):
        assert {row[1] for row in rows(loader)} == {epoch}
    loader.close()


def test_an_error_in_set_epoch_is_told() -> None:
    class Grumpy(Counted):
        def set_epoch(self, epoch: int) -> None:
            if epoch == 1 and torch.utils.data.get_worker_info() is not None:
                raise ValueError("not this one")

    loader = FastDataLoader(Grumpy(), 8, num_workers=1, persistent_workers=True, executor="workers")
    assert len(list(loader)) == 5
    with pytest.raises(ValueError, match=r"(?s)in set_epoch\(1\).*not this one"):
        list(loader)
    loader.close()
