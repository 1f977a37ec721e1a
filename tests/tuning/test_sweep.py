"""``fastdata tune``: a loader read with one number of workers after the other."""

from __future__ import annotations

import time

import pytest
import torch
import yaml
from torch.utils.data import Dataset

from lightning_fastdata import FastDataLoader
from lightning_fastdata.cli import main
from lightning_fastdata.errors import OptionsError
from lightning_fastdata.tuning.sweep import Sweep, sweep


class Waiting(Dataset):
    def __init__(self, length=64):
        self.length = length

    def __len__(self):
        return self.length

    def __getitem__(self, index):
        time.sleep(0.02)
        return torch.tensor(index)


MODULE = """
import time
import torch
from torch.utils.data import Dataset
from lightning_fastdata import FastDataModule

class Waiting(Dataset):
    def __len__(self): return 256
    def __getitem__(self, index):
        return torch.tensor(index)

class Data(FastDataModule):
    def train_dataset(self): return {several}
"""


def made(rates, planned=2, batch_size=8):
    return Sweep(
        name="Data", planned=planned, batches_per_s=rates, batch_size=batch_size, step_ms=0.0
    )


def test_the_smallest_of_nearly_equal_numbers_is_the_best():
    found = made({0: 10.0, 1: 19.0, 2: 30.0, 4: 39.5, 8: 40.0})
    assert found.best == 4
    assert found.plan_share == 0.75
    assert yaml.safe_load(found.yaml()) == {"data": {"options": {"num_workers": 4}}}
    lines = found.text().splitlines()
    assert lines[4].endswith("planned")
    assert lines[4].split()[:3] == ["2", "30.0", "240"]
    assert lines[5].endswith("best")
    assert "reaches 75% of the fastest" in found.text()


def test_samples_are_left_out_where_the_batch_size_is_not_known():
    assert made({0: 10.0, 2: 12.0}, batch_size=None).text().splitlines()[2].split()[:2] == [
        "0",
        "10.0",
    ]


@pytest.mark.flaky(reruns=2)
def test_workers_that_wait_are_found_to_pay_and_the_loader_stays_as_it_was():
    loader = FastDataLoader(Waiting(512), 8, executor="workers", num_workers=1)
    told = []
    # 160 ms of sleep a batch: four workers are faster than one on a machine that is busy, too.
    found = sweep(
        loader, name="Waiting", batch_size=8, numbers=(1, 4), seconds=0.3, tell=told.append
    )
    assert list(found.batches_per_s) == [1, 4]
    assert found.batches_per_s[4] > found.batches_per_s[1] > 0
    assert found.best == 4
    assert found.planned == 1
    assert len(told) == 2
    assert loader.num_workers == 1
    assert loader._iterator is None  # it was not read itself


@pytest.mark.flaky(reruns=2)
def test_numbers_that_are_no_faster_end_the_sweep():
    loader = FastDataLoader([1] * 64, 8, executor="inline")
    found = sweep(loader, name="ones", batch_size=8, seconds=0.2, step_ms=5.0)
    assert max(found.batches_per_s) < 64


def test_a_loader_without_batches_is_an_error():
    loader = FastDataLoader([1, 2], 8, drop_last=True, executor="inline")
    with pytest.raises(OptionsError, match="no batch"):
        sweep(loader, name="none", batch_size=8, seconds=0.05)


@pytest.mark.parametrize(("several", "count"), [("Waiting()", 1), ("[Waiting(), Waiting()]", 2)])
def test_the_command_prints_a_table_and_draws_a_curve(
    tmp_path, capsys, monkeypatch, several, count
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text(MODULE.format(several=several))
    main(["tune", "mine.py:Data", "--step_ms", "4", "--seconds", "0.1", "--out", "curve.png"])
    out = capsys.readouterr().out
    assert out.count("planned") >= count
    assert out.count("num_workers:") == count
    names = ["curve.png"] if count == 1 else ["curve-0.png", "curve-1.png"]
    assert all((tmp_path / name).stat().st_size > 5000 for name in names)


@pytest.mark.parametrize("wrong", [["--step_ms", "-1"], ["--seconds", "0"]])
def test_impossible_times_are_refused(tmp_path, monkeypatch, wrong):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text(MODULE.format(several="Waiting()"))
    with pytest.raises(SystemExit, match="step_ms is"):
        main(["tune", "mine.py:Data", *wrong])
