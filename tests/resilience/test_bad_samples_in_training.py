"""A real training goes on over bad samples, and tells of them."""

from __future__ import annotations

import json
import os
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import albumentations
import numpy as np
import pytest
import torch
from lightning.pytorch.loggers import CSVLogger
from torch.utils.data import Dataset
from trainers import Learner, quiet_trainer

from lightning_fastdata import (
    DataThroughputCallback,
    FastDataModule,
    FastDataWarning,
    LoaderOptions,
)
from lightning_fastdata.batches.bad_samples import BadSamples, SampleGuard
from lightning_fastdata.errors import OptionsError
from lightning_fastdata.plugin.datasets import bad_samples_of


class Numbers(Dataset):
    def __init__(self, bad: tuple[int, ...], deadly: int | None = None) -> None:
        self.bad = bad
        self.deadly = deadly

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> torch.Tensor:
        if index == self.deadly:
            os._exit(3)
        if index in self.bad:
            raise ValueError(f"sample {index} is damaged")
        return torch.full((4,), float(index))


def indices(batch: torch.Tensor) -> list[int]:
    return batch[:, 0].int().tolist()


class Seen(Learner):
    """Remembers batches of the validation, too."""

    def __init__(self, note: Any = indices) -> None:
        super().__init__(note)
        self.validated: list[Any] = []

    def validation_step(self, batch: Any) -> None:
        self.validated.append(self.note(batch))


class Skips(FastDataModule):
    """Skips bad samples where it validates."""

    def val_dataloader(self) -> Any:
        return self.make_loader(self.val_dataset(), stage="val", on_bad_sample="skip")


def data(**options: Any) -> FastDataModule:
    train, val = options.pop("train"), options.pop("val", None)
    given = LoaderOptions(on_bad_sample="replace", **options)
    kind = FastDataModule if val is None else Skips
    return kind.from_datasets(train, val, batch_size=8, options=given, seed=5)


def fit(module: Seen, datamodule: Any, folder: Path, epochs: int = 2) -> Any:
    trainer = quiet_trainer(
        max_epochs=epochs,
        logger=CSVLogger(folder),
        callbacks=[DataThroughputCallback(every_n_steps=1)],
        num_sanity_val_steps=0,
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer.fit(module, datamodule=datamodule)
    return trainer


@pytest.mark.parametrize("workers", [0, 2])
def test_a_training_replaces_and_a_validation_skips(workers, tmp_path, capsys) -> None:
    module = Seen()
    # The first sample is read before there are workers, to see what samples look like.
    options: dict[str, Any] = {"num_workers": workers}
    if workers:
        options["executor"] = "workers"
    datamodule = data(train=Numbers((0, 21)), val=Numbers((0, 1, 40)), **options)
    trainer = fit(module, datamodule, tmp_path)
    assert [len(batch) for batch in module.seen] == [8] * 16
    guard = SampleGuard("replace", 5, range(64))
    for epoch in range(2):
        read = sorted(i for batch in module.seen[8 * epoch :][:8] for i in batch)
        stand_ins = [guard.stand_in(index, epoch) for index in (0, 21)]
        assert read == sorted([*(set(range(64)) - {0, 21}), *stand_ins])
    assert [len(batch) for batch in module.validated] == [6, 8, 8, 8, 8, 7, 8, 8] * 2
    log_dir = Path(str(trainer.log_dir))
    lines = [json.loads(line) for line in (log_dir / "bad_samples.jsonl").read_text().splitlines()]
    assert len(lines) == 2 * (2 + 3)
    logged = (log_dir / "metrics.csv").read_text()
    assert "data_faults/samples" in logged
    assert "data_faults/deaths" not in logged
    printed = " ".join(capsys.readouterr().out.split())
    assert "bad samples were replaced or left out 10 times" in printed
    assert trainer.callbacks[0].report is not None  # type: ignore[attr-defined]


def test_a_training_goes_on_over_a_sample_that_kills_its_worker(tmp_path, capfd) -> None:
    module = Seen()
    datamodule = data(train=Numbers((), deadly=30), executor="workers", num_workers=2)
    trainer = fit(module, datamodule, tmp_path)
    read = sorted(i for batch in module.seen for i in batch)
    guard = SampleGuard("replace", 5, range(64))
    stand_ins = [guard.stand_in(30, epoch) for epoch in range(2)]
    assert read == sorted([*(set(range(64)) - {30}), *(set(range(64)) - {30}), *stand_ins])
    assert trainer.train_dataloader.quarantine == [30]
    assert "workers died and were replaced" in " ".join(capfd.readouterr().out.split())


IMAGES = np.random.default_rng(0).integers(0, 256, (64, 24, 24, 3), np.uint8)


class Pictures(Dataset):
    """Some samples cannot be read, some are of a dtype that the pipeline refuses."""

    def __init__(self, bad: tuple[int, ...]) -> None:
        self.bad = bad

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> tuple[np.ndarray, int]:
        if index in self.bad[::2]:
            raise ValueError("cannot be read")
        image = IMAGES[index]
        return image.astype(np.complex64) if index in self.bad[1::2] else image, index


def test_what_waits_for_the_device_is_replaced_with_the_same_pixels(tmp_path) -> None:
    bad, seen = (3, 17, 50, 51), []
    steps = [albumentations.HorizontalFlip(), albumentations.RandomBrightnessContrast(p=0.9)]
    augment = albumentations.Compose([*steps, albumentations.ToTensorV2()])
    for place, options in (
        ("cpu", {"executor": "inline"}),
        ("gpu", {"executor": "inline"}),
        ("gpu", {"executor": "workers", "num_workers": 2}),
    ):
        module = Seen(lambda batch: [batch[1].clone(), batch[0].float()])
        given = LoaderOptions(on_bad_sample="replace", **options)
        datamodule = FastDataModule.from_datasets(
            Pictures(bad), batch_size=8, options=given, seed=5, augment=augment, augment_on=place
        )
        fit(module, datamodule, tmp_path, epochs=1)
        seen.append([torch.cat(parts) for parts in zip(*module.seen, strict=True)])
    guard = SampleGuard("replace", 5, range(64))
    stand_ins = [guard.stand_in(index, 0) for index in bad]
    assert sorted(seen[0][0].tolist()) == sorted([*(set(range(64)) - set(bad)), *stand_ins])
    for indices, images in seen[1:]:
        assert torch.equal(indices, seen[0][0])
        assert (images - seen[0][1]).abs().max() <= 1  # a brightness may be rounded otherwise


def test_a_training_names_what_it_cannot_read_by_default(tmp_path) -> None:
    datamodule = FastDataModule.from_datasets(Numbers((21,)), num_workers=2, batch_size=8)
    with pytest.raises(ValueError, match="sample 21 of the dataset"):
        fit(Seen(), datamodule, tmp_path)
    assert not list(tmp_path.rglob("bad_samples*"))


def test_a_loader_that_chooses_for_itself_reads_over_bad_samples() -> None:
    from lightning_fastdata import FastDataLoader

    loader = FastDataLoader(
        Numbers((0, 1, 2)), batch_size=8, executor="auto", on_bad_sample="replace"
    )
    with pytest.warns(FastDataWarning, match="is bad"):
        assert [len(batch) for batch in loader] == [8] * 8


def test_ranks_list_bad_samples_apart_and_none_may_skip(tmp_path) -> None:
    state = SimpleNamespace(fn=None)
    trainer: Any = SimpleNamespace(
        world_size=2, global_rank=1, default_root_dir=str(tmp_path), state=state
    )
    asked = BadSamples("replace", 0.1)
    rule = bad_samples_of(asked, trainer, str)
    assert (rule.policy, rule.budget_share) == ("replace", 0.1)
    assert rule.quarantine_file == str(tmp_path / "bad_samples-rank1.jsonl")
    with pytest.raises(OptionsError, match="wait for it for ever"):
        bad_samples_of("skip", trainer, str)
    trainer.world_size = 1
    rule = bad_samples_of("skip", trainer, str)
    assert rule.quarantine_file == str(tmp_path / "bad_samples.jsonl")
