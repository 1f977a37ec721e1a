from __future__ import annotations

import random
from collections.abc import Iterable
from pathlib import Path

import pytest
import torch
from lightning.pytorch import LightningModule, Trainer
from processes import until
from torch.utils.data import Dataset

from lightning_fastdata import FastDataModule, LoaderOptions
from lightning_fastdata.loading.loader import FastDataLoader
from lightning_fastdata.order.samplers import ShuffleSampler


class Counted(Dataset):
    """Notes what is read in a file; knows the epoch it was told, as those of libraries are."""

    __module__ = "datasets"

    def __init__(self, file: Path | None = None, length: int = 40) -> None:
        self.file, self.length = file, length
        self.epoch = -1

    @property
    def reads(self) -> torch.Tensor:
        """How often each sample was read."""
        return torch.tensor(list(self.file.read_bytes())).bincount(minlength=self.length)

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> tuple[int, int, float]:
        if self.file is not None:
            with self.file.open("ab") as file:
                file.write(bytes([index]))
        return index, self.epoch, random.random()


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


def test_the_next_epoch_is_under_way_before_it_is_asked_for(tmp_path) -> None:
    dataset = Counted(tmp_path / "reads")
    epoch = [0]
    loader = make(dataset, lambda: epoch[0])
    list(loader)
    until(lambda: dataset.reads.sum() > len(dataset) + 1)
    ahead = int(dataset.reads.sum()) - len(dataset)
    assert ahead > 1
    epoch[0] = 1
    list(loader)
    # What was read ahead is used, and not read again.
    assert dataset.reads.min() >= 2
    loader.close()


@pytest.mark.cases(2)
@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("epochs", [[0, 1, 2], [0, 1, 5, 5, 2], [3, 3, 3]])
def test_an_armed_epoch_has_the_batches_it_would_have_had(workers, epochs) -> None:
    number = [0]
    ours = make(Counted(), lambda: number[0], workers=workers)
    for number[0] in epochs:
        plain = FastDataLoader(
            data := Counted(),
            4,
            sampler=ShuffleSampler(data, seed=3),
            seed=3,
            epoch=lambda: number[0],
            executor="inline",
        )
        assert rows(ours) == rows(plain)
    ours.close()


def test_an_epoch_left_early_goes_on_with_the_armed_one() -> None:
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
    dataset = Counted()
    loader = FastDataLoader(
        dataset, 8, num_workers=2, persistent_workers=True, executor="workers", shuffle=True
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


class NotesElsewhere(Counted):
    """Does not show the file, which would be seen to change."""

    path = Path()

    def __getitem__(self, index: int) -> tuple[int, int, float]:
        with self.path.open("ab") as file:
            file.write(bytes([index]))
        return super().__getitem__(index)


class Steps(LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)

    def training_step(self, batch, batch_idx):
        return self.layer(torch.ones(1)).sum()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.1)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("end", [{"max_epochs": 2}, {"max_epochs": 9, "max_steps": 20}])
def test_nothing_is_read_ahead_of_an_epoch_that_does_not_come(end, tmp_path) -> None:
    dataset = NotesElsewhere()
    NotesElsewhere.path = tmp_path / "reads"
    options = LoaderOptions(executor="workers", num_workers=1, persistent_workers=True, probe=False)
    data = FastDataModule.from_datasets(dataset, batch_size=4, options=options)
    trainer = Trainer(
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=tmp_path,
        **end,
    )
    trainer.fit(Steps(), datamodule=data)
    reads = len(NotesElsewhere.path.read_bytes())
    assert reads < 2 * len(dataset) + 4  # some are tried before
