"""What waiting for data costs a training: the report, the summary, the page, and loggers agree."""

from __future__ import annotations

import csv
import json
import time
from pathlib import Path

import pytest
import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.loggers import CSVLogger
from torch.utils.data import DataLoader, Dataset

from lightning_fastdata import DataThroughputCallback
from lightning_fastdata.errors import OptionsError
from lightning_fastdata.insight.report.recorded import read_report

ROWS, SLEEP_S, BATCH, EPOCHS = 16, 0.004, 4, 3
SLOW_S = 0.03  # for which no machine with other work keeps the other rank waiting
PRICE, WATTS = 2.5, 400.0


class Rows(Dataset):
    def __len__(self):
        return ROWS

    def __getitem__(self, index):
        time.sleep(SLEEP_S)
        return torch.full((4,), float(index))


class Model(LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(4, 1)

    def training_step(self, batch, _):
        return self.layer(batch).mean()

    def validation_step(self, batch, _):
        pass

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.01)


def fit(tmp_path, callback, *, val=None, **options):
    trainer = Trainer(
        accelerator="cpu",
        max_epochs=EPOCHS,
        logger=CSVLogger(tmp_path, version=0),
        default_root_dir=tmp_path,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        num_sanity_val_steps=0,
        callbacks=[callback],
        **options,
    )
    trainer.fit(Model(), DataLoader(Rows(), BATCH), val)
    return read_report(Path(trainer.log_dir) / "report.json")


def rows_of(tmp_path):
    with next(tmp_path.rglob("metrics.csv")).open() as file:
        return list(csv.DictReader(file))


def test_a_price_and_a_power_tell_what_the_waits_cost(tmp_path, capsys):
    callback = DataThroughputCallback(
        scalars="all", figures=False, cost_per_gpu_hour=PRICE, gpu_watts=WATTS
    )
    began = time.monotonic()
    report = fit(tmp_path, callback, val=DataLoader(Rows(), BATCH))
    took_s = time.monotonic() - began
    cost = callback.report.waiting_cost
    assert report["waiting_cost"] == json.loads(json.dumps(cost.as_dict()))
    # All samples were slept for in the training process; first batches of the first epoch are
    # part of its start, and so are not counted.
    slept_s = SLEEP_S * (2 * EPOCHS * ROWS - BATCH)
    assert slept_s <= cost.so_far.device_hours * 3600 <= took_s
    assert cost.per_day.device_hours == pytest.approx(24 * cost.idle_share)
    assert cost.per_day.money == pytest.approx(24 * cost.idle_share * PRICE)
    assert cost.per_day.energy_kwh == pytest.approx(24 * cost.idle_share * WATTS / 1e3)
    assert cost.per_epoch.device_hours * EPOCHS == pytest.approx(cost.so_far.device_hours)
    assert (cost.device, cost.devices) == ("cpu", 1)
    out = capsys.readouterr().out
    assert " cost  waiting for data takes " in out
    assert "GPU hour" not in out
    page = next(tmp_path.rglob("report.html")).read_text()
    assert "What waiting for data costs" in page
    logged = [row for row in rows_of(tmp_path) if row.get("data_cost/money_per_day")]
    assert len(logged) == EPOCHS
    for row in logged:
        hours = float(row["data_cost/device_hours_per_day"])
        assert float(row["data_cost/money_per_day"]) == pytest.approx(hours * PRICE)
        assert float(row["data_cost/energy_kwh_per_day"]) == pytest.approx(hours * WATTS / 1e3)
    totals = [float(row["data_cost/device_hours_so_far"]) for row in logged]
    assert totals == sorted(totals)
    assert totals[-1] <= cost.so_far.device_hours


def test_cpus_are_not_called_gpus_and_cost_nothing_unasked(tmp_path, capsys):
    callback = DataThroughputCallback(scalars="all", figures=False)
    report = fit(tmp_path, callback)
    assert report["waiting_cost"] is None
    assert not any("data_cost" in name for row in rows_of(tmp_path) for name in row)
    assert " cost " not in capsys.readouterr().out


def test_a_cluster_says_its_prices_in_the_environment(tmp_path, monkeypatch):
    monkeypatch.setenv("LIGHTNING_FASTDATA_COST_PER_GPU_HOUR", "3")
    callback = DataThroughputCallback(summary=False)
    report = fit(tmp_path, callback, limit_train_batches=2)
    cost = report["waiting_cost"]
    assert cost["rates"] == {"cost_per_gpu_hour": 3.0, "gpu_watts": None}
    # Two batches of four are an epoch.
    assert cost["per_epoch"]["device_hours"] * EPOCHS == pytest.approx(
        cost["so_far"]["device_hours"]
    )
    monkeypatch.setenv("LIGHTNING_FASTDATA_COST_PER_GPU_HOUR", "three")
    with pytest.raises(OptionsError, match="LIGHTNING_FASTDATA_COST_PER_GPU_HOUR is 'three'"):
        DataThroughputCallback()


@pytest.mark.parametrize("bad", [{"cost_per_gpu_hour": -1}, {"gpu_watts": "400"}])
def test_bad_rates_are_refused_at_once(bad):
    with pytest.raises(OptionsError, match="numbers above 0"):
        DataThroughputCallback(**bad)


class SlowOnOneRank(Rows):
    """Rows that the second rank reads slowly."""

    def __getitem__(self, index):
        time.sleep(SLOW_S * torch.distributed.get_rank())
        return torch.full((4,), float(index))


@pytest.mark.flaky(reruns=2)
def test_all_ranks_wait_for_the_slow_one(tmp_path):
    callback = DataThroughputCallback(summary=False, figures=False, cost_per_gpu_hour=PRICE)
    trainer = Trainer(
        accelerator="cpu", strategy="ddp_fork", devices=2, max_epochs=2, callbacks=[callback],
        logger=False, default_root_dir=tmp_path, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(Model(), DataLoader(SlowOnOneRank(), 2))
    report = read_report(tmp_path / "report.json")
    cost = report["waiting_cost"]
    assert cost["devices"] == 2
    assert cost["per_day"]["device_hours"] == pytest.approx(48 * cost["idle_share"])
    # Warm steps: three of four batches of two samples in each of two epochs.
    slept_s = SLOW_S * 2 * 3 * 2
    assert 2 * slept_s <= cost["so_far"]["device_hours"] * 3600 <= 2 * report["wall"]["total_s"]
    mine, slow = report["ranks"]
    assert mine["stall_ms"] < slow["stall_ms"]
