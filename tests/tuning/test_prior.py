"""What a training came to is where the next one begins; it is measured, and never trusted."""

from __future__ import annotations

import json
import os
import stat
import time

import pytest
import torch
from torch.utils.data import Dataset

from lightning_fastdata import FastDataLoader
from lightning_fastdata.tuning.prior import Prior, cache_folder
from lightning_fastdata.tuning.tuner import Tuner

ABOUT = {"dataset": "abc", "batch_size": 8}


class Waiting(Dataset):
    def __init__(self, length=8 * 160, wait_s=0.004):
        self.length, self.wait_s = length, wait_s

    def __len__(self):
        return self.length

    def __getitem__(self, index):
        time.sleep(self.wait_s)
        return torch.tensor(index)


def test_a_number_comes_back_for_the_same_facts_only(tmp_path):
    Prior(ABOUT, tmp_path).keep(6)
    assert Prior(ABOUT, tmp_path).recall() == 6
    assert Prior(dict(reversed(ABOUT.items())), tmp_path).recall() == 6
    assert Prior({**ABOUT, "batch_size": 16}, tmp_path).recall() is None


def test_what_was_kept_of_quite_another_plan_is_of_other_samples(tmp_path):
    Prior(ABOUT, tmp_path, planned=8).keep(6)
    recalled = [Prior(ABOUT, tmp_path, planned=n).recall() for n in (0, 3, 4, 8, 16, 40)]
    assert recalled == [None, None, 6, 6, 6, None]


def test_the_file_is_private_and_replaced_as_a_whole(tmp_path):
    prior = Prior(ABOUT, tmp_path / "new")
    prior.keep(6)
    assert stat.S_IMODE((tmp_path / "new").stat().st_mode) == 0o700
    target = tmp_path / "other"
    target.write_text("mine")
    prior.path.unlink()
    prior.path.symlink_to(target)
    prior.keep(8)
    assert target.read_text() == "mine"
    assert prior.recall() == 8


@pytest.mark.parametrize(
    "text",
    ["", "{", "[]", "3", '{"workers": -1}', '{"workers": true}', '{"workers": "6"}', "[" * 9000],
)
def test_what_is_no_number_of_workers_is_left_alone(tmp_path, text):
    prior = Prior(ABOUT, tmp_path)
    prior.path.write_text(text)
    assert prior.recall() is None


def test_a_month_is_long_enough(tmp_path):
    prior = Prior(ABOUT, tmp_path)
    prior.keep(6)
    old = time.time() - 31 * 24 * 3600
    os.utime(prior.path, (old, old))
    assert prior.recall() is None


def test_a_folder_that_cannot_be_written_keeps_nothing_and_says_nothing(tmp_path):
    file = tmp_path / "file"
    file.write_text("")
    prior = Prior(ABOUT, file)
    prior.keep(6)
    assert prior.recall() is None


def test_the_folder_is_where_the_environment_says(monkeypatch, tmp_path):
    assert str(cache_folder()) == os.environ["LIGHTNING_FASTDATA_CACHE"]
    monkeypatch.delenv("LIGHTNING_FASTDATA_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_folder() == tmp_path / "lightning_fastdata"


@pytest.mark.parametrize(("kept", "begins"), [(6, 6), (0, None), (99, None)])
def test_an_impossible_number_is_not_begun_with(tmp_path, kept, begins):
    prior = Prior(ABOUT, tmp_path)
    prior.keep(kept)
    assert Tuner(most_workers=16, cpus=2.0, prior=prior).workers == begins


def trained(**how):
    loader = FastDataLoader(Waiting(**how), 8, executor="auto")
    begun = loader.num_workers
    for _ in loader:
        time.sleep(0.004)
    loader.close()
    return begun, loader.num_workers, loader.tune.moves


def test_the_next_training_begins_where_an_earlier_one_ended_and_says_so(caplog):
    first = FastDataLoader(Waiting(), 8, executor="auto")
    assert first.tune.workers is None
    first.tune._prior.keep(3)
    assert json.loads(first.tune._prior.path.read_text())["planned"] == first.num_workers
    with caplog.at_level("INFO", logger="lightning_fastdata.tuning"):
        again = FastDataLoader(Waiting(), 8, executor="auto")
    assert again.num_workers == again.tune.workers == 3
    assert "num_workers begins at 3, to which an earlier training came" in caplog.text
    assert FastDataLoader(Waiting(), 16, executor="auto").tune.workers is None
    assert FastDataLoader(Waiting(100), 8, executor="auto").tune.workers is None


@pytest.mark.flaky(reruns=2)
def test_a_number_that_is_wrong_by_now_is_found_out_and_replaced():
    loader = FastDataLoader(Waiting(), 8, executor="auto")
    loader.tune._prior.keep(1)
    again, came_to, moves = trained()
    assert again == 1
    assert moves[0].after > 1
    assert came_to > 1
    text = loader.tune._prior.path.read_text()
    assert json.loads(text)["workers"] == [m.after for m in moves if m.outcome == "kept"][-1]
