"""The photographs of the demo: real, cut the same each time, complete or not there."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

import numpy as np
import pytest
from PIL import Image
from torchvision.datasets import ImageFolder

from demo.photos import (
    PHOTOGRAPHS,
    Cut,
    cut_photographs,
)
from lightning_fastdata.errors import DatasetError

if TYPE_CHECKING:
    from pathlib import Path

FEW = Cut(train_per_class=3, val_per_class=2)


@pytest.fixture(scope="module")
def few(tmp_path_factory) -> Path:
    return cut_photographs(tmp_path_factory.mktemp("data") / "few", FEW)


def digests(folder: Path) -> dict[str, str]:
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.rglob("*.jpg"))
    }


@pytest.mark.parametrize("stage", ["train", "val"])
def test_image_folder_reads_every_class(few, stage):
    folder = ImageFolder(few / stage)
    assert folder.classes == sorted(PHOTOGRAPHS)
    per_class = np.bincount([label for _, label in folder.samples])
    assert per_class.tolist() == [{"train": 3, "val": 2}[stage]] * len(PHOTOGRAPHS)


def test_files_are_colour_jpegs_of_the_promised_size(few):
    for path in few.rglob("*.jpg"):
        with Image.open(path) as image:
            assert image.format == "JPEG"
            assert image.mode == "RGB"
            assert 300 <= max(image.size) <= 500
            sampling = [(horizontal, vertical) for _, horizontal, vertical, _ in image.layer]
            assert sampling == [(2, 2), (1, 1), (1, 1)], "not 4:2:0"


def test_a_complete_folder_is_reused_and_another_cut_replaces_it(tmp_path):
    folder = cut_photographs(tmp_path / "photos", FEW)
    first = {path: path.stat().st_mtime_ns for path in folder.rglob("*.jpg")}
    cut_photographs(folder, FEW)
    assert {path: path.stat().st_mtime_ns for path in folder.rglob("*.jpg")} == first
    cut_photographs(folder, Cut(train_per_class=1, val_per_class=1))
    assert len(list(folder.rglob("*.jpg"))) == 2 * len(PHOTOGRAPHS)
    assert [path.name for path in tmp_path.iterdir()] == ["photos"]


def test_a_folder_with_other_files_is_left_alone(tmp_path):
    (tmp_path / "thesis.txt").write_text("mine")
    with pytest.raises(DatasetError, match=r"other files"):
        cut_photographs(tmp_path, FEW)
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.txt"]


def test_no_training_crop_is_a_validation_crop(few):
    per_file = digests(few)
    assert len(set(per_file.values())) == len(per_file)
