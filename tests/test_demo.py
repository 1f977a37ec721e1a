"""The demo trains on real photographs and shows what loading costs, before and after."""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path

import pytest
import torch

from demo.photos import PHOTOGRAPHS, Cut, cut_photographs
from demo.training import (
    IMAGE_PX,
    AugmentedPhotos,
    PhotoClassifier,
    run_demo,
    train_augmentation,
    val_augmentation,
)

sys.path.append(str(Path(__file__).parents[1] / "benchmarks"))


@pytest.fixture(scope="module")
def demo(tmp_path_factory):
    folder = tmp_path_factory.mktemp("demo")
    said: list[str] = []
    reports = run_demo(folder / "photos", folder / "logs", epochs=2, crops=24, say=said.append)
    return folder, "\n".join(said), reports


@pytest.mark.slow
def test_all_trainings_are_measured_by_the_same_clock(demo):
    _, _, reports = demo
    assert len(reports) == 3
    for report in reports.values():
        train = report.stages[0]
        assert train.stage == "train"
        assert train.samples_per_s > 0
        assert 0 <= train.stall_share <= 1
        assert train.steps == 2 * math.ceil(24 * len(PHOTOGRAPHS) / 64)


@pytest.mark.slow
def test_what_is_printed_compares_and_names_the_tensorboard_folder(demo):
    folder, said, _ = demo
    assert "the same training" in said
    assert "validation accuracy" in said
    assert f"tensorboard --logdir {folder / 'logs'}" in said
    assert "num_workers" in said


@pytest.mark.slow
def test_each_training_leaves_a_report_and_tensorboard_files(demo):
    folder, _, reports = demo
    for name in ("usual", "fastdata", "folder"):
        [report] = (folder / "logs" / name).rglob("report.json")
        assert set(json.loads(report.read_text())["stages"]) >= {"train"}
        assert list(report.parent.glob("events.out.tfevents.*"))
    [report] = (folder / "logs" / "fastdata").rglob("report.json")
    assert json.loads(report.read_text()) == json.loads(
        json.dumps(reports["FastDataModule"].as_dict())
    )


@pytest.mark.parametrize("make", [train_augmentation, val_augmentation])
def test_the_usual_way_gives_what_the_network_takes(tmp_path, make):
    photos = cut_photographs(tmp_path / "photos", Cut(train_per_class=1, val_per_class=1))
    image, label = AugmentedPhotos(photos / "val", make())[3]
    assert image.shape == (3, IMAGE_PX, IMAGE_PX)
    assert image.dtype == torch.float32
    assert label == 3
    assert PhotoClassifier()(image[None]).shape == (1, len(PHOTOGRAPHS))
