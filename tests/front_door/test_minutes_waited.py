"""The report of a training says how long its devices waited for data, on all ranks."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from front_door.timed import Model
from torch.utils.data import DataLoader, Dataset
from trainers import quiet_trainer

from lightning_fastdata import DataThroughputCallback
from lightning_fastdata.insight.report import read_report

ROWS, BATCH, EPOCHS, READ_S = 16, 4, 3, 0.75


class Rows(Dataset):
    """Rows that take a while, of two ranks on the second one."""

    def __init__(self, patient):
        self.patient = patient

    def __len__(self):
        return ROWS

    def __getitem__(self, index):
        ranks = torch.distributed.is_initialized()
        self.patient.advance(round(READ_S * 1e9) * (torch.distributed.get_rank() if ranks else 1))
        return torch.full((4,), float(index))


def fit(tmp_path, patient, *, validates=False, **options):
    trainer = quiet_trainer(
        tmp_path,
        max_epochs=EPOCHS,
        num_sanity_val_steps=0,
        callbacks=[DataThroughputCallback()],
        **options,
    )
    loader = DataLoader(Rows(patient), BATCH)
    trainer.fit(Model(), loader, loader if validates else None)
    return read_report(Path(tmp_path) / "report.json")


@pytest.mark.parametrize("validates", [False, True])
def test_all_waits_count_but_for_the_start_of_the_first_epoch(tmp_path, patient, capsys, validates):
    report = fit(tmp_path, patient, validates=validates)
    read = EPOCHS * ROWS * (1 + validates) - BATCH
    assert report["device_minutes_waited"] == pytest.approx(read * READ_S / 60)
    assert "minutes waited" not in capsys.readouterr().out  # a CPU may be what loads


def test_all_ranks_wait_for_the_slow_one(tmp_path, patient):
    report = fit(tmp_path, patient, strategy="ddp_fork", devices=2)
    mine, slow = report["ranks"]
    assert (mine["stall_ms"], slow["stall_ms"]) == (0, pytest.approx(BATCH * READ_S * 1e3))
    # Each rank reads half of the rows: one first batch and one warm one in an epoch.
    assert report["device_minutes_waited"] == pytest.approx(2 * EPOCHS * BATCH * READ_S / 60)
