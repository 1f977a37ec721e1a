"""What cores of other machines would bring is said before anybody rents them, by public names.

Samples are read on a virtual machine (:mod:`rig.machine`): what they and steps take is exact.
"""

from __future__ import annotations

import pytest
import torch
from lightning.pytorch import LightningModule, Trainer
from rig.machine import sleep
from rig.virtual_crew import on_machine
from torch.utils.data import Dataset, IterableDataset

from lightning_fastdata import DataThroughputCallback, FastDataLoader, FastDataModule, plan_remote
from lightning_fastdata.errors import OptionsError


@pytest.fixture(autouse=True)
def machine():
    with on_machine() as virtual:
        yield virtual


class Waits(Dataset):
    """Samples of 10 kB that take 4 ms, and no CPU."""

    def __len__(self) -> int:
        return 400

    def __getitem__(self, index: int) -> torch.Tensor:
        sleep(0.004)
        return torch.full((10_000,), index % 200, dtype=torch.uint8)


class Model(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)

    def training_step(self, batch, batch_idx):
        sleep(0.02)
        return self.layer(torch.ones(1)).sum()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.1)


def test_a_recorded_run_tells_what_the_training_takes(tmp_path) -> None:
    module = FastDataModule.from_datasets(Waits(), batch_size=8)
    watch = DataThroughputCallback()
    trainer = Trainer(
        max_steps=30, accelerator="cpu", logger=False, enable_progress_bar=False,
        enable_checkpointing=False, default_root_dir=tmp_path, callbacks=[watch],
    )  # fmt: skip
    trainer.fit(Model(), datamodule=module)
    path = watch.report.write_json(tmp_path / "report.json")
    loader = FastDataLoader(Waits(), 8, num_workers=2)
    plans = [plan_remote(loader, run, batches=6, cores=[1, 8]) for run in (watch.report, path)]
    for plan in plans:
        assert plan.training_ms == pytest.approx(20, rel=0.01)
        assert plan.training_ms == plans[0].training_ms
        assert plan.make_ms == pytest.approx(8 * 4, rel=0.05)
        assert 80_000 <= plan.batch_bytes < 90_000
        one, eight = plan.rows
        assert eight.step_ms <= one.step_ms
        assert one.step_ms == pytest.approx(32, rel=0.1)
        assert eight.step_ms == pytest.approx(20, rel=0.1)
    assert "ms a step" in plans[0].text()


def test_a_slow_link_bounds_the_step_and_faster_cores_shorten_what_computes() -> None:
    loader = FastDataLoader(Waits(), 8, num_workers=2)
    slow = plan_remote(loader, mb_per_s=0.5, batches=6, cores=[4, 64])
    assert slow.best.bound == "link"
    assert slow.best.step_ms == pytest.approx(slow.batch_bytes / 500, rel=0.03)
    assert next(iter(loader)).shape == (8, 10_000)  # which is as it was
    loader.close()


class Stream(IterableDataset):
    def __iter__(self):
        return iter(range(100))


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ({"mb_per_s": 0}, "mb_per_s is 0"),
        ({"cores": []}, r"cores is \[\]"),
        ({"cores": [2.5, 0]}, "cores is"),
        ({"step_ms": -1.0}, "step_ms is -1.0"),
        ({"core_speed": float("inf")}, "core_speed is inf"),
        ({"batches": 1}, "batches is 1"),
        ({"step_ms": 1.0, "run": "report.json"}, "give one of them"),
    ],
)
def test_what_is_impossible_is_said_before_anything_is_read(how, message) -> None:
    with pytest.raises(OptionsError, match=message):
        plan_remote(FastDataLoader(Waits(), 8, num_workers=0), **how)


def test_streams_and_short_loaders_are_refused() -> None:
    with pytest.raises(OptionsError, match="which a stream has not"):
        plan_remote(FastDataLoader(Stream(), 8, num_workers=1))
    with pytest.raises(OptionsError, match="gave 2 batches"):
        plan_remote(FastDataLoader(torch.utils.data.Subset(Waits(), range(8)), 4, num_workers=1))
