"""Datasets whose workers wait for each other train as they do with torch's DataLoader."""

from __future__ import annotations

from itertools import chain
from typing import Any

import pytest
import torch
from rig.machine import VirtualBarrier, machine
from torch.utils.data import DataLoader, Dataset
from trainers import trained

from lightning_fastdata import FastDataLoader, FastDataModule, LoaderOptions

pytestmark = [
    pytest.mark.usefixtures("machine"),  # on which who waits in vain for others is told so at once
    pytest.mark.filterwarnings("ignore:.*training batches"),
]


class Meeting(Dataset):
    """The first sample of each worker waits until all workers are at theirs."""

    def __init__(self, workers: int, samples: int, kind: str = "numbers") -> None:
        self.door = VirtualBarrier(workers)
        self.samples, self.kind = samples, kind
        self.met = [machine().training]

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, index: int) -> Any:
        process = machine().current.process
        if process not in self.met:
            self.met.append(process)
            self.door.wait()
        if self.kind == "text":
            return str(index)
        if self.kind == "sizes" and index == 5:
            return torch.full((1,), float(index)), torch.tensor(index, dtype=torch.int32)
        return torch.full((1,), float(index)), torch.tensor(index)


def collate_pairs(samples: list[Any]) -> Any:
    return torch.stack([x for x, _ in samples]), torch.tensor([int(i) for _, i in samples])


def fit(data: Any) -> list[int]:
    return list(chain(*trained(data, lambda batch: batch[1].tolist(), max_epochs=2)))


@pytest.mark.parametrize(
    ("workers", "batch_size", "kind"),
    [(2, 8, "numbers"), (3, 1, "numbers"), (3, 2, "numbers"), (2, 4, "sizes"), (2, 8, "collated")],
)
def test_a_training_whose_workers_wait_for_each_other_sees_every_sample(workers, batch_size, kind):
    collate = collate_pairs if kind == "collated" else None
    loader = FastDataLoader(
        Meeting(workers, 24, kind),
        batch_size,
        num_workers=workers,
        executor="workers",
        persistent_workers=True,
        collate_fn=collate,
    )
    assert fit(loader) == [*range(24), *range(24)]
    loader.close()


def test_a_data_module_whose_workers_wait_for_each_other_sees_every_sample():
    options = LoaderOptions(num_workers=2, executor="workers", persistent_workers=True)
    seen = fit(FastDataModule.from_datasets(Meeting(2, 24), batch_size=4, options=options))
    assert sorted(seen[:24]) == sorted(seen[24:]) == list(range(24))


@pytest.mark.parametrize("batch_size", [1, 5])
def test_samples_that_are_no_numbers_come_in_order_too(batch_size):
    how: dict[str, Any] = {"batch_size": batch_size, "num_workers": 3}
    ours = FastDataLoader(Meeting(3, 21, "text"), **how, executor="workers")
    assert list(ours) == list(DataLoader(Meeting(1, 21, "text"), batch_size))
